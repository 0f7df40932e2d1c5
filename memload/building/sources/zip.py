"""A zip file as a source. It is read like a folder."""

import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from memload.building.sources.columns import Columns
from memload.building.sources.listed import (
    ListedSource,
    add_folder_labels,
    is_hidden,
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
_ENCRYPTED = 1  # bit of the flags


class ZipArchive(ListedSource):
    """The images of a zip file, with one folder for each class, as in `memload.ImageFolder`.

    A folder that all images share is ignored. If no image lies in a folder, there are no labels.
    Files that are not images or are hidden are left out, and so are images beside the class
    folders. ``notes`` reports it. A key is the name of the image within the zip.

    Opening reads the directory of the zip, and no image. Raises SourceError if the file is not a
    zip, is encrypted, or has no images.

    >>> source = memload.ZipArchive("pets.zip")  # doctest: +SKIP
    """

    def __init__(self, path: str | Path, *, extensions: Sequence[str] = EXTENSIONS) -> None:
        self.path = Path(path)
        columns = Columns()
        members = _find_images(self.path, extensions, columns)
        names = without_shared_folders([member.filename for member in members])
        kept = add_folder_labels(columns, names)
        images = [members[position] for position in kept]
        self._offset = np.array([member.header_offset for member in images], np.int64)
        self._size = np.array([member.compress_size for member in images], np.int64)
        self._crc = np.array([member.CRC for member in images], np.uint32)
        self._is_deflated = np.array(
            [member.compress_type == zipfile.ZIP_DEFLATED for member in images]
        )
        status = self.path.stat()
        self._file_state = FileState(status.st_size, status.st_mtime_ns)
        self._file = PositionalFile(self.path)
        super().__init__([names[position] for position in kept], columns.finish())

    def _image(self, index: int) -> bytes:
        start = int(self._offset[index])
        header = self._file.read(start, _HEADER_BYTES)
        if len(header) != _HEADER_BYTES or not header.startswith(_SIGNATURE):
            raise DecodeError(f"{self.path} is damaged, or has changed since it was opened")
        start += _HEADER_BYTES + sum(_LENGTHS.unpack(header))
        data = self._file.read(start, int(self._size[index]))
        if self._is_deflated[index]:
            try:
                data = zlib.decompress(data, -zlib.MAX_WBITS)
            except zlib.error as error:
                raise DecodeError(f"{self.path} is damaged: {error}") from error
        if zlib.crc32(data) != self._crc[index]:
            raise DecodeError(f"{self.path} is damaged: the image has another checksum")
        return data

    def _state(self, index: int) -> FileState:
        return self._file_state


def _find_images(path: Path, extensions: Sequence[str], columns: Columns) -> list[zipfile.ZipInfo]:
    """Return the images in a zip. Raises SourceError."""
    endings = tuple(extension.lower() for extension in extensions)
    try:
        with zipfile.ZipFile(path) as archive:
            members = [member for member in archive.infolist() if not member.is_dir()]
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}.", path=path) from error
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{path} has names that are said to be UTF-8, and are not. Unpack it, and build the "
            "folder.",
            path=path,
        ) from error
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise SourceError(
            f"{path} is no zip file, or is truncated ({error}). Copy or download it again.",
            path=path,
        ) from error
    images = [
        member
        for member in members
        if member.filename.lower().endswith(endings) and not is_hidden(member.filename)
    ]
    if not images:
        raise SourceError(f"{path} has no image files ({' '.join(extensions)}).", path=path)
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
    if len(images) < len(members):
        columns.notes.append(f"skipped {len(members) - len(images):,} other files in {path}")
    return images
