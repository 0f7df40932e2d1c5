"""The offline pipeline: source → decode → resize → write, in parallel, in order, resumable."""

import contextlib
import csv
import functools
import logging
import operator
import os
import re
import shutil
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image
from tqdm import tqdm

from memload import workers
from memload.conversion import Converter, Row, Settings
from memload.decoders import MAX_PIXELS
from memload.errors import BuildError, DecodeError, FormatError, SourceError
from memload.format import HEADER_BYTES, RESERVED, output_paths, shard_names
from memload.index import Array, Index, class_counts, sync
from memload.journal import (
    DONE,
    REJECTED,
    Journal,
    differences,
    intact,
    listing_changes,
    locked,
    read_json,
    record_type,
    seal,
    write_json,
    write_listing,
)
from memload.keys import Keys
from memload.resizing import Fit, Interpolation, Resizer, import_torch
from memload.shards import ShardWriter, describe, plan_shards
from memload.sources import Column, DatasetSource, ImageFolder, Source

logger = logging.getLogger("memload")

OnError = Literal["skip", "raise"]

#: Edges of the histogram of the sources' shorter sides, in pixels.
_SIDES = (0, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 768, 1024, 1536, 2048, 4096, 8192)


@dataclass(frozen=True)
class BuildReport:
    """What a build did. ``str()`` of it is the closing line."""

    path: Path  #: the output
    samples: int  #: pictures in the data set
    rejected: int  #: pictures left out; the ledger says why
    bytes: int  #: size of all shards
    shape: tuple[int, int, int]  #: (H, W, C)
    converted: int  #: pictures converted by this call; fewer than all where it went on with an unfinished build
    seconds: float  #: what that took
    num_workers: int
    libraries: Mapping[str, str]  #: what decoded, with versions
    notes: Sequence[str]  #: what the source left out
    ledger: Path | None  #: where the rejected pictures are listed, if there are any

    @property
    def images_per_second(self) -> float:
        """Pictures converted a second."""
        return self.converted / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        shape = "×".join(map(str, self.shape))
        kept = f", {self.samples + self.rejected - self.converted:,} done before" if self._resumed else ""
        ledger = f" (see {self.ledger})" if self.ledger else ""
        using = libraries_text(self.libraries)
        return (
            f"{self.path}: {self.samples:,} samples of {shape} uint8, {size_text(self.bytes)}, {self.rejected:,} "
            f"rejected{ledger}; {self.images_per_second:,.0f} images/s in {self.seconds:.1f} s by "
            f"{self.num_workers} workers{kept}; {using}"
        )

    @property
    def _resumed(self) -> bool:
        return self.converted < self.samples + self.rejected


def build(
    source: str | Path | Source | Any,
    output: str | Path,
    *,
    size: int | tuple[int, int] = 256,
    fit: Fit = "crop",
    interpolation: Interpolation = "bilinear",
    mode: Literal["RGB", "L"] = "RGB",
    decoder: Literal["pillow", "jpeg4py"] = "pillow",
    resizer: Resizer = "pillow",
    fast: bool = False,
    strict: bool = False,
    exif: bool = True,
    background: str = "white",
    fill: str = "black",
    max_pixels: int = MAX_PIXELS,
    on_error: OnError = "skip",
    num_workers: int | None = None,
    shard_size: int | None = None,
    timeout: float = 60.0,
    overwrite: bool = False,
    progress: bool | None = None,
) -> BuildReport:
    """Decode every image of ``source`` once, into the memory map ``output`` and its index.

    ``source`` is a folder (see `ImageFolder`), a `Source` such as `Manifest`, or any map-style data set (see
    `memload.sources.DatasetSource`). ``output`` ends in ``.bin``; the index stands beside it, ending in ``.idx``.

    ``size`` is the side of the stored pictures, or (height, width). ``fit`` says how they come to it: ``crop``
    covers it and cuts evenly (torchvision's Resize and CenterCrop, to the bit), ``squash`` changes the aspect
    ratio, ``pad`` puts ``fill`` around. ``fast`` computes only what is kept, from a JPEG decoded at a half, a
    quarter or an eighth where that leaves twice the size or more. ``resizer="torch"`` uses torch's. ``strict``,
    ``decoder``, ``mode``, ``background``, ``exif`` and ``max_pixels`` are those of `memload.decoders.get_decoder`.

    ``on_error="skip"`` lists pictures that cannot be used in a ledger (``out.rejects.csv``) and goes on; ``"raise"``
    stops at the first. ``num_workers`` processes decode, by default one a core; 0 decodes in this process, without
    protection from pictures that crash the decoder or take more than ``timeout`` seconds. ``shard_size`` splits
    the pixels into files of at most so many bytes. ``progress`` shows a bar; by default if stderr is a terminal.

    Blocks until done. A build that was interrupted, at whatever moment, goes on where it stopped when it is
    called again, and ends with the same bytes. The result does not depend on ``num_workers``. An ``output``
    that exists is left alone unless ``overwrite`` is given, and then until the new one is complete.

    Raises ValueError, SourceError, DependencyError, BuildError, and with ``on_error="raise"`` DecodeError.
    """
    height, width = _pair(size)
    if not timeout > 0:
        raise ValueError(f"timeout: expected seconds above 0, found {timeout}")
    settings = Settings(
        (height, width), fit, interpolation, mode, decoder, resizer, fast, strict, exif, background, fill, max_pixels
    )
    if on_error not in ("skip", "raise"):
        raise ValueError(f"on_error: expected 'skip' or 'raise', found {on_error!r}")
    if num_workers is not None and num_workers < 0:
        raise ValueError(f"num_workers: expected 0 or more, found {num_workers}")
    limit = Image.MAX_IMAGE_PIXELS
    if num_workers == 0 and limit is not None and max_pixels > 2 * limit:
        raise ValueError(
            f"max_pixels: expected at most {2 * limit:,} with num_workers=0, found {max_pixels:,}: in this process "
            "Pillow's own limit holds. Use workers, or raise PIL.Image.MAX_IMAGE_PIXELS"
        )
    output = Path(output)
    output_paths(output)
    Converter(settings, {})  # what is missing is better told now
    records = _open_source(source)
    _check_source(records)
    job = _Build(records, output, settings, shard_size, overwrite)
    with job.begin():
        started = time.perf_counter()
        count = workers.available_cores() if num_workers is None else num_workers
        try:
            job.convert(count, timeout, on_error, progress)
            index = job.finish()
        except OSError as error:
            raise BuildError(
                f"{output}: expected to be able to write, found: {error}. Mend that, then run the same command "
                "again: it goes on where it stopped",
                path=output,
            ) from error
        seconds = time.perf_counter() - started
    rejected = len(records) - len(index)
    return BuildReport(
        path=output,
        samples=len(index),
        rejected=rejected,
        bytes=sum(shard.bytes for shard in index.image.shards),
        shape=job.shape,
        converted=job.converted,
        seconds=seconds,
        num_workers=count,
        libraries=index.build["libraries"],
        notes=tuple(records.notes),
        ledger=job.ledger if rejected else None,
    )


def libraries_text(libraries: Mapping[str, str]) -> str:
    """Return e.g. ``pillow 13.0.0 (libjpeg-turbo 3.2.0)``."""
    jpeg = [f"{name} {version}" for name, version in libraries.items() if name.startswith("libjpeg")]
    others = [f"{name} {version}" for name, version in libraries.items() if not name.startswith("libjpeg")]
    return f"{', '.join(others)} ({', '.join(jpeg)})"


def _pair(size: Any) -> tuple[int, int]:
    sides = size if isinstance(size, Sequence) else (size, size)
    try:
        if any(isinstance(side, bool) for side in sides):
            raise TypeError
        height, width = map(operator.index, sides)
    except (TypeError, ValueError):
        raise ValueError(f"size: expected a side or (height, width) in whole pixels, found {size!r}") from None
    return height, width


def size_text(size: int) -> str:
    """Return e.g. ``51.1 MB``."""
    value, unit = float(size), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}" if unit != "bytes" else f"{size} bytes"


def _open_source(source: Any) -> Source:
    if isinstance(source, (str, Path)):
        return ImageFolder(source)
    if isinstance(source, Source):
        return source
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        return DatasetSource(source)
    raise TypeError(f"source: expected a folder, a Source or a map-style data set, found {type(source).__name__}")


def _check_source(source: Source) -> None:
    """Tell now what would keep the index from being read in the end."""
    if not len(source):
        raise SourceError("source: expected records, found none")
    for name in source.schema:
        if name in RESERVED or "/" in name:
            raise SourceError(f"column {name!r}: expected another name: this one has a meaning of its own")
    if source.classes is not None and source.schema.get("label") != Column("<i8"):
        raise SourceError(
            f"source: expected a column 'label' of int64 that counts into classes, found {source.schema.get('label')}"
        )


@contextlib.contextmanager
def _pillow_quiet(here: bool) -> Iterator[None]:
    """Keep what Pillow warns of to itself, where it decodes in this process; a warning as an error would reject."""
    with warnings.catch_warnings() if here else contextlib.nullcontext():
        if here:
            warnings.filterwarnings("ignore", module=r"PIL\.")
        yield


class _Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
    monitor_interval = 0  # or the first bar of a process would start a thread that never ends
    _lock = threading.RLock()  # tqdm's own is one of multiprocessing, whose making fixes the user's start method


#: Below 32 MiB, the largest block that teaches glibc.
_LARGE = (32 << 20) - (64 << 10)

#: What comes of a range of rows: their records, those rejected with reasons, how many were converted.
Batch = tuple[np.ndarray, list[tuple[int, str]], int]


class _Work:
    """Converts ranges of rows. Runs in a worker; of what it makes only the records travel back."""

    def __init__(self, job: "_Build", own_process: bool) -> None:
        if own_process:
            # Limits and warnings of Pillow's are the process's: here, and only here, they are ours to set.
            # --max-pixels is the limit, and what Pillow warns of goes to the ledger if it matters.
            Image.MAX_IMAGE_PIXELS = None
            warnings.filterwarnings("ignore", module=r"PIL\.")
            if not isinstance(job.source, DatasetSource):  # whose own output is the user's affair
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where libtiff tells each fault of a file
            # glibc maps large blocks afresh each time, page faults and all, until it has seen one as large
            # freed: 2 % of a picture with Pillow, 10 % with pillow-simd.
            bytes(_LARGE)
            # One process a core is what shares the cores out; and the threads that the parent's torch may have
            # did not come along when it forked, so that the first operation to use them would never end.
            if job.settings.resizer == "torch":
                import_torch()
            if "torch" in sys.modules:
                sys.modules["torch"].set_num_threads(1)
        self.source, self.schema, self.array = job.source, job.source.schema, job.array
        self.classes = None if self.source.classes is None else len(self.source.classes)
        self.converter = Converter(job.settings, self.schema)
        self.writer = ShardWriter(job.folder, job.array)
        self.journal = job.journal
        self.reasons = job.journal.reasons() if job.resumed else {}
        self.resumed = job.resumed
        self.blank = zlib.crc32(bytes(job.array.row_bytes))

    def __call__(
        self, task: workers.Task, begin: Callable[[int], None]
    ) -> tuple[np.ndarray, list[tuple[int, str]], int]:
        empty = np.zeros(task.stop - task.start, self.journal.dtype)
        records = self.journal.read(*task) if self.resumed else empty
        rejects: list[tuple[int, str]] = []
        converted = 0
        for position, row in enumerate(range(*task)):
            begin(row)
            if self.resumed and self._done(row, records[position]):
                if records["status"][position] == REJECTED:
                    rejects.append((row, self.reasons[row]))
                continue
            converted += 1
            records[position] = empty[position]
            reason = self._convert(row, records[position])
            if reason:
                rejects.append((row, reason))
        seal(records)
        return records, rejects, converted

    def close(self) -> None:
        self.writer.close()

    def _done(self, row: int, record: np.void) -> bool:
        if not intact(record) or (record["status"] == REJECTED and row not in self.reasons):
            return False
        return zlib.crc32(self.writer.read(row)) == int(record["crc32"])

    def _found(self, row: int, record: np.void) -> Row:
        """Convert one record, and put its columns into that of its row."""
        try:
            found = self.converter(self.source[row])
            for name, column in self.schema.items():
                value = found.columns[name]
                if np.shape(value) != column.shape:  # NumPy would repeat a single number
                    raise DecodeError(f"column {name!r}: expected shape {column.shape}, found {np.shape(value)}")
                record[f"column/{name}"] = value
        except DecodeError:
            raise
        except Exception as error:  # a data set of the user's may raise anything; it costs this one record
            raise DecodeError(f"{type(error).__name__}: {error}") from error
        if self.classes is not None and not 0 <= record["column/label"] < self.classes:
            raise DecodeError(f"label: expected 0 to {self.classes - 1}, found {record['column/label']}")
        return found

    def _convert(self, row: int, record: np.void) -> str:
        """Fill one row and its record; return why it was rejected, if it was."""
        try:
            found = self._found(row, record)
        except DecodeError as error:
            record["status"], record["crc32"] = REJECTED, self.blank
            self.writer.blank(row)  # an earlier build, or a worker that was lost meanwhile, may have come further
            return error.reason or "no reason was given"
        self.writer.write(row, found.pixels)
        record["status"], record["flags"], record["size"] = DONE, found.flags, found.size
        record["crc32"] = zlib.crc32(found.pixels)
        record["total"], record["squares"] = found.total, found.squares
        return ""


#: What a folder of an unfinished build may hold besides shards, index and ledger.
_OURS = ("plan.json", "publish.json", "source", "rows", "rejects.jsonl")


class _Build:
    """One build: its plan, its folder, and how that becomes a data set."""

    def __init__(
        self, source: Source, output: Path, settings: Settings, shard_size: int | None, overwrite: bool
    ) -> None:
        self.source, self.output, self.settings, self.overwrite = source, output, settings, overwrite
        self.index, self.folder, self.ledger = output_paths(output)
        self.shape = (*settings.size, settings.channels)
        rows, row_bytes = len(source), int(np.prod(self.shape, dtype=np.int64))
        held = rows if shard_size is None else (shard_size - HEADER_BYTES) // row_bytes
        if held < 1:
            raise ValueError(
                f"shard_size: expected at least {HEADER_BYTES + row_bytes:,} bytes, the size of a shard of one row, "
                f"found {shard_size:,}"
            )
        names = shard_names(output, -(-rows // held))
        self.array = Array("image", "|u1", self.shape, plan_shards(names, rows, held, row_bytes))
        self.journal = Journal(self.folder, rows, record_type(settings.channels, source.schema))
        self.plan = {
            "settings": settings.as_dict(),
            "libraries": settings.libraries(),
            "shards": [shard.file for shard in self.array.shards],
            "rows a shard": held,
            "classes": None if source.classes is None else list(source.classes),
            "columns": {
                name: [column.dtype, list(column.shape), column.points] for name, column in source.schema.items()
            },
        }
        self.resumed = False
        self.converted = 0

    @contextlib.contextmanager
    def begin(self) -> Iterator[None]:
        """Take the folder of the build, with its lock, after all that can be checked beforehand."""
        if not self.output.parent.is_dir():
            raise BuildError(
                f"{self.output.parent}: expected a folder for the output, found none. Make it first", path=self.output
            )
        try:
            if not self._publishing:
                self._check_existing()
                self._check_room()
            fresh = not _exists(self.folder)
            if not fresh and (self.folder.is_symlink() or not self.folder.is_dir()):
                raise BuildError(
                    f"{self.folder}: expected a folder of memload's own, found a link or a file. Move it away",
                    path=self.output,
                )
            with locked(self.folder):
                try:
                    if not self._publishing:
                        self._check_existing()  # again: another build may have come to its end meanwhile
                    self._take_up()
                except BuildError:
                    raise
                except BaseException:
                    if fresh:
                        shutil.rmtree(self.folder)
                    raise
                yield
        except OSError as error:
            raise BuildError(
                f"{self.output}: expected to be able to write there, found: {error}. Mend that or choose another place",
                path=self.output,
            ) from error

    @property
    def _publishing(self) -> bool:
        return all((self.folder / name).exists() for name in ("publish.json", "plan.json"))

    def _check_existing(self) -> None:
        shards = [self.output.parent / shard.file for shard in self.array.shards]
        for path in shards:
            own = path.with_suffix(".idx")
            if path != self.output and own.exists():
                raise BuildError(
                    f"{path}: expected a name for a shard, found the data set of {own.name}. Choose another output",
                    path=self.output,
                )
        # All names that will be written, so that one that is too long is told now.
        paths = [self.index, self.ledger, self.folder / f"{self.index.name}.tmp", *shards]
        there = [path for path in paths if _exists(path) and path.parent != self.folder]
        if there and not self.overwrite:
            raise BuildError(
                f"{there[0]}: expected no such file yet, found one. Choose another output, or say --overwrite",
                path=self.output,
            )
        for path in there:
            if path.is_dir():
                raise BuildError(f"{path}: expected a file to write to, found a folder", path=self.output)

    def _check_room(self) -> None:
        total = sum(shard.bytes for shard in self.array.shards)
        taken = 0
        for shard in self.array.shards:
            with contextlib.suppress(OSError, AttributeError):  # not begun yet; no st_blocks on Windows
                taken += (self.folder / shard.file).stat().st_blocks * 512
        free = shutil.disk_usage(self.output.parent).free
        what = f"{describe((len(self.source), *self.shape), '|u1')}, {size_text(total)}"
        if total - taken > free:
            raise BuildError(
                f"{self.output}: expected {size_text(total - taken)} of room on the disk for {what}, found "
                f"{size_text(free)}. Make room, choose a smaller --size or another disk",
                path=self.output,
            )
        logger.info("%s: %s; %s free on the disk", self.output, what, size_text(free))

    def _take_up(self) -> None:
        """Go on with an unfinished build of the same plan, or begin."""
        before = read_json(self.folder / "plan.json")
        listing = self.source.listing()
        if before is not None:
            differs = differences(before, self.plan)
            changes = listing_changes(self.folder, listing)
            if changes:
                differs.append(f"the source: {changes}")
            if not differs:
                self.resumed = True
                if not self._publishing:
                    self.journal.create()
                    ShardWriter(self.folder, self.array).create()
                    done = int(np.count_nonzero(self.journal.mapped()["status"]))
                    logger.info("%s: going on with an unfinished build, %s rows done", self.output, f"{done:,}")
                return
            if not self.overwrite:
                raise BuildError(
                    f"{self.folder}: expected the unfinished build of the same command, found differences: "
                    f"{'; '.join(differs)}. Give the same settings and source to go on with it, or say --overwrite "
                    "to begin anew",
                    path=self.output,
                )
        there = [path for path in self.folder.iterdir() if path.name != "lock"]
        ours = {*_OURS, self.index.name, self.ledger.name}
        shard = _shard_pattern(self.output)
        foreign = [
            path.name for path in there if not shard.fullmatch(path.name) and path.name.removesuffix(".tmp") not in ours
        ]
        if foreign:
            raise BuildError(
                f"{self.folder}: expected a folder of memload's own, found other files ({', '.join(foreign[:3])}). "
                "Move them away, or choose another output",
                path=self.output,
            )
        for path in there:
            path.unlink()
        write_listing(self.folder, listing)
        self.journal.create()
        ShardWriter(self.folder, self.array).create()
        write_json(self.folder / "plan.json", self.plan)  # last: without it the folder is as good as empty

    def convert(self, count: int, timeout: float, on_error: OnError, progress: bool | None) -> None:
        """Convert all rows that are not done."""
        if self._publishing:
            return
        rows = len(self.source)
        chunk = max(1, min(32, rows // (4 * max(1, count))))
        tasks = (workers.Task(start, min(start + chunk, rows)) for start in range(0, rows, chunk))
        results = workers.run(
            functools.partial(_Work, self, count > 0), tasks, num_workers=min(count, rows), timeout=timeout
        )
        terminal = sys.stderr is not None and sys.stderr.isatty()  # None where it was closed
        quiet = not terminal if progress is None else not progress
        rejected = 0
        with (
            contextlib.closing(results),
            _pillow_quiet(count == 0),
            _Bar(total=rows, unit=" images", disable=quiet, smoothing=0.1) as bar,
        ):
            for result in results:
                if isinstance(result, workers.Lost):
                    start, records, rejects, converted = result.row, *self._lost(result)
                else:
                    start, (records, rejects, converted) = result[0].start, result[1]
                self.journal.write(start, records, rejects)
                self.converted += converted
                rejected += len(rejects)
                bar.set_postfix_str(f"{rejected} rejected", refresh=False)
                bar.update(len(records))
                if rejects and on_error == "raise":
                    row, reason = rejects[0]
                    raise DecodeError(reason, key=self.source.keys[row])

    def _lost(self, lost: workers.Lost) -> Batch:
        record = np.zeros(1, self.journal.dtype)
        record["status"], record["crc32"] = REJECTED, zlib.crc32(bytes(self.array.row_bytes))
        seal(record)
        writer = ShardWriter(self.folder, self.array)
        try:
            writer.blank(lost.row)
        finally:
            writer.close()
        return record, [(lost.row, lost.reason)], 1

    def finish(self) -> Index:
        """Make the index, flush everything to the disk, and rename it all into place, the index last."""
        if not self._publishing:
            records = self.journal.mapped()
            used = np.flatnonzero(records["status"] == DONE)
            reasons = self.journal.reasons()
            if not used.size:
                told = "; ".join(f"{self.source.keys[row]}: {reason}" for row, reason in sorted(reasons.items())[:3])
                shutil.rmtree(self.folder)
                raise BuildError(
                    f"{self.output}: expected at least one usable picture, found {len(records):,} that are not: {told}",
                    path=self.output,
                )
            for shard in self.array.shards:
                sync(self.folder / shard.file)
            rejected = np.flatnonzero(records["status"] == REJECTED).tolist()
            if rejected:
                self._write_ledger({row: reasons[row] for row in rejected})
            self._make_index(records, used).write(self.folder / self.index.name)
            publish = {"remove": self._stale_shards(), "ledger": bool(rejected)}
            write_json(self.folder / "publish.json", publish)
        self._publish()
        return Index.read(self.index)

    def _stale_shards(self) -> list[str]:
        """Return the shards of the data set that is being replaced, which nothing else can be made of."""
        pattern = _shard_pattern(self.output)
        stale = {name for name in _shards_of(self.index) if pattern.fullmatch(name)}
        stale -= {shard.file for shard in self.array.shards}
        if stale:  # an index may stand over the shards of another
            for other in self.output.parent.glob("*.idx"):
                if other != self.index:
                    stale -= _shards_of(other)
        return sorted(stale)

    def _make_index(self, records: np.ndarray, used: np.ndarray) -> Index:
        from memload import __version__

        columns = {name: np.ascontiguousarray(records[f"column/{name}"][used]) for name in self.source.schema}
        classes = None if self.source.classes is None else tuple(self.source.classes)
        statistics = _pixel_statistics(records, used, self.shape)
        if classes is not None:
            statistics["class_counts"] = class_counts(columns["label"], len(classes))
        keys = self.source.keys
        return Index(
            path=self.index,
            arrays=(self.array,),
            row=used.astype(np.int64),
            flags=np.ascontiguousarray(records["flags"][used]),
            keys=(keys if isinstance(keys, Keys) else Keys.of(list(keys))).take(used),
            columns=columns,
            crc32={"image": np.ascontiguousarray(records["crc32"])},
            classes=classes,
            points=tuple(name for name, column in self.source.schema.items() if column.points),
            build={
                "memload": __version__,
                "settings": self.settings.as_dict(),
                "libraries": self.plan["libraries"],
                "records": len(records),
                "rejected": len(records) - len(used),
            },
            statistics=statistics,
        )

    def _write_ledger(self, reasons: Mapping[int, str]) -> None:
        path = self.folder / self.ledger.name
        with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
            ledger = csv.writer(file)
            ledger.writerow(["path", "reason"])
            ledger.writerows(
                (self.source.keys[row], reason.encode("utf-8", "backslashreplace").decode())  # an exception's own text
                for row, reason in reasons.items()
            )
        sync(path)

    def _publish(self) -> None:
        """Rename everything into place. Begun again after a crash it goes on where it stopped."""
        index = self.folder / self.index.name
        if index.exists():
            publish = read_json(self.folder / "publish.json")
            self.index.unlink(missing_ok=True)  # from here on until the end there is no data set
            sync(self.output.parent)
            for shard in self.array.shards:
                _move(self.folder / shard.file, self.output.parent)
            for name in publish["remove"]:
                (self.output.parent / name).unlink(missing_ok=True)
            if publish["ledger"]:
                _move(self.folder / self.ledger.name, self.output.parent)
            else:
                self.ledger.unlink(missing_ok=True)
            sync(self.output.parent)
            _move(index, self.output.parent)
            sync(self.output.parent)
        # This one first: without it, whatever else is left of the folder, the data set beside it counts as complete,
        # and is left alone.
        (self.folder / "publish.json").unlink()
        shutil.rmtree(self.folder)


def _shard_pattern(output: Path) -> re.Pattern[str]:
    """Return what the shards of an output are called, however many there are."""
    return re.compile(re.escape(output.stem) + r"(-\d{5,}-of-\d{5,})?\.bin")


def _shards_of(index: Path) -> set[str]:
    try:
        return {shard.file for array in Index.read(index).arrays for shard in array.shards}
    except FormatError:  # what cannot be read names no files
        return set()


def _exists(path: Path) -> bool:
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True


def _move(path: Path, folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # moved before a crash
        os.replace(path, folder / path.name)  # noqa: PTH105


def _pixel_statistics(records: np.ndarray, used: np.ndarray, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return mean and standard deviation a channel, of pixels from 0 to 1, and the sizes of the sources."""
    pixels = used.size * shape[0] * shape[1]
    totals = [int(total) for total in records["total"][used].sum(axis=0)]
    squares = [int(square) for square in records["squares"][used].sum(axis=0)]
    # In whole numbers to the end, so that no order of summing shows in the result.
    variances = [
        (pixels * square - total * total) / (pixels * pixels) for total, square in zip(totals, squares, strict=True)
    ]
    sizes = records["size"][used]
    shorter = np.searchsorted(_SIDES, sizes.min(axis=1), side="right") - 1
    counts = np.bincount(shorter, minlength=len(_SIDES))
    return {
        "mean": [total / pixels / 255 for total in totals],
        "std": [variance**0.5 / 255 for variance in variances],
        "source_width": [int(sizes[:, 0].min()), int(sizes[:, 0].max())],
        "source_height": [int(sizes[:, 1].min()), int(sizes[:, 1].max())],
        "source_shorter_side": {str(side): int(count) for side, count in zip(_SIDES, counts, strict=True) if count},
    }
