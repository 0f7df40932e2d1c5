"""Tar files in the layout of WebDataset: files of one stem are a sample."""

import json
import os
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from memload.errors import SourceError
from memload.sources.archives import below_shared, is_hidden, labelled, relative
from memload.sources.columns import Columns, label_among
from memload.sources.contents import EXTENSIONS, EXTENSIONS_OF_KIND, Ranges, file_labels
from memload.sources.reading import Kind, Reading
from memload.sources.samples import Source
from memload.sources.tables import EXPORTED_KEY, numbers_or_texts, table_of, table_source
from memload.storage.keys import Keys

#: A tar ends with a block of zeros of so many bytes. Data in the next so many bytes means that two
#: tars were joined.
_BLOCK_BYTES, _TAIL_BYTES = 512, 1 << 20
#: What makes an extended header matter: another name or size, or a file with holes.
_NOT_PLAIN = (b" path=", b" size=", b" GNU.")


class _Member(NamedTuple):
    """Where the content of a file lies in its tar file, in bytes. A size of -1 means missing."""

    name: str
    start: int
    size: int


class _Sample(NamedTuple):
    """An image, and the files of its stem by extension; small files of texts as their bytes."""

    tar: int
    image: _Member
    files: Mapping[str, Any]


def open_tars(paths: Sequence[Path], reading: Reading) -> Source:
    """Open tar files, such as WebDataset's shards: 000123.jpg, .cls and .json are a sample.

    ``masks={"mask": "seg"}`` are files such as 000123.seg.png. Entries of the JSON are columns. The
    label is the content of ``.cls``, or one of them, or else the folder. Opening reads all headers
    and all small files. Samples are read by their position.

    Raises SourceError.

    >>> open_tars([Path("00000.tar"), Path("00001.tar")], Reading()).keys[0]  # doctest: +SKIP
    '00000.tar/000123.jpg'
    """
    skipped = Counter[str]()
    samples = [
        sample
        for number, path in enumerate(paths)
        for sample in _samples_of(number, _files(path, skipped), reading, skipped)
    ]
    if not samples:
        raise SourceError(f"{paths[0]}: there are no images in it. Check the path.", path=paths[0])
    names, notes = [sample.image.name for sample in samples], list[str]()
    table = _table(samples)
    if not (EXPORTED_KEY in table or reading.label or label_among(table)):
        samples, names, folders = _in_folders(samples, paths[0])
        table, notes = _table(samples), folders.notes
        if folders.classes:
            table["label"] = [name.partition("/")[0] for name in names]
    labels = file_labels(paths)
    keys = [f"{labels[sample.tar]}/{name}" for sample, name in zip(samples, names, strict=True)]
    source = table_source(
        Source(keys=Keys.of(keys), images=_ranges(paths, samples, [s.image for s in samples])),
        table,
        lambda entry, kind: _extra_ranges(paths, samples, entry, kind),
        reading,
        paths[0],
    )
    order = _order_of_classes(samples, table)
    if order and source.classes and reading.label in (None, "label"):
        source = source.with_classes(order)
    if skipped:
        shown = ", ".join(f"{kind} ({count:,})" for kind, count in skipped.most_common(5))
        source = source.with_note(f"skipped files in tars: {shown}")
    return source.with_note(*notes) if source.classes else source


def _ranges(
    paths: Sequence[Path], samples: Sequence[_Sample], members: Sequence[_Member | None]
) -> Ranges:
    """Return where members of samples are."""
    places = [(-1, -1) if member is None else member[1:] for member in members]
    starts, sizes = np.array(places, np.int64).T
    return Ranges(paths, np.array([sample.tar for sample in samples], np.int32), starts, sizes)


def _extra_ranges(
    paths: Sequence[Path], samples: Sequence[_Sample], entry: str, kind: Kind
) -> Ranges:
    """Return where the files are that an extension names."""
    endings = EXTENSIONS_OF_KIND[kind]
    names = [entry.lower(), *(f"{entry.lower()}{ending}" for ending in endings)]
    found = [next(filter(None, map(sample.files.get, names)), None) for sample in samples]
    return _ranges(paths, samples, found)


def _in_folders(
    samples: Sequence[_Sample], place: Path
) -> tuple[list[_Sample], list[str], Columns]:
    """Return samples in the order of classes, which are their folders, and names without others."""
    samples_of: dict[str, list[_Sample]] = {}  # of several tars, some may have the same names
    for sample in samples:
        samples_of.setdefault(sample.image.name, []).append(sample)
    shared, folders = below_shared(samples_of, Reading())
    names, columns = labelled(folders, Reading(), place)
    pairs = [(sample, name) for name in names for sample in samples_of[shared + name]]
    return [sample for sample, _ in pairs], [name for _, name in pairs], columns


def _table(samples: Sequence[_Sample]) -> dict[str, Any]:
    """Return what the JSON of all samples has, by name, and .cls as the label.

    If .cls has numbers and the label in the JSON is a text, that is the name of the class.
    """
    table: dict[str, Any] = table_of(map(_entries, samples))
    if any("cls" in sample.files for sample in samples):
        texts = [_text(sample) for sample in samples]
        labels = numbers_or_texts([text.strip() for text in texts])
        has_names = all(type(name) is str for name in table.get("label", [None]))
        if isinstance(labels, list) or not has_names:
            table["label"] = labels
    return table


def _text(sample: _Sample) -> str:
    """Return what .cls has, or nothing. Raises SourceError."""
    try:
        text: str = sample.files.get("cls", b"").decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SourceError(
            f"The .cls beside {sample.image.name} is no UTF-8: {error}. Write names in UTF-8."
        ) from error
    return text


def _order_of_classes(samples: Sequence[_Sample], table: Mapping[str, Any]) -> list[str]:
    """Return the names of classes in the order of .cls, if each number has one name, else none.

    ``memload export`` writes both.
    """
    labels = table.get("label", ())
    numbers = [sample.files.get("cls", b"").strip() for sample in samples]
    if not all(type(label) is str for label in labels) or not all(map(bytes.isdigit, numbers)):
        return []
    pairs = sorted({*zip(map(int, numbers), labels, strict=False)})
    names = [name for _, name in pairs]
    return names if [number for number, _ in pairs] == [*range(len({*names}))] else []


def _entries(sample: _Sample) -> Mapping[str, Any]:
    """Return the JSON beside an image, or nothing. Raises SourceError."""
    if "json" not in sample.files:
        return {}
    try:
        entries = json.loads(sample.files["json"])
    except (ValueError, RecursionError) as error:
        raise SourceError(
            f"The JSON beside {sample.image.name} cannot be read: {error}."
        ) from error
    return entries if isinstance(entries, dict) else {}


# ---------------------------------------------------------------------------------------- one file


def _files(path: Path, skipped: Counter[str]) -> dict[str, dict[str, Any]]:
    """Return the files of each stem by extension. Of several of one name, the last counts.

    Raises SourceError.
    """
    stems: dict[str, dict[str, Any]] = {}
    try:
        with path.open("rb") as file:
            for member in _members(path, file):
                folder, slash, name = member.name.rpartition("/")
                stem, _, extension = name.partition(".")
                if is_hidden(member.name):
                    skipped["hidden files"] += 1
                elif member.size < 0:
                    skipped["links"] += 1
                else:
                    content: Any = member
                    if extension.lower() in ("cls", "json"):
                        content = os.pread(file.fileno(), member.size, member.start)
                    stems.setdefault(folder + slash + stem, {})[extension.lower()] = content
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}.", path=path) from error
    return stems


def _samples_of(
    number: int, stems: Mapping[str, dict[str, Any]], reading: Reading, skipped: Counter[str]
) -> Iterator[_Sample]:
    """Yield the samples of a tar.

    Of several images of a stem, the first with a plain extension counts. If there is none, as with
    ``cat.1.jpg`` and ``cat.2.jpg``, each is a sample, unless the stem has other files, too.
    """
    extras = [entry.lower() for _, entry in reading.entries.values()]
    for files in stems.values():
        others = {file for file in files for each in extras if f"{file}.".startswith(f"{each}.")}
        images = [
            each
            for each in files
            if f".{each}".endswith(EXTENSIONS)
            and each not in others
            and reading.image in (None, each)
        ]
        plain = [each for each in images if "." not in each]
        chosen = plain[:1] or (images if len(images) == len(files) else images[:1])
        for each in chosen:
            yield _Sample(number, files[each], files)
        skipped.update(f".{each}" for each in files.keys() - {*chosen, *others, "cls", "json"})
        if not chosen:
            skipped["samples without an image"] += 1


def _members(path: Path, file: Any) -> Iterator[_Member]:
    """Yield the files and links in a tar. Raises SourceError if it is not read to its end."""
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            member = tar.next()
            while member is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # 1 KB for each member
                is_file = member.isreg() and not member.issparse()
                if is_file or member.issym() or member.islnk():
                    size = member.size if is_file else -1
                    yield _Member(relative(member.name), member.offset_data, size)
                while plain := _plain_file(file.fileno(), tar.offset):
                    yield plain
                    tar.offset = plain.start + _padded(plain.size)
                member = tar.next()
            end = tar.offset
    except (tarfile.TarError, EOFError) as error:
        raise SourceError(
            f"{path} is no tar file, or is compressed or truncated ({error}). Unpack it with "
            "gunzip, or copy or download it again.",
            path=path,
        ) from error
    mark, rest = (os.pread(file.fileno(), size, end) for size in (_BLOCK_BYTES, _TAIL_BYTES))
    if mark != bytes(_BLOCK_BYTES) or any(rest):
        raise SourceError(
            f"{path}: after {end:,} bytes, there is neither a file nor the end. It is truncated or "
            "damaged: copy or download it again. Or two tars were joined: unpack it with 'tar "
            f"--ignore-zeros -xf {path}', and build the folder.",
            path=path,
        )


def _plain_file(descriptor: int, offset: int) -> _Member | None:
    """Return the file whose header is at ``offset``, if it is of the usual kind.

    `tarfile` takes four times as long. It reads only the rest: links, folders, long names, sizes
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
        start = offset + _BLOCK_BYTES
        if kind == b"0":
            name = header[:100].partition(b"\0")[0].decode("utf-8", "surrogateescape")
            # A byte at 345 begins the first part of a long name, one at 135 ends a long size.
            is_plain = header[345] == 0 and header[135] in b" \0" and not name.endswith("/")
            return _Member(relative(name), start, size) if is_plain else None
        extended = os.pread(descriptor, min(size, _BLOCK_BYTES), start)
        if size > _BLOCK_BYTES or any(key in extended for key in _NOT_PLAIN):
            return None
        offset = start + _padded(size)
    return None


def _padded(size: int) -> int:
    """Return how many bytes a content takes in a tar."""
    return -(-size // _BLOCK_BYTES) * _BLOCK_BYTES
