"""Join data set, order, feed and transform: batches on the device, in an order that is a function of (seed, epoch)."""

import functools
import itertools
import os
import threading
import weakref
from collections import deque, namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from memload.dataset import MemmapDataset
from memload.feeds.choice import FEEDS, Choice, FeedName, choose_feed
from memload.feeds.interface import Feed, Samples
from memload.samplers import Order, SequentialSampler, ShuffledSampler
from memload.streams import SideStream, find_device, map_tensors, tensors_of
from memload.workers import available_cores

#: Positions of an order computed at a time, since each call of `Order.take` costs some 200 µs beside 25 ns a position.
_STRETCH = 1 << 14


class Loader:
    """Batches of a data set on the device, made ahead of the training loop.

    Each batch is a named tuple ``(images, labels)``, or images and the ``columns`` asked for: images ``(N, C,
    H, W)`` uint8, channels-last in memory, unless ``transform`` makes something else of them; columns as
    tensors ``(N, …)``.

    **Device.** ``device`` is by default the CUDA device that is current when the first batch is asked for, or the
    CPU where there is none. ``feed`` is the way there; `feed` says which was chosen and why, and so does a line in
    the log ``memload``. On the CPU there is one, ``"cpu"``: ``num_threads`` threads copy rows. On CUDA:

    - ``"resident"``: all samples in the device's memory, loaded when the feed is made; chosen where they take a
      quarter of what is free there, or less.
    - ``"dma"``: the device's copy engines fetch rows from the page cache; chosen where the files are half of the
      available RAM (a container's, if it has a limit) or less and their pages can be registered. Processes share
      these pages. Registering goes on in the background; rows that are not registered yet take the way of ``"pinned"``.
    - ``"uva"``: a kernel fetches them; chosen for rows below 28 KiB.
    - ``"pinned"``: ``num_threads`` threads copy rows to page-locked memory, from where they go to the device.

    FeedError says why a feed that was asked for by name cannot serve.

    **Streams.** On CUDA all is done on one stream of the Loader's own, ``prefetch_factor`` batches ahead. A batch
    is ready for the stream that is current when it is asked for; to use it on yet another one is yours to
    synchronise, as always. ``static_buffers=True`` copies each batch into the same tensors, which a captured
    CUDA graph reads: then a batch is overwritten by the next, and all have one size (``drop_last``). Capture before
    iterating, or with ``capture_error_mode="thread_local"``, since other threads use CUDA meanwhile.

    **Order.** ``shuffle=True`` visits every sample once an epoch, in an order that is a function of (``seed``,
    epoch) and of nothing else: neither batch size nor threads nor ranks change it. ``sampler`` is an order of
    `memload.samplers`, or any iterable of sample numbers such as a torch Sampler; ``batch_sampler`` one of
    lists of them. Each `iter` begins the next epoch; `set_epoch` says which.

    **Ranks.** ``rank`` and ``num_replicas`` are those of `torch.distributed` where it is initialised, else
    torchrun's (RANK and WORLD_SIZE), else 0 of 1. Shuffled, or with ``drop_last``, all ranks get the same
    number of batches and of samples; to that end up to ``num_replicas - 1`` samples of the epoch's beginning
    come twice, unless ``drop_last`` drops the last ones. Otherwise, as for an evaluation, every sample comes
    exactly once over all ranks: the last batches differ in size by one, and a rank may have one batch less than
    another, so that a collective operation in every batch would wait for ever; reduce after the loop. An
    iterable of your own is not divided.

    **Resuming.** `state_dict` holds seed, epoch and the samples seen over all ranks; `load_state_dict` goes on
    exactly there, also with other numbers of ranks, threads or samples a batch. Nothing is read to get there,
    except from an iterable of your own.

    **Memory.** A batch belongs to whoever holds it; its memory is used again when nothing refers to it any
    more. On the CPU ``num_threads × prefetch_factor`` batches are made ahead; ``num_threads=0`` makes each when it
    is asked for. ``transform`` is called with the images, on these threads, so with more than one of them in no
    fixed order. Several iterators may be used at once. One that is left early leaves nothing behind; none
    survives a fork.

    Raises ValueError for arguments that do not fit, and FormatError as `MemmapDataset` does.
    """

    def __init__(
        self,
        dataset: MemmapDataset | str | Path,
        batch_size: int = 1,
        *,
        shuffle: bool = False,
        sampler: Order | Iterable[int] | None = None,
        batch_sampler: Iterable[Sequence[int]] | None = None,
        drop_last: bool = False,
        seed: int = 0,
        rank: int | None = None,
        num_replicas: int | None = None,
        columns: Sequence[str] | None = None,
        device: torch.device | str | None = None,
        transform: Callable[[Any], Any] | None = None,
        num_threads: int | None = None,
        prefetch_factor: int = 2,
        feed: FeedName = "auto",
        static_buffers: bool = False,
    ) -> None:
        if not isinstance(dataset, MemmapDataset):
            dataset = MemmapDataset(dataset, columns=columns)
        if (dataset.transform, dataset.target_transform, dataset.transforms) != (None, None, None):
            raise ValueError(
                "dataset: expected one without transforms, which are for samples, found some: give the Loader a "
                "transform of batches"
            )
        if sum((bool(shuffle), sampler is not None, batch_sampler is not None)) > 1:
            raise ValueError("shuffle, sampler and batch_sampler: expected one of them, found several")
        if batch_sampler is not None and (batch_size != 1 or drop_last):
            raise ValueError("batch_sampler: expected neither batch_size nor drop_last beside it, which it decides")
        _at_least("batch_size", batch_size, 1)
        _at_least("prefetch_factor", prefetch_factor, 1)
        threads = _default_threads() if num_threads is None else num_threads
        _at_least("num_threads", threads, 0)
        if feed not in FEEDS:
            raise ValueError(f"feed: expected one of {', '.join(FEEDS)}, found {feed!r}")
        if static_buffers and not (drop_last or batch_sampler is not None):
            raise ValueError("static_buffers: expected drop_last=True beside it, as all batches are to have one size")
        self.dataset, self.batch_size, self.drop_last, self.seed = dataset, batch_size, drop_last, seed
        self._given = (rank, num_replicas)
        _place(rank, num_replicas)
        self.transform, self.num_threads, self.prefetch_factor = transform, threads, prefetch_factor
        self.batch_sampler = batch_sampler
        self.sampler: Any = (
            sampler
            if sampler is not None
            else ShuffledSampler(len(dataset), seed=seed)
            if shuffle
            else SequentialSampler(len(dataset))
        )
        # arrays and tensors of sample numbers have a take() too, another one
        ordered = hasattr(self.sampler, "take") and not hasattr(self.sampler, "__array__")
        order: Any = self.sampler if batch_sampler is None and ordered else None
        self._order: Order | None = order
        self._even = drop_last or not isinstance(self._order, SequentialSampler)
        names = dataset.sample_columns if columns is None else tuple(columns)
        unknown = [name for name in names if name not in dataset.columns]
        if unknown or isinstance(columns, str):
            raise ValueError(f"columns: expected names among {', '.join(dataset.columns)}, found {columns!r}")
        self._names = names
        self.static_buffers = static_buffers
        self._wanted_device, self._wanted_feed = device, feed
        self._opened: _Opened | None = None
        if device is not None or feed != "auto":  # what was asked for and cannot be is said at once
            self._open()
        self._next = _Progress(0, 0)
        self._current: _Progress | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None, "_current": None}  # elsewhere, a feed and streams are made anew

    @property
    def device(self) -> torch.device:
        """Where batches are made."""
        return self._open().device

    @property
    def feed(self) -> Choice:
        """The way in which samples come to the device: ``name``, and the ``reason`` why it was chosen."""
        return self._open().choice

    def _open(self) -> "_Opened":
        if self._opened is None:
            device = find_device(self._wanted_device)
            columns = tuple(self.dataset.index.columns[name] for name in self._names)
            feed, choice = choose_feed(
                self._wanted_feed,
                Samples(self.dataset.shards, self.dataset.index.row, columns),
                device,
                num_threads=self.num_threads,
                prefetch_factor=self.prefetch_factor,
            )
            side = SideStream(device, self.prefetch_factor) if device.type == "cuda" else None
            self._opened = _Opened(device, feed, choice, side)
            weakref.finalize(self, feed.close)
        return self._opened

    @property
    def rank(self) -> int:
        """The number of this process among ``num_replicas``; asked for anew, as the process group may come later."""
        return _place(*self._given)[0]

    @property
    def num_replicas(self) -> int:
        """How many processes share an epoch."""
        return _place(*self._given)[1]

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch on this rank."""
        if self.batch_sampler is not None:
            return len(self.batch_sampler)  # type: ignore[arg-type]  # a TypeError, as it should be, if it has none
        if self._order is None:
            count = len(self.sampler)
            return count // self.batch_size if self.drop_last else -(-count // self.batch_size)
        full, rest = divmod(len(self._order), self.batch_size * self.num_replicas)
        start, stop = self._share(0, rest)
        return full + (not self.drop_last and stop > start)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is; one that was resumed inside goes on there."""
        _at_least("epoch", epoch, 0)
        if epoch != self._next.epoch:
            self._next = _Progress(epoch, 0)
        self._next.named = True
        self._tell_samplers(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where the newest iteration is, as numbers and text: behind the batch that it handed out last."""
        at = self._current or self._next
        return {"epoch": at.epoch, "samples_seen": at.seen, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next iteration go on where `state_dict` was taken.

        Raises ValueError where it was taken over other samples, with another seed, or is no such state.
        """
        own = self._identity()
        missing = ({"epoch", "samples_seen"} | own.keys()) - state.keys()
        if missing:
            raise ValueError(f"state: expected what state_dict() gave, found one without {', '.join(sorted(missing))}")
        for name in ("epoch", "samples_seen"):
            _at_least(f"state: {name}", state[name], 0)
        for name, value in own.items():
            if state[name] != value:
                raise ValueError(
                    f"state: expected the {name} {value!r} of this loader, found {state[name]!r}: it belongs to other "
                    f"{'samples' if name == 'fingerprint' else 'orders'}. Make the loader as it was made then"
                )
        if self._order is not None and state["samples_seen"] > len(self._order):
            raise ValueError(
                f"state: expected at most the {len(self._order):,} samples_seen of an epoch, "
                f"found {state['samples_seen']:,}"
            )
        self._next, self._current = _Progress(state["epoch"], state["samples_seen"]), None
        self._tell_samplers(state["epoch"])

    def __iter__(self) -> Iterator[Any]:
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        # An epoch begins with the first batch asked for: Lightning calls iter() once more, only to see whether it can.
        progress = self._next
        if not progress.named and self._is_over(progress):  # saved behind the last batch: go on with the next epoch
            progress = _Progress(progress.epoch + 1, 0)
        self._next, self._current = _Progress(progress.epoch + 1, 0), progress
        opened, process = self._open(), os.getpid()
        if opened.side is None:
            threads, ahead = self.num_threads, max(1, self.num_threads * self.prefetch_factor)
        else:  # two threads keep those that gather busy from one batch to the next; other feeds need none
            threads, ahead = (min(2, self.num_threads) if opened.feed.name == "pinned" else 0), self.prefetch_factor + 1
        members: set[int] = set()
        pool = ThreadPoolExecutor(threads, "memload", lambda: members.add(threading.get_ident())) if threads else None
        results = iter(functools.partial(self._begin, opened, self._batches(progress), pool), None)
        waiting: deque[tuple[Future[Any], int]] = deque()
        static: Any = None
        try:
            while True:
                waiting.extend(itertools.islice(results, ahead - len(waiting)))
                if not waiting:
                    break
                future, progress_then = waiting.popleft()
                try:
                    batch = future.result()
                finally:
                    del future  # its exception would hold this frame, and this frame it
                if opened.side is not None:
                    batch = opened.side.hand_over(batch)
                    if self.static_buffers:
                        batch = static = _copied_into(static, batch)
                progress.seen = progress_then
                yield batch
                del batch  # or its memory would be held while the next one is waited for
                if os.getpid() != process and (pool is not None or opened.side is not None):
                    raise RuntimeError(
                        "iterator: expected to be used in the process that made it, found a forked child, "
                        "which has none of its threads. Iterate anew there"
                    )
        finally:
            # In a forked child there are no threads. One that collects garbage cannot wait for itself.
            if pool is not None and os.getpid() == process:
                pool.shutdown(wait=threading.get_ident() not in members, cancel_futures=True)
        if self._current is progress:  # from here on the state is the start of the next epoch, whichever that will be
            self._current = None

    def _begin(
        self, opened: "_Opened", wanted: Iterator[tuple[np.ndarray, int]], pool: ThreadPoolExecutor | None
    ) -> tuple[Future[Any], int] | None:
        """Begin the next batch and return it, with the samples seen then; None at the end. An error takes its place."""
        future: Future[Any] = Future()
        seen = 0
        try:
            found = next(wanted, None)
            if found is None:
                return None
            positions, seen = found
            make = functools.partial(self._make, opened.feed, positions)
            if opened.side is not None:
                make = functools.partial(opened.side.make, make, opened.side.consumer())
            if pool is not None:
                future = pool.submit(make)
            else:
                future.set_result(make())
            return future, seen
        except Exception as error:  # noqa: BLE001  # raised where the loop is, when its turn comes
            future.set_exception(error)
            return future, seen
        finally:
            del future  # an exception holds this frame

    def _is_over(self, progress: "_Progress") -> bool:
        """Return whether nothing is left of an epoch for any rank; False where an iterable does not tell its length."""
        if not progress.seen or self.batch_sampler is not None or not hasattr(self.sampler, "__len__"):
            return False
        step = self.batch_size * (1 if self._order is None else self.num_replicas)
        return len(self.sampler) - progress.seen < (step if self.drop_last else 1)

    def _make(self, feed: Feed, positions: np.ndarray) -> Any:
        pixels, *columns = feed.fetch(positions)
        images = pixels.permute(0, 3, 1, 2)
        return _batch_type(self._names)(images if self.transform is None else self.transform(images), *columns)

    def _batches(self, progress: "_Progress") -> Iterator[tuple[np.ndarray, int]]:
        """Yield the samples of every batch that the epoch still owes, and how many samples are seen with it."""
        if self._order is None:
            yield from self._batches_of_iterable(progress)
            return
        size, step = len(self._order), self.batch_size * self.num_replicas
        stretch = np.empty(0, np.int64)
        begin = end = progress.seen
        for seen in range(progress.seen, size, step):
            whole = min(step, size - seen)
            if whole < step and self.drop_last:
                return
            start, stop = self._share(seen, whole)
            if step > _STRETCH:  # of so many ranks, each takes its own part only
                begin, end, stretch = start, stop, self._order.take(progress.epoch, min(start, size), min(stop, size))
            elif seen >= end:
                begin, end = seen, min(seen + _STRETCH // step * step, size)
                stretch = self._order.take(progress.epoch, begin, end)
            samples = stretch[start - begin : stop - begin]
            if stop > size:  # the few that make all ranks even; all of this rank's may be, and come round again
                first = self._order.take(progress.epoch, 0, min(stop - size, size))
                samples = np.concatenate([samples, first[np.arange(max(start, size), stop) % size]])
            if start < stop:
                yield samples, seen + whole

    def _share(self, seen: int, whole: int) -> tuple[int, int]:
        """Return the positions of this rank among the ``whole`` that all ranks together take next."""
        if self._even:
            each = -(-whole // self.num_replicas)
            return seen + self.rank * each, seen + (self.rank + 1) * each
        return seen + whole * self.rank // self.num_replicas, seen + whole * (self.rank + 1) // self.num_replicas

    def _batches_of_iterable(self, progress: "_Progress") -> Iterator[tuple[np.ndarray, int]]:
        size, resumed = len(self.dataset), progress.seen
        if self.batch_sampler is not None:
            groups: Iterator[Sequence[int]] = iter(self.batch_sampler)
            seen = 0
        else:
            rest = itertools.islice(self.sampler, resumed, None)
            seen, groups = resumed, _grouped(rest, self.batch_size, self.drop_last)
        for group in groups:
            samples = np.asarray(list(group), np.int64)
            seen += len(samples)
            if seen <= resumed or not len(samples):
                continue
            samples = samples[-(seen - resumed) :]  # what of a batch was seen does not come again
            if samples.min() < -size or samples.max() >= size:
                raise IndexError(
                    f"sampler: expected numbers from 0 to {size - 1}, found {samples.min()} to {samples.max()}"
                )
            yield samples % size, seen

    def _tell_samplers(self, epoch: int) -> None:
        own: Any
        for own in (self.sampler, self.batch_sampler):
            if hasattr(own, "set_epoch"):
                own.set_epoch(epoch)

    def _identity(self) -> dict[str, Any]:
        """Return what must be the same for a state to be this loader's: a name for each."""
        order = self.batch_sampler if self.batch_sampler is not None else self.sampler
        ours = type(order).__module__ == SequentialSampler.__module__
        return {
            "fingerprint": self.dataset.fingerprint,
            "seed": int(getattr(self._order, "seed", self.seed)),  # an order of the user's has one of its own
            "order": repr(order) if ours else type(order).__name__,
        }


class _Opened(NamedTuple):
    """What a loader has once it is used."""

    device: torch.device
    feed: Feed
    choice: Choice
    side: SideStream | None


class _Progress:
    """Where an iteration is: the epoch, and how many of its samples have been handed out over all ranks."""

    def __init__(self, epoch: int, seen: int) -> None:
        self.epoch, self.seen = epoch, seen
        self.named = False  # by set_epoch: then the epoch is this one, even if nothing is left of it


@functools.cache
def _batch_type(names: tuple[str, ...]) -> Any:
    """Return the named tuple of images and these columns; batches of it can be pickled."""
    fields = ["images", *("labels" if name == "label" else name for name in names)]
    made = cast("Any", namedtuple("Batch", fields, rename=True))  # its fields are known now

    def reduced(batch: Any) -> tuple[Any, ...]:
        return _batch_of, (names, tuple(batch))

    made.__reduce__ = reduced
    return made


def _batch_of(names: tuple[str, ...], values: tuple[Any, ...]) -> Any:
    return _batch_type(names)(*values)


def _copied_into(static: Any, batch: Any) -> Any:
    """Copy a batch into the tensors of ``static``, on the current stream, and return that; the first makes them."""
    if static is None:
        return map_tensors(torch.clone, batch)
    for target, tensor in zip(tensors_of(static), tensors_of(batch), strict=True):
        if target.shape != tensor.shape:
            raise ValueError(
                f"static_buffers: expected batches of one size, found {tuple(tensor.shape)} after "
                f"{tuple(target.shape)}. Use drop_last=True"
            )
        target.copy_(tensor)
    return static


def _default_threads() -> int:
    """Return how many threads gather: the processes that torchrun started on this host share its cores."""
    return max(1, min(8, available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def _at_least(argument: str, value: int, least: int) -> None:
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{argument}: expected an integer of at least {least}, found {value!r}")


def _place(rank: int | None, num_replicas: int | None) -> tuple[int, int]:
    """Return the rank and the number of ranks, from the arguments, torch.distributed or torchrun."""
    if (rank is None) != (num_replicas is None):
        raise ValueError(f"rank and num_replicas: expected both or neither, found {rank} and {num_replicas}")
    if rank is None or num_replicas is None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank, num_replicas = torch.distributed.get_rank(), torch.distributed.get_world_size()
        else:
            rank, num_replicas = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if not 0 <= rank < num_replicas:
        raise ValueError(f"rank: expected 0 <= rank < num_replicas = {num_replicas}, found {rank}")
    return rank, num_replicas


def _grouped(numbers: Iterable[int], size: int, drop_last: bool) -> Iterator[list[int]]:
    iterator = iter(numbers)
    while group := list(itertools.islice(iterator, size)):
        if len(group) == size or not drop_last:
            yield group
