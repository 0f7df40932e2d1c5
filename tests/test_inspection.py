"""Describe and verify a data set from Python. tests/test_cli.py tests the commands."""

import errno
import io
import os
from pathlib import Path

import numpy as np
import pytest

import memload
from memload import inspection
from memload.errors import MissingError
from memload.storage.format import npy_header
from tests.damage import flip

# ---- info


def test_info_says_which_texts_a_column_stands_for(make_dataset):
    index = make_dataset(categories={"label": ("ant", "bee", "cat")})
    facts = memload.info(index.path)
    assert facts["categories"] == {"label": ["ant", "bee", "cat"]}
    assert facts["category_counts"] == {"label": np.bincount(index.columns["label"]).tolist()}


def test_info_says_what_is_in_a_data_set(make_dataset, tmp_path):
    index = make_dataset(
        rows=(3, 2),
        flags=np.array([0, 1, 3, 4, 0], np.uint8),
        columns={
            "label": np.arange(5) % 3,
            "eyes": np.zeros((5, 2, 2), np.float32),
            "faces": np.zeros((5, 3, 4), np.float32),
        },
        points=("eyes",),
        boxes=("faces",),
        build={"rejected": 2},
        statistics={"mean": [0.5]},
    )
    assert memload.info(tmp_path / "made.bin") == {
        "path": str(tmp_path / "made.bin"),
        "index": str(tmp_path / "made.idx"),
        "format_version": 1,
        "fingerprint": index.fingerprint,
        "samples": 5,
        "rows": 5,
        "rejected": 2,
        "shape": [4, 6, 3],
        "dtype": "uint8",
        "bytes": 2 * 4096 + 5 * 72,
        "arrays": {
            "image": {
                "kind": "image",
                "shape": [4, 6, 3],
                "dtype": "uint8",
                "rows": 5,
                "bytes": 2 * 4096 + 5 * 72,
                "files": ["made-00000-of-00002.bin", "made-00001-of-00002.bin"],
            }
        },
        "columns": {
            "label": {"dtype": "int64", "shape": [5], "points": False, "boxes": False},
            "eyes": {"dtype": "float32", "shape": [5, 2, 2], "points": True, "boxes": False},
            "faces": {"dtype": "float32", "shape": [5, 3, 4], "points": False, "boxes": True},
        },
        "classes": ["ant", "bee", "cat"],
        "flags": {"oriented": 2, "fallback": 1, "points_outside": 1},
        "statistics": {"mean": [0.5]},
        "build": {"rejected": 2},
    }


def test_info_lists_all_arrays(make_dataset, add_array, tmp_path):
    index = add_array(make_dataset(), "mask", np.zeros((5, 4, 6), "<u2"), "mask")
    add_array(index, "depth", np.zeros((9, 7), "<f4"), other_rows={"depth": np.arange(5)})
    facts = memload.info(tmp_path / "made.bin")
    assert facts["format_version"] == 2
    assert (facts["shape"], facts["dtype"], facts["rows"]) == ([4, 6, 3], "uint8", 5)
    assert facts["bytes"] == 3 * 4096 + 5 * 72 + 5 * 48 + 9 * 28
    assert list(facts["arrays"]) == ["image", "mask", "depth"]
    assert facts["arrays"]["mask"] == {
        "kind": "mask",
        "shape": [4, 6],
        "dtype": "uint16",
        "rows": 5,
        "bytes": 4096 + 5 * 48,
        "files": ["made.mask.bin"],
    }
    depth = facts["arrays"]["depth"]
    assert (depth["kind"], depth["shape"], depth["rows"]) == ("array", [7], 9)
    (tmp_path / "made.depth.bin").unlink()
    with pytest.raises(MissingError, match=r"made\.depth\.bin is missing"):
        memload.info(tmp_path / "made.bin")


# ---- verify


def bad_rows(report):
    return [row for file in report.damaged for row in file.bad_rows]


def bad_keys(report):
    return [key for file in report.damaged for key in file.bad_keys]


@pytest.mark.parametrize(("num_threads", "piece"), [(1, 10), (5, 150), (None, 8 << 20)])
def test_changed_rows_are_found_in_every_piece_of_every_shard(
    num_threads, piece, make_dataset, tmp_path, monkeypatch
):
    index = make_dataset(rows=(7, 4))
    monkeypatch.setattr(inspection, "_READ", piece)
    report = memload.verify(tmp_path / "made.bin", num_threads=num_threads)
    assert report.ok
    assert (report.rows, report.bytes) == (11, 11 * 72)
    flip(tmp_path / "made-00000-of-00002.bin", 4096, 4096 + 7 * 72 - 1)
    flip(tmp_path / "made-00001-of-00002.bin", 4096 + 3 * 72)
    report = memload.verify(tmp_path / "made.bin", num_threads=num_threads)
    assert not report.ok
    assert (bad_rows(report), report.problems) == ([0, 6, 10], [])
    assert bad_keys(report) == [index.keys[row] for row in (0, 6, 10)]


def test_a_bad_row_names_every_sample_that_uses_it(make_dataset, tmp_path):
    make_dataset(row=np.array([0, 1, 1, 3, 1]))
    flip(tmp_path / "made.bin", 4096 + 72, 4096 + 4 * 72)
    report = memload.verify(tmp_path / "made.bin")
    assert bad_rows(report) == [1, 4]
    assert bad_keys(report) == ["bee/1.jpg", "cat/2.jpg", "bee/4.jpg"]  # no sample uses row 4


def test_rows_of_every_array_are_verified(make_dataset, add_array, tmp_path):
    index = add_array(make_dataset(rows=(3, 2)), "mask", np.ones((5, 4, 6), "<u2"), "mask")
    assert memload.verify(index.path).ok
    assert memload.verify(index.path).rows == 10
    flip(tmp_path / "made-00001-of-00002.bin", 4096 + 72)
    flip(tmp_path / "made.mask.bin", 4096 + 47, 4096 + 3 * 48)
    report = memload.verify(index.path)
    assert [(file.array, file.file, file.rows, file.bad_rows) for file in report.damaged] == [
        ("image", "made-00001-of-00002.bin", 2, [4]),
        ("mask", "made.mask.bin", 5, [0, 3]),
    ]
    assert [file.bad_keys for file in report.damaged] == [
        ["bee/4.jpg"],
        ["ant/0.jpg", "ant/3.jpg"],
    ]
    assert report.problems == []


def test_a_bad_row_names_the_samples_that_use_it_in_its_own_array(
    make_dataset, add_array, tmp_path
):
    rows = {"feature": np.array([6, 0, 2, 2, 1])}
    index = add_array(make_dataset(), "feature", np.ones((7, 3), "<f4"), other_rows=rows)
    flip(tmp_path / "made.feature.bin", 4096 + 2 * 12, 4096 + 5 * 12)
    report = memload.verify(index.path)
    assert bad_rows(report) == [2, 5]  # no sample uses row 5
    assert bad_keys(report) == ["cat/2.jpg", "ant/3.jpg"]


def test_the_rows_of_an_npy_file_of_another_program_are_verified(make_dataset, add_array, tmp_path):
    values = np.random.default_rng(0).random((5, 11))
    index = add_array(make_dataset(), "features", values, "npy")
    assert index.array("features").header_bytes < 4096
    report = memload.verify(index.path)
    assert report.ok
    assert report.bytes == 5 * 72 + values.nbytes
    flip(tmp_path / "made.features.bin", 128 + values.nbytes - 1)
    (damaged,) = memload.verify(index.path).damaged
    assert (damaged.array, damaged.file, damaged.bad_rows) == ("features", "made.features.bin", [4])
    flip(tmp_path / "made.features.bin", 20)
    (problem,) = memload.verify(index.path).problems
    assert str(tmp_path / "made.features.bin") in problem


def test_bad_files_are_reported_and_the_others_read(make_dataset, tmp_path):
    make_dataset(rows=(2,) * 5)
    names = [tmp_path / f"made-{number:05d}-of-00005.bin" for number in range(5)]
    names[0].unlink()
    os.truncate(names[1], 4100)
    flip(names[2], 30)  # the header
    sealed = npy_header("|u1", (2, 4, 6, 3), "0" * 16)  # as of another build, with the same rows
    names[3].write_bytes(sealed + names[3].read_bytes()[4096:])
    flip(names[4], 4096)
    report = memload.verify(tmp_path / "made.bin")
    assert bad_rows(report) == [8]
    assert len(report.problems) == 4
    for problem, name in zip(report.problems, names, strict=False):
        assert str(name) in problem


@pytest.mark.parametrize(
    ("reads", "problem"),
    [
        (0, "cannot be read: Input/output error"),
        (1, "rows 3 to 4 cannot be read: Input/output error"),
    ],
    ids=["header", "rows"],
)
def test_a_file_that_cannot_be_read_is_reported_with_its_rows(
    reads, problem, make_dataset, tmp_path, monkeypatch
):
    make_dataset(rows=(3, 2))
    shard, real, opened = tmp_path / "made-00001-of-00002.bin", Path.open, []

    class BadDisk(io.FileIO):
        def read(self, size=-1):
            raise OSError(errno.EIO, "Input/output error")

    def open_file(path, *arguments, **options):
        opened.append(path)
        if path == shard and opened.count(shard) > reads:
            return BadDisk(path)
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", open_file)
    report = memload.verify(tmp_path / "made.bin", num_threads=1)
    (found,) = report.problems
    assert str(shard) in found
    assert found.endswith(problem)
    assert bad_rows(report) == ([3, 4] if reads else [])
    assert not report.ok
