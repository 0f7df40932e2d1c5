"""What a Loader hands out: how a batch is made, its named tuple, and static buffers for it."""

import functools
from collections import namedtuple
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from memload.feeds.interface import Feed
from memload.reading.epochs import BatchPart, Chunk
from memload.reading.streams import map_tensors, tensors_of
from memload.storage.index import Index
from memload.transforms import Transform


class BatchMaker:
    """Makes the batches of a chunk: fetches samples, transforms them and names their columns.

    Feed and transform prepare once for the chunk: they look up rows, draw, and upload both. On CUDA
    that is done on ``stream``, on which all of the chunk's batches must be made. Thread-safe.
    """

    def __init__(
        self,
        chunk: Chunk,
        *,
        feed: Feed,
        transform: Callable[..., Any] | None,
        columns: tuple[str, ...],
        seed: int,
        epoch: int,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self.stream = stream
        self._columns = columns
        self._prepared, self._function = None, transform
        with torch.cuda.stream(stream):
            self._fetch = feed.prepare(chunk.samples)
            if isinstance(transform, Transform):
                self._prepared = transform.prepare(chunk.draw_numbers, seed=seed, epoch=epoch)

    def __call__(self, part: BatchPart) -> tuple[int, Any]:
        """Return how many samples of the epoch are seen with this batch, and the batch."""
        pixels, *values = self._fetch(part.start, part.stop)
        images: Any = pixels.permute(0, 3, 1, 2)
        if self._prepared is not None:
            columns = dict(zip(self._columns, values, strict=True))
            images, columns = self._prepared(images, columns, part.start, part.stop)
            values = [columns[name] for name in self._columns]
        elif self._function is not None:
            images = self._function(images)
            _check_images(images, len(pixels))
        return part.samples_seen, batch_type(self._columns)(images, *values)


def _check_images(images: Any, count: int) -> None:
    """Raise ValueError if a transform of the user's has returned no batch of images."""
    if images is None:
        raise ValueError(f"transform returned None instead of {count} images. Return the images.")
    if isinstance(images, Tensor) and (images.ndim == 0 or len(images) != count):
        raise ValueError(
            f"transform returned a tensor of shape {tuple(images.shape)} for {count} images. "
            "Its first dimension must stay the same."
        )


@functools.cache
def batch_type(columns: tuple[str, ...]) -> Any:
    """Return the named tuple of images and these columns. Batches can be pickled.

    >>> batch_type(("label", "width"))._fields
    ('images', 'labels', 'width')
    """
    fields = ["images", *("labels" if name == "label" else name for name in columns)]
    batch_class = cast("Any", namedtuple("Batch", fields, rename=True))  # fields of this call

    def reduce(batch: Any) -> tuple[Any, ...]:
        return _unpickle_batch, (columns, tuple(batch))

    batch_class.__reduce__ = reduce
    return batch_class


def _unpickle_batch(columns: tuple[str, ...], values: tuple[Any, ...]) -> Any:
    return batch_type(columns)(*values)


class StaticBuffers:
    """The tensors that every batch is copied into, so that a captured CUDA graph can read them."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def copy(self, batch: Any) -> Any:
        """Return the batch with the buffers in place of its tensors; copied on the current stream.

        The first batch makes the buffers. Raises ValueError for one of another shape or dtype.
        """
        tensors = list(tensors_of(batch))
        if not self._buffers:
            self._buffers = [torch.clone(tensor) for tensor in tensors]
        else:
            expected = [(tuple(buffer.shape), buffer.dtype) for buffer in self._buffers]
            found = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
            if found != expected:
                raise ValueError(
                    f"static_buffers: a batch has tensors of {_describe(found)}, but the buffers "
                    f"are of {_describe(expected)}. All batches must be alike: use drop_last=True, "
                    "and a transform whose result always has the same shape and dtype."
                )
            for buffer, tensor in zip(self._buffers, tensors, strict=True):
                buffer.copy_(tensor)
        buffers = iter(self._buffers)
        return map_tensors(lambda _: next(buffers), batch)


def _describe(tensors: list[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{shape} {dtype}" for shape, dtype in tensors)


def bind_dataset(transform: Any, dataset: Any) -> Any:
    """Return a transform of memload's with the data set's statistics and number of classes.

    Any other transform is returned as it is, as is any transform for a data set without an index.
    """
    index = getattr(dataset, "index", None)
    if not isinstance(transform, Transform) or not isinstance(index, Index):
        return transform
    mean, std = index.statistics.get("mean"), index.statistics.get("std")
    num_classes = len(index.classes) if index.classes else None
    if isinstance(mean, list) and isinstance(std, list):
        return transform.bind(mean=mean, std=std, num_classes=num_classes)
    return transform.bind(num_classes=num_classes)
