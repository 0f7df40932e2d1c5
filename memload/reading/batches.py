"""What a Loader hands out: how a batch is made, its named tuple, and static buffers for it."""

import contextlib
import functools
import warnings
from collections import namedtuple
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from memload.feeds.feed import Feed, current_stream
from memload.profiling import profiled
from memload.reading.dataset import MemmapDataset
from memload.reading.epochs import BatchPart, Chunk
from memload.reading.loop import Job
from memload.reading.streams import map_tensors, tensors_of
from memload.transforms import Transform
from memload.upload import upload


class BatchNames(NamedTuple):
    """The names of what batches hold besides images."""

    #: in the order of a batch
    ordered: tuple[str, ...]
    #: the attributes of a batch, in the same order
    fields: tuple[str, ...]
    #: those of arrays, which a feed brings, and those of columns
    arrays: list[str]
    columns: list[str]
    #: those of masks, points and boxes, which follow the images
    followers: list[str]

    @classmethod
    def of(cls, dataset: MemmapDataset, names: tuple[str, ...]) -> "BatchNames":
        """Return the names for batches with these columns and arrays of a data set."""
        arrays = [name for name in names if name in dataset.arrays]
        columns = [name for name in names if name not in arrays]
        followers = followers_of(dataset, names)
        # If the data set has a column `labels`, used or not, the attribute of `label` is `label`.
        label = "label" if "labels" in dataset.index.names else "labels"
        fields = tuple(label if name == "label" else name for name in names)
        return cls(names, fields, arrays, columns, [*chain(*followers.values())])


class JobMaker:
    """Makes a job for each batch of an epoch, and keeps what these jobs share.

    ``stream`` is the CUDA stream on which all of that is asked for, also by other threads; None for
    the caller's current one, and on the CPU.
    """

    def __init__(
        self,
        feed: Feed,
        dataset: MemmapDataset,
        transform: Callable[..., Any] | None,
        names: BatchNames,
        *,
        seed: int,
        epoch: int,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self._transform, self._names = transform, names
        self._batch_class = batch_type(names.fields)
        self._feed, self._columns = feed, dataset.index.columns
        self._seed, self._epoch, self._stream = seed, epoch, stream

    def jobs(self, chunks: Iterable[Chunk]) -> Iterator[Job]:
        """Yield a job for each batch of some chunks, with its `BatchPart` as the note.

        The rows are being read by then.
        """
        for chunk in chunks:
            if not chunk.parts:  # this rank has no share of the last step
                continue
            prepared = None
            # torch.cuda.stream(None) starts CUDA, which fails in a child that was forked from a
            # process that uses it.
            with torch.cuda.stream(self._stream) if self._stream else nullcontext():
                columns = self._upload(chunk.samples)
                begin_rows = self._feed.prepare(chunk.samples)
                if isinstance(self._transform, Transform):
                    prepared = self._transform.prepare(
                        chunk.draw_numbers, seed=self._seed, epoch=self._epoch
                    )
            for part in chunk.parts:
                rows = begin_rows(part.start, part.stop)
                make = partial(self._make, rows.fetch, columns, prepared, part)
                yield Job(make, rows.is_ready, part)

    def _upload(self, samples: np.ndarray) -> list[Tensor]:
        """Return the columns of some samples on the device."""
        columns = self._columns  # without a column of this name, "index" is the sample's number
        values = [
            columns[name][samples] if name in columns else samples for name in self._names.columns
        ]
        return [upload(value, self._feed.device) for value in values]

    def _make(
        self,
        fetch: Callable[[], list[Tensor]],
        columns: list[Tensor],
        prepared: Any,
        part: BatchPart,
    ) -> Any:
        """Return a batch, a named tuple. Called on any thread.

        ``columns`` are those of the chunk, and so is ``prepared``, one of memload's transforms;
        None for others.
        """
        with profiled("fetch"):
            pixels, *arrays = fetch()
            values = [*arrays, *(self._part_of(column, part) for column in columns)]
        images: Any = pixels.permute(0, 3, 1, 2)
        names = self._names
        by_name = dict(zip([*names.arrays, *names.columns], values, strict=True))
        if self._transform is not None:
            with profiled("transform"):
                if prepared is not None:
                    images, by_name = prepared(images, by_name, part.start, part.stop)
                else:
                    images = _call(self._transform, images, names.followers)
        return self._batch_class(images, *(by_name[name] for name in names.ordered))

    def _part_of(self, column: Tensor, part: BatchPart) -> Tensor:
        """Return the part of a chunk's column that is the batch's own."""
        values = column[part.start : part.stop]
        if not values.is_cuda:
            return values.clone()  # it would keep the whole chunk
        if self._stream is None:
            # The loop may have changed its stream, and the feed has let that one wait.
            values.record_stream(current_stream(values.device))
        return values


def _call(transform: Callable[[Any], Any], images: Tensor, followers: Sequence[str]) -> Any:
    """Call a function of the user's with the images of a batch, and check what it returns.

    Warns if it has changed their size, but not the masks, points and boxes that belong to them.
    """
    result = transform(images)
    found = tuple(result.shape) if isinstance(result, Tensor) else (len(images),)
    if result is None or found[:1] != (len(images),):
        described = "None" if result is None else f"a tensor of shape {found}"
        raise ValueError(
            f"transform returned {described} for {len(images)} images. Return as many images, "
            "along the first dimension."
        )
    old, new = tuple(images.shape[2:]), tuple(found[2:])
    if followers and len(new) == 2 and new != old:
        warnings.warn(
            f"transform made images of {new[0]}×{new[1]} from {old[0]}×{old[1]}, but gets the "
            f"images alone: {', '.join(followers)} stay as they are. Use memload.transforms, which "
            "move them together, or leave them out with columns=….",
            stacklevel=2,
        )
    return result


@functools.cache
def batch_type(fields: tuple[str, ...]) -> Any:
    """Return the named tuple of images and these fields. Batches can be pickled.

    A name that no attribute can have, such as ``image id``, becomes its position: ``_2``.

    >>> batch_type(("labels", "image id"))._fields
    ('images', 'labels', '_2')
    """
    batch_class = cast("Any", namedtuple("Batch", ["images", *fields], rename=True))
    batch_class.__reduce__ = lambda batch: (_unpickle_batch, (fields, tuple(batch)))
    return batch_class


def _unpickle_batch(fields: tuple[str, ...], values: tuple[Any, ...]) -> Any:
    return batch_type(fields)(*values)


def copy_to_buffers(batch: Any, buffers: list[Tensor]) -> Any:
    """Return the batch with the buffers in place of its tensors; copied on the current stream.

    A captured CUDA graph can read the buffers. ``buffers`` starts empty; the first batch allocates
    them. Raises ValueError for a batch of another shape or dtype.
    """
    tensors = list(tensors_of(batch))
    if not buffers:
        buffers += [torch.empty_like(tensor) for tensor in tensors]
    if [(one.shape, one.dtype) for one in tensors] != [(one.shape, one.dtype) for one in buffers]:
        raise ValueError(
            f"static_buffers: a batch has tensors of {_describe(tensors)}, but the buffers are of "
            f"{_describe(buffers)}. All batches must be alike: use drop_last=True, and a transform "
            "whose result always has the same shape and dtype."
        )
    for buffer, tensor in zip(buffers, tensors, strict=True):
        buffer.copy_(tensor)
    remaining = iter(buffers)
    return map_tensors(lambda _: next(remaining), batch)


def _describe(tensors: list[Tensor]) -> str:
    return ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors)


def bind_dataset(transform: Any, dataset: Any, names: Collection[str] = ()) -> Any:
    """Return a transform of memload's with what it leaves to the data set filled in.

    These are statistics, the number of classes, and which of the columns of a batch follow the
    images. Any other transform is returned as it is, as is any for another kind of data set.
    """
    if not isinstance(transform, Transform) or not isinstance(dataset, MemmapDataset):
        return transform
    facts: dict[str, Any] = {
        kind: followers for kind, followers in followers_of(dataset, names).items() if followers
    }
    mean, std = dataset.index.statistics.get("mean"), dataset.index.statistics.get("std")
    if isinstance(mean, list) and isinstance(std, list):
        facts |= {"mean": mean, "std": std}
    with contextlib.suppress(ValueError):  # no labels that number classes
        facts["num_classes"] = dataset.num_classes or None
    return transform.bind(**facts)


def followers_of(dataset: MemmapDataset, names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return which of these columns follow the images, by their kinds; see `following.KINDS`."""
    masks = [name for name, array in dataset.arrays.items() if array.kind == "mask"]
    all_of_kind = {"points": dataset.index.points, "masks": masks, "boxes": dataset.index.boxes}
    return {kind: tuple(n for n in found if n in names) for kind, found in all_of_kind.items()}
