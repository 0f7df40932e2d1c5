"""The offline pipeline: source → decode → resize → write, in parallel, in order, resumable."""

import contextlib
import functools
import json
import logging
import operator
import os
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from PIL import Image
from tqdm import tqdm

from memload.building import workers
from memload.building.conversion import ArraySettings, Settings
from memload.building.decoders import MAX_PIXELS, Mode
from memload.building.journal import DONE, REJECTED, remove
from memload.building.manifest import Manifest
from memload.building.resizing import Fit, Interpolation
from memload.building.sources import Column, DatasetSource, ImageFolder, Source
from memload.building.statistics import statistics
from memload.building.unfinished import Unfinished, size_text
from memload.building.work import RowWork, give_up
from memload.errors import BuildError, DecodeError, SourceError
from memload.machine import available_cores
from memload.storage.format import RESERVED, output_paths
from memload.storage.index import MAX_HEADER_BYTES, TYPES, Index, class_counts
from memload.storage.keys import Keys

logger = logging.getLogger("memload")

OnError = Literal["skip", "raise"]

#: What an index tells besides names of classes, at most: settings, columns, thousands of shards.
_FACTS = 4 << 20


@dataclass(frozen=True)
class BuildReport:
    """What a build did. ``str()`` of it is the closing line."""

    path: Path  #: the output
    samples: int  #: pictures in the data set
    classes: Sequence[str] | None  #: the names of the classes, if they have names
    columns: Sequence[str]  #: the names of the columns, such as ``label``
    rejected: int  #: pictures left out; the ledger says why
    bytes: int  #: size of all shards
    shape: tuple[int, int, int]  #: (H, W, C)
    dtype: str  #: such as ``uint8``
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
        before = self.samples + self.rejected - self.converted
        kept = f", {before:,} done before" if before else ""
        ledger = f" (see {self.ledger})" if self.ledger else ""
        versions = [f"{name} {version}" for name, version in self.libraries.items()]
        jpeg = [version for version in versions if version.startswith("libjpeg")]
        others = [version for version in versions if version not in jpeg]
        libraries = ", ".join(others) + (f" ({', '.join(jpeg)})" if jpeg else "")
        labels = "" if "label" in self.columns else ", no labels"
        if self.classes is not None:
            names = ", ".join(self.classes[:3]) + (", …" if len(self.classes) > 3 else "")
            labels = f", {len(self.classes):,} {'class' if len(self.classes) == 1 else 'classes'} ({names})"
        return (
            f"{self.path}: {self.samples:,} samples of {shape} {self.dtype}{labels}, {size_text(self.bytes)}, "
            f"{self.rejected:,} rejected{ledger}; {self.images_per_second:,.0f} images/s in {self.seconds:.1f} s by "
            f"{self.num_workers} workers{kept}; {libraries}"
        )


def build(
    source: str | Path | Source | Any,
    output: str | Path,
    *,
    size: int | tuple[int, int] | None = None,
    fit: Fit = "crop",
    interpolation: Interpolation = "bilinear",
    mode: Mode | Literal["array"] = "RGB",
    decoder: Literal["pillow", "jpeg4py"] = "pillow",
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
    `memload.building.sources.DatasetSource`). ``output`` ends in ``.bin``; the index stands beside it, ending in ``.idx``.

    ``size`` is the side of the stored pictures, or (height, width); by default 256. ``fit`` says how they come to it:
    ``crop`` covers it and cuts evenly (torchvision's Resize and CenterCrop, to the bit), ``squash`` changes the
    aspect ratio, ``pad`` puts ``fill`` around. ``fast`` computes only what is kept, from a JPEG decoded at a half, a
    quarter or an eighth where that leaves twice the size or more. ``strict``, ``decoder``,
    ``mode``, ``background``, ``exif`` and ``max_pixels`` are those of `memload.building.decoders.Decoder`.

    ``mode="array"`` stores the samples of a data set that are arrays ``(H, W)`` or ``(H, W, C)``, or tensors ``(C, H,
    W)``, as they are, bit for bit: uint8, uint16, float16 or float32 of any number of channels. The first that can be
    used gives shape and type; others are rejected. What is said above of pictures has no place beside it, but for a
    ``size`` that is theirs. In the statistics integers count as a share of their type's largest value, floats as
    they are; mean and std are left out where there are NaN or infinities.

    ``on_error="skip"`` lists pictures that cannot be used in a ledger (``out.rejects.csv``) and goes on; ``"raise"``
    stops at the first. ``num_workers`` processes decode, by default one a core; 0 decodes in this process, without
    protection from pictures that crash the decoder or take more than ``timeout`` seconds. ``shard_size`` splits
    the pixels into files of at most so many bytes. ``progress`` shows a bar; by default if stderr is a terminal.

    Blocks until done. A build that was interrupted, at whatever moment, goes on where it stopped when it is
    called again, and ends with the same bytes. The result does not depend on ``num_workers``. An ``output``
    that exists is left alone unless ``overwrite`` is given, and then until the new one is complete.

    Raises ValueError, SourceError, DependencyError, BuildError, and with ``on_error="raise"`` DecodeError.
    """
    sides = None if size is None else _pair(size)
    if not timeout > 0:
        raise ValueError(f"timeout: expected seconds above 0, found {timeout}")
    pictures = {
        "fit": fit,
        "interpolation": interpolation,
        "decoder": decoder,
        "fast": fast,
        "strict": strict,
        "exif": exif,
        "background": background,
        "fill": fill,
        "max_pixels": max_pixels,
    }
    settings = None if mode == "array" else _settings(sides, mode, pictures)
    if on_error not in ("skip", "raise"):
        raise ValueError(f"on_error: expected 'skip' or 'raise', found {on_error!r}")
    if num_workers is not None and num_workers < 0:
        raise ValueError(f"num_workers: expected 0 or more, found {num_workers}")
    limit = Image.MAX_IMAGE_PIXELS
    if settings is not None and num_workers == 0 and limit is not None and max_pixels > 2 * limit:
        raise ValueError(
            f"max_pixels: expected at most {2 * limit:,} with num_workers=0, found {max_pixels:,}: in this process "
            "Pillow's own limit holds. Use workers, or raise PIL.Image.MAX_IMAGE_PIXELS"
        )
    if "\0" in str(output):
        raise ValueError(
            f"output: expected the path of a file, found a NUL in {str(output)!r:.200}"
        )
    output = Path(output)
    if (
        output.suffix != ".bin"
        and isinstance(source, (str, Path))
        and Path(source).suffix == ".bin"
    ):
        raise ValueError(
            f"source and output: expected a folder of images and a file name that ends in '.bin', found "
            f"{str(source)!r} and {str(output)!r}. Are they swapped?"
        )
    output_paths(output)
    if settings is None:
        _check_arrays(source, pictures)
    else:
        settings.converter({})  # what is missing is better told now
    count = available_cores() if num_workers is None else num_workers
    workers.check_start(count)
    aside = workers.aside if count else workers.here
    records = _open_source(source, aside)
    _check_source(records)
    made = settings or aside(functools.partial(_array_settings, records, sides))
    job = Unfinished(records, output, made, shard_size, overwrite)
    job.aside = aside
    with job.begin():
        started = time.perf_counter()
        try:
            converted = _convert(job, count, timeout, on_error, progress)
            index = _finish(job)
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
        classes=index.classes,
        columns=tuple(index.columns),
        rejected=rejected,
        bytes=sum(shard.bytes for shard in index.image.shards),
        shape=job.settings.shape,
        dtype=np.dtype(job.array.descr).name,
        converted=converted,
        seconds=seconds,
        num_workers=count,
        libraries=index.build["libraries"],
        notes=tuple(records.notes),
        ledger=job.ledger if rejected else None,
    )


def _pair(size: Any) -> tuple[int, int]:
    sides = size if isinstance(size, Sequence) else (size, size)
    try:
        if any(isinstance(side, bool) for side in sides):
            raise TypeError
        height, width = map(operator.index, sides)
    except (TypeError, ValueError):
        raise ValueError(
            f"size: expected a side or (height, width) in whole pixels, found {size!r}"
        ) from None
    return height, width


def _settings(sides: tuple[int, int] | None, mode: str, pictures: Mapping[str, Any]) -> Settings:
    modes = (*get_args(Mode), "array")
    if mode not in modes:
        raise ValueError(f"mode: expected one of {', '.join(modes)}, found {mode!r}")
    return Settings(sides or (256, 256), mode=mode, **pictures)


def _check_arrays(source: Any, pictures: Mapping[str, Any]) -> None:
    """Tell what has no place beside mode 'array'."""
    if isinstance(source, (str, Path, ImageFolder, Manifest)):
        raise ValueError(
            "mode 'array': expected a data set whose samples are arrays, found files. Use mode 'RGB' or 'L', or read "
            "them in a data set of your own"
        )
    for name, value in pictures.items():
        if value != getattr(Settings, name):  # its default
            raise ValueError(
                f"{name}: expected none with mode 'array', which stores arrays as they are, found {value!r}"
            )


def _array_settings(source: Source, sides: tuple[int, int] | None) -> ArraySettings:
    settings = ArraySettings.of(source)
    if sides not in (None, settings.shape[:2]):
        raise ValueError(
            f"size: expected that of the arrays, {settings.shape[:2]}, found {sides}: mode 'array' stores them as they "
            "are. Leave it out, or resize them in the data set"
        )
    return settings


def _open_source(source: Any, aside: Callable[[Callable[[], Any]], Any]) -> Source:
    if isinstance(source, (str, Path)):
        return ImageFolder(source)
    if isinstance(source, Source):
        return source
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        return DatasetSource(source, aside)
    raise TypeError(
        f"source: expected a folder, a Source or a map-style data set, found {type(source).__name__}"
    )


def _check_source(source: Source) -> None:
    """Tell now what would keep the index from being written, or read, in the end."""
    if not len(source):
        raise SourceError("source: expected records, found none")
    _check_names("keys", source.keys)
    if len(source.keys) != len(source):
        raise SourceError(
            f"keys: expected one for each of {len(source):,} records, found {len(source.keys):,}"
        )
    _check_names("names of columns", list(source.schema))
    for name, column in source.schema.items():
        _check_column(name, column)
    known = source.listing()
    if not isinstance(known, Mapping) or any(
        np.asarray(value).dtype.kind not in "biuf" for value in known.values()
    ):
        raise SourceError(
            "source: expected of listing() a dict of arrays of numbers, found something else"
        )
    if source.classes is None:
        return
    if source.schema.get("label") != Column("<i8"):
        raise SourceError(
            f"source: expected a column 'label' of int64 that counts into classes, found {source.schema.get('label')}"
        )
    names = list(source.classes)
    _check_names("classes", names)
    # As the index has them: a text of JSON within another, in which each class has a count too.
    size = len(json.dumps(json.dumps(names))) + 20 * len(names)
    if size > MAX_HEADER_BYTES - _FACTS:
        raise SourceError(
            f"classes: expected names that take less than {size_text(MAX_HEADER_BYTES)} in the index, found "
            f"{len(names):,} of {size_text(size)}. Give shorter ones, or leave them out"
        )


def _check_names(what: str, names: Sequence[str]) -> None:
    if isinstance(names, Keys):  # made of texts
        return
    for name in names:
        if not isinstance(name, str):
            raise SourceError(
                f"{what}: expected texts, found {type(name).__name__} {name!r:.40}. Turn them into str"
            )
        try:
            if what == "keys":
                os.fsencode(name)
            elif what != "classes":
                name.encode()  # no half characters, which an index has in names of files alone
        except UnicodeEncodeError as error:
            raise SourceError(
                f"{what}: expected texts that can be encoded, found {name!r:.40} ({error.reason})"
            ) from None


def _check_column(name: str, column: Column) -> None:
    if name in RESERVED or "/" in name:
        raise SourceError(
            f"column {name!r:.80}: expected another name: this one has a meaning of its own"
        )
    try:
        descr = np.dtype(column.dtype).newbyteorder("<").str
    except TypeError:
        descr = ""
    if descr not in TYPES.values():
        raise SourceError(
            f"column {name!r:.80}: expected numbers of at most 64 bits, found the type {column.dtype!r}. Turn it into "
            "numbers, or leave it out"
        )
    if column.points and (len(column.shape) != 2 or column.shape[1] != 2 or descr[1] != "f"):
        raise SourceError(
            f"column {name!r:.80}: expected points as floats of the shape (k, 2), found {descr} of {column.shape}"
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
    _lock = (
        threading.RLock()
    )  # tqdm's own is one of multiprocessing, whose making fixes the user's start method


def _convert(
    job: Unfinished, count: int, timeout: float, on_error: OnError, progress: bool | None
) -> int:
    """Convert all rows that are not done; return how many they were."""
    if job.publishing:
        return 0
    rows = len(job.source)
    chunk = max(1, min(32, rows // (4 * max(1, count))))
    tasks = (workers.Task(start, min(start + chunk, rows)) for start in range(0, rows, chunk))
    results = workers.run(
        functools.partial(RowWork, job, count > 0),
        tasks,
        num_workers=min(count, rows),
        timeout=timeout,
    )
    terminal = sys.stderr is not None and sys.stderr.isatty()  # None where it was closed
    quiet = not terminal if progress is None else not progress
    done = rejected = 0
    with (
        contextlib.closing(results),
        _pillow_quiet(count == 0),
        _Bar(total=rows, unit=" images", disable=quiet, smoothing=0.1) as bar,
    ):
        for result in results:
            if isinstance(result, workers.Lost):
                start, (records, rejects, converted) = result.row, give_up(job, *result)
            else:
                start, (records, rejects, converted) = result[0].start, result[1]
            job.journal.write(start, records, rejects)
            done += converted
            rejected += len(rejects)
            bar.set_postfix_str(f"{rejected} rejected", refresh=False)
            bar.update(len(records))
            if rejects and on_error == "raise":
                row, reason = rejects[0]
                key, root = job.source.keys[row], getattr(job.source, "root", None)
                raise DecodeError(
                    f"{reason}. Say --on-error skip to list such pictures and go on, or mend or remove "
                    f"{'it' if root is None else f'{root}/{key}'} and say --overwrite",
                    key=key,
                )
    return done


def _finish(job: Unfinished) -> Index:
    """Make the index, and publish it with everything else."""
    if not job.publishing:
        records = job.journal.mapped()
        used = np.flatnonzero(records["status"] == DONE)
        reasons = job.journal.reasons()
        if not used.size:
            told = "; ".join(
                f"{job.source.keys[row]}: {reason}" for row, reason in sorted(reasons.items())[:3]
            )
            remove(job.folder)
            raise BuildError(
                f"{job.output}: expected at least one usable picture{_place(job.source)}, found {len(records):,} that "
                f"are not: {told}. Check the pictures, and the folder (--root) if they come from a manifest",
                path=job.output,
            )
        rejected = {
            row: reasons[row] for row in np.flatnonzero(records["status"] == REJECTED).tolist()
        }
        if len(rejected) > used.size:
            reason, times = Counter(rejected.values()).most_common(1)[0]
            logger.warning(
                f"{job.output}: expected most pictures{_place(job.source)} to be usable, found {len(rejected):,} of "
                f"{len(records):,} that are not, {times:,} of them because: {reason!r:.200}. See {job.ledger}"
            )
        job.complete(_make_index(job, records, used), rejected)
        del records  # Windows removes no file that is mapped
    job.publish()
    return Index.read(job.index)


def _place(source: Source) -> str:
    """Say in which folder a source looks for its pictures, if in one."""
    root = getattr(source, "root", None)
    return "" if root is None else f" in {root}"


def _make_index(job: Unfinished, records: np.ndarray, used: np.ndarray) -> Index:
    from memload import __version__

    source = job.source
    columns = {
        name: np.ascontiguousarray(records[f"column/{name}"][used]) for name in source.schema
    }
    classes = None if source.classes is None else tuple(source.classes)
    facts = statistics(records, used, job.array)
    if classes is not None:
        facts["class_counts"] = class_counts(columns["label"], len(classes))
    keys = source.keys
    return Index(
        path=job.index,
        arrays=(job.array,),
        row=used.astype(np.int64),
        flags=np.ascontiguousarray(records["flags"][used]),
        keys=(keys if isinstance(keys, Keys) else Keys.of(list(keys))).take(used),
        columns=columns,
        crc32={"image": np.ascontiguousarray(records["crc32"])},
        classes=classes,
        points=tuple(name for name, column in source.schema.items() if column.points),
        build={
            "memload": __version__,
            "settings": job.settings.as_dict(),
            "libraries": job.plan["libraries"],
            "records": len(records),
            "rejected": len(records) - len(used),
        },
        statistics=facts,
    )
