"""Tar files as a source, in the layout of WebDataset."""

import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from memload.building.sources.columns import Columns
from memload.building.sources.listed import ListedSource, add_folder_labels
from memload.building.sources.positional import PositionalFile
from memload.building.sources.record import EXTENSIONS, FileState
from memload.errors import DecodeError, SourceError
from memload.storage.format import RESERVED

#: A tar file ends with at least one block of zeros of this many bytes.
_BLOCK_BYTES = 512


class _Member(NamedTuple):
    """Where the content of a file lies in its tar file, in bytes."""

    start: int
    size: int


class _Sample(NamedTuple):
    """The files of one stem: the image and its name, and the contents of the other files."""

    key: str
    image: _Member
    texts: dict[str, str]


class TarShards(ListedSource):
    """The images of tar files, such as WebDataset's shards.

    Files of one stem are a sample: ``000123.jpg``, ``000123.cls`` and ``000123.json`` belong
    together. The stem is the name up to its first dot. Of several images, the one whose extension
    is just that, such as ``.jpg``, is taken. ``.cls`` has the label: a number, or the name of a
    class. Numbers in the object of ``.json`` become columns. So do texts with few values. Other
    files are left out, which ``notes`` reports. Without any ``.cls``, the folders in the tar are
    the classes, as in an image folder. A key is the name of the tar and of the image, such as
    ``00000.tar/000123.jpg``.

    Opening reads all headers and all small files, which takes some 0.1 ms a sample. A sample is
    read by its position, so samples may be in any order. Compressed tar files cannot be read so.

    Raises SourceError if a file is not a tar, is compressed or truncated, or has no images.

    >>> source = memload.TarShards(["shards/00000.tar", "shards/00001.tar"])  # doctest: +SKIP
    """

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self._paths = [Path(path) for path in paths]
        self._states: list[FileState] = []
        self._file = PositionalFile(self._paths[0])
        columns = Columns()
        samples: list[_Sample] = []
        shards: list[int] = []
        skipped: dict[str, int] = {}
        for number, path in enumerate(self._paths):
            status = _stat(path)
            self._states.append(FileState(status.st_size, status.st_mtime_ns))
            found = list(_samples(path, skipped, columns.notes))
            samples += found
            shards += [number] * len(found)
        if not samples:
            names = ", ".join(path.name for path in self._paths[:3])
            raise SourceError(f"{names}: no images in it. Check the path.", path=self._paths[0])
        self._shard = np.array(shards, np.int32)
        self._start = np.array([sample.image.start for sample in samples], np.int64)
        self._size = np.array([sample.image.size for sample in samples], np.int64)
        keys = [sample.key for sample in samples]
        if any("cls" in sample.texts for sample in samples):
            _add_classes(columns, samples)
        else:
            keys = add_folder_labels(columns, keys)
        _add_json(columns, samples)
        if skipped:
            kinds = ", ".join(f"{kind} ({count:,})" for kind, count in sorted(skipped.items())[:5])
            columns.notes.append(f"skipped files in tars: {kinds}")
        keys = [f"{self._paths[n].name}/{key}" for n, key in zip(shards, keys, strict=True)]
        super().__init__(keys, columns.finish())

    def _image(self, index: int) -> bytes:
        path, size = self._paths[self._shard[index]], int(self._size[index])
        if self._file.path != path:  # one is open at a time: there may be thousands
            self._file = PositionalFile(path)
        data = self._file.read(int(self._start[index]), size)
        if len(data) != size:
            raise DecodeError(f"{path} has been truncated")
        return data

    def _state(self, index: int) -> FileState:
        return self._states[int(self._shard[index])]


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}.", path=path) from error


def _samples(path: Path, skipped: dict[str, int], notes: list[str]) -> Iterator[_Sample]:
    """Yield the samples of one tar file. Counts files that are left out by their extension."""
    images: dict[str, tuple[str, _Member]] = {}
    texts: dict[str, dict[str, str]] = {}
    with path.open("rb") as file:
        for name, member in _members(path, file, notes):
            stem, extension = _split(name)
            last = "." + extension.rpartition(".")[2]
            if last in EXTENSIONS:
                is_plain = last == f".{extension}"
                if stem not in images or (is_plain and _split(images[stem][0])[1].count(".")):
                    images[stem] = (name, member)
            elif extension in ("cls", "json"):
                content = os.pread(file.fileno(), member.size, member.start)
                texts.setdefault(stem, {})[extension] = content.decode("utf-8", "replace")
            else:
                skipped[last] = skipped.get(last, 0) + 1
    without = [stem for stem in texts if stem not in images]
    if without:
        notes.append(f"skipped {len(without):,} samples of {path} without an image: {without[0]}")
    for stem, (name, member) in images.items():
        yield _Sample(name, member, texts.get(stem, {}))


def _members(path: Path, file: Any, notes: list[str]) -> Iterator[tuple[str, _Member]]:
    """Yield name and place of each regular file. Raises SourceError."""
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            while (member := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # it would keep 1 KB for each member
                if member.isreg():
                    yield member.name.removeprefix("./"), _Member(member.offset_data, member.size)
            end = tar.offset
    except (tarfile.TarError, EOFError) as error:
        with path.open("rb") as start:
            is_gzip = start.read(2) == b"\x1f\x8b"
        problem = "is compressed" if is_gzip else f"is no tar file, or is truncated ({error})"
        remedy = f"Unpack it with 'gunzip {path}'" if is_gzip else "Copy or download it again"
        raise SourceError(f"{path} {problem}. {remedy}.", path=path) from error
    if os.pread(file.fileno(), _BLOCK_BYTES, end) != bytes(_BLOCK_BYTES):
        notes.append(f"{path} has no mark at its end. It may be truncated")


def _split(name: str) -> tuple[str, str]:
    """Return the stem, with its folder, and the extension without its dot, in lower case."""
    folder, slash, file = name.rpartition("/")
    stem, _, extension = file.partition(".")
    return folder + slash + stem, extension.lower()


def _add_classes(columns: Columns, samples: Sequence[_Sample]) -> None:
    texts = [sample.texts.get("cls", "").strip() for sample in samples]
    if "" in texts:
        raise SourceError(
            f"{texts.count(''):,} of {len(texts):,} samples have no label in a .cls file; the "
            f"first is {samples[texts.index('')].key}. Add them, or remove all .cls files."
        )
    is_number = all(text.lstrip("+-").isdecimal() for text in texts)
    columns.add_labels(np.array([int(text) for text in texts]) if is_number else texts)


def _add_json(columns: Columns, samples: Sequence[_Sample]) -> None:
    """Add the entries of the samples' JSON objects."""
    objects = [_parse(sample) for sample in samples]
    for name in dict.fromkeys(name for entries in objects for name in entries):
        values = [entries.get(name) for entries in objects]
        if name in columns.values or name in RESERVED or "/" in name:
            columns.skip(name, "its name is taken")
        else:
            columns.add_values(name, values)


def _parse(sample: _Sample) -> dict[str, Any]:
    try:
        entries = json.loads(sample.texts.get("json", "{}"))
    except ValueError as error:
        raise SourceError(f"The JSON beside {sample.key} cannot be read: {error}.") from error
    return entries if isinstance(entries, dict) else {}
