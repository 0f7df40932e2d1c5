"""Labels and other columns out of a table."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import memload
from memload.storage.index import Index

Make = Callable[..., Index]
Rows = Callable[..., np.ndarray]


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_samples_get_the_labels_and_columns_of_their_lines_in_any_order(
    make_dataset: Make, tmp_path: Path, rows_in: Rows
) -> None:
    index = make_dataset("out.bin", rows=(3,), columns={"label": np.arange(3), "old": np.arange(3)})
    table = write(
        tmp_path / "labels.csv",
        "key,label,age,split",
        "cat/2.jpg,dog,0.5,train",
        "unknown.jpg,dog,0,train",
        "ant/0,wolf,1.5,train",
        "bee/1.jpg,dog,2.5,test",
        *(f"more/{n}.jpg,dog,0,test" for n in range(20)),
    )
    report = memload.relabel(tmp_path / "out.bin", table, tmp_path / "new.idx")
    new = Index.open(tmp_path / "new.idx")
    assert np.array_equal(rows_in(new), rows_in(index))
    assert list(new.keys) == list(index.keys)
    assert new.classes == ("dog", "wolf")
    assert {name: values.tolist() for name, values in new.columns.items()} == {
        "label": [1, 0, 0],
        "old": [0, 1, 2],
        "age": [1.5, 2.5, 0.5],
        "split": [1, 0, 1],
    }
    assert new.categories == {"split": ("test", "train")}
    assert new.statistics["class_counts"] == [2, 1]
    assert report.notes == (
        "21 of 24 lines belong to no sample: unknown.jpg, more/0.jpg, more/1.jpg, …",
    )
    assert str(report) == f"{tmp_path / 'new.idx'}: 3 samples, 2 classes"
    assert memload.verify(tmp_path / "new.idx").ok


def test_classes_that_the_data_set_has_keep_their_numbers(
    make_dataset: Make, tmp_path: Path
) -> None:
    make_dataset("out.bin", rows=(3,))
    data, new_index = tmp_path / "out.bin", tmp_path / "new.idx"
    table = write(tmp_path / "t.csv", "key,label", "ant/0,cat", "bee/1,cat", "cat/2,bee")
    memload.relabel(data, table, new_index)
    new = Index.open(new_index)
    assert (new.classes, new.columns["label"].tolist()) == (("ant", "bee", "cat"), [2, 2, 1])
    table = write(tmp_path / "t.csv", "key,label", "ant/0,2", "bee/1,0", "cat/2,0")
    memload.relabel(data, table, new_index, overwrite=True)
    new = Index.open(new_index)
    assert (new.classes, new.columns["label"].tolist()) == (("ant", "bee", "cat"), [2, 0, 0])
    table = write(tmp_path / "t.csv", "key,label", "ant/0,7", "bee/1,0", "cat/2,0")
    report = memload.relabel(data, table, new_index, overwrite=True)
    new = Index.open(new_index)
    assert (new.classes, new.columns["label"].tolist()) == (None, [7, 0, 0])
    assert "class_counts" not in new.statistics
    assert "the labels do not count into the classes of before, which are gone" in report.notes


def test_columns_are_chosen_by_name(make_dataset: Make, tmp_path: Path) -> None:
    make_dataset("out.bin", rows=(2,))
    table = write(tmp_path / "t.tsv", "age\tkind\tname", "5\tx\tant/0.jpg", "6\ty\tbee/1.jpg")
    options = {"key_column": "name", "label_column": "kind"}
    memload.relabel(tmp_path / "out.bin", table, tmp_path / "new.idx", **options)  # type: ignore[arg-type]
    new = Index.open(tmp_path / "new.idx")
    assert (new.classes, new.columns["age"].tolist()) == (("x", "y"), [5, 6])


def test_a_sample_without_a_line_is_an_error_or_left_out(
    make_dataset: Make, tmp_path: Path, rows_in: Rows
) -> None:
    index = make_dataset("out.bin", rows=(3,))
    table = write(tmp_path / "t.csv", "key,age", "ant/0,4", "cat/2,5")
    paths = tmp_path / "out.bin", table, tmp_path / "new.idx"
    with pytest.raises(
        ValueError, match=r"1 of 3 samples have no line in .*t.csv: bee/1.jpg.*--missing drop"
    ):
        memload.relabel(*paths)
    assert not paths[2].exists()
    report = memload.relabel(*paths, missing="drop")
    new = Index.open(paths[2])
    assert (list(new.keys), new.columns["age"].tolist()) == (["ant/0.jpg", "cat/2.jpg"], [4, 5])
    assert new.columns["label"].tolist() == [0, 2]
    assert np.array_equal(rows_in(new), rows_in(index)[[0, 2]])
    assert report.notes == (f"1 of 3 samples have no line in {table} and are left out: bee/1.jpg",)
    with pytest.raises(ValueError, match="neither 'error' nor 'drop'"):
        memload.relabel(*paths, missing="skip")  # type: ignore[arg-type]


def test_wrong_tables_and_outputs_are_errors(make_dataset: Make, tmp_path: Path) -> None:
    make_dataset("out.bin", rows=(2,))
    good = write(tmp_path / "good.csv", "key,age", "ant/0,4", "bee/1,5")
    other = write(tmp_path / "other.csv", "key,age", "x,4", "y,5")
    twice = write(tmp_path / "twice.csv", "key,age", "ant/0,4", "bee/1,5", "ant/0,6")
    data, new_index = tmp_path / "out.bin", tmp_path / "new.idx"
    with pytest.raises(ValueError, match=r"names no sample of .*out.idx. Its first name is 'x'"):
        memload.relabel(data, other, new_index)
    with pytest.raises(ValueError, match=r"twice.csv has 'ant/0' and 'ant/0', which both fit"):
        memload.relabel(data, twice, new_index)
    with pytest.raises(memload.SourceError, match="cannot be read"):
        memload.relabel(data, tmp_path / "none.csv", new_index)
    with pytest.raises(FileExistsError, match="--overwrite"):
        memload.relabel(tmp_path / "out.bin", good, tmp_path / "out.idx")
    with pytest.raises(ValueError, match="must end in"):
        memload.relabel(tmp_path / "out.bin", good, tmp_path / "new.bin")
    row = write(tmp_path / "row.csv", "key,row", "ant/0,4", "bee/1,5")
    with pytest.raises(ValueError, match="'row' cannot be the name"):
        memload.relabel(data, row, new_index)
    assert not new_index.exists()
