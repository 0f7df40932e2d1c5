"""Parquet files: images, labels, columns, and what is wrong with them."""

import json
from pathlib import Path
from typing import Any

import pytest

from memload.building.rows import chunks_of
from memload.building.sources.opening import open_source
from memload.building.sources.parquet import ParquetFiles
from memload.errors import DecodeError, SourceError

pyarrow = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402  # only if it is installed


def write(path: Path, columns: dict[str, Any], features: dict[str, Any] | None = None) -> Path:
    table = pyarrow.table(columns)
    if features is not None:
        text = json.dumps({"info": {"features": features}})
        table = table.replace_schema_metadata({"huggingface": text})
    parquet.write_table(table, path, row_group_size=2)
    return path


def test_all_columns_are_read(containers: Any) -> None:
    source = ParquetFiles([containers.parquet()])
    assert source.classes == ["ant", "bee", "cat"]
    assert source.categories == {"split": ["train", "val"]}
    assert list(source.keys) == list(containers.pictures)
    assert [record.image for record in source] == list(containers.pictures.values())
    assert source.columns["label"].tolist() == containers.labels
    assert source.columns["age"].tolist() == containers.ages


def test_rows_may_be_read_in_any_order(containers: Any) -> None:
    source = ParquetFiles([containers.parquet()])
    contents = list(containers.pictures.values())
    for index in (29, 3, 4, 2, 2, 14, 0):
        assert source[index].image == contents[index]


def test_several_files_follow_each_other(tmp_path: Path) -> None:
    paths = [
        write(tmp_path / f"{number}.parquet", {"jpg": [bytes([number, row]) for row in range(3)]})
        for number in range(2)
    ]
    source = ParquetFiles(paths)
    assert [record.image for record in source] == [
        bytes([n, r]) for n in range(2) for r in range(3)
    ]
    assert list(source.keys)[2:4] == ["0.parquet/2", "1.parquet/0"]


def test_a_column_of_paths_is_relative_to_the_file(tmp_path: Path) -> None:
    source = ParquetFiles([write(tmp_path / "x.parquet", {"image": ["a/1.jpg", None]})])
    assert source[0].image == tmp_path / "a" / "1.jpg"
    with pytest.raises(DecodeError, match="missing"):
        source[1]


def test_what_hugging_face_says_of_the_columns_is_used(tmp_path: Path) -> None:
    features = {
        "photo": {"_type": "Image"},
        "fine_label": {"_type": "ClassLabel", "names": ["x", "y"]},
    }
    for name in ("coarse", "unknown", "missing"):
        features[name] = {"_type": "ClassLabel", "names": ["p", "q", "r"]}
    columns = {"photo": [b"1", b"2"], "thumbnail": [b"3", b"4"], "fine_label": [1, 0]}
    columns |= {"coarse": [2, 0], "unknown": [-1, 0], "missing": [None, 0]}
    source = ParquetFiles([write(tmp_path / "x.parquet", columns, features)])
    assert source.categories == {"coarse": ["p", "q", "r"]}
    assert source.columns["coarse"].tolist() == [2, 0]
    assert source.columns["unknown"].tolist() == [-1, 0]
    assert source[1].image == b"2"
    assert source.classes == ["x", "y"]
    assert source.columns["label"].tolist() == [1, 0]


def test_named_columns_are_taken(tmp_path: Path) -> None:
    columns = {"a": [b"1", b"2"], "b": [b"3", b"4"], "kind": [5, 6], "label": [7, 8]}
    path = write(tmp_path / "x.parquet", columns)
    with pytest.raises(SourceError, match="--image-column"):
        ParquetFiles([path])
    source = ParquetFiles([path], image_column="b", label_column="kind")
    assert source[0].image == b"3"
    assert source.columns["label"].tolist() == [5, 6]
    with pytest.raises(SourceError, match="no column 'c'"):
        ParquetFiles([path], image_column="c")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"image": [b"1", b"2"], "label": [0, None]}, "1 label is missing.* of x.parquet/1"),
        ({"image": [b"1", b"2"], "label": [0.0, float("nan")]}, "1 label is missing"),
        ({"image": [b"1", b"2"], "label": ["a", ""]}, "1 label is missing"),
        (
            {"image": [b"1", b"2"], "label": pyarrow.array([2**63, 1], pyarrow.uint64())},
            "above 2⁶³",
        ),
        ({"image": [b"1", b"2"], "label": [None, None]}, "2 labels are missing"),
        ({"image": pyarrow.array([], pyarrow.binary())}, "no rows"),
    ],
)
def test_unusable_columns_are_errors(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        ParquetFiles([write(tmp_path / "x.parquet", columns)])


def test_files_with_other_columns_are_refused(tmp_path: Path) -> None:
    first = write(tmp_path / "a.parquet", {"image": [b"1"]})
    second = write(tmp_path / "b.parquet", {"image": [b"1"], "label": [1]})
    with pytest.raises(SourceError, match=r"b\.parquet has the columns"):
        ParquetFiles([first, second])


def test_a_truncated_file_is_an_error(containers: Any) -> None:
    path = containers.parquet()
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(SourceError, match="truncated"):
        ParquetFiles([path])


def test_a_damaged_row_group_rejects_its_own_rows(containers: Any) -> None:
    path = containers.parquet(compression="gzip")
    offset = parquet.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    data = bytearray(path.read_bytes())
    data[offset : offset + 200] = bytes(200)
    path.write_bytes(data)
    source = ParquetFiles([path])
    contents = list(containers.pictures.values())
    for index in (*range(7), *range(14, 30)):
        assert source[index].image == contents[index]
    for index in range(7, 14):
        with pytest.raises(DecodeError, match="damaged"):
            source[index]


@pytest.mark.parametrize(
    ("rows", "groups", "num_workers", "expected"),
    [
        (100, None, 1, [(0, 25), (25, 50), (50, 75), (75, 100)]),
        (1000, [0, 100, 200, 300, 1000], 1, [(0, 100), (100, 200), (200, 300)]),
        (300, [0, *range(10, 301, 10)], 1, [(0, 40), (40, 80), (80, 120)]),
        (50, [0, 20, 50], 2, [(0, 6), (6, 12), (12, 18), (18, 20), (20, 26)]),
    ],
)
def test_row_groups_stay_together_if_there_are_enough_for_all_workers(
    rows: int, groups: Any, num_workers: int, expected: list[tuple[int, int]]
) -> None:
    class Rows(list[int]):
        group_starts = groups

    chunks = [chunk[:2] for chunk in chunks_of(Rows(range(rows)), 0, rows, num_workers)]
    assert chunks[: len(expected)] == expected
    assert [number for start, stop in chunks for number in range(start, stop)] == list(range(rows))


@pytest.mark.parametrize(
    ("labels", "names", "classes", "numbers"),
    [
        (["cat", "ant"], ["zebra", "cat", "ant"], ["zebra", "cat", "ant"], [1, 2]),
        (["cat", "ant"], ["zebra", "cat"], ["ant", "cat"], [1, 0]),
        ([1, 0], ["zebra", "cat"], ["zebra", "cat"], [1, 0]),
        ([0.5, 1.0], ["zebra", "cat"], None, [0.5, 1.0]),
    ],
)
def test_names_of_classes_are_those_of_the_labels(
    tmp_path: Path, labels: Any, names: list[str], classes: Any, numbers: list[int]
) -> None:
    features = {"label": {"_type": "ClassLabel", "names": names}}
    columns = {"image": [b"1", b"2"], "label": labels}
    source = ParquetFiles([write(tmp_path / "x.parquet", columns, features)])
    assert source.classes == classes
    assert source.columns["label"].tolist() == numbers


@pytest.mark.parametrize(
    ("labels", "names", "message"),
    [
        ([0, 1], ["b", "a"], r"b\.parquet has the classes b, a, but .*a\.parquet has a, b"),
        (["0", "1"], ["a", "b"], r"b\.parquet: column 'label' is of type string, but .* int64"),
    ],
)
def test_files_whose_labels_mean_something_else_are_refused(
    tmp_path: Path, labels: Any, names: list[str], message: str
) -> None:
    paths = [
        write(
            tmp_path / name,
            {"image": [b"1", b"2"], "label": values},
            {"label": {"_type": "ClassLabel", "names": texts}},
        )
        for name, values, texts in (("a.parquet", [0, 1], ["a", "b"]), ("b.parquet", labels, names))
    ]
    with pytest.raises(SourceError, match=message):
        ParquetFiles(paths)


def test_files_may_keep_the_same_values_in_other_types(tmp_path: Path) -> None:
    texts, numbers = pyarrow.array(["a", "b"]), pyarrow.array([1, 2], pyarrow.uint8())
    first = {"image": [b"1", b"2"], "label": texts, "n": [1, 2], "x": [None, None]}
    second = {
        "image": pyarrow.array([b"1", b"2"], pyarrow.large_binary()),
        "label": texts.dictionary_encode(),
        "n": numbers,
        "x": [1.0, 2.0],
    }
    paths = [write(tmp_path / f"{n}.parquet", columns) for n, columns in enumerate((first, second))]
    source = ParquetFiles(paths)
    assert source.columns["label"].tolist() == [0, 1, 0, 1]
    assert source.columns["n"].tolist() == [1, 2, 1, 2]


def test_columns_may_hold_masks_and_arrays(tmp_path: Path) -> None:
    columns = {
        "scan": [{"bytes": b"s%d" % row, "path": None} for row in range(5)],
        "mask": [{"bytes": None if row == 3 else b"m%d" % row, "path": None} for row in range(5)],
        "depth": [[[row, 1.5], [2.5, 3.0]] for row in range(5)],
        "file": [f"{row}.png" for row in range(5)],
        "label": [0, 1, 0, 1, 0],
    }
    features = {"scan": {"_type": "Image"}, "mask": {"_type": "Image"}}
    path = write(tmp_path / "x.parquet", columns, features)
    source = open_source(path, masks=["mask", "file"], arrays=["depth"])
    assert source.arrays == {"mask": "mask", "file": "mask", "depth": "array"}
    assert list(source.schema) == ["label"]
    assert source.notes == []
    for index in (4, 0, 3):
        record = source[index]
        assert (record.image, record.columns) == (b"s%d" % index, {"label": index % 2})
        assert record.arrays.get("mask") == (None if index == 3 else b"m%d" % index)
        assert record.arrays["file"] == tmp_path / f"{index}.png"
        assert record.arrays["depth"].tolist() == columns["depth"][index]
    assert source.without_image(1).arrays == {}
    named = open_source(path, image_column="mask")
    assert "scan (of type struct<bytes: binary, path: null>; masks=['scan'] or" in named.notes[0]
    with pytest.raises(SourceError, match="no column 'segm', only scan, mask"):
        open_source(path, masks=["segm"])
