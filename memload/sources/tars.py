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
from memload.sources.archives import arranged, by_folder, is_hidden, shared_folder
from memload.sources.columns import Columns, label_among
from memload.sources.contents import EXTENSIONS, EXTENSIONS_OF_KIND, Ranges
from memload.sources.samples import Reading, Samples
from memload.sources.tables import EXPORTED_KEY, numbers_or_texts, table_samples
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
    name: str  #: of the image, with its folders
    image: _Member
    files: Mapping[str, Any]


def open_tars(paths: Sequence[Path], reading: Reading) -> Samples:
    """Open tar files, such as WebDataset's shards: 000123.jpg, .cls and .json are a sample.

    ``masks={"mask": "seg"}`` are files such as 000123.seg.png. Entries of the JSON are columns. The
    label is the content of ``.cls``, or an entry of the JSON, or else the folder. Opening reads all
    headers and all small files. Samples are read by their position.

    Raises SourceError.

    >>> open_tars([Path("00000.tar"), Path("00001.tar")], Reading()).keys[0]  # doctest: +SKIP
    '00000.tar/000123.jpg'
    """
    skipped, columns = Counter[str](), Columns()
    samples = [
        sample
        for number, path in enumerate(paths)
        for sample in _samples_of(number, _files(path, skipped), reading, skipped)
    ]
    if not samples:
        raise SourceError(f"{paths[0]}: there are no images in it. Check the path.", path=paths[0])
    table, class_names = _table(samples)
    if not (EXPORTED_KEY in table or reading.label or label_among(table)):
        samples = _in_folders(samples, columns, paths[0])
        table, _ = _table(samples)
        if columns.classes:
            labels = [columns.classes[number] for number in columns.values["label"]]
            table["label"] = labels
    tars = [path.name for path in paths]
    tars = tars if len({*tars}) == len(tars) else [*map(str, paths)]
    keys = Keys.of([f"{tars[sample.tar]}/{sample.name}" for sample in samples])
    opened = table_samples(
        Samples(keys, _ranges(paths, samples, [sample.image for sample in samples])),
        table,
        lambda entry: _extra_ranges(paths, samples, reading, entry),
        reading,
        paths[0],
        class_names={"label": class_names},
    )
    if columns.classes:
        opened.columns.are_parts = columns.are_parts
        opened = opened.with_note(*columns.notes)
    if skipped:
        shown = ", ".join(f"{kind} ({count:,})" for kind, count in skipped.most_common(5))
        opened = opened.with_note(f"skipped files in tars: {shown}")
    return opened


def _ranges(
    paths: Sequence[Path], samples: Sequence[_Sample], members: Sequence[_Member | None]
) -> Ranges:
    """Return where members of samples are."""
    places = [(-1, -1) if member is None else member[1:] for member in members]
    starts, sizes = np.array(places, np.int64).T
    return Ranges(paths, np.array([sample.tar for sample in samples], np.int32), starts, sizes)


def _extra_ranges(
    paths: Sequence[Path], samples: Sequence[_Sample], reading: Reading, entry: str
) -> Ranges:
    """Return where the files are that an extension names. Raises SourceError if there are none."""
    endings = EXTENSIONS_OF_KIND["mask" if entry in reading.masks.values() else "array"]
    names = [entry.lower(), *(f"{entry.lower()}{ending}" for ending in endings)]
    found = [next(filter(None, map(sample.files.get, names)), None) for sample in samples]
    if not any(found):
        stem = samples[0].name.rpartition(".")[0]
        raise SourceError(
            f"The tar files have no files for {entry!r:.80}, such as {stem}.{entry}.png. Check "
            "--mask or --array."
        )
    return _ranges(paths, samples, found)


def _in_folders(samples: Sequence[_Sample], columns: Columns, place: Path) -> list[_Sample]:
    """Return samples in the order of classes, which are their folders, and add labels."""
    shared = len(shared_folder([sample.name for sample in samples]))
    samples_of: dict[str, list[_Sample]] = {}
    for sample in samples:
        name = sample.name[shared:]
        samples_of.setdefault(name, []).append(sample._replace(name=name))
    in_order = [
        samples_of[name] for name in arranged(by_folder([*samples_of]), columns, str(place))
    ]
    if columns.classes is not None:
        columns.values["label"] = np.repeat(columns.values["label"], [*map(len, in_order)])
    return [sample for several in in_order for sample in several]


def _table(samples: Sequence[_Sample]) -> tuple[dict[str, Any], list[str]]:
    """Return what .cls and the JSON of all samples have, by name, and the names of classes.

    None means missing. The names are those that the JSON has for all numbers in .cls, as
    ``memload export`` writes them.
    """
    table: dict[str, Any] = {}
    for row, sample in enumerate(samples):  # not a list of all objects: it takes 0.4 KB per sample
        if "json" not in sample.files:
            continue
        try:
            entries = json.loads(sample.files["json"])
        except (ValueError, RecursionError) as error:
            raise SourceError(f"The JSON beside {sample.name} cannot be read: {error}.") from error
        for name, value in entries.items() if isinstance(entries, dict) else ():
            if name not in table:
                table[name] = [None] * len(samples)
            table[name][row] = value
    if any("cls" in sample.files for sample in samples):
        labels = [sample.files.get("cls", b"").decode("utf-8", "replace") for sample in samples]
        numbers, names = (
            numbers_or_texts([each.strip() for each in labels]),
            table.get("label", [0]),
        )
        if isinstance(numbers, list) or not all(type(name) is str for name in names):
            return {**table, "label": numbers}, []
        pairs = sorted({*zip(numbers.tolist(), names, strict=True)})
        classes = [name for _, name in pairs]
        if [number for number, _ in pairs] == [*range(len({*classes}))]:  # else the names count
            return {**table, "label": numbers}, classes
    return table, []


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
                    extension, files = (
                        extension.lower(),
                        stems.setdefault(folder + slash + stem, {}),
                    )
                    is_text = extension in ("cls", "json")
                    files[extension] = (
                        os.pread(file.fileno(), member.size, member.start) if is_text else member
                    )
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
            yield _Sample(number, files[each].name, files[each], files)
        if len(files) > len(chosen):
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
                    yield _Member(_relative(member.name), member.offset_data, size)
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
