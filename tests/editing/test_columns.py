"""Other columns for a data set that is open: `MemmapDataset.with_columns`."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import memload
from memload.storage.index import Index

Make = Callable[..., Index]


@pytest.fixture(autouse=True)
def _quick_collections(quick_collections: None) -> None:
    """See `quick_collections`: these tests load torch."""


@pytest.fixture
def path(make_dataset: Make) -> Path:
    return make_dataset("out.bin").path


def test_a_data_set_with_other_labels_is_saved_and_opened_again(path: Path, tmp_path: Path) -> None:
    dataset = memload.MemmapDataset(path)
    changed = dataset.with_columns(label=["x", "y", "x", "z", "x"])
    changed.save(tmp_path / "new.idx")
    for each in (changed, memload.MemmapDataset(tmp_path / "new.idx")):
        assert (each.classes, each.targets) == (["x", "y", "z"], [0, 1, 0, 2, 0])
        assert torch.equal(each[3][0], dataset[3][0])
        assert each.index.statistics["class_counts"] == [3, 1, 1]
    assert dataset.classes == ["ant", "bee", "cat"]
    assert memload.verify(tmp_path / "new.idx").ok
    assert changed.fingerprint == memload.MemmapDataset(tmp_path / "new.idx").fingerprint


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        (torch.arange(5, dtype=torch.int32), torch.int64, [0, 1, 2, 3, 4]),
        (torch.ones(5, dtype=torch.float16), torch.float64, [1.0] * 5),
        (np.array([True, False, True, False, True]), torch.int64, [1, 0, 1, 0, 1]),
        (range(5), torch.int64, [0, 1, 2, 3, 4]),
        (
            np.arange(10, dtype=">i2").reshape(5, 2),
            torch.int16,
            [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]],
        ),
        ([[0.5], [1], [2], [3], [4]], torch.float64, [[0.5], [1], [2], [3], [4]]),
    ],
)
def test_arrays_tensors_and_lists_become_columns(
    path: Path, values: Any, dtype: torch.dtype, expected: list[Any]
) -> None:
    dataset = memload.MemmapDataset(path)
    changed = dataset.with_columns(extra=values)
    assert (changed.columns["extra"].dtype, changed.columns["extra"].tolist()) == (dtype, expected)
    assert changed.sample_names == ("label", "extra")


def test_texts_become_categories_and_known_ones_keep_their_numbers(
    path: Path,
) -> None:
    dataset = memload.MemmapDataset(path)
    changed = dataset.with_columns(split=["val", "train", "val", "val", "train"])
    assert changed.categories == {"split": ["train", "val"]}
    assert [item[2] for item in changed] == [1, 0, 1, 1, 0]
    again = changed.with_columns(split=["val"] * 5, label=["cat", "ant", "ant", "ant", "ant"])
    assert (again.categories["split"], again[0][1:]) == (["train", "val"], (2, 1))
    assert again.classes == ["ant", "bee", "cat"]
    assert dataset.with_columns(label=torch.full((5,), 2)).classes == ["ant", "bee", "cat"]
    beyond = dataset.with_columns(label=torch.full((5,), 3))
    assert (beyond.classes, beyond.targets) == ([], [3] * 5)
    assert dataset.with_columns(label=np.zeros((5, 3), np.float32)).classes == []


def test_none_removes_columns_and_arrays(path: Path, tmp_path: Path) -> None:
    dataset = memload.MemmapDataset(path)
    without = dataset.with_columns(label=None)
    assert (without.classes, without.columns, without[0].shape) == ([], {}, (3, 4, 6))
    np.save(tmp_path / "f.npy", np.zeros((5, 2)))
    memload.join(tmp_path / "both.idx", dataset.path, f=tmp_path / "f.npy")
    both = memload.MemmapDataset(tmp_path / "both.idx")
    both.with_columns(f=None).save(tmp_path / "again.idx")
    assert [array.name for array in Index.open(tmp_path / "again.idx").arrays] == ["image"]
    assert memload.MemmapDataset(tmp_path / "again.idx").fingerprint == dataset.fingerprint


def test_points_and_boxes_stay_such_if_their_shape_fits(make_dataset: Make) -> None:
    columns = {"marks": np.zeros((5, 2, 2), "<f4"), "box": np.zeros((5, 3, 4), "<f4")}
    made = make_dataset(columns=columns, classes=None, points=("marks",), boxes=("box",))
    dataset = memload.MemmapDataset(made.path)
    moved = dataset.with_columns(marks=dataset.columns["marks"] + 1, box=dataset.columns["box"] + 1)
    assert (moved.index.points, moved.index.boxes) == (("marks",), ("box",))
    whole = np.arange(20).reshape(5, 2, 2)
    other = dataset.with_columns(marks=whole, box=np.zeros((5, 9, 4)))  # of other types
    assert (other.index.points, other.index.boxes) == (("marks",), ("box",))
    assert {name: column.dtype for name, column in other.index.columns.items()} == {
        "marks": np.float32,
        "box": np.float32,
    }
    assert np.array_equal(other.index.columns["marks"], whole)
    other = dataset.with_columns(marks=np.zeros(5), box=np.zeros((5, 3, 3)))
    assert (other.index.points, other.index.boxes) == ((), ())


def test_views_narrowed_columns_and_other_processes_see_the_new_columns(
    make_dataset: Make, tmp_path: Path
) -> None:
    index = make_dataset("out.bin", columns={"label": np.arange(5) % 3, "age": np.arange(5)})
    narrowed = memload.MemmapDataset(index.path, columns=["age"])
    changed = narrowed[1:4].with_columns(age=[7, 8, 9], weight=[0.5, 1, 2])
    assert changed.sample_names == ("age", "weight")
    assert [item[1:] for item in changed] == [(7, 0.5), (8, 1.0), (9, 2.0)]
    assert torch.equal(changed[0][0], narrowed[1][0])
    view = changed.where(age=[8, 9])
    again = pickle.loads(pickle.dumps(view))
    assert [item[1:] for item in again] == [(8, 1.0), (9, 2.0)]
    assert (list(again.keys), again.fingerprint) == (list(view.keys), view.fingerprint)
    batches = [batch.age.tolist() for batch in memload.Loader(changed, 2)]
    assert batches == [[7, 8], [9]]
    assert changed.with_columns(weight=None).sample_names == ("age",)


def test_the_users_values_are_copied(path: Path) -> None:
    dataset = memload.MemmapDataset(path)
    values = np.zeros((5, 2), np.float32)
    changed = dataset.with_columns(extra=values)
    values[:] = 1
    assert not changed.columns["extra"].any()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"label": [0, 1]}, "label: there are 2 values, but 5 samples"),
        ({"label": 3}, "label: there is one value, but 5 samples"),
        ({"age": [[1], [1, 2], [1], [1], [1]]}, "age: the values are no array"),
        ({"age": [None] * 5}, "age: object .* is neither numbers"),
        ({"age": np.zeros(5, np.complex64)}, "age: complex64 .* is neither numbers"),
        ({"age": np.full(5, 2**63, np.uint64)}, "age: it has numbers above"),
        ({"age": [["a"]] * 5}, "age: .* is neither numbers"),
        ({"age": None}, "age: there is no such column to remove. There is label"),
        ({"image": None}, "image: a data set cannot be without its images"),
        ({"image": np.zeros(5)}, "image: an array has this name"),
        ({"a/b": np.zeros(5)}, "'a/b' cannot be the name"),
        ({"flags": np.zeros(5)}, "'flags' cannot be the name"),
    ],
)
def test_values_that_are_no_columns_are_errors(
    path: Path, columns: dict[str, Any], message: str
) -> None:
    dataset = memload.MemmapDataset(path)
    with pytest.raises(ValueError, match=message):
        dataset.with_columns(**columns)
