"""`memload.build`: what comes out, what it refuses before it begins, and what it replaces."""

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import memload

SIZE = 16
ROW = SIZE * SIZE * 3


def files(folder):
    """The bytes of all that belongs to an output."""
    return {path.name: path.read_bytes() for path in folder.glob("out*") if path.is_file()}


@pytest.fixture
def spoiled(folder):
    """The folder of pictures, with three that cannot be used."""
    (folder / "ant" / "bad.jpg").write_bytes(b"no image")
    (folder / "bee" / "empty.png").write_bytes(b"")
    (folder / "cat" / "cut.jpg").write_bytes((folder / "cat" / "02.jpg").read_bytes()[:200])
    return folder


def build(source, folder, **options):
    """Build ``out.bin`` at 16×16, in shards of six rows, however many pictures are rejected."""
    defaults = {"size": SIZE, "num_workers": 0, "shard_size": 4096 + 6 * ROW, "max_rejects": "100%"}
    options = defaults | options
    return memload.build(source, folder / "out.bin", **options)


# What comes out


def test_samples_stand_in_the_order_of_the_source_with_their_own_pixels(folder, tmp_path):
    build(folder, tmp_path, fit="squash", num_workers=2)
    dataset = memload.MemmapDataset(tmp_path / "out.bin")
    assert list(dataset.keys) == list(memload.open_source(folder).keys)
    for (image, label), key in zip(dataset, dataset.keys, strict=True):
        with Image.open(folder / key) as picture:
            direct = np.asarray(picture.resize((SIZE, SIZE), Image.Resampling.BILINEAR))
        assert np.array_equal(image.permute(1, 2, 0).numpy(), direct)
        assert dataset.classes[label] == key.split("/")[0]


def test_statistics_are_those_of_numpy(spoiled, tmp_path):
    build(spoiled, tmp_path)
    dataset = memload.MemmapDataset(tmp_path / "out.bin")
    found = dataset.index.statistics
    pixels = dataset.gather(range(len(dataset))).numpy() / 255.0
    assert found["mean"] == pytest.approx(pixels.mean(axis=(0, 1, 2)), abs=1e-12)
    assert found["std"] == pytest.approx(pixels.std(axis=(0, 1, 2)), abs=1e-12)
    assert found["class_counts"] == [4, 4, 4]
    sizes = []
    for key in dataset.keys:
        with Image.open(spoiled / key) as picture:
            sizes.append(picture.size)
    widths, heights = zip(*sizes, strict=True)
    assert found["source_width"] == [min(widths), max(widths)]
    assert found["source_height"] == [min(heights), max(heights)]


@pytest.mark.parametrize(
    ("shard_size", "rows"),
    [
        (4096 + ROW, [1] * 12),
        (4096 + 6 * ROW - 1, [5, 5, 2]),
        (4096 + 12 * ROW, [12]),
        (None, [12]),
    ],
)
def test_shards_hold_as_many_rows_as_fit(folder, tmp_path, shard_size, rows):
    report = build(folder, tmp_path, shard_size=shard_size)
    dataset = memload.MemmapDataset(tmp_path / "out.bin")
    assert [shard.rows for shard in dataset.index.image.shards] == rows
    written = sorted(tmp_path.glob("*.bin"))
    assert len(written) == len(rows)
    assert (
        report.bytes == sum(path.stat().st_size for path in written) == 4096 * len(rows) + 12 * ROW
    )
    together = np.concatenate([np.load(path, mmap_mode="r") for path in written])
    assert np.array_equal(together, dataset.gather(range(12)).numpy())
    assert memload.verify(tmp_path / "out.bin").ok


def test_rejected_pictures_are_listed_and_counted(spoiled, tmp_path, ledger):
    report = build(spoiled, tmp_path)
    assert list(ledger()) == ["ant/bad.jpg", "bee/empty.png", "cat/cut.jpg"]
    assert all(ledger().values())
    assert "3 rejected" in str(report)
    assert "out.rejects.csv" in str(report)
    facts = memload.info(tmp_path / "out.bin")
    assert (facts["samples"], facts["rows"], facts["rejected"]) == (12, 15, 3)
    assert facts["build"]["records"] == 15
    assert memload.verify(tmp_path / "out.bin").ok


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_first_bad_picture_stops_a_build_that_shall_raise(spoiled, tmp_path, num_workers):
    with pytest.raises(memload.DecodeError) as caught:
        build(spoiled, tmp_path, num_workers=num_workers, max_rejects=0)
    assert caught.value.key in ("ant/bad.jpg", "bee/empty.png", "cat/cut.jpg")
    assert caught.value.reason
    with pytest.raises(memload.MissingError):
        memload.MemmapDataset(tmp_path / "out.bin")
    assert build(spoiled, tmp_path).rejected == 3  # goes on, and skips


@pytest.mark.parametrize("num_workers", [0, 1])
def test_nothing_but_bad_pictures_is_an_error_and_leaves_the_old_data_set(
    folder, tmp_path, num_workers
):
    build(folder, tmp_path)
    before = files(tmp_path)
    for path in folder.glob("*/*.jpg"):
        path.write_bytes(b"x")
    message = r"12 of 12 samples cannot be used: 12 × not an image in .*such as ant/00\.jpg"
    with pytest.raises(memload.BuildError, match=message):
        build(folder, tmp_path, num_workers=num_workers, overwrite=True)
    assert files(tmp_path) == before
    assert not (tmp_path / "out.building").exists()


class Samples:
    """A data set of three samples; ``change`` makes the second one."""

    def __init__(self, change):
        self.change = change

    def __len__(self):
        return 3

    def __getitem__(self, number):
        pixels = np.full((4, 4, 3), number, np.uint8)
        return self.change(pixels) if number == 1 else pixels, number


@pytest.mark.parametrize("mode", ["RGB", "array"])
def test_a_masked_array_does_not_lose_its_mask_in_silence(tmp_path, mode, ledger):
    source = Samples(lambda pixels: np.ma.masked_array(pixels, mask=pixels > 0))
    build(source, tmp_path, mode=mode, size=4)
    assert ledger().keys() == {"1"}
    assert "masked" in ledger()["1"]


# Before it begins


def test_the_size_of_the_result_is_compared_with_the_free_space_before_it_begins(
    folder, tmp_path, monkeypatch, caplog
):
    needed, usage = 4096 + 12 * ROW, shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed - 1))
    with pytest.raises(memload.BuildError, match=r"disk is too small: 13\.3 kB are needed"):
        build(folder, tmp_path, shard_size=None)
    assert list(tmp_path.iterdir()) == [folder]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed))
    with caplog.at_level(logging.INFO, "memload"):
        build(folder, tmp_path, shard_size=None)
    assert "12 rows of 16×16×3 uint8, 13.3 kB" in caplog.messages[0]
    assert "free on the disk" in caplog.messages[0]


def test_the_repr_of_a_report_has_its_notes(folder, tmp_path):
    (folder / "ant" / "a&b.txt").write_text("not an image")
    report = build(folder, tmp_path, size=8)
    assert repr(report).splitlines() == [str(report), *(f"note: {n}" for n in report.notes)]
    assert "a&b.txt" in repr(report)


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch])
@pytest.mark.parametrize("name", ["out.bin", "out.idx", "out.rejects.csv"])
def test_what_has_the_name_of_the_output_is_left_alone(folder, tmp_path, name, make):
    make(tmp_path / name)
    with pytest.raises(memload.BuildError, match=rf"{name} exists already.*--overwrite"):
        build(folder, tmp_path, shard_size=None)
    assert [path.name for path in tmp_path.glob("out*")] == [name]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": (8, 8, 3)}, "is neither a side nor"),
        ({"size": 8.0}, "is neither a side nor"),
        ({"size": (0, 65536)}, "size must be a height and a width from 1 to 65535"),
        ({"timeout": 0}, "timeout: 0 is not above 0"),
        ({"timeout": float("nan")}, "timeout: nan is not above 0"),
        ({"shard_size": 4096 + ROW - 1, "size": SIZE}, "a shard with one row of 'image' has 4,864"),
        ({"max_pixels": 0}, "max_pixels must be 1 or more, not 0"),
        ({"fit": "stretch"}, "fit must be one of crop, squash, pad, not 'stretch'"),
        ({"interpolation": "linear"}, "interpolation must be one of nearest, .*, not 'linear'"),
        ({"mode": "RGBA"}, "mode must be one of RGB, L, I;16, array, not 'RGBA'"),
        ({"decoder": "cv2"}, "decoder must be one of pillow, jpeg4py, not 'cv2'"),
        ({"fill": "blackish"}, "fill: 'blackish' is not a color"),
        ({"background": (1, 2, 3)}, r"background: \(1, 2, 3\) is not a color"),
        ({"output": "out.npy"}, r"must end in '\.bin'"),
    ],
)
def test_wrong_arguments_are_errors_before_anything_is_written(folder, tmp_path, options, message):
    arguments = {"source": folder, "output": "out.bin"} | options
    arguments["output"] = tmp_path / arguments["output"]
    with pytest.raises(ValueError, match=message):
        memload.build(**arguments)
    assert list(tmp_path.iterdir()) == [folder]


# What it replaces


def test_shards_and_ledger_of_an_older_build_are_removed(spoiled, tmp_path):
    build(spoiled, tmp_path, shard_size=4096 + ROW)
    assert len(files(tmp_path)) == 15 + 2
    for name in ("ant/bad.jpg", "bee/empty.png", "cat/cut.jpg"):
        (spoiled / name).unlink()
    (tmp_path / "out-precious.bin").write_bytes(b"not of a build")
    build(spoiled, tmp_path, shard_size=None, overwrite=True)
    assert sorted(files(tmp_path)) == ["out-precious.bin", "out.bin", "out.idx"]


# Troubles that are not of the pictures


def test_the_closing_line_counts_the_workers_that_there_were(folder, tmp_path):
    report = build(folder, tmp_path, num_workers=100_000)
    assert report.num_workers == 12
    assert " by 12 workers" in str(report)


# Files of other data sets


def test_shards_that_another_index_names_are_kept(folder, tmp_path):
    build(folder, tmp_path)
    shutil.copy(tmp_path / "out.idx", tmp_path / "copy.idx")
    build(folder, tmp_path, shard_size=None, overwrite=True)
    assert memload.verify(tmp_path / "copy.idx").ok
    memload.MemmapDataset(tmp_path / "copy.idx").subset([1, 2]).save(tmp_path / "train.idx")
    memload.build(folder, tmp_path / "train.bin", size=8, overwrite=True)
    assert memload.verify(tmp_path / "copy.idx").ok
    assert len(memload.MemmapDataset(tmp_path / "train.bin")) == 12


@pytest.mark.parametrize("name", ["out-00001-of-00002.bin", "out.mask.bin"])
def test_a_file_of_another_data_set_is_not_replaced(folder, tmp_path, name):
    mask = np.zeros((16, 16), np.uint8)
    samples = [({"image": np.zeros((16, 16, 3), np.uint8), "mask": mask})] * 12
    build(memload.DatasetSource(samples, masks=["mask"]), tmp_path)
    if name == "out.mask.bin":
        build(
            memload.DatasetSource(samples, masks=["mask"]),
            tmp_path,
            shard_size=None,
            overwrite=True,
        )
    before = files(tmp_path)
    with pytest.raises(memload.BuildError, match=r"belongs to the data set out\.idx"):
        memload.build(folder, tmp_path / name, size=8, overwrite=True)
    assert files(tmp_path) == before


def test_a_data_set_does_not_take_the_place_of_another_ones_shard(folder, tmp_path):
    memload.build(folder, tmp_path / "out-00000-of-00002.bin", size=8)
    with pytest.raises(memload.BuildError, match="belongs to the data set out-00000-of-00002"):
        build(folder, tmp_path, overwrite=True)
    assert memload.verify(tmp_path / "out-00000-of-00002.idx").ok
