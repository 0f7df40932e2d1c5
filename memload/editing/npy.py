"""NPY files that other programs wrote, as arrays of a data set."""

import zlib
from pathlib import Path

import numpy as np

from memload.errors import FormatError
from memload.storage.format import DESCRS_OF_ARRAYS
from memload.storage.index import Array, Shard


def array_in_file(path: Path, name: str) -> tuple[Array, np.ndarray]:
    """Return the array that an NPY file holds, under this name, and the CRC-32 of each row.

    The file is read once. Raises FormatError for a file that is not NPY, and for one that cannot be
    used in place: in Fortran order, in another byte order, or with elements that are not numbers.
    """
    try:
        rows = np.load(path, mmap_mode="r")
    except (ValueError, EOFError, OSError) as error:
        problem = f"{path} cannot be joined: {error}. Save an array with np.save."
        raise FormatError(problem, path=path) from error
    problem = _problem(rows)
    if problem:
        raise FormatError(f"{path} cannot be joined: {problem}", path=path)
    shard = Shard(path.name, len(rows), path.stat().st_size)
    array = Array(name, rows.dtype.str, rows.shape[1:], (shard,), "array")
    return array, np.array([zlib.crc32(row) for row in rows], np.uint32)


def _problem(rows: np.ndarray) -> str:
    """Return why an array cannot be used in place, or an empty text."""
    if not isinstance(rows, np.memmap):
        return "it holds several arrays. Save one array with np.save."
    if rows.dtype.newbyteorder("<").str not in DESCRS_OF_ARRAYS:
        types = ", ".join(np.dtype(descr).name for descr in DESCRS_OF_ARRAYS)
        return f"it holds elements of type {rows.dtype}. Convert them to one of {types}."
    if rows.dtype.str not in DESCRS_OF_ARRAYS:
        return "its byte order is big-endian. Save array.astype(array.dtype.newbyteorder('<'))."
    if rows.ndim < 2:
        return "it has one number for each sample. Add them with memload.with_columns."
    if not rows.flags.c_contiguous:
        return "it is in Fortran order. Save np.ascontiguousarray(array)."
    return ""
