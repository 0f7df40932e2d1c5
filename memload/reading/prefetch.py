"""Run any iterable ahead of its consumer: on a thread, or on a CUDA stream."""

import contextlib
import copy
import functools
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Generic, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from memload.reading.samplers import ShuffledSampler
from memload.reading.streams import SideStream, find_device, map_tensors
from memload.storage.index import Index
from memload.transforms import Transform
from memload.transforms.compose import here

T = TypeVar("T")
P = ParamSpec("P")

#: How long an early exit waits for the thread, which may be inside the iterable's own ``next()``.
_GRACE = 10.0


class _End:
    """The last thing in the queue: the iterable has ended, with an exception or without."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class ThreadPrefetcher(Generic[T]):
    """Iterate over ``iterable`` on a thread, at most ``prefetch_factor`` items ahead of the consumer.

    Every `iter` begins the iterable anew on a thread of its own, which ends with the iteration, however that ends:
    exhausted, left early, or with an exception, which is raised where the loop is, with the traceback of
    where it came from. ``len()`` is that of the iterable. Leaving early waits for the item that the thread is at,
    for 10 seconds at most. Gains something where the iterable releases the GIL: reading, decoding, waiting.

    Raises ValueError for a ``prefetch_factor`` below 1, and RuntimeError where an iterator is used in a forked child.
    """

    def __init__(self, iterable: Iterable[T], prefetch_factor: int = 2) -> None:
        _check(prefetch_factor)
        self.iterable, self.prefetch_factor = iterable, prefetch_factor

    def __len__(self) -> int:
        return len(self.iterable)  # type: ignore[arg-type]  # raises TypeError, as it should, if it has none

    def __iter__(self) -> Iterator[T]:
        return ahead_on_thread(self.iterable, self.prefetch_factor)


def background(
    function: Callable[P, Iterable[T]] | None = None, *, prefetch_factor: int = 2
) -> Any:  # with or without parentheses, which no type of a decorator says well
    """Decorate a generator function so that what it yields is made ahead, on a thread: see `ThreadPrefetcher`.

    Used as ``@background`` or ``@background(prefetch_factor=4)``. The thread starts with the first item asked for.
    """
    _check(prefetch_factor)
    if function is None:
        return functools.partial(background, prefetch_factor=prefetch_factor)

    @functools.wraps(function)
    def ahead(*args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return ahead_on_thread(function(*args, **kwargs), prefetch_factor)

    return ahead


class CudaPrefetcher:
    """Moves batches to a CUDA device ahead of the training loop, on a stream of its own.

    ``iterable`` is a DataLoader or whatever gives batches: tensors in nested tuples, lists and mappings, moved with
    the rest left as it is. Copies overlap with training where the batches are page-locked
    (``DataLoader(pin_memory=True)``); from other memory they are made while the caller waits.
    Or it is a dataset whose samples are made on the device, that has ``dataset[i]`` and no iterator: each is made on
    the stream, ahead of time, in order or, with ``shuffle=True``, in that of `ShuffledSampler` for (``seed``, epoch).

    ``transform`` is called on the stream with the images: the batch itself if it is a tensor, the first element of
    a tuple or list, else the whole batch; one of `memload.transforms` changes labels too where a batch is images
    and labels, and of a DataLoader over a `MemmapDataset` takes all columns, such as points, and mean and std. Its
    draws are those for (``seed``, epoch, rank, place in the epoch), or the number of the sample where samples have
    numbers.
    ``prefetch_factor`` batches are on their way while one is used. With ``own_thread=True`` a thread does all this,
    which takes the waiting for ``iterable`` off the training loop too. ``device`` is by default the current CUDA
    device where there is one; on the CPU nothing is moved, and all else is the same.

    A batch is ready for the stream that is current when it is asked for, and is never overwritten. Iterate, each time
    anew; or call `next` as with Apex's data_prefetcher. ``len()`` is that of the iterable. An exception arrives
    behind the batches before it; leaving early leaves nothing behind. Raises ValueError for arguments that do not fit.
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
        _check(prefetch_factor)
        if isinstance(iterable, str | bytes | os.PathLike):
            raise TypeError(
                f"iterable: expected a DataLoader or a dataset, found {iterable!r}. A Loader takes a data set's path"
            )
        self._by_number = not hasattr(iterable, "__iter__")
        if self._by_number and not (
            hasattr(iterable, "__getitem__") and hasattr(iterable, "__len__")
        ):
            raise TypeError(
                f"iterable: expected an iterable or a dataset with a length, found {iterable!r}"
            )
        if shuffle and not self._by_number:
            raise ValueError(
                "shuffle: expected a dataset of samples, found an iterable, which has an order of its own"
            )
        self.iterable, self.prefetch_factor = iterable, prefetch_factor
        self.transform = bound(transform, getattr(iterable, "dataset", None))
        #: of what a DataLoader brings behind the images
        self._names: tuple[str, ...] = ()
        if isinstance(iterable, DataLoader):
            self._names = getattr(iterable.dataset, "sample_columns", ())
        self.own_thread, self.shuffle, self.seed = own_thread, shuffle, seed
        self.device = find_device(device)
        self._side = (
            SideStream(self.device, prefetch_factor) if self.device.type == "cuda" else None
        )
        self._epoch = 0
        self._batches: Iterator[Any] | None = None
        self._nothing: tuple[None, ...] = (None, None)

    def __len__(self) -> int:
        return len(self.iterable)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is; told to the iterable's sampler too, where it wants to know."""
        self._epoch = epoch
        told: Any
        for told in (self.iterable, getattr(self.iterable, "sampler", None)):
            if hasattr(told, "set_epoch"):
                told.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        consumer = None if self._side is None else self._side.consumer()
        alone = copy.copy(
            self
        )  # what `next` keeps is not to hold what keeps it: DataLoaders end when they are dropped
        alone._batches = self._batches = None
        return alone._iterate(alone._made(epoch, consumer))

    def next(self) -> Any:
        """Return the next batch; after the last, ``(None, None)``: as many as a batch has elements, and at least one.

        The first call begins an epoch. After the end it stays at that; `iter` or a new prefetcher begins anew.
        """
        if self._batches is None:
            self._batches = iter(self)
        for batch in self._batches:
            if isinstance(batch, tuple | list):
                self._nothing = (None,) * max(1, len(batch))
            return batch
        return self._nothing

    def _made(self, epoch: int, consumer: Any) -> Iterator[Any]:
        """Yield all batches, begun."""
        items: Iterator[tuple[Callable[[], Any], int | None]]
        if self._by_number:
            size = len(self.iterable)
            order = (
                ShuffledSampler(size, seed=self.seed).take(epoch, 0, size).tolist()
                if self.shuffle
                else range(size)
            )
            items = (
                (functools.partial(self.iterable.__getitem__, number), number) for number in order
            )
        else:
            items = ((functools.partial(_same, item), None) for item in self.iterable)
        draws = _Draws(self.seed, epoch)
        for item, number in items:
            make = functools.partial(self._make, item, functools.partial(draws, number))
            yield make() if self._side is None else self._side.make(make, consumer)
            del item, make  # their memory is the next batch's

    def _make(self, item: Callable[[], Any], draws: Callable[[Any], dict[str, Any]]) -> Any:
        batch = map_tensors(self._move, item())
        if self.transform is None:
            return batch
        ours = isinstance(self.transform, Transform)
        if isinstance(batch, tuple | list) and len(batch):
            images, *rest = batch
            options = draws(images) if ours else {}
            names: tuple[str, ...] = ("label",)
            if len(rest) == len(self._names) and all(_is_of_batch(one, images) for one in rest):
                names = self._names
            if ours and len(rest) == len(names) and all(isinstance(one, Tensor) for one in rest):
                columns = dict(zip(names, rest, strict=True))
                changed, columns = self.transform(
                    images, columns, **options
                )  # MixUp changes labels too
                rest = [columns[name] for name in names]
            else:
                changed = self.transform(images, **options)
            both = [changed, *rest]
            return type(batch)(*both) if hasattr(batch, "_fields") else type(batch)(both)
        return self.transform(batch, **(draws(batch) if ours else {}))

    def _move(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)

    def _iterate(self, made: Iterator[Any]) -> Iterator[Any]:
        source = (
            ahead_on_thread(made, self.prefetch_factor)
            if self.own_thread
            else _begun(made, self.prefetch_factor)
        )
        with contextlib.closing(source):
            for batch in source:
                yield batch if self._side is None else self._side.hand_over(batch)
                del batch


class _Draws:
    """What transforms of ours are told of each batch, so that nothing counts but its place in the epoch."""

    def __init__(self, seed: int, epoch: int) -> None:
        self._options = {"seed": int(seed) + here(), "epoch": epoch}
        self._seen = 0

    def __call__(self, number: int | None, images: Any) -> dict[str, Any]:
        count = len(images) if isinstance(images, Tensor) and images.ndim else 0
        first = self._seen
        if (
            number is not None
        ):  # which is a sample's, or that of a batch, whose samples then have numbers of their own
            first = number if count == 1 else number + 1 << 32
        self._seen += count
        return {"samples": np.arange(first, first + count), **self._options}


def bound(transform: Any, dataset: Any) -> Any:
    """Return a transform of ours with what the data set knows filled in; any other as it is."""
    index = getattr(dataset, "index", None)
    if not isinstance(transform, Transform) or not isinstance(index, Index):
        return transform
    mean, std = index.statistics.get("mean"), index.statistics.get("std")
    known = {"mean": mean, "std": std} if isinstance(mean, list) and isinstance(std, list) else {}
    return transform.bind(**known, num_classes=len(index.classes) if index.classes else None)


def _check(prefetch_factor: int) -> None:
    if not isinstance(prefetch_factor, int) or prefetch_factor < 1:
        raise ValueError(
            f"prefetch_factor: expected an integer of 1 or more, found {prefetch_factor!r}"
        )


def _is_of_batch(value: Any, images: Any) -> bool:
    """Return whether a value is a column: a row for each image."""
    return (
        isinstance(value, Tensor)
        and value.ndim > 0
        and isinstance(images, Tensor)
        and len(value) == len(images)
    )


def _same(item: T) -> T:
    return item


def _begun(items: Iterator[T], ahead: int) -> Generator[T, None, None]:
    """Yield items, with ``ahead`` more of them begun; an exception comes when its turn does."""
    waiting: deque[T] = deque()
    failure: Exception | None = None
    ended = False
    try:
        while True:
            while not ended and len(waiting) <= ahead:
                try:
                    waiting.append(next(items))
                except StopIteration:
                    ended = True
                except Exception as error:  # noqa: BLE001  # raised below
                    failure, ended = error, True
            if not waiting:
                break
            yield waiting.popleft()
        if failure is not None:
            raise failure
    finally:
        del failure  # it holds this frame


def ahead_on_thread(iterable: Iterable[T], prefetch_factor: int) -> Generator[T, None, None]:
    """Yield what an iterable gives, made on a thread that ends with this generator."""
    items: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # a queue in C, since an interrupt within Python's own semaphore would leave that locked for ever
    room: queue.SimpleQueue[None] = queue.SimpleQueue()
    for _ in range(prefetch_factor):
        room.put(None)
    stop = threading.Event()

    def produce() -> None:
        error = None
        iterator = None
        try:
            iterator = iter(iterable)
            while True:
                room.get()
                if stop.is_set():
                    break
                items.put((next(iterator),))
        except StopIteration:
            pass
        except BaseException as caught:  # noqa: BLE001  # whatever it is, it is raised where the loop is
            error = caught
        if stop.is_set() and isinstance(iterator, Generator):
            with contextlib.suppress(Exception):  # nobody is there to be told
                iterator.close()
        items.put(_End(error))

    thread = threading.Thread(target=produce, name="memload-prefetch", daemon=True)
    process = os.getpid()
    try:
        thread.start()
        while True:
            item = items.get()
            if isinstance(item, _End):
                error, item = item.error, None
                if error is None:
                    return
                try:
                    raise error
                finally:
                    del error  # it holds this frame
            room.put(None)
            yield item[0]
            if os.getpid() != process:
                raise RuntimeError(
                    "iterator: expected to be used in the process that made it, found a forked child, which has "
                    "none of its threads. Iterate anew there"
                )
    finally:
        if (
            os.getpid() == process
        ):  # in a forked child the thread is gone, and may have held their locks
            stop.set()
            room.put(None)
            if (
                thread.ident is not None and thread is not threading.current_thread()
            ):  # which collects garbage, and cannot wait for itself
                thread.join(_GRACE)
