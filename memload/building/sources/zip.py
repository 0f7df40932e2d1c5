"""A zip file as a source. It is read like a folder."""

import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from memload.building.decoders import MAX_PIXELS
from memload.building.sources.columns import ColumnCollector
from memload.building.sources.listed import (
    ListedSource,
    add_folder_labels,
    is_hidden,
    relative_name,
    without_shared_folders,
)
from memload.building.sources.positional import PositionalFile
from memload.building.sources.record import EXTENSIONS, FileState
from memload.errors import DecodeError, SourceError

#: The header before a member's content, and where the lengths of its two fields of any length are.
#: From the ZIP specification (APPNOTE.TXT), 4.3.7.
_HEADER_BYTES = 30
_LENGTHS = struct.Struct("<26xHH")
_SIGNATURE = b"PK\x03\x04"
#: No picture of the usual number of pixels is larger, at 8 bytes a pixel and with some metadata.
_MAX_BYTES = 8 * MAX_PIXELS + (16 << 20)
_ENCRYPTED = 1  # bit of the flags


class ZipArchive(ListedSource):
    """The images of a zip file, with one folder for each class, as in `memload.ImageFolder`.

    A folder that all images share is ignored. If no image lies in a folder, there are no labels.
    Files that are not images or are hidden are left out, and so are images beside the class
    folders. ``notes`` reports it. A key is the name of the image within the zip.

    Opening reads the directory of the zip, and no image. An image above 732 MB is rejected, as are
    larger files than the directory says. Raises SourceError if the file is not a
    zip, is encrypted, or has no images.

    >>> from memload.building.sources.zip import ZipArchive
    >>> source = ZipArchive("pets.zip")  # doctest: +SKIP
    """

    def __init__(self, path: str | Path, *, extensions: Sequence[str] = EXTENSIONS) -> None:
        self.path = Path(path)
        columns = ColumnCollector()
        members = _find_images(self.path, extensions, columns)
        names = without_shared_folders(list(members))
        kept = add_folder_labels(columns, names)
        infos = list(members.values())
        images = [infos[position] for position in kept]
        self._offset = np.array([member.header_offset for member in images], np.int64)
        self._size = np.array([member.compress_size for member in images], np.int64)
        self._unpacked_size = np.array([member.file_size for member in images], np.uint64)
        self._crc = np.array([member.CRC for member in images], np.uint32)
        self._is_deflated = np.array(
            [member.compress_type == zipfile.ZIP_DEFLATED for member in images]
        )
        status = self.path.stat()
        self._file_state = FileState(status.st_size, status.st_mtime_ns)
        self._file = PositionalFile(self.path)
        super().__init__([names[position] for position in kept], columns.finish())

    def _image(self, index: int) -> bytes:
        start, size = int(self._offset[index]), int(self._unpacked_size[index])
        if size > _MAX_BYTES:
            raise DecodeError(f"it has {size:,} bytes, and at most {_MAX_BYTES:,} are unpacked")
        header = self._file.read(start, _HEADER_BYTES)
        if len(header) != _HEADER_BYTES or not header.startswith(_SIGNATURE):
            raise DecodeError(f"{self.path.name} is damaged, or has changed since it was opened")
        start += _HEADER_BYTES + sum(_LENGTHS.unpack(header))
        data = self._file.read(start, int(self._size[index]))
        if self._is_deflated[index]:
            try:
                data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, size + 1)
            except zlib.error as error:
                raise DecodeError(f"{self.path.name} is damaged: {error}") from error
        if zlib.crc32(data) != self._crc[index]:
            raise DecodeError(f"{self.path.name} is damaged: the image has another checksum")
        return data

    def _state(self, index: int) -> FileState:
        return self._file_state


def _find_images(
    path: Path, extensions: Sequence[str], columns: ColumnCollector
) -> dict[str, zipfile.ZipInfo]:
    """Return the images in a zip by their names. Raises SourceError."""
    endings = tuple(extension.lower() for extension in extensions)
    members = _read_directory(path)
    names = _names(members)
    found = {
        name: member
        for name, member in zip(names, members, strict=True)
        if name.lower().endswith(endings) and not is_hidden(name)
    }
    images = list(found.values())  # of several of one name the last, as if they were unpacked
    if not images:
        raise SourceError(f"{path} has no image files ({' '.join(extensions)}).", path=path)
    _check_readable(path, images)
    if len(images) < len(members):
        columns.notes.append(f"skipped {len(members) - len(images):,} other files in {path}")
    return found


def _read_directory(path: Path) -> list[zipfile.ZipInfo]:
    """Return the files in a zip. Raises SourceError if its directory cannot be read."""
    try:
        with zipfile.ZipFile(path) as archive:
            return [member for member in archive.infolist() if not member.is_dir()]
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}.", path=path) from error
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{path} has names that are said to be UTF-8, and are not. Unpack it, and build the "
            "folder.",
            path=path,
        ) from error
    except Exception as error:  # a damaged directory may raise anything
        raise SourceError(
            f"{path} is no zip file, or is truncated ({error}). Copy or download it again.",
            path=path,
        ) from error


def _check_readable(path: Path, images: Sequence[zipfile.ZipInfo]) -> None:
    """Raise SourceError for what `ZipArchive` does not read: truncated, encrypted, rare methods."""
    if any(member.header_offset + member.compress_size > path.stat().st_size for member in images):
        raise SourceError(
            f"{path} is truncated or damaged: it is shorter than its directory says. Copy or "
            "download it again.",
            path=path,
        )
    if any(member.flag_bits & _ENCRYPTED for member in images):
        raise SourceError(f"{path} is encrypted. Unpack it, and build the folder.", path=path)
    others = {member.compress_type for member in images} - {
        zipfile.ZIP_STORED,
        zipfile.ZIP_DEFLATED,
    }
    if others:
        raise SourceError(
            f"{path} is compressed in a way that memload does not read (method {min(others)}). "
            "Unpack it, and build the folder.",
            path=path,
        )


def _names(members: Sequence[zipfile.ZipInfo]) -> list[str]:
    """Return the names with slashes between folders. Some programs write backslashes."""
    names = [member.filename for member in members]
    if not any("/" in name for name in names):
        names = [name.replace("\\", "/") for name in names]
    return [relative_name(name) for name in names]
