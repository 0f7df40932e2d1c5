"""Collate the samples of a batch into tensors."""

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info

from memload.feeds.gather import BufferPool

logger = logging.getLogger("memload")

#: Dimensions and types of a sample's images and masks.
_STACKED = {(3, torch.uint8), (2, torch.uint8), (2, torch.uint16)}
_TORCH_TYPES = {np.dtype(np.uint8): torch.uint8, np.dtype(np.uint16): torch.uint16}
#: A consumer that asks for the next batch while it holds one needs two buffers for images, and two
#: for masks.
_pool = BufferPool(4)


def fast_collate(samples: Sequence[Any]) -> Any:
    """Collate samples into a batch, like torch's ``default_collate``, but copy images only once.

    Args:
        samples: Images, or tuples, lists or dicts with images in them, also nested. All images at
            one position must have the same shape and dtype.

    Images and masks become tensors as follows. All else is left to ``default_collate``.

    - uint8 tensors ``(C, H, W)`` become ``(N, C, H, W)``, in the same memory format.
    - uint8 arrays ``(H, W, C)`` and PIL images become ``(N, C, H, W)``, channels-last in memory.
    - uint8 and uint16 masks ``(H, W)``, tensors or arrays, become ``(N, H, W)``.

    Samples that are None, or whose first entry (in a dict, ``"image"``) is None, are dropped. The
    first one is a warning in the log ``memload``; each worker warns once. If no sample is left, the
    batch is None.

    The memory of a batch is on the CPU, whatever torch's default device is. It is reused once
    nothing refers to it any more. In a worker process it is shared memory, so that the batch is not
    copied again on its way. Thread-safe. Raises ValueError if images differ in shape or dtype.

    >>> loader = DataLoader(dataset, batch_size=32, collate_fn=memload.fast_collate)
    """
    kept = [sample for sample in samples if not _is_broken(sample)]
    if len(kept) < len(samples):
        _warn_of_dropped()
    return _collate(kept) if kept else None


def _is_broken(sample: Any) -> bool:
    if isinstance(sample, Mapping):
        return sample.get("image", sample) is None
    if isinstance(sample, (tuple, list)):
        return bool(sample) and sample[0] is None
    return sample is None


@functools.cache  # once a process
def _warn_of_dropped() -> None:
    logger.warning(
        "fast_collate drops samples that are None, or whose image is None. This is the first one. "
        "Those that follow are dropped without a warning."
    )


def _collate(samples: Sequence[Any]) -> Any:
    first = samples[0]
    if isinstance(first, Tensor):
        if first.device.type == "cpu" and (first.ndim, first.dtype) in _STACKED:
            return _stack_tensors(samples)
    elif isinstance(first, np.ndarray):
        if (first.ndim, _TORCH_TYPES.get(first.dtype)) in _STACKED:
            return _stack_arrays(samples)
    elif type(first).__module__.startswith("PIL."):
        return _stack_arrays(samples)
    elif isinstance(first, Mapping):
        return {name: _collate([sample[name] for sample in samples]) for name in first}
    elif isinstance(first, (tuple, list)):
        columns = [_collate(column) for column in zip(*samples, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else columns
    with torch.device("cpu"):  # else numbers would become tensors on torch's default device
        return default_collate(list(samples))


def _stack_tensors(images: Sequence[Any]) -> Tensor:
    first = images[0]
    for position, image in enumerate(images):
        _check_image(image, position, first.shape, first.dtype)
    channels_last = first.ndim == 3 and first.stride(0) == 1
    views = [image.permute(1, 2, 0) for image in images] if channels_last else list(images)
    batch = _allocate((len(views), *views[0].shape), first.dtype)
    torch.stack(views, out=batch)
    return batch.permute(0, 3, 1, 2) if channels_last else batch


def _stack_arrays(images: Sequence[Any]) -> Tensor:
    first = _as_array(images[0])
    shape, dtype = first.shape, np.dtype(np.uint8) if first.ndim == 3 else first.dtype
    batch = _allocate((len(images), *shape), _TORCH_TYPES[dtype])
    # One image at a time, so that PIL can use the same memory for the pixels of each. Copied by
    # NumPy, since PIL's arrays are read-only and torch warns of those.
    for position, (row, image) in enumerate(zip(batch.numpy(), images, strict=True)):
        array = _as_array(image)
        _check_image(array, position, shape, dtype)
        row[:] = array
    return batch.permute(0, 3, 1, 2) if len(shape) == 3 else batch


def _as_array(image: Any) -> np.ndarray:
    """Return an image as an array. A gray PIL image becomes ``(H, W, 1)``."""
    if isinstance(image, np.ndarray):
        return image
    array = np.asarray(image)
    return array[:, :, np.newaxis] if array.ndim == 2 else array


def _check_image(image: Any, position: int, shape: Sequence[int], dtype: object) -> None:
    """Raise ValueError for an image whose values would be repeated or cut off without a word."""
    if image.dtype != dtype or image.shape != shape:
        raise ValueError(
            f"image {position} of the batch is {image.dtype} of shape {tuple(image.shape)}, but "
            f"the first is {dtype} of {tuple(shape)}. Resize or convert all images alike."
        )


def _allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor: in a worker of shared memory, else of reused memory."""
    size = math.prod(shape) * dtype.itemsize
    if get_worker_info() is None:
        return _pool.take(size).view(dtype).view(shape)
    # As torch's default_collate does it. share_memory_() would copy.
    shared = torch.UntypedStorage._new_shared(size)  # type: ignore[no-untyped-call]  # torch's
    return torch.empty(0, dtype=dtype, device="cpu").set_(shared).view(shape)
