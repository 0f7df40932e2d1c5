import logging
from collections import UserDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader, default_collate

from memload import MemmapDataset, fast_collate

HEIGHT, WIDTH = 6, 8
SHAPE = (HEIGHT, WIDTH, 3)

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"  # of fork, from Python 3.12 on
)


def pixels(seed: int, shape: Sequence[int] = SHAPE) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def stored(seed: int, shape: Sequence[int] = SHAPE) -> torch.Tensor:
    """An image as MemmapDataset gives it: (C, H, W), channels-last in memory."""
    return torch.from_numpy(pixels(seed, shape)).permute(2, 0, 1)


def is_channels_last(batch: torch.Tensor) -> bool:
    return batch.permute(0, 2, 3, 1).is_contiguous()


class Sample(NamedTuple):
    image: torch.Tensor
    label: int
    weight: float
    parts: dict[str, Any]
    name: str


def leaves(batch: Any) -> list[Any]:
    """Return the tensors and texts in a nested batch."""
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, tuple | list):
        return [leaf for value in batch for leaf in leaves(value)]
    return [batch]


def test_a_data_sets_batch_is_torchs_own_in_channels_last(output: Path) -> None:
    samples = [MemmapDataset(output)[index] for index in (3, 0, 11, 3)]
    images, labels = fast_collate(samples)
    expected_images, expected_labels = default_collate(samples)
    assert torch.equal(images, expected_images)
    assert torch.equal(labels, expected_labels)
    assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
    assert is_channels_last(images)
    assert images.untyped_storage().nbytes() == images.numel()
    images[:] = 0
    assert MemmapDataset(output)[3][0].any()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("kind", [torch.from_numpy, np.asarray])
def test_masks_are_copied_once_into_reused_memory(kind: Any, dtype: Any) -> None:
    masks = [kind(pixels(seed, (HEIGHT, WIDTH)).astype(dtype) * dtype(7)) for seed in range(3)]
    found, expected = fast_collate(masks), default_collate(masks)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
    address = found.data_ptr()
    del found
    assert fast_collate(masks).data_ptr() == address
    with pytest.raises(ValueError, match=r"image 1 of the batch has shape \(8, 6\), but the first"):
        fast_collate([masks[0], masks[0].T])
    with pytest.raises(ValueError, match=r"image 1 of the batch is (torch\.)?int32 instead of"):
        fast_collate([masks[0], kind(np.zeros((HEIGHT, WIDTH), np.int32))])


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "CMYK"])
def test_pictures_become_their_pixels(mode: str) -> None:
    pictures = [Image.fromarray(pixels(seed)).convert(mode) for seed in range(3)]
    images = fast_collate(pictures)
    expected = np.stack([np.asarray(picture).reshape(HEIGHT, WIDTH, -1) for picture in pictures])
    np.testing.assert_array_equal(images.permute(0, 2, 3, 1).numpy(), expected)
    assert is_channels_last(images)


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
def test_samples_may_be_of_any_kind_and_nested(kind: Any) -> None:
    samples = [
        Sample(
            stored(seed),
            seed,
            seed / 3,
            {
                "pose": (torch.full((5, 2), float(seed)), seed),
                "mask": pixels(seed, (HEIGHT, WIDTH)),
            },
            f"{seed}.jpg",
        )
        for seed in range(4)
    ]
    found, expected = fast_collate([kind(*sample) for sample in samples]), default_collate(samples)
    if isinstance(kind(*samples[0]), Mapping):
        assert list(found) == list(Sample._fields)
    else:
        assert type(found) is (Sample if kind is Sample else list)
    for one, other in zip(leaves(found), leaves(expected), strict=True):
        assert type(one) is type(other)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    assert is_channels_last(leaves(found)[0])


@pytest.mark.parametrize("first", [0, 1])
def test_tensors_of_both_layouts_mix(first: int) -> None:
    samples = [stored(0), stored(1).contiguous(), stored(2)][first:]
    assert torch.equal(fast_collate(samples), torch.stack(samples))


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
def test_what_is_no_image_is_left_to_torch(sample: Any) -> None:
    found, expected = fast_collate([sample, sample]), default_collate([sample, sample])
    assert torch.equal(found, expected)
    assert found.dtype == expected.dtype
    assert found.stride() == expected.stride()


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(
    seeds=st.lists(st.integers(0, 10**6), min_size=1, max_size=6),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    channels=st.sampled_from([1, 2, 3, 4]),
    kind=st.sampled_from(["stored", "contiguous", "array", "reversed"]),
)
def test_any_batch_holds_torchs_own_values(
    seeds: list[int], height: int, width: int, channels: int, kind: str
) -> None:
    arrays = [pixels(seed, (height, width, channels)) for seed in seeds]
    if kind == "reversed":
        arrays = [array[::-1] for array in arrays]
    samples: list[Any] = [(array, seed) for array, seed in zip(arrays, seeds, strict=True)]
    if kind in ("stored", "contiguous"):
        samples = [(torch.from_numpy(array).permute(2, 0, 1), seed) for array, seed in samples]
    if kind == "contiguous":
        samples = [(image.contiguous(), seed) for image, seed in samples]
    images, labels = fast_collate(samples)
    np.testing.assert_array_equal(images.permute(0, 2, 3, 1).numpy(), np.stack(arrays))
    assert labels.tolist() == seeds
    assert kind == "contiguous" or is_channels_last(images)


@pytest.mark.parametrize("shape", [(WIDTH, HEIGHT, 3), (HEIGHT, WIDTH, 4), (HEIGHT, WIDTH)])
def test_images_of_different_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        ValueError, match=r"image 1 of the batch has shape .*, but the first has \(6, 8, 3\)"
    ):
        fast_collate([pixels(0), pixels(1, shape)])
    with pytest.raises(ValueError, match=r"image 1 of the batch has shape .*Resize or crop"):
        fast_collate([stored(0), stored(1, (WIDTH, HEIGHT, 3))])


@pytest.mark.parametrize(
    ("samples", "told"),
    [
        (
            [stored(0), stored(1), stored(2).long()],
            "2 of the batch is torch.int64 instead of torch",
        ),
        ([pixels(0), pixels(1).astype(np.int32)], "1 of the batch is int32 instead of uint8"),
        ([stored(0), pixels(1)], "1 of the batch is uint8 instead of torch.uint8"),
        ([stored(0), 3], "1 of the batch is int instead of torch.uint8"),
        ([pixels(0), "text"], "1 of the batch is <U4 instead of uint8"),
        ([Image.new("F", (8, 6))], "0 of the batch is float32 instead of uint8"),
    ],
    ids=["int64", "int32 array", "array among tensors", "number", "text", "float picture"],
)
def test_values_that_would_be_lost_are_refused(samples: list[Any], told: str) -> None:
    with pytest.raises(ValueError, match=rf"image {told}.*\. Convert it"):
        fast_collate(samples)


def test_broken_samples_are_dropped_with_their_labels() -> None:
    samples = [(stored(0), 0), None, (None, 2), (stored(3), 3), [None, 4]]
    images, labels = fast_collate(samples)
    assert labels.tolist() == [0, 3]
    assert torch.equal(images, torch.stack([stored(0), stored(3)]))
    batch = fast_collate([{"image": None, "label": 0}, {"image": stored(1), "label": 1}])
    assert batch["label"].tolist() == [1]
    for broken in ([None, None], [(None, 1)], [{"image": None}], []):
        assert fast_collate(broken) is None


class Numbers:
    """Samples that are numbers; every fourth one is None."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int | None:
        return None if index % 4 == 3 else index


@pytest.mark.parametrize(
    ("num_workers", "datasets"), [(number, (Numbers(), Numbers())) for number in (0, 2)]
)
def test_dropped_samples_are_reported_once_and_counted_after_each_epoch(
    num_workers: int, datasets: Any, tmp_path: Path
) -> None:
    log = logging.FileHandler(tmp_path / "log")  # which workers write to as well
    logger = logging.getLogger("memload")
    logger.addHandler(log)
    logger.setLevel(logging.DEBUG)
    try:
        loaders = [
            DataLoader(dataset, 8, num_workers=num_workers, collate_fn=fast_collate)
            for dataset in datasets
        ]
        for loader in loaders:
            for _ in range(3):
                assert sum(len(batch) for batch in loader) == 18
    finally:
        logger.setLevel(logging.NOTSET)
        logger.removeHandler(log)
        log.close()
    lines = (tmp_path / "log").read_text().splitlines()
    warnings = [line for line in lines if "drops samples that are None" in line]
    # Two workers that drop their first samples at the same moment both say it.
    assert 2 <= len(warnings) <= 2 * max(1, num_workers)
    assert all("2 of the 8 in this batch" in line for line in warnings)
    counts = [int(line.split()[3]) for line in lines if "has dropped" in line]
    assert (len(counts), sum(counts)) == (6 * max(1, num_workers), 6 * 6)


@pytest.mark.parametrize(
    "keep",
    [lambda batch: batch[1:3, :, ::2], lambda batch: batch.numpy()[3, 1:], np.from_dlpack],
    ids=["slice", "array", "dlpack"],
)
def test_what_is_held_of_a_batch_is_never_overwritten(keep: Any) -> None:
    held = keep(fast_collate([stored(seed) for seed in range(4)]))
    before = np.asarray(held).copy()
    for _ in range(12):  # enough to take any free memory of a batch of four
        fast_collate([torch.zeros(3, HEIGHT, WIDTH, dtype=torch.uint8)] * 4)
    np.testing.assert_array_equal(np.asarray(held), before)
    assert before.any()


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
def test_it_works_in_a_data_loader(options: dict[str, Any]) -> None:
    samples: Any = [(stored(label), label) for label in range(23)]
    samples[3] = None
    for broken in (0, 4, 5, 6, 7):
        samples[broken] = None, broken
    loader = DataLoader(samples, 4, collate_fn=fast_collate, **options)
    for _ in range(2):
        batches = [batch for batch in loader if batch is not None]
        labels = torch.cat([labels for _, labels in batches]).tolist()
        assert labels == [label for label in range(23) if label not in (0, 3, 4, 5, 6, 7)]
        images = torch.cat([images for images, _ in batches])
        assert torch.equal(images, torch.stack([stored(label) for label in labels]))
        assert all(is_channels_last(images) for images, _ in batches)
    del loader
