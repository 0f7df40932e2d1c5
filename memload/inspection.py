"""Describe, verify and picture a finished data set."""

import io
import platform
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from memload.building.decoders import loaded_libraries
from memload.building.workspace import unfinished_build
from memload.errors import ChecksumError, FormatError, MissingError
from memload.machine import available_cores
from memload.storage.format import (
    FLAG_FALLBACK,
    FLAG_ORIENTED,
    FLAG_OUTSIDE,
    FORMAT_VERSION,
    HEADER_BYTES,
)
from memload.storage.index import Array, Index, Shard
from memload.storage.shards import Shards, check_header, check_shard

#: Bytes that a thread of `verify` reads at a time: enough for the full speed of any disk.
_READ = 8 << 20

#: A contact sheet has at most this many pixels, which take 400 MB of memory.
_MAX_SHEET_PIXELS = 1 << 27
#: A tile of a contact sheet is at most this many times as high as it is wide.
_MAX_TILE_RATIO = 8
_GAP, _CAPTION_HEIGHT = 4, 14


def info(path: str | Path) -> dict[str, Any]:
    """Return a description of a data set that can be written as JSON.

    ``"path"`` is ``path`` as it is given, and ``"index"`` is the index file. The shards are not
    read, but they have to exist and to have the right sizes; see `verify`. Raises FormatError if a
    file is missing or damaged.

    >>> memload.info("out.bin")["samples"]
    1281167
    """
    try:
        index = Index.open(path)
    except MissingError as error:
        progress = unfinished_build(path)
        raise MissingError(progress or str(error), path=path) from None
    image = index.image
    for array in index.arrays:
        for shard in array.shards:
            check_shard(index.path.parent / shard.file, shard, array, index.path)
    categories = {name: list(texts) for name, texts in index.categories.items()}
    flags = {"oriented": FLAG_ORIENTED, "fallback": FLAG_FALLBACK, "points_outside": FLAG_OUTSIDE}
    return {
        "path": str(path),
        "index": str(index.path),
        "format_version": FORMAT_VERSION,
        "fingerprint": index.fingerprint,
        "samples": len(index),
        "rows": image.rows,
        "rejected": index.build.get("rejected", 0),
        "shape": list(image.shape),
        "dtype": np.dtype(image.descr).name,
        "bytes": sum(shard.bytes for array in index.arrays for shard in array.shards),
        "shards": [shard.file for array in index.arrays for shard in array.shards],
        "columns": {
            name: {
                "dtype": column.dtype.name,
                "shape": list(column.shape),
                "points": name in index.points,
            }
            for name, column in index.columns.items()
        },
        "classes": None if index.classes is None else list(index.classes),
        **({"categories": categories} if categories else {}),
        "flags": {name: int(np.count_nonzero(index.flags & bit)) for name, bit in flags.items()},
        "statistics": dict(index.statistics),
        "build": dict(index.build),
    }


def environment() -> dict[str, str]:
    """Return the versions of memload, of its dependencies and of the decoders really loaded."""
    versions = {
        "memload": _installed("memload"),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    for name in ("numpy", "torch", "click", "tqdm"):
        versions[name] = _installed(name)
    for name, version in loaded_libraries().items():
        versions[f"{name} (loaded)"] = version
    # Pillow and pillow-simd may both be installed, one over the other. pip cannot tell which is
    # used.
    for name in ("pillow", "pillow-simd", "jpeg4py", "simplejpeg"):
        versions[f"{name} (installed)"] = _installed(name)
    return versions


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` found."""

    path: Path  #: the index
    rows: int
    bytes: int  #: read and compared
    problems: Sequence[str]  #: files that are missing, unreadable or of the wrong size
    bad_rows: Sequence[int]  #: rows whose bytes differ from their checksums
    bad_keys: Sequence[str]  #: the samples that use these rows

    @property
    def ok(self) -> bool:
        """Whether all files are as they were written."""
        return not self.problems and not self.bad_rows

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON has it, with the path as ``"index"``."""
        facts = {"ok": self.ok, **vars(self), "index": str(self.path)}
        del facts["path"]
        return facts

    def __repr__(self) -> str:
        found = "all as they were written"
        if not self.ok:
            found = f"{len(self.bad_rows):,} of them changed, {len(self.problems):,} problems"
        return f"VerifyReport({self.path}: {self.rows:,} rows, {self.bytes:,} bytes, {found})"


class _Part(NamedTuple):
    """Some consecutive rows of a shard."""

    file: Path
    row_bytes: int
    start: int  #: number of the first row within the shard
    first: int  #: number of the same row within the array
    checksums: np.ndarray  #: what the index says of these rows


def verify(path: str | Path, *, num_threads: int | None = None) -> VerifyReport:
    """Read all files of a data set and compare them with the checksums in its index.

    Does not stop at the first error. Reads with ``num_threads`` threads, by default one for each
    core; each takes 8 MB of memory, or one row if that is larger. Raises FormatError if the index
    itself is unusable.

    >>> memload.verify("out.bin").ok
    True
    """
    index = Index.open(path)
    index.keys.check()
    problems: list[str] = []
    parts: list[_Part] = []
    for array in index.arrays:
        first, step = 0, max(1, _READ // array.row_bytes)
        for shard in array.shards:
            file = index.path.parent / shard.file
            checksums = index.crc32[array.name][first : first + shard.rows]
            starts = range(0, shard.rows, step)
            try:
                _check_file(file, shard, array, checksums, index.path)
            except FormatError as error:
                problems.append(str(error))
                if not isinstance(error, ChecksumError):
                    starts = range(0)
                # Otherwise it is a shard of another build: its rows are compared all the same.
            parts += [
                _Part(file, array.row_bytes, start, first + start, checksums[start : start + step])
                for start in starts
            ]
            first += shard.rows
    bad: set[int] = set()
    with ThreadPoolExecutor(num_threads or available_cores()) as pool:
        for rows, problem in pool.map(_bad_rows, parts):
            bad.update(rows)
            problems += problem
    samples = np.flatnonzero(np.isin(index.row, sorted(bad))) if bad else ()
    return VerifyReport(
        path=index.path,
        rows=sum(array.rows for array in index.arrays),
        bytes=sum(len(part.checksums) * part.row_bytes for part in parts),
        problems=problems,
        bad_rows=sorted(bad),
        bad_keys=[index.keys[int(sample)] for sample in samples],
    )


def _check_file(
    file: Path, shard: Shard, array: Array, checksums: np.ndarray, index_path: Path
) -> None:
    check_shard(file, shard, array, index_path)
    try:
        with file.open("rb") as opened:
            header = opened.read(HEADER_BYTES)
    except OSError as error:
        raise FormatError(f"{file} cannot be read: {error.strerror}", path=file) from error
    check_header(file, header, shard, array, checksums, index_path)


def _bad_rows(part: _Part) -> tuple[list[int], list[str]]:
    """Return the rows of a part that differ from their checksums, and why any cannot be read."""
    rows = range(part.first, part.first + len(part.checksums))
    size = len(rows) * part.row_bytes
    try:
        with part.file.open("rb") as file:  # not a map: there, a disk error would be a SIGBUS
            file.seek(HEADER_BYTES + part.start * part.row_bytes)
            block = memoryview(file.read(size))
        if len(block) < size:
            raise OSError("the file ends too early")
    except OSError as error:
        reason = error.strerror or str(error)
        return list(rows), [f"{part.file}: rows {rows[0]} to {rows[-1]} cannot be read: {reason}"]
    found = [zlib.crc32(block[at : at + part.row_bytes]) for at in range(0, size, part.row_bytes)]
    return [rows[at] for at in np.flatnonzero(found != part.checksums).tolist()], []


class Preview(list[int]):
    """The numbers of the samples on a contact sheet, and the sheet, which a notebook shows.

    >>> memload.preview("out.bin").image.size
    (1060, 1172)
    """

    def __init__(self, samples: Sequence[int], image: Image.Image) -> None:
        super().__init__(samples)
        self.image = image  #: the contact sheet

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.image.save(file, "PNG")
        return file.getvalue()


def preview(
    path: str | Path,
    output: str | Path | None = None,
    *,
    count: int = 64,
    seed: int = 0,
    indices: Sequence[int] | None = None,
    class_name: str | None = None,
    tile: int = 128,
) -> Preview:
    """Draw a contact sheet of samples with labels and points, and return which samples it shows.

    The sheet is written to ``output``, if that is given. The result is a list of the samples'
    numbers. Its ``image`` is the sheet, which a notebook shows.

    Shows ``count`` random samples, chosen by ``seed``, in the order of the data set. ``class_name``
    restricts them to one class, or to one label if classes have no names. ``indices`` selects
    samples, in this order, instead. ``tile`` is the width of each sample in pixels. Raises
    FormatError if a file is missing or damaged or ``output`` cannot be written, ValueError or
    IndexError for wrong arguments.

    >>> memload.preview("out.bin", "grid.png", indices=[5, 17])
    [5, 17]
    """
    index = Index.open(path)
    chosen = _choose(index, count, seed, indices, class_name)
    sheet = _draw_sheet(index, chosen, tile)
    if output is not None:
        _save(sheet, output)
    return Preview(chosen, sheet)


def _save(sheet: Image.Image, output: str | Path) -> None:
    try:
        sheet.save(output)
    except (ValueError, KeyError) as error:  # KeyError: a format that Pillow can only read
        raise ValueError(
            f"{str(output)!r} is not a name for an image: Pillow cannot write this format "
            f"({error}). Use a name such as grid.png"
        ) from None
    except OSError as error:
        raise FormatError(
            f"{output} cannot be written: {error.strerror or error}. Check its folder, or write "
            "elsewhere",
            path=output,
        ) from error


def _choose(
    index: Index, count: int, seed: int, indices: Sequence[int] | None, class_name: str | None
) -> list[int]:
    size = len(index)
    if indices is not None:
        for position in indices:
            if not -size <= position < size:
                raise IndexError(f"index {position} is out of range for {size:,} samples")
        chosen = [position % size for position in indices]
    else:
        candidates = np.arange(size) if class_name is None else _samples_of(index, class_name)
        rng = np.random.default_rng(seed)
        chosen = sorted(rng.choice(candidates, min(count, len(candidates)), replace=False).tolist())
    if not chosen:
        raise ValueError("There is no sample to show. Choose another class, or other indices")
    return chosen


def _samples_of(index: Index, class_name: str) -> np.ndarray:
    classes = index.classes or ()
    if class_name in classes:
        return np.flatnonzero(index.columns["label"] == classes.index(class_name))
    labels = index.columns.get("label")
    if not classes and class_name.isdecimal() and labels is not None and labels.ndim == 1:
        return np.flatnonzero(labels == int(class_name))
    names = ", ".join(f"{name:.60}" for name in classes[:20])
    more = f" and {len(classes) - 20:,} more" if len(classes) > 20 else ""
    known = f"the classes are {names}{more}" if classes else "this data set has no classes"
    raise ValueError(f"There is no class {class_name!r}: {known}")


def _draw_sheet(index: Index, chosen: Sequence[int], tile: int) -> Image.Image:
    """Draw samples in rows and columns, about as many pixels high as wide."""
    height, width, _ = index.image.shape
    tile_height = min(max(1, round(tile * height / width)), _MAX_TILE_RATIO * tile)
    step_x, step_y = tile + _GAP, tile_height + _CAPTION_HEIGHT + _GAP
    columns = min(len(chosen), max(1, round((len(chosen) * step_y / step_x) ** 0.5)))
    rows = -(-len(chosen) // columns)
    size = (columns * step_x + _GAP, rows * step_y + _GAP)
    if size[0] * size[1] > _MAX_SHEET_PIXELS:
        raise ValueError(
            f"The preview would have {size[0]:,}×{size[1]:,} pixels: {len(chosen):,} tiles of "
            f"{tile}×{tile_height}. At most {_MAX_SHEET_PIXELS:,} pixels are possible. Show fewer "
            "samples or smaller ones"
        )
    sheet = Image.new("RGB", size, "white")
    shards = Shards(index)
    buffer = np.empty((1, *index.image.shape), index.image.descr)
    for number, sample in enumerate(chosen):
        row, column = divmod(number, columns)
        pixels = shards.gather(index.row[[sample]], buffer)[0]
        image = _to_image(pixels).resize((tile, tile_height), Image.Resampling.BILINEAR)
        _draw_points(image, index, sample)
        captioned = ImageOps.expand(image, (0, 0, 0, _CAPTION_HEIGHT), "white")
        caption = _caption(index, sample)
        ImageDraw.Draw(captioned).text((0, tile_height), caption, "black", ImageFont.load_default())
        sheet.paste(captioned, (_GAP + column * step_x, _GAP + row * step_y))
    return sheet


def _to_image(pixels: np.ndarray) -> Image.Image:
    if pixels.dtype != np.uint8:  # other dtypes have no fixed range: show from minimum to maximum
        with np.errstate(invalid="ignore"):  # some kinds of NaN warn
            values = np.nan_to_num(pixels.astype(np.float64), posinf=0, neginf=0)
        low, high = float(values.min()), float(values.max())
        pixels = ((values - low) / ((high - low) or 1) * 255).astype(np.uint8)
    channels = [0, 1, 2] if pixels.shape[2] > 2 else [0, 0, 0]
    return Image.fromarray(np.ascontiguousarray(pixels[:, :, channels]))


def _draw_points(image: Image.Image, index: Index, sample: int) -> None:
    height, width, _ = index.image.shape
    draw = ImageDraw.Draw(image)
    for name in index.points:
        for x, y in index.columns[name][sample].tolist():
            center_x, center_y = (x + 0.5) * image.width / width, (y + 0.5) * image.height / height
            if 0 <= center_x <= image.width and 0 <= center_y <= image.height:
                corners = (center_x - 1.5, center_y - 1.5, center_x + 1.5, center_y + 1.5)
                draw.ellipse(corners, fill="red")


def _caption(index: Index, sample: int) -> str:
    """Return the number of a sample, and its class, label or file name."""
    if "label" not in index.columns:
        name = index.keys[sample].rpartition("/")[2]
    else:
        label = index.columns["label"][sample]
        name = str(label) if index.classes is None else index.classes[int(label)]
    # A name may be endless, and hold line breaks or letters that the font lacks.
    text = f"{sample} {name:.500}".encode("latin-1", "replace").decode("latin-1")
    return "".join(letter if letter.isprintable() else "?" for letter in text)
