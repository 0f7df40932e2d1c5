"""The Loader: joins data set, order, feed and transform to batches on the device."""

import contextlib
import functools
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, Never

import torch
from torch.utils.data import Dataset

from memload import ranks
from memload.feeds.choice import Choice, FeedName
from memload.feeds.limits import MemoryLimits
from memload.jobs import Job
from memload.machine import available_cores
from memload.reading.ahead import ahead, on_thread
from memload.reading.arguments import (
    check_order,
    check_settings,
    open_dataset,
    refuse_overfitting,
    refuse_unsupported,
)
from memload.reading.batches import BatchNames, batch_maker, bind_dataset, copy_to_buffers
from memload.reading.columns import choose_names, split_names
from memload.reading.dataset import MemmapDataset
from memload.reading.epochs import (
    MAX_CHUNK,
    Chunk,
    IterableBatches,
    OrderBatches,
    Progress,
    tell_epoch,
)
from memload.reading.pipeline import Pipeline, make_pipeline, samples_of
from memload.reading.samplers import Order, SequentialSampler, ShuffledSampler, check_integer
from memload.reading.stats import Stats, Stopwatch
from memload.reading.streams import current_stream, find_device
from memload.transforms.following import KINDS
from memload.transforms.foreign import draws_once_a_batch

#: Bytes of columns in a chunk, at most.
_MAX_CHUNK_BYTES = 8 << 20


class Loader:
    """Batches of a data set on the device, made ahead of the training loop.

    >>> loader = Loader("out.bin", 256, shuffle=True, transform=memload.transforms.train(224))
    >>> for images, labels in loader:
    ...     ...

    ``dataset`` is a `MemmapDataset` or its path. A list of these is read as one data set, the
    samples of one after those of another; so is torch's ``ConcatDataset`` of them. torch's
    ``Subset``, as ``random_split`` makes it, is read as a view.

    Each batch is a named tuple of images and what belongs to them, such as ``(images, labels)`` for
    an image folder, or ``batch.images``, ``batch.labels`` and ``batch.mask``. ``batch.labels`` is
    the column ``label``, unless there is a column ``labels``, too. Everything that the data set has
    is handed out: ``label`` first, then the other arrays, then the other columns, in their order.
    ``columns`` is a list of those that you want instead, or ``"all"``. ``"index"`` in that list
    gives the numbers of the samples, int64 ``(N,)``: their positions in ``dataset``, which may be a
    view. A data set with a column of that name gives the column. If there are no columns, batches
    are ``(images,)``: write ``for (images,) in loader`` or use ``batch.images``.

    Images are tensors ``(N, C, H, W)`` of the data set's dtype, channels-last in memory, unless
    ``transform`` returns something else. Masks are ``(N, H, W)`` and other arrays ``(N, …)``, of
    their stored dtypes. Columns are tensors with one row for each image. All are on the same
    device. Columns of text are integers (see `MemmapDataset.categories`).

    **Device.** ``device`` is by default the CUDA device that is current when the first batch is
    asked for, or the CPU if there is none. ``feed`` is the way samples take to the device. The
    property `feed` tells which one was chosen and why, and so does a line in the log ``memload``.
    All arrays and columns in the batches count together.
    On the CPU there is only ``"cpu"``, in which ``num_threads`` threads copy rows. On CUDA:

    - ``"resident"`` keeps all samples in the device's memory, loaded when the feed is made. It is
      chosen if they take at most a quarter of the free memory there.
    - ``"dma"`` has the device's copy engines fetch rows from the page cache. It is chosen if the
      files take at most half of the available RAM (of the container, if that has a limit) and their
      pages can be registered with CUDA. Processes share these pages.
    - ``"uva"`` has a kernel fetch them. It is chosen for rows below 28 KiB, also for some arrays
      beside ``"dma"`` for the others.
    - ``"disk"`` holds as many rows as fit in the page cache, always the same ones, and reads the
      others from the disk, past the page cache. It is chosen for files that are too large for
      ``"dma"``, if their file system can do that (O_DIRECT).
    - ``"pinned"`` has ``num_threads`` threads copy rows to page-locked memory, and sends them from
      there. It is chosen for all else.

    **Cold files.** A file need not be in RAM when training begins. With ``"dma"``, ``"uva"`` and
    ``"disk"``, threads read the rows of the next batches from the disk, and one more thread brings
    in the rest of what is to be held. It leaves the disk to the rows that are waited for. So the
    first batches come as fast as their rows can be read. Once all rows are held, batches come at
    the speed of the bus.

    **Memory.** ``cache_bytes`` is how much RAM may hold rows, for all Loaders of the process
    together: a number of bytes, or a text such as ``"64GB"``. By default, that is half of the
    available RAM, and 80 % of it for ``"cpu"`` and ``"pinned"``, whose rows the system can drop. If
    not all rows fit, the same rows stay in every epoch. ``resident_bytes`` is how much of the
    device's memory may hold rows: all of them with ``"resident"``, and with ``"disk"`` some beyond
    those in RAM (by default none). A limit that has no effect raises ValueError, such as
    ``resident_bytes`` on the CPU. ``docs/memory.md`` has examples.

    **Prefetching.** On the CPU, ``num_threads × prefetch_factor`` batches are made ahead by
    ``num_threads`` threads. On CUDA, ``prefetch_factor`` batches are made ahead on a stream of the
    Loader's own. ``"pinned"`` makes as many ahead as its threads gather at once, up to ``3 ×
    prefetch_factor``. ``"resident"`` without a transform makes none ahead, because one kernel takes
    less time than a handover between streams. ``"dma"``, ``"uva"`` and ``"disk"`` read the rows of
    2 to 32 further batches from the disk, about 128 MiB of those that are not in RAM. A sampler of
    your own is asked for its numbers as early. On the CPU and with ``"pinned"``, ``num_threads=0``
    makes each batch on your thread when you ask for it.

    **Streams.** A batch is ready for the CUDA stream that is current when you ask for it. If you
    use it on another stream, synchronise the two yourself, as always in torch.

    **Static buffers.** ``static_buffers=True`` copies each batch into the same tensors, for a
    captured CUDA graph to read. They belong to the Loader and stay the same in all its epochs, so
    each batch overwrites the one before. A second iterator overwrites them as well: use another
    Loader for it. All batches of all epochs need the same shapes and dtypes (``drop_last=True``);
    others raise ValueError. Other threads use CUDA meanwhile: capture before iterating, or with
    ``capture_error_mode="thread_local"``.

    **Order.** ``shuffle=True`` visits every sample once an epoch, in an order that depends on
    ``seed`` and epoch only: not on batch size, threads or ranks. ``sampler`` is an order of
    `memload.reading.samplers`, or any iterable of sample numbers, such as a torch Sampler.
    ``batch_sampler`` is an iterable of lists of them. Both must give their numbers anew in each
    epoch; a generator does not, and is refused. The first batch of an iterator begins the next
    epoch, and `set_epoch` chooses one.

    **Ranks.** ``rank`` and ``num_replicas`` are by default those of `torch.distributed` if it is
    initialised, else those of torchrun (RANK and WORLD_SIZE), else 0 and 1. With ``shuffle`` or
    ``drop_last``, all ranks get the same number of batches and of samples. For that, up to
    ``num_replicas - 1`` samples from the beginning of the epoch come twice; ``drop_last`` drops the
    last ones instead. Otherwise, as for an evaluation, the ranks together get every sample exactly
    once. Then one rank may have a batch more than another, so reduce after the loop: a collective
    operation in each batch would wait for ever. An iterable of your own is not divided: give each
    rank its own, such as a DistributedSampler.

    **Transforms.** ``transform`` is called with the images of a batch, on the threads that make
    batches and thus in no fixed order if there are several. One of `memload.transforms` also gets
    masks and columns. It moves masks, points and boxes together with their images, and draws at
    random for (``seed``, epoch, sample). If samples may repeat, as in a
    `WeightedSampler` or an iterable of your own, it draws for the position in the epoch instead of
    for the sample.

    **Resuming.** `state_dict` holds seed, epoch and the number of samples that all ranks have seen.
    `load_state_dict` goes on exactly there, also with another number of ranks, threads or samples a
    batch. Nothing is read to get there, except from an iterable of your own. That has to give the
    same numbers again: seed it.

    **Batches.** A batch belongs to whoever holds it. Its memory is reused when nothing refers to it
    any more. Several iterators may be used at once, also on several threads. One that is left early
    leaves no threads behind. In a forked child, iterate anew: an iterator from before the fork
    raises RuntimeError, except on the CPU with ``num_threads=0``, where it has nothing in flight.

    Raises ValueError and TypeError for wrong arguments. Those of torch's DataLoader that a Loader
    does not need, such as ``num_workers``, are a TypeError that says what it does instead. Raises
    MemloadError if no thread can be started, FeedError if a feed asked for by name cannot serve,
    and FormatError as `MemmapDataset` does.

    Warns if ``drop_last`` leaves nothing of an epoch, if ``transform`` has random transforms of
    torchvision, which draw only once for a whole batch, and if a function of your own resizes or
    crops images to which masks, points or boxes belong.
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
        resident_bytes: int | str | None = None,
        **unsupported: Never,
    ) -> None:
        refuse_unsupported(unsupported)
        if num_threads is None:  # all processes of torchrun on this host share its cores
            num_threads = max(1, min(8, available_cores() // ranks.local_replicas()))
        check_order(shuffle, sampler, batch_sampler, batch_size, drop_last)
        check_integer("batch_size", batch_size, 1)
        check_integer("prefetch_factor", prefetch_factor, 1)
        check_integer("num_threads", num_threads, 0)
        check_settings(seed, feed, transform)
        self._limits = MemoryLimits.of(cache_bytes, resident_bytes)
        self._limits.check_effect(feed)
        if static_buffers and not (drop_last or batch_sampler is not None):
            raise ValueError("static_buffers needs batches of one size. Use drop_last=True.")
        ranks.resolve(rank, num_replicas)  # raises ValueError
        self.dataset = open_dataset(dataset, columns)
        self.batch_size, self.drop_last, self.seed = int(batch_size), drop_last, int(seed)
        self._names = _chosen_names(self.dataset, columns, transform)
        self.transform = bind_dataset(transform, self.dataset, self._names)
        self.num_threads, self.prefetch_factor = num_threads, prefetch_factor
        self.static_buffers = static_buffers
        self.batch_sampler = batch_sampler
        self._order: Any = sampler
        if sampler is None:
            size = len(self.dataset)
            self._order = ShuffledSampler(size, seed=seed) if shuffle else SequentialSampler(size)
        self._given_ranks = (rank, num_replicas)
        self._given_device, self._given_feed = device, feed
        # `_next` is where the next iteration begins. `_current` is the position of the newest
        # iteration from its first batch on, and None again once that iteration has ended. It stays
        # when a loop is left early. `state_dict` returns `_current`, else `_next`.
        self._next = Progress(0, 0)
        self._begin_in_this_process()
        _warn_if_empty(self._schedule())
        if warning := draws_once_a_batch(transform):
            warnings.warn(warning, stacklevel=2)
        if device is not None or feed != "auto":  # if it cannot be had, say so at once
            self._get_pipeline()

    def _begin_in_this_process(self) -> None:
        """Set what is never pickled."""
        self._lock = threading.Lock()
        _loaders.add(self)
        self._pipeline: Pipeline | None = None
        self._buffers: list[torch.Tensor] = []
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

        By that, other libraries know that nothing is shuffled, such as Lightning for
        ``overfit_batches``.
        """
        if type(self._order) is SequentialSampler:
            return torch.utils.data.SequentialSampler(range(len(self._order)))
        if not isinstance(self._order, torch.utils.data.SequentialSampler):
            refuse_overfitting(self._order)
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
        `memload.feeds.interface.ReadCounts`. It is None for a feed that does not count them.

        >>> print(loader.feed)
        disk: 252 GB does not fit in 50% of the 240 GB of available RAM, so 120 GB of it are held
        there, and the rest is read from the disk; resident: 252 GB does not fit in 25% of the 139
        GB free on cuda:0; 800,000 of 1,680,000 rows are held; of 20,480 rows so far, 9,728 came
        from memory and 10,752 from the files; 1.62 GB read at 2.05 GB/s
        """
        pipeline = self._get_pipeline()
        return pipeline.choice._replace(counts=pipeline.feed.counts())

    @property
    def stats(self) -> Stats:
        """What the newest iteration has handed out, and how long the loop has waited for it.

        >>> print(loader.stats)
        1,000 batches in 52.1 s: waited 0.4 s for data (0.8 %), feed dma, 38.5 GB

        These are numbers of one epoch: of the current one from its first batch on, and of the last
        one when that is over. An epoch that was resumed, or is left early, counts the batches that
        were handed out. The time that you use a batch counts when you ask for the next one.
        Of several iterators at once, the one that began last is told; `Stats.rows` and `Stats.hits`
        are then those of all. Call it on any thread. A pickled copy begins anew.

        The seconds are those of the host. On CUDA, a loop that never waits for the device runs
        ahead of it until the Loader stops it. If the next batch is not on the device by then, that
        counts as waiting; else it counts as the loop's time. With a transform that is not
        memload's, all of it counts as the loop's. If the loop itself waits for the device, as
        ``loss.item()`` does, then that is the loop's time, even if the device waits for data: a
        batch is handed out when it is on its way. On the CPU, threads of the Loader take cores
        from the model. That makes the loop's time longer, and does not count as waiting.
        """
        stopwatch = self._stopwatch
        return Stats() if stopwatch is None else stopwatch.stats()

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
        if pipeline is None:  # then they are not chosen yet
            device, feed = str(self._given_device or "auto"), str(self._given_feed)
        else:
            device, feed = str(pipeline.feed.device), pipeline.feed.name
        lines = [
            f"{self.dataset!r}",
            f"batch_size={self.batch_size}, order={self._order_text()}",
            f"transform={self.transform!r}".replace("\n", "\n    "),
            f"device={device!r}, feed={feed!r}{self._limits.as_arguments()}",
        ]
        return "Loader(" + "".join(f"\n    {line}," for line in lines) + "\n)"

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch on this rank, also if one is resumed."""
        return len(self._schedule())

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration. An epoch that was resumed goes on."""
        check_integer("epoch", epoch, 0)
        samples_seen = self._next.samples_seen if epoch == self._next.epoch else 0
        self._next = Progress(int(epoch), samples_seen, set_by_user=True)
        tell_epoch(epoch, self)

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the last batch of the newest iteration: numbers and text."""
        epoch, samples_seen, _ = self._current or self._next
        return {"epoch": epoch, "samples_seen": samples_seen, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where `state_dict` was called.

        Raises ValueError if that was with other samples, another seed or another order, and
        TypeError or ValueError if ``state`` is not a state.
        """
        identity = self._identity()
        if not isinstance(state, Mapping):
            raise TypeError(f"state is a {type(state).__name__}. Give what state_dict() returned.")
        missing = ({"epoch", "samples_seen"} | identity.keys()) - state.keys()
        if missing:
            raise ValueError(
                f"state has no {', '.join(sorted(missing))}. Give what state_dict() returned."
            )
        for name in ("epoch", "samples_seen"):
            check_integer(f"state: {name}", state[name], 0)
        for name, value in identity.items():
            if state[name] != value:
                raise ValueError(
                    f"state belongs to another Loader: its {name} is {state[name]!r}, but this "
                    f"Loader's is {value!r}. Use the same data set, order and seed."
                )
        self._next, self._current = Progress(int(state["epoch"]), int(state["samples_seen"])), None
        tell_epoch(state["epoch"], self)

    def _identity(self) -> dict[str, Any]:
        """Return what must be equal for a state to be this Loader's."""
        fingerprint = self.dataset.fingerprint
        return {"fingerprint": fingerprint, "seed": self.seed, "order": self._order_text()}

    def _order_text(self) -> str:
        """Return a text that differs for different orders, as far as it can be known."""
        order: Any = self._order if self.batch_sampler is None else self.batch_sampler
        if _is_of_memload(order):
            return repr(order)
        seed = getattr(order, "seed", None)
        return type(order).__name__ + (f"(seed={seed})" if isinstance(seed, int) else "")

    def __iter__(self) -> Iterator[Any]:
        self._current = None  # from here on, state_dict() is the start of the next epoch
        return self._iterate()

    def _iterate(self) -> Generator[Any, None, None]:
        """Yield the batches of an epoch.

        chunks ─▶ _reads ────────────▶ _jobs ─────────────▶ batches
                  reads_ahead batches  in_flight batches    handed over to the
                  begin to be read     begin to be made     consumer's stream
        """
        asked_at = perf_counter()
        # An epoch begins with its first batch: Lightning calls iter() once just to see if it can.
        pipeline, schedule, progress = self._get_pipeline(), self._schedule(), self._begin_epoch()
        chunks = schedule.chunks(progress.epoch, progress.samples_seen)
        jobs = self._jobs(pipeline, chunks, progress.epoch)
        side_stream = pipeline.side_stream
        stopwatch = self._stopwatch = Stopwatch(progress.epoch, pipeline.feed, pipeline.row_bytes)
        stopwatch.start(asked_at)
        begun = ahead(jobs, pipeline.in_flight, pipeline.num_threads)
        with contextlib.closing(begun):
            for part, batch in begun if side_stream is None else map(side_stream.hand_over, begun):
                if self.static_buffers:
                    batch = copy_to_buffers(batch, self._buffers)
                self._current = progress = Progress(progress.epoch, part.samples_seen)
                stopwatch.hand_over(part.stop - part.start)
                if side_stream is not None:
                    side_stream.keep_back()
                yield batch
                del batch  # its memory may be what the next one takes
                stopwatch.ask()
        if self._current is progress:  # no newer iteration has set it since
            self._current = None

    def _jobs(
        self, pipeline: Pipeline, chunks: Iterator[Chunk], epoch: int
    ) -> Generator[Job[Any], None, None]:
        """Yield a job for each batch of an epoch, which makes it, or begins to."""
        side_stream = pipeline.side_stream
        reading = ahead(self._reads(pipeline, chunks, epoch), pipeline.reads_ahead)
        with contextlib.closing(reading):
            for make_batch in reading:
                if side_stream is None:
                    yield make_batch
                else:
                    # A thread cannot ask for the caller's current stream, so it is told. Without
                    # threads, `begin` asks: the stream may change before a job is ready.
                    has_threads = pipeline.num_threads > 0
                    consumer = current_stream(pipeline.feed.device) if has_threads else None
                    begin = functools.partial(side_stream.begin, make_batch, consumer)
                    yield Job(begin, make_batch.is_ready)
                del make_batch  # its memory may be what the next one takes

    def _reads(
        self, pipeline: Pipeline, chunks: Iterator[Chunk], epoch: int
    ) -> Generator[Job[Job[Any]], None, None]:
        """Yield a job for each batch, which begins to read it and returns the job to make it."""
        feed, side_stream = pipeline.feed, pipeline.side_stream
        names = BatchNames.of(self.dataset, self._names)
        if feed.name == "uva" and self.batch_sampler is None and _is_of_memload(self._order):
            # Rows are so small here that the order takes long: 12.8 against 9.1 million rows of 3
            # KiB a second with a thread for it. An order of the user's stays on the user's thread.
            chunks = on_thread(chunks, 1)
        for chunk in chunks:
            begin_batch, prepared_on = None, None
            for part in chunk.parts:
                own = current_stream(feed.device)
                stream = own if side_stream is None else side_stream.stream
                # Without a side stream, batches are made on the user's current stream. If that
                # changes between two batches, the rest of the chunk is prepared again.
                if begin_batch is None or prepared_on != stream:
                    prepared_on = stream
                    begin_batch = batch_maker(
                        chunk,
                        feed=feed,
                        transform=self.transform,
                        names=names,
                        seed=self.seed,
                        epoch=epoch,
                        stream=stream,
                    )
                yield Job(functools.partial(begin_batch, part))

    def _begin_epoch(self) -> Progress:
        """Return where this iteration begins. The next one begins with the epoch after it."""
        with self._lock:
            progress = self._next
            is_resumed = progress.samples_seen > 0 and not progress.set_by_user
            if is_resumed and self._schedule().is_over(progress.samples_seen):
                # The state was saved behind the last batch.
                progress = Progress(progress.epoch + 1, 0)
            self._next, self._current = Progress(progress.epoch + 1, 0), progress
        tell_epoch(progress.epoch, self)
        return progress

    def _schedule(self) -> OrderBatches | IterableBatches:
        """Return what says which samples each batch of this rank holds."""
        num_samples = len(self.dataset)
        if self.batch_sampler is not None:
            return IterableBatches(self.batch_sampler, None, False, num_samples)
        # Arrays and tensors of sample numbers have a take() too, a different one.
        if not hasattr(self._order, "take") or hasattr(self._order, "__array__"):
            return IterableBatches(self._order, self.batch_size, self.drop_last, num_samples)
        # Columns go to the device a chunk at a time, and rows of arrays a batch at a time.
        _, columns = split_names(self._names, self.dataset.arrays)
        stored = self.dataset.columns
        sample_bytes = sum(stored[name][:1].nbytes if name in stored else 8 for name in columns)
        return OrderBatches(
            self._order,
            self.batch_size,
            self.drop_last,
            *ranks.resolve(*self._given_ranks),
            num_samples,
            max_chunk=min(MAX_CHUNK, _MAX_CHUNK_BYTES // max(1, sample_bytes)),
        )

    def _get_pipeline(self) -> Pipeline:
        with self._lock:
            if self._pipeline is None:
                self._pipeline = make_pipeline(
                    samples_of(self.dataset, self._names),
                    find_device(self._given_device),
                    self._given_feed,
                    self.transform,
                    num_threads=self.num_threads,
                    prefetch_factor=self.prefetch_factor,
                    batch_size=self._known_batch_size(),
                    limits=self._limits,
                )
                weakref.finalize(self, self._pipeline.feed.close)
            return self._pipeline

    def _known_batch_size(self) -> int | None:
        """Return how many samples a batch has. None: a batch_sampler makes them and does not say.

        torch's has an attribute for that.
        """
        if self.batch_sampler is None:
            return self.batch_size
        size = getattr(self.batch_sampler, "batch_size", None)
        return size if isinstance(size, int) else None


#: So that a forked child can renew their locks: the threads that hold one are not in the child.
_loaders: weakref.WeakSet[Loader] = weakref.WeakSet()


def _renew_locks() -> None:
    for loader in _loaders:
        loader._lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_locks)


def _warn_if_empty(schedule: OrderBatches | IterableBatches) -> None:
    """Warn if ``drop_last`` leaves no batches of an epoch that has samples."""
    if not isinstance(schedule, OrderBatches) or not schedule.drop_last:
        return
    if len(schedule.order) and not len(schedule):
        warnings.warn(
            f"drop_last: an epoch has no batches, because {len(schedule.order)} samples are less "
            f"than one batch of {schedule.batch_size} for each of {schedule.num_replicas} ranks. "
            "Use a smaller batch_size, or drop_last=False.",
            stacklevel=3,
        )


def _chosen_names(
    dataset: MemmapDataset, columns: Sequence[str] | str | None, transform: Any
) -> tuple[str, ...]:
    """Return the columns of a batch; by default, also those that the transform names."""
    if columns is None:
        named = (getattr(transform, kind, None) or () for kind in KINDS)
        columns = tuple(dict.fromkeys([*dataset.sample_names, *chain(*named)]))
    return choose_names(columns, dataset.index.names)


def _is_of_memload(order: Any) -> bool:
    """Return whether an order is memload's: its `repr` identifies it; any thread may call it."""
    return type(order).__module__ == SequentialSampler.__module__
