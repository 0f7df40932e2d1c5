"""Describe, verify and picture a finished data set."""

import itertools
import platform
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from memload.building.decoders import loaded_libraries
from memload.errors import ChecksumError, FormatError
from memload.machine import available_cores
from memload.storage.format import (
    FLAG_FALLBACK,
    FLAG_ORIENTED,
    FLAG_OUTSIDE,
    FORMAT_VERSION,
    HEADER_BYTES,
)
from memload.storage.index import Array, Index
from memload.storage.shards import Shards, check_header, check_shard

#: Read at a time by a thread of `verify`: large enough for any disk's full speed, small enough for any RAM.
_READ = 8 << 20

#: How many times as high as wide a tile of a preview may be.
_MOST_HIGH = 8

#: Pixels that a preview may have; 400 MB of memory.
_MOST_PIXELS = 1 << 27


def info(path: str | Path) -> dict[str, Any]:
    """Return what is known of a data set, ready for JSON. Raises FormatError.

    The shards are checked for presence and size; `verify` looks at their bytes.
    """
    index = Index.open(path)
    image = index.image
    for array in index.arrays:
        for shard in array.shards:
            check_shard(index.path.parent / shard.file, shard, array, index.path)
    flags = {"oriented": FLAG_ORIENTED, "fallback": FLAG_FALLBACK, "points_outside": FLAG_OUTSIDE}
    return {
        "path": str(index.path),
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
        "flags": {name: int(np.count_nonzero(index.flags & bit)) for name, bit in flags.items()},
        "statistics": dict(index.statistics),
        "build": dict(index.build),
    }


def environment() -> dict[str, str]:
    """Return the versions of memload, of what it stands on, and of the decoders that are really loaded."""
    versions = {
        "memload": _version("memload"),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    versions |= {
        name: _version(name) for name in ("numpy", "torch", "safetensors", "click", "tqdm")
    }
    loaded = loaded_libraries()
    versions |= {f"{name} (loaded)": version for name, version in loaded.items()}
    # Both can be installed, over one another; what pip lists then says nothing of what is loaded.
    versions |= {
        f"{name} (installed)": _version(name)
        for name in ("pillow", "pillow-simd", "jpeg4py", "simplejpeg")
    }
    return versions


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` found. ``problems`` names files that are wrong, ``bad_rows`` rows that hold other bytes."""

    path: Path
    rows: int
    bytes: int  #: read and compared
    problems: Sequence[str]
    bad_rows: Sequence[int]
    bad_keys: Sequence[str]  #: the samples that use the bad rows

    @property
    def ok(self) -> bool:
        """Whether all is as it was written."""
        return not self.problems and not self.bad_rows


def verify(path: str | Path, *, num_threads: int | None = None) -> VerifyReport:
    """Read a data set whole and compare it with its checksums: the index, the sizes, every row.

    Goes on after what it finds, so that all of it is known. ``num_threads`` is the number of cores by
    default. Memory does not grow with the data set. Raises FormatError where the index itself is unusable.
    """
    index = Index.open(path)
    index.check_tensors()
    index.keys.check()
    problems: list[str] = []
    jobs: list[tuple[Path, Array, int, int, int]] = []
    for array in index.arrays:
        first = 0
        for shard in array.shards:
            file = index.path.parent / shard.file
            try:
                check_shard(file, shard, array, index.path)
                checks = index.crc32[array.name][first : first + shard.rows]
                check_header(file, _header(file), shard, array, checks, index.path)
                readable = True
            except FormatError as error:
                problems.append(str(error))
                readable = isinstance(
                    error, ChecksumError
                )  # of another build: which rows differ is still told
            if readable:
                step = max(1, _READ // array.row_bytes)
                jobs += [
                    (file, array, first, start, min(start + step, shard.rows))
                    for start in range(0, shard.rows, step)
                ]
            first += shard.rows
    threads = num_threads or available_cores()
    bad: list[int] = []
    with ThreadPoolExecutor(threads) as pool:
        for found, problem in pool.map(lambda job: _bad_rows(index, *job), jobs):
            bad += found
            problems += problem
    bad_keys = (
        [index.keys[int(sample)] for sample in np.flatnonzero(np.isin(index.row, bad))]
        if bad
        else []
    )
    done = sum((stop - start) * array.row_bytes for _, array, _, start, stop in jobs)
    return VerifyReport(
        index.path, sum(a.rows for a in index.arrays), done, problems, sorted(set(bad)), bad_keys
    )


def _header(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            return opened.read(HEADER_BYTES)
    except OSError as error:
        raise FormatError(f"{file}: cannot be read: {error}", path=file) from error


def _bad_rows(
    index: Index, file: Path, array: Array, first: int, start: int, stop: int
) -> tuple[list[int], list[str]]:
    """Return the bad ones of a shard's rows, and what kept them from being read."""
    size, checks = array.row_bytes, index.crc32[array.name]
    try:
        with file.open("rb", buffering=0) as opened:
            opened.seek(HEADER_BYTES + start * size)
            if size > _READ:  # one row, of any size that a header can claim
                found = [_checksum(opened, size)]
            else:
                view = memoryview(_read_fully(opened, (stop - start) * size))
                found = [
                    zlib.crc32(view[row * size : (row + 1) * size]) for row in range(stop - start)
                ]
    except OSError as error:  # not through the map, where a bad disk would be a bus error
        return list(range(first + start, first + stop)), [
            f"{file}: rows {first + start} to {first + stop - 1} cannot be read: {error}"
        ]
    return [
        first + row for row, check in enumerate(found, start) if check != int(checks[first + row])
    ], []


def _checksum(file: Any, size: int) -> int:
    check = 0
    while size:
        piece = _read_fully(file, min(size, _READ))
        check, size = zlib.crc32(piece, check), size - len(piece)
    return check


def _read_fully(file: Any, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = file.readinto(view)
        if not count:
            raise OSError("the file ends before its time")
        view = view[count:]
    return data


def preview(
    path: str | Path,
    output: str | Path,
    *,
    count: int = 64,
    seed: int = 0,
    indices: Sequence[int] | None = None,
    class_name: str | None = None,
    tile: int = 128,
) -> list[int]:
    """Write a contact sheet of samples, with labels and points, to an image file; return which they are.

    By default ``count`` random samples from ``seed``, in their order; ``class_name`` takes them from one class,
    ``indices`` names them. ``tile`` is the width of each in pixels. Raises FormatError, ValueError and IndexError.
    """
    index = Index.open(path)
    parent = Path(output).parent
    if not parent.is_dir():
        raise FormatError(
            f"{parent}: expected a folder for {output}, found none. Make it first", path=output
        )
    pixels = Shards(index)
    chosen = _choose(index, count, seed, indices, class_name)
    height, width, _ = index.image.shape
    # a column of pixels would be millions high
    tile_height, line = min(max(1, round(tile * height / width)), _MOST_HIGH * tile), 14
    columns = min(len(chosen), max(1, round((len(chosen) * (tile_height + line) / tile) ** 0.5)))
    rows = -(-len(chosen) // columns)
    gap = 4
    sides = columns * (tile + gap) + gap, rows * (tile_height + line + gap) + gap
    if sides[0] * sides[1] > _MOST_PIXELS:
        raise ValueError(
            f"preview: expected a picture of at most {_MOST_PIXELS:,} pixels, found {sides[0]:,}×{sides[1]:,} for "
            f"{len(chosen):,} tiles of {tile}×{tile_height}. Show fewer, or smaller ones"
        )
    sheet = Image.new("RGB", sides, "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default()
    for (row, column), sample in zip(
        itertools.product(range(rows), range(columns)), chosen, strict=False
    ):
        image = _to_image(
            pixels.gather(
                index.row[[sample]], np.empty((1, *index.image.shape), index.image.descr)
            )[0]
        )
        x, y = gap + column * (tile + gap), gap + row * (tile_height + line + gap)
        sheet.paste(image.resize((tile, tile_height), Image.Resampling.BILINEAR), (x, y))
        for px, py in _points(index, sample):
            if not (-0.5 <= px <= width - 0.5 and -0.5 <= py <= height - 0.5):
                continue  # it would be drawn onto another tile
            cx, cy = x + (px + 0.5) * tile / width, y + (py + 0.5) * tile_height / height
            draw.ellipse((cx - 1.5, cy - 1.5, cx + 1.5, cy + 1.5), fill="red")
        caption = (
            f"{sample} {_label(index, sample)}"[:tile]
            .encode("latin-1", "replace")
            .decode("latin-1")
        )
        caption = "".join(
            letter if letter.isprintable() else "?" for letter in caption
        )  # one line, come what may
        while caption and draw.textlength(caption, font=font) > tile:
            caption = caption[:-1]
        draw.text((x, y + tile_height), caption, fill="black", font=font)
    try:
        sheet.save(output)
    except (
        ValueError,
        KeyError,
    ) as error:  # KeyError: Pillow's, for a format that it can only read
        raise ValueError(
            f"output: expected the name of an image such as grid.png, found {str(output)!r}: "
            f"Pillow cannot write it ({error}). Choose another format"
        ) from None
    except OSError as error:
        raise FormatError(
            f"{output}: expected to be able to write an image there, found: {error}", path=output
        ) from error
    return chosen


def _choose(
    index: Index, count: int, seed: int, indices: Sequence[int] | None, class_name: str | None
) -> list[int]:
    size = len(index)
    if indices is not None:
        for position in indices:
            if not -size <= position < size:
                raise IndexError(f"indices: expected -{size} <= index < {size}, found {position}")
        chosen = [position % size for position in indices]
    else:
        among = np.arange(size)
        if class_name is not None:
            classes = index.classes or ()
            if class_name not in classes:
                known = ", ".join(f"{name:.60}" for name in classes[:20]) or "none at all"
                more = f" and {len(classes) - 20:,} more" if len(classes) > 20 else ""
                raise ValueError(f"class: expected one of {known}{more}, found {class_name!r}")
            among = np.flatnonzero(index.columns["label"] == classes.index(class_name))
        if seed < 0:
            raise ValueError(f"seed: expected 0 or more, found {seed}")
        rng = np.random.default_rng(seed)
        chosen = sorted(rng.choice(among, min(count, len(among)), replace=False).tolist())
    if not chosen:
        raise ValueError("preview: expected at least one sample, found none")
    return chosen


def _to_image(pixels: np.ndarray) -> Image.Image:
    if pixels.dtype != np.uint8:  # other types have no range of their own: show what there is
        with np.errstate(invalid="ignore"):  # of NaN, some kinds of which are told
            values = np.nan_to_num(pixels.astype(np.float64), posinf=0, neginf=0)
        low, high = float(values.min()), float(values.max())
        pixels = ((values - low) / ((high - low) or 1) * 255).astype(np.uint8)
    if pixels.shape[2] in (1, 2):
        return Image.fromarray(np.ascontiguousarray(pixels[:, :, 0])).convert("RGB")
    return Image.fromarray(np.ascontiguousarray(pixels[:, :, :3]))


def _points(index: Index, sample: int) -> Iterator[tuple[float, float]]:
    for name in index.points:
        for x, y in index.columns[name][sample].tolist():
            if np.isfinite((x, y)).all():
                yield x, y


def _label(index: Index, sample: int) -> str:
    if "label" not in index.columns:
        return index.keys[sample].rpartition("/")[2]
    label = index.columns["label"][sample]
    return index.classes[int(label)] if index.classes is not None else f"{label}"
