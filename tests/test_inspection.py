"""Describe, verify and picture a data set; through Python and through the command line."""

import errno
import functools
import io
import json
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
from click.testing import CliRunner, Result
from PIL import Image

import memload
from memload import inspection
from memload.cli import main
from memload.errors import ChecksumError, FormatError, MissingError
from memload.storage.format import npy_header
from memload.storage.index import Array, Index, Shard
from memload.storage.keys import Keys

Make = Callable[..., Index]
Tamper = Callable[..., Path]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


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


def test_info_as_json_is_what_python_returns(output: Path) -> None:
    result = run("info", output, "--json")
    assert result.exit_code == 0
    facts = json.loads(result.stdout)
    assert facts == memload.info(output)
    assert (facts["samples"], facts["rows"], facts["rejected"]) == (12, 12, 0)
    assert facts["shape"] == [16, 16, 3]
    assert facts["build"]["settings"]["size"] == [16, 16]


def test_info_for_people_names_the_facts(output: Path) -> None:
    result = run("info", output)
    assert result.exit_code == 0
    for line in ("samples: 12", "classes: ant, bee, cat", "dtype: uint8"):
        assert line in result.stdout


def test_info_finds_a_data_set_by_any_of_its_files(make_dataset: Make, tmp_path: Path) -> None:
    make_dataset(rows=(3, 2))
    names = ("made.bin", "made.idx", "made-00001-of-00002.bin")
    assert len({memload.info(tmp_path / name)["fingerprint"] for name in names}) == 1


def test_info_of_nothing_is_one_line_and_status_1(tmp_path: Path) -> None:
    result = run("info", tmp_path / "none.bin")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith(
        f"memload: {tmp_path / 'none.idx'}: expected a data set, found no such file"
    )
    assert result.stderr.count("\n") == 1


def test_info_tells_a_shard_of_the_wrong_size(make_dataset: Make, tmp_path: Path) -> None:
    make_dataset()
    os.truncate(tmp_path / "made.bin", 4200)
    with pytest.raises(FormatError, match=r"made\.bin: expected 4,456 bytes"):
        memload.info(tmp_path / "made.bin")


def test_the_environment_names_what_is_loaded_and_what_is_installed() -> None:
    facts = json.loads(run("info", "--environment", "--json").stdout)
    assert facts["memload"]
    assert facts["numpy"] == np.__version__
    assert {"pillow (installed)", "pillow-simd (installed)"} <= facts.keys()
    assert any(name.endswith("(loaded)") for name in facts)


# ---- verify


def test_a_whole_data_set_is_ok(output: Path) -> None:
    report = memload.verify(output)
    assert report.ok
    assert (report.rows, report.bytes) == (12, 12 * 16 * 16 * 3)
    result = run("verify", output)
    assert result.exit_code == 0
    assert result.stdout == f"{output}: 12 rows, 9,216 bytes, all as they were written\n"


@pytest.mark.parametrize("position", [0, 71, 72, 3 * 72 - 1, 3 * 72, 4 * 72 + 30, 6 * 72 - 1])
def test_a_flipped_pixel_names_its_row_and_the_samples_key(
    position: int, make_dataset: Make, tmp_path: Path
) -> None:
    index = make_dataset(rows=(3, 3))
    row = position // 72
    flip(tmp_path / f"made-{row // 3:05d}-of-00002.bin", 4096 + position % 216)
    report = memload.verify(tmp_path / "made.bin")
    assert not report.ok
    assert list(report.bad_rows) == [row]
    assert list(report.bad_keys) == [index.keys[row]]
    assert list(report.problems) == []
    result = run("verify", tmp_path / "made.bin")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert (
        f"1 of 6 rows changed after they were written: rows {row} ({index.keys[row]})."
        in result.stderr
    )


def test_all_bad_rows_are_named_and_the_rest_is_still_read(
    make_dataset: Make, tmp_path: Path
) -> None:
    make_dataset(rows=(40, 2))
    flip(tmp_path / "made-00000-of-00002.bin", *(4096 + row * 72 for row in range(1, 30)))
    flip(tmp_path / "made-00001-of-00002.bin", 4096 + 72)
    report = memload.verify(tmp_path / "made.bin")
    assert list(report.bad_rows) == [*range(1, 30), 41]
    assert report.bytes == 42 * 72
    error = run("verify", tmp_path / "made.bin").stderr
    assert "30 of 42 rows changed after they were written: rows 1, 2, 3" in error
    assert "20, … (bee/1.jpg, cat/2.jpg, ant/3.jpg, bee/4.jpg, cat/5.jpg, …)" in error


@pytest.mark.parametrize("num_threads", [1, 5])
def test_a_shard_read_in_pieces_is_the_same(
    num_threads: int, make_dataset: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_dataset(rows=(7, 4))
    monkeypatch.setattr(inspection, "_READ", 150)  # two rows
    assert memload.verify(tmp_path / "made.bin", num_threads=num_threads).ok
    flip(tmp_path / "made-00000-of-00002.bin", 4096 + 6 * 72, 4096)
    flip(tmp_path / "made-00001-of-00002.bin", 4096 + 3 * 72)
    assert list(memload.verify(tmp_path / "made.bin", num_threads=num_threads).bad_rows) == [
        0,
        6,
        10,
    ]


def test_a_row_larger_than_a_piece_is_read(
    make_dataset: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = make_dataset()
    monkeypatch.setattr(inspection, "_READ", 10)
    assert memload.verify(index.path).ok


def test_a_bad_row_names_every_sample_that_uses_it(make_dataset: Make, tmp_path: Path) -> None:
    make_dataset(row=np.array([0, 1, 1, 3, 1]))
    flip(tmp_path / "made.bin", 4096 + 72, 4096 + 4 * 72)
    report = memload.verify(tmp_path / "made.bin")
    assert list(report.bad_rows) == [1, 4]
    assert list(report.bad_keys) == ["bee/1.jpg", "cat/2.jpg", "bee/4.jpg"]  # row 4 is nobody's


def test_rows_of_every_array_are_verified(make_dataset: Make, tmp_path: Path) -> None:
    image, mask = make_dataset(), make_dataset("mask.bin", shape=(2, 2, 1), seed=1)
    arrays = (image.image, Array("mask", "|u1", (2, 2, 1), mask.image.shards))
    both = make_dataset(
        arrays=arrays, crc32={"image": image.crc32["image"], "mask": mask.crc32["image"]}
    )
    assert memload.verify(both.path).rows == 10
    flip(tmp_path / "mask.bin", 4096 + 3 * 4)
    assert list(memload.verify(both.path).bad_rows) == [3]


def test_files_that_are_wrong_are_told_and_the_others_read(
    make_dataset: Make, tmp_path: Path
) -> None:
    make_dataset(rows=(2,) * 5)
    names = [tmp_path / f"made-{number:05d}-of-00005.bin" for number in range(5)]
    names[0].unlink()
    os.truncate(names[1], 4100)
    flip(names[2], 30)
    flip(names[4], 4096)
    report = memload.verify(tmp_path / "made.bin")
    assert list(report.bad_rows) == [8]
    assert report.bytes == 4 * 72
    assert [problem.split(": ")[0] for problem in report.problems] == [
        str(name) for name in names[:3]
    ]
    for problem, told in zip(
        report.problems, ("no such file", "truncated", "NPY header"), strict=True
    ):
        assert told in problem
        assert "memload verify" not in problem
    result = run("verify", tmp_path / "made.bin")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 4


def test_a_shard_that_cannot_be_opened_is_told(
    make_dataset: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_dataset(rows=(3, 2))
    real = Path.open

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == "made-00000-of-00002.bin":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    report = memload.verify(tmp_path / "made.bin")
    (problem,) = report.problems
    assert problem.startswith(f"{tmp_path / 'made-00000-of-00002.bin'}: cannot be read: ")
    assert not report.ok


def test_a_disk_that_cannot_read_names_the_rows(
    make_dataset: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_dataset(rows=(3, 2))

    class BadDisk(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            raise OSError(errno.EIO, "Input/output error")

    real = Path.open

    def unbuffered_is_bad(path: Path, mode: str = "r", **options: Any) -> Any:
        bad = options.get("buffering") == 0 and path.name == "made-00001-of-00002.bin"
        return BadDisk(path, mode) if bad else real(path, mode, **options)

    monkeypatch.setattr(Path, "open", unbuffered_is_bad)
    report = memload.verify(tmp_path / "made.bin")
    assert list(report.bad_rows) == [3, 4]
    (problem,) = report.problems
    assert "made-00001-of-00002.bin: rows 3 to 4 cannot be read" in problem
    assert "Input/output error" in problem


def test_a_shard_cut_while_it_is_read_names_the_rows(
    make_dataset: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_dataset()
    path, real = tmp_path / "made.bin", Path.open

    def cut_then_open(opened: Path, mode: str = "r", **options: Any) -> Any:
        if options.get("buffering") == 0:
            os.truncate(path, 4096 + 100)
        return real(opened, mode, **options)

    monkeypatch.setattr(Path, "open", cut_then_open)
    report = memload.verify(path, num_threads=1)
    assert list(report.bad_rows) == [0, 1, 2, 3, 4]
    assert "the file ends before its time" in report.problems[0]


@pytest.mark.parametrize("name", ["key/bytes", "key/offsets", "crc32/image", "weight"])
def test_damage_to_what_open_does_not_check_is_found(
    name: str, make_dataset: Make, tamper: Tamper
) -> None:
    index = make_dataset(columns={"label": np.arange(5) % 3, "weight": np.arange(5.0)})

    def damage(metadata: Any, tensors: dict[str, np.ndarray]) -> None:
        tensors[name].view(np.uint8)[-1] ^= 1

    path = tamper(index.path, damage, relist=False)
    Index.read(path)
    with pytest.raises(
        ChecksumError, match=rf"made\.idx: .* of its tensor '{name}'.*the index is damaged"
    ):
        memload.verify(path)
    result = run("verify", path)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"memload: {path}: expected checksum")


def test_names_outside_their_bytes_are_found_in_an_index_that_is_right_otherwise(
    make_dataset: Make, tamper: Tamper
) -> None:
    path = tamper(
        make_dataset().path, lambda _, tensors: tensors["key/offsets"].__setitem__(2, 1000)
    )
    with pytest.raises(
        FormatError, match=r"made\.idx: key/offsets: expected numbers that rise from 0 to 45"
    ) as told:
        memload.verify(path)
    assert told.value.path == str(path)


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
def test_a_sample_that_is_not_there_is_told(
    position: int, make_dataset: Make, tmp_path: Path
) -> None:
    index = make_dataset()
    with pytest.raises(IndexError, match=rf"indices: expected -5 <= index < 5, found {position}"):
        memload.preview(index.path, tmp_path / "grid.png", indices=[0, position])
    assert not (tmp_path / "grid.png").exists()


def test_a_class_that_is_not_there_is_told_with_those_that_are(
    make_dataset: Make, tmp_path: Path
) -> None:
    index = make_dataset()
    with pytest.raises(ValueError, match="class: expected one of ant, bee, cat, found 'dog'"):
        memload.preview(index.path, tmp_path / "grid.png", class_name="dog")
    without = make_dataset(classes=None)
    with pytest.raises(ValueError, match="class: expected one of none at all, found 'ant'"):
        memload.preview(without.path, tmp_path / "grid.png", class_name="ant")


def test_of_many_classes_the_first_are_told_and_how_many_more_there_are(
    make_dataset: Make, tmp_path: Path
) -> None:
    index = make_dataset(classes=tuple(f"class {number}" for number in range(1_020)))
    with pytest.raises(ValueError, match=r"class 19 and 1,000 more, found 'dog'$"):
        memload.preview(index.path, tmp_path / "grid.png", class_name="dog")


def test_a_class_without_samples_is_told(make_dataset: Make, tmp_path: Path) -> None:
    index = make_dataset(columns={"label": np.zeros(5, np.int64)})
    with pytest.raises(ValueError, match="preview: expected at least one sample, found none"):
        memload.preview(index.path, tmp_path / "grid.png", class_name="cat")


@pytest.mark.parametrize("name", ["grid", "grid.xyz", "grid.psd"])
def test_a_format_that_pillow_cannot_write_is_told(
    name: str, make_dataset: Make, tmp_path: Path
) -> None:
    index = make_dataset()
    with pytest.raises(
        ValueError,
        match=rf"output: expected the name of an image .*found '.*{name}': Pillow cannot",
    ):
        memload.preview(index.path, tmp_path / name)
    assert run("preview", index.path, "-o", tmp_path / name).exit_code == 1


def test_an_output_that_cannot_be_written_is_told(make_dataset: Make, tmp_path: Path) -> None:
    index = make_dataset()
    (tmp_path / "grid.png").mkdir()
    with pytest.raises(
        FormatError, match=r"grid\.png: expected to be able to write an image there, found: "
    ) as told:
        memload.preview(index.path, tmp_path / "grid.png")
    assert told.value.path == str(tmp_path / "grid.png")


def test_a_folder_of_a_preview_that_is_not_there_is_told(
    make_dataset: Make, tmp_path: Path
) -> None:
    with pytest.raises(
        FormatError, match=r"none: expected a folder for .*grid\.png, found none\. Make it first$"
    ):
        memload.preview(make_dataset().path, tmp_path / "none" / "grid.png")


def test_a_preview_of_nothing_is_told(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="expected a data set"):
        memload.preview(tmp_path / "none.bin", tmp_path / "grid.png")


def test_the_command_line_previews_by_number_class_and_seed(output: Path, tmp_path: Path) -> None:
    grid = tmp_path / "grid.png"
    result = run("preview", output, "-o", grid, "--indices", "0,5,-1", "--tile", "32")
    assert (result.exit_code, result.stdout) == (0, f"{grid}: 3 samples of {output}\n")
    assert len(tiles(grid, 32, 32)) == 3
    assert run("preview", output, "-o", grid, "--class", "bee", "--tile", "32").stdout.startswith(
        f"{grid}: 4 samples"
    )
    assert len(tiles(grid, 32, 32)) == 4
    contents = []
    for seed in (1, 1, 2):
        run("preview", output, "-o", grid, "--count", "5", "--seed", seed, "--tile", "32")
        contents.append(grid.read_bytes())
    assert contents[0] == contents[1] != contents[2]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--indices", "99"], "indices: expected -12 <= index < 12, found 99"),
        (["--class", "dog"], "class: expected one of ant, bee, cat, found 'dog'"),
    ],
)
def test_the_command_line_tells_a_bad_choice_in_one_line(
    arguments: list[str], told: str, output: Path
) -> None:
    result = run("preview", output, "-o", output.with_suffix(".png"), *arguments)
    assert result.exit_code == 1
    assert result.stderr == f"memload: {told}\n"


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


def test_a_preview_of_more_pixels_than_memory_is_for_is_told(output: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"at most 134,217,728 pixels, found .* for 12 tiles of 9000×9000"
    ):
        memload.preview(output, tmp_path / "grid.png", tile=9000)
    assert not (tmp_path / "grid.png").exists()


def test_a_seed_below_zero_is_told(output: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="seed: expected 0 or more, found -1"):
        memload.preview(output, tmp_path / "grid.png", seed=-1)
