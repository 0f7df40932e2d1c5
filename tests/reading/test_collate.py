import subprocess
import sys
from collections import UserDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader, default_collate, get_worker_info

from memload import fast_collate

HEIGHT, WIDTH = 6, 8
SHAPE = (HEIGHT, WIDTH, 3)

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"  # of fork, from Python 3.12 on
)


def pixels(seed, shape=SHAPE):
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def stored(seed, shape=SHAPE):
    """An image as MemmapDataset gives it: (C, H, W), channels-last in memory."""
    return torch.from_numpy(pixels(seed, shape)).permute(2, 0, 1)


def is_channels_last(batch):
    return batch.permute(0, 2, 3, 1).is_contiguous()


class Sample(NamedTuple):
    image: Any
    label: int
    weight: float
    parts: Any
    name: str


def leaves(batch):
    """Return the tensors and texts in a nested batch."""
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, tuple | list):
        return [leaf for value in batch for leaf in leaves(value)]
    return [batch]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("kind", [torch.from_numpy, np.asarray])
def test_masks_are_copied_into_reused_memory(kind, dtype):
    masks = [kind(pixels(seed, (HEIGHT, WIDTH)).astype(dtype) * dtype(7)) for seed in range(3)]
    found, expected = fast_collate(masks), default_collate(masks)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
    address = found.data_ptr()
    del found
    assert fast_collate(masks).data_ptr() == address


@pytest.mark.parametrize(
    "kind",
    [
        lambda *values: values,
        lambda *values: list(values),
        Sample,
        lambda *values: Sample(*values)._asdict(),
        lambda *values: UserDict(Sample(*values)._asdict()),
    ],
    ids=["tuple", "list", "named tuple", "dict", "UserDict"],
)
def test_samples_may_be_of_any_kind_and_nested(kind):
    samples = []
    for seed in range(4):
        mask, pose = pixels(seed, (HEIGHT, WIDTH)), (torch.full((5, 2), float(seed)), seed)
        parts = {"pose": pose, "mask": mask}
        samples.append(Sample(stored(seed), seed, seed / 3, parts, f"{seed}.jpg"))
    found, expected = fast_collate([kind(*sample) for sample in samples]), default_collate(samples)
    if isinstance(kind(*samples[0]), Mapping):
        assert list(found) == list(Sample._fields)
    else:
        assert type(found) is (Sample if kind is Sample else list)
    for one, other in zip(leaves(found), leaves(expected), strict=True):
        assert type(one) is type(other)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    assert is_channels_last(leaves(found)[0])


@pytest.mark.parametrize(
    "sample",
    [
        torch.arange(60, dtype=torch.float32).view(3, 4, 5),
        torch.arange(60, dtype=torch.uint8).view(2, 5, 3, 2),
        torch.arange(60, dtype=torch.uint8),
        np.arange(12, dtype=np.float32).reshape(3, 4),
        np.arange(12, dtype=np.uint8),
        7,
    ],
    ids=["float32", "uint8 4-d", "uint8 1-d", "float array", "uint8 1-d array", "int"],
)
def test_what_is_no_image_is_left_to_torch(sample):
    found, expected = fast_collate([sample, sample]), default_collate([sample, sample])
    assert torch.equal(found, expected)
    assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())


@settings(max_examples=80, deadline=None, database=None, derandomize=True)
@given(
    seeds=st.lists(st.integers(0, 10**6), min_size=1, max_size=6),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    mode=st.sampled_from(["L", "LA", "RGB", "RGBA", "CMYK"]),
    kind=st.sampled_from(["stored", "layouts mix", "array", "reversed", "picture"]),
)
def test_any_batch_holds_torchs_own_values(seeds, height, width, mode, kind):
    channels = len(Image.new(mode, (1, 1)).getbands())
    arrays = [pixels(seed, (height, width, channels)) for seed in seeds]
    if kind == "reversed":
        arrays = [array[::-1] for array in arrays]
    images = list(arrays)
    if kind == "picture":
        images = [Image.frombytes(mode, (width, height), array.tobytes()) for array in arrays]
    elif kind in ("stored", "layouts mix"):
        images = [torch.from_numpy(array).permute(2, 0, 1) for array in arrays]
    if kind == "layouts mix":
        images[0] = images[0].contiguous()
    found, labels = fast_collate(list(zip(images, seeds, strict=True)))
    np.testing.assert_array_equal(found.permute(0, 2, 3, 1).numpy(), np.stack(arrays))
    assert labels.tolist() == seeds
    assert kind == "layouts mix" or is_channels_last(found)


def test_broken_samples_are_dropped_with_their_labels():
    samples = [(stored(0), 0), None, (None, 2), (stored(3), 3), [None, 4]]
    images, labels = fast_collate(samples)
    assert labels.tolist() == [0, 3]
    assert torch.equal(images, torch.stack([stored(0), stored(3)]))
    batch = fast_collate([{"image": None, "label": 0}, {"image": stored(1), "label": 1}])
    assert batch["label"].tolist() == [1]
    for broken in ([None, None], [(None, 1)], [{"image": None}], []):
        assert fast_collate(broken) is None


def test_each_process_warns_once_of_dropped_samples():
    code = """if True:
        import memload, torch
        numbers = [None if number % 4 == 3 else number for number in range(24)]
        for num_workers in (2, 0):
            loader = torch.utils.data.DataLoader(
                numbers, 4, num_workers=num_workers, collate_fn=memload.fast_collate,
                persistent_workers=num_workers > 0,
            )
            assert [len(batch) for _ in range(2) for batch in loader] == [3] * 12
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.count("fast_collate drops samples that are None") == 2 + 1


@pytest.mark.parametrize(
    "keep",
    [lambda batch: batch[1:3, :, ::2], lambda batch: batch.numpy()[3, 1:], np.from_dlpack],
    ids=["slice", "array", "dlpack"],
)
def test_what_is_held_of_a_batch_is_never_overwritten(keep):
    held = keep(fast_collate([stored(seed) for seed in range(4)]))
    before = np.asarray(held).copy()
    for _ in range(12):  # enough to take any free memory of a batch of four
        fast_collate([torch.zeros(3, HEIGHT, WIDTH, dtype=torch.uint8)] * 4)
    np.testing.assert_array_equal(np.asarray(held), before)
    assert before.any()


def collate(samples):
    """Collate, and say whether that was done in a worker, in memory that the loop shares."""
    batch = fast_collate(samples)
    return None if batch is None else (*batch, get_worker_info() and batch[0].is_shared())


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but")
@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 0, "pin_memory": True},
        {"num_workers": 2, "pin_memory": True, "multiprocessing_context": "fork"},
        {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "fork"},
    ],
    ids=str,
)
def test_it_works_in_a_data_loader(options):
    samples = [(stored(label), label) for label in range(23)]
    samples[3] = None
    for broken in (0, 4, 5, 6, 7):
        samples[broken] = None, broken
    loader = DataLoader(samples, 4, collate_fn=collate, **options)
    for _ in range(2):
        batches = [batch for batch in loader if batch is not None]
        labels = torch.cat([labels for _, labels, _ in batches]).tolist()
        assert labels == [label for label in range(23) if label not in (0, 3, 4, 5, 6, 7)]
        images = torch.cat([images for images, _, _ in batches])
        assert torch.equal(images, torch.stack([stored(label) for label in labels]))
        assert all(is_channels_last(images) for images, _, _ in batches)
        assert {shared for _, _, shared in batches} == {options["num_workers"] > 0 or None}
    del loader
