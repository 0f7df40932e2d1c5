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
    rows = {addition.array.name: addition.rows[kept] for addition in added}
    others = {name: own for name, own in rows.items() if not np.array_equal(own, joined.row)}
    return replace(
        joined,
        arrays=(*joined.arrays, *(addition.array for addition in added)),
        other_rows={**joined.other_rows, **others},
        crc32={**joined.crc32, **{addition.array.name: addition.crc32 for addition in added}},
        fingerprint="",
    )


class _Addition(NamedTuple):
    """An array to add: the row of each sample in it, or -1, and the checksums of all its rows."""

    array: Array
    rows: np.ndarray
    crc32: np.ndarray


def _addition(index: Index, name: str, source: Any) -> _Addition:
    check_array_name(name)
    if name in index.names:
        raise ValueError(f"{name}: {index.path.name} has that already. Choose another name.")
    is_npy = isinstance(source, str | Path) and Path(source).suffix == ".npy"
    added = _from_npy(index, name, Path(source)) if is_npy else _from_data_set(index, name, source)
    what = describe((added.array.rows, *added.array.shape), added.array.descr)
    logger.info(f"{name}: {added.array.kind}s, {what}, from {source}")
    return added


def _from_npy(index: Index, name: str, path: Path) -> _Addition:
    """Return the rows of an NPY file. Raises FormatError if they cannot be used where they are."""
    try:
        rows = np.load(path, mmap_mode="r")
    except (ValueError, EOFError, OSError) as error:
        problem = f"{path} cannot be joined: {error}. Save an array with np.save."
        raise FormatError(problem, path=path) from error
    descr, is_in_order = rows.dtype.str, rows.flags.c_contiguous
    if descr not in DESCRS_OF_ARRAYS or rows.ndim < 2 or not is_in_order:
        raise FormatError(
            f"{path} holds an array {rows.shape} of {descr} in {'C' if is_in_order else 'Fortran'} "
            "order, whose rows cannot be used where they are. Save np.ascontiguousarray(array, "
            "dtype) with two dimensions or more and one of the types "
            f"{', '.join(DESCRS_OF_ARRAYS)}. Single numbers are columns: memload.with_columns.",
            path=path,
        )
    if len(rows) != len(index):
        raise ValueError(
            f"{path} has {len(rows):,} rows, but {index.path.name} has {len(index):,} samples. "
            "Save one row for each sample, in the order of the data set."
        )
    size = index.image.shape[:2]
    is_mask = descr in DESCRS_OF_MASKS and rows.shape[1:] in (size, (*size, 1))
    shape = size if is_mask else rows.shape[1:]
    shard = Shard(path.name, len(rows), path.stat().st_size)
    array = Array(name, descr, shape, (shard,), "mask" if is_mask else "array")
    return _Addition(array, np.arange(len(rows)), np.array([*map(zlib.crc32, rows)], np.uint32))


def _from_data_set(index: Index, name: str, source: Any) -> _Addition:
    """Return the rows of the samples of the same names in another data set."""
    other = index_of(source)
    names = [array.name for array in other.arrays]
    taken = "image" if names == ["image"] else name
    if taken not in names:
        raise ValueError(
            f"{name}: {other.path.name} has no array {name!r}, only {listed(names)}. Join one of "
            "them, under its own name."
        )
    array = other.array(taken)
    if not _fits(index, other, array):
        raise ValueError(
            f"{name}: the masks of {other.path.name} may not lie on the images of "
            f"{index.path.name}: they have another size, or their images were built with other "
            "or unknown settings, or as images by themselves. Build both in one call of "
            "memload.build."
        )
    positions = match_samples(index, other.keys, other.path.name)
    if missing := np.flatnonzero(positions < 0).tolist():
        examples = listed((index.keys[number] for number in missing), 3)
        logger.warning(
            f"{name}: {len(missing):,} of {counted(len(index), 'sample')} not in "
            f"{other.path.name} and left out: {examples}"
        )
    rows = np.where(positions < 0, -1, other.rows_of(taken)[positions])
    kind = "array" if array.kind == "image" else array.kind
    return _Addition(replace(array, name=name, kind=kind), rows, other.crc32[taken])


def _fits(index: Index, other: Index, array: Array) -> bool:
    """Return whether masks are known to lie on the images; true for other arrays.

    Gray images are refused, as they may be masks that were built without their images.
    """
    if array.kind != "mask":
        return array.kind == "array" or array.descr not in DESCRS_OF_MASKS or array.shape[2] != 1
    # What decides which part of a picture its row shows. Data sets of different builds that were
    # put together have no "fit".
    framing, own = ([each.setting(n) for n in ("mode", "fit", "exif")] for each in (other, index))
    is_known = own[1] is not None or own[0] == "array"
    return is_known and framing[1:] == own[1:] and array.shape == index.image.shape[:2]
