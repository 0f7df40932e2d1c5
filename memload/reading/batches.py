"""What a Loader hands out: how a batch is made, its named tuple, and static buffers for it."""

import contextlib
import functools
import warnings
from collections import namedtuple
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from memload.feeds.feed import Feed, PendingRows
from memload.profiling import profiled
from memload.reading.columns import split_names
from memload.reading.dataset import MemmapDataset
from memload.reading.epochs import BatchPart, Chunk
from memload.reading.streams import map_tensors, tensors_of
from memload.transforms import Transform


class BatchNames(NamedTuple):
    """The names of what batches hold besides images."""

    #: in the order of a batch
    ordered: tuple[str, ...]
    #: the attributes of a batch, in the same order
    fields: tuple[str, ...]
    #: in the order in which the feed returns them: arrays, then columns
    fetched: list[str]
    #: those of masks, points and boxes, which follow the images
    followers: list[str]
    #: bytes of a sample in columns
    sample_bytes: int

    @classmethod
    def of(cls, dataset: MemmapDataset, names: tuple[str, ...]) -> "BatchNames":
        """Return the names for batches with these columns and arrays of a data set."""
        arrays, others = split_names(names, dataset.arrays)
        followers = followers_of(dataset, names)
        # If the data set has a column `labels`, used or not, the attribute of `label` is `label`.
        label = "label" if "labels" in dataset.index.names else "labels"
        fields = tuple(label if name == "label" else name for name in names)
        values = dataset.index.columns
        size = sum(values[name][:1].nbytes if name in values else 8 for name in others)
        return cls(names, fields, [*arrays, *others], [*chain(*followers.values())], size)


class JobMaker:
    """Makes a job for each batch of an epoch, and keeps what these jobs share.

    ``stream`` is the CUDA stream on which all of that is asked for, also by other threads; None for
    the caller's current one, and on the CPU.
    """

    def __init__(
        self,
        feed: Feed,
        transform: Callable[..., Any] | None,
        names: BatchNames,
        *,
        seed: int,
        epoch: int,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self.transform, self.names = transform, names
        self.batch_class = batch_type(names.fields)
        self._feed, self._seed, self._epoch, self._stream = feed, seed, epoch, stream

    def jobs(self, chunks: Iterable[Chunk]) -> Iterator["BatchJob"]:
        """Yield a job for each batch of some chunks. Its rows are being read by then."""
        for chunk in chunks:
            # torch.cuda.stream(None) starts CUDA, which fails in a child that was forked from a
            # process that uses it.
            on_stream = torch.cuda.stream(self._stream) if self._stream else nullcontext()
            chunk_rows, prepared = None, None
            if len(chunk.samples):
                with on_stream:
                    chunk_rows = self._feed.prepare(chunk.samples)
                    if isinstance(self.transform, Transform):
                        prepared = self.transform.prepare(
                            chunk.draw_numbers, seed=self._seed, epoch=self._epoch
                        )
            for part in chunk.parts:
                pending = None
                if chunk_rows is not None and part.stop > part.start:
                    pending = chunk_rows.begin(part.start, part.stop)
                yield BatchJob(self, part, pending, prepared)


class BatchJob(NamedTuple):
    """Makes one batch, on any thread."""

    maker: JobMaker
    part: BatchPart
    rows: PendingRows | None  #: None: this rank has no share of the step
    prepared: Any  #: one of memload's transforms, prepared for the samples of the chunk; else None

    def is_ready(self) -> bool:
        """Return whether `make` would not wait for the disk."""
        return self.rows is None or self.rows.is_ready()

    def make(self) -> Any:
        """Return the batch, a named tuple; None if this rank has no share of the step."""
        if self.rows is None:
            return None
        with profiled("fetch"):
            pixels, *values = self.rows.fetch()
        images: Any = pixels.permute(0, 3, 1, 2)
        names, transform = self.maker.names, self.maker.transform
        by_name = dict(zip(names.fetched, values, strict=True))
        if transform is not None:
            with profiled("transform"):
                if self.prepared is not None:
                    part = self.part
                    images, by_name = self.prepared(images, by_name, part.start, part.stop)
                else:
                    images = _call(transform, images, names.followers)
        return self.maker.batch_class(images, *(by_name[name] for name in names.ordered))


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
