"""What each stage and each feed reaches on this machine, next to its limit measured in the same run."""

import contextlib
import functools
import itertools
import math
import os
import platform
import shutil
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from PIL import Image, ImageOps

from memload import inspection
from memload.bench_report import Line, Report
from memload.errors import FeedError, MemloadError
from memload.machine import available_cores
from memload.storage.format import HEADER_BYTES, npy_header
from memload.storage.index import Array, Index, Shard
from memload.storage.mapping import forget
from memload.storage.shards import Shards

if TYPE_CHECKING:
    import torch

    from memload.feeds.choice import Choice
    from memload.feeds.gathering import Gatherer
    from memload.reading.dataset import MemmapDataset

#: Bytes of pixels that are measured on, at most: more than a cache of the CPU's holds, read within seconds.
_PART_BYTES = 512 << 20
#: Bytes of pixels in a batch, at most: 256 pictures of 256×256×3.
_BATCH_BYTES = 64 << 20
#: Read at a time by a thread: large enough for any disk's full speed.
_BLOCK_BYTES = 8 << 20
#: Seconds of one measurement, and those of one that reads from the disk or decodes.
_SLOT, _LONG_SLOT = 0.2, 1.0
_ROUNDS, _LONG_ROUNDS = 5, 3
#: Seconds from the start after which no further round begins.
_ENOUGH = 45.0
#: Batches that transforms are prepared for at a time, as in a Loader.
_STRETCH = 32
#: Samples that one measurement asks for, at most.
_MOST = 1 << 20

#: Makes ready for so many images; what it returns goes through that many, and returns how many they were.
Prepare = Callable[[int], Callable[[], int]]


def measure(path: str | Path, *, images: str | Path | None = None) -> Report:
    """Measure for less than a minute, on a part of the data set.

    ``images`` is the folder that the data set was built from, for its pictures to be decoded in a DataLoader. A part
    of a large data set is copied to a temporary folder, beside it if possible, which is removed in the end. Pages of
    that part are dropped from the page cache. Raises FormatError, ValueError and OSError.
    """
    start = time.perf_counter()
    from memload.reading.dataset import MemmapDataset

    dataset = MemmapDataset(path)
    if not len(dataset) or not len(dataset.shards):
        raise ValueError(
            f"{path}: expected at least one sample, found none. Build it from a folder with pictures"
        )
    row_bytes = dataset.shards.array.row_bytes
    rows = max(1, min(len(dataset.shards), _PART_BYTES // row_bytes))
    files = None if images is None else _files(dataset, Path(images))
    # First, while this process has none of the threads and devices that do not survive a fork.
    jpegs = [] if files is None else [_jpegs(files, dataset)]
    cold, from_disk = _cold(dataset.shards, rows, min(8, available_cores()))
    if from_disk:
        rows = max(1, min(rows, int(4 * from_disk)))  # what is read within seconds
    with _sample(dataset, rows) as sample:
        batch = 1 << int(math.log2(max(1, min(2048, len(sample), _BATCH_BYTES // row_bytes))))
        try:
            lines, facts, notes = _warm(dataset, sample, batch, start + _ENOUGH)
        except RuntimeError as error:  # torch's: there is no room for the limits
            raise FeedError(
                f"{path}: expected 2 GB of free memory for measuring, on the GPU too if there is one, found: "
                f"{_first_line(error)}. Make room, or let CUDA_VISIBLE_DEVICES name another GPU, or none"
            ) from error
    for line in jpegs:
        if line.images_s and lines[-1].images_s:
            faster = lines[-1].images_s / line.images_s
            notes.append(
                f"The Loader, crops and normalisation included, brings {faster:.3g} times the images of the JPEGs "
                "in a DataLoader, which are decoded and resized alone."
            )
    uneven = [line.subject for line in [cold, *lines, *jpegs] if line.spread > 0.4]
    if uneven:
        notes.append(
            f"Rounds differ much: {'; '.join(uneven)}. If other processes are at work, run it again without."
        )
    array = dataset.shards.array
    return Report(
        {
            "path": str(path),
            "samples": len(dataset),
            "sampled": len(sample),
            "sample_in": str(sample.path.parent),
            "shape": list(array.shape),
            "dtype": np.dtype(array.descr).name,
            "bytes": len(dataset.shards) * row_bytes,
            "batch_size": batch,
            **facts,
            "seconds": time.perf_counter() - start,
            "machine": _machine(),
            "versions": inspection.environment(),
            "notes": notes,
        },
        [cold, *lines, *jpegs],
    )


def _files(dataset: "MemmapDataset", images: Path) -> list[Path]:
    """Return the files of some samples, at random."""
    chosen = np.random.default_rng(0).permutation(len(dataset))[:1000]
    files = [
        file for sample in chosen.tolist() if (file := images / dataset.keys[sample]).is_file()
    ]
    if not files:
        raise ValueError(
            f"images: expected the folder that {dataset.path.name} was built from, with files such as "
            f"{dataset.keys[int(chosen[0])]!r}, found none of {len(chosen):,} in {str(images)!r}. Give that folder"
        )
    return files


class _Pictures:
    """Pictures decoded and brought to one size, without end; what torch calls a map-style data set."""

    def __init__(self, files: Sequence[Path], shape: tuple[int, ...]) -> None:
        self.files, self.shape = files, shape

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, number: int) -> np.ndarray:
        with Image.open(self.files[number % len(self.files)]) as image:
            upright = image.convert("L" if self.shape[2] == 1 else "RGB")
        return np.array(
            ImageOps.fit(upright, (self.shape[1], self.shape[0]), Image.Resampling.BILINEAR)
        )


def _jpegs(files: Sequence[Path], dataset: "MemmapDataset") -> Line:
    from torch.utils.data import DataLoader

    workers, shape = available_cores(), dataset.shards.array.shape
    subject = f"JPEGs in a DataLoader, {workers} worker{'s' * (workers > 1)}"
    try:
        read: list[Path] = []
        end = time.perf_counter() + _LONG_SLOT
        for file in itertools.takewhile(lambda _: not read or time.perf_counter() < end, files):
            file.read_bytes()  # from here on it comes from the page cache
            read.append(file)
        pictures = _Pictures(read, shape)
        start, alone = time.perf_counter(), 0
        while not alone or time.perf_counter() < start + _LONG_SLOT:
            pictures[alone]
            alone += 1
        limit = workers * alone / (time.perf_counter() - start)
        batch = max(1, min(64, int(limit / workers / 5)))  # a worker takes a fifth of a second
        batches = iter(DataLoader(cast("Any", pictures), batch, num_workers=workers))
        for _ in range(2 * workers):  # until every worker is at work
            next(batches)
        rates = []
        for _ in range(_LONG_ROUNDS):
            start, count = time.perf_counter(), 0
            while not count or time.perf_counter() < start + 1.5 * _LONG_SLOT:
                count += len(next(batches))
            rates.append(count / (time.perf_counter() - start))
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        return Line(subject, reason=_first_line(error))
    what = f"decoding {len(read):,} of them in one process, × {workers} cores"
    return Line.of(subject, rates, what, [limit] * len(rates), dataset.shards.array.row_bytes)


def _in_turn(
    pieces: Sequence[Any], workers: Sequence[Callable[[Any], int]], seconds: float = math.inf
) -> int:
    """Have each worker take its share of pieces, on a thread of its own; return what they did in time."""
    end = time.perf_counter() + seconds

    def work(number: int) -> int:
        in_time = itertools.takewhile(
            lambda _: time.perf_counter() < end, pieces[number :: len(workers)]
        )
        return sum(workers[number](piece) for piece in in_time)

    with ThreadPoolExecutor(len(workers)) as pool:
        return sum(pool.map(work, range(len(workers))))


def _blocks(shards: Shards, rows: int) -> list[tuple[Path, int, int]]:
    """Return where the first rows are: file, offset and size, of `_BLOCK_BYTES` or less."""
    blocks = []
    for path, first, stop in zip(shards.paths, shards.starts, shards.starts[1:], strict=False):
        size = (min(rows, stop) - first) * shards.array.row_bytes
        blocks += [
            (path, HEADER_BYTES + at, min(_BLOCK_BYTES, size - at))
            for at in range(0, size, _BLOCK_BYTES)
        ]
    return blocks


def _drop(blocks: Sequence[tuple[Path, int, int]], shards: Shards) -> None:
    """Have no page of some blocks in the page cache, if nobody else holds them."""
    for pixels in shards.maps:
        forget(pixels)
    for path, offset, size in blocks:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # a page that is still to be written stays
            os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _read(buffer: memoryview, block: tuple[Path, int, int]) -> int:
    """Read a block, and return its size."""
    with block[0].open("rb", buffering=0) as file:
        file.seek(block[1])
        return file.readinto(buffer[: block[2]]) or 0


def _readers(threads: int) -> list[Callable[[Any], int]]:
    return [functools.partial(_read, memoryview(bytearray(_BLOCK_BYTES))) for _ in range(threads)]


def _gather(gatherer: "Gatherer", out: np.ndarray, rows: np.ndarray) -> int:
    """Copy rows as the feeds do, and return how many."""
    gatherer.gather(rows, out[: len(rows)])
    return len(rows)


def _gatherers(shards: Shards, size: int, threads: int) -> list[Callable[[Any], int]]:
    from memload.feeds.gathering import Gatherer

    buffers = [np.zeros((size, *shards.array.shape), shards.array.descr) for _ in range(threads)]
    gatherer = Gatherer(shards)
    return [functools.partial(_gather, gatherer, buffer) for buffer in buffers]


def _pieces(order: np.ndarray, size: int) -> list[np.ndarray]:
    return [order[start : start + size] for start in range(0, len(order), size)]


def _cold(shards: Shards, rows: int, threads: int) -> tuple[Line, float]:
    """Return the line of a disk nothing of which is in RAM, and the rows a second that it gives from start to end."""
    subject, row_bytes = "disk cold, random order", shards.array.row_bytes
    if not hasattr(os, "posix_fadvise"):
        return Line(subject, reason="this system has no posix_fadvise, which makes it cold"), 0.0
    import resource

    rates, limits, blocks = [], [], _blocks(shards, rows)
    size = max(1, min(64, rows // threads, _BLOCK_BYTES // row_bytes))
    readers, gatherers = _readers(threads), _gatherers(shards, size, threads)
    for number in range(_LONG_ROUNDS):
        try:
            _drop(blocks, shards)
            start = time.perf_counter()
            done = _in_turn(blocks, readers, _LONG_SLOT) / row_bytes
            limits.append(done / (time.perf_counter() - start))
            _drop(blocks, shards)
        except OSError as error:
            return Line(subject, reason=f"its pages cannot be dropped: {error}"), 0.0
        before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        count = _in_turn(
            _pieces(np.random.default_rng(number).permutation(rows), size), gatherers, _LONG_SLOT
        )
        rates.append(count / (time.perf_counter() - start))
        after = resource.getrusage(resource.RUSAGE_SELF)
        read, faults = (
            512 * (after.ru_inblock - before.ru_inblock),
            after.ru_majflt - before.ru_majflt,
        )
        # Some filesystems do not count what is read. Then a wait for a page has to do.
        if read < count * row_bytes / 2 and (read or not faults):
            return Line(
                subject, reason="its pages stay in RAM: a filesystem in memory, or others hold them"
            ), 0.0
    return Line.of(
        subject, rates, "the file from start to end, cold", limits, row_bytes
    ), statistics.median(limits)


@contextlib.contextmanager
def _sample(dataset: "MemmapDataset", rows: int) -> Iterator["MemmapDataset"]:
    """Yield the data set itself, or a copy of its first rows."""
    from memload.reading.dataset import MemmapDataset

    if rows == len(dataset.shards):
        yield dataset
        return
    size, folder = rows * dataset.shards.array.row_bytes, dataset.shards.folder
    if not os.access(folder, os.W_OK) or shutil.disk_usage(folder).free < 2 * size:
        folder = Path(tempfile.gettempdir())
    if (free := shutil.disk_usage(folder).free) < 2 * size:
        raise OSError(
            f"{folder}: expected {2 * size:,} bytes of free disk for a part of the data set, found {free:,}. "
            "Make room, or let TMPDIR name another folder"
        )
    with tempfile.TemporaryDirectory(
        prefix="memload-bench-", dir=folder, ignore_cleanup_errors=True
    ) as temporary:
        path = Path(temporary) / "sample.bin"
        _copy(dataset, rows, path)
        yield MemmapDataset(path)


def _copy(dataset: "MemmapDataset", rows: int, path: Path) -> None:
    """Write a data set of the first rows, one sample each, with columns of the same kind."""
    array, index = dataset.shards.array, dataset.index
    pixels = dataset.shards.gather(np.arange(rows), np.empty((rows, *array.shape), array.descr))
    with path.open("wb") as file:
        file.write(npy_header(array.descr, pixels.shape))
        file.write(pixels.view(np.uint8).data)
    samples = np.arange(rows) % len(index)
    Index(
        path=path.with_suffix(".idx"),
        arrays=(
            Array(
                "image",
                array.descr,
                array.shape,
                (Shard(path.name, rows, HEADER_BYTES + pixels.nbytes),),
            ),
        ),
        row=np.arange(rows),
        flags=np.zeros(rows, np.uint8),
        keys=index.keys.take(samples),
        columns={
            name: np.ascontiguousarray(index.columns[name][samples])
            for name in dataset.sample_columns
        },
        crc32={"image": np.array([zlib.crc32(image) for image in pixels], np.uint32)},
        classes=index.classes,
    ).write(path.with_suffix(".idx"))


class _Rounds:
    """Ways that are measured in turn, each for about the same time; or the reason why one is not."""

    def __init__(self, batch: int, least: int, wait: Callable[[], object]) -> None:
        self._batch, self._least, self._wait = batch, least, wait
        self._runs: dict[str, Callable[[], int]] = {}
        self.rates: dict[str, list[float]] = {}
        self.reasons: dict[str, str] = {}

    def add(self, name: str, prepare: Prepare) -> None:
        """Try a way, and find the number of images that it brings in a slot's time."""
        count = self._least
        try:
            self._rate(prepare(count))  # compiles, loads and registers what there is to
            while count / (rate := self._rate(prepare(count))) < _SLOT / 4 and count < _MOST:
                count *= 4
            count = max(self._least, round(min(_MOST, rate * _SLOT) / self._batch) * self._batch)
            self._runs[name], self.rates[name] = prepare(count), []
        except (MemloadError, ValueError, TypeError, RuntimeError, MemoryError) as error:
            self.reasons[name] = _first_line(error)

    def add_batches(self, name: str, work: Callable[[int], object]) -> None:
        """Add a way that is called with the number of each batch."""

        def run(batches: int) -> int:
            for number in range(batches):
                work(number)
            return batches * self._batch

        self.add(name, lambda count: lambda: run(count // self._batch))

    def go(self, end: float) -> int:
        """Measure all in turn, several times, and once before that does not count; return how often."""
        for number in range(_ROUNDS + 1):
            if number > 1 and time.perf_counter() > end:
                return number - 1
            for name, run in self._runs.items():
                rate = self._rate(run)
                self.rates[name] += [rate] * (number > 0)
        return _ROUNDS

    def _rate(self, run: Callable[[], int]) -> float:
        self._wait()
        start = time.perf_counter()
        count = run()
        self._wait()
        return count / (time.perf_counter() - start)


def _warm(
    dataset: "MemmapDataset", sample: "MemmapDataset", batch: int, end: float
) -> tuple[list[Line], dict[str, Any], list[str]]:
    """Return the lines of everything whose pages are in RAM, facts, and what to say of it."""
    import torch

    from memload.feeds.choice import FEEDS
    from memload.feeds.interface import widest_word
    from memload.reading.loader import Loader
    from memload.reading.streams import find_device
    from memload.transforms.recipes import train

    device, shards, threads = find_device(None), sample.shards, available_cores()
    array, cuda = shards.array, device.type == "cuda"
    callers = 1 if cuda else min(8, threads)  # of transforms: on the CPU as many as the Loader has
    rounds = _Rounds(
        batch,
        callers * batch,
        functools.partial(torch.cuda.synchronize, device) if cuda else lambda: None,
    )

    blocks, readers = _blocks(shards, len(shards)), _readers(min(8, threads))
    _in_turn(blocks, readers)  # into RAM
    order = sample.index.row[np.random.default_rng(1).permutation(len(sample))]
    parts = _pieces(order[: len(order) // batch * batch], batch)
    pixels = max(shards.maps, key=len)
    taken, out = (
        [part % len(pixels) for part in parts],
        np.zeros((batch, *array.shape), array.descr),
    )
    each = max(1, -(-batch // threads), min(batch, (4 << 20) // array.row_bytes))
    pieces, gather, gatherers = (
        _pieces(order, each),
        _gatherers(shards, batch, 1)[0],
        _gatherers(shards, each, threads),
    )

    def touch() -> int:
        for mapped in shards.maps:
            forget(mapped)
        return _in_turn(pieces, gatherers)

    def gather_all(count: int) -> Callable[[], int]:
        many = [pieces[number % len(pieces)] for number in range(-(-count // each))]
        return lambda: _in_turn(many, gatherers)

    rounds.add("read", lambda _: lambda: _in_turn(blocks, readers) // array.row_bytes)
    rounds.add("touch", lambda _: touch)
    rounds.add_batches(
        "take", lambda n: np.take(pixels, taken[n % len(taken)], axis=0, out=out, mode="clip")
    )
    rounds.add_batches("gather", lambda n: gather(parts[n % len(parts)]))
    rounds.add("gather all", gather_all)

    images = sample.gather(np.arange(batch))
    if cuda:
        many = max(1, (256 << 20) // images.nbytes)
        block = torch.empty((many, *images.shape), dtype=images.dtype, pin_memory=True)
        whole = torch.empty_like(block, device=device)
        stored = torch.zeros((len(shards), array.row_bytes), dtype=torch.uint8, device=device)
        stored = stored.view(widest_word(array.row_bytes))
        numbers = torch.from_numpy(order[:batch]).to(device)
        chosen = torch.empty((batch, stored.shape[1]), dtype=stored.dtype, device=device)

        def copy(passes: int) -> int:
            for _ in range(passes):
                whole.copy_(block, non_blocking=True)
            return passes * len(block) * batch

        rounds.add("copy", lambda count: lambda: copy(-(-count // (len(block) * batch))))
        rounds.add_batches("copies", lambda n: block[n % len(block)].to(device, non_blocking=True))
        rounds.add_batches("ordinary", lambda _: images.to(device))
        rounds.add_batches("select", lambda _: torch.index_select(stored, 0, numbers, out=chosen))

    held: dict[
        str, Loader
    ] = {}  # the newest of each, so that pages stay registered and rows on the device

    def load(feed: str, transform: Any, count: int) -> Callable[[], int]:
        again, on = (
            sample.subset(np.arange(count) % len(sample)),
            "cpu" if feed == "cpu" else device,
        )
        loader = Loader(
            again,
            batch,
            shuffle=True,
            rank=0,
            num_replicas=1,
            device=on,
            feed=cast("Any", feed),
            transform=transform,
        )
        held[feed] = loader
        return lambda: sum(len(made[0]) for made in loader)

    for feed in FEEDS[1:]:
        if cuda or feed == "cpu":
            rounds.add(feed, functools.partial(load, feed, None))
        else:
            rounds.reasons[feed] = "for a CUDA device, and there is none"
    choice = _automatic(dataset, rounds.reasons, device)

    side = min(224, *array.shape[:2])
    transform = train(side) if array.shape[2] == 3 else train(side, mean=[0.5], std=[0.5])
    inputs = images.to(device).permute(0, 3, 1, 2)
    shape, stretch = (batch, array.shape[2], side, side), np.arange(_STRETCH * batch)
    cast_to = torch.empty(shape, device=device, memory_format=torch.channels_last)

    @functools.lru_cache(4)  # of more than the stretch that each thread is at
    def prepared(epoch: int) -> Any:
        return transform.prepare(stretch, epoch=epoch)

    def transformed(
        number: int,
    ) -> int:  # for a stretch of batches at a time, as the Loader does it
        epoch, place = divmod(number, _STRETCH)
        return len(prepared(epoch)(inputs, None, place * batch, (place + 1) * batch))

    def converted(_: int) -> int:
        return len(cast_to.copy_(inputs[:, :, :side, :side]))

    if cuda:
        rounds.add_batches("cast", converted)
        rounds.add_batches("transform", transformed)
    else:  # on threads, as the Loader does it
        rounds.add("cast", lambda count: lambda: _in_turn(range(count // batch), [converted]))
        rounds.add(
            "transform",
            lambda count: lambda: _in_turn(range(count // batch), [transformed] * callers),
        )
    rounds.add("loader", functools.partial(load, choice.name, transform))
    done, rates = rounds.go(end), rounds.rates
    both = list(zip(rates.get(choice.name, []), rates.get("transform", []), strict=False))
    rates["both"] = [min(pair) if cuda else 1 / (1 / pair[0] + 1 / pair[1]) for pair in both]

    def line(subject: str, way: str, limit: str, what: str) -> Line:
        if way in rounds.reasons:
            return Line(subject, reason=rounds.reasons[way])
        return Line.of(subject, rates[way], what, rates.get(limit, []), array.row_bytes)

    take, bus = ("take", "np.take into one buffer"), ("copy", "one copy from page-locked memory")
    lines = [
        line("disk warm, first touch", "touch", "read", "the file from start to end, warm"),
        line("gather, 1 thread", "gather", *take),
        line(f"gather, {threads} thread{'s' * (threads > 1)}", "gather all", *take),
    ]
    if cuda:
        lines.append(line("to the GPU, page-locked batches", "copies", *bus))
        lines.append(line("to the GPU, ordinary memory", "ordinary", *bus))
    else:
        lines.append(Line("to the GPU", reason="torch finds no CUDA device"))
    limits = {"resident": ("select", "index_select on the GPU"), "cpu": take}
    lines += [line(f"feed {feed}", feed, *limits.get(feed, bus)) for feed in FEEDS[1:]]
    lines.append(line(f"transform train({side})", "transform", "cast", "one cast to float32"))
    what = (
        f"the slower of feed {choice.name} and transform"
        if cuda
        else "feed and transform, one after the other"
    )
    lines.append(line(f"Loader, {choice.name}, train({side})", "loader", "both", what))
    return (
        lines,
        {"rounds": done, "feed": str(choice), "threads": threads},
        [f'feed="auto" takes {choice}.'],
    )


def _automatic(
    dataset: "MemmapDataset", reasons: dict[str, str], device: "torch.device"
) -> "Choice":
    """Return the feed that the whole data set would get, of those that serve its sample."""
    from memload.feeds import choice as feeds
    from memload.feeds.interface import Feed, Samples

    if device.type != "cuda":
        return feeds.Choice("cpu", f"the device is {device}")

    def make(name: str) -> Feed:
        if name in reasons:
            raise FeedError(reasons[name])
        return cast("Feed", None)  # none is made: it would load or register all of the files

    columns = [dataset.index.columns[name] for name in dataset.sample_columns]
    return feeds.first_that_serves(
        make, Samples(dataset.shards, dataset.index.row, columns), device
    )[1]


def _first_line(error: BaseException) -> str:
    return next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )


def _machine() -> dict[str, Any]:
    import torch

    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(
            (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu
        )
    found: dict[str, Any] = {"cpu": cpu, "cores": available_cores(), "system": platform.platform()}
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        with contextlib.suppress(OSError):
            found["driver"] = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    return found
