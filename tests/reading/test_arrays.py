"""Data sets of several arrays: masks and others, in samples and in batches."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from memload import CudaPrefetcher, FormatError, Loader, MemmapDataset, fast_collate
from memload.transforms import Compose, RandomHorizontalFlip

SIZE = 23
RNG = np.random.default_rng(5)
MASKS = RNG.integers(0, 60_000, (SIZE, 4, 6)).astype("<u2")
FEATURES = RNG.random((SIZE, 2, 3, 5))
SEEN = RNG.random((SIZE, 7)) < 0.5


@pytest.fixture
def path(make_dataset, add_array):
    """Images in three shards, three other arrays, and two columns.

    The features are in a file as NumPy writes it, in the reverse order.
    """
    columns = {"weight": np.arange(SIZE) / 2, "label": np.arange(SIZE) % 3}
    index = make_dataset(rows=(9, 8, 6), columns=columns)
    index = add_array(index, "mask", MASKS, "mask")
    reverse = {"features": np.arange(SIZE)[::-1].copy()}
    index = add_array(index, "features", FEATURES[::-1].copy(), "npy", other_rows=reverse)
    return add_array(index, "seen", SEEN).path


def test_a_sample_has_the_rows_of_all_arrays(path):
    dataset = MemmapDataset(path)
    assert dataset.sample_names == ("label", "mask", "features", "seen", "weight")
    assert list(dataset.columns) == ["weight", "label"]
    kinds = {"image": "image", "mask": "mask", "features": "array", "seen": "array"}
    assert {name: array.kind for name, array in dataset.arrays.items()} == kinds
    view = dataset.where(label=1)[::-1]
    views = (dataset, range(SIZE)), (view, range(22, 0, -3))
    for part, numbers in (*views, (pickle.loads(pickle.dumps(view)), range(22, 0, -3))):
        for sample, number in zip(part, numbers, strict=True):
            assert (sample[0].shape, sample[1], sample[5]) == ((3, 4, 6), number % 3, number / 2)
            for row, values in zip(sample[2:5], (MASKS, FEATURES, SEEN), strict=True):
                np.testing.assert_array_equal(row.numpy(), values[number], strict=True)
        out = torch.zeros((2, 2, 3, 5), dtype=torch.float64)
        assert part.gather([-1, 0], out, name="features") is out
        np.testing.assert_array_equal(out.numpy(), FEATURES[[numbers[-1], numbers[0]]])
        np.testing.assert_array_equal(part.gather([1], name="mask").numpy(), MASKS[[numbers[1]]])


def test_rows_are_the_mapped_file_itself(path):
    dataset = MemmapDataset(path, columns=["mask"])
    dataset[3][1][0, 0] = 7
    assert dataset[3][1][0, 0] == dataset.shards_of("mask").maps[0][3, 0, 0] == 7
    assert MemmapDataset(path)[3][2][0, 0] == MASKS[3, 0, 0] != 7
    with path.with_name("made.mask.bin").open("r+b") as opened:
        opened.truncate(4100)
    with pytest.raises(FormatError, match=r"made\.mask\.bin was truncated"):
        dataset[0]


def test_columns_name_the_arrays_that_are_wanted_and_no_other_is_opened(path):
    path.with_name("made.features.bin").unlink()
    dataset = MemmapDataset(path, columns=["seen", "index", "mask", "label"])
    _, seen, number, mask, label = dataset[-2]
    assert (seen.shape, number, mask.shape, label) == ((7,), SIZE - 2, (4, 6), 0)
    (batch,) = Loader(path, SIZE, columns=["seen"], device="cpu")
    np.testing.assert_array_equal(batch.seen, SEEN)
    for use in (lambda: dataset.gather([0], name="features"), lambda: MemmapDataset(path)):
        with pytest.raises(FormatError, match=r"made\.features\.bin is missing"):
            use()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("collate_fn", [fast_collate, None], ids=["fast_collate", "torch's"])
def test_a_data_loader_collates_all_arrays(path, collate_fn, num_workers):
    options = {"num_workers": 2, "multiprocessing_context": "fork"} if num_workers else {}
    loader = DataLoader(MemmapDataset(path), 8, collate_fn=collate_fn, **options)
    batches = [[part.clone() for part in batch] for batch in loader]
    _, labels, *arrays, _ = map(torch.cat, zip(*batches, strict=True))
    assert labels.tolist() == (np.arange(SIZE) % 3).tolist()
    for found, values in zip(arrays, (MASKS, FEATURES, SEEN), strict=True):
        np.testing.assert_array_equal(found.numpy(), values, strict=True)
    del loader


@pytest.mark.parametrize("names", [None, ["weight", "mask", "index", "features"]], ids=str)
def test_a_batch_has_the_rows_of_the_arrays_asked_for(path, names):
    loader = Loader(path, 5, columns=names, device="cpu", num_threads=2)
    batches = list(loader)
    fields = names or ["labels", "mask", "features", "seen", "weight"]
    assert batches[0]._fields == ("images", *fields)
    found = dict(zip(batches[0]._fields, map(torch.cat, zip(*batches, strict=True)), strict=True))
    stored = {"mask": MASKS, "features": FEATURES, "seen": SEEN, "index": np.arange(SIZE)}
    stored |= {"weight": np.arange(SIZE) / 2, "labels": np.arange(SIZE) % 3}
    for name in fields:
        np.testing.assert_array_equal(found[name].numpy(), stored[name], strict=True)


def test_transforms_move_masks_boxes_and_points_of_the_data_set(make_dataset, add_array):
    columns = {
        "label": np.arange(5) % 3,
        "eyes": np.zeros((5, 1, 2), np.float32),
        "boxes": np.tile(np.array([0, 1, 2, 3], np.float32), (5, 2, 1)),
    }
    index = make_dataset(columns=columns, points=("eyes",), boxes=("boxes",))
    masks, depth = MASKS[:5].astype(np.uint8), FEATURES[:5, 0, 0, :4, None].repeat(6, 2)
    path = add_array(add_array(index, "mask", masks, "mask"), "depth", depth).path
    flip = RandomHorizontalFlip(1)
    batches = DataLoader(MemmapDataset(path), 5, collate_fn=fast_collate)
    (collated,) = CudaPrefetcher(batches, transform=flip, device="cpu")
    (loaded,) = Loader(path, 5, transform=Compose([flip]), device="cpu")
    for _, _, mask, of_array, eyes, boxes in (collated, loaded):
        np.testing.assert_array_equal(mask.numpy(), masks[:, :, ::-1])
        np.testing.assert_array_equal(of_array.numpy(), depth)  # an array is no mask
        assert (eyes[0].tolist(), boxes[0].tolist()) == ([[5, 0]], [[4, 1, 6, 3]] * 2)
    (batch,) = Loader(path, 5, transform=flip, columns=["boxes"], device="cpu")
    assert batch.boxes[0].tolist() == [[4, 1, 6, 3]] * 2
    (batch,) = Loader(path, 5, transform=Compose([flip], masks=[]), device="cpu")
    np.testing.assert_array_equal(batch.mask.numpy(), masks)


def test_a_function_that_crops_images_but_not_their_masks_is_warned_of(path):
    with pytest.warns(UserWarning, match=r"images of 2×3 from 4×6.* alone: mask stay as they are"):
        list(Loader(path, 5, transform=lambda images: images[:, :, :2, :3], device="cpu"))


def test_the_labels_of_boxes_keep_their_name_beside_the_label_of_the_image(make_dataset):
    index = make_dataset()
    of_boxes = np.arange(2 * len(index)).reshape(-1, 2)
    replace(index, columns={**index.columns, "labels": of_boxes}).write(index.path)
    (batch,) = Loader(index.path, len(index), device="cpu")
    assert (batch.labels.tolist(), batch.label.tolist()) == (of_boxes.tolist(), [0, 1, 2, 0, 1])
    for columns in (["label"], ["labels"], ["label", "labels"]):
        assert next(iter(Loader(index.path, 3, columns=columns)))._fields == ("images", *columns)
