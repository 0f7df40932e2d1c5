"""The offline pipeline: source → decode → resize → write, in parallel, resumable."""

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from PIL import Image
from tqdm import tqdm

from memload.building.conversion import ArraySettings, Settings
from memload.building.decoders import MAX_PIXELS, Mode
from memload.building.journal import DONE, REJECTED, is_intact
from memload.building.manifest import Manifest
from memload.building.pool import Call, Chunk, Lost, call_here, call_in_process, check_start, run
from memload.building.resizing import Fit, Interpolation
from memload.building.sources import Column, DatasetSource, ImageFolder, Source
from memload.building.statistics import statistics
from memload.building.worker import RowWork
from memload.building.workspace import Workspace, size_text
from memload.errors import BuildError, DecodeError, SourceError
from memload.machine import available_cores
from memload.storage.format import RESERVED, output_paths
from memload.storage.index import Index, class_counts
from memload.storage.keys import Keys
from memload.storage.tensors import MAX_HEADER_BYTES, TYPES

logger = logging.getLogger("memload")

OnError = Literal["skip", "raise"]

#: What an index holds besides the names of classes, at most: settings, columns, thousands of shards.
_OTHER_METADATA = 4 << 20

#: Rows in a chunk, at most; fewer where the workers would not all get several chunks.
_CHUNK_ROWS = 32


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
    _check_options(timeout, on_error, num_workers, max_pixels)
    output = _check_paths(source, output)
    settings: Settings | ArraySettings
    if mode == "array":
        _check_arrays(source, pictures)
    else:
        settings = _settings(sides, mode, pictures)
        settings.converter({})  # an error of the decoder's should not wait for the source
    count = available_cores() if num_workers is None else num_workers
    check_start(count)
    call = functools.partial(call_in_process, timeout=timeout) if count else call_here

    records = _open_source(source, call)
    if mode == "array":
        settings = _array_settings(records, sides, call)
    workspace = Workspace(records, output, settings, shard_size=shard_size, overwrite=overwrite)
    started = time.perf_counter()
    converted = 0
    try:
        with workspace.opened():
            started = time.perf_counter()
            if not workspace.is_publishing:
                _check_same(workspace, call)
                converted = _convert(workspace, count, timeout, on_error, progress)
                _complete(workspace)
            workspace.publish()
    except OSError as error:
        raise BuildError(
            f"{output}: cannot be written: {error}. Make room or mend that, then run the same command again: it goes "
            "on where it stopped.",
            path=output,
        ) from error
    return _report(workspace, converted, time.perf_counter() - started, count)


def _report(workspace: Workspace, converted: int, seconds: float, num_workers: int) -> BuildReport:
    index = Index.read(workspace.index)
    rejected = index.image.rows - len(index)
    return BuildReport(
        path=workspace.output,
        samples=len(index),
        classes=index.classes,
        columns=tuple(index.columns),
        rejected=rejected,
        bytes=sum(shard.bytes for shard in index.image.shards),
        shape=workspace.settings.shape,
        dtype=np.dtype(index.image.descr).name,
        converted=converted,
        seconds=seconds,
        num_workers=num_workers,
        libraries=index.build["libraries"],
        notes=tuple(workspace.source.notes),
        ledger=workspace.ledger if rejected else None,
    )


def _check_options(timeout: float, on_error: str, num_workers: int | None, max_pixels: int) -> None:
    if not timeout > 0:
        raise ValueError(f"timeout: {timeout} is not above 0 seconds.")
    if on_error not in ("skip", "raise"):
        raise ValueError(f"on_error: {on_error!r} is neither 'skip' nor 'raise'.")
    if num_workers is not None and num_workers < 0:
        raise ValueError(f"num_workers: {num_workers} is negative.")
    limit = Image.MAX_IMAGE_PIXELS
    if num_workers == 0 and limit is not None and max_pixels > 2 * limit:
        raise ValueError(
            f"max_pixels: {max_pixels:,} is too large for num_workers=0, as Pillow's own limit of {2 * limit:,} holds "
            "in this process. Use workers, or raise PIL.Image.MAX_IMAGE_PIXELS."
        )


def _check_paths(source: Any, output: str | Path) -> Path:
    if "\0" in str(output):
        raise ValueError(f"output: {str(output)!r:.200} contains a NUL, which no file name can.")
    output = Path(output)
    is_folder = isinstance(source, (str, Path))
    if output.suffix != ".bin" and is_folder and Path(source).suffix == ".bin":
        raise ValueError(
            f"source and output: {str(source)!r} is to be read and {str(output)!r} written. Are they swapped?"
        )
    output_paths(output)
    return output


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


def _array_settings(source: Source, sides: tuple[int, int] | None, call: Call) -> ArraySettings:
    try:
        settings: ArraySettings = call(functools.partial(ArraySettings.of, source))
    except TimeoutError as error:
        raise SourceError(f"data set: its first samples cannot be read: {error}.") from None
    if sides not in (None, settings.shape[:2]):
        raise ValueError(
            f"size: expected that of the arrays, {settings.shape[:2]}, found {sides}: mode 'array' stores them as they "
            "are. Leave it out, or resize them in the data set"
        )
    return settings


def _open_source(source: Any, call: Call) -> Source:
    records: Source
    if isinstance(source, (str, Path)):
        records = ImageFolder(source)
    elif isinstance(source, Source):
        records = source
    elif hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        records = DatasetSource(source, call)
    else:
        raise TypeError(
            f"source: {type(source).__name__} is neither a folder nor a Source nor a map-style data set."
        )
    _check_source(records)
    return records


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
    if size > MAX_HEADER_BYTES - _OTHER_METADATA:
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


def _check_same(workspace: Workspace, call: Call) -> None:
    """Convert up to eight finished samples again, and refuse to go on if one is another now.

    This is for samples that are no files: nothing else tells that they have changed.
    """
    if not workspace.resumed:
        return
    records = workspace.journal.mapped()
    is_compared = (records["status"] == DONE) & (records["file_size"] < 0)
    limit = (
        Image.MAX_IMAGE_PIXELS
    )  # larger ones would be rejected where this process itself converts
    if limit is not None:
        is_compared &= records["size"].astype(np.int64).prod(axis=1) <= limit
    rows = [row for row in np.flatnonzero(is_compared).tolist() if is_intact(records[row])]
    if not rows:
        return
    chosen = sorted({rows[round(position)] for position in np.linspace(0, len(rows) - 1, 8)})

    def compare() -> str:
        with contextlib.closing(RowWork(workspace, in_worker=False)) as work:
            return work.difference(chosen)

    if difference := call(compare):
        workspace.refuse(difference)


def _convert(
    workspace: Workspace,
    num_workers: int,
    timeout: float,
    on_error: OnError,
    progress: bool | None,
) -> int:
    """Convert all rows that are not done; return how many they were."""
    rows = len(workspace.source)
    size = max(1, min(_CHUNK_ROWS, rows // (4 * max(1, num_workers))))
    results = run(
        functools.partial(RowWork, workspace, in_worker=num_workers > 0),
        (Chunk(start, min(start + size, rows)) for start in range(0, rows, size)),
        num_workers=min(num_workers, rows),
        timeout=timeout,
    )
    is_terminal = sys.stderr is not None and sys.stderr.isatty()  # None if it was closed
    is_shown = is_terminal if progress is None else progress
    converted = rejected = 0
    with (
        contextlib.closing(results),
        _pillow_quiet(num_workers == 0),
        _Bar(total=rows, unit=" images", disable=not is_shown, smoothing=0.1) as bar,
    ):
        for result in results:
            if isinstance(result, Lost):
                chunk = Chunk(result.row, result.row + 1)
                with contextlib.closing(RowWork(workspace, in_worker=False)) as work:
                    outcome = work.give_up(*result)
            else:
                chunk, outcome = result
            converted += outcome.converted
            rejected += len(outcome.rejects)
            bar.set_postfix_str(f"{rejected} rejected", refresh=False)
            bar.update(chunk.stop - chunk.start)
            if outcome.rejects and on_error == "raise":
                _raise_reject(workspace.source, *outcome.rejects[0])
    return converted


def _raise_reject(source: Source, row: int, reason: str) -> None:
    key, root = source.keys[row], getattr(source, "root", None)
    what = "it" if root is None else f"{root}/{key}"
    raise DecodeError(
        f"{reason}. Mend or remove {what} and run the same command again, or say --on-error skip to leave such "
        "samples out.",
        key=key,
    )


def _complete(workspace: Workspace) -> None:
    """Write the index and the ledger of a build whose rows are all converted."""
    records = workspace.journal.mapped()
    used = np.flatnonzero(records["status"] == DONE)
    reasons = workspace.journal.reasons()
    rejected = {row: reasons[row] for row in np.flatnonzero(records["status"] == REJECTED).tolist()}
    if not used.size:
        workspace.remove()
        samples = list(rejected.items())[:3]
        examples = "; ".join(f"{workspace.source.keys[row]}: {reason}" for row, reason in samples)
        raise BuildError(
            f"{workspace.output}: none of {len(records):,} pictures{_in_folder(workspace.source)} can be used: "
            f"{examples}. Check the pictures, and the folder (--root) if they come from a manifest.",
            path=workspace.output,
        )
    if len(rejected) > used.size:
        reason, times = Counter(rejected.values()).most_common(1)[0]
        logger.warning(
            f"{workspace.output}: {len(rejected):,} of {len(records):,} pictures{_in_folder(workspace.source)} cannot "
            f"be used, {times:,} of them because: {reason!r:.200}. See {workspace.ledger}"
        )
    workspace.complete(_make_index(workspace, records, used), rejected)


def _in_folder(source: Source) -> str:
    root = getattr(source, "root", None)
    return "" if root is None else f" in {root}"


def _make_index(workspace: Workspace, records: np.ndarray, used: np.ndarray) -> Index:
    from memload import __version__

    source, keys = workspace.source, workspace.source.keys
    columns = {
        name: np.ascontiguousarray(records[f"column/{name}"][used]) for name in source.schema
    }
    classes = None if source.classes is None else tuple(source.classes)
    facts = statistics(records, used, workspace.array)
    if classes is not None:
        facts["class_counts"] = class_counts(columns["label"], len(classes))
    return Index(
        path=workspace.index,
        arrays=(workspace.array,),
        row=used.astype(np.int64),
        flags=np.ascontiguousarray(records["flags"][used]),
        keys=(keys if isinstance(keys, Keys) else Keys.of(list(keys))).take(used),
        columns=columns,
        crc32={"image": np.ascontiguousarray(records["crc32"])},
        classes=classes,
        points=tuple(name for name, column in source.schema.items() if column.points),
        build={
            "memload": __version__,
            "settings": workspace.settings.as_dict(),
            "libraries": workspace.plan["libraries"],
            "records": len(records),
            "rejected": len(records) - len(used),
        },
        statistics=facts,
    )
