"""The bytes of images, by number. Each is opened when it is read, so that every process can."""

import copy
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from memload.errors import DecodeError, SourceError
from memload.storage.keys import Keys

#: The extensions that torchvision's ImageFolder takes for images, in any case.
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
#: Those of other arrays. A mask is no JPEG, which does not keep numbers as they are.
EXTENSIONS_OF_KIND = {
    "mask": (".png", ".tif", ".tiff", ".bmp", ".gif", ".pgm", ".npy"),
    "array": (*EXTENSIONS, ".npy"),
}

#: Images with more pixels are rejected, unless the user says otherwise: Pillow's own limit.
MAX_PIXELS: Final = 89_478_485
#: No such picture is larger, at 8 bytes per pixel and with some metadata.
_MAX_BYTES = 8 * MAX_PIXELS + (16 << 20)

#: The header of a file within a zip, from the ZIP specification (APPNOTE.TXT), 4.3.7.
_ZIP_HEADER_BYTES = 30

_HERE = Path()


class Contents:
    """The images, masks or other arrays of all samples, by row. None stands for a missing one."""

    #: whether several should be read at once, by threads
    is_remote = False
    #: What a process has open, such as a map of a file. Each process opens it for itself.
    _opened: Any = None
    #: Which of all are meant, int64, after `take`. None: all.
    rows: np.ndarray | None = None

    def __getitem__(self, row: int) -> Any:
        """Return one of them, in a form of `Sample`. Raises DecodeError."""
        return self.read(row if self.rows is None else int(self.rows[row]))

    def take(self, rows: np.ndarray) -> Self:
        """Return the contents of some rows, int64."""
        taken = copy.copy(self)
        taken.rows = rows if self.rows is None else self.rows[rows]
        return taken

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is open: a map would be pickled with all of its rows."""
        return {**vars(self), "_opened": None}

    def read(self, row: int) -> Any:
        """Return one, whatever was taken."""
        raise NotImplementedError


@dataclass
class Files(Contents):
    """Files below a folder. An empty name stands for a missing one."""

    root: Path
    names: Keys

    def read(self, row: int) -> Path | None:
        """Return the path of one, or None."""
        name = self.names[row]
        return self.root / name if name else None


def walk(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder below a root, relative to it, and the files in it.

    The root itself is "". What is hidden is passed over, and so are unfinished builds and links to
    a folder that contains them. Raises SourceError.
    """
    todo: list[tuple[str, frozenset[tuple[int, int]]]] = [("", frozenset())]
    while todo:
        folder, parents = todo.pop()
        path = root / folder
        try:
            status = path.stat()
            identity = (status.st_dev, status.st_ino)
            if identity in parents:  # following this link would never end
                continue
            files, folders = _scan(path)
        except OSError as error:
            raise SourceError(
                f"{path} cannot be read: {error.strerror or error}.", path=path
            ) from error
        yield folder, files
        todo += [(f"{folder}/{name}".lstrip("/"), parents | {identity}) for name in folders]


def _scan(path: Path) -> tuple[list[str], list[str]]:
    """Return the files and the folders in a folder, but for those that are hidden."""
    files, folders = [], []
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            try:
                is_folder = entry.is_dir()
            except OSError:  # a link to itself, which is rejected when it is read
                is_folder = False
            if not is_folder:
                files.append(entry.name)
            elif not entry.name.endswith((".building", ".copying", ".exporting")):
                folders.append(entry.name)
    return files, folders


#: What a zip says of a member: its size without compression, the checksum of that, and whether it
#: is compressed.
ZIPPED = np.dtype([("unpacked", "<u8"), ("crc32", "<u4"), ("is_deflated", "?")])


@dataclass
class Ranges(Contents):
    """Parts of larger files, such as the members of tars and zips. One entry per row.

    Args:
        paths: The larger files.
        file: Which of them a row is in.
        start: Where it begins, in bytes.
        size: How many bytes it has there; -1 means missing.
        zipped: For a zip, further facts, of the type `ZIPPED`.
    """

    paths: Sequence[Path]
    file: np.ndarray
    start: np.ndarray
    size: np.ndarray
    zipped: np.ndarray | None = None

    def read(self, row: int) -> bytes | None:
        """Return the bytes of one, or None. Raises DecodeError."""
        start, size = int(self.start[row]), int(self.size[row])
        if size < 0:
            return None
        path = self.paths[self.file[row]]
        zipped = None if self.zipped is None else self.zipped[row].item()
        largest = size if zipped is None else max(size, zipped[0])
        if largest > _MAX_BYTES:
            raise DecodeError(f"it has {largest:,} bytes, and at most {_MAX_BYTES:,} are read")
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if zipped is not None:
                header = os.pread(descriptor, _ZIP_HEADER_BYTES, start)
                start += _ZIP_HEADER_BYTES + int.from_bytes(header[26:28], "little")
                start += int.from_bytes(header[28:30], "little")
            data = os.pread(descriptor, size, start)
        finally:
            os.close(descriptor)
        if len(data) < size:
            raise DecodeError(f"{path.name} has been truncated")
        return data if zipped is None else _unpacked(path, data, *zipped)


def _unpacked(path: Path, data: bytes, size: int, crc32: int, is_deflated: bool) -> bytes:
    """Return the content of a member of a zip. Raises DecodeError and zlib.error."""
    if is_deflated:
        data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, size + 1)
    if zlib.crc32(data) != crc32:
        raise DecodeError(f"{path.name} is damaged, encrypted, or has changed since it was opened")
    return data


def plain(value: Any, folder: Path = _HERE) -> Any:
    """Return a value as `Sample` has an image: bytes, a path, an array, a picture, or None.

    Hugging Face has a dict of bytes and a path. Paths are relative to ``folder``.
    """
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, (str, os.PathLike)):
        return folder / value
    return array_of(value) if is_tensor(value) or isinstance(value, (list, tuple)) else value


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor. Torch is not imported."""
    return hasattr(value, "detach")


def array_of(value: Any) -> np.ndarray:
    """Return numbers as an array. None has no items; in a list, it is NaN. Raises ValueError."""
    if is_tensor(value):
        value = value.detach().cpu().numpy()
    array = np.asarray(() if value is None else value)
    is_list = array.dtype.kind == "O" and isinstance(value, (list, tuple))
    return array.astype(np.float64) if is_list else array


def file_labels(paths: Sequence[Path]) -> list[str]:
    """Return the names of files, or their whole paths if two names are the same."""
    names = [path.name for path in paths]
    return names if len({*names}) == len(names) else [*map(str, paths)]
