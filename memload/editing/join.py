"""Further arrays beside the images of a data set: features that exist already."""

import logging
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from memload.editing.index_files import index_of
from memload.editing.matching import match_samples
from memload.errors import FormatError
from memload.storage.format import DESCRS_OF_ARRAYS, DESCRS_OF_MASKS, check_array_name
from memload.storage.index import Array, Index, Shard
from memload.storage.shards import describe
from memload.wording import counted, listed

logger = logging.getLogger("memload")


def join(dataset: Any, /, **arrays: Any) -> Index:
    """Return an index of a data set that also has other arrays. Nothing is copied.

    All files must lie in the folder of the data set when it is opened. The logger ``memload`` tells
    what each array has become, and warns of samples that are left out.

    Args:
        dataset: A path such as ``"out.bin"``, a `MemmapDataset`, or an index.
        arrays: For each array, an NPY file or another data set.

            An NPY file, as `numpy.save` writes it, has a row for each sample of ``dataset``, in its
            order. It is read once, for its checksums. Rows become masks ``(H, W)`` if they are
            uint8 or uint16 and have the height and width of the images. Otherwise they become
            arrays, which transforms leave alone.

            Of a data set, the array of the same name is taken, or its images if it has nothing
            else. Samples are matched by their names, whatever the extension: ``cat/1.jpg`` and
            ``cat/1.png``. Samples without a row are left out. Masks and arrays stay what they are.

    Raises ValueError for what does not fit together, FormatError and OSError.

    >>> memload.join("out.bin", features="features.npy").write("both.idx")  # doctest: +SKIP
    """
    index = index_of(dataset)
    if not arrays:
        raise ValueError("arrays: there is nothing to join. Name one: features='features.npy'.")
    added = [_addition(index, name, source) for name, source in arrays.items()]
    kept = np.flatnonzero(np.all([addition.rows >= 0 for addition in added], axis=0))
    if not len(kept):
        raise ValueError(f"No sample of {index.path} has all of these arrays. Join fewer of them.")
    joined = index if len(kept) == len(index) else index.subset(kept)
    for addition in added:
        joined = _with_array(joined, addition, addition.rows[kept])
    return joined


class _Addition(NamedTuple):
    """An array to add: the row of each sample in it, or -1, and the checksums of all its rows."""

    array: Array
    rows: np.ndarray
    crc32: np.ndarray


def _with_array(index: Index, addition: _Addition, rows: np.ndarray) -> Index:
    """Return the index with one more array. ``rows`` has its row for each sample."""
    name = addition.array.name
    is_other = not np.array_equal(rows, index.row)
    return replace(
        index,
        arrays=(*index.arrays, addition.array),
        other_rows={**index.other_rows, name: rows} if is_other else index.other_rows,
        crc32={**index.crc32, name: addition.crc32},
        fingerprint="",
    )


def _addition(first: Index, name: str, source: Any) -> _Addition:
    check_array_name(name)
    if name in first.names:
        raise ValueError(
            f"{name}: {first.path.name} has an array or a column of this name already. Choose "
            "another name."
        )
    is_npy = isinstance(source, str | Path) and Path(source).suffix in (".npy", ".npz")
    found = (_from_npy if is_npy else _from_data_set)(first, name, source)
    what = describe((found.array.rows, *found.array.shape), found.array.descr)
    logger.info(f"{name}: {found.array.kind}s, {what}, from {source}")
    return found


def _from_npy(first: Index, name: str, source: str | Path) -> _Addition:
    path = Path(source)
    rows = _opened(path)
    if len(rows) != len(first):
        raise ValueError(
            f"{path} has {len(rows):,} rows, but {first.path.name} has {len(first):,} samples. "
            "Save one row for each sample, in the order of the data set."
        )
    size = first.image.shape[:2]
    is_mask = rows.dtype.str in DESCRS_OF_MASKS and rows.shape[1:] in (size, (*size, 1))
    shape = size if is_mask else rows.shape[1:]
    shard = Shard(path.name, len(rows), path.stat().st_size)
    array = Array(name, rows.dtype.str, shape, (shard,), "mask" if is_mask else "array")
    crc32 = np.array([zlib.crc32(row) for row in rows], np.uint32)
    return _Addition(array, np.arange(len(first)), crc32)


def _opened(path: Path) -> np.ndarray:
    """Map an NPY file. Raises FormatError if its rows cannot be used where they are."""
    try:
        rows = np.load(path, mmap_mode="r")
    except (ValueError, EOFError, OSError) as error:
        problem = f"{path} cannot be joined: {error}. Save an array with np.save."
        raise FormatError(problem, path=path) from error
    if not isinstance(rows, np.memmap):
        raise FormatError(f"{path} holds several arrays. Save one with np.save.", path=path)
    if rows.dtype.str in DESCRS_OF_ARRAYS and rows.ndim > 1 and rows.flags.c_contiguous:
        return rows
    order = "C" if rows.flags.c_contiguous else "Fortran"
    raise FormatError(
        f"{path} holds an array {rows.shape} of {rows.dtype.str} in {order} order, whose rows "
        "cannot be used where they are. Save np.ascontiguousarray(array, dtype) with two "
        f"dimensions or more and one of the types {', '.join(DESCRS_OF_ARRAYS)}. Single numbers "
        "are columns: memload.with_columns.",
        path=path,
    )


def _from_data_set(first: Index, name: str, source: Any) -> _Addition:
    other = index_of(source)
    names = [array.name for array in other.arrays]
    chosen = name if name in names or len(names) > 1 else "image"
    if chosen not in names:
        raise ValueError(
            f"{name}: {other.path.name} has no array {name!r}, only {', '.join(names)}. Join one "
            "of them, under its own name."
        )
    array = other.array(chosen)
    if not _fits(first, other, array):
        raise ValueError(
            f"{name}: the masks of {other.path.name} may not lie on the images of "
            f"{first.path.name}: they have another size, or their images were built with other "
            "or unknown settings, or as images by themselves. Build both in one call of "
            "memload.build."
        )
    positions = match_samples(first, other.keys, other.path.name)
    is_found = positions >= 0
    if missing := np.flatnonzero(~is_found).tolist():
        examples = listed((first.keys[number] for number in missing), 3)
        logger.warning(
            f"{name}: {len(missing):,} of {counted(len(first), 'sample')} not in "
            f"{other.path.name} and left out: {examples}"
        )
    rows = np.where(is_found, other.rows_of(chosen)[positions], -1)
    kind = "array" if array.kind == "image" else array.kind
    return _Addition(replace(array, name=name, kind=kind), rows, other.crc32[chosen])


def _fits(first: Index, other: Index, array: Array) -> bool:
    """Return whether masks are known to lie on the images; true for other arrays.

    Gray images are refused, as they may be masks that were built without their images.
    """
    if array.kind == "mask":
        same = _framing(first) == _framing(other) is not None
        return same and array.shape == first.image.shape[:2]
    return array.kind != "image" or array.descr not in DESCRS_OF_MASKS or array.shape[2] != 1


def _framing(index: Index) -> tuple[Any, ...] | None:
    """Return what decides which part of a picture its row shows, or None if that is not known."""
    if index.setting("fit") is None and index.setting("mode") != "array":
        return None  # as of data sets of different builds that were put together
    return index.setting("fit"), index.setting("exif")
