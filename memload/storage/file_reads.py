"""Read ranges of files: through the page cache, or past it as O_DIRECT does."""

import ctypes
import errno
import mmap
import os
import struct
import sys
from typing import NamedTuple

import numpy as np

from memload.errors import FormatError

#: Rows are read together only if they begin in the same block of a file, of this size. So the rows
#: of a batch that lie side by side are still divided into several reads, which run side by side.
_READ_BLOCK_BYTES = 1 << 20
#: What the kernel is asked to read ahead at a time: its default limit for one request.
_ADVICE_BYTES = 128 << 10

_libc = ctypes.CDLL(None, use_errno=True)
_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
#: Where ``struct statx`` has its mask, and the alignments of memory and of offsets.
_STATX_BYTES, _MASK_OFFSET, _ALIGNMENT_OFFSET = 256, 0, 0x98
#: ``f_type`` of file systems whose files are in RAM: tmpfs and ramfs.
_IN_RAM = (0x01021994, 0x858458F6)
_STATFS_BYTES = 120
#: For file systems that do not report their alignment. No known one asks for more.
_USUAL_ALIGNMENT = 4096


class DirectFile(NamedTuple):
    """A file opened for reading past the page cache."""

    descriptor: int
    #: Offsets, sizes and addresses of memory must be multiples of this number of bytes.
    alignment: int


def open_direct(descriptor: int) -> DirectFile | None:
    """Open the file of an open descriptor once more, with O_DIRECT, to read past the page cache.

    The caller closes it. Returns None where that cannot be done: on tmpfs, on some overlays and
    FUSE file systems, and on systems other than Linux. The alignment is what the kernel reports
    (``statx``, Linux 6.1) or, if it reports nothing, 4096 bytes. One read checks that it is
    accepted. Raises FormatError if too many files are open.
    """
    if sys.platform != "linux" or _is_in_ram(descriptor):
        return None
    reported = _reported_alignment(descriptor)
    if reported == 0:
        return None
    alignment = reported or _USUAL_ALIGNMENT
    # This path is the same file, also if another one has taken its name since.
    path = f"/proc/self/fd/{descriptor}"
    try:
        direct = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            name = os.readlink(path)  # noqa: PTH115  # `path` is a text
            raise FormatError(
                f"{name} cannot be opened to read past the page cache: {error.strerror}. Each "
                "shard needs up to three open files. Raise the limit (ulimit -n), or build fewer "
                "and larger shards (--shard-size).",
                path=name,
            ) from error
        return None
    memory = np.frombuffer(mmap.mmap(-1, 2 * alignment), np.uint8)
    aligned = memory[-memory.ctypes.data % alignment :][:alignment]
    try:
        os.preadv(direct, [bytes_of(aligned)], 0)
    except OSError as error:
        if error.errno != errno.EIO:  # a disk that fails says so again when rows are read
            os.close(direct)
            return None
    return DirectFile(direct, alignment)


def read_direct(descriptor: int, memory: memoryview, offset: int) -> int:
    """Read past the page cache. Returns how many bytes were read; see `DirectFile`.

    A read may end early, inside of a block, where another one cannot begin. Returns 0 if the file
    system refuses this one, as some do for compressed or inline data. Raises OSError.
    """
    try:
        return os.preadv(descriptor, [memory], offset)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return 0


def _reported_alignment(descriptor: int) -> int | None:
    """Return the alignment that a file needs: 0 if it cannot be read directly, None if unknown."""
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    if not hasattr(_libc, "statx"):
        return None
    if _libc.statx(descriptor, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, buffer):
        return None
    (mask,) = struct.unpack_from("=I", buffer, _MASK_OFFSET)
    memory, offset = struct.unpack_from("=II", buffer, _ALIGNMENT_OFFSET)
    return max(memory, offset) if mask & _STATX_DIOALIGN else None


def _is_in_ram(descriptor: int) -> bool:
    """Return whether a file is on a file system that keeps its files in RAM."""
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.fstatfs(descriptor, buffer):
        return False
    return struct.unpack_from("@l", buffer)[0] in _IN_RAM


class Ranges(NamedTuple):
    """Parts of files that hold some rows; each array has an entry for each part."""

    file: np.ndarray  #: number of the file
    offset: np.ndarray  #: in the file, in bytes
    position: np.ndarray  #: in memory, where the parts lie one behind another, in bytes
    size: np.ndarray  #: in bytes
    first: np.ndarray  #: which of the rows is the first one in the part: 0 to n - 1
    last: np.ndarray  #: which is the last one


def ranges_of(file: np.ndarray, start: np.ndarray, stop: np.ndarray, touches: np.ndarray) -> Ranges:
    """Return the parts of files to read for n rows, in the order of the rows.

    Each row needs the bytes from ``start`` to ``stop`` of ``file``, int64 ``(n,)``. ``touches``,
    bool ``(n - 1,)``, marks rows but the first that may be read together with the row before, as
    nothing lies between them. They are, if both begin in the same MiB of the same file.

    >>> start = np.array([10, 20, 10])
    >>> ranges_of(np.array([0, 0, 1]), start, start + 10, np.array([True, True])).size.tolist()
    [20, 10]
    """
    block = start // _READ_BLOCK_BYTES
    is_first = np.ones(len(start), bool)
    is_first[1:] = ~touches | (file[1:] != file[:-1]) | (block[1:] != block[:-1])
    first = np.flatnonzero(is_first)
    last = np.append(first, len(start))[1:] - 1
    size = stop[last] - start[first]
    return Ranges(file[first], start[first], np.cumsum(size) - size, size, first, last)


def read_ahead(descriptor: int, offset: int, size: int) -> None:
    """Ask the kernel to read a part of a file into the page cache, without waiting for it."""
    end = offset + size
    for start in range(offset, end, _ADVICE_BYTES):
        advised = min(_ADVICE_BYTES, end - start)
        os.posix_fadvise(descriptor, start, advised, os.POSIX_FADV_WILLNEED)


def drop_behind(descriptor: int, offset: int, size: int) -> None:
    """Remove a part of a file from the page cache, with the pages at its edges."""
    first = offset // mmap.PAGESIZE * mmap.PAGESIZE
    end = -(-(offset + size) // mmap.PAGESIZE) * mmap.PAGESIZE
    os.posix_fadvise(descriptor, first, end - first, os.POSIX_FADV_DONTNEED)


def bytes_of(array: np.ndarray) -> memoryview:
    """Return the memory of a contiguous array as bytes."""
    return array.reshape(-1).view(np.uint8).data
