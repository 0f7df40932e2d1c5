"""Map-style data sets: what their samples decide."""

import math

import numpy as np
import pytest
from PIL import Image

import memload
from memload.building.first_samples import first_usable

PIXELS = np.zeros((40, 50, 3), np.uint8)
MASK = np.ones((40, 50), np.int64)


class Samples:
    """Samples that are made of the targets that are given. An exception is raised."""

    def __init__(self, *targets, **attributes):
        self.targets = targets
        vars(self).update(attributes)

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        target = self.targets[index]
        if isinstance(target, Exception):
            raise target
        return (PIXELS, target)


def values(source, name):
    return [source[row].columns[name] for row in range(len(source))]


@pytest.mark.parametrize(
    ("numbers", "dtype", "expected"),
    [
        ([3, 4, 5], "<i8", [3, 4, 5]),
        ([1, None, 3], "<f8", [1, math.nan, 3]),
        ([None, 2, 3], "<f8", [math.nan, 2, 3]),
        ([1, 2, 2.5], "<f8", [1, 2, 2.5]),
        ([1, math.nan, True], "<f8", [1, math.nan, 1]),
        ([False, True, 2], "<i8", [0, 1, 2]),
    ],
)
def test_none_and_fractions_after_integers_make_a_column_of_floats(numbers, dtype, expected):
    source = memload.DatasetSource(Samples(*({"x": number} for number in numbers)))
    assert source.schema["x"] == (dtype, (), False, False)
    assert values(source, "x") == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("late", [None, 2.5, math.nan])
def test_any_late_number_makes_a_column_of_floats_in_a_build(tmp_path, late):
    samples = Samples(*({"x": late if row == 90 else row, "y": row} for row in range(300)))
    report = memload.build(samples, tmp_path / "out.bin", size=8, num_workers=0)
    columns = memload.MemmapDataset(tmp_path / "out.bin").columns
    assert report.rejected == 0
    expected = [float(row) for row in range(300)]
    expected[90] = math.nan if late is None else late
    assert columns["x"].tolist() == pytest.approx(expected, nan_ok=True)
    assert columns["y"].tolist() == [*range(300)]
    assert str(columns["y"].dtype) == "torch.int64"


def test_samples_without_names_are_not_taken_for_old_ones(tmp_path):
    memload.build(Samples({"x": 1}, {"x": 2}), tmp_path / "out.bin", size=8, num_workers=0)
    with pytest.raises(memload.SourceError, match="have no names, only numbers"):
        memload.open_source(Samples({"x": 3}, {"x": 4}), new_to=tmp_path / "out.bin")


def test_large_integers_beside_a_late_none_are_not_rounded(tmp_path):
    samples = Samples(*({"x": None if row == 90 else 2**60 + row} for row in range(300)))
    with pytest.raises(memload.BuildError, match=r"'x' has integers above 2\*\*53 and missing"):
        memload.build(samples, tmp_path / "out.bin", size=8, num_workers=0)
    assert not (tmp_path / "out.idx").exists()


def test_a_sample_that_differs_is_rejected(tmp_path):
    targets = [{"x": 1, "y": [1, 2]}] * 200
    targets[150] = {"x": 2**63, "y": [1, 2]}
    targets[151] = {"x": 1, "y": [1, 2, 3]}
    report = memload.build(Samples(*targets), tmp_path / "out.bin", size=8, num_workers=0)
    assert (report.samples, report.rejected) == (198, 2)
    reasons = (tmp_path / "out.rejects.csv").read_text()
    assert "does not fit int64" in reasons
    assert "its shape is (3,) instead of (2,)" in reasons


def test_arrays_of_different_shapes_and_texts_are_left_out():
    source = memload.DatasetSource(
        Samples({"label": 0, "a": [1], "t": "x", "e": None}, {"label": 1, "a": [1, 2], "t": "y"})
    )
    assert list(source.schema) == ["label"]
    assert all(name in source.notes[-1] for name in ("t (text)", "e (missing)", "a (neither"))


@pytest.mark.parametrize(
    ("target", "columns"),
    [
        (7, {"label": 7}),
        (np.int64(7), {"label": 7}),
        (2.5, {"label": 2.5}),
        ((7, 2.5), {"label": 7, "target_0": 2.5}),
        ((2.5, 3.5), {"target_0": 2.5, "target_1": 3.5}),
        ({"cls": 7, "x": [1, 2]}, {"label": 7, "x": [1, 2]}),
    ],
)
def test_a_target_is_a_label_a_tuple_or_a_dict(target, columns):
    record = memload.DatasetSource(Samples(target))[0]
    assert {name: np.asarray(value).tolist() for name, value in record.columns.items()} == columns


def test_labels_may_be_names_of_classes():
    source = memload.DatasetSource(Samples("dog", "cat", "eel"), classes=["cat", "dog"])
    assert (source[0].columns, source.classes) == ({"label": 1}, ["cat", "dog"])
    with pytest.raises(memload.DecodeError, match="none of the 2 known"):
        source[2]
    assert source.with_classes(["dog", "x", "cat"])[0].columns == {"label": 0}
    own = Samples(1, 0, 2, None, classes=["b", "a"])
    pinned = memload.open_source(own, classes=["a", "c", "b"])
    assert [pinned[row].columns["label"] for row in (0, 1)] == [0, 2]
    for row, message in ((2, "none of the 2 known"), (3, "'label': it is missing")):
        with pytest.raises(memload.DecodeError, match=message):
            pinned[row]


def test_entries_are_named():
    class Dicts(Samples):
        def __getitem__(self, index):
            return {"left": PIXELS, "right": PIXELS + 1, "kind": index, "x": 5, "seg": MASK}

    options = {"image": "right", "label": "kind", "masks": {"mask": "seg"}}
    source = memload.DatasetSource(Dicts(0, 1), arrays=["left"], **options)
    assert source[1].image[0, 0, 0] == 1
    assert source[1].columns == {"label": 1, "x": 5}
    assert source.arrays == {"mask": "mask", "left": "array"}
    kept = memload.DatasetSource(Dicts(0), image="left", columns=["x"], label="x")
    assert kept[0].columns == {"label": 5}
    with pytest.raises(memload.SourceError, match="no entry image or img"):
        memload.DatasetSource(Dicts(0))


def test_the_second_part_of_a_sample_may_be_a_mask():
    for mask in (MASK, Image.fromarray(MASK.astype(np.uint8))):
        source = memload.DatasetSource(Samples(mask, None), masks=["mask"])
        assert np.array_equal(np.asarray(source[0].arrays["mask"]), MASK)
        assert source[1].arrays == {}


def box(*sizes):
    return [[0, 0, size, size] for size in sizes]


def test_boxes_and_what_belongs_to_them_are_filled_up():
    targets = [
        {"boxes": box(*range(count)), "labels": [7] * count, "score": [0.5] * count, "xy": [[1, 2]]}
        for count in (1, 3, 0, 2)
    ]
    source = memload.DatasetSource(Samples(*targets), boxes={"boxes": 3}, points=["xy"])
    assert source.schema["boxes"] == ("<f4", (3, 4), False, True)
    assert source.schema["xy"] == ("<f4", (1, 2), True, False)
    record = source[3].columns
    assert record["labels"].tolist() == [7, 7, -1]
    assert np.isnan(record["score"][2])
    assert np.isnan(record["boxes"][2]).all()
    assert source[2].columns["labels"].tolist() == [-1, -1, -1]
    assert any("filled up" in note and "labels, score" in note for note in source.notes)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"boxes": box(1, 2, 3), "labels": [1, 1, 1]}, "room for 2"),
        ({"boxes": [[5, 0, 1, 1]], "labels": [1]}, "ends before it begins"),
        ({"boxes": box(1), "labels": [1, 2]}, "2 items for 1 boxes"),
        ({"boxes": [[1, 2, 3]], "labels": [1]}, "not XYXY of \\(k, 4\\)"),
    ],
)
def test_a_sample_with_other_boxes_is_rejected(target, message):
    good = [{"boxes": box(1, 2), "labels": [1, 2]}, {"boxes": box(1), "labels": [1]}]
    targets = [*good * 75, target, *good * 50]
    source = memload.DatasetSource(Samples(*targets), boxes={"boxes": 2})
    with pytest.raises(memload.DecodeError, match=message):
        source[150]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"boxes": box(1, 2)}, "boxes={'boxes': 100}"),
        ({"bbox": []}, "boxes={'bbox': 100}"),
        ({"places": box(1, 2, 3)}, "boxes={'places': 100}"),
        ({"seg": MASK}, "masks=\\['seg'\\]"),
        (MASK, "masks=\\['mask'\\]"),
        ({"seg": Image.new("L", (50, 40))}, "looks like mask"),
        ({"landmarks": [[1, 2], [3, 4]]}, "points=\\['landmarks'\\]"),
        ([{"bbox": [1, 2, 3, 4]}], "The labels in 'label' are neither"),
        ("cat", "no list of its classes"),
    ],
)
def test_what_would_not_move_with_its_image_is_an_error(target, message):
    with pytest.raises(memload.SourceError, match=message):
        memload.DatasetSource(Samples(target))


def test_what_is_named_is_stored_as_it_is():
    source = memload.DatasetSource(Samples({"places": box(1, 2), "y": 1}), columns=["places"])
    assert source[0].columns["places"].shape == (2, 4)
    pose = memload.DatasetSource(Samples({"pose": np.eye(4)}))
    assert pose.schema["pose"].shape == (4, 4)


def test_first_samples_may_be_broken():
    source = memload.DatasetSource(Samples(ValueError("broken"), {"x": 1}, {"x": None}))
    assert source.schema["x"].dtype == "<f8"
    with pytest.raises(memload.SourceError, match="ValueError: broken"):
        memload.DatasetSource(Samples(ValueError("broken")))


class Crashing(Samples):
    def __getitem__(self, index):
        if self.targets[index] == "crash":
            import os

            os._exit(1)
        return super().__getitem__(index)


def test_a_worker_looks_at_samples_which_may_end_it():
    samples = Crashing("crash", {"x": 1}, {"x": 2})

    def look(function, keys):
        return first_usable(function, keys, num_workers=1, timeout=20)

    assert memload.open_source(samples, first_usable=look).schema["x"].dtype == "<i8"
