import threading
import tracemalloc
from collections import UserDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from memload import MemmapDataset, fast_collate

HEIGHT, WIDTH = 6, 8
SHAPE = (HEIGHT, WIDTH, 3)

# From Python 3.12 on, of torch's own threads; DataLoader forks all the same.
forks = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


pytestmark = pytest.mark.usefixtures("quick_collections")


@pytest.fixture(autouse=True)
def queues_ended(nothing_left_behind: None) -> Iterator[None]:
    """Wait for the threads that DataLoader tells to end, and does not wait for itself."""
    yield
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(10)


def pixels(seed: int, shape: Sequence[int] = SHAPE) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def stored(seed: int, shape: Sequence[int] = SHAPE) -> torch.Tensor:
    """An image as MemmapDataset gives it: (C, H, W), channels-last in memory."""
    return torch.from_numpy(pixels(seed, shape)).permute(2, 0, 1)


def is_channels_last(batch: torch.Tensor) -> bool:
    return batch.permute(0, 2, 3, 1).is_contiguous()


class Numbers(NamedTuple):
    image: torch.Tensor
    label: int
    weight: float


class Broken(Dataset[Any]):
    """Images whose numbers are their labels; some are None, and of some only the image is."""

    def __init__(self, size: int, none: Sequence[int] = (), imageless: Sequence[int] = ()) -> None:
        self.size, self.none, self.imageless = size, none, imageless

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if index in self.none:
            return None
        return None if index in self.imageless else stored(index), index


class Facts(Dataset[Any]):
    """Says of a batch collated where it runs, whether it is in a worker and in shared memory."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple[bool, bool, bool]:
        whole = fast_collate([stored(1), stored(2)])
        arrays = fast_collate([pixels(1), pixels(2)])
        return get_worker_info() is not None, whole.is_shared(), arrays.is_shared()


def test_a_data_sets_batch_is_torchs_own_in_channels_last(output: Path) -> None:
    samples = [MemmapDataset(output)[index] for index in (3, 0, 11, 3)]
    images, labels = fast_collate(samples)
    expected_images, expected_labels = default_collate(samples)
    assert torch.equal(images, expected_images)
    assert torch.equal(labels, expected_labels)
    assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
    assert images.shape == (4, 3, 16, 16)
    assert is_channels_last(images)
    assert images.is_contiguous(memory_format=torch.channels_last)


def test_a_batch_is_one_block_of_memory() -> None:
    images = fast_collate([stored(seed) for seed in range(5)])
    assert images.untyped_storage().nbytes() == images.numel()
    assert images.storage_offset() == 0


def test_contiguous_tensors_stay_channels_first() -> None:
    samples = [torch.from_numpy(pixels(seed, (3, HEIGHT, WIDTH))) for seed in range(3)]
    images = fast_collate(samples)
    assert images.is_contiguous()
    assert torch.equal(images, default_collate(samples))


@pytest.mark.parametrize("first", [0, 1])
def test_tensors_of_both_layouts_mix(first: int) -> None:
    samples = [stored(0), stored(1).contiguous(), stored(2)][first:]
    assert torch.equal(fast_collate(samples), torch.stack(samples))


def test_masks_keep_their_two_dimensions_as_with_torch() -> None:
    samples = [(pixels(seed), pixels(seed, (HEIGHT, WIDTH))) for seed in range(3)]
    _, masks = fast_collate(samples)
    assert masks.shape == (3, HEIGHT, WIDTH)
    assert torch.equal(masks, default_collate(samples)[1])


def test_arrays_with_gaps_or_turned_round_keep_their_pixels() -> None:
    arrays = [pixels(seed, (HEIGHT * 2, WIDTH, 3))[::-2, ::-1] for seed in range(3)]
    np.testing.assert_array_equal(
        fast_collate(arrays).permute(0, 2, 3, 1).numpy(), np.stack(arrays)
    )


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "CMYK"])
def test_pictures_become_their_pixels(mode: str) -> None:
    pictures = [Image.fromarray(pixels(seed)).convert(mode) for seed in range(3)]
    images = fast_collate(pictures)
    expected = np.stack([np.asarray(picture).reshape(HEIGHT, WIDTH, -1) for picture in pictures])
    np.testing.assert_array_equal(images.permute(0, 2, 3, 1).numpy(), expected)
    assert is_channels_last(images)


def test_samples_may_be_tuples_with_labels_floats_and_landmarks() -> None:
    samples = [
        (stored(seed), seed, seed / 3, torch.full((5, 2), float(seed)), f"{seed}.jpg")
        for seed in range(4)
    ]
    found, expected = fast_collate(samples), default_collate(samples)
    assert type(found) is type(expected) is list
    for one, other in zip(found[:4], expected[:4], strict=True):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype
    assert list(found[4]) == list(expected[4]) == ["0.jpg", "1.jpg", "2.jpg", "3.jpg"]


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_samples_may_be_dicts(kind: type) -> None:
    samples = [
        kind(image=stored(seed), label=seed, box=np.full(4, seed, np.float32)) for seed in range(3)
    ]
    found, expected = fast_collate(samples), default_collate([dict(sample) for sample in samples])
    assert list(found) == ["image", "label", "box"]
    for name, value in expected.items():
        assert torch.equal(found[name], value)
    assert is_channels_last(found["image"])


def test_samples_may_be_named_tuples() -> None:
    samples = [Numbers(stored(seed), seed, seed / 2) for seed in range(3)]
    found, expected = fast_collate(samples), default_collate(samples)
    assert type(found) is Numbers
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_samples_may_be_nested() -> None:
    samples = [
        (
            stored(seed),
            {"pose": (torch.eye(3) * seed, seed), "views": [pixels(seed), pixels(seed + 50)]},
        )
        for seed in range(3)
    ]
    images, rest = fast_collate(samples)
    assert torch.equal(images, torch.stack([stored(seed) for seed in range(3)]))
    assert torch.equal(rest["pose"][0], torch.stack([torch.eye(3) * seed for seed in range(3)]))
    assert rest["pose"][1].tolist() == [0, 1, 2]
    for position, offset in enumerate((0, 50)):
        expected = np.stack([pixels(seed + offset) for seed in range(3)])
        np.testing.assert_array_equal(rest["views"][position].permute(0, 2, 3, 1).numpy(), expected)


@pytest.mark.parametrize(
    "sample",
    [
        torch.arange(60, dtype=torch.float32).view(3, 4, 5),
        torch.arange(60).view(3, 4, 5),
        torch.arange(60, dtype=torch.uint8).view(2, 5, 3, 2),
        torch.arange(60, dtype=torch.uint8),
        np.arange(12, dtype=np.float32).reshape(3, 4),
        np.arange(12, dtype=np.uint8),
        np.float32(3.5),
        7,
        2.5,
        True,
    ],
    ids=[
        "float32",
        "int64",
        "uint8 4-d",
        "uint8 1-d",
        "float array",
        "uint8 1-d array",
        "scalar",
        "int",
        "float",
        "bool",
    ],
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


@pytest.mark.parametrize(
    "shape", [(WIDTH, HEIGHT, 3), (HEIGHT, WIDTH, 4), (HEIGHT, WIDTH), (1, 1, 1), (1, WIDTH, 3)]
)
def test_arrays_of_different_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        ValueError,
        match=r"image 1 of the batch has shape .*, but the first has \(6, 8, 3\)",
    ):
        fast_collate([pixels(0), pixels(1, shape)])
    with pytest.raises(
        ValueError,
        match=r"image 1 of the batch has shape \(6, 8, 3\), but the first has",
    ):
        fast_collate([pixels(1, shape), pixels(0)])


@pytest.mark.parametrize(
    ("samples", "told"),
    [
        (
            [stored(0), stored(1), stored(2).long() * 300],
            "2 of the batch is torch.int64 instead of torch.uint8",
        ),
        ([stored(0), stored(1).float()], "1 of the batch is torch.float32 instead of torch.uint8"),
        ([pixels(0), pixels(1).astype(np.int32) * 300], "1 of the batch is int32 instead of uint8"),
        ([stored(0), pixels(1)], "1 of the batch is uint8 instead of torch.uint8"),
        ([stored(0), 3], "1 of the batch is int instead of torch.uint8"),
        ([pixels(0), "text"], "1 of the batch is <U4 instead of uint8"),
        ([Image.new("F", (8, 6))], "0 of the batch is float32 instead of uint8"),
        ([Image.new("I", (8, 6), 1000)], "0 of the batch is int32 instead of uint8"),
    ],
    ids=[
        "int64",
        "float32",
        "int32 array",
        "array among tensors",
        "number",
        "text",
        "float picture",
        "int picture",
    ],
)
def test_values_that_would_be_lost_are_refused(samples: list[Any], told: str) -> None:
    with pytest.raises(ValueError, match=rf"image {told}\. Convert it"):
        fast_collate(samples)


def test_broken_samples_are_dropped_with_their_labels() -> None:
    samples = [(stored(0), 0), None, (None, 2), (stored(3), 3), [None, 4]]
    images, labels = fast_collate(samples)
    assert labels.tolist() == [0, 3]
    assert torch.equal(images, torch.stack([stored(0), stored(3)]))


def test_a_dict_without_its_image_is_dropped() -> None:
    batch = fast_collate([{"image": None, "label": 0}, {"image": stored(1), "label": 1}])
    assert batch["label"].tolist() == [1]


@pytest.mark.parametrize("samples", [[None, None], [(None, 1)], [{"image": None}], []])
def test_an_all_broken_batch_is_none(samples: list[Any]) -> None:
    assert fast_collate(samples) is None


def collate_over(times: int = 12) -> None:
    """Collate and drop batches that would take any free memory of a batch of four."""
    for _ in range(times):
        fast_collate([torch.zeros(3, HEIGHT, WIDTH, dtype=torch.uint8)] * 4)


@pytest.mark.parametrize(
    "keep",
    [
        lambda batch: batch,
        lambda batch: batch[2],
        lambda batch: batch[1:3, :, ::2],
        lambda batch: batch.permute(0, 2, 3, 1),
        lambda batch: batch.detach(),
        lambda batch: batch.view(torch.int8).view(torch.uint8),
        lambda batch: batch.numpy(),
        lambda batch: batch.numpy()[3, 1:],
        lambda batch: batch[0].numpy()[0],
        lambda batch: np.asarray(batch)[::-1][1:],
        np.from_dlpack,
        lambda batch: memoryview(batch.permute(0, 2, 3, 1).numpy()),
        lambda batch: torch.from_numpy(batch.numpy()[1]),
        lambda batch: next(iter(batch)),
    ],
    ids=[
        "whole", "image", "slice", "permuted", "detached", "retyped", "array", "part of array", "array of image",
        "turned array", "dlpack", "memoryview", "tensor of array", "iterated",
    ],
)  # fmt: skip
def test_what_is_held_of_a_batch_is_never_overwritten(keep: Any) -> None:
    held = keep(fast_collate([stored(seed) for seed in range(4)]))
    before = np.asarray(held).copy()
    collate_over()
    np.testing.assert_array_equal(np.asarray(held), before)
    assert before.any()


def test_a_batch_does_not_follow_what_it_was_made_of() -> None:
    for sample in (stored(1), pixels(1), stored(1).contiguous()):
        batch = fast_collate([sample])
        before = batch.clone()
        sample[:] = 0
        assert torch.equal(batch, before)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the buffers that are made; addresses alone would not tell them from what malloc uses again."""
    sizes: list[int] = []
    empty = np.empty

    def noted(shape: Any, *arguments: Any) -> np.ndarray:
        if isinstance(shape, int):  # those that NumPy makes for itself have a tuple
            sizes.append(shape)
        return empty(shape, *arguments)

    monkeypatch.setattr(np, "empty", noted)
    return sizes


def test_memory_is_used_again_once_a_batch_is_dropped(made: list[int]) -> None:
    samples = [stored(seed, (64, 64, 3)) for seed in range(4)]
    batch = fast_collate(samples)
    address = batch.data_ptr()
    view = batch[1]
    del batch
    other = fast_collate(samples)
    assert other.data_ptr() != address
    assert len(made) == 2
    del view
    assert fast_collate(samples).data_ptr() == address
    assert len(made) == 2


def test_a_loop_that_holds_one_batch_while_it_asks_for_the_next_needs_two_buffers(
    made: list[int],
) -> None:
    samples = [stored(seed, (64, 65, 3)) for seed in range(4)]
    batch = None
    for _ in range(20):
        batch = fast_collate(samples)
    assert batch is not None
    assert made == [4 * 64 * 65 * 3] * 2


def test_an_image_and_its_mask_both_use_memory_again(made: list[int]) -> None:
    samples = [(stored(seed, (64, 66, 3)), stored(seed, (64, 66, 1))) for seed in range(4)]
    for _ in range(20):
        images, masks = fast_collate(samples)
    assert (images.shape[1], masks.shape[1]) == (3, 1)
    assert sorted(made) == sorted([4 * 64 * 66 * 3, 4 * 64 * 66] * 2)


def test_little_memory_stays_when_all_batches_are_dropped() -> None:
    samples = [stored(seed, (64, 64, 3)) for seed in range(4)]
    tracemalloc.start()
    try:
        batches = [fast_collate(samples) for _ in range(10)]
        size = batches[0].numel()
        assert tracemalloc.get_traced_memory()[0] > 8 * size
        del batches
        assert tracemalloc.get_traced_memory()[0] < 2.5 * size
    finally:
        tracemalloc.stop()


def test_threads_never_share_a_batch() -> None:
    start = threading.Barrier(4)

    def hammer(seed: int) -> None:
        rng = np.random.default_rng(seed)
        held: list[tuple[torch.Tensor, int]] = []
        start.wait()
        for turn in range(300):
            value = seed * 60 + turn % 60
            shape = (3, 4, int(rng.integers(4, 6)))
            held.append((fast_collate([torch.full(shape, value, dtype=torch.uint8)] * 3), value))
            for batch, expected in held:
                assert bool((batch == expected).all())
            del held[: int(rng.integers(0, 3))]
            del held[:-5]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(hammer, range(4)))


def assert_right(loader: DataLoader[Any], labels: Sequence[int]) -> None:
    batches = list(loader)
    assert [label for batch in batches if batch is not None for label in batch[1].tolist()] == list(
        labels
    )
    for batch in batches:
        if batch is not None:
            images, found = batch
            assert is_channels_last(images)
            assert torch.equal(images, torch.stack([stored(label) for label in found.tolist()]))


@forks
@pytest.mark.parametrize(
    "options", [{}, {"prefetch_factor": 4}, {"persistent_workers": True}], ids=str
)
def test_it_works_in_forked_workers(options: dict[str, Any]) -> None:
    loader = DataLoader(
        Broken(23, none=[3], imageless=[0, 4, 5, 6, 7]),
        4,
        collate_fn=fast_collate,
        num_workers=2,
        multiprocessing_context="fork",
        **options,
    )
    expected = [label for label in range(23) if label not in (0, 3, 4, 5, 6, 7)]
    assert_right(loader, expected)
    if options.get("persistent_workers"):
        assert_right(loader, expected)
    del loader


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but")
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=forks)])
def test_it_works_with_pinned_memory(num_workers: int) -> None:
    context = "fork" if num_workers else None
    loader = DataLoader(
        Broken(11, none=[1, 3], imageless=[2]),
        2,
        collate_fn=fast_collate,
        num_workers=num_workers,
        pin_memory=True,
        multiprocessing_context=context,
    )
    assert_right(loader, [0, 4, 5, 6, 7, 8, 9, 10])


@forks
def test_a_worker_collates_into_shared_memory() -> None:
    loader = DataLoader(Facts(), None, num_workers=1, multiprocessing_context="fork")
    assert list(loader) == [[True, True, True]] * 2
    assert Facts()[0] == (False, False, False)


@forks
def test_a_shape_that_differs_in_a_worker_is_told_to_the_loop() -> None:
    loader = DataLoader(
        [pixels(0), pixels(1), pixels(2, (3, 3, 3)), pixels(3)],  # type: ignore[arg-type]
        2,
        collate_fn=fast_collate,
        num_workers=1,
        multiprocessing_context="fork",
    )
    batches = iter(loader)
    assert len(next(batches)) == 2
    with pytest.raises(ValueError, match=r"shape \(6, 8, 3\), but the first has \(3, 3, 3\)"):
        next(batches)
    assert next(batches, None) is None  # and the worker ends in peace
