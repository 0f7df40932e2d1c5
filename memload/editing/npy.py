"""NPY files that other programs wrote, as arrays of a data set."""

import math
import zlib
from pathlib import Path

import numpy as np

from memload.errors import FormatError
from memload.storage.format import DESCRS_OF_ARRAYS, NpyHeader, read_npy_header
from memload.storage.index import Array, Shard

#: How many bytes are read at once to compute checksums.
_CHUNK_BYTES = 8 << 20


def array_in_file(path: Path, name: str) -> Array:
    """Return the array that an NPY file holds, under this name. No row is read.

    Raises FormatError for a file that is not NPY, and for one that cannot be read in place: in
    Fortran order, in another byte order, or with elements that are not numbers.
    """
    shape, is_fortran, dtype, header_bytes = _read_header(path)
    little = dtype.newbyteorder("<").str
    if dtype.hasobject or dtype.fields or little not in DESCRS_OF_ARRAYS:
        types = ", ".join(np.dtype(descr).name for descr in DESCRS_OF_ARRAYS)
        what = "Python objects" if dtype.hasobject else f"elements of type {dtype}"
        raise _error(path, f"it holds {what}. Convert them to one of {types}, and save it again.")
    if dtype.str != little:
        remedy = f"np.save({path.name!r}, array.astype({little!r}))"
        raise _error(path, f"its byte order is big-endian. Save it with {remedy}.")
    if len(shape) < 2:
        raise _error(
            path,
            f"its shape is {shape}, a number for each sample. Write it into a table, as the column "
            f"{name!r} beside the names of the samples, and add it with 'memload relabel'.",
        )
    if is_fortran:
        remedy = f"np.save({path.name!r}, np.ascontiguousarray(array))"
        raise _error(path, f"it is in Fortran order. Save it with {remedy}.")
    if 0 in shape:
        raise _error(path, f"its shape is {shape}, so that it is empty. Save an array with rows.")
    size, expected = path.stat().st_size, header_bytes + math.prod(shape) * dtype.itemsize
    if size != expected:
        raise _error(path, f"it has {size:,} bytes instead of {expected:,}. Save it again.")
    shard = Shard(path.name, shape[0], size)
    return Array(name, little, shape[1:], (shard,), "array")


def checksums_of(path: Path, array: Array) -> np.ndarray:
    """Read a file once, and return the CRC-32 of each row, uint32 ``(rows,)``."""
    rows, row_bytes = array.rows, array.row_bytes
    checksums = np.empty(rows, np.uint32)
    chunk = max(1, _CHUNK_BYTES // row_bytes)
    with path.open("rb") as file:
        file.seek(array.header_bytes)
        for start in range(0, rows, chunk):
            data = memoryview(file.read(min(chunk, rows - start) * row_bytes))
            for row in range(len(data) // row_bytes):
                content = data[row * row_bytes : (row + 1) * row_bytes]
                checksums[start + row] = zlib.crc32(content)
    return checksums


def _read_header(path: Path) -> NpyHeader:
    try:
        with path.open("rb") as file:
            return read_npy_header(file)
    except (ValueError, EOFError) as error:
        problem = f"it is not an NPY file: {error}. Save an array with np.save."
        raise _error(path, problem) from None
    except OSError as error:
        raise FormatError(
            f"{path} cannot be read: {error.strerror}. Check the path.", path=path
        ) from error


def _error(path: Path, problem: str) -> FormatError:
    return FormatError(f"{path} cannot be joined: {problem}", path=path)
