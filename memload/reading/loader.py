"""The Loader: joins data set, order, feed and transform to batches on the device."""

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple, Never

import torch
from torch.utils.data import Dataset

from memload import ranks
from memload.feeds.choice import Choice, FeedName
from memload.machine import available_cores
from memload.reading.arguments import (
    check_mixture,
    check_order,
    check_settings,
    refuse_unsupported,
)
from memload.reading.batches import BatchNames, JobMaker, bind_dataset, copy_to_buffers
from memload.reading.dataset import MemmapDataset, choose_names, open_dataset
from memload.reading.epochs import Chunk, IterableBatches, OrderBatches, tell_epoch
from memload.reading.loop import run_ahead
from memload.reading.pipeline import Pipeline, make_pipeline, samples_of
from memload.reading.samplers import Order, SequentialSampler, ShuffledSampler, check_integer
from memload.reading.stats import Stats, Stopwatch
from memload.reading.streams import find_device
from memload.transforms.following import KINDS
from memload.transforms.foreign import draws_once_a_batch
from memload.wording import parse_size


class Progress(NamedTuple):
    """Where an iteration is: its epoch, and how many of its samples all ranks have seen.

    After the last batch of an epoch, the next iteration begins the next epoch. `Loader.set_epoch`
    may choose the finished epoch instead. The next iteration then has no batches.
    """

    epoch: int
    samples_seen: int
    is_chosen: bool = False


class Loader:
    """Batches of a data set on the device, made ahead of the training loop.

    >>> loader = Loader("out.bin", 256, shuffle=True, transform=memload.transforms.train(224))
    >>> for images, labels in loader:
    ...     ...

    A batch is a named tuple: ``batch.images``, a tensor ``(N, C, H, W)`` of the data set's dtype,
    channels-last in memory, then ``batch.labels`` and all else that the data set has. Masks are
    ``(N, H, W)``, other arrays and columns ``(N, …)``. A batch belongs to whoever holds it. It is
    ready for the CUDA stream that is current when you ask for it.

    Args:
        dataset: a `MemmapDataset` or its path, a list of these, or torch's ``Subset`` or
            ``ConcatDataset`` of them.
        batch_size: samples of a batch, on each rank.
        shuffle: visit every sample once an epoch, in an order that depends on ``seed`` and epoch.
        sampler: an `Order`, or any iterable of sample numbers, such as a torch Sampler.
        batch_sampler: an iterable of lists of sample numbers.
        drop_last: leave out the last batch if it is smaller than the others.
        seed: of the order, and of what transforms draw.
        rank: the number of this process. By default as ``torch.distributed`` says if it is
            initialised, else RANK, else 0.
        num_replicas: how many processes there are, by default WORLD_SIZE in the same way. An epoch
            is divided among them; an iterable of your own is not. For training, all get as many
            batches. For evaluation (neither ``shuffle`` nor ``drop_last``), each sample comes
            exactly once, and one rank may have a batch more than another.
        columns: names of what follows the images, ``"all"``, or None for all. ``"index"`` is the
            number of the sample.
        device: by default the current CUDA device, or the CPU if there is none.
        transform: called with the images of a batch, on the threads that make batches. One of
            `memload.transforms` also moves masks, points and boxes.
        num_threads: how many threads copy rows, on the CPU and with the feed ``"pinned"``; with 0,
            your own thread does. By default the cores of this process, at most 8.
        prefetch_factor: how many batches are made ahead; with threads, ahead for each of them.
        feed: the way to the device: ``"auto"``, ``"resident"``, ``"dma"`` (or ``"disk"``),
            ``"pinned"`` or ``"cpu"``. See docs/memory.md. The property `feed` says which one it is,
            and why.
        static_buffers: copy each batch into the same tensors, for a captured CUDA graph.
        cache_bytes: how much RAM may hold rows for the feed ``"dma"``, for all Loaders of the
            process, such as ``"64GB"``. By default half of what is available.

    Raises ValueError and TypeError for wrong arguments, FeedError if a feed asked for by name
    cannot serve, and FormatError as `MemmapDataset` does.
    """

    def __init__(
        self,
        dataset: "MemmapDataset | str | Path | Sequence[MemmapDataset | str | Path] | Dataset[Any]",
        batch_size: int = 1,
        *,
        shuffle: bool = False,
        sampler: Order | Iterable[int] | None = None,
        batch_sampler: Iterable[Sequence[int]] | None = None,
        drop_last: bool = False,
        seed: int = 0,
        rank: int | None = None,
        num_replicas: int | None = None,
        columns: Sequence[str] | Literal["all"] | None = None,
        device: torch.device | str | None = None,
        transform: Callable[[Any], Any] | None = None,
        num_threads: int | None = None,
        prefetch_factor: int = 2,
        feed: FeedName = "auto",
        static_buffers: bool = False,
        cache_bytes: int | str | None = None,
        **unsupported: Never,
    ) -> None:
        refuse_unsupported(unsupported)
        if num_threads is None:  # all processes of torchrun on this host share its cores
            num_threads = max(1, min(8, available_cores() // ranks.local_replicas()))
        check_order(shuffle, sampler, batch_sampler, batch_size, drop_last)
        check_integer("batch_size", batch_size, 1)
        check_integer("prefetch_factor", prefetch_factor, 1)
        check_integer("num_threads", num_threads, 0)
        check_settings(feed, transform)
        ranks.check(rank, num_replicas)
        if static_buffers and not (drop_last or batch_sampler is not None):
            raise ValueError("static_buffers needs batches of one size. Use drop_last=True.")
        self.dataset = open_dataset(dataset, columns)
        check_mixture(dataset, sampler)
        self.batch_size, self.drop_last = int(batch_size), drop_last
        self.seed = check_integer("seed", seed)
        names = _chosen_names(self.dataset, columns, transform)
        self._names = BatchNames.of(self.dataset, names)
        self.transform = bind_dataset(transform, self.dataset, names)
        self.num_threads, self.prefetch_factor = num_threads, prefetch_factor
        self.static_buffers, self.batch_sampler = static_buffers, batch_sampler
        self._cache_bytes: int | None = None
        if cache_bytes is not None:
            self._cache_bytes = check_integer("cache_bytes", parse_size(cache_bytes), 0)
        size = self._num_samples = len(self.dataset)
        self._order: Any = sampler
        if sampler is None:
            order = ShuffledSampler(size, seed=self.seed) if shuffle else SequentialSampler(size)
            self._order = order
        self._given_ranks = (rank, num_replicas)
        self._given_device, self._given_feed = device, feed
        #: Where the next iteration begins.
        self._next = Progress(0, 0)
        self._begin_in_this_process()
        if warning := draws_once_a_batch(transform):
            warnings.warn(warning, stacklevel=2)
        if device is not None or feed != "auto":  # if it cannot be had, say so at once
            self._get_pipeline()

    def _begin_in_this_process(self) -> None:
        """Set what is never pickled."""
        self._lock = threading.Lock()
        self._pipeline: Pipeline | None = None
        self._buffers: list[torch.Tensor] = []
        #: Where the running or interrupted iteration is; None if there is none.
        self._current: Progress | None = None
        #: That of the newest iteration, from its first batch on.
        self._stopwatch: Stopwatch | None = None

    def __getstate__(self) -> dict[str, Any]:
        process_state = ("_lock", "_pipeline", "_buffers", "_current", "_stopwatch")
        kept = {name: value for name, value in vars(self).items() if name not in process_state}
        return {**kept, "_next": self._current or self._next}  # the copy goes on where this one is

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin_in_this_process()

    @property
    def sampler(self) -> Any:
        """The order of the samples. If that is sequential, torch's sampler of this name.

        By that, other libraries know that nothing is shuffled.
        """
        if type(self._order) is SequentialSampler:
            return torch.utils.data.SequentialSampler(range(len(self._order)))
        return self._order

    @property
    def device(self) -> torch.device:
        """Where batches are made."""
        pipeline = self._pipeline
        return find_device(self._given_device) if pipeline is None else pipeline.feed.device

    @property
    def feed(self) -> Choice:
        """How samples get to the device: its ``name``, and the ``reason`` why it was chosen.

        ``counts`` says where the rows of the batches so far were found; see
        `memload.feeds.feed.Counts`. It is None for a feed that does not count them.

        >>> print(loader.feed)
        disk: 120 GB of 252 GB will be held, as 120 GB of RAM may hold rows; resident: 252 GB does
        not fit in 25% of the 139 GB free on cuda:0; 800,000 of 1,680,000 rows are held; of 20,480
        rows so far, 9,728 came from memory and 10,752 from the files
        """
        feed, choice = self._get_pipeline()[:2]
        return choice._replace(name=feed.name, counts=feed.counts())

    @property
    def stats(self) -> Stats:
        """What the newest iteration has handed out, and how long the loop has waited for it.

        >>> print(loader.stats)
        1,000 batches in 52.1 s: waited 0.4 s for data (0.8 %), feed dma, 38.5 GB

        These are numbers of one epoch: of the current one from its first batch on, and of the last
        one when that is over. The time that you use a batch counts when you ask for the next one.

        The seconds are those of the host. On CUDA, a loop that never waits for the device runs
        ahead of it until the Loader stops it. If the next batch is not on the device by then, that
        counts as waiting; else it counts as the loop's time. If the loop itself waits for the
        device, as ``loss.item()`` does, that is the loop's time. On the CPU, threads of the Loader
        take cores from the model. That makes the loop's time longer, and is no waiting.
        """
        return Stats() if self._stopwatch is None else self._stopwatch.stats

    @property
    def rank(self) -> int:
        """The number of this process, looked up each time: a process group may be set up later."""
        return ranks.resolve(*self._given_ranks)[0]

    @property
    def num_replicas(self) -> int:
        """How many processes share an epoch."""
        return ranks.resolve(*self._given_ranks)[1]

    def __repr__(self) -> str:
        pipeline = self._pipeline
        device = self._given_device or "auto" if pipeline is None else pipeline.feed.device
        feed = self._given_feed if pipeline is None else pipeline.feed.name
        lines = [
            f"{self.dataset!r}",
            f"batch_size={self.batch_size}, order={self._order_text()}",
            f"transform={self.transform!r}".replace("\n", "\n    "),
            f"device={str(device)!r}, feed={feed!r}",
        ]
        return "Loader(" + "".join(f"\n    {line}," for line in lines) + "\n)"

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch on this rank, also if one is resumed."""
        return len(self._schedule())

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration. An epoch that was resumed goes on."""
        check_integer("epoch", epoch, 0)
        samples_seen = self._next.samples_seen if epoch == self._next.epoch else 0
        self._next = Progress(int(epoch), samples_seen, is_chosen=True)
        tell_epoch(int(epoch), self._order, self.batch_sampler)

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the batch that was handed out last: numbers and text.

        It is the same on all ranks. Only a rank without a share of the last step of an evaluation
        is at the next epoch by then, which is where the others go on, too.
        """
        epoch, samples_seen, _ = self._current or self._next
        return {"epoch": epoch, "samples_seen": samples_seen, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where `state_dict` was called.

        That may be on another number of ranks, and with other batch sizes and threads. Nothing is
        read to get there, except from an iterable of your own, which has to give the same numbers
        again. Raises ValueError if the state is of other samples, another seed or another order.
        """
        epoch, samples_seen = (
            check_integer(f"state: {name}", state[name], 0) for name in ("epoch", "samples_seen")
        )
        for name, value in self._identity().items():
            if state[name] != value:
                raise ValueError(
                    f"state belongs to another Loader: its {name} is {state[name]!r}, but this "
                    f"Loader's is {value!r}. Use the same data set, order and seed."
                )
        self._next, self._current = Progress(epoch, samples_seen), None
        tell_epoch(epoch, self._order, self.batch_sampler)

    def _identity(self) -> dict[str, Any]:
        """Return what must be equal for a state to be this Loader's."""
        fingerprint = self.dataset.fingerprint
        return {"fingerprint": fingerprint, "seed": self.seed, "order": self._order_text()}

    def _order_text(self) -> str:
        """Return a text that differs for different orders, as far as it can be known."""
        order: Any = self._order if self.batch_sampler is None else self.batch_sampler
        if type(order).__module__ == SequentialSampler.__module__:  # its repr identifies it
            return repr(order)
        seed = getattr(order, "seed", None)
        return type(order).__name__ + (f"(seed={seed})" if isinstance(seed, int) else "")

    def __iter__(self) -> Iterator[Any]:
        self._current = None  # from here on, state_dict() is the start of the next epoch
        return self._iterate()

    def _iterate(self) -> Generator[Any, None, None]:
        """Yield the batches of an epoch, which begins with the first of them."""
        asked_at = perf_counter()
        pipeline, (epoch, chunks) = self._get_pipeline(), self._begin_epoch()
        feed, side = pipeline.feed, pipeline.side
        self._stopwatch = stopwatch = Stopwatch(asked_at, epoch, feed.name)
        stream = None if side is None else side.stream
        maker = JobMaker(
            feed,
            self.dataset,
            self.transform,
            self._names,
            seed=self.seed,
            epoch=epoch,
            stream=stream,
        )
        batches = run_ahead(
            maker.jobs(chunks),
            side=side,
            num_threads=pipeline.num_threads,
            in_flight=pipeline.in_flight,
            reads_ahead=pipeline.reads_ahead,
        )
        progress = self._current
        with contextlib.closing(batches):
            for job, batch in batches:
                part = job.note
                del job
                self._current = progress = Progress(epoch, part.samples_seen)
                if self.static_buffers:
                    batch = copy_to_buffers(batch, self._buffers)
                samples = part.stop - part.start
                stopwatch.hand_over(samples, samples * pipeline.row_bytes)
                if side is not None:
                    side.wait_while_ahead()
                yield batch
                del batch  # its memory may be what the next one takes
                stopwatch.ask()
        if self._current is progress:  # else an iterator or a state came since
            self._current = None

    def _begin_epoch(self) -> tuple[int, Iterator[Chunk]]:
        """Return the epoch of this iteration, and its chunks. The next one begins one later."""
        schedule = self._schedule()
        with self._lock:
            epoch, seen, is_chosen = self._current = self._next
            self._next = Progress(epoch + 1, 0)
        tell_epoch(epoch, self._order, self.batch_sampler)
        chunks = schedule.chunks(epoch, seen)
        first = next(chunks, None)
        if first is None and seen and not is_chosen:  # saved behind the last batch
            return self._begin_epoch()
        if first is None and self.drop_last and self._num_samples and not seen:
            warnings.warn(
                f"drop_last: an epoch has no batches, because {self._num_samples} samples are less "
                f"than one batch of {self.batch_size} for each of {self.num_replicas} ranks. Use a "
                "smaller batch_size, or drop_last=False.",
                stacklevel=3,
            )
        return epoch, chunks if first is None else chain([first], chunks)

    def _schedule(self) -> OrderBatches | IterableBatches:
        """Return what says which samples each batch of this rank holds."""
        if self.batch_sampler is not None:
            return IterableBatches(self.batch_sampler, None, False, self._num_samples)
        # Arrays and tensors of sample numbers have a take() too, a different one.
        if not hasattr(self._order, "take") or hasattr(self._order, "__array__"):
            return IterableBatches(self._order, self.batch_size, self.drop_last, self._num_samples)
        return OrderBatches(
            self._order,
            self.batch_size,
            self.drop_last,
            *ranks.resolve(*self._given_ranks),
            self._num_samples,
        )

    def _get_pipeline(self) -> Pipeline:
        with self._lock:
            if self._pipeline is None:
                batch_size: Any = self.batch_size
                if self.batch_sampler is not None:  # torch's has an attribute for that
                    batch_size = getattr(self.batch_sampler, "batch_size", None)
                self._pipeline = make_pipeline(
                    samples_of(self.dataset, self._names.ordered),
                    find_device(self._given_device),
                    self._given_feed,
                    self.transform,
                    num_threads=self.num_threads,
                    prefetch_factor=self.prefetch_factor,
                    batch_size=batch_size if isinstance(batch_size, int) else None,
                    cache_bytes=self._cache_bytes,
                )
                weakref.finalize(self, self._pipeline.feed.close)
            return self._pipeline


def _chosen_names(
    dataset: MemmapDataset, columns: Sequence[str] | str | None, transform: Any
) -> tuple[str, ...]:
    """Return the columns of a batch; by default, also those that the transform names."""
    if columns is None:
        named = (getattr(transform, kind, None) or () for kind in KINDS)
        columns = tuple(dict.fromkeys([*dataset.sample_names, *chain(*named)]))
    return choose_names(columns, dataset.index.names)
