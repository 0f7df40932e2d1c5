"""Read, check and write the index file. `memload.storage.format` is its specification."""

import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from memload.errors import ChecksumError, FormatError, MissingError
from memload.storage.format import (
    DESCRS,
    FORMAT_VERSION,
    HEADER_BYTES,
    MAX_DEPTH,
    METADATA_KEY,
    RESERVED,
    index_path,
    output_paths,
    shard_names,
)
from memload.storage.header import Header, header_bytes, load_json, parse_header
from memload.storage.keys import Keys
from memload.storage.mapping import address_of, fault_in, forget, identity, map_file

#: So much of an index is asked for when it is opened, 0.4 ms for 1.28 million samples, so that a disk that fails is
#: told then; of a larger one, which may be a hole of any size, the rest is read through the map when it is used.
_ASKED = 1 << 30

#: Characters that make more of a file's name than a name: on Windows a drive, a stream or a folder too.
_NO_NAME = frozenset("/\\:\0" if os.name == "nt" else "/\0")

#: More letters no file system takes.
_LONGEST_NAME = 255


@dataclass(frozen=True)
class Shard:
    """One data file: its bare name, how many rows it holds and its exact size in bytes."""

    file: str
    rows: int
    bytes: int


@dataclass(frozen=True)
class Array:
    """One named array: rows of ``shape`` (H, W, C) and element type ``descr``, spread over shards."""

    name: str
    descr: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]

    @property
    def rows(self) -> int:
        """How many rows all shards hold together."""
        return sum(shard.rows for shard in self.shards)

    @property
    def row_bytes(self) -> int:
        """The size of a row in bytes."""
        return row_bytes(self.descr, self.shape)


def row_bytes(descr: str, shape: Sequence[int]) -> int:
    """Return the size in bytes of one row of this element type and shape."""
    size = int(descr[2:])
    for extent in shape:
        size *= extent
    return size


@dataclass(frozen=True)
class Index:
    """All that is known of a data set except its pixels.

    ``row`` int64 ``(n,)``, ``flags`` uint8 ``(n,)``, ``keys`` n names, ``columns`` name → ``(n, …)``, ``crc32``
    name of an array → uint32 ``(rows,)``. Arrays of an index that was read are mapped copy-on-write.
    """

    path: Path
    arrays: tuple[Array, ...]
    row: np.ndarray
    flags: np.ndarray
    keys: Keys
    columns: Mapping[str, np.ndarray]
    crc32: Mapping[str, np.ndarray]
    classes: tuple[str, ...] | None = None
    points: tuple[str, ...] = ()
    build: Mapping[str, Any] = field(default_factory=dict)
    statistics: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    checksums: Mapping[str, int] = field(default_factory=dict)
    #: what the file was when it was last looked at; of an index that was not read, nothing
    known: list[tuple[int, ...] | None] = field(default_factory=list, compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.row)

    @property
    def image(self) -> Array:
        """The array of the pixels."""
        return next(array for array in self.arrays if array.name == "image")

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield every tensor of the file with its name."""
        yield "row", self.row
        yield "flags", self.flags
        yield "key/offsets", self.keys.offsets
        yield "key/bytes", self.keys.data
        for name, checks in self.crc32.items():
            yield f"crc32/{name}", checks
        yield from self.columns.items()

    def subset(self, indices: np.ndarray) -> "Index":
        """Return the index of some samples, in the order given, over the same shards.

        ``indices`` are int64 within the data set. Statistics of pixels stay those of the whole.
        """
        columns = {
            name: np.ascontiguousarray(column[indices]) for name, column in self.columns.items()
        }
        statistics = dict(self.statistics)
        if "class_counts" in statistics and self.classes is not None:
            statistics["class_counts"] = class_counts(columns["label"], len(self.classes))
        return replace(
            self,
            row=self.row[indices],
            flags=self.flags[indices],
            keys=self.keys.take(indices),
            columns=columns,
            statistics=statistics,
            fingerprint="",
            checksums={},
            known=[],
        )

    def write(self, path: str | Path) -> "Index":
        """Write the index to ``path`` through a temporary name, flushed to the disk; return it as written.

        What stood at ``path`` is replaced in one step, whoever else writes it at the same time. Raises OSError, and
        ValueError where the metadata are larger than a reader takes (100 MB: a million classes with names of 80
        letters).
        """
        path = Path(path)
        tensors = {
            name: np.ascontiguousarray(tensor, tensor.dtype.newbyteorder("<"))
            for name, tensor in self.tensors()
        }
        metadata: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "samples": len(self),
            "arrays": [_array_json(array) for array in self.arrays],
            "tensors": {name: _tensor_json(tensor) for name, tensor in tensors.items()},
            "columns": list(self.columns),
            "classes": None if self.classes is None else list(self.classes),
            "points": list(self.points),
            "build": dict(self.build),
            "statistics": dict(self.statistics),
        }
        fingerprint = hashlib.sha256(_canonical(metadata)).hexdigest()
        text = _canonical(metadata | {"fingerprint": fingerprint}).decode()
        # not save_file, which makes the file readable by its owner alone, whatever the umask says
        data = safetensors.numpy.save(tensors, {METADATA_KEY: text})
        header_bytes(data[:8], len(data))
        # A name that nobody else has: of two processes that write the same index, one would else rename what the other
        # is still writing. A short one, as that of the index may be as long as names can be.
        temporary = path.with_name(f".{os.urandom(8).hex()}.tmp")
        try:
            with temporary.open("xb") as file:
                file.write(data)
            sync(temporary)
            temporary.replace(path)
        except OSError as error:  # of the name that the caller knows
            if error.errno is None:
                raise
            raise OSError(error.errno, error.strerror, str(path)) from error
        finally:
            temporary.unlink(missing_ok=True)
        sync(path.parent)
        checksums = {name: entry["crc32"] for name, entry in metadata["tensors"].items()}
        return replace(self, path=path, fingerprint=fingerprint, checksums=checksums)

    @classmethod
    def open(cls, path: str | Path) -> "Index":
        """Open the index of a data set given as ``out.bin``, ``out``, ``out.idx`` or one of its shards, as `read` does.

        Raises FormatError also where ``path`` names pixels that are not the index's own: a copy of ``out.bin`` and
        ``out.idx`` under another name would else pass for the original, which the index names.
        """
        path = Path(path)
        index = cls.read(index_path(path))
        files = [[shard.file for shard in array.shards] for array in index.arrays]
        if path.suffix == ".bin" and not any(
            path.name in own or own == shard_names(path, len(own)) for own in files
        ):
            raise FormatError(
                f"{path}: expected a file that {index.path.name} names, as {files[0][0]}, found another name: pixels "
                f"are known by their names. Keep the names, or open {index.path.name} to read {files[0][0]}",
                path=path,
            )
        return index

    @classmethod
    def read(cls, path: str | Path) -> "Index":
        """Open an index, mapped, and check all of it that does not grow with the pixels.

        Checked are structure, types, bounds, the metadata's fingerprint and the checksums of ``row``,
        ``flags`` and ``label``; ``memload verify`` checks the rest. Raises FormatError, and MissingError
        (also a FileNotFoundError) where there is no such file.
        """
        path = Path(path)
        known = [identity(path)]
        try:
            mapped = map_file(path)
            header = _read_header(mapped)
        except FileNotFoundError:
            raise _missing(path) from None
        except OSError as error:
            raise FormatError(f"{path}: cannot be read: {error}", path=path) from error
        except (
            ValueError,
            RecursionError,
        ) as error:  # ValueError: an empty file cannot be mapped either
            raise FormatError(
                f"{path}: expected an index written by memload (a safetensors file), found {error}. "
                "Build it again or restore the file",
                path=path,
            ) from None
        try:
            index = _parse(path, mapped, header)
        # no JSON, NaN, nested without end, or numbers and shapes beyond what Python and NumPy can hold
        except (ValueError, OverflowError, RecursionError) as error:
            raise FormatError(
                f"{path}: expected the metadata of an index, found {error}: "
                "the index is damaged or was not written by memload. Restore it, or build again",
                path=path,
            ) from None
        forget(mapped)  # 22 MB of 1.28 million samples, which were read to be checked
        return replace(index, known=known)

    def check_unaltered(self) -> None:
        """See whether the file was written to in place since it was opened, and if so, whether it says the same; 3 µs.

        What is mapped would change with it. One that took its place is not looked at. Raises FormatError.
        """
        now = identity(self.path) if self.known else None
        before = self.known[0] if self.known else None
        if now is None or before is None or now == before or now[:2] != before[:2]:
            return
        meanwhile = "was written to since it was opened. Restore it or build again, and open the data set anew"
        if now[2] < before[2]:
            raise FormatError(
                f"{self.path}: expected {before[2]:,} bytes as when it was opened, found {now[2]:,}: it {meanwhile}",
                path=self.path,
            )
        try:
            self.check_tensors()
        except FormatError as error:
            raise type(error)(f"{self.path}: it {meanwhile}: {error}", path=self.path) from error
        self.known[0] = now

    def check_tensors(self, names: Sequence[str] | None = None) -> None:
        """Compare the tensors (or those named) with their checksums. Raises ChecksumError."""
        for name, tensor in self.tensors():
            if names is not None and name not in names:
                continue
            try:
                fault_in(address_of(tensor), tensor.nbytes)
            except OSError as error:
                raise FormatError(
                    f"{self.path}: its tensor {_cut(repr(name))} cannot be read: {error.strerror}. Look after the "
                    "disk, then restore the file or build again",
                    path=self.path,
                ) from error
            if _crc32(tensor) != self.checksums[name]:
                raise ChecksumError(
                    f"{self.path}: expected checksum {self.checksums[name]:08x} of its tensor {_cut(repr(name))}, "
                    f"found {_crc32(tensor):08x}: the index is damaged. Restore it, or build again",
                    path=self.path,
                )


def class_counts(labels: np.ndarray, classes: int) -> list[int]:
    """Return how many samples each class has."""
    return [int(count) for count in np.bincount(labels, minlength=classes)]


def sync(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows has no handle of a folder to flush
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    except OSError:
        # The kernel takes what it could not write for written, and keeps it: reading it again would find nothing wrong.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        raise
    finally:
        os.close(descriptor)


def _crc32(tensor: np.ndarray) -> int:
    return zlib.crc32(tensor.view(np.uint8).data if tensor.size else b"")


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def _array_json(array: Array) -> dict[str, Any]:
    shards = [
        {"file": shard.file, "rows": shard.rows, "bytes": shard.bytes} for shard in array.shards
    ]
    return {"name": array.name, "descr": array.descr, "shape": list(array.shape), "shards": shards}


def _tensor_json(tensor: np.ndarray) -> dict[str, Any]:
    return {"dtype": tensor.dtype.str, "shape": list(tensor.shape), "crc32": _crc32(tensor)}


def _missing(path: Path) -> MissingError:
    pixels, building = path.with_suffix(".bin"), output_paths(path.with_suffix(".bin"))[1]
    if os.path.exists(building):  # noqa: PTH110  # which no name can be too long for
        return MissingError(
            f"{path}: expected an index, found an unfinished build ({building}). "
            "Run the same 'memload build' again: it goes on where it stopped",
            path=path,
        )
    if os.path.exists(pixels):  # noqa: PTH110  # as above
        return MissingError(
            f"{path}: expected an index beside {pixels.name}, found none: without it the pixels have no "
            "labels and no names. Run 'memload build' again, or copy the index here too",
            path=path,
        )
    return MissingError(
        f"{path}: expected a data set, found no such file. Check the path, or make it with 'memload build'",
        path=path,
    )


def _read_header(mapped: np.ndarray) -> Header:
    fault_in(
        address_of(mapped), min(8, mapped.size)
    )  # a disk that does not give it raises OSError, and not SIGBUS
    length = header_bytes(mapped[:8].tobytes(), mapped.size)
    fault_in(address_of(mapped), length)
    header = parse_header(mapped[:length].tobytes(), mapped.size)
    fault_in(address_of(mapped), min(_ASKED, mapped.size))
    return header


def _parse(path: Path, mapped: np.ndarray, header: Header) -> Index:
    def expect(fine: bool, subject: str, expected: str, found: object) -> None:
        if not fine:
            raise FormatError(
                f"{path}: {_cut(subject)}: expected {_cut(expected)}, found {_cut(repr(found))}: "
                "the index is damaged or was not written by memload. Restore it, or build again",
                path=path,
            )

    def take(record: Any, key: str, kind: type | tuple[type, ...]) -> Any:
        expect(isinstance(record, dict) and key in record, key, "an entry of the metadata", record)
        value = record[key]
        expect(
            isinstance(value, kind) and not isinstance(value, bool), key, _kind_name(kind), value
        )
        return value

    expect(METADATA_KEY in header.metadata, "metadata", f"an entry {METADATA_KEY!r}", "none")
    metadata = load_json(header.metadata[METADATA_KEY])
    version = take(metadata, "format_version", int)
    if version > FORMAT_VERSION:
        raise FormatError(
            f"{path}: expected format version {FORMAT_VERSION} or older, found {version}: "
            "it was written by a newer memload. Run 'pip install --upgrade memload'",
            path=path,
        )
    expect(version == FORMAT_VERSION, "format_version", str(FORMAT_VERSION), version)
    fingerprint = take(metadata, "fingerprint", str)
    rest = {key: value for key, value in metadata.items() if key != "fingerprint"}
    found = hashlib.sha256(_canonical(rest)).hexdigest()
    expect(found == fingerprint, "fingerprint", found, fingerprint)

    samples = take(metadata, "samples", int)
    arrays = tuple(_parse_array(array, take, expect) for array in take(metadata, "arrays", list))
    names = [array.name for array in arrays]
    expect(
        len(set(names)) == len(names) and "image" in names,
        "arrays",
        "different names and 'image'",
        names,
    )
    rows = arrays[0].rows
    expect(all(array.rows == rows for array in arrays), "arrays", f"{rows} rows in each", names)
    files = [shard.file for array in arrays for shard in array.shards]
    expect(len(set(files)) == len(files), "shards", "different files", files)

    tensors = _map_tensors(mapped, header, take(metadata, "tensors", dict), take, expect)
    expected = {"row", "flags", "key/offsets", "key/bytes", *(f"crc32/{name}" for name in names)}
    expect(expected <= tensors.keys(), "tensors", f"{sorted(expected)}", sorted(tensors))
    order = take(metadata, "columns", list)
    listed = sorted(name for name in tensors if name not in expected)
    expect(
        all(isinstance(name, str) for name in order) and sorted(order) == listed,
        "columns",
        f"{listed}",
        order,
    )
    columns = {name: tensors[name] for name in order}

    def shaped(name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        tensor = tensors[name]
        expect(
            (tensor.dtype.str, tensor.shape) == (dtype, shape),
            name,
            f"{dtype} {shape}",
            (tensor.dtype.str, tensor.shape),
        )
        return tensor

    row = shaped("row", "<i8", (samples,))
    expect(
        not samples or (row.min() >= 0 and row.max() < rows),
        "row",
        f"rows from 0 to {rows - 1}",
        "others",
    )
    keys = Keys(
        shaped("key/offsets", "<i8", (samples + 1,)),
        shaped("key/bytes", "|u1", (tensors["key/bytes"].size,)),
        path,
    )
    for name, column in columns.items():
        expect("/" not in name and name not in RESERVED, "columns", "names without '/'", name)
        expect(column.shape[:1] == (samples,), name, f"{samples} entries", column.shape)
    classes = take(metadata, "classes", (list, type(None)))
    if classes is not None:
        expect(
            all(isinstance(name, str) for name in classes), "classes", "a list of names", classes
        )
        label = columns.get("label", np.zeros(0, np.float32))
        expect(
            label.dtype.str == "<i8" and label.ndim == 1,
            "label",
            "int64 (samples,)",
            label.dtype.str,
        )
        fits = not samples or (label.min() >= 0 and label.max() < len(classes))
        expect(fits, "label", f"labels from 0 to {len(classes) - 1}", "others")
    points = take(metadata, "points", list)
    named = all(isinstance(name, str) and name in columns for name in points) and len(
        set(points)
    ) == len(points)
    expect(named, "points", f"different names among {sorted(columns)}", points)
    for name in points:
        expect(
            columns[name].shape[2:] == (2,) and columns[name].ndim == 3,
            name,
            "(n, k, 2)",
            columns[name].shape,
        )
    for name in (
        "build",
        "statistics",
    ):  # of any content, but not such that whoever prints it runs out of stack
        expect(
            _depth(take(metadata, name, dict)) <= MAX_DEPTH,
            name,
            f"at most {MAX_DEPTH} levels",
            "more",
        )
    index = Index(
        path=path,
        arrays=arrays,
        row=row,
        flags=shaped("flags", "|u1", (samples,)),
        keys=keys,
        columns=columns,
        crc32={name: shaped(f"crc32/{name}", "<u4", (rows,)) for name in names},
        classes=None if classes is None else tuple(classes),
        points=tuple(points),
        build=take(metadata, "build", dict),
        statistics=take(metadata, "statistics", dict),
        fingerprint=fingerprint,
        checksums={name: entry["crc32"] for name, entry in metadata["tensors"].items()},
    )
    # What training reads by number; 7 GB/s warm, so that 1.28 million samples cost 3 ms.
    index.check_tensors(("row", "flags", "label"))
    return index


def _cut(text: str) -> str:
    """Return a text in at most 100 letters: a name in a hostile file may have millions."""
    return text if len(text) <= 100 else text[:99] + "…"


def _kind_name(kind: type | tuple[type, ...]) -> str:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return " or ".join(
        {dict: "an object", list: "a list", int: "an integer", str: "a text"}.get(k, "null")
        for k in kinds
    )


def _parse_array(record: Any, take: Any, expect: Any) -> Array:
    name, descr, shape = (
        take(record, "name", str),
        take(record, "descr", str),
        take(record, "shape", list),
    )
    expect(descr in DESCRS, "descr", f"one of {', '.join(DESCRS)}", descr)
    expect(
        len(shape) == 3 and all(type(extent) is int and 0 < extent < 2**31 for extent in shape),
        "shape",
        "[H, W, C], each from 1 to 2³¹ − 1",
        shape,
    )
    shards = []
    for shard in take(record, "shards", list):
        file, rows, size = (
            take(shard, "file", str),
            take(shard, "rows", int),
            take(shard, "bytes", int),
        )
        expect(_is_bare(file), "file", "a bare file name, without a folder", file)
        right = HEADER_BYTES + rows * row_bytes(descr, shape)
        expect(
            0 < rows < 2**63 and size == right < 2**63, "bytes", f"{right} for {rows} rows", size
        )
        shards.append(Shard(file, rows, size))
    expect(bool(shards), "shards", "at least one", shards)
    return Array(name, descr, tuple(shape), tuple(shards))


def _depth(value: object) -> int:
    """Return how deep objects and lists are nested; 0 for anything else."""
    depth, level = 0, [value]
    while level := [part for part in level if isinstance(part, (dict, list))]:
        level = [
            inner for part in level for inner in (part.values() if isinstance(part, dict) else part)
        ]
        depth += 1
    return depth


def _is_bare(file: str) -> bool:
    """Return whether a shard's name stays in the data set's own folder, the only place an index may name."""
    try:
        os.fsencode(file)
    except UnicodeError:
        return False
    return file not in ("", ".", "..") and len(file) <= _LONGEST_NAME and not set(file) & _NO_NAME


def _map_tensors(
    mapped: np.ndarray, header: Header, listed: dict[str, Any], take: Any, expect: Any
) -> dict[str, np.ndarray]:
    data = mapped[header.start :]
    expect(
        header.tensors.keys() == listed.keys(),
        "tensors",
        f"{sorted(listed)}",
        sorted(header.tensors),
    )
    tensors = {}
    for name, tensor in header.tensors.items():
        known = [take(listed[name], "dtype", str), *take(listed[name], "shape", list)]
        take(listed[name], "crc32", int)
        expect(
            [tensor.dtype, *tensor.shape] == known, name, f"{known}", [tensor.dtype, *tensor.shape]
        )
        tensors[name] = data[tensor.start : tensor.stop].view(tensor.dtype).reshape(tensor.shape)
    return tensors
