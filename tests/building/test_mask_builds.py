"""Builds with masks and other arrays: their files, what is rejected, resuming and replacing."""

import json
import shutil
import zlib
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

import memload
from memload.sources.columns import Column
from memload.sources.contents import Contents
from memload.sources.samples import Extra, Sample, Source
from memload.storage.index import Array, Index, Shard
from memload.storage.keys import Keys

CLASSES = ("ant", "bee")
ROW = 6 * 6


def files(place):
    return {path.name: path.read_bytes() for path in place.iterdir() if path.is_file()}


def picture(number):
    pixels = np.random.default_rng(number).integers(0, 256, (8, 9 + number, 3))
    return Image.fromarray(pixels.astype(np.uint8))


def ids(number):
    return np.random.default_rng(100 + number).integers(0, 21, (8, 9 + number)).astype(np.uint8)


def depth(number):
    return np.random.default_rng(200 + number).standard_normal((2, 3)).astype(np.float32)


@pytest.fixture
def folder(tmp_path):
    """Ten pictures in ``images``, and files of their names in ``masks`` and ``depth``."""
    for number in range(10):
        name = f"{CLASSES[number % 2]}/{number}"
        for part in ("images", "masks", "depth"):
            (tmp_path / part / name).parent.mkdir(parents=True, exist_ok=True)
        exif = Image.Exif()
        exif[0x0112] = 1 + number % 8
        picture(number).save(tmp_path / "images" / f"{name}.png", exif=exif)
        Image.fromarray(ids(number)).save(tmp_path / "masks" / f"{name}.png")
        np.save(tmp_path / "depth" / f"{name}.npy", depth(number))
    return tmp_path


def options_for(folder):
    return {
        "masks": folder / "masks",
        "arrays": {"depth": folder / "depth"},
        "size": 6,
        "num_workers": 0,
        "max_rejects": "100%",
        "shard_size": 4096 + 4 * ROW * 3,
    }


def build(folder, place=None, **options):
    place = folder if place is None else place
    return memload.build(folder / "images", place / "out.bin", **options_for(folder) | options)


class Samples(Source):
    """A source of records whose arrays are given."""

    count = 5

    def __init__(
        self,
        kinds,
        arrays,
        schema=None,
        columns=lambda number: {},
        act=lambda number: None,
    ):
        super().__init__(
            keys=Keys.of([str(number) for number in range(self.count)]),
            images=Contents(),
            schema=schema or {},
            extras={name: Extra(kind, None) for name, kind in kinds.items()},
        )
        self.get_arrays, self.get_columns, self.act = arrays, columns, act

    def image(self, number):
        return np.full((6, 6, 3), number, np.uint8)

    def __getitem__(self, number):
        self.act(number)
        columns, arrays = self.get_columns(number), self.get_arrays(number)
        return Sample(str(number), self.image(number), columns, arrays=arrays)


def mask_of(number):
    return np.full((6, 6), number, np.uint8)


def build_samples(source, place, **options):
    defaults = {"size": 6, "num_workers": 0, "max_rejects": "100%"}
    return memload.build(source, place / "out.bin", **defaults | options)


def rows(place, name):
    array = Index.open(place / "out.bin").array(name)
    return np.concatenate([np.load(place / shard.file) for shard in array.shards])


# What comes out


def test_masks_and_arrays_are_files_beside_the_images(folder):
    report = build(folder, shard_size=None)
    masks = np.load(folder / "out.mask.bin", mmap_mode="r")
    assert (masks.shape, masks.dtype) == ((10, 6, 6), np.uint8)
    index = Index.open(folder / "out.bin")
    assert [(array.name, array.kind) for array in index.arrays] == [
        ("image", "image"),
        ("mask", "mask"),
        ("depth", "array"),
    ]
    depths = np.load(folder / "out.depth.bin")
    for row, key in enumerate(index.keys):
        assert np.array_equal(depths[row], depth(int(key[4])))
    assert {path.name for path in folder.glob("out*")} == {
        *("out.bin", "out.idx", "out.mask.bin", "out.depth.bin")
    }
    assert memload.verify(folder / "out.bin").ok
    assert report.bytes == sum(path.stat().st_size for path in folder.glob("out*.bin"))
    assert [array._asdict() for array in report.arrays] == [
        {"name": "mask", "kind": "mask", "shape": (6, 6), "dtype": "uint8"},
        {"name": "depth", "kind": "array", "shape": (2, 3), "dtype": "float32"},
    ]
    assert "mask 6×6 uint8" in str(report)
    assert json.loads(json.dumps(report.as_dict()))["arrays"][0]["name"] == "mask"


def test_shards_of_all_arrays_have_the_same_rows_and_none_is_larger_than_the_shard_size(
    folder,
):
    build(folder, shard_size=4096 + 3 * ROW * 3)
    names = {path.name for path in folder.glob("out*.bin")}
    assert names == {
        f"out{name}-0000{number}-of-00004.bin"
        for name in ("", ".mask", ".depth")
        for number in range(4)
    }
    assert memload.verify(folder / "out.bin").ok
    with pytest.raises(ValueError, match="shard_size: 4,100 bytes are too few"):
        build(folder, shard_size=4100, overwrite=True)


# What is rejected, and what the first sample decides


def test_samples_whose_mask_does_not_fit_are_rejected_with_the_reason(folder, ledger):
    masks = folder / "masks"
    (masks / "bee" / "1.png").unlink()
    Image.new("L", (3, 3)).save(masks / "ant" / "2.png")
    Image.new("RGB", (12, 8)).save(masks / "bee" / "3.png")
    (masks / "ant" / "4.png").write_bytes(b"junk")
    np.save(folder / "depth" / "bee" / "5.npy", np.zeros((3, 2), np.float32))
    report = build(folder)
    assert report.samples == 5
    assert [note for note in report.notes if "no mask" in note] == [
        "1 of 10 samples have no mask (left out): bee/1.png"
    ]
    found = ledger()
    assert "mask 'mask': it is missing. Add it, or say --missing-masks 0" in found["bee/1.png"]
    assert "its size is 3×3, but its image has 11×8 in its file" in found["ant/2.png"]
    assert "palette or gray PNG" in found["bee/3.png"]
    assert "not an image in a supported format" in found["ant/4.png"]
    assert "(3, 2) of float32, but the first one is (2, 3) of float32" in found["bee/5.png"]


def test_missing_masks_can_be_filled_and_are_counted(folder):
    for name in ("ant/0", "bee/7"):
        (folder / "masks" / f"{name}.png").unlink()
    report = build(folder, missing_masks=9)
    assert report.rejected == 0
    assert [note for note in report.notes if "no mask" in note] == [
        "2 of 10 samples have no mask (now 9 everywhere): ant/0.png, bee/7.png"
    ]
    index = Index.open(folder / "out.bin")
    masks = rows(folder, "mask")
    for row, key in enumerate(index.keys):
        assert (masks[row] == 9).all() == (key in ("ant/0.png", "bee/7.png"))
    assert index.build["settings"]["missing_masks"] == 9


def test_the_first_usable_sample_decides_the_type(tmp_path, ledger):
    def arrays(number):
        if number == 0:
            return {}  # it lacks its mask
        if number == 1:
            return {"mask": np.zeros((9, 9), np.uint8)}  # of another size
        return {"mask": mask_of(number).astype(np.uint16 if number == 2 else np.uint8) + number}

    for num_workers in (0, 1):
        build_samples(Samples({"mask": "mask"}, arrays), tmp_path, num_workers=num_workers)
        assert rows(tmp_path, "mask").dtype == np.uint16
        assert [*ledger()] == ["0", "1"]
        for path in tmp_path.glob("out*"):
            path.unlink()


def test_a_mask_that_comes_late_is_found(tmp_path):
    class Late(Samples):
        count = 150

    mask = np.full((6, 6), 300, np.uint16)
    source = Late({"mask": "mask"}, lambda n: {"mask": mask} if n == 149 else {})
    report = build_samples(source, tmp_path, missing_masks=255)
    assert (report.samples, report.arrays[0].dtype) == (150, "uint16")


def test_no_mask_at_all_is_an_error_unless_they_are_filled(tmp_path):
    source = Samples({"mask": "mask"}, lambda number: {"mask": None})
    with pytest.raises(
        memload.SourceError, match=r"No sample has the mask 'mask'.*--missing-masks 0"
    ):
        build_samples(source, tmp_path)
    report = build_samples(source, tmp_path, missing_masks=255)
    assert (report.samples, rows(tmp_path, "mask").min()) == (5, 255)


# Boxes


def test_boxes_are_stored_as_such(tmp_path):
    class Large(Samples):
        def image(self, number):
            return np.full((12, 12, 3), number, np.uint8)

    boxes = [[2, 4, 6, 12], [0, 0, np.nan, 0], [-9, -9, 0, 0]]
    source = Large(
        {},
        lambda number: {},
        {"boxes": Column("<f4", (3, 4), boxes=True)},
        lambda n: {"boxes": boxes},
    )
    build_samples(source, tmp_path)
    index = Index.open(tmp_path / "out.bin")
    assert index.boxes == ("boxes",)
    found = index.columns["boxes"]
    assert found.dtype == np.float32
    assert found[4, 0].tolist() == [1, 2, 3, 6]
    assert np.isnan(found[:, 1:]).all()


# What is refused


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"missing_masks": 65536}, ValueError, "missing_masks: 65536 is not an id from 0 to 65"),
        ({"missing_masks": -1}, ValueError, "missing_masks: -1 is not an id from 0 to 65,535"),
        (
            {"missing_masks": 256},
            ValueError,
            "missing_masks: 256 does not fit the 8 bits of 'mask'",
        ),
        ({"masks": None, "missing_masks": 0}, ValueError, "missing_masks: 0 has no effect"),
        ({"masks": "nowhere"}, memload.SourceError, "nowhere cannot be read"),
    ],
)
def test_wrong_arguments_are_errors_before_anything_is_written(folder, options, error, match):
    with pytest.raises(error, match=match):
        build(folder, **options)
    assert not [*folder.glob("out*")]


def build_boxes(boxes, place, **options):
    """Build pictures of 6×6 pixels, stored as 100×100, with ``boxes``, and return the notes on boxes."""
    schema = {"boxes": Column("<f4", np.shape(boxes), boxes=True)}
    source = Samples({}, lambda number: {}, schema, lambda number: {"boxes": boxes})
    report = build_samples(source, place, size=100, **options)
    return [note for note in report.notes if "boxes" in note]


def test_boxes_that_look_like_fractions_are_noted(tmp_path):
    fractions = [[0.25, 0.25, 0.35, 0.3], [0, 0, 0.05, 0.1]]
    note = build_boxes(fractions, tmp_path, fit="squash")[-1]
    assert note.startswith("no box of 'boxes' is larger than 2% of its picture")
    pixels = [*fractions, [0, 0, 6, 4]]
    assert build_boxes(pixels, tmp_path, fit="squash", overwrite=True) == []


def test_the_free_space_is_compared_with_all_files(folder, monkeypatch):
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10_000))
    with pytest.raises(memload.BuildError, match="14 kB are needed"):
        build(folder, shard_size=None)


# Going on


class Stop(BaseException):
    pass


def interrupted(number):
    if number == 4:
        raise Stop


def source_of(added=0, boxes=1, dtype=np.uint8, act=lambda number: None):
    return Samples(
        {"mask": "mask"},
        lambda number: {"mask": mask_of(number + added).astype(dtype)},
        {"boxes": Column("<f4", (boxes, 4), boxes=True)},
        lambda number: {"boxes": np.full((boxes, 4), number)},
        act,
    )


def interrupt(place, **options):
    with pytest.raises(Stop):
        build_samples(source_of(act=interrupted), place, **options)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_build_does_not_go_on_with_other_masks(tmp_path, num_workers):
    interrupt(tmp_path)
    with pytest.raises(
        memload.BuildError, match="something else: 0 has other columns, masks or arrays"
    ):
        build_samples(source_of(1), tmp_path, num_workers=num_workers)
    assert build_samples(source_of(0), tmp_path, num_workers=num_workers).samples == 5


def test_what_differs_from_an_unfinished_build_is_said_in_words(tmp_path):
    interrupt(tmp_path)
    with pytest.raises(memload.BuildError) as caught:
        build_samples(
            source_of(0, 20, np.uint16),
            tmp_path,
            fit="pad",
            size=(6, 7),
            mode="L",
            missing_masks=3,
        )
    folder = tmp_path / "out.building"
    assert str(caught.value) == (
        f"{folder} holds an unfinished build of something else: "
        "boxes 'boxes' was 'float32 1×4' and is 'float32 20×4'; fit was 'crop' and is 'pad'; "
        "mask 'mask' was '(6, 6) of uint8' and is '(6, 7) of uint16'; "
        "missing_masks was 'reject' and is 3; mode was 'RGB' and is 'L'; "
        "size was [6, 6] and is [6, 7]. Give the same source and options to "
        "go on with it, or delete that folder to begin anew."
    )


# Replacing


def test_an_array_of_the_user_that_was_joined_is_not_removed(folder):
    build(folder, masks=None, arrays=None, shard_size=None)
    features = np.arange(20.0).reshape(10, 2)
    with (folder / "out.features.bin").open("wb") as file:
        np.save(file, features)
    index = Index.open(folder / "out.bin")
    size = (folder / "out.features.bin").stat().st_size
    shard = Shard("out.features.bin", 10, size)
    array = Array("features", "<f8", (2,), (shard,), "array")
    checksums = np.array([zlib.crc32(row.tobytes()) for row in features], np.uint32)
    arrays, crc32 = (*index.arrays, array), {**index.crc32, "features": checksums}
    replace(index, arrays=arrays, crc32=crc32).write(folder / "out.idx")
    assert memload.verify(folder / "out.bin").ok
    build(folder, arrays=None, overwrite=True)
    assert np.array_equal(np.load(folder / "out.features.bin"), features)


def test_files_of_masks_of_an_older_build_are_removed(folder):
    build(folder, shard_size=4096 + 3 * ROW * 3)
    build(folder, masks=None, arrays=None, shard_size=None, overwrite=True)
    assert {path.name for path in folder.glob("out*")} == {"out.bin", "out.idx"}


# Files of other data sets


def test_files_that_another_index_names_and_those_of_the_user_are_kept(folder):
    build(folder, shard_size=None)
    dataset = memload.MemmapDataset(folder / "out.bin")
    dataset.subset([0]).save(folder / "few.idx")
    build(folder, masks=None, arrays=None, shard_size=3 * 4096, overwrite=True)
    assert (folder / "out.mask.bin").exists()
    (folder / "out.notes.bin").write_bytes(b"mine")
    build(folder, overwrite=True)
    assert (folder / "out.notes.bin").read_bytes() == b"mine"


def test_a_mask_does_not_take_the_place_of_another_data_set(folder):
    memload.build(folder / "images", folder / "out.mask.bin", size=6, num_workers=0)
    before = files(folder)
    with pytest.raises(memload.BuildError, match=r"belongs to the data set out\.mask\.idx"):
        build(folder, overwrite=True, shard_size=None)
    assert files(folder) == before
