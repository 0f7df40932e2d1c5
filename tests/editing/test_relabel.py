"""Labels and other columns out of a table."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

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
        "the list of classes is new: dog, wolf. Before: ant, bee, cat",
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
        ValueError, match=r"1 of 3 samples has no line in .*t.csv: bee/1.jpg.*--missing drop"
    ):
        memload.relabel(*paths)
    assert not paths[2].exists()
    report = memload.relabel(*paths, missing="drop")
    new = Index.open(paths[2])
    assert (list(new.keys), new.columns["age"].tolist()) == (["ant/0.jpg", "cat/2.jpg"], [4, 5])
    assert new.columns["label"].tolist() == [0, 2]
    assert np.array_equal(rows_in(new), rows_in(index)[[0, 2]])
    assert report.notes == (f"1 of 3 samples has no line in {table} and is left out: bee/1.jpg",)
    with pytest.raises(ValueError, match="none of 'error', 'drop' and 'keep'"):
        memload.relabel(*paths, missing="skip")  # type: ignore[arg-type]


def relabelled(tmp_path: Path, *lines: str, **options: Any) -> tuple[Index, tuple[str, ...]]:
    """Return the index of out.bin with the columns of a table, and the notes."""
    table = write(tmp_path / "t.csv", *lines)
    paths = tmp_path / "out.bin", table, tmp_path / "new.idx"
    report = memload.relabel(*paths, overwrite=True, **options)
    return Index.open(paths[2]), report.notes


def test_new_classes_are_appended_and_noted(make_dataset: Make, tmp_path: Path) -> None:
    make_dataset("out.bin", rows=(3,))
    lines = "ant/0,aardvark", "bee/1,cat", "cat/2,ant"
    new, notes = relabelled(tmp_path, "key,label", *lines)
    assert new.classes == ("ant", "bee", "cat", "aardvark")
    assert new.columns["label"].tolist() == [3, 2, 0]
    assert notes == ("new classes, after those of before: aardvark",)
    new, notes = relabelled(tmp_path, "key,label", "ant/0,x", "bee/1,y", "cat/2,x")
    assert (new.classes, new.columns["label"].tolist()) == (("x", "y"), [0, 1, 0])
    assert notes == ("the list of classes is new: x, y. Before: ant, bee, cat",)
    names = ["cat", "x", "ant", "aardvark"]
    new, _ = relabelled(tmp_path, "key,label", *lines, classes=names)
    assert (new.classes, new.columns["label"].tolist()) == (tuple(names), [3, 0, 2])
    with pytest.raises(ValueError, match=r"not among the 2 classes: aardvark, ant"):
        relabelled(tmp_path, "key,label", *lines, classes=["cat", "x"])
    with pytest.raises(ValueError, match="not among the 2 classes: 0, 7"):
        relabelled(tmp_path, "key,label", "ant/0,7", "bee/1,0", "cat/2,0", classes=["cat", "x"])
    new, _ = relabelled(
        tmp_path, "key,label", "ant/0,1", "bee/1,3", "cat/2,1", classes=["3", "2", "1"]
    )
    assert (new.classes, new.columns["label"].tolist()) == (("3", "2", "1"), [2, 0, 2])


def test_lines_of_no_sample_make_no_classes(make_dataset: Make, tmp_path: Path) -> None:
    make_dataset("out.bin", rows=(2,))
    new, _ = relabelled(tmp_path, "key,label", "ant/0,x", "bee/1,y", "lost,a")
    assert (new.classes, new.columns["label"].tolist()) == (("x", "y"), [0, 1])


def test_a_number_that_is_the_name_of_a_class_is_the_name(
    make_dataset: Make, tmp_path: Path
) -> None:
    make_dataset(
        "out.bin",
        rows=(3,),
        classes=("1", "10", "2"),
        categories={"age": ("7", "07")},
        columns={"label": np.arange(3), "age": np.zeros(3, np.int64)},
    )
    new, _ = (
        relabelled(tmp_path, "key,label,age", "ant/0,1", "bee/1,2", "cat/2,1")
        if False
        else relabelled(tmp_path, "key,label,age", "ant/0,1,07", "bee/1,2,7", "cat/2,1,7")
    )
    assert (new.classes, new.columns["label"].tolist()) == (("1", "10", "2"), [0, 2, 0])
    assert (new.categories, new.columns["age"].tolist()) == ({"age": ("7", "07")}, [1, 0, 0])


def test_samples_without_a_line_may_keep_what_they_have(make_dataset: Make, tmp_path: Path) -> None:
    columns = {"label": np.array([0, 1, 2]), "age": np.array([1, 2, 3])}
    make_dataset("out.bin", rows=(3,), columns=columns)
    new, notes = relabelled(tmp_path, "key,label,age", "bee/1,elk,2.5", missing="keep")
    assert new.classes == ("ant", "bee", "cat", "elk")
    assert new.columns["label"].tolist() == [0, 3, 2]
    assert new.columns["age"].tolist() == [1, 2.5, 3]
    assert new.statistics["class_counts"] == [1, 0, 1, 1]
    table = tmp_path / "t.csv"
    assert notes == (
        f"2 of 3 samples have no line in {table} and keep what they have: ant/0.jpg, cat/2.jpg",
        "new classes, after those of before: elk",
    )
    with pytest.raises(ValueError, match="weight: the data set has no such column"):
        relabelled(tmp_path, "key,weight", "bee/1,1", missing="keep")
    with pytest.raises(ValueError, match="age: the table and the data set have values of diff"):
        relabelled(tmp_path, "key,age", "bee/1,young", missing="keep")


def test_numbers_of_no_class_are_named_where_other_samples_keep_theirs(
    make_dataset: Make, tmp_path: Path
) -> None:
    make_dataset("out.bin", rows=(4,))
    expected = "label: 3, 7 of the table are no numbers of ant, bee, cat, which count from 0 to 2"
    with pytest.raises(ValueError, match=expected):
        relabelled(tmp_path, "key,label", "ant/0,7", "bee/1,3", "cat/2,1", missing="keep")
    with pytest.raises(ValueError, match="label: -1 of the table is no number of ant, bee, cat"):
        relabelled(tmp_path, "key,label", "bee/1,-1", missing="keep")


def test_only_a_column_of_this_name_has_the_labels(make_dataset: Make, tmp_path: Path) -> None:
    make_dataset("out.bin", rows=(2,))
    new, notes = relabelled(tmp_path, "key,weather", "ant/0,sun", "bee/1,rain")
    assert (new.classes, new.columns["label"].tolist()) == (("ant", "bee", "cat"), [0, 1])
    assert (new.categories, notes) == ({"weather": ("rain", "sun")}, ())
    new, _ = relabelled(tmp_path, "key,weather", "ant/0,sun", "bee/1,rain", label_column="weather")
    assert (new.classes, new.columns["label"].tolist()) == (("rain", "sun"), [1, 0])


def test_an_exported_table_names_samples_by_their_keys(make_dataset: Make, tmp_path: Path) -> None:
    make_dataset("out.bin", rows=(2,))
    rows = "x/1.png,bee/1.jpg,b", "bee/1.png,ant/0.jpg,a"
    for options in ({}, {"key_column": "key"}):
        new, _ = relabelled(tmp_path, "file_name,key,label", *rows, **options)
        assert (new.classes, new.columns["label"].tolist()) == (("a", "b"), [0, 1])
        assert list(new.columns) == ["label"]


def test_two_lines_for_a_sample_are_an_error(make_dataset: Make, tmp_path: Path) -> None:
    make_dataset("out.bin", rows=(2,))
    lines = "ant/0.jpg,x", "bee/1.jpg,x", "bee/1,y"
    with pytest.raises(ValueError, match=r"'bee/1.jpg' and 'bee/1', which stand for the same"):
        relabelled(tmp_path, "key,label", *lines)


def test_a_column_that_cannot_be_read_does_not_leave_the_old_one(
    make_dataset: Make, tmp_path: Path
) -> None:
    make_dataset("out.bin", rows=(3,), columns={"age": np.arange(3)}, classes=None)
    with pytest.raises(ValueError, match=r"column 'age' cannot be read \('x' is not a n"):
        relabelled(tmp_path, "key,age", "ant/0,4", "bee/1,5", "cat/2,x")


def test_wrong_tables_and_outputs_are_errors(make_dataset: Make, tmp_path: Path) -> None:
    make_dataset("out.bin", rows=(2,))
    good = write(tmp_path / "good.csv", "key,age", "ant/0,4", "bee/1,5")
    other = write(tmp_path / "other.csv", "key,age", "x,4", "y,5")
    twice = write(tmp_path / "twice.csv", "key,age", "ant/0,4", "bee/1,5", "ant/0,6")
    data, new_index = tmp_path / "out.bin", tmp_path / "new.idx"
    with pytest.raises(ValueError, match=r"names no sample of .*out.idx. Its first name is 'x'"):
        memload.relabel(data, other, new_index)
    with pytest.raises(ValueError, match=r"twice.csv: 'ant/0' and 'ant/0' both fit"):
        memload.relabel(data, twice, new_index)
    with pytest.raises(memload.SourceError, match="cannot be read"):
        memload.relabel(data, tmp_path / "none.csv", new_index)
    for part in ("out.idx", "out.bin"):
        with pytest.raises(memload.SourceError, match=f"{part} belongs to a data set, and is no t"):
            memload.relabel(data, tmp_path / part, new_index)
    with pytest.raises(FileExistsError, match="--overwrite"):
        memload.relabel(tmp_path / "out.bin", good, tmp_path / "out.idx")
    with pytest.raises(ValueError, match="must end in"):
        memload.relabel(tmp_path / "out.bin", good, tmp_path / "new.bin")
    assert not new_index.exists()
