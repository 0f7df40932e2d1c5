"""Gather a batch of samples into one tensor."""

import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info

#: Buffers that no batch uses any more, newest last. Fresh memory would cost a page fault every 4 KiB, which
#: takes longer than the copy itself; two are what a consumer that holds one batch while it asks for the
#: next needs. They are all that stays when training is over.
_free: deque[np.ndarray] = deque(maxlen=2)


def fast_collate(samples: Sequence[Any]) -> Any:
    """Turn samples into a batch: each position's images into one tensor, in one copy.

    Images are uint8 tensors ``(C, H, W)``, arrays ``(H, W)`` or ``(H, W, C)`` and PIL images, all of one shape. They
    become ``(N, C, H, W)``, channels-last in memory unless the samples are tensors that are not. Everything else is
    collated as torch does it. Samples may be tuples, lists, dicts or images. Samples that are None, or whose
    first entry is None (a broken image), are dropped; if none is left the batch is None.

    The memory of a batch is used again once nothing refers to it any more, never before. In a worker process
    it is shared memory, so that it is not copied again on its way. Thread-safe. Raises ValueError where
    images differ in shape.
    """
    kept = [sample for sample in samples if not _broken(sample)]
    return _collate(kept) if kept else None


def _broken(sample: Any) -> bool:
    if isinstance(sample, Mapping):
        return sample.get("image", sample) is None
    return sample is None or (isinstance(sample, (tuple, list)) and bool(sample) and sample[0] is None)


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
    if isinstance(images[0], Tensor):
        views, channels_last = list(images), images[0].stride(0) == 1
        if channels_last:
            views = [image.permute(1, 2, 0) for image in views]
    else:
        arrays = [np.asarray(image) for image in images]
        views, channels_last = [torch.from_numpy(_writable(a)) for a in arrays], True
        views = [view.unsqueeze(2) if view.ndim == 2 else view for view in views]
    shape = views[0].shape
    for position, view in enumerate(views):
        if view.shape != shape:
            raise ValueError(
                f"samples: expected images of one shape, found {tuple(shape)} at 0 and {tuple(view.shape)} at "
                f"{position}. Give the data set a fixed size"
            )
    batch = _allocate((len(views), *shape))
    torch.stack(views, out=batch)
    return batch.permute(0, 3, 1, 2) if channels_last else batch


def _writable(array: np.ndarray) -> np.ndarray:
    return array if array.flags.writeable else array.copy()  # torch warns of the others


def _allocate(shape: tuple[int, ...]) -> Tensor:
    """Return an uninitialised uint8 tensor: shared in a worker, else of memory that is used again."""
    size = int(np.prod(shape, dtype=np.int64))
    if get_worker_info() is not None:
        # as torch's default_collate does it; share_memory_() would copy
        shared = torch.UntypedStorage._new_shared(size)  # type: ignore[no-untyped-call]
        return torch.empty(0, dtype=torch.uint8).set_(shared).view(shape)
    buffer = None
    while _free and buffer is None:
        try:
            candidate = _free.pop()
        except IndexError:  # another thread was faster
            break
        buffer = candidate if size <= candidate.size <= 2 * size else None
    if buffer is None:
        buffer = np.empty(size, np.uint8)
    lease = buffer[:size]
    # The tensor's storage holds this view, and whatever shares the storage holds that: when the view dies,
    # no batch can reach the memory any more.
    weakref.finalize(lease, _free.append, buffer).atexit = False
    return torch.from_numpy(lease).view(shape)
