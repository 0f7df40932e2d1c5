"""Join data set, order, feed and transform: batches on the device, in an order that is a function of (seed, epoch)."""

import itertools
import os
from collections import deque, namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from memload.dataset import MemmapDataset
from memload.feeds.cpu import CpuFeed
from memload.samplers import Order, SequentialSampler, ShuffledSampler
from memload.workers import available_cores

FeedName = Literal["auto", "cpu"]


class Loader:
    """Batches of a data set, gathered by threads ahead of the training loop.

    Each batch is a named tuple ``(images, labels)``, or images and the ``columns`` asked for: images ``(N, C,
    H, W)`` uint8, channels-last in memory, unless ``transform`` makes something else of them; columns as
    tensors ``(N, …)``.

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
    more. ``num_threads × prefetch_factor`` batches are made ahead; ``num_threads=0`` makes each when it is
    asked for. ``transform`` is called with the images, on these threads, so with more than one of them in no
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
        threads = min(8, available_cores()) if num_threads is None else num_threads
        _at_least("num_threads", threads, 0)
        if feed not in ("auto", "cpu"):
            raise ValueError(f"feed: expected 'auto' or 'cpu', found {feed!r}")
        self.device = torch.device("cpu" if device is None else device)
        if self.device.type != "cpu":
            raise ValueError(f"device: expected the CPU, which is all that this version feeds, found {self.device}")
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
        self._columns = {name: dataset.index.columns[name] for name in names}
        fields = ["images", *("labels" if name == "label" else name for name in names)]
        self._batch: Any = namedtuple("Batch", fields, rename=True)  # type: ignore[misc]  # its fields are known now
        self._ahead = threads * prefetch_factor
        self._feed = CpuFeed(dataset.shards, keep=self._ahead + 2)
        self._next = _Progress(0, 0)
        self._current: _Progress | None = None

    @property
    def feed(self) -> str:
        """The way in which rows come to the device."""
        return self._feed.name

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
        return {"seed": self._seed(), "epoch": at.epoch, "samples_seen": at.seen, "fingerprint": self._fingerprint()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next iteration go on where `state_dict` was taken.

        Raises ValueError where it was taken over other samples, with another seed, or is no such state.
        """
        missing = {"seed", "epoch", "samples_seen", "fingerprint"} - state.keys()
        if missing:
            raise ValueError(f"state: expected what state_dict() gave, found one without {', '.join(sorted(missing))}")
        for name, least in (("epoch", 0), ("samples_seen", 0)):
            _at_least(f"state: {name}", state[name], least)
        for name, own in (("fingerprint", self._fingerprint()), ("seed", self._seed())):
            if state[name] != own:
                raise ValueError(
                    f"state: expected the {name} {own!r} of this loader, found {state[name]!r}: it belongs to other "
                    f"{'samples' if name == 'fingerprint' else 'orders'}. Make the loader as it was made then"
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
        process = os.getpid()
        wanted = self._batches(progress)
        if not self.num_threads:
            for positions, seen in wanted:
                batch = self._make(positions)
                progress.seen = seen
                yield batch
        else:
            waiting: deque[tuple[Future[Any], int]] = deque()
            pool = ThreadPoolExecutor(self.num_threads, "memload")
            try:
                while True:
                    for positions, seen in itertools.islice(wanted, self._ahead - len(waiting)):
                        waiting.append((pool.submit(self._make, positions), seen))
                    if not waiting:
                        break
                    future, seen = waiting.popleft()
                    batch = future.result()
                    del future
                    progress.seen = seen
                    yield batch
                    del batch  # or its memory would be held while the next one is waited for
                    if os.getpid() != process:
                        raise RuntimeError(
                            "iterator: expected to be used in the process that made it, found a forked child, "
                            "which has none of its threads. Iterate anew there"
                        )
            finally:
                if os.getpid() == process:
                    pool.shutdown(cancel_futures=True)
        if self._current is progress:  # from here on the state is the start of the next epoch, whichever that will be
            self._current = None

    def _is_over(self, progress: "_Progress") -> bool:
        """Return whether nothing is left of an epoch for any rank; False where an iterable does not tell its length."""
        if not progress.seen or self.batch_sampler is not None or not hasattr(self.sampler, "__len__"):
            return False
        step = self.batch_size * (1 if self._order is None else self.num_replicas)
        return len(self.sampler) - progress.seen < (step if self.drop_last else 1)

    def _make(self, positions: np.ndarray) -> Any:
        images = self._feed.fetch(self.dataset.index.row[positions]).permute(0, 3, 1, 2)
        values = [torch.from_numpy(column[positions]) for column in self._columns.values()]
        return self._batch(images if self.transform is None else self.transform(images), *values)

    def _batches(self, progress: "_Progress") -> Iterator[tuple[np.ndarray, int]]:
        """Yield the samples of every batch that the epoch still owes, and how many samples are seen with it."""
        if self._order is None:
            yield from self._batches_of_iterable(progress)
            return
        size, step = len(self._order), self.batch_size * self.num_replicas
        for seen in range(progress.seen, size, step):
            whole = min(step, size - seen)
            if whole < step and self.drop_last:
                return
            start, stop = self._share(seen, whole)
            samples = self._order.take(progress.epoch, min(start, size), min(stop, size))
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

    def _seed(self) -> int:
        return int(getattr(self._order, "seed", self.seed))  # an order of the user's has one of its own

    def _fingerprint(self) -> str:
        return self.dataset.fingerprint


class _Progress:
    """Where an iteration is: the epoch, and how many of its samples have been handed out over all ranks."""

    def __init__(self, epoch: int, seen: int) -> None:
        self.epoch, self.seen = epoch, seen
        self.named = False  # by set_epoch: then the epoch is this one, even if nothing is left of it


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
