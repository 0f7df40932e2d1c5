"""Other labels and columns from tables: what they change, and what they leave alone."""

import json
import logging

import numpy as np
import pytest

import memload

#: An integer that a float64 does not hold.
LARGE = 2**60 + 1


@pytest.fixture
def table(tmp_path):
    """A function that writes lines of texts, or of objects as JSON, and returns the path."""

    def write(*lines, name="table.csv"):
        path = tmp_path / name
        path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
        return path

    return write


def labels(index):
    return [index.classes[number] for number in index.columns["label"].tolist()]


@pytest.mark.parametrize(
    ("empty", "name"), [("", "table.csv"), ({"key": "bee/1.jpg", "pid": None}, "table.jsonl")]
)
def test_samples_keep_large_integers_beside_an_empty_cell(make_dataset, table, empty, name):
    index = memload.with_columns(make_dataset(), pid=[LARGE + number for number in range(5)])
    lines = ["key,pid", "ant/0.jpg,7", "bee/1.jpg,"]
    if name.endswith("l"):
        lines = [{"key": "ant/0.jpg", "pid": 7}, empty]
    changed = memload.relabel(index, table(*lines, name=name), missing="keep")
    assert changed.columns["pid"].dtype == np.int64
    assert changed.columns["pid"].tolist() == [7, LARGE + 1, LARGE + 2, LARGE + 3, LARGE + 4]


def test_large_integers_beside_fractions_are_refused_rather_than_rounded(make_dataset, table):
    index = memload.with_columns(make_dataset(), pid=[LARGE] * 5)
    with pytest.raises(ValueError, match=r"pid: .*integers above 2⁵³ beside missing"):
        memload.relabel(index, table("key,pid", "ant/0.jpg,0.5"), missing="keep")
    lines = ["key,pid", *(f"{key},{LARGE}" for key in index.keys[:4]), "bee/4.jpg,"]
    with pytest.raises(ValueError, match=r"pid.*(cannot be read|above 2⁵³)"):
        memload.relabel(index, table(*lines))


@pytest.mark.parametrize("column", ["label", "class"])
@pytest.mark.parametrize("name", ["table.csv", "table.jsonl"])
def test_labels_are_found_as_builds_find_them_and_changes_are_counted(
    make_dataset, table, caplog, column, name
):
    caplog.set_level(logging.INFO)
    index = make_dataset()
    rows = [
        {"file": key, column: "dog" if number == 3 else key[:3]}
        for number, key in enumerate(index.keys)
    ]
    lines = [f"file,{column}", *(",".join(row.values()) for row in rows)]
    changed = memload.relabel(
        index, table(*(rows if name.endswith("l") else lines), name=name), key="file"
    )
    assert [*changed.columns] == ["label"]
    assert labels(changed) == ["ant", "bee", "cat", "dog", "bee"]
    assert "1 of 5 labels changed" in caplog.text
    assert "new classes: dog" in caplog.text


def test_it_warns_if_no_label_changes_and_says_if_there_is_none(make_dataset, table, caplog):
    index = make_dataset()
    memload.relabel(index, table("key,label", *(f"{key},{key[:3]}" for key in index.keys)))
    assert "0 of 5 labels changed" in caplog.text
    caplog.set_level(logging.INFO)
    changed = memload.relabel(index, table("key,kind", *(f"{key},x" for key in index.keys)))
    assert "table.csv has no column label" in caplog.text
    assert changed.categories == {"kind": ("x",)}
    named = memload.relabel(
        index, table("key,kind", *(f"{key},x" for key in index.keys)), label="kind"
    )
    assert labels(named) == ["x"] * 5


def test_a_column_called_class_of_the_data_set_is_no_label(make_dataset, table):
    index = memload.with_columns(make_dataset(), **{"class": list("abcde")})
    changed = memload.relabel(index, table("key,class", *(f"{key},x" for key in index.keys)))
    assert changed.categories == {"class": ("x",)}
    assert labels(changed) == labels(index)


def test_classes_keep_their_numbers_unless_none_is_known_or_a_list_is_given(make_dataset, table):
    index = make_dataset()
    some = table(
        "key,label",
        *(f"{key},{'emu' if key < 'b' else 'bee'}" for key in index.keys),
        name="some.csv",
    )
    assert memload.relabel(index, some).classes == ("ant", "bee", "cat", "emu")
    new = table("key,label", *(f"{key},{key[:1]}" for key in index.keys), name="new.csv")
    assert memload.relabel(index, new).classes == ("a", "b", "c")
    given = memload.relabel(index, some, classes=["yak", "emu", "bee"])
    assert given.classes == ("yak", "emu", "bee")
    assert labels(given) == ["emu", "bee", "bee", "emu", "bee"]
    assert given.statistics["class_counts"] == [0, 2, 3]
    with pytest.raises(ValueError, match="among the 2 classes: bee"):
        memload.relabel(index, some, classes=["yak", "emu"])
    unlabelled = table("key,age", *(f"{key},3" for key in index.keys), name="ages.csv")
    with pytest.raises(ValueError, match="among the 3 classes: ant"):
        memload.relabel(index, unlabelled, classes=["yak", "emu", "bee"])
    numbers = table(
        "key,label", *(f"{key},{n % 2}" for n, key in enumerate(index.keys)), name="numbers.csv"
    )
    assert labels(memload.relabel(index, numbers)) == ["ant", "bee", "ant", "bee", "ant"]
    far = table("key,label", *(f"{key},{n}" for n, key in enumerate(index.keys)), name="far.csv")
    assert memload.relabel(index, far).classes is None


def test_numbers_of_classes_that_keep_the_others_are_checked(make_dataset, table):
    index = make_dataset()
    assert labels(memload.relabel(index, table("key,label", "ant/0,2"), missing="keep"))[0] == "cat"
    with pytest.raises(ValueError, match="label: neither numbers"):
        memload.relabel(index, table("key,label", "ant/0,3"), missing="keep")
    given = ["cat", "bee", "ant"]
    changed = memload.relabel(index, table("key,label", "ant/0,0"), missing="keep", classes=given)
    assert (changed.classes, labels(changed)) == (tuple(given), ["cat", "bee", "cat", "ant", "bee"])


def test_points_and_boxes_stay_such_if_the_shape_fits(make_dataset):
    index = make_dataset(
        columns={"p": np.zeros((5, 1, 2), "f4"), "b": np.zeros((5, 1, 4), "f4")},
        classes=None, points=("p",), boxes=("b",),
    )  # fmt: skip
    changed = memload.with_columns(index, p=np.ones((5, 1, 2), int), b=np.ones((5, 1, 4)))
    assert (changed.points, changed.boxes) == (("p",), ("b",))
    assert changed.columns["b"].dtype == changed.columns["p"].dtype == np.float32
    changed = memload.with_columns(index, p=np.ones((5, 2)), b=[1] * 5)
    assert (changed.points, changed.boxes) == ((), ())


def test_lists_and_nulls_of_json_lines_become_arrays_and_nan(make_dataset, table):
    index = make_dataset(rows=(2,))
    rows = [
        {"file_name": "bee/1.jpg", "pose": [[1, 2.5]], "age": None, "code": "007", "note": None},
        {"file_name": "ant/0.jpg", "pose": [[3, 4]], "age": 3, "code": "8", "note": "x"},
    ]
    changed = memload.relabel(index, table(*rows, name="table.jsonl"))
    assert changed.columns["pose"].tolist() == [[[3, 4]], [[1, 2.5]]]
    assert str(changed.columns["age"].tolist()) == "[3.0, nan]"
    assert changed.categories == {"code": ("007", "8"), "note": ("", "x")}


def test_lines_without_a_sample_are_logged_and_samples_without_a_line_too(
    make_dataset, table, caplog
):
    caplog.set_level(logging.INFO)
    path = table("key,label", "ant/0,bee", "lost,ant", "bee/1.jpg,bee")
    assert labels(memload.relabel(make_dataset(), path, missing="drop")) == ["bee", "bee"]
    assert "1 line in" in caplog.text
    assert "without a sample: lost" in caplog.text
    assert "3 of 5 samples without a line" in caplog.text
