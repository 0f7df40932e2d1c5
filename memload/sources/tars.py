"""Tar files in the layout of WebDataset: files of one stem are a sample."""

import json
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from memload.errors import SourceError
from memload.sources.archives import arranged, by_folder, is_hidden, without_shared_folders
from memload.sources.columns import LABEL_NAMES, Columns, columns_of
from memload.sources.contents import EXTENSIONS, EXTENSIONS_OF_KIND, Ranges
from memload.sources.samples import Reading, Samples
from memload.sources.tables import KEY
from memload.storage.keys import Keys

#: A tar ends with a block of zeros of so many bytes. Data in the next so many bytes means that two
#: tars were joined.
_BLOCK_BYTES, _TAIL_BYTES = 512, 1 << 20
#: What makes an extended header matter: another name or size, or a file with holes.
_NOT_PLAIN = (b" path=", b" size=", b" GNU.")
#: An extension that says what a file is, such as ``txt`` and ``depth.npy``, and does not number it.
_KIND = re.compile(r"[a-z_]+(\.\w+)?")


class _Member(NamedTuple):
    """Where the content of a file lies in its tar file, in bytes. -1 is missing."""

    name: str
    start: int
    size: int


@dataclass
class _Tar:
    """What a tar has, and how much else. Texts and other arrays are found by stems."""

    images: dict[str, _Member] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    objects: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, dict[str, _Member]] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)


class _Sample(NamedTuple):
    """The files of one stem: the image, then masks and other arrays; and what is in texts."""

    tar: int
    stem: str
    members: tuple[_Member | None, ...]
    label: str | None
    text: str | None  #: of its JSON
    name: str  #: of the image


def open_tars(paths: Sequence[Path], reading: Reading) -> Samples:
    """Open tar files, such as WebDataset's shards: 000123.jpg, .cls and .json are a sample.

    ``masks={"mask": "seg"}`` are files such as 000123.seg.png. Entries of the JSON are columns. The
    label is the content of ``.cls``, or an entry of the JSON, or else the folder. Opening reads all
    headers and all small files. Samples are read by their position.

    Raises SourceError.

    >>> open_tars([Path("00000.tar"), Path("00001.tar")], Reading()).keys[0]  # doctest: +SKIP
    '00000.tar/000123.jpg'
    """
    tars = [_read_tar(path, reading) for path in paths]
    samples = [sample for number, tar in enumerate(tars) for sample in _samples_of(tar, number)]
    if not samples:
        raise SourceError(f"{paths[0]}: there are no images in it. Check the path.", path=paths[0])
    (table, classes), folders = _entries(samples, reading.label), Columns()
    is_exported = all(type(key) is str for key in table.get(KEY, [None]))
    keys = table.pop(KEY) if is_exported else []
    if not (is_exported or reading.label or any(name in table for name in LABEL_NAMES)):
        samples, folders = _in_folders(samples, str(paths[0]))
        table, _ = _entries(samples, None)
        if folders.classes is not None:
            table["label"] = [folders.classes[number] for number in folders.values["label"]]
    columns = columns_of(
        table,
        label=reading.label,
        class_names={"label": classes},
        points=reading.points,
        boxes=reading.boxes,
        is_exported=is_exported,
    )
    columns.notes[:0] = folders.notes if folders.classes is not None else []
    columns.are_parts = folders.are_parts
    columns.part_remedy = "Unpack it, and build each of its folders by itself."
    if skipped := sum((tar.skipped for tar in tars), Counter[str]()):
        shown = ", ".join(f"{kind} ({count:,})" for kind, count in skipped.most_common(5))
        columns.notes.append(f"skipped files in tars: {shown}")
    keys = keys or _names(samples, paths)
    return _with_arrays(
        Samples(Keys.of(keys), _ranges(paths, samples, 0), columns), samples, reading
    )


def _names(samples: Sequence[_Sample], paths: Sequence[Path]) -> list[str]:
    """Return the names of the tar and of the image, such as ``00000.tar/000123.jpg``."""
    tars = [path.name for path in paths]
    tars = tars if len({*tars}) == len(tars) else [*map(str, paths)]
    return [f"{tars[sample.tar]}/{sample.name}" for sample in samples]


def _with_arrays(opened: Samples, samples: Sequence[_Sample], reading: Reading) -> Samples:
    """Return samples with their masks and other arrays. Raises SourceError if there are none."""
    assert isinstance(opened.images, Ranges)
    for number, (name, ending) in enumerate(reading.entries.items(), 1):
        kind = reading.kind_of(name)
        if not any(sample.members[number] for sample in samples):
            raise SourceError(
                f"The tar files have no files for the {kind} {name!r}, such as "
                f"{samples[0].stem}.{ending}.png. Check --{kind}."
            )
        opened = opened.with_extra(name, kind, _ranges(opened.images.paths, samples, number))
    return opened


def _ranges(paths: Sequence[Path], samples: Sequence[_Sample], number: int) -> Ranges:
    """Return where the members with this number are."""
    members = [sample.members[number] for sample in samples]
    places = [(-1, -1) if member is None else member[1:] for member in members]
    starts, sizes = np.array(places, np.int64).T
    return Ranges(paths, np.array([sample.tar for sample in samples], np.int32), starts, sizes)


def _in_folders(samples: Sequence[_Sample], place: str) -> tuple[list[_Sample], Columns]:
    """Return samples in the order of classes, which are their folders, and columns."""
    samples_of: dict[str, list[_Sample]] = {}
    short = without_shared_folders([sample.name for sample in samples])
    for name, sample in zip(short, samples, strict=True):
        samples_of.setdefault(name, []).append(sample._replace(name=name))
    columns = Columns()
    in_order = [samples_of[name] for name in arranged(by_folder([*samples_of]), columns, place)]
    if columns.classes is not None:
        columns.values["label"] = np.repeat(columns.values["label"], [*map(len, in_order)])
    return [sample for several in in_order for sample in several], columns


def _entries(
    samples: Sequence[_Sample], label: str | None
) -> tuple[dict[str, list[Any]], list[str]]:
    """Return what .cls and the JSON of all samples have, by name, and the names of classes.

    None is missing. The names are those that the JSON has for all numbers in .cls.
    """
    table: dict[str, list[Any]] = {}
    for row, sample in enumerate(samples):  # not a list of all objects: it takes 0.4 KB per sample
        for name, value in _parse(sample).items():
            if name not in table:
                table[name] = [None] * len(samples)
            table[name][row] = value
    if label is not None or all(sample.label is None for sample in samples):
        return table, []
    labels, names = _labels(samples), table.get("label", [None])
    if not all(type(name) is str for name in names) or type(labels[0]) is str:
        return {**table, "label": labels}, []
    name_of = dict(zip(labels, names, strict=True))
    classes = [name_of[number] for number in sorted(name_of)]
    if [*sorted(name_of)] != [*range(len(name_of))] or len({*classes}) < len(classes):
        return table, []  # some classes have no sample: their names count
    return {**table, "label": labels}, classes


def _parse(sample: _Sample) -> dict[str, Any]:
    try:
        entries = {} if sample.text is None else json.loads(sample.text)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"The JSON beside {sample.name} cannot be read: {error}.") from error
    return entries if isinstance(entries, dict) else {}


def _labels(samples: Sequence[_Sample]) -> list[Any]:
    """Return the labels in .cls: integers if all are, else texts."""
    texts = [(sample.label or "").strip() for sample in samples]
    if "" in texts:
        raise SourceError(
            f"{texts.count(''):,} of {len(texts):,} samples have no label in a .cls file; the "
            f"first is {samples[texts.index('')].name}. Add them, or remove all .cls files."
        )
    are_numbers = all(text.lstrip("+-").isdecimal() for text in texts)
    return [int(text) for text in texts] if are_numbers else texts


# ---------------------------------------------------------------------------------------- one file


def _read_tar(path: Path, reading: Reading) -> _Tar:
    """Return what a tar has. Raises SourceError."""
    tar = _Tar(arrays={name: {} for name in reading.entries})
    try:
        with path.open("rb") as file:
            for member in _members(path, file):
                _take(tar, member, file.fileno(), reading)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}.", path=path) from error
    return tar


def _take(tar: _Tar, member: _Member, descriptor: int, reading: Reading) -> None:
    """Add a member to what a tar has. Of several of one name, the last counts."""
    stem, extension = _split(member.name)
    last = f".{extension.rpartition('.')[2]}"
    array = _array_of(extension, last, reading)
    if is_hidden(member.name):
        tar.skipped["hidden files"] += 1
    elif member.size < 0:
        tar.skipped["links"] += 1
    elif array is not None:
        if stem in tar.arrays[array]:
            raise SourceError(f"There are two files of {stem} for {array!r}. Keep one of them.")
        tar.arrays[array][stem] = member
    elif extension in ("cls", "json"):
        texts = tar.labels if extension == "cls" else tar.objects
        texts[stem] = os.pread(descriptor, member.size, member.start).decode("utf-8", "replace")
    elif last in EXTENSIONS and reading.image in (None, extension):
        if member.name in tar.images:
            tar.skipped["files whose name comes again"] += 1
        tar.images[member.name] = member
    else:
        tar.skipped[f".{extension}" if _KIND.fullmatch(extension) else last] += 1


def _array_of(extension: str, last: str, reading: Reading) -> str | None:
    """Return the array that a file with this extension, such as ``mask.png``, belongs to."""
    for name, entry in reading.entries.items():
        is_kind = last in EXTENSIONS_OF_KIND[reading.kind_of(name)]
        if extension == entry.lower() or (extension == f"{entry.lower()}{last}" and is_kind):
            return name
    return None


def _samples_of(tar: _Tar, number: int) -> Iterator[_Sample]:
    """Yield the samples of a tar.

    Of several images of a stem, the first with a plain extension counts. If there is none, as with
    ``cat.1.jpg`` and ``cat.2.jpg``, each is a sample, unless the stem has a label or an array.
    """
    names: dict[str, list[str]] = {}
    for name in tar.images:
        names.setdefault(_split(name)[0], []).append(name)
    for stem, candidates in names.items():
        beside = (tar.labels, tar.objects, *tar.arrays.values())
        plain = [name for name in candidates if "." not in _split(name)[1]]
        is_one = any(stem in found for found in beside)  # type: ignore[operator]
        chosen = plain[:1] or (candidates[:1] if is_one else candidates)
        for name in candidates:
            if name not in chosen:
                tar.skipped[f".{_split(name)[1]} beside another image"] += 1
        arrays = [found.get(stem) for found in tar.arrays.values()]
        for name in chosen:
            texts = tar.labels.get(stem), tar.objects.get(stem)
            yield _Sample(number, stem, (tar.images[name], *arrays), *texts, name)
    if lost := len((tar.labels.keys() | tar.objects.keys()) - names.keys()):
        tar.skipped["samples without an image"] += lost


def _split(name: str) -> tuple[str, str]:
    """Return the stem, with its folder, and the extension without its dot, in lower case."""
    folder, slash, file = name.rpartition("/")
    stem, _, extension = file.partition(".")
    return folder + slash + stem, extension.lower()


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
                    yield _Member(_relative(member.name), member.offset_data, size)
                while plain := _plain_file(file.fileno(), tar.offset):
                    yield plain
                    tar.offset = plain.start + _padded(plain.size)
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


def _relative(name: str) -> str:
    """Return a name without ``./``, ``../`` and a leading ``/``."""
    return "/".join(part for part in name.split("/") if part not in ("", ".", ".."))


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
            return _Member(_relative(name), start, size) if is_plain else None
        extended = os.pread(descriptor, min(size, _BLOCK_BYTES), start)
        if size > _BLOCK_BYTES or any(key in extended for key in _NOT_PLAIN):
            return None
        offset = start + _padded(size)
    return None


def _padded(size: int) -> int:
    """Return how many bytes a content takes in a tar."""
    return -(-size // _BLOCK_BYTES) * _BLOCK_BYTES
