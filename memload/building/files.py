"""Reads the values of samples, from files or as they are: images, masks and arrays."""

import errno
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from memload.building.sources.record import FileState
from memload.errors import BuildError, DecodeError

#: The state of an image or array that was not read from a file, and of one that is missing.
NO_FILE, MISSING = FileState(-1, -1), FileState(-2, -2)

#: Errors that are the fault of this process or machine, not of the file.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def read_value(value: Any, max_pixels: int) -> tuple[bytes | Image.Image | np.ndarray, FileState]:
    """Return a value as `Record` has it, and the state of its file.

    If it is a path, that are the bytes of the file. Raises DecodeError or BuildError.
    """
    if isinstance(value, Path):
        return read_file(value, max_pixels)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value), NO_FILE  # bytes are not copied
    if np.ma.is_masked(value):
        raise DecodeError("some of its values are masked out. Fill them")
    if isinstance(value, (Image.Image, np.ndarray)):
        return value, NO_FILE
    raise DecodeError(
        f"it must be a PIL image, an array, bytes or a path, not {type(value).__name__}"
    )


def read_file(path: Path, max_pixels: int) -> tuple[bytes, FileState]:
    """Return the bytes of a file and its state. Raises DecodeError or BuildError."""
    # No picture within max_pixels is larger, at 8 bytes a pixel and with some metadata.
    limit = 8 * max_pixels + (16 << 20)
    try:
        # O_NONBLOCK: a pipe is not waited for. Path.open would take 160 µs a file instead of 40.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise DecodeError("not a file, but a folder, a pipe or a device")
            if status.st_size > limit:
                raise DecodeError(
                    f"the file is too large: it has {status.st_size:,} bytes, and at most "
                    f"{limit:,} are read"
                )
            with open(descriptor, "rb", buffering=0, closefd=False) as file:
                return file.read(), _state_of(status)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        is_link = path.is_symlink()
        raise DecodeError(
            "a link to a file that does not exist" if is_link else "no such file"
        ) from None
    except OSError as error:
        if error.errno in _EXHAUSTED:
            raise BuildError(
                f"{path} cannot be read: {error.strerror}. Free some, then run the same command "
                "again: it goes on where it stopped.",
                path=path,
            ) from error
        raise DecodeError(f"the file cannot be read: {error.strerror}") from error


def file_state(path: Path) -> FileState | None:
    """Return the state of a file, or None if it is none. Raises OSError."""
    status = os.stat(path)  # noqa: PTH116  # for every row
    return _state_of(status) if stat.S_ISREG(status.st_mode) else None


def _state_of(status: os.stat_result) -> FileState:
    inode = status.st_ino & 0x7FFF_FFFF_FFFF_FFFF  # as int64
    return FileState(status.st_size, status.st_mtime_ns, inode)
