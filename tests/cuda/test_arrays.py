"""Several arrays on CUDA: images, masks and others, through every feed."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from memload import CudaPrefetcher, Loader, MemmapDataset, fast_collate, transforms

SIZE = 61
DEVICE = torch.device("cuda", 0)
#: Arguments of a Loader. The budget holds a part of each file.
FEEDS = {
    "resident": {"feed": "resident"},
    "dma": {"feed": "dma"},
    "disk": {"feed": "disk", "cache_bytes": 150_000},
    "pinned": {"feed": "pinned"},
    "auto": {},
}
#: Element types and shapes of further arrays; rows from 1 byte to some kilobytes.
ARRAYS = {
    "a": ("|i1", (1,)),
    "b": ("|b1", (7,)),
    "c": ("<i8", (1,)),
    "d": ("<f8", (5, 3)),
    "e": ("<f2", (3,)),
    "f": ("<u2", (2, 3, 4, 5)),
    "g": ("<i4", (700,)),
    "h": ("<f4", (2,)),
}

every_feed = pytest.mark.parametrize("feed", FEEDS)


@pytest.fixture
def values():
    rng = np.random.default_rng(7)
    return {
        "mask": rng.integers(0, 256, (SIZE, 32, 40)).astype(np.uint8),
        "ids": rng.integers(0, 2**16, (SIZE, 32, 40)).astype("<u2"),
        "features": rng.random((SIZE + 9, 37)),
    }


@pytest.fixture
def path(make_dataset, add_array, values):
    """Images in three shards, two masks, features in an NPY file in another order, and columns."""
    columns = {
        "label": np.arange(SIZE) % 3,
        "eyes": np.random.default_rng(1).uniform(0, 30, (SIZE, 2, 2)).astype(np.float32),
    }
    index = make_dataset(rows=(30, 20, 11), shape=(32, 40, 3), columns=columns, points=("eyes",))
    index = add_array(index, "mask", values["mask"], "mask")
    index = add_array(index, "ids", values["ids"], "mask")
    rows = {"features": np.random.default_rng(2).integers(0, SIZE + 9, SIZE)}
    return add_array(index, "features", values["features"], "npy", other_rows=rows).path


def on_host(tensor):
    assert tensor.is_cuda
    return tensor.cpu().numpy()


def check_same(one, other):
    """Check that a batch on CUDA is one on the CPU: floats nearly, all else exactly."""
    assert one._fields == other._fields
    for name, found, expected in zip(one._fields, one, other, strict=True):
        assert found.dtype == expected.dtype
        if name in ("images", "eyes") and expected.is_floating_point():
            torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)
        else:
            np.testing.assert_array_equal(on_host(found), expected.numpy())


@every_feed
@pytest.mark.parametrize("batch_size", [1, 7, SIZE])
@pytest.mark.parametrize("transform", [None, transforms.train(16)], ids=["bare", "train"])
def test_batches_are_those_of_the_cpu(path, feed, batch_size, transform, wait_until_held):
    options = {"shuffle": True, "seed": 5, "transform": transform}
    ours = Loader(path, batch_size, **FEEDS[feed], device=DEVICE, **options)
    theirs = Loader(path, batch_size, device="cpu", **options)
    for epoch in range(2):
        if epoch == 1:  # of the first, rows may have come from the files
            wait_until_held(ours)
        for one, other in zip(ours, theirs, strict=True):
            assert one._fields == ("images", "labels", "mask", "ids", "features", "eyes")
            check_same(one, other)


@every_feed
@pytest.mark.parametrize("wait", [False, True])
def test_any_element_type_and_shape(make_dataset, add_array, feed, wait, wait_until_held):
    index = make_dataset(rows=(SIZE,))
    stored = {}
    for number, (name, (descr, shape)) in enumerate(ARRAYS.items()):
        rng = np.random.default_rng(number)
        stored[name] = rng.integers(0, 2 if descr == "|b1" else 120, (SIZE, *shape)).astype(descr)
        index = add_array(index, name, stored[name], "npy" if number % 2 else "array")
    loader = Loader(index.path, 4, shuffle=True, columns=["index", *ARRAYS][::-1], **FEEDS[feed])
    if wait:
        wait_until_held(loader)
    for batch in loader:
        for name in ARRAYS:
            expected = stored[name][on_host(batch.index)]
            np.testing.assert_array_equal(on_host(getattr(batch, name)), expected)


@every_feed
def test_a_view_of_scattered_and_repeated_samples(
    path, values, feed, window_bytes, wait_until_held
):
    window_bytes(4096)
    dataset = MemmapDataset(path, columns=["mask", "features"])
    chosen = [50, 3, 3, 17, 60, 0]
    loader = Loader(dataset.subset(chosen), 4, **FEEDS[feed])
    wait_until_held(loader)
    for _ in range(2):
        batches = list(loader)
        masks = np.concatenate([on_host(batch.mask) for batch in batches])
        np.testing.assert_array_equal(masks, values["mask"][chosen])
        features = np.concatenate([on_host(batch.features) for batch in batches])
        rows = dataset.index.rows_of("features")[chosen]
        np.testing.assert_array_equal(features, values["features"][rows])


@every_feed
def test_a_concatenation_is_a_and_then_b(make_dataset, add_array, feed, wait_until_held):
    parts = []
    for name, size in (("a", 30), ("b", 17)):
        index = make_dataset(f"{name}.bin", rows=(size - 5, 5), seed=size)
        masks = np.random.default_rng(size).integers(0, 256, (size, 4, 6)).astype(np.uint8)
        rows = {"mask": np.arange(size)[::-1].copy()} if name == "b" else {}
        parts.append(add_array(index, "mask", masks, "mask", other_rows=rows).path)
    loader = Loader(parts, 7, **FEEDS[feed], columns=["mask"])
    for wait in (False, True):
        if wait:
            wait_until_held(loader)
        batches = list(loader)
        for name in ("image", "mask"):
            expected = np.concatenate(
                [MemmapDataset(p).gather(range(len(MemmapDataset(p))), name=name) for p in parts]
            )
            found = [b.mask if name == "mask" else b.images.permute(0, 2, 3, 1) for b in batches]
            np.testing.assert_array_equal(on_host(torch.cat(found)), expected)


@every_feed
def test_masks_are_those_of_their_samples_on_any_rank_also_resumed(path, feed):
    dataset = MemmapDataset(path, columns=["mask", "index"])
    for rank, num_replicas, before, after in ((0, 1, 7, 4), (1, 3, 5, 2), (2, 3, 1, 9)):
        options = {"shuffle": True, "rank": rank, "num_replicas": num_replicas, "seed": rank}
        loader = Loader(dataset, before, **FEEDS[feed], **options)
        batches = iter(loader)
        seen = [next(batches), next(batches)]
        resumed = Loader(dataset, after, **FEEDS[feed], **options)
        resumed.load_state_dict(loader.state_dict())
        for batch in (*seen, *resumed):
            numbers = on_host(batch.index)
            np.testing.assert_array_equal(
                on_host(batch.mask), dataset.gather(numbers, name="mask").numpy()
            )
        del batches


@every_feed
def test_no_mask_is_overwritten_while_the_consumer_is_behind(path, values, feed):
    loader = Loader(path, 4, **FEEDS[feed], columns=["mask", "index"], shuffle=True)
    sums, order = [], []
    for _ in range(3):
        for _, masks, numbers in loader:
            torch.cuda._sleep(3_000_000)  # the next batches have long been asked for
            sums.append(masks.double().sum((1, 2)))
            order.append(numbers.clone())
    numbers = on_host(torch.cat(order))
    expected = values["mask"].astype(float).sum((1, 2))[numbers]
    assert on_host(torch.cat(sums)).tolist() == expected.tolist()


@every_feed
def test_static_buffers_hold_masks(path, values, feed):
    loader = Loader(
        path, 5, **FEEDS[feed], columns=["ids", "index"], static_buffers=True, drop_last=True
    )
    addresses = set()
    for batch in loader:
        np.testing.assert_array_equal(on_host(batch.ids), values["ids"][on_host(batch.index)])
        addresses.add(batch.ids.data_ptr())
    assert len(addresses) == 1


def test_a_prefetcher_moves_masks_with_their_images(path):
    dataset = MemmapDataset(path)
    flip = transforms.RandomHorizontalFlip(1)
    batches = DataLoader(dataset, 8, collate_fn=fast_collate, pin_memory=True)
    moved = CudaPrefetcher(batches, device=DEVICE, transform=flip)
    for found, expected in zip(moved, batches, strict=True):
        images, _, mask, ids, features, eyes = found
        np.testing.assert_array_equal(on_host(images), expected[0].numpy()[..., ::-1])
        np.testing.assert_array_equal(on_host(mask), expected[2].numpy()[..., ::-1])
        np.testing.assert_array_equal(on_host(ids), expected[3].numpy()[..., ::-1])
        np.testing.assert_array_equal(on_host(features), expected[4].numpy())
        np.testing.assert_allclose(on_host(eyes)[..., 0], 39 - expected[5].numpy()[..., 0])
