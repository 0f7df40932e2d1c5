"""Join data set, order, feed and transform: batches on the device, in an order that is a function of (seed, epoch)."""

import contextlib
import functools
import itertools
import math
import os
import threading
import warnings
import weakref
from collections import deque, namedtuple
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from memload import ranks
from memload.feeds.choice import FEEDS, Choice, FeedName, choose_feed, pinned_callers
from memload.feeds.interface import Feed, Samples
from memload.machine import available_cores
from memload.reading.dataset import MemmapDataset
from memload.reading.prefetch import ahead_on_thread, bound
from memload.reading.samplers import Order, SequentialSampler, ShuffledSampler, WeightedSampler
from memload.reading.streams import SideStream, find_device, map_tensors, tensors_of
from memload.transforms import Transform, evaluate, train

#: Positions of an order computed at a time, at most, since a call of `Order.take` costs some 100 µs beside 12 ns a
#: position. The first are few, so that the first batch is not kept waiting.
_STRETCH, _FIRST_STRETCH = 1 << 15, 1 << 10
#: Bytes of columns that go to the device with them, at most.
_STRETCH_BYTES = 8 << 20
#: How long an early exit waits for threads, each of which may be inside a transform or reading from a slow disk.
_GRACE = 60.0


class Loader:
    """Batches of a data set on the device, made ahead of the training loop.

    Each batch is a named tuple ``(images, labels)``, or images and the ``columns`` asked for; of a data set without
    labels and other columns ``(images,)``, so write ``for (images,) in loader`` or use ``batch.images``. Images are
    ``(N, C, H, W)`` of the data set's type, channels-last in memory, unless ``transform`` makes something else of them;
    columns are tensors ``(N, …)``.

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

    **Streams.** On CUDA all is done on one stream of the Loader's own, ``prefetch_factor`` batches ahead (with
    ``"pinned"`` as many as are gathered at once, up to three times that; with ``"resident"`` and no transform none,
    on the consumer's stream, since one kernel takes less time than handing over what it made). A batch
    is ready for the stream that is current when it is asked for; to use it on yet another one is yours to
    synchronise, as always. ``static_buffers=True`` copies each batch into the same tensors, which a captured
    CUDA graph reads: then a batch is overwritten by the next, and all have one size (``drop_last``). Capture before
    iterating, or with ``capture_error_mode="thread_local"``, since other threads use CUDA meanwhile.

    **Order.** ``shuffle=True`` visits every sample once an epoch, in an order that is a function of (``seed``,
    epoch) and of nothing else: neither batch size nor threads nor ranks change it. ``sampler`` is an order of
    `memload.reading.samplers`, or any iterable of sample numbers such as a torch Sampler; ``batch_sampler`` one of
    lists of them. Each `iter` begins the next epoch; `set_epoch` says which.

    **Ranks.** ``rank`` and ``num_replicas`` are those of `torch.distributed` where it is initialised, else
    torchrun's (RANK and WORLD_SIZE), else 0 of 1. Shuffled, or with ``drop_last``, all ranks get the same
    number of batches and of samples; to that end up to ``num_replicas - 1`` samples of the epoch's beginning
    come twice, unless ``drop_last`` drops the last ones. Otherwise, as for an evaluation, every sample comes
    exactly once over all ranks: the last batches differ in size by one, and a rank may have one batch less than
    another, so that a collective operation in every batch would wait for ever; reduce after the loop. An
    iterable of your own is not divided: give each rank its own, such as a DistributedSampler.

    **Resuming.** `state_dict` holds seed, epoch and the samples seen over all ranks; `load_state_dict` goes on
    exactly there, also with other numbers of ranks, threads or samples a batch. Nothing is read to get there,
    except from an iterable of your own, which has to give the same numbers again: seed it.

    **Memory.** A batch belongs to whoever holds it; its memory is used again when nothing refers to it any more. On
    the CPU ``num_threads × prefetch_factor`` batches are made ahead; ``num_threads=0`` makes each when it is asked
    for. ``transform`` is called with the images, on these threads, so with more than one of them in no fixed order;
    one of `memload.transforms` gets columns, samples' numbers, seed and epoch too. Several iterators may be used at
    once. One that is left early leaves nothing behind; none survives a fork.

    Raises ValueError for arguments that do not fit, and FormatError as `MemmapDataset` does. Warns where ``drop_last``
    leaves nothing of an epoch.
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
        if not isinstance(dataset, MemmapDataset | str | Path):
            advice = (
                ". Write dataset.subset(part.indices) for a part of dataset"
                if isinstance(dataset, Subset)
                else ""
            )
            raise TypeError(
                f"dataset: expected a MemmapDataset or its path, found {type(dataset).__name__}{advice}"
            )
        if isinstance(transform, type) or transform is train or transform is evaluate:
            found = f"{transform.__name__} itself, which makes one. Write {transform.__name__}(…)"
            raise TypeError(f"transform: expected a callable of images, found {found}")
        if transform is not None and not callable(transform):
            raise TypeError(f"transform: expected a callable of images, found {transform!r}")
        if not isinstance(seed, int | np.integer):
            raise TypeError(f"seed: expected an integer, found {seed!r}")
        if not isinstance(dataset, MemmapDataset):
            dataset = MemmapDataset(dataset, columns=columns)
        if (dataset.transform, dataset.target_transform, dataset.transforms) != (None, None, None):
            raise ValueError(
                "dataset: expected one without transforms, which are for samples, found some: give the Loader a "
                "transform of batches"
            )
        if sum((bool(shuffle), sampler is not None, batch_sampler is not None)) > 1:
            raise ValueError(
                "shuffle, sampler and batch_sampler: expected one of them, found several"
            )
        if batch_sampler is not None and (batch_size != 1 or drop_last):
            raise ValueError(
                "batch_sampler: expected neither batch_size nor drop_last beside it, which it decides"
            )
        _at_least("batch_size", batch_size, 1)
        _at_least("prefetch_factor", prefetch_factor, 1)
        threads = _default_threads() if num_threads is None else num_threads
        _at_least("num_threads", threads, 0)
        if feed not in FEEDS:
            raise ValueError(f"feed: expected one of {', '.join(FEEDS)}, found {feed!r}")
        if static_buffers and not (drop_last or batch_sampler is not None):
            raise ValueError(
                "static_buffers: expected drop_last=True beside it, as all batches are to have one size"
            )
        self.dataset, self.batch_size, self.drop_last, self.seed = (
            dataset,
            int(batch_size),
            drop_last,
            int(seed),
        )
        self._given = (rank, num_replicas)
        _place(rank, num_replicas)
        self.transform = bound(transform, dataset)
        self.num_threads, self.prefetch_factor = threads, prefetch_factor
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
        if columns is None:  # those of the points that the transform moves, too
            names += tuple(name for name in getattr(transform, "points", ()) if name not in names)
        unknown = [name for name in names if name not in dataset.columns]
        if unknown or isinstance(columns, str):
            raise ValueError(
                f"columns: expected names among {', '.join(dataset.columns)}, found {columns!r}"
            )
        self._names = names
        self.static_buffers = static_buffers
        self._wanted_device, self._wanted_feed = device, feed
        self._opened: _Opened | None = None
        if drop_last and self._order is not None and len(self._order) and not len(self):
            warnings.warn(
                f"drop_last: expected samples for one batch on each of {self.num_replicas} ranks, found "
                f"{len(self._order)} for batches of {batch_size}: an epoch has none. Use a smaller batch_size, or "
                "drop_last=False",
                stacklevel=2,
            )
        if device is not None or feed != "auto":  # what was asked for and cannot be is said at once
            self._open()
        self._next = _Progress(0, 0)
        self._current: _Progress | None = None

    def __getstate__(self) -> dict[str, Any]:
        at = (
            self._current or self._next
        )  # elsewhere, the epoch goes on here, and a feed and streams are made anew
        return {
            **self.__dict__,
            "_opened": None,
            "_current": None,
            "_next": _Progress(at.epoch, at.seen),
        }

    @property
    def device(self) -> torch.device:
        """Where batches are made."""
        return find_device(self._wanted_device) if self._opened is None else self._opened.device

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
            side = None
            if device.type == "cuda":
                side = SideStream(
                    device, self.prefetch_factor, waits=not _is_all_ours(self.transform)
                )
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

    def __repr__(self) -> str:
        order = self.sampler if self.batch_sampler is None else self.batch_sampler
        shown = repr(order) if _is_ours(order) else type(order).__name__
        feed = self._wanted_feed if self._opened is None else self._opened.feed.name
        return (
            f"Loader({self.dataset!r}, batch_size={self.batch_size}, order={shown}, feed={feed!r})"
        )

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch on this rank, also of one that was resumed inside."""
        if self.batch_sampler is not None:
            return len(self.batch_sampler)  # type: ignore[arg-type]  # a TypeError, as it should be, if it has none
        if self._order is None:
            count = len(self.sampler)
            return count // self.batch_size if self.drop_last else -(-count // self.batch_size)
        rank, replicas = _place(*self._given)
        full, rest = divmod(len(self._order), self.batch_size * replicas)
        start, stop = self._share(0, rest, rank, replicas)
        return full + (not self.drop_last and stop > start)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is; one that was resumed inside goes on there."""
        _at_least("epoch", epoch, 0)
        if epoch != self._next.epoch:
            self._next = _Progress(int(epoch), 0)
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
        if not isinstance(state, Mapping):
            raise TypeError(f"state: expected what state_dict() gave, found {type(state).__name__}")
        missing = ({"epoch", "samples_seen"} | own.keys()) - state.keys()
        if missing:
            raise ValueError(
                f"state: expected what state_dict() gave, found one without {', '.join(sorted(missing))}"
            )
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
        self._next, self._current = _Progress(int(state["epoch"]), int(state["samples_seen"])), None
        self._tell_samplers(state["epoch"])

    def __iter__(self) -> Iterator[Any]:
        self._current = None  # from here on the state is the start of the next epoch
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        # An epoch begins with the first batch asked for: Lightning calls iter() once more, only to see whether it can.
        progress = self._next
        if not progress.named and self._is_over(
            progress
        ):  # saved behind the last batch: go on with the next epoch
            progress = _Progress(progress.epoch + 1, 0)
        self._next, self._current = _Progress(progress.epoch + 1, 0), progress
        self._tell_samplers(progress.epoch)
        opened, process = self._open(), os.getpid()
        side, at_once = opened.side, opened.feed.name == "resident" and self.transform is None
        if (
            side is None or at_once
        ):  # a gather on the device takes less time than handing it to another stream
            threads = 0 if at_once else self.num_threads
            ahead = max(1, threads * self.prefetch_factor)
        else:  # with what is being gathered on top of what is on its way
            threads = (
                pinned_callers(self.num_threads, self.prefetch_factor)
                if opened.feed.name == "pinned"
                else 0
            )
            ahead = 1 + max(threads, self.prefetch_factor)
        pool = ThreadPoolExecutor(threads, "memload") if threads else None
        prepare = functools.partial(self._prepare, progress.epoch, opened.feed)
        begin = _Begin(
            self._batches(progress), opened.feed, prepare, None if at_once else side, pool
        )
        waiting: deque[tuple[_Result | Future[Any], int]] = deque()
        static: Any = None
        try:
            while True:
                waiting.extend(itertools.islice(begin, ahead - len(waiting)))
                if not waiting:
                    break
                result, seen = waiting.popleft()
                try:
                    batch = result.result()
                finally:
                    del result  # its exception would hold this frame, and this frame it
                if side is not None:
                    if not at_once:
                        batch = side.hand_over(batch)
                    if self.static_buffers:
                        batch = static = _copied_into(static, batch)
                progress.seen, self._current = seen, progress
                yield batch
                del batch  # or its memory would be held while the next one is waited for
                if os.getpid() != process and (pool is not None or side is not None):
                    raise RuntimeError(
                        "iterator: expected to be used in the process that made it, found a forked child, "
                        "which has none of its threads. Iterate anew there"
                    )
        finally:
            if os.getpid() == process:  # in a forked child there are no threads
                begin.close()
                if pool is not None:
                    pool.shutdown(wait=False, cancel_futures=True)
                    for thread in list(
                        pool._threads
                    ):  # waiting by shutdown() itself would have no end
                        if thread is not threading.current_thread():  # which collects garbage
                            thread.join(_GRACE)
        if (
            self._current is progress
        ):  # from here on the state is the start of the next epoch, whichever that will be
            self._current = None

    def _is_over(self, progress: "_Progress") -> bool:
        """Return whether nothing is left of an epoch for any rank; False where an iterable does not tell its length."""
        if (
            not progress.seen
            or self.batch_sampler is not None
            or not hasattr(self.sampler, "__len__")
        ):
            return False
        step = self.batch_size * (1 if self._order is None else self.num_replicas)
        return len(self.sampler) - progress.seen < (step if self.drop_last else 1)

    def _prepare(self, epoch: int, feed: Feed, part: "_Part") -> Callable[[int, int], Any]:
        """Return what makes a batch of any samples of a part's stretch."""
        # Here, as a feed reads the index now; and before every batch, as rows of a shard that was written to meanwhile
        # are compared with the index's checksums.
        self.dataset.check_unaltered()
        fetch, names, transform = feed.prepare(part.samples), self._names, self.transform
        if isinstance(transform, Transform):
            samples = part.samples
            if isinstance(
                self._order, WeightedSampler
            ):  # whose samples come again, and not to look the same
                samples = np.arange(len(samples)) + (part.position - part.start)
            elif part.times is not None:  # nor those that another one gives again
                samples = samples + part.times * len(self.dataset)
            transform = transform.prepare(samples, seed=self.seed, epoch=epoch)

            def transformed(start: int, stop: int) -> Any:
                self.dataset.check_unaltered()
                pixels, *columns = fetch(start, stop)
                named = dict(zip(names, columns, strict=True))
                images, named = transform(pixels.permute(0, 3, 1, 2), named, start, stop)
                return _batch_type(names)(images, *(named[name] for name in names))

            return transformed

        def plain(start: int, stop: int) -> Any:
            self.dataset.check_unaltered()
            pixels, *columns = fetch(start, stop)
            images: Any = pixels.permute(0, 3, 1, 2)
            if transform is not None:
                images = transform(images)
                if images is None or (
                    isinstance(images, Tensor) and (images.ndim == 0 or len(images) != len(pixels))
                ):
                    found = "None" if images is None else f"a tensor {tuple(images.shape)}"
                    raise ValueError(
                        f"transform: expected to return {len(pixels)} images, found {found}"
                    )
            return _batch_type(names)(images, *columns)

        return plain

    def _batches(self, progress: "_Progress") -> Generator["_Part", None, None]:
        """Yield the samples of every batch that the epoch still owes."""
        if self._order is None:
            yield from self._batches_of_iterable(progress)
            return
        stretches = self._stretches(progress, self._order)
        if self._open().feed.name == "uva" and _is_ours(self._order):
            # With rows so small the order takes long: 12.8 against 9.1 million rows of 3 KiB a second. A user's order
            # stays on the user's thread.
            stretches = ahead_on_thread(stretches, 1)
        with contextlib.closing(stretches):
            for parts in stretches:
                yield from parts

    def _stretches(
        self, progress: "_Progress", order: Order
    ) -> Generator[list["_Part"], None, None]:
        """Yield the batches of as many positions as it pays to compute at a time."""
        rank, replicas = _place(*self._given)
        size, step = len(order), self.batch_size * replicas
        most = max(1, min(_STRETCH, _STRETCH_BYTES // max(1, self._column_bytes())) // step)
        count = min(most, max(1, _FIRST_STRETCH // step))
        end = size - (size - progress.seen) % step if self.drop_last else size
        begin = progress.seen
        while begin < end:
            shares = [
                (seen, *self._share(seen, min(step, end - seen), rank, replicas))
                for seen in range(begin, end, step)[:count]
            ]
            if most == 1:  # of many ranks, each takes its own part only
                first, last = shares[0][1], min(shares[0][2], size)
            else:
                first, last = begin, min(begin + count * step, end)
            samples = _checked(
                order.take(progress.epoch, min(first, size), last),
                last - min(first, size),
                len(self.dataset),
            )
            parts = []
            for seen, start, stop in shares:
                if (
                    stop > size
                ):  # the few that make all ranks even; all of this rank's may be, and come round again
                    few = min(stop - size, size)
                    rest = _checked(order.take(progress.epoch, 0, few), few, len(self.dataset))
                    again = rest[np.arange(max(start, size), stop) % size]
                    own = np.concatenate([samples[min(start, size) - first :], again])
                    parts.append(_Part(own, 0, len(own), min(seen + step, end), start))
                elif start < stop:
                    parts.append(
                        _Part(samples, start - first, stop - first, min(seen + step, end), start)
                    )
            yield parts
            begin, count = begin + count * step, min(most, 4 * count)

    def _column_bytes(self) -> int:
        """Return the bytes of one sample's columns."""
        columns = (self.dataset.index.columns[name] for name in self._names)
        return sum(math.prod(column.shape[1:]) * column.itemsize for column in columns)

    def _share(self, seen: int, whole: int, rank: int, replicas: int) -> tuple[int, int]:
        """Return the positions of a rank among the ``whole`` that all ranks together take next."""
        if self._even:
            each = -(-whole // replicas)
            return seen + rank * each, seen + (rank + 1) * each
        return seen + whole * rank // replicas, seen + whole * (rank + 1) // replicas

    def _batches_of_iterable(self, progress: "_Progress") -> Iterator["_Part"]:
        size, resumed, seen = len(self.dataset), progress.seen, 0
        if self.batch_sampler is not None:
            groups: Iterator[Sequence[int]] = iter(self.batch_sampler)
        else:
            numbers = iter(self.sampler)
            before = _grouped(itertools.islice(numbers, resumed), _STRETCH, False)
            groups = itertools.chain(before, _grouped(numbers, self.batch_size, self.drop_last))
        come = np.zeros(size, np.int32) if isinstance(self.transform, Transform) else None
        for group in groups:
            samples = np.asarray(list(group))
            if len(samples) and (samples.ndim != 1 or samples.dtype.kind not in "iu"):
                raise TypeError(
                    f"sampler: expected integers, found {samples.dtype} {samples.shape}"
                )
            samples = samples.astype(np.int64)
            seen += len(samples)
            if not len(samples):
                continue
            if samples.min() < -size or samples.max() >= size:
                raise IndexError(
                    f"sampler: expected numbers from 0 to {size - 1}, found {samples.min()} to {samples.max()}"
                )
            samples %= size
            times = None if come is None else _count(come, samples)
            if seen > resumed:
                # what of a batch was seen does not come again
                rest = slice(max(0, len(samples) - (seen - resumed)), None)
                samples, times = samples[rest], None if times is None else times[rest]
                yield _Part(samples, 0, len(samples), seen, seen - len(samples), times)

    def _tell_samplers(self, epoch: int) -> None:
        own: Any
        for own in (self.sampler, self.batch_sampler, getattr(self.batch_sampler, "sampler", None)):
            if hasattr(own, "set_epoch"):
                own.set_epoch(epoch)

    def _identity(self) -> dict[str, Any]:
        """Return what must be the same for a state to be this loader's: a name for each."""
        order: Any = self.batch_sampler if self.batch_sampler is not None else self.sampler
        seeded = f"(seed={order.seed})" if isinstance(getattr(order, "seed", None), int) else ""
        return {
            "fingerprint": self.dataset.fingerprint,
            "seed": self.seed,
            "order": repr(order) if _is_ours(order) else f"{type(order).__name__}{seeded}",
        }


class _Opened(NamedTuple):
    """What a loader has once it is used."""

    device: torch.device
    feed: Feed
    choice: Choice
    side: SideStream | None


class _Part(NamedTuple):
    """A batch: ``samples[start:stop]`` of those of a stretch, how many samples of the epoch are seen with it, and the
    position in the epoch of its first; of what may give samples again, how many times each came before.
    """

    samples: np.ndarray
    start: int
    stop: int
    seen: int
    position: int
    times: np.ndarray | None = None


class _Result(NamedTuple):
    """A batch that was made at once, or the exception; as a Future."""

    value: Any
    error: Exception | None

    def result(self) -> Any:
        try:
            if self.error is not None:
                raise self.error
            return self.value
        finally:
            del self  # the exception holds this frame


class _Begin:
    """Iterates over batches that have been begun; an error takes its place among them, and ends them."""

    def __init__(
        self,
        parts: Generator[_Part, None, None],
        feed: Feed,
        prepare: Callable[[_Part], Callable[[int, int], Any]],
        side: SideStream | None,
        pool: ThreadPoolExecutor | None,
    ) -> None:
        self._parts, self._feed, self._prepare, self._side, self._pool = (
            parts,
            feed,
            prepare,
            side,
            pool,
        )
        self._prepared: tuple[np.ndarray, Any, Callable[[int, int], Any]] | None = None

    def __iter__(self) -> Iterator[tuple["_Result | Future[Any]", int]]:
        return self

    def __next__(self) -> tuple["_Result | Future[Any]", int]:
        seen = 0
        try:
            part = next(self._parts, None)
            if part is not None:
                seen = part.seen
                return self._begin(part), seen
        except Exception as error:  # noqa: BLE001  # raised where the loop is, when its turn comes
            return _Result(None, error), seen
        raise StopIteration

    def _begin(self, part: _Part) -> "_Result | Future[Any]":
        make: Any = functools.partial(self._making(part), part.start, part.stop)
        if self._side is not None:
            make = functools.partial(self._side.make, make, self._side.consumer())
        return _Result(make(), None) if self._pool is None else self._pool.submit(make)

    def _making(self, part: _Part) -> Callable[[int, int], Any]:
        """Have feed and transform prepare a stretch once; on CUDA, once for each stream that it is used on."""
        stream = None
        if self._side is not None:
            stream = self._side.stream
        elif self._feed.name == "resident":
            stream = torch.cuda.current_stream(self._feed.device.index)
        if (
            self._prepared is None
            or self._prepared[0] is not part.samples
            or self._prepared[1] != stream
        ):
            with torch.cuda.stream(stream):
                self._prepared = part.samples, stream, self._prepare(part)
        return self._prepared[2]

    def close(self) -> None:
        self._parts.close()


class _Progress:
    """Where an iteration is: the epoch, and how many of its samples have been handed out over all ranks."""

    def __init__(self, epoch: int, seen: int) -> None:
        self.epoch, self.seen = epoch, seen
        self.named = (
            False  # by set_epoch: then the epoch is this one, even if nothing is left of it
        )


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


def _checked(samples: Any, count: int, size: int) -> np.ndarray:
    """Return what an order gave, if it is as many numbers of samples as were asked for."""
    found = np.asarray(samples)
    if found.shape != (count,) or found.dtype.kind not in "iu":
        raise ValueError(
            f"sampler: expected take() to return {count} integers, found {found.dtype} {found.shape}"
        )
    if count and (found.min() < 0 or found.max() >= size):
        raise IndexError(
            f"sampler: expected numbers from 0 to {size - 1}, found {found.min()} to {found.max()}"
        )
    return found


def _count(come: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Return how many times each of some samples has come, also among these, and count them too; int64 ``(N,)``."""
    order = np.argsort(samples, kind="stable")
    different, first, count = np.unique(samples[order], return_index=True, return_counts=True)
    times = np.empty_like(samples)
    times[order] = np.arange(len(samples)) - np.repeat(first - come[different], count)
    come[different] += count
    return times


def _is_ours(order: Any) -> bool:
    return type(order).__module__ == SequentialSampler.__module__


def _is_all_ours(transform: Any) -> bool:
    """Return whether no code of others has a part in a transform."""
    steps = (transform, *getattr(transform, "transforms", ()))
    return transform is None or all(type(step).__module__.startswith("memload.") for step in steps)


def _default_threads() -> int:
    """Return how many threads gather: the processes that torchrun started on this host share its cores."""
    return max(1, min(8, available_cores() // ranks.local_replicas()))


def _at_least(argument: str, value: int, least: int) -> None:
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
        raise ValueError(f"{argument}: expected an integer of at least {least}, found {value!r}")


def _place(rank: int | None, num_replicas: int | None) -> tuple[int, int]:
    """Return the rank and the number of ranks, from the arguments, torch.distributed or torchrun."""
    if (rank is None) != (num_replicas is None):
        raise ValueError(
            f"rank and num_replicas: expected both or neither, found {rank} and {num_replicas}"
        )
    if rank is None or num_replicas is None:
        rank, num_replicas = ranks.rank(), ranks.num_replicas()
    if not 0 <= rank < num_replicas:
        raise ValueError(f"rank: expected 0 <= rank < num_replicas = {num_replicas}, found {rank}")
    return rank, num_replicas


def _grouped(numbers: Iterable[int], size: int, drop_last: bool) -> Iterator[list[int]]:
    iterator = iter(numbers)
    while group := list(itertools.islice(iterator, size)):
        if len(group) == size or not drop_last:
            yield group
