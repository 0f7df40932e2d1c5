"""Gather a batch of samples into one tensor."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info

from memload.feeds.buffers import BufferPool

#: Two are what a consumer needs that holds one batch while it asks for the next, and all that stays in the end.
_pool = BufferPool(2)


def fast_collate(samples: Sequence[Any]) -> Any:
    """Turn samples into a batch: each position's images into one tensor, in one copy.

    Images are uint8 tensors ``(C, H, W)``, arrays ``(H, W)`` or ``(H, W, C)`` and PIL images, all of one shape. They
    become ``(N, C, H, W)``, channels-last in memory unless the samples are tensors that are not. Everything else is
    collated as torch does it. Samples may be tuples, lists, dicts or images. Samples that are None, or whose
    first entry is None (a broken image), are dropped; if none is left the batch is None.

    The memory of a batch is used again once nothing refers to it any more, never before. In a worker process
    it is shared memory, so that it is not copied again on its way. Thread-safe. Raises ValueError where
    images differ in shape or type.
    """
    kept = [sample for sample in samples if not _broken(sample)]
    return _collate(kept) if kept else None


def _broken(sample: Any) -> bool:
    if isinstance(sample, Mapping):
        return sample.get("image", sample) is None
    return sample is None or (
        isinstance(sample, (tuple, list)) and bool(sample) and sample[0] is None
    )


def _collate(samples: Sequence[Any]) -> Any:
    first = samples[0]
    if _is_image(first):
        return _stack(samples)
    if isinstance(first, Mapping):
        return {name: _collate([sample[name] for sample in samples]) for name in first}
    if isinstance(first, (tuple, list)):
        columns = [_collate(column) for column in zip(*samples, strict=True)]
        if hasattr(first, "_fields"):
            return type(first)(*columns)
        return columns  # a list, as torch's own gives
    return default_collate(list(samples))


def _is_image(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dtype == torch.uint8 and value.ndim == 3 and value.device.type == "cpu"
    if isinstance(value, np.ndarray):
        return value.dtype == np.uint8 and value.ndim in (2, 3)
    return type(value).__module__.startswith("PIL.")


def _stack(images: Sequence[Any]) -> Tensor:
    first = images[0]
    if isinstance(first, Tensor):
        for position, image in enumerate(images):
            _check(image, position, first.shape, torch.uint8)
        channels_last = first.stride(0) == 1
        views = [image.permute(1, 2, 0) for image in images] if channels_last else list(images)
        batch = _allocate((len(views), *views[0].shape))
        torch.stack(views, out=batch)
        return batch.permute(0, 3, 1, 2) if channels_last else batch
    shape = np.shape(_array(first))
    batch = _allocate((len(images), *shape))
    # One after another, so that what a picture's pixels pass through is the same memory for all. By NumPy: torch
    # takes read-only arrays, as pictures give them, only with a warning or a copy.
    for position, (row, image) in enumerate(zip(batch.numpy(), images, strict=True)):
        array = _array(image)
        _check(array, position, shape, np.dtype(np.uint8))
        row[:] = array
    return batch.permute(0, 3, 1, 2)


def _array(image: Any) -> np.ndarray:
    array = np.asarray(image)
    return array[:, :, np.newaxis] if array.ndim == 2 else array


def _check(image: Any, position: int, shape: Sequence[int], dtype: object) -> None:
    found = getattr(image, "dtype", type(image).__name__)
    if found != dtype:
        raise ValueError(
            f"samples: expected images of {dtype}, found {found} at {position}. Convert it"
        )
    if image.shape != shape:
        raise ValueError(
            f"samples: expected images of one shape, found {tuple(shape)} at 0 and {tuple(image.shape)} at "
            f"{position}. Give the data set a fixed size"
        )


def _allocate(shape: tuple[int, ...]) -> Tensor:
    """Return an uninitialised uint8 tensor: shared in a worker, else of memory that is used again."""
    size = int(np.prod(shape, dtype=np.int64))
    if get_worker_info() is not None:
        # as torch's default_collate does it; share_memory_() would copy
        shared = torch.UntypedStorage._new_shared(size)  # type: ignore[no-untyped-call]  # torch's
        return torch.empty(0, dtype=torch.uint8).set_(shared).view(shape)
    return _pool.take(size).view(shape)
