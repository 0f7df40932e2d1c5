"""Describe, verify and picture a data set from Python. tests/test_cli.py tests the commands."""

import errno
import functools
import io
import os
import time
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import memload
from memload import inspection
from memload.errors import ChecksumError, FormatError, MissingError
from memload.storage.format import npy_header
from memload.storage.index import Array, Index, Shard
from memload.storage.keys import Keys

Make = Callable[..., Index]
Tamper = Callable[..., Path]


def flip(path: Path, *positions: int) -> None:
    data = bytearray(path.read_bytes())
    for position in positions:
        data[position] ^= 1
    path.write_bytes(data)


# ---- info


def test_info_says_what_is_in_a_data_set(make_dataset: Make, tmp_path: Path) -> None:
    index = make_dataset(
        rows=(3, 2),
        flags=np.array([0, 1, 3, 4, 0], np.uint8),
        columns={"label": np.arange(5) % 3, "eyes": np.zeros((5, 2, 2), np.float32)},
        points=("eyes",),
        build={"rejected": 2},
        statistics={"mean": [0.5]},
    )
    assert memload.info(tmp_path / "made.bin") == {
        "path": str(tmp_path / "made.idx"),
        "format_version": 1,
        "fingerprint": index.fingerprint,
        "samples": 5,
        "rows": 5,
        "rejected": 2,
        "shape": [4, 6, 3],
        "dtype": "uint8",
        "bytes": 2 * 4096 + 5 * 72,
        "shards": ["made-00000-of-00002.bin", "made-00001-of-00002.bin"],
        "columns": {
            "label": {"dtype": "int64", "shape": [5], "points": False},
            "eyes": {"dtype": "float32", "shape": [5, 2, 2], "points": True},
        },
        "classes": ["ant", "bee", "cat"],
        "flags": {"oriented": 2, "fallback": 1, "points_outside": 1},
        "statistics": {"mean": [0.5]},
        "build": {"rejected": 2},
    }


def test_any_file_of_a_data_set_leads_to_its_index(make_dataset: Make, tmp_path: Path) -> None:
    make_dataset(rows=(3, 2))
    names = ("made.bin", "made.idx", "made-00001-of-00002.bin")
    assert len({memload.info(tmp_path / name)["fingerprint"] for name in names}) == 1


def test_info_notices_a_shard_of_the_wrong_size(make_dataset: Make, tmp_path: Path) -> None:
    make_dataset()
    os.truncate(tmp_path / "made.bin", 4200)
    with pytest.raises(FormatError, match=r"made\.bin"):
        memload.info(tmp_path / "made.bin")


# ---- verify


@pytest.mark.parametrize("position", [0, 71, 72, 3 * 72 - 1, 3 * 72, 4 * 72 + 30, 6 * 72 - 1])
def test_one_changed_bit_is_found_with_its_row_and_sample(
    position: int, make_dataset: Make, tmp_path: Path
) -> None:
    index = make_dataset(rows=(3, 3))
    row = position // 72
    report = memload.verify(tmp_path / "made.bin")
    assert report.ok
    assert (report.rows, report.bytes) == (6, 6 * 72)
    flip(tmp_path / f"made-{row // 3:05d}-of-00002.bin", 4096 + position % 216)
    report = memload.verify(tmp_path / "made.bin")
    assert not report.ok
    assert (report.bad_rows, report.bad_keys, report.problems) == ([row], [index.keys[row]], [])


@pytest.mark.parametrize("num_threads", [1, 5])
@pytest.mark.parametrize("piece", [10, 150], ids=["a row in pieces", "two rows in a piece"])
def test_files_are_verified_in_pieces(
    num_threads: int,
    piece: int,
    make_dataset: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_dataset(rows=(7, 4))
    monkeypatch.setattr(inspection, "_READ", piece)
    assert memload.verify(tmp_path / "made.bin", num_threads=num_threads).ok
    flip(tmp_path / "made-00000-of-00002.bin", 4096 + 6 * 72, 4096)
    flip(tmp_path / "made-00001-of-00002.bin", 4096 + 3 * 72)
    report = memload.verify(tmp_path / "made.bin", num_threads=num_threads)
    assert report.bad_rows == [0, 6, 10]
    assert report.bytes == 11 * 72


def test_a_row_of_any_size_is_verified_in_little_memory(make_dataset: Make, tmp_path: Path) -> None:
    shape = (1 << 14, 1 << 14, 1)
    made = make_dataset(rows=(1,), shape=(1, 1, 1))
    array = Array("image", "|u1", shape, (Shard("made.bin", 1, 4096 + (1 << 28)),))
    (tmp_path / "made.bin").write_bytes(npy_header("|u1", (1, *shape)))
    os.truncate(tmp_path / "made.bin", 4096 + (1 << 28))  # a hole
    zeros = functools.reduce(lambda check, _: zlib.crc32(bytes(1 << 20), check), range(256), 0)
    for check, ok in ((zeros, True), (zeros ^ 1, False)):
        replace(made, arrays=(array,), crc32={"image": np.array([check], np.uint32)}).write(
            made.path
        )
        tracemalloc.start()
        try:
            assert memload.verify(made.path, num_threads=1).ok == ok
            assert tracemalloc.get_traced_memory()[1] < 32 << 20
        finally:
            tracemalloc.stop()


def test_a_bad_row_names_every_sample_that_uses_it(make_dataset: Make, tmp_path: Path) -> None:
    make_dataset(row=np.array([0, 1, 1, 3, 1]))
    flip(tmp_path / "made.bin", 4096 + 72, 4096 + 4 * 72)
    report = memload.verify(tmp_path / "made.bin")
    assert report.bad_rows == [1, 4]
    assert report.bad_keys == ["bee/1.jpg", "cat/2.jpg", "bee/4.jpg"]  # no sample uses row 4


def test_rows_of_every_array_are_verified(make_dataset: Make, tmp_path: Path) -> None:
    image, mask = make_dataset(), make_dataset("mask.bin", shape=(2, 2, 1), seed=1)
    arrays = (image.image, Array("mask", "|u1", (2, 2, 1), mask.image.shards))
    both = make_dataset(
        arrays=arrays, crc32={"image": image.crc32["image"], "mask": mask.crc32["image"]}
    )
    assert memload.verify(both.path).rows == 10
    flip(tmp_path / "mask.bin", 4096 + 3 * 4)
    assert list(memload.verify(both.path).bad_rows) == [3]


def test_bad_files_are_reported_and_the_others_read(make_dataset: Make, tmp_path: Path) -> None:
    make_dataset(rows=(2,) * 5)
    names = [tmp_path / f"made-{number:05d}-of-00005.bin" for number in range(5)]
    names[0].unlink()
    os.truncate(names[1], 4100)
    flip(names[2], 30)  # the header
    flip(names[4], 4096)
    report = memload.verify(tmp_path / "made.bin")
    assert report.bad_rows == [8]
    assert report.bytes == 4 * 72
    assert len(report.problems) == 3
    for problem, name in zip(report.problems, names, strict=False):
        assert str(name) in problem


@pytest.mark.parametrize("fault", ["permission", "disk", "truncated"])
def test_a_file_that_cannot_be_read_is_reported_with_its_rows(
    fault: str, make_dataset: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_dataset(rows=(3, 2))
    shard, real, opened = tmp_path / "made-00001-of-00002.bin", Path.open, list[Path]()

    class BadDisk(io.FileIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError(errno.EIO, "Input/output error")

    def open_file(path: Path, *arguments: Any, **options: Any) -> Any:
        opened.append(path)
        if path == shard and fault == "permission":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        if opened.count(shard) == 2:  # after the header was read
            if fault == "truncated":
                os.truncate(shard, 4096 + 100)
            else:
                return BadDisk(path)
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", open_file)
    report = memload.verify(tmp_path / "made.bin", num_threads=1)
    (problem,) = report.problems
    reasons = {
        "permission": "cannot be read: Permission denied",
        "disk": "rows 3 to 4 cannot be read: Input/output error",
        "truncated": "rows 3 to 4 cannot be read: the file ends too early",
    }
    assert str(shard) in problem
    assert problem.endswith(reasons[fault])
    assert report.bad_rows == ([] if fault == "permission" else [3, 4])
    assert not report.ok


@pytest.mark.parametrize("name", ["key/bytes", "key/offsets", "crc32/image", "weight"])
def test_damage_to_the_index_is_found(name: str, make_dataset: Make, tamper: Tamper) -> None:
    index = make_dataset(columns={"label": np.arange(5) % 3, "weight": np.arange(5.0)})

    def damage(metadata: Any, tensors: dict[str, np.ndarray]) -> None:
        tensors[name].view(np.uint8)[-1] ^= 1

    path = tamper(index.path, damage, relist=False)
    with pytest.raises(ChecksumError, match=rf"made\.idx.*{name}"):
        memload.verify(path)


def test_wrong_offsets_of_names_are_found(make_dataset: Make, tamper: Tamper) -> None:
    def change(_: Any, tensors: dict[str, np.ndarray]) -> None:
        tensors["key/offsets"][2] = 1000

    path = tamper(make_dataset().path, change)
    with pytest.raises(FormatError, match=r"made\.idx.*key/offsets") as caught:
        memload.verify(path)
    assert caught.value.path == str(path)


def test_checksums_of_rows_that_are_consistently_wrong_are_bad_rows(
    make_dataset: Make, tamper: Tamper
) -> None:
    path = tamper(make_dataset().path, lambda _, tensors: tensors["crc32/image"].__setitem__(2, 1))
    assert list(memload.verify(path).bad_rows) == [2]


# ---- preview

GAP, LINE = 4, 14


def tiles(path: Path, width: int, height: int) -> list[np.ndarray]:
    """Return the tiles of a contact sheet, row by row, without those left white."""
    with Image.open(path) as sheet:
        pixels = np.asarray(sheet.convert("RGB"))
    assert (pixels.shape[1] - GAP) % (width + GAP) == 0
    assert (pixels.shape[0] - GAP) % (height + LINE + GAP) == 0
    cells = [
        pixels[y : y + height, x : x + width]
        for y in range(GAP, pixels.shape[0] - GAP, height + LINE + GAP)
        for x in range(GAP, pixels.shape[1] - GAP, width + GAP)
    ]
    return [cell for cell in cells if not (cell == 255).all()]


@pytest.mark.parametrize("indices", [[0], [4, 2, 2], [-1, 0], list(range(9)), [3] * 30])
def test_a_preview_shows_the_samples_asked_for_in_their_order(
    indices: list[int], make_dataset: Make, tmp_path: Path
) -> None:
    make_dataset(rows=(5, 4), shape=(8, 12, 3), row=np.arange(9)[::-1].copy())
    parts = [np.load(path) for path in sorted(tmp_path.glob("*.bin"))]
    pixels = np.concatenate(parts)[::-1]
    chosen = memload.preview(tmp_path / "made.bin", tmp_path / "grid.png", indices=indices, tile=12)
    assert chosen == [index % 9 for index in indices]
    found = tiles(tmp_path / "grid.png", 12, 8)
    assert len(found) == len(indices)
    for tile, index in zip(found, chosen, strict=True):
        np.testing.assert_array_equal(tile, pixels[index])


def test_a_tile_is_as_wide_as_asked_for_and_keeps_the_shape(
    make_dataset: Make, tmp_path: Path
) -> None:
    make_dataset(shape=(4, 8, 3))
    assert memload.preview(tmp_path / "made.bin", tmp_path / "grid.png", tile=64) == [0, 1, 2, 3, 4]
    assert len(tiles(tmp_path / "grid.png", 64, 32)) == 5


def test_random_samples_follow_from_the_seed(make_dataset: Make, tmp_path: Path) -> None:
    make_dataset(rows=(50,))

    def chosen(seed: int, name: str) -> list[int]:
        return memload.preview(tmp_path / "made.bin", tmp_path / name, count=10, seed=seed, tile=16)

    first = chosen(3, "a.png")
    assert first == sorted(set(first))
    assert len(first) == 10
    assert chosen(3, "b.png") == first
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert chosen(4, "c.png") != first


def test_a_class_is_previewed_alone(make_dataset: Make, tmp_path: Path) -> None:
    make_dataset(rows=(50,))
    chosen = memload.preview(
        tmp_path / "made.bin", tmp_path / "grid.png", class_name="bee", tile=16
    )
    assert chosen == list(range(1, 50, 3))
    some = memload.preview(
        tmp_path / "made.bin", tmp_path / "grid.png", class_name="bee", count=4, tile=16
    )
    assert len(some) == 4
    assert set(some) <= set(chosen)


def test_grey_pictures_are_shown_grey(make_dataset: Make, tmp_path: Path) -> None:
    make_dataset(shape=(8, 12, 1))
    memload.preview(tmp_path / "made.bin", tmp_path / "grid.png", indices=[1], tile=12)
    (tile,) = tiles(tmp_path / "grid.png", 12, 8)
    np.testing.assert_array_equal(tile, np.load(tmp_path / "made.bin")[1].repeat(3, 2))


@pytest.mark.parametrize("descr", ["<u2", "<f2", "<f4"])
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_other_types_and_channels_are_shown_from_their_least_to_their_greatest_value(
    descr: str, channels: int, make_dataset: Make, tmp_path: Path
) -> None:
    make_dataset(shape=(8, 12, channels), descr=descr)
    memload.preview(tmp_path / "made.bin", tmp_path / "grid.png", indices=[1], tile=12)
    (tile,) = tiles(tmp_path / "grid.png", 12, 8)
    values = np.load(tmp_path / "made.bin")[1].astype(float)
    values = (values - values.min()) / (values.max() - values.min()) * 255
    expected = values[:, :, :3] if channels > 2 else values[:, :, :1].repeat(3, 2)
    np.testing.assert_allclose(tile, expected, atol=1)


def test_values_without_end_are_shown(make_dataset: Make, tmp_path: Path) -> None:
    index = make_dataset(shape=(8, 12, 1), descr="<f4")
    pixels = np.load(tmp_path / "made.bin")
    pixels[1], pixels[2, 0], pixels[2, 1], pixels[2, 2] = np.nan, np.inf, -np.inf, 3e38
    header = (tmp_path / "made.bin").read_bytes()[:4096]
    (tmp_path / "made.bin").write_bytes(header + pixels.tobytes())
    make = {"image": np.array([zlib.crc32(row.tobytes()) for row in pixels], np.uint32)}
    Index(**{**vars(index), "crc32": make}).write(index.path)
    assert memload.preview(index.path, tmp_path / "grid.png", indices=[1, 2], tile=12) == [1, 2]


def points_sheet(make: Make, folder: Path, points: list[list[float]], **options: Any) -> np.ndarray:
    """Return where a sheet of one sample, 8×12 shown at 96×144, is drawn on in pure red."""
    columns = {"label": np.zeros(1, np.int64), "eyes": np.array([points], np.float64)}
    index = make(rows=(1,), shape=(8, 12, 3), columns=columns, points=("eyes",), **options)
    memload.preview(index.path, folder / "grid.png", tile=144)
    with Image.open(folder / "grid.png") as sheet:
        pixels = np.asarray(sheet)
    assert pixels.shape[:2] == (96 + LINE + 2 * GAP, 144 + 2 * GAP)
    return (pixels == (255, 0, 0)).all(2)


def test_points_are_drawn_where_they_lie(make_dataset: Make, tmp_path: Path) -> None:
    red = points_sheet(make_dataset, tmp_path, [[0, 0], [11, 7], [5.5, 2]])
    for x, y in (
        (6, 6),
        (138, 90),
        (72, 30),
    ):  # 12 pixels of the sheet a pixel of the picture, from its centre
        assert red[GAP + y, GAP + x]
    assert 3 * 4 <= red.sum() <= 3 * 25


@pytest.mark.parametrize(
    "point",
    [[-3, 2], [3, 9], [np.nan, 1], [np.inf, 1], [1e300, 1e300], [-1e300, 0], [2.0**31, 1]],
    ids=str,
)
def test_points_outside_the_picture_are_not_drawn(
    point: list[float], make_dataset: Make, tmp_path: Path
) -> None:
    assert not points_sheet(make_dataset, tmp_path, [point]).any()


def test_captions_name_the_class_the_number_or_the_file(make_dataset: Make, tmp_path: Path) -> None:
    def caption(**facts: Any) -> bytes:
        index = make_dataset(rows=(1,), **facts)
        memload.preview(index.path, tmp_path / "grid.png", tile=144)
        with Image.open(tmp_path / "grid.png") as sheet:
            drawn = sheet.crop((GAP, GAP + 96, GAP + 144, GAP + 96 + LINE))
        assert np.asarray(drawn).min() < 100
        return drawn.tobytes()

    one = caption(classes=("a class",))
    other = caption(classes=("class two",))
    number = caption(classes=None)
    named = caption(classes=None, columns={})
    assert len({one, other, number, named}) == 4


@pytest.mark.parametrize(
    "name", ["two\nlines", "tab\t", "\udcff", "日本語", "zoë", "", "long " * 100, "\0"]
)
def test_any_name_can_be_a_caption(name: str, make_dataset: Make, tmp_path: Path) -> None:
    index = make_dataset(classes=(name, name + "2", name + "3"))
    assert memload.preview(index.path, tmp_path / "grid.png", tile=60) == [0, 1, 2, 3, 4]


def test_a_label_of_any_shape_can_be_a_caption(make_dataset: Make, tmp_path: Path) -> None:
    index = make_dataset(classes=None, columns={"label": np.zeros((5, 3, 3))})
    assert len(memload.preview(index.path, tmp_path / "grid.png", tile=60)) == 5


@pytest.mark.parametrize("position", [5, -6, 10**30])
def test_an_index_out_of_range_is_an_error(
    position: int, make_dataset: Make, tmp_path: Path
) -> None:
    with pytest.raises(IndexError, match=f"index {position} is out of range for 5 samples"):
        memload.preview(make_dataset().path, tmp_path / "grid.png", indices=[0, position])
    assert not (tmp_path / "grid.png").exists()


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        (("ant", "bee", "cat"), "There is no class 'dog': the classes are ant, bee, cat$"),
        (tuple(f"c{number}" for number in range(1_020)), r"c18, c19 and 1,000 more$"),
        (None, "There is no class 'dog': this data set has no classes"),
    ],
    ids=["few", "many", "none"],
)
def test_an_unknown_class_is_an_error_that_names_the_known_ones(
    classes: tuple[str, ...] | None, message: str, make_dataset: Make, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        memload.preview(make_dataset(classes=classes).path, tmp_path / "grid.png", class_name="dog")


def test_a_preview_of_no_samples_is_an_error(make_dataset: Make, tmp_path: Path) -> None:
    index = make_dataset(columns={"label": np.zeros(5, np.int64)})
    with pytest.raises(ValueError, match="no sample to show"):
        memload.preview(index.path, tmp_path / "grid.png", class_name="cat")
    with pytest.raises(MissingError):
        memload.preview(tmp_path / "none.bin", tmp_path / "grid.png")


def test_a_negative_seed_is_an_error(make_dataset: Make, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="seed is -1"):
        memload.preview(make_dataset().path, tmp_path / "grid.png", seed=-1)


@pytest.mark.parametrize("name", ["grid", "grid.xyz", "grid.psd"])
def test_a_format_that_pillow_cannot_write_is_an_error(
    name: str, make_dataset: Make, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=rf"{name}'.*Pillow cannot write.*grid\.png$"):
        memload.preview(make_dataset().path, tmp_path / name)


@pytest.mark.parametrize("name", ["folder.png", "none/grid.png"])
def test_an_output_that_cannot_be_written_is_an_error(
    name: str, make_dataset: Make, tmp_path: Path
) -> None:
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(FormatError, match=rf"{name} cannot be written: .*Check its") as caught:
        memload.preview(make_dataset().path, tmp_path / name)
    assert caught.value.path == str(tmp_path / name)


def test_a_preview_that_would_fill_the_memory_is_an_error(
    make_dataset: Make, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"5 tiles of 9000×6000.* At most 134,217,728 pixels"):
        memload.preview(make_dataset().path, tmp_path / "grid.png", tile=9000)
    assert not (tmp_path / "grid.png").exists()


@pytest.mark.parametrize("shape", [(100_000, 1, 3), (1, 100_000, 3)])
def test_a_preview_of_strips_is_no_larger_than_one_of_pictures(
    shape: tuple[int, int, int], make_dataset: Make, tmp_path: Path
) -> None:
    make_dataset(shape=shape)
    memload.preview(tmp_path / "made.bin", tmp_path / "grid.png", tile=32)
    with Image.open(tmp_path / "grid.png") as sheet:
        assert max(sheet.size) < 3000


def test_a_name_of_a_million_letters_is_a_caption_in_no_time(
    make_dataset: Make, tmp_path: Path
) -> None:
    make_dataset(columns={}, classes=None, keys=Keys.of(["i" * 900_000] * 5))
    started = time.process_time()
    memload.preview(tmp_path / "made.bin", tmp_path / "grid.png")
    assert time.process_time() - started < 10
