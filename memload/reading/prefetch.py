"""Run any iterable ahead of its consumer: on a thread, or on a CUDA stream."""

import contextlib
import functools
import operator
import os
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from time import perf_counter
from typing import Any, Generic, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Subset

from memload.jobs import Job
from memload.profiling import profiled
from memload.reading.ahead import ahead, on_thread
from memload.reading.arguments import check_transform, open_dataset
from memload.reading.batches import bind_dataset
from memload.reading.dataset import MemmapDataset
from memload.reading.epochs import tell_epoch
from memload.reading.samplers import ShuffledSampler, check_integer
from memload.reading.stats import Stats, Stopwatch
from memload.reading.streams import SideStream, current_stream, find_device, map_tensors
from memload.transforms import Transform
from memload.transforms.foreign import draws_once_a_batch
from memload.transforms.transform import seed_offset

T = TypeVar("T")
P = ParamSpec("P")


class ThreadPrefetcher(Generic[T]):
    """Iterate over ``iterable`` on a thread, at most ``prefetch_factor`` items ahead.

    >>> for batch in ThreadPrefetcher(read_batches()):
    ...     ...

    It helps if the iterable releases the GIL: when it reads, decodes or waits. Each `iter` begins
    the iterable anew, on a thread of its own that starts with the first item and ends with the
    iteration. An exception is raised in the loop, after the items before it and with its own
    traceback. Leaving early waits for the item that the thread is working on, for at most 10
    seconds. ``len()`` is that of the iterable.

    Raises ValueError for a ``prefetch_factor`` below 1, and RuntimeError if an iterator from before
    a fork is used in the child.
    """

    def __init__(self, iterable: Iterable[T], prefetch_factor: int = 2) -> None:
        check_integer("prefetch_factor", prefetch_factor, 1)
        self.iterable, self.prefetch_factor = iterable, prefetch_factor

    def __len__(self) -> int:
        return len(self.iterable)  # type: ignore[arg-type]  # raises TypeError if it has no length

    def __iter__(self) -> Iterator[T]:
        return on_thread(self.iterable, self.prefetch_factor)


def background(
    function: Callable[P, Iterable[T]] | None = None, *, prefetch_factor: int = 2
) -> Any:  # no type fits a decorator with or without parentheses
    """Decorate a generator function, so that its items are made ahead on a thread.

    >>> @background(prefetch_factor=4)      # or @background
    ... def read_batches():
    ...     yield ...

    The result of a call is the iterator of a `ThreadPrefetcher`.
    """
    check_integer("prefetch_factor", prefetch_factor, 1)
    if function is None:
        return functools.partial(background, prefetch_factor=prefetch_factor)

    @functools.wraps(function)
    def prefetched(*args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return on_thread(function(*args, **kwargs), prefetch_factor)

    return prefetched


class CudaPrefetcher:
    """Move batches to a CUDA device ahead of the training loop, on a stream of its own.

    >>> batches = DataLoader(dataset, 256, collate_fn=memload.fast_collate, pin_memory=True)
    >>> for images, labels in CudaPrefetcher(batches, transform=memload.transforms.Normalize()):
    ...     ...

    ``iterable`` is one of two:

    - A DataLoader, or any other iterable of batches. These are tensors in nested tuples, lists and
      mappings; the tensors are moved, everything else stays as it is. Copies overlap with training
      if the batches are in page-locked memory (``pin_memory=True``). Otherwise the caller waits for
      each.
    - A dataset that makes its samples on the device: it has ``dataset[i]``, ``len()``, and no
      iterator. Samples are made ahead on the stream, in order or, with ``shuffle=True``, in the
      order of `ShuffledSampler` for (``seed``, epoch).

    ``transform`` is called on the stream with the images: the batch itself if it is a tensor, the
    first element of a tuple or list, otherwise the whole batch. One of `memload.transforms` also
    gets the column ``label`` of a batch of two; if that is a mask, name it so:
    ``Compose([…], masks=["label"])``. For a DataLoader over a `MemmapDataset` it gets all columns
    and the data set's mean and std, and moves masks, points and boxes together with the images. It
    draws at random for (``seed``, epoch, rank, position in the epoch), or for the number of the
    sample if samples have numbers.

    ``prefetch_factor`` batches are on their way while one is used. With ``own_thread=True`` a
    thread does all of this, so that the training loop does not wait for ``iterable`` either.
    ``device`` is by default the current CUDA device. On the CPU, nothing is moved and everything
    else is the same.

    A batch is ready for the stream that is current when you ask for it, and is never overwritten.
    Iterate, as often as you like, or call `next` as with Apex's data_prefetcher. ``len()`` is that
    of the iterable. An exception is raised after the batches before it. Leaving early leaves no
    threads behind.

    Raises ValueError and TypeError for wrong arguments, and ValueError for a batch with integers of
    the height and width of the images, such as masks, that one of `memload.transforms` moves but
    does not name. Warns if random transforms of torchvision
    are to transform batches, since they draw only once for a whole batch.
    """

    def __init__(
        self,
        iterable: Any,
        *,
        device: torch.device | str | None = None,
        transform: Callable[[Any], Any] | None = None,
        prefetch_factor: int = 2,
        own_thread: bool = False,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        check_integer("prefetch_factor", prefetch_factor, 1)
        check_transform(transform)
        self._by_number = _is_dataset(iterable)
        if shuffle and not self._by_number:
            raise ValueError(
                "shuffle is for a dataset of samples, but an iterable has an order of its own. "
                "Shuffle there."
            )
        if not self._by_number and (warning := draws_once_a_batch(transform)):
            warnings.warn(warning, stacklevel=2)
        dataset = _stored_dataset(iterable)
        self.iterable, self.prefetch_factor = iterable, prefetch_factor
        #: What a DataLoader gives behind the images.
        self._columns: tuple[str, ...] = ()
        if isinstance(iterable, DataLoader) and dataset is not None:
            self._columns = dataset.sample_names
        self.transform = bind_dataset(transform, dataset, self._columns)
        self.own_thread, self.shuffle, self.seed = own_thread, shuffle, seed
        self.device = find_device(device)
        is_cuda = self.device.type == "cuda"
        self._side = SideStream(self.device, prefetch_factor) if is_cuda else None
        self._epoch = 0
        self._batches: Iterator[Any] | None = None
        self._stopwatch = Stopwatch(0)
        self._after_the_last: tuple[None, ...] = (None, None)

    def __len__(self) -> int:
        return len(self.iterable)

    @property
    def stats(self) -> Stats:
        """How many batches the newest iteration has handed out, and how long the loop has waited.

        >>> print(batches.stats)
        1,000 batches in 52.1 s: waited 0.4 s for data (0.8 %)

        See `Loader.stats`. The seconds are those of the host: while the host is kept back because
        it is too far ahead of a CUDA device, that is the loop's time. Bytes are not counted.
        """
        return self._stopwatch.stats()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, also for the iterable and its samplers."""
        self._epoch = epoch
        if hasattr(self.iterable, "set_epoch"):
            self.iterable.set_epoch(epoch)
        tell_epoch(epoch, self.iterable)

    def __iter__(self) -> Iterator[Any]:
        epoch, self._epoch, self._batches = self._epoch, self._epoch + 1, None
        items = self.iterable
        if self._by_number:
            items = range(len(self.iterable))
            if self.shuffle:
                order = ShuffledSampler(len(items), seed=self.seed)
                items = order.take(epoch, np.array(items)).tolist()
        # The generators below must not refer to self: `next` stores them there, and such a cycle
        # would keep a DataLoader's workers alive.
        jobs = _jobs(_Mover(self, epoch), items, self._side, current_stream(self.device))
        if self.own_thread:
            begun = on_thread(map(operator.call, jobs), self.prefetch_factor)
        else:
            begun = ahead(jobs, 1 + self.prefetch_factor)
        self._stopwatch = Stopwatch(epoch)
        return _hand_over(begun, self._side, self._stopwatch)

    def next(self) -> Any:
        """Return the next batch or, after the last, a None for each element: ``(None, None)``.

        The first call begins an epoch. After the end, further calls return the same: use `iter` or
        a new prefetcher to begin anew.
        """
        if self._batches is None:
            self._batches = iter(self)
        for batch in self._batches:
            if isinstance(batch, tuple | list):
                self._after_the_last = (None,) * max(1, len(batch))
            return batch
        return self._after_the_last


def _jobs(
    make_batch: Callable[[Any], Any], items: Iterable[Any], side: SideStream | None, consumer: Any
) -> Generator[Job[Any], None, None]:
    """Yield a job for each item, which makes a batch of it, or begins to."""
    for item in items:
        make = functools.partial(make_batch, item)
        yield Job(make if side is None else functools.partial(side.begin, make, consumer))
        del item, make  # their memory may be what the next one takes


def _hand_over(
    begun: Generator[Any, None, None], side: SideStream | None, stopwatch: Stopwatch
) -> Generator[Any, None, None]:
    stopwatch.start(perf_counter())
    with contextlib.closing(begun):
        for batch in begun if side is None else map(side.hand_over, begun):
            stopwatch.hand_over()
            if side is not None:
                side.keep_back()
            yield batch
            del batch  # its memory may be what the next one takes
            stopwatch.ask()


class _Mover:
    """Makes the batches of an epoch of a `CudaPrefetcher`: moves and transforms them."""

    def __init__(self, prefetcher: CudaPrefetcher, epoch: int) -> None:
        self._dataset = prefetcher.iterable if prefetcher._by_number else None
        self._device, self._transform = prefetcher.device, prefetcher.transform
        self._columns, self._seed, self._epoch = prefetcher._columns, prefetcher.seed, epoch
        self._samples_seen = 0

    def __call__(self, item: Any) -> Any:
        """Return a batch on the device, of one from the iterable or of the number of a sample."""
        source = item if self._dataset is None else self._dataset[item]
        with profiled("copy"):
            batch = map_tensors(lambda tensor: tensor.to(self._device, non_blocking=True), source)
        if self._transform is None:
            return batch
        is_sequence = isinstance(batch, tuple | list) and len(batch) > 0
        images, *values = batch if is_sequence else [batch]
        with profiled("transform"):
            if isinstance(self._transform, Transform):
                images, values = self._transform_columns(images, values, item)
            else:
                images = self._transform(images)
        if not is_sequence:
            return images
        is_named = hasattr(batch, "_fields")
        return type(batch)(images, *values) if is_named else type(batch)([images, *values])

    def _transform_columns(
        self, images: Any, values: list[Any], item: Any
    ) -> tuple[Any, list[Any]]:
        """Call a transform of memload's with images and, if their names are known, columns."""
        count = len(images) if isinstance(images, Tensor) and images.ndim else 0
        first = self._samples_seen
        if self._dataset is not None:
            # A sample draws for its number. A whole batch with a number has 2³² numbers of its own
            # for its samples.
            first = item if count == 1 else (item + 1) << 32
        self._samples_seen += count
        transform = functools.partial(
            self._transform,
            samples=np.arange(first, first + count),
            seed=int(self._seed) + seed_offset(),
            epoch=self._epoch,
        )
        names = self._columns
        if len(values) != len(names):
            names = ("label",)
            _refuse_unnamed_masks(self._transform, images, values)
        are_columns = all(isinstance(one, Tensor) and one.shape[:1] == (count,) for one in values)
        if len(values) != len(names) or not are_columns:
            return transform(images), values
        columns = dict(zip(names, values, strict=True))
        images, columns = transform(images, columns)  # MixUp changes labels too
        return images, [columns[name] for name in names]


def _refuse_unnamed_masks(transform: Transform, images: Any, values: list[Any]) -> None:
    """Raise ValueError if the transform would move images, but not what looks like their masks.

    A `Compose` whose ``masks`` were given says what they are.
    """
    is_told = getattr(transform, "masks", None) is not None
    if is_told or not transform.moves_pixels or not isinstance(images, Tensor):
        return
    for value in values:
        is_mask = isinstance(value, Tensor) and not value.is_floating_point() and value.ndim >= 3
        if is_mask and value.shape[-2:] == images.shape[-2:]:
            move = "masks=['label'] to move it too, or " if len(values) == 1 else ""
            raise ValueError(
                f"transform moves the pixels of images, but the batch also has a {value.dtype} "
                f"tensor of shape {tuple(value.shape)}. If it is a mask, it would stay as it is. "
                f"Use Compose([…]) with {move}masks=[] to leave it alone."
            )


def _stored_dataset(iterable: Any) -> MemmapDataset | None:
    """Return the data set that a loader reads, also through torch's Subset and ConcatDataset."""
    dataset = getattr(iterable, "dataset", None)
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    if isinstance(dataset, ConcatDataset):
        with contextlib.suppress(TypeError, ValueError):  # of other kinds, or with transforms
            dataset = open_dataset(dataset, None)
    return dataset if isinstance(dataset, MemmapDataset) else None


def _is_dataset(iterable: Any) -> bool:
    """Return whether samples are taken by number. Raises TypeError if it gives no batches."""
    if isinstance(iterable, str | bytes | os.PathLike):
        raise TypeError(
            f"iterable is the path {iterable!r}. Give a DataLoader or a dataset, or use a Loader, "
            "which takes a path."
        )
    if hasattr(iterable, "__iter__"):
        return False
    if not (hasattr(iterable, "__getitem__") and hasattr(iterable, "__len__")):
        raise TypeError(
            f"iterable must be an iterable or a dataset with a length, not {iterable!r}."
        )
    return True
