"""Masks and other arrays in folders of their own, and samples that a data set does not have."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import memload
from memload.building.sources.arrays import ArrayFile
from memload.building.sources.beside import FilesBeside
from memload.building.sources.classes import PinnedClasses
from memload.building.sources.dataset import DatasetSource
from memload.building.sources.opening import open_source
from memload.building.sources.record import Column, Record
from memload.errors import BuildError, NothingNewError, SourceError

NAMES = ["cat/1.jpg", "cat/2.JPG", "dog/1.png", "dog/v1.0.jpg"]


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder of four images of two classes."""
    for number, name in enumerate(NAMES):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 6), (number * 10, 0, 0)).save(path, quality=95)
    return tmp_path / "images"


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def names_of(source: Any, name: str = "mask") -> list[str | None]:
    """The files of all samples, relative to their folder."""
    files = [source[index].arrays.get(name) for index in range(len(source))]
    return [None if file is None else "/".join(file.parts[-2:]) for file in files]


MASKS = ["cat/1.png", "cat/2.tif", "dog/1.npy", "dog/v1.0.PNG"]


def test_masks_are_found_by_the_names_of_images(images: Path, tmp_path: Path) -> None:
    masks = touch(tmp_path / "masks", *MASKS)
    source = open_source(images, masks=masks)
    assert source.arrays == {"mask": "mask"}
    assert source[1].arrays == {"mask": masks / "cat/2.tif"}
    assert names_of(source) == MASKS
    assert names_of(open_source(images, masks={"parts": str(masks)}), "parts") == MASKS


@pytest.mark.parametrize("kind", ["directory", "table", "tar", "zip", "parquet"])
def test_files_lie_beside_any_source(containers: Any, tmp_path: Path, kind: str) -> None:
    containers.directory()
    options = {"tar": {"labels": False}}.get(kind, {})
    source = getattr(containers, kind)(**options)
    names = [name.replace(".jpg", ".png") for name in containers.pictures]
    masks = touch(tmp_path / "m", *names[1:])
    opened = open_source(str(source), masks={"mask": masks})
    assert names_of(opened) == [None, *names[1:]]
    assert (opened[3].columns, opened[3].image) == (
        open_source(source)[3].columns,
        open_source(source)[3].image,
    )
    flat = touch(tmp_path / "flat", *[name.rpartition("/")[2] for name in names])
    assert names_of(open_source(source, masks=flat)) == [f"flat/{n[4:]}" for n in names]


def test_the_command_stores_masks_and_arrays_from_folders(
    images: Path, tmp_path: Path, command: Callable[..., Any]
) -> None:
    ids = np.arange(48, dtype=np.uint8).reshape(6, 8)
    (images / "dog/1.png").rename(images / "dog/3.png")
    for name in ("cat/1.png", "cat/2.png", "dog/3.png"):
        Image.fromarray(ids).save(touch(tmp_path / "masks", name) / name)
    for name in ("1", "2", "3", "v1.0"):
        np.save(touch(tmp_path / "vectors", f"{name}.npy") / f"{name}.npy", np.float16([2.5, 3.5]))
    folders = ("--masks", "segm=masks", "--array", "v=vectors")
    filling = ("--missing-masks", "fill", "--mask-fill", "9", "--fit", "pad")
    done = command("build", images, "out.bin", *folders, *filling, "-s", "8", "-j", "1")
    assert done.status == 0, done.error
    assert "4 samples of 8×8×3 uint8, segm 8×8 uint8, v 2 float16" in done.output
    assert "1 of 4 samples has no segm (now 9 everywhere): dog/v1.0.jpg" in done.error
    stored = memload.MemmapDataset(tmp_path / "out.bin")
    np.testing.assert_array_equal(np.asarray(stored[0][2])[1:7], ids)
    assert (np.asarray(stored[0][2])[[0, 7]] == 9).all()
    assert (np.asarray(stored[3][2]) == 9).all()
    assert np.asarray(stored[1][3]).tolist() == [2.5, 3.5]


def test_masks_and_arrays_have_names(images: Path, tmp_path: Path) -> None:
    masks = touch(tmp_path / "masks", *MASKS)
    depth = touch(tmp_path / "depth", "cat/1.jpg", "cat/2.npy", "dog/1.jpg", "dog/v1.0.webp")
    source = open_source(images, masks={"a": masks}, arrays={"depth": f"{depth}/"})
    assert source.arrays == {"a": "mask", "depth": "array"}
    assert source[0].arrays == {"a": masks / "cat/1.png", "depth": depth / "cat/1.jpg"}
    assert source.without_image(0).arrays == source[0].arrays
    assert open_source(source, arrays={"more": depth}).arrays == {**source.arrays, "more": "array"}


def test_two_arrays_of_one_name_are_an_error(images: Path, tmp_path: Path) -> None:
    masks = touch(tmp_path / "masks", *MASKS)
    with pytest.raises(ValueError, match="'m' is given twice"):
        open_source(images, masks={"m": masks}, arrays={"m": masks})
    with pytest.raises(ValueError, match="'mask' is given twice"):
        open_source(open_source(images, masks=masks), masks=masks)


def test_a_flat_folder_fits_by_the_last_part(images: Path, tmp_path: Path) -> None:
    (images / "dog/1.png").unlink()
    masks = touch(tmp_path / "masks", "1.png", "2.png", "v1.0.png")
    assert [file and file[6:] for file in names_of(open_source(images, masks=masks))] == [
        "1.png",
        "2.png",
        "v1.0.png",
    ]


def test_folders_above_the_images_do_not_matter(images: Path, tmp_path: Path) -> None:
    masks = touch(tmp_path / "masks", *[f"train/{name}" for name in MASKS])
    assert names_of(open_source(images, masks=masks)) == MASKS
    table = tmp_path / "table.csv"
    table.write_text("path\n" + "".join(f"images/{name}\n" for name in NAMES))
    assert names_of(open_source(table, masks=masks / "train")) == MASKS
    assert names_of(open_source(table, masks=touch(tmp_path / "exact", *MASKS))) == MASKS


def test_files_in_folders_of_other_names_are_those_of_other_images(
    images: Path, tmp_path: Path
) -> None:
    masks = touch(tmp_path / "masks", "ant/1.png", "ant/2.png")
    with pytest.raises(SourceError, match=r"cat/1.jpg, and the first file is ant/1.png"):
        open_source(images, masks=masks)


def test_what_fits_with_its_folders_is_not_taken_by_another(images: Path, tmp_path: Path) -> None:
    source = open_source(images, masks=touch(tmp_path / "masks", "cat/1.png"))
    assert names_of(source) == ["cat/1.png", None, None, None]


def test_files_of_several_folders_do_not_belong_to_the_images_of_one(tmp_path: Path) -> None:
    images = touch(tmp_path / "images/video1", "1.jpg", "2.jpg")
    masks = touch(tmp_path / "masks", "video1/1.png", "video2/2.png")
    with pytest.raises(SourceError, match=r"1.png and video2/2.png in different folders, but the"):
        open_source(images, masks=masks)
    assert names_of(open_source(images, masks=masks / "video1")) == ["video1/1.png", None]


def test_a_file_of_two_images_is_an_error(images: Path, tmp_path: Path) -> None:
    masks = touch(tmp_path / "masks", "1.png", "2.png", "v1.0.png")
    with pytest.raises(SourceError, match=r"1.png would belong to two .* cat/1.jpg and dog/1.png"):
        open_source(images, masks=masks)


def test_the_extension_of_a_file_never_makes_it_the_right_one(images: Path, tmp_path: Path) -> None:
    masks = touch(tmp_path / "masks", "dog/1.npy", "dog/1.png")
    with pytest.raises(SourceError, match=r"two files of the image dog/1.png: .*Keep one"):
        open_source(images, masks=masks)


@pytest.mark.parametrize("second", ["cat/1.npy", "cat/1.TIF"])
def test_two_files_of_an_image_are_an_error(images: Path, tmp_path: Path, second: str) -> None:
    masks = touch(tmp_path / "masks", *MASKS, second)
    with pytest.raises(SourceError, match=r"two files of the image cat/1.jpg: .* and .*Keep one"):
        open_source(images, masks=masks)
    touch(images, "x/y.jpg")  # files that belong to no image do not matter
    (images / "cat/1.jpg").unlink()
    assert open_source(images, masks=masks)[0].arrays == {"mask": masks / "cat/2.tif"}


def test_needless_files_are_noted(images: Path, tmp_path: Path) -> None:
    masks = touch(tmp_path / "masks", "cat/1.png", "cat/9.png", "dog/9.png", "a.txt", ".hidden.png")
    source = open_source(images, masks=masks)
    assert source.notes == [
        f"mask: 2 of 3 files in {masks} belong to no image: cat/9.png, dog/9.png",
        f"mask: skipped 1 other file in {masks}: a.txt",
    ]


def test_a_wrong_folder_is_an_error_at_once(images: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"nope does not exist. Check the path"):
        open_source(images, masks=tmp_path / "nope")
    with pytest.raises(SourceError, match=r"no file of any image. .* cat/1.jpg, .* x/y.png"):
        open_source(images, masks=touch(tmp_path / "others", "x/y.png"))
    with pytest.raises(SourceError, match=r"no files for 'mask' .*: only 1.jpg"):
        open_source(images, masks=touch(tmp_path / "jpeg", "1.jpg"))
    with pytest.raises(SourceError, match=r"within the images, so that masks/1.png would be"):
        open_source(images, masks=touch(images / "masks", "1.png"))
    with pytest.raises(SourceError, match=r"masks.npy is a file, .* 'memload join'"):
        open_source(images, masks=touch(tmp_path, "masks.npy") / "masks.npy")
    with pytest.raises(SourceError, match=r"s3://bucket/m: masks .* from this machine. Copy"):
        open_source(images, masks="s3://bucket/m")


def test_entries_of_a_source_without_any_are_told(images: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"folder of images, which has no .*={'mask': 'folder/'}"):
        open_source(images, masks=["mask"])
    with pytest.raises(ValueError, match=r"^masks: the source is opened already.* ImageFolder"):
        open_source(memload.ImageFolder(images), masks=["mask"])


def test_masks_may_lie_among_images_of_other_extensions(images: Path) -> None:
    (images / "dog/1.png").unlink()
    touch(images, "cat/1.png", "cat/2.png", "dog/v1.0.png")
    source = open_source(images, extensions=[".jpg"], masks=images)
    assert names_of(source) == ["cat/1.png", "cat/2.png", "dog/v1.0.png"]


def test_samples_by_number_say_how_to_name_them(tmp_path: Path) -> None:
    samples = [np.zeros((4, 4, 3), np.uint8)] * 3
    masks = touch(tmp_path / "masks", "a.png", "b.png", "c.png")
    with pytest.raises(SourceError, match=r"DatasetSource\(dataset, key=\[…\]\)"):
        open_source(samples, masks=masks)
    named = memload.DatasetSource(samples, key=["a", "b", "c.1"])
    assert open_source(named, masks=masks)[1].arrays == {"mask": masks / "b.png"}


def test_an_unfinished_build_goes_on_only_with_the_same_folders(
    images: Path, tmp_path: Path
) -> None:
    folders = [touch(tmp_path / name, *MASKS) for name in "ab"]
    identities = [open_source(images, masks=folder).identity for folder in folders]
    assert identities[0] != identities[1]
    assert identities[0] == open_source(images, masks=folders[0]).identity


# ------------------------------------------------------------------------- what a data set lacks


def test_only_new_samples_are_built(images: Path, tmp_path: Path) -> None:
    kept = [images / name for name in NAMES]
    content = kept[1].read_bytes()
    kept[1].unlink()
    memload.build(images, tmp_path / "out.bin", size=8, progress=False)
    kept[1].write_bytes(content)
    touch(images / "emu", "1.jpg")
    Image.new("RGB", (8, 6)).save(images / "emu/1.jpg")
    source = open_source(images, new_to=tmp_path / "out.bin")
    assert list(source.keys) == ["cat/2.JPG", "emu/1.jpg"]
    assert source.notes == [f"3 of 5 samples are left out: {tmp_path / 'out.bin'} has them"]
    assert [source[i].columns["label"] for i in range(2)] == [0, 2]
    report = memload.build(source, tmp_path / "more.bin", size=8, progress=False)
    assert (report.samples, report.classes) == (2, ("cat", "dog", "emu"))
    assert list(memload.MemmapDataset(tmp_path / "more.bin").keys) == list(source.keys)


def test_names_of_another_kind_than_those_of_the_data_set_are_noted(
    images: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.bin"
    memload.build(images, out, size=8, num_workers=0, progress=False)
    source = open_source(images / "cat", new_to=out)
    assert len(source) == 2
    assert source.notes[-1].startswith(
        f"0 of 2 samples are left out: {out} has none of their names. The first is '1.jpg', and "
        f"that of {out} is 'cat/1.jpg'."
    )


def test_new_samples_are_built_in_the_size_and_mode_of_the_data_set(
    images: Path, tmp_path: Path
) -> None:
    out, more = tmp_path / "out.bin", tmp_path / "more.bin"
    memload.build(images, out, size=(4, 6), mode="L", fit="pad", num_workers=0, progress=False)
    Image.new("RGB", (8, 6)).save(images / "cat/new.jpg")
    report = memload.build(images, more, new_to=out, num_workers=0, progress=False)
    assert report.shape == (4, 6, 1)
    assert f"other settings than those of {out}: fit pad there and crop here" in report.notes
    report = memload.build(
        images, more, new_to=out, size=8, mode="RGB", fit="pad", overwrite=True, progress=False
    )
    assert report.shape == (8, 8, 3)
    assert not any("other settings" in note for note in report.notes)


def test_other_arrays_of_new_samples_are_noted(images: Path, tmp_path: Path) -> None:
    out, masks = tmp_path / "out.bin", tmp_path / "masks"
    for name in (*NAMES, "cat/new.jpg"):
        path = (masks / name).with_suffix(".png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 6)).save(path)
    memload.build(images, out, size=8, masks=masks, num_workers=0, progress=False)
    Image.new("RGB", (8, 6)).save(images / "cat/new.jpg")
    note = (
        f"other masks and arrays than those of {out}: mask there and none here (--masks, --array)"
    )
    assert open_source(images, new_to=out).notes[-1] == note
    source = open_source(images, masks=masks, new_to=out)
    assert not any("other masks" in note for note in source.notes)


def test_new_samples_with_new_classes_are_concatenated(images: Path, tmp_path: Path) -> None:
    out, more = tmp_path / "out.bin", tmp_path / "more.bin"
    memload.build(images, out, size=8, num_workers=0, progress=False)
    for name in ("bee", "cat"):
        (images / name).mkdir(exist_ok=True)
        Image.new("RGB", (8, 6)).save(images / name / "new.jpg")
    with pytest.raises(SourceError, match="bee"):  # the classes are taken from it if asked for
        memload.build(images, more, new_to=out, classes=out, progress=False)
    memload.build(images, more, new_to=out, num_workers=0, progress=False)
    memload.concat(tmp_path / "all.idx", out, more)
    dataset = memload.MemmapDataset(tmp_path / "all.idx")
    named = {
        key: dataset.classes[label] for key, label in zip(dataset.keys, dataset.labels, strict=True)
    }
    assert named == {key: key.partition("/")[0] for key in [*NAMES, "bee/new.jpg", "cat/new.jpg"]}


def test_what_is_new_does_not_replace_what_is_old(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.bin"
    memload.build(images, out, size=8, num_workers=0, progress=False)
    with pytest.raises(ValueError, match="is the output itself"):
        memload.build(images, out, new_to=out.with_suffix(".idx"), overwrite=True)


def test_pixels_that_a_build_reads_or_adds_to_are_not_replaced(
    images: Path, tmp_path: Path
) -> None:
    out, more = tmp_path / "out.bin", tmp_path / "more.bin"
    memload.build(images, out, size=8, num_workers=0, progress=False)
    touch(images / "emu", "1.jpg")
    Image.new("RGB", (8, 6)).save(images / "emu/1.jpg")
    memload.build(images, more, new_to=out, num_workers=0, progress=False)
    memload.concat(tmp_path / "out.idx", out, more, overwrite=True)
    Image.new("RGB", (8, 6)).save(images / "emu/2.jpg")
    message = r"more.bin belongs to out.idx, which is read from, and cannot be replaced"
    with pytest.raises(BuildError, match=message):
        memload.build(images, more, new_to=out, overwrite=True, num_workers=0, progress=False)
    for source in (tmp_path / "out.idx", more):
        with pytest.raises(BuildError, match=r"more.bin belongs to .*.idx, which is read from"):
            memload.build(source, more, size=4, overwrite=True, num_workers=0, progress=False)
    assert memload.verify(out).ok
    memload.build(images, tmp_path / "more2.bin", new_to=out, num_workers=0, progress=False)
    memload.concat(tmp_path / "out.idx", out, tmp_path / "more2.bin", overwrite=True)
    assert len(memload.MemmapDataset(out)) == 6


def test_nothing_new_is_an_error_of_its_own(images: Path, tmp_path: Path) -> None:
    memload.build(images, tmp_path / "out.bin", size=8, progress=False)
    with pytest.raises(NothingNewError, match="has all 4 samples of the source"):
        open_source(images, new_to=tmp_path / "out.bin")


def test_nothing_new_is_no_failure_of_the_command(
    images: Path, tmp_path: Path, command: Callable[..., Any]
) -> None:
    command("build", images, "out.bin", "-s", "8")
    done = command("build", images, "more.bin", "--new-to", "out.bin", "-s", "8")
    assert (done.status, done.output) == (0, "")
    assert done.error == (
        "Nothing is new: out.bin has all 4 samples of the source, so nothing was built.\n"
    )
    assert not list(tmp_path.glob("more.*"))


def test_what_is_new_keeps_groups_batches_and_classes(tmp_path: Path) -> None:
    class Grouped:
        """Ten samples in groups of four, which are read together."""

        classes, notes = ("a", "b"), ()
        keys, group_starts = tuple("0123456789"), (0, 4, 8, 10)

        def __init__(self) -> None:
            self.schema = {"label": Column("<i8")}

        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> Record:
            image = np.full((2, 2, 3), index, np.uint8)
            return Record(self.keys[index], image, {"label": index % 2})

        def __getitems__(self, indices: Any) -> list[Record]:
            return [self[index] for index in indices]

    first = memload.DatasetSource([np.zeros((2, 2, 3), np.uint8)] * 5, key=[*"01245"])
    memload.build(first, tmp_path / "out.bin", size=2, progress=False)
    source = PinnedClasses(open_source(Grouped(), new_to=tmp_path / "out.bin"), ["b", "a"])
    assert list(source.keys) == ["3", "6", "7", "8", "9"]
    assert source.group_starts == [0, 1, 3, 5]
    assert [record.columns["label"] for record in source.__getitems__([0, 1])] == [0, 1]
    assert [record.image[0, 0, 0] for record in source.__getitems__([4, 1])] == [9, 6]


# --------------------------------------------------------------------------------- through a build


@pytest.fixture
def built(images: Path, tmp_path: Path) -> Path:
    """A data set with a mask, an array, points and boxes, built from entries of samples."""

    def sample(index: int) -> dict[str, Any]:
        rng = np.random.default_rng(index)
        return {
            "image": rng.integers(0, 255, (8, 12, 3), np.uint8),
            "mask": rng.integers(0, 9, (8, 12), np.uint8),
            "depth": rng.normal(size=(2, 3)),
            "marks": [[index, 2.0]],
            "boxes": [[1, 2, 5, 8]] * index,
            "label": index % 2,
        }

    memload.build(
        [sample(index) for index in range(5)],
        tmp_path / "out.bin",
        size=(8, 12),
        masks=["mask"],
        arrays=["depth"],
        points=["marks"],
        boxes={"boxes": 4},
        num_workers=0,
        progress=False,
    )
    return tmp_path / "out.bin"


def test_a_data_set_of_memloads_brings_all_its_arrays(built: Path, tmp_path: Path) -> None:
    memload.build(built, tmp_path / "small.bin", size=(4, 6), num_workers=0, progress=False)
    before, after = memload.MemmapDataset(built), memload.MemmapDataset(tmp_path / "small.bin")
    assert [(array.name, array.kind) for array in after.index.arrays] == [
        ("image", "image"),
        ("mask", "mask"),
        ("depth", "array"),
    ]
    assert (after.index.points, after.index.boxes) == (("marks",), ("boxes",))
    rows, columns = 2 * np.arange(4) + 1, 2 * np.arange(6) + 1
    for name in ("mask", "depth"):
        for index in range(5):
            old, new = (_value(dataset, index, name) for dataset in (before, after))
            np.testing.assert_array_equal(
                new, old[np.ix_(rows, columns)] if name == "mask" else old
            )
    np.testing.assert_array_equal(after.columns["boxes"], before.columns["boxes"] / 2)
    np.testing.assert_array_equal(after.columns["marks"], (before.columns["marks"] + 0.5) / 2 - 0.5)


def _value(dataset: Any, index: int, name: str) -> np.ndarray:
    names = ["image", "label", *[a.name for a in dataset.index.arrays if a.name != "image"]]
    return np.asarray(dataset[index][names.index(name)])


def test_a_changed_row_of_a_mask_is_rejected(built: Path) -> None:
    mask = built.with_suffix(".mask.bin")
    content = bytearray(mask.read_bytes())
    content[4096 + 96 * 2 + 5] ^= 1
    mask.write_bytes(content)
    source = open_source(built)
    with pytest.raises(memload.DecodeError, match=r"row 2 of .* has changed"):
        source[2]
    assert source[1].arrays["mask"].shape == (8, 12)


@pytest.mark.parametrize("output", ["pngs", "x.tar"])
def test_what_is_exported_is_built_again_with_all_arrays_and_columns(
    built: Path, command: Callable[..., Any], output: str
) -> None:
    report = memload.export(built, built.parent / output, progress=False)
    again = shlex.split(report.notes[-1].partition("memload ")[2])
    done = command(*again)
    assert done.status == 0, done.error
    before, after = (memload.Index.open(built.parent / name) for name in ("out.bin", "again.bin"))
    assert list(after.keys) == list(before.keys)
    assert [(a.name, a.kind, a.descr, a.shape) for a in after.arrays] == [
        (a.name, a.kind, a.descr, a.shape) for a in before.arrays
    ]
    assert (after.points, after.boxes) == (before.points, before.boxes)
    assert after.columns.keys() == before.columns.keys()
    for name, values in before.columns.items():
        np.testing.assert_array_equal(after.columns[name], values)
        assert after.columns[name].dtype == values.dtype
    for array in before.arrays:
        end = ".bin" if array.name == "image" else f".{array.name}.bin"
        assert (built.parent / f"again{end}").read_bytes() == (
            built.parent / f"out{end}"
        ).read_bytes()


def test_files_do_not_belong_to_samples_that_are_only_numbered(tmp_path: Path) -> None:
    Image.new("L", (4, 4)).save(tmp_path / "0.png")
    images = [np.zeros((4, 4, 3), np.uint8)] * 2
    np.save(tmp_path / "x.npy", np.stack(images))
    for source in (images, DatasetSource(images), ArrayFile(tmp_path / "x.npy")):
        with pytest.raises(SourceError, match=r"these have only numbers. Name them"):
            open_source(source, masks=tmp_path)
    assert FilesBeside(DatasetSource(images)).arrays == {}
    named = FilesBeside(DatasetSource(images, key=["0", "1"]), masks={"mask": tmp_path})
    assert list(named[0].arrays) == ["mask"]
