"""Reads the values of samples, from files or as they are: images, masks and arrays."""

import errno
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from memload.errors import BuildError, DecodeError

#: Errors that are the fault of this process or machine, not of the file.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def read_value(value: Any, max_pixels: int) -> bytes | Image.Image | np.ndarray:
    """Return a value as `Record` has it. If it is a path, that are the bytes of the file.

    Raises DecodeError or BuildError.
    """
    if isinstance(value, Path):
        return read_file(value, max_pixels)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)  # bytes are not copied
    if np.ma.is_masked(value):
        raise DecodeError("some of its values are masked out. Fill them")
    if isinstance(value, (Image.Image, np.ndarray)):
        return value
    raise DecodeError(
        f"it must be a PIL image, an array, bytes or a path, not {type(value).__name__}"
    )


def read_file(path: Path, max_pixels: int) -> bytes:
    """Return the bytes of a file. Raises DecodeError, and BuildError if this process lacks memory.

    A file that is too large for any picture within ``max_pixels`` is not read.
    """
    # No picture within max_pixels is larger, at 8 bytes per pixel and with some metadata.
    limit = 8 * max_pixels + (16 << 20)
    try:
        # O_NONBLOCK: a pipe is not waited for. Path.open would take 160 µs per file, not 40.
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
                return file.read()
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
