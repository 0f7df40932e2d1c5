"""Data sets of several arrays: masks and others, in samples and in batches."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from memload import (
    CudaPrefetcher,
    FormatError,
    Index,
    Loader,
    MemmapDataset,
    fast_collate,
    transforms,
)
from memload.reading.batches import batch_type

SIZE = 23


@pytest.fixture
def values() -> dict[str, np.ndarray]:
    """The rows of other arrays. Those of the features are in the reverse order."""
    rng = np.random.default_rng(5)
    return {
        "mask": rng.integers(0, 60_000, (SIZE, 4, 6)).astype("<u2"),
        "features": rng.random((SIZE, 2, 3, 5)),
        "seen": rng.random((SIZE, 7)) < 0.5,
    }


@pytest.fixture
def path(
    make_dataset: Callable[..., Index],
    add_array: Callable[..., Index],
    values: dict[str, np.ndarray],
) -> Path:
    """Images in three shards, three other arrays, and two columns."""
    columns = {"weight": np.arange(SIZE) / 2, "label": np.arange(SIZE) % 3}
    index = make_dataset(rows=(9, 8, 6), columns=columns)
    index = add_array(index, "mask", values["mask"], "mask")
    reverse = np.arange(SIZE)[::-1].copy()
    index = add_array(
        index, "features", values["features"], "npy", other_rows={"features": reverse}
    )
    return add_array(index, "seen", values["seen"]).path


def features(values: dict[str, np.ndarray]) -> np.ndarray:
    return values["features"][::-1]


def test_a_sample_has_the_rows_of_all_arrays(path: Path, values: dict[str, np.ndarray]) -> None:
    dataset = MemmapDataset(path)
    assert dataset.sample_names == ("label", "mask", "features", "seen", "weight")
    assert list(dataset.columns) == ["weight", "label"]
    assert {name: array.kind for name, array in dataset.arrays.items()} == {
        "image": "image",
        "mask": "mask",
        "features": "array",
        "seen": "array",
    }
    for number, (image, label, mask, vector, seen, weight) in enumerate(dataset):
        assert image.shape == (3, 4, 6)
        assert (label, weight) == (number % 3, number / 2)
        assert (mask.dtype, vector.dtype, seen.dtype) == (torch.uint16, torch.float64, torch.bool)
        np.testing.assert_array_equal(mask.numpy(), values["mask"][number])
        np.testing.assert_array_equal(vector.numpy(), features(values)[number])
        np.testing.assert_array_equal(seen.numpy(), values["seen"][number])
    assert "label, mask 4×6, features 2×3×5, seen 7, weight" in repr(dataset)


def test_rows_are_the_mapped_file_itself(path: Path) -> None:
    dataset = MemmapDataset(path, columns=["mask"])
    dataset[3][1][0, 0] = 7
    assert dataset[3][1][0, 0] == 7
    assert dataset.shards_of("mask").maps[0][3, 0, 0] == 7
    assert MemmapDataset(path)[3][2][0, 0] != 7


def test_columns_name_the_arrays_that_are_wanted(path: Path) -> None:
    dataset = MemmapDataset(path, columns=["seen", "index", "mask", "label"])
    _, seen, number, mask, label = dataset[-2]
    assert (seen.shape, number, mask.shape, label) == ((7,), SIZE - 2, (4, 6), 0)
    with pytest.raises(ValueError, match=r"columns names 'depth'.* has mask, features, seen, weig"):
        MemmapDataset(path, columns=["depth"])


def test_an_array_that_is_not_wanted_is_not_opened(path: Path) -> None:
    path.with_name("made.features.bin").unlink()
    dataset = MemmapDataset(path, columns=["mask"])
    assert len(dataset[0]) == 2
    (batch,) = Loader(path, SIZE, columns=["seen"], device="cpu")
    assert batch.seen.shape == (SIZE, 7)
    with pytest.raises(FormatError, match=r"made\.features\.bin is missing"):
        dataset.gather([0], name="features")
    with pytest.raises(FormatError, match=r"made\.features\.bin is missing"):
        MemmapDataset(path)


def test_rows_of_any_array_are_gathered(path: Path, values: dict[str, np.ndarray]) -> None:
    dataset = MemmapDataset(path, columns=[]).subset([4, 2, 9])
    out = torch.zeros((2, 2, 3, 5), dtype=torch.float64)
    assert dataset.gather([-1, 0], out, name="features") is out
    np.testing.assert_array_equal(out.numpy(), features(values)[[9, 4]])
    np.testing.assert_array_equal(dataset.gather([1], name="mask").numpy(), values["mask"][[2]])
    with pytest.raises(ValueError, match=r"there is no array 'label'.* has image, mask, features"):
        dataset.gather([1], name="label")
    with pytest.raises(ValueError, match=r"\(1, 4, 6\) of torch.uint16 on cpu, contiguous, is nee"):
        dataset.gather([1], out, name="mask")


def test_views_and_pickles_have_all_arrays(path: Path, values: dict[str, np.ndarray]) -> None:
    view = MemmapDataset(path).where(label=1)[::-1]
    for dataset in (view, pickle.loads(pickle.dumps(view))):
        assert len(dataset) == len(range(1, SIZE, 3))
        for sample, number in zip(dataset, range(22, 0, -3), strict=True):
            np.testing.assert_array_equal(sample[2].numpy(), values["mask"][number])
            np.testing.assert_array_equal(sample[3].numpy(), features(values)[number])


def test_a_truncated_array_is_an_error(path: Path) -> None:
    dataset = MemmapDataset(path, columns=["mask"])
    file = path.with_name("made.mask.bin")
    with file.open("r+b") as opened:
        opened.truncate(4100)
    with pytest.raises(FormatError, match=r"made\.mask\.bin was truncated"):
        dataset[0]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("collate_fn", [fast_collate, None], ids=["fast_collate", "torch's"])
def test_a_data_loader_collates_all_arrays(
    path: Path, values: dict[str, np.ndarray], collate_fn: Any, num_workers: int
) -> None:
    context = "fork" if num_workers else None
    loader = DataLoader(
        MemmapDataset(path),
        8,
        collate_fn=collate_fn,
        num_workers=num_workers,
        multiprocessing_context=context,
    )
    batches = [[part.clone() for part in batch] for batch in loader]
    _, labels, mask, vectors, seen, _ = map(torch.cat, zip(*batches, strict=True))
    assert labels.tolist() == (np.arange(SIZE) % 3).tolist()
    np.testing.assert_array_equal(mask.numpy(), values["mask"])
    np.testing.assert_array_equal(vectors.numpy(), features(values))
    np.testing.assert_array_equal(seen.numpy(), values["seen"])
    del loader


def test_a_batch_has_the_rows_of_all_arrays(path: Path, values: dict[str, np.ndarray]) -> None:
    loader = Loader(path, 5, device="cpu", num_threads=2)
    first = 0
    for batch in loader:
        assert batch._fields == ("images", "labels", "mask", "features", "seen", "weight")
        part = slice(first, first + len(batch.images))
        np.testing.assert_array_equal(batch.mask.numpy(), values["mask"][part])
        np.testing.assert_array_equal(batch.features.numpy(), features(values)[part])
        np.testing.assert_array_equal(batch.seen.numpy(), values["seen"][part])
        assert batch.weight.tolist() == (np.arange(SIZE) / 2)[part].tolist()
        first = part.stop
    assert first == SIZE


def test_the_columns_of_a_batch_narrow_and_order(path: Path, values: dict[str, Any]) -> None:
    names = ["weight", "mask", "index", "features"]
    loader = Loader(path, SIZE, columns=names, device="cpu")
    (batch,) = loader
    assert batch._fields == ("images", *names)
    assert batch.weight.tolist() == (np.arange(SIZE) / 2).tolist()
    assert batch.index.tolist() == list(range(SIZE))
    np.testing.assert_array_equal(batch.mask.numpy(), values["mask"])
    np.testing.assert_array_equal(batch.features.numpy(), features(values))


def test_transforms_move_masks_boxes_and_points_of_the_data_set(
    make_dataset: Callable[..., Index], add_array: Callable[..., Index]
) -> None:
    columns = {
        "label": np.arange(5) % 3,
        "eyes": np.zeros((5, 1, 2), np.float32),
        "boxes": np.tile(np.array([0, 1, 2, 3], np.float32), (5, 2, 1)),
    }
    index = make_dataset(columns=columns, points=("eyes",), boxes=("boxes",))
    masks = np.random.default_rng(0).integers(0, 9, (5, 4, 6)).astype(np.uint8)
    path = add_array(index, "mask", masks, "mask").path
    depth = np.random.default_rng(1).random((5, 4, 6)).astype(np.float32)
    path = add_array(Index.read(path), "depth", depth).path
    flip = transforms.RandomHorizontalFlip(1)
    batches = DataLoader(MemmapDataset(path), 5, collate_fn=fast_collate)
    (collated,) = CudaPrefetcher(batches, transform=flip, device="cpu")
    for batch in (
        *Loader(path, 5, transform=flip, device="cpu"),
        *Loader(path, 5, transform=transforms.Compose([flip]), device="cpu"),
        batch_type(("labels", "mask", "depth", "eyes", "boxes"))(*collated),
    ):
        np.testing.assert_array_equal(batch.mask.numpy(), masks[:, :, ::-1])
        np.testing.assert_array_equal(batch.depth.numpy(), depth)  # an array is no mask
        assert batch.eyes[0].tolist() == [[5, 0]]
        assert batch.boxes[0].tolist() == [[4, 1, 6, 3]] * 2
    (batch,) = Loader(path, 5, transform=flip, columns=["boxes"], device="cpu")
    assert batch.boxes[0].tolist() == [[4, 1, 6, 3]] * 2
    still = transforms.Compose([flip], masks=[])
    (batch,) = Loader(path, 5, transform=still, device="cpu")
    np.testing.assert_array_equal(batch.mask.numpy(), masks)


def test_a_function_that_crops_images_but_not_their_masks_is_warned_of(path: Path) -> None:
    def crop(images: torch.Tensor) -> torch.Tensor:
        return images[:, :, :2, :3]

    with pytest.warns(UserWarning, match=r"images of 2×3 from 4×6.* alone: mask stay as they are"):
        list(Loader(path, 5, transform=crop, device="cpu"))


def test_the_labels_of_boxes_keep_their_name_beside_the_label_of_the_image(
    make_dataset: Callable[..., Index],
) -> None:
    index = make_dataset()
    of_boxes = np.arange(2 * len(index)).reshape(-1, 2)
    replace(index, columns={**index.columns, "labels": of_boxes}).write(index.path)
    batch = next(iter(Loader(index.path, 3, device="cpu")))
    assert batch._fields == ("images", "label", "labels")
    assert batch.labels.tolist() == of_boxes[:3].tolist()
    assert batch.label.tolist() == index.columns["label"][:3].tolist()


def test_what_labels_are_does_not_depend_on_the_columns_chosen(
    make_dataset: Callable[..., Index],
) -> None:
    index = make_dataset()
    of_boxes = np.arange(2 * len(index)).reshape(-1, 2)
    replace(index, columns={**index.columns, "labels": of_boxes}).write(index.path)
    for columns, field in ("label", "label"), ("labels", "labels"):
        (batch,) = Loader(index.path, len(index), columns=[columns], device="cpu")
        assert batch._fields == ("images", field)
