"""Masks, arrays, points and boxes among the entries of a map-style data set's samples."""

import enum
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import memload
from memload.building.sources.dataset import DatasetSource
from memload.building.sources.opening import open_source
from memload.building.sources.record import Column
from memload.errors import DecodeError, SourceError


class Samples:
    """Samples made by a function of their number."""

    def __init__(self, make: Callable[[int], Any], count: int = 6) -> None:
        self.make, self.count = make, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class Format(enum.Enum):
    """As that of torchvision's tv_tensors."""

    XYXY = "XYXY"
    XYWH = "XYWH"


class BoundingBoxes(torch.Tensor):
    """Like torchvision's, which is not needed here."""

    format: Format


def boxes(values: Any, form: Format = Format.XYXY) -> Any:
    found = torch.tensor(values, dtype=torch.float32).reshape(-1, 4).as_subclass(BoundingBoxes)
    found.format = form
    return found


IMAGE = np.zeros((10, 12, 3), np.uint8)
IDS = np.arange(120, dtype=np.uint8).reshape(10, 12) % 5


def palette(number: int = 0) -> Image.Image:
    mask = Image.fromarray((IDS + number).astype(np.uint8), "L")
    mask.putpalette(list(range(255, -1, -1)) * 3)
    assert mask.mode == "P"
    return mask


@pytest.mark.parametrize(
    "mask",
    [
        IDS,
        IDS.astype(np.int64),
        IDS[None],
        torch.from_numpy(IDS),
        torch.from_numpy(IDS).long()[None],
        IDS.tolist(),
        IDS > 2,
    ],
)
def test_masks_are_arrays_of_ids(mask: Any) -> None:
    source = open_source(Samples(lambda i: (IMAGE, {"label": i, "mask": mask})), masks=["mask"])
    found = source[1].arrays["mask"]
    assert (source.arrays, source[1].columns) == ({"mask": "mask"}, {"label": 1})
    assert found.shape == (10, 12)
    expected = IDS > 2 if found.dtype == bool or found.max() == 1 else IDS
    np.testing.assert_array_equal(found, expected)


def test_the_build_decides_on_the_type_of_masks() -> None:
    samples = Samples(lambda i: {"image": IMAGE, "mask": torch.full((10, 12), (300, -1, 70000)[i])})
    source = open_source(samples, masks=["mask"])
    assert [source[i].arrays["mask"].dtype for i in range(3)] == [np.int64] * 3


def test_arrays_keep_their_shape_and_type() -> None:
    depth = torch.arange(24, dtype=torch.float16).reshape(2, 3, 4)
    source = open_source(
        Samples(lambda i: {"image": IMAGE, "depth": depth, "vector": [i, 2, 3]}),
        arrays=["vector", "depth"],
    )
    assert source.arrays == {"vector": "array", "depth": "array"}
    assert source.schema == {}
    found = source[1].arrays["depth"]
    assert (found.dtype, found.shape) == (np.float16, (2, 3, 4))
    assert source[1].arrays["vector"].tolist() == [1, 2, 3]


def test_a_mask_that_is_the_target_is_named_freely() -> None:
    source = open_source(Samples(lambda i: (IMAGE, palette())), masks=["segmentation"])
    assert (source.arrays, source.schema, source.notes) == ({"segmentation": "mask"}, {}, [])
    np.testing.assert_array_equal(np.array(source[2].arrays["segmentation"]), IDS)


def test_a_mask_beside_a_label_has_its_position_as_name() -> None:
    source = open_source(Samples(lambda i: (IMAGE, (i, palette()))), masks=["target_0"])
    assert (source.arrays, source[3].columns) == ({"target_0": "mask"}, {"label": 3})
    renamed = DatasetSource(Samples(lambda i: (IMAGE, (i, palette()))), masks={"mask": "target_0"})
    assert renamed.arrays == {"mask": "mask"}


def test_arrays_go_with_named_columns() -> None:
    samples = Samples(lambda i: {"photo": IMAGE, "segm": palette(), "a": i, "b": i, "p": [[1, 2]]})
    source = DatasetSource(
        samples, image="photo", columns=["a"], masks={"mask": "segm"}, points=["p"]
    )
    assert source.schema == {"a": Column("<i8"), "p": Column("<f4", (1, 2), points=True)}
    assert list(source[0].arrays) == ["mask"]


def test_a_sample_may_lack_its_mask() -> None:
    samples = Samples(lambda i: {"image": IMAGE, "mask": None if i == 1 else palette()})
    source = open_source(samples, masks=["mask"])
    assert [list(source[i].arrays) for i in range(3)] == [["mask"], [], ["mask"]]


def test_columns_may_be_chosen_from_a_target(tmp_path: Path) -> None:
    many = np.zeros((3, 10, 12), bool)  # as the masks of three objects
    samples = Samples(lambda i: (IMAGE, {"masks": many, "boxes": [[0, 0, 1, 1]] * i, "id": i}))
    source = DatasetSource(samples, columns={"number": "id"}, boxes={"boxes": 6})
    assert list(source.schema) == ["boxes", "number"]
    assert source[4].columns["number"] == 4
    both = DatasetSource(Samples(lambda i: (IMAGE, (i, palette()))), columns=["label"])
    assert (both.arrays, both[3].columns) == ({}, {"label": 3})


def test_pictures_that_are_not_named_are_an_error_with_the_remedy() -> None:
    for target, name in [
        (palette(), "mask"),
        ({"m": palette()}, "m"),
        ((1, palette()), "target_0"),
    ]:
        with pytest.raises(SourceError, match=rf"is a picture. .*masks=\['{name}'\]"):
            open_source(Samples(lambda i, target=target: (IMAGE, target)))


def test_entries_may_get_other_names() -> None:
    samples = Samples(lambda i: {"image": IMAGE, "segm": IDS, "d": IDS})
    source = open_source(samples, masks={"mask": "segm"}, arrays={"depth": "d"})
    assert source.arrays == {"mask": "mask", "depth": "array"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"masks": ["msk"]}, r"masks: the samples .* no entry 'msk', only \['id', 'm', 'p'\]"),
        ({"masks": ["id"]}, "masks: 'id' is the number 0 in the first sample"),
        ({"points": ["q"]}, r"points: the samples .* no entry 'q', only \['id', 'm', 'p'\]"),
        ({"boxes": {"q": 2}}, r"boxes: the samples .* no entry 'q'"),
        ({"boxes": {"p": 0}}, "boxes: 'p' has 0"),
        ({"masks": ["label"]}, r"cannot be named 'label'.*masks=\['mask'\]"),
        ({"masks": ["m"], "arrays": ["m"]}, "'m' is among the masks"),
        ({"masks": "masks/"}, "masks does not exist. Check the path"),
        ({"masks": Path("mask")}, "mask does not exist. Check the path"),
        ({"arrays": {"d": "q"}}, r"arrays: the samples .* no entry 'q'"),
        ({"points": {"p": "x*"}}, "points must be a list"),
        ({"boxes": ["p"]}, "boxes must be a mapping"),
    ],
)
def test_wrong_names_are_told_with_what_there_is(arguments: dict[str, Any], message: str) -> None:
    samples = Samples(lambda i: {"image": IMAGE, "m": IDS[:5], "id": i, "p": [[1, 2], [3, 4]]})
    with pytest.raises((SourceError, ValueError, TypeError), match=message):
        open_source(samples, **arguments)


# ----------------------------------------------------------------- boxes and masks without a name


@pytest.mark.parametrize(
    ("entries", "remedy"),
    [
        (lambda i: {"boxes": [[1, 2, 3, 4]]}, "up to 1 in .* boxes={'boxes': 1}"),
        (lambda i: {"bbox": [1, 2, 3, 4]}, "boxes={'bbox': 1}"),
        (lambda i: {"bboxes": torch.ones(i % 4, 4)}, "up to 3 in .* boxes={'bboxes': 3}"),
        (lambda i: {"x": np.ones((1 + i % 4, 4))}, "up to 4 in .* boxes={'x': 4}"),
        (lambda i: {"x": boxes([[1, 2, 3, 4]])}, "boxes={'x': 1}"),
        (lambda i: {"boxes": []}, "boxes={'boxes': 100}"),
        (lambda i: {"label": torch.from_numpy(IDS).long()}, r"masks=\['mask'\]"),
        (lambda i: {"flow": np.zeros((10, 12, 2))}, r"a mask for each object"),
        (lambda i: {"mask": IDS}, r"shape \(10, 12\).*masks=\['mask'\]"),
        (lambda i: {"masks": torch.ones(1, 10, 12)}, r"Name it: masks=\['masks'\]"),
        (
            lambda i: {"masks": np.zeros((3, 10, 12), bool)},
            r"a mask for each object.*arange\(1, len\(masks\)",
        ),
    ],
)
def test_boxes_and_masks_that_are_not_named_are_an_error(
    entries: Callable[[int], dict[str, Any]], remedy: str
) -> None:
    for make in (
        lambda i: (IMAGE, entries(i)),
        lambda i: {"image": Image.fromarray(IMAGE), **entries(i)},
        lambda i: {"image": torch.zeros(3, 10, 12, dtype=torch.uint8), **entries(i)},
    ):
        with pytest.raises(SourceError, match=rf"(?s){remedy}.*columns=\[…\]"):
            open_source(Samples(make, 30))


def test_boxes_and_masks_are_stored_as_they_are_on_request() -> None:
    samples = Samples(lambda i: (IMAGE, {"boxes": [[1, 2, 3, 4]], "mask": IDS, "n": i}))
    source = DatasetSource(samples, columns=["boxes", "mask"])
    assert source.schema == {"boxes": Column("<i8", (1, 4)), "mask": Column("|u1", (10, 12))}
    assert list(DatasetSource(samples, columns=["n"]).schema) == ["n"]


def test_other_arrays_of_four_columns_are_stored_as_they_are() -> None:
    samples = Samples(lambda i: (IMAGE, {"pose": np.eye(4), "q": [1, 2, 3, 4], "mask": [1, 0]}))
    assert list(open_source(samples).schema) == ["pose", "q", "mask"]
    many = Samples(lambda i: (IMAGE, {"boxes": [[0, 0, 1, 1]] * i, "turned": np.ones((i, 4))}))
    assert open_source(many, boxes={"boxes": 6}).schema["turned"].shape == (6, 4)


def test_boxes_of_an_unusual_name_and_a_fixed_number_are_noted() -> None:
    samples = Samples(lambda i: (IMAGE, {"label": i, "rois": [[1, 2, 3, 4], [5, 6, 7, 8]]}))
    (note,) = open_source(samples).notes
    assert "boxes={'rois': 2}" in note
    single = Samples(lambda i: (IMAGE, {"label": i, "bndbox": [1, 2, 30, 40], "q": [1, 0, 0, 0]}))
    assert open_source(single).notes == [
        "bndbox is stored as it is; boxes={'bndbox': 1} lets boxes move with their images"
    ]
    assert open_source(single, boxes={"bndbox": 1}).notes == []


def test_the_first_sample_may_lack_its_mask() -> None:
    samples = Samples(lambda i: {"image": IMAGE, "label": i} | ({"mask": IDS} if i else {}))
    source = open_source(samples, masks=["mask"])
    assert [list(source[i].arrays) for i in range(2)] == [[], ["mask"]]


def test_what_belongs_to_boxes_is_found_far_from_the_first_samples() -> None:
    def sample(index: int) -> tuple[Any, dict[str, Any]]:
        count = 1 + (index > 90)
        return IMAGE, {"boxes": [[0, 0, 1, 1]] * count, "kinds": [7] * count, "image_id": [index]}

    schema = open_source(Samples(sample, 100), boxes={"boxes": 2}).schema
    assert (schema["kinds"].shape, schema["image_id"].shape) == ((2,), (1,))


def test_boxes_within_a_dict_are_told_apart() -> None:
    samples = Samples(lambda i: {"image": IMAGE, "objects": {"bbox": [[0, 0, 1, 1]]}})
    with pytest.raises(SourceError, match=r"'objects' are a dict of bbox.*dataset.flatten\(\)"):
        open_source(samples, boxes={"objects": 2})


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("arguments", [{}, {"boxes": {"bbox": 9}}, {"masks": ["mask"]}])
def test_lists_of_dicts_as_in_coco_are_told_with_what_to_do(
    first: int, arguments: dict[str, Any]
) -> None:
    def target(index: int) -> list[dict[str, Any]]:
        return [{"bbox": [1, 2, 3, 4], "category_id": 1}] * (first + index)

    message = r"list of dicts of bbox, category_id, .*x \+ width.*boxes={'boxes': 100}"
    with pytest.raises(SourceError, match=message):
        open_source(Samples(lambda i: (IMAGE, target(i))), **arguments)
    if not arguments:
        with pytest.raises(SourceError, match=f"'objects' .*{message}"):
            open_source(Samples(lambda i: {"image": IMAGE, "objects": target(i)}))


def test_points_that_are_not_named_are_noted() -> None:
    samples = Samples(lambda i: (IMAGE, {"label": i, "landmarks": [[1.5, 2], [3, 4]]}))
    assert open_source(samples).notes == [
        "landmarks is stored as it is; points=['landmarks'] lets points (k, 2) move with their images"
    ]
    assert open_source(samples, points=["landmarks"]).notes == []


# ------------------------------------------------------------------------------------------- boxes


def detection(index: int) -> tuple[Any, dict[str, Any]]:
    """A sample as torchvision's detection has it, with as many boxes as its number."""
    return IMAGE, {
        "boxes": boxes([[1, 2, 3, 4.5]] * index),
        "labels": torch.arange(index),
        "area": torch.ones(index),
        "iscrowd": torch.zeros(index, dtype=torch.bool),
        "image_id": torch.tensor([index]),
    }


def test_boxes_and_what_belongs_to_them_are_filled_up() -> None:
    source = open_source(Samples(detection), boxes={"boxes": 4})
    assert source.schema == {
        "boxes": Column("<f4", (4, 4), boxes=True),
        "labels": Column("<i8", (4,)),
        "area": Column("<f4", (4,)),
        "iscrowd": Column("<i8", (4,)),
        "image_id": Column("<i8", (1,)),
    }
    assert source.notes == ["filled up with -1 or NaN beside boxes: labels, area, iscrowd"]
    columns = source[2].columns
    nan = [np.nan] * 4
    np.testing.assert_array_equal(columns["boxes"], [[1, 2, 3, 4.5]] * 2 + [nan] * 2)
    assert columns["boxes"].dtype == np.float32
    assert columns["labels"].tolist() == [0, 1, -1, -1]
    assert columns["iscrowd"].tolist() == [0, 0, -1, -1]
    np.testing.assert_array_equal(columns["area"], [1, 1, np.nan, np.nan])
    assert source[0].columns["labels"].tolist() == [-1] * 4
    assert np.isnan(source[0].columns["boxes"]).all()
    assert source[1].columns["image_id"].tolist() == [1]
    with pytest.raises(DecodeError, match="5 boxes in 'boxes', and there is room for 4"):
        source[5]


def test_texts_for_each_box_are_left_out(tmp_path: Path) -> None:
    def target(index: int) -> dict[str, Any]:
        return {
            "boxes": [[0, 0, 1, 1]] * index,
            "name": ["a", "b", "c"][:index],
            "kinds": np.array(["x", "y", "z"])[:index],
            "caption": None if index == 3 else "text",
            "number": index,
        }

    source = open_source(Samples(lambda i: (IMAGE, target(i)), 4), boxes={"boxes": 3})
    assert source.notes == ["skipped 3 columns: name (text), kinds (text), caption (text)"]
    assert [source[i].columns["number"] for i in range(4)] == [0, 1, 2, 3]
    alone = open_source(Samples(lambda i: (IMAGE, {"label": i, "words": ["a", "b"]})))
    assert list(alone[1].columns) == ["label"]
    with pytest.raises(SourceError, match="Column 'label' is not a number"):
        open_source(Samples(lambda i: (IMAGE, {"label": ["a", "b"]})))


def test_points_are_not_filled_up_where_there_happen_to_be_as_many_boxes() -> None:
    samples = Samples(
        lambda i: (IMAGE, {"boxes": [[0, 0, 1, 1]] * (1 + i % 2), "eyes": [[1, 2], [3, 4]]})
    )
    source = open_source(samples, boxes={"boxes": 5}, points=["eyes"])
    assert source.schema["eyes"] == Column("<f4", (2, 2), points=True)
    assert np.array(source[0].columns["eyes"]).tolist() == [[1, 2], [3, 4]]
    assert np.array(source[1].columns["eyes"]).tolist() == [[1, 2], [3, 4]]


def test_a_build_keeps_boxes_of_a_data_set(tmp_path: Path) -> None:
    report = memload.build(
        Samples(detection, 5),
        tmp_path / "out.bin",
        boxes={"boxes": 3},
        size=(10, 12),
        max_rejects=1,
        num_workers=1,
        progress=False,
    )
    assert (report.samples, report.rejected) == (4, 1)
    reason = "4 boxes in 'boxes', and there is room for 3. Raise it .*: boxes={'boxes': 4}"
    assert re.search(reason, report.ledger.read_text())
    dataset = memload.MemmapDataset(tmp_path / "out.bin")
    np.testing.assert_array_equal(dataset.columns["labels"][3], [0, 1, 2])
    np.testing.assert_array_equal(dataset.columns["boxes"][1][0], [1, 2, 3, 4.5])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[5, 1, 2, 3]], r"box \[5, 1, 2, 3\] in 'boxes' .* x, y, width, height"),
        ([1, 2, 3], r"shape \(3,\), and not numbers of \(k, 4\)"),
        ([[1, 2, 3]], r"shape \(1, 3\), and not numbers of \(k, 4\)"),
        (boxes([[0, 0, 1, 1]], Format.XYWH), r"are XYWH, and XYXY is stored"),
    ],
)
def test_boxes_that_are_none_are_rejected(value: Any, message: str) -> None:
    samples = Samples(lambda i: (IMAGE, {"boxes": value if i else [[0, 0, 1, 1]]}))
    with pytest.raises((DecodeError, SourceError), match=message):
        open_source(samples, boxes={"boxes": 2})[1]


def test_entries_of_a_fixed_length_are_not_filled_up() -> None:
    def sample(index: int) -> tuple[Any, dict[str, Any]]:
        count = 2 + (index == 3)
        target = {"boxes": [[0, 0, 1, 1]] * count, "kinds": [1.5] * count, "pair": [1, 2]}
        return IMAGE, target | {"marks": [[1, 2], [3, 4]]}

    arguments: dict[str, Any] = {"boxes": {"boxes": 5}, "points": ["marks"]}
    source = open_source(Samples(sample), **arguments)
    assert source.schema["pair"] == Column("<i8", (2,))
    assert source.schema["kinds"] == Column("<f8", (5,))
    assert source.schema["marks"] == Column("<f4", (2, 2), points=True)
    same = open_source(Samples(sample, 3), **arguments)  # which all have two boxes
    assert same.schema["marks"] == Column("<f4", (2, 2), points=True)


def test_items_of_another_number_than_boxes_are_rejected() -> None:
    samples = Samples(
        lambda i: (IMAGE, {"boxes": [[0, 0, 1, 1]] * 3, "kind": [1, 2, 3] if i < 2 else [1]})
    )
    source = open_source(samples, boxes={"boxes": 5})
    assert source[1].columns["kind"].tolist() == [1, 2, 3, -1, -1]
    with pytest.raises(DecodeError, match=r"'kind' has the shape \(1,\), and .* has 3 boxes"):
        source[2]


@pytest.mark.slow
def test_a_hugging_face_data_set_has_masks_boxes_and_lists(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "photo": datasets.Image(),
            "annotation": datasets.Image(),
            "boxes": datasets.Sequence(datasets.Sequence(datasets.Value("float32"))),
            "labels": datasets.Sequence(datasets.ClassLabel(names=["a", "b"])),
            "tokens": datasets.Sequence(datasets.Value("int64")),
        }
    )
    mask = tmp_path / "mask.png"
    palette().save(mask)
    rows = [
        {
            "photo": Image.fromarray(IMAGE),
            "annotation": str(mask),
            "boxes": [[0, 0, 1, 1]] * index,
            "labels": [1] * index,
            "tokens": [1] * (index + 3),
        }
        for index in range(5)
    ]
    dataset = datasets.Dataset.from_list(rows, features=features)
    undecoded = dataset.cast_column("annotation", datasets.Image(decode=False))
    for each in (dataset, undecoded):
        source = open_source(each, masks=["annotation"], boxes={"boxes": 5})
        assert sorted(source.schema) == ["boxes", "labels"]
        assert source[3].columns["labels"].tolist() == [1, 1, 1, -1, -1]
        assert source.notes == [
            "skipped 1 column: tokens (lists of any length, not of the boxes)",
            "filled up with -1 or NaN beside boxes: labels",
        ]
        memload.build(source, tmp_path / "out.bin", size=(10, 12), overwrite=True, progress=False)
        stored = memload.MemmapDataset(tmp_path / "out.bin")
        np.testing.assert_array_equal(np.asarray(stored[1][1]), IDS)
    skipped = memload.DatasetSource(dataset, image="photo").notes[0]
    assert "annotation (of type Image; masks=['annotation'] or arrays=" in skipped


def test_the_size_of_an_image_is_found_in_its_file(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    Image.fromarray(IMAGE).save(path)
    for image in (path, path.read_bytes()):
        with pytest.raises(SourceError, match="as a mask"):
            open_source(Samples(lambda i, image=image: {"image": image, "heat": IDS * 1.0}))
        small = Samples(lambda i, image=image: {"image": image, "mask": IDS[:3]})
        assert list(open_source(small).schema) == ["mask"]
