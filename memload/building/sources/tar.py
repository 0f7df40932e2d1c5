"""Tar files as a source, in the layout of WebDataset."""

import os
import posixpath
import re
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from memload.building.sources.beside import EXTENSIONS_OF_KIND
from memload.building.sources.columns import ColumnCollector
from memload.building.sources.entries import ArrayEntries
from memload.building.sources.json_columns import add_json, has_key, has_label
from memload.building.sources.listed import (
    ListedSource,
    add_folder_labels,
    is_hidden,
    names_of,
    relative_name,
    without_shared_folders,
)
from memload.building.sources.positional import PositionalFile
from memload.building.sources.record import EXTENSIONS, FileState, Record
from memload.errors import DecodeError, SourceError

#: A tar ends with a block of zeros of so many bytes. Data in the next so many bytes means that two
#: tars were joined.
_BLOCK_BYTES, _TAIL_BYTES = 512, 1 << 20
#: What makes an extended header matter: another name or size, or a file with holes.
_NOT_PLAIN = (b" path=", b" size=", b" GNU.")


#: An extension that says what a file is, such as ``txt`` and ``depth.npy``, and does not number it.
_KIND = re.compile(r"[a-z_]+(\.\w+)?")


class _Member(NamedTuple):
    """Where the content of a file lies in its tar file, in bytes."""

    start: int
    size: int


class TarSample(NamedTuple):
    """The files of one stem: the image, by its name, the contents of ``.cls`` and ``.json``, and
    the masks and other arrays.
    """

    shard: int
    name: str
    image: _Member
    label: str | None
    json: str | None
    arrays: tuple[_Member | None, ...]


class TarShards(ListedSource):
    """The images of tar files, such as WebDataset's shards.

    Files of one stem are a sample: ``000123.jpg``, ``000123.cls`` and ``000123.json`` belong
    together. The stem is the name up to its first dot. Of several images, the first one whose
    extension is just that, such as ``.jpg``, is taken. If there is none, as with ``cat.1.jpg`` and
    ``cat.2.jpg``, each image is a sample. If the stem also has a label, JSON or mask file, only the
    first image is. ``.cls`` has the label: a number, or the name of a class. Numbers in the object
    of ``.json`` become columns. So do texts with few values and lists of numbers with the same
    shape in all samples, and those called ``label`` are names of classes, also of those that
    ``.cls`` numbers. Other files are left out, which ``notes`` reports. Links to images within a
    tar are followed.

    ``masks`` and ``arrays`` are the names of further files of a sample, without their extension:
    ``masks=["mask"]`` is ``000123.mask.png`` or ``000123.mask.npy``. A mapping gives them other
    names: ``masks={"mask": "png"}`` is ``000123.png`` beside ``000123.jpg``.
    ``points=["marks"]`` are entries of ``.json``: lists of x, y. ``boxes={"boxes": 100}`` are lists
    of up to 100 boxes x1, y1, x2, y2, see `DatasetSource`.

    A key is the name of the tar and of the image, such as ``00000.tar/000123.jpg``. If all samples
    have a text ``key`` in ``.json``, as in the files of `memload.export`, those are the keys.
    Without it and without labels, the folders in the tar are the classes, as in `ZipArchive`.

    Opening reads all headers and all small files, which takes some 0.1 ms a sample. A sample is
    read by its position, so samples may be in any order. Compressed tar files cannot be read so.

    Raises SourceError if a file is not a tar, is compressed or truncated, or has no images or none
    of the arrays.

    >>> from memload.building.sources.tar import TarShards
    >>> source = TarShards(["shards/00000.tar", "shards/00001.tar"])  # doctest: +SKIP
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        *,
        masks: Sequence[str] | Mapping[str, str] = (),
        arrays: Sequence[str] | Mapping[str, str] = (),
        points: Sequence[str] = (),
        boxes: Mapping[str, int] | None = None,
    ) -> None:
        members = _ArrayMembers(masks, arrays)
        #: the names and the kinds of the records' arrays
        self.arrays = members.kinds
        if members.kinds:
            self.identity = f"arrays {members.kinds!r} in {members.entry_of!r}"
        self._paths = [Path(path) for path in paths]
        self.path = self._paths[0]
        self._file = PositionalFile(self._paths[0])
        samples, skipped = self._list_samples(members)
        columns = ColumnCollector()
        names = [sample.name for sample in samples]
        if any(sample.label is not None for sample in samples):
            _add_classes(columns, samples)
        elif not any(map(has_label, samples)) and not all(map(has_key, samples)):
            names = without_shared_folders(names)
            order = add_folder_labels(columns, names)
            samples, names = [samples[n] for n in order], [names[n] for n in order]
        add_json(columns, samples, points, boxes or {})
        if skipped:
            kinds = ", ".join(f"{kind} ({count:,})" for kind, count in skipped.most_common(5))
            columns.notes.append(f"skipped files in tars: {kinds}")
        self._shard = np.array([sample.shard for sample in samples], np.int32)
        #: where each file of a sample lies, int64 ``(n, 2)``: its start and its size
        self._places = {"image": _places([sample.image for sample in samples])}
        for number, name in enumerate(self.arrays):
            self._places[name] = _places([sample.arrays[number] for sample in samples])
        shard_names = names_of(self._paths)
        keys = [
            f"{shard_names[sample.shard]}/{name}"
            for sample, name in zip(samples, names, strict=True)
        ]
        super().__init__(keys, columns.finish())

    def _list_samples(self, members: "_ArrayMembers") -> tuple[list[TarSample], Counter[str]]:
        """Return the samples of all tars, and how many files of some kinds are left out."""
        samples: list[TarSample] = []
        skipped = Counter[str]()
        self._states: list[FileState] = []
        for number, path in enumerate(self._paths):
            shard = _Shard(path, members)
            samples += shard.samples(number)
            self._states.append(shard.state)
            skipped += shard.skipped
        if not samples:
            shown = ", ".join(path.name for path in self._paths[:3])
            raise SourceError(f"{shown}: no images in it. Check the path.", path=self.path)
        members.check(samples, skipped, self.path)
        return samples, skipped

    def __getitem__(self, index: int) -> Record:
        arrays = {
            name: self._read(name, index)
            for name in self.arrays
            if self._places[name][index, 1] >= 0
        }
        return super().__getitem__(index)._replace(arrays=arrays)

    def _image(self, index: int) -> bytes:
        return self._read("image", index)

    def _read(self, name: str, index: int) -> bytes:
        path, (start, size) = self._paths[self._shard[index]], self._places[name][index].tolist()
        if self._file.path != path:  # one is open at a time: there may be thousands
            self._file = PositionalFile(path)
        data = self._file.read(start, size)
        if len(data) != size:
            raise DecodeError(f"{path.name} has been truncated")
        return data

    def _state(self, index: int) -> FileState:
        return self._states[int(self._shard[index])]


def _places(members: Sequence[_Member | None]) -> np.ndarray:
    """Return start and size of each member, int64 ``(n, 2)``; -1 for None."""
    return np.array([member or (-1, -1) for member in members], np.int64)


class _ArrayMembers:
    """Which files in a tar are masks and other arrays."""

    def __init__(
        self,
        masks: Sequence[str] | Mapping[str, str],
        arrays: Sequence[str] | Mapping[str, str],
    ) -> None:
        entries = ArrayEntries(_by_name(masks), _by_name(arrays))
        self.kinds, self.entry_of = entries.kinds, entries.entry_of

    def name_of(self, extension: str) -> str | None:
        """Return the array that a file with this extension, such as ``mask.png``, belongs to."""
        for name, entry in self.entry_of.items():
            first, last = f"{entry.lower()}.", f".{extension.rpartition('.')[2]}"
            is_kind = last in EXTENSIONS_OF_KIND[self.kinds[name]]
            if extension == entry.lower() or (extension == f"{first}{last[1:]}" and is_kind):
                return name
        return None

    def check(self, samples: Sequence[TarSample], skipped: Mapping[str, int], path: Path) -> None:
        """Raise SourceError if no sample has one of the arrays."""
        for number, (name, entry) in enumerate(self.entry_of.items()):
            if all(sample.arrays[number] is None for sample in samples):
                others = ", ".join(list(skipped)[:5]) or "none"
                kind = "mask" if self.kinds[name] == "mask" else "array"
                raise SourceError(
                    f"{path} has no files for the {kind} {name!r}, such as "
                    f"{_split(samples[0].name)[0]}.{entry}{'.png' * ('.' not in entry)}. Other "
                    f"files beside the images: {others}. Name one of them.",
                    path=path,
                )


def _by_name(entries: Sequence[str] | Mapping[str, str]) -> Sequence[str] | Mapping[str, str]:
    """Return names of files by those of their arrays, such as ``mask`` for ``mask.png``."""
    if isinstance(entries, (str, Mapping)):
        return entries
    return {entry.partition(".")[0]: entry for entry in entries}


class _Shard:
    """What one tar file holds: images, texts beside them, and how much else. Raises SourceError."""

    def __init__(self, path: Path, members: _ArrayMembers) -> None:
        self.path = path
        self._members = members
        self.skipped = Counter[str]()
        self._images: dict[str, _Member] = {}
        #: By extension and stem. A dict for each stem would take 0.2 KB a sample.
        self._texts: dict[str, dict[str, str]] = {"cls": {}, "json": {}}
        self._arrays: dict[str, dict[str, _Member]] = {name: {} for name in members.kinds}
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                for member in _members(path, file):
                    self._take(file, member)
        except OSError as error:
            raise SourceError(f"{path} cannot be read: {error.strerror}.", path=path) from error
        self.state = FileState(status.st_size, status.st_mtime_ns)

    def _take(self, file: Any, member: tarfile.TarInfo) -> None:
        name = relative_name(member.name)
        stem, extension = _split(name)
        last = "." + extension.rpartition(".")[2]
        place, array = self._place(name, member), self._members.name_of(extension)
        if name in self._images or stem in self._texts.get(extension, ()):
            self.skipped["files whose name comes again"] += 1
        if is_hidden(name):
            self.skipped["hidden files"] += 1
        elif place is None:
            self.skipped["links to what is not an image of the tar"] += 1
        elif array is not None:
            if stem in self._arrays[array]:
                raise SourceError(
                    f"{self.path} has two files of {stem} for {array!r}; the second is {name}. "
                    "Keep one of them, or name its ending, such as mask.png.",
                    path=self.path,
                )
            self._arrays[array][stem] = place
        elif last in EXTENSIONS:
            self._images[name] = place
        elif extension in self._texts:
            content = os.pread(file.fileno(), place.size, place.start)
            self._texts[extension][stem] = content.decode("utf-8", "replace")
        else:
            self.skipped[f".{extension}" if _KIND.fullmatch(extension) else last] += 1

    def _place(self, name: str, member: tarfile.TarInfo) -> _Member | None:
        """Return where the content is. That of a link has come before."""
        if member.isreg() and not member.issparse():
            return _Member(member.offset_data, member.size)
        target = member.linkname
        if member.issym():
            target = posixpath.join(posixpath.dirname(name), target)
        return self._images.get(relative_name(target))

    def _is_one_sample(self, stem: str) -> bool:
        """Return whether files beside its images show that a stem is one sample."""
        beside: list[Mapping[str, Any]] = [*self._texts.values(), *self._arrays.values()]
        return any(stem in found for found in beside)

    def samples(self, number: int) -> Iterator[TarSample]:
        """Yield the samples, which belong to the shard of this number."""
        labels, objects = self._texts["cls"], self._texts["json"]
        names: dict[str, list[str]] = {}
        for name in self._images:
            names.setdefault(_split(name)[0], []).append(name)
        for stem, candidates in names.items():
            plain = [name for name in candidates if "." not in _split(name)[1]]
            chosen = plain[:1] or (candidates[:1] if self._is_one_sample(stem) else candidates)
            for name in candidates:
                if name not in chosen:
                    self.skipped[f".{_split(name)[1]} beside another image"] += 1
            arrays = tuple(places.get(stem) for places in self._arrays.values())
            for name in chosen:
                texts = labels.get(stem), objects.get(stem)
                yield TarSample(number, name, self._images[name], *texts, arrays)
        without = len((labels.keys() | objects.keys()) - names.keys())
        if without:
            self.skipped["samples without an image"] += without


def _members(path: Path, file: Any) -> Iterator[tarfile.TarInfo]:
    """Yield the files and links in a tar. Raises SourceError if it is not read to its end."""
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            member = tar.next()
            while member is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # 1 KB for each member
                if member.isreg() or member.issym() or member.islnk():
                    yield member
                while plain := _plain_file(file.fileno(), tar.offset):
                    yield plain
                    tar.offset = _block_after(plain)
                member = tar.next()
            end = tar.offset
    except (tarfile.TarError, EOFError) as error:
        with path.open("rb") as start:
            is_gzip = start.read(2) == b"\x1f\x8b"
        problem = "is compressed" if is_gzip else f"is no tar file, or is truncated ({error})"
        remedy = f"Unpack it with 'gunzip {path}'" if is_gzip else "Copy or download it again"
        raise SourceError(f"{path} {problem}. {remedy}.", path=path) from error
    mark, rest = (os.pread(file.fileno(), size, end) for size in (_BLOCK_BYTES, _TAIL_BYTES))
    if mark != bytes(_BLOCK_BYTES):
        raise SourceError(
            f"{path} is truncated or damaged: after {end:,} bytes there is neither a file nor the "
            "mark of its end. Copy or download it again, or unpack and pack it anew.",
            path=path,
        )
    if any(rest):
        raise SourceError(
            f"{path} has more data after the mark of its end, as if two tars had been joined. "
            f"Unpack it with 'tar --ignore-zeros -xf {path}', and build the folder.",
            path=path,
        )


def _plain_file(descriptor: int, offset: int) -> tarfile.TarInfo | None:
    """Return the file whose header is at ``offset``, if it is of the usual kind.

    `tarfile` takes ten times as long. It reads only the rest: links, folders, long names, sizes
    above 8 GB, and the end. An extended header is passed over if it has neither a name nor a
    size, such as that of a time with fractions of a second, as WebDataset writes them.
    """
    for _ in range(2):  # an extended header, and the header of the file
        header = os.pread(descriptor, _BLOCK_BYTES, offset)
        kind = header[156:157]
        if len(header) != _BLOCK_BYTES or header[257:262] != b"ustar" or kind not in (b"0", b"x"):
            return None
        try:
            size, checksum = int(header[124:135], 8), int(header[148:156].rstrip(b" \0"), 8)
        except ValueError:  # such as a large size, which is binary
            return None
        # In the sum of all bytes, the checksum itself counts as eight spaces.
        if sum(header) - sum(header[148:156]) + sum(b" " * 8) != checksum or size < 0:
            return None
        name = header[:100].partition(b"\0")[0].decode("utf-8", "surrogateescape")
        member = tarfile.TarInfo(name)
        member.size, member.offset_data = size, offset + _BLOCK_BYTES
        if kind == b"0":
            # A byte at 345 begins the first part of a long name, one at 135 ends a long size.
            is_plain = header[345] == 0 and header[135] in b" \0" and not name.endswith("/")
            return member if is_plain else None
        extended = os.pread(descriptor, min(size, _BLOCK_BYTES), member.offset_data)
        if size > _BLOCK_BYTES or any(key in extended for key in _NOT_PLAIN):
            return None
        offset = _block_after(member)
    return None


def _block_after(member: tarfile.TarInfo) -> int:
    """Return where the header behind a file's content begins."""
    return member.offset_data + -(-member.size // _BLOCK_BYTES) * _BLOCK_BYTES


def _split(name: str) -> tuple[str, str]:
    """Return the stem, with its folder, and the extension without its dot, in lower case."""
    folder, slash, file = name.rpartition("/")
    stem, _, extension = file.partition(".")
    return folder + slash + stem, extension.lower()


def _add_classes(columns: ColumnCollector, samples: Sequence[TarSample]) -> None:
    texts = [(sample.label or "").strip() for sample in samples]
    if "" in texts:
        raise SourceError(
            f"{texts.count(''):,} of {len(texts):,} samples have no label in a .cls file; the "
            f"first is {samples[texts.index('')].name}. Add them, or remove all .cls files."
        )
    if not all(text.lstrip("+-").isdecimal() for text in texts):
        columns.add_labels(texts)
        return
    numbers = np.zeros(len(texts), np.int64)
    for row, text in enumerate(texts):
        try:
            numbers[row] = int(text)
        except (ValueError, OverflowError) as error:
            raise SourceError(
                f"The label of {samples[row].name} is no integer of 64 bits: {text:.40}. Correct "
                "it."
            ) from error
    columns.add_labels(numbers)
