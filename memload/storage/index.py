"""Read, check and write the index file. `memload.storage.format` is its specification."""

import functools
import hashlib
import json
import math
import mmap
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

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
from memload.storage.keys import Keys
from memload.storage.mapping import address_of, fault_in

#: What reading a damaged or forged file may raise, besides FormatError.
_DAMAGE = (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError)
#: safetensors' own limit.
MAX_HEADER_BYTES = 100_000_000
#: NumPy's limit.
_MAX_DIMENSIONS = 64
#: The longest file name of common file systems.
_MAX_NAME = 255
#: Element types of tensors, as safetensors and as NumPy call them, in the order of safetensors' own list.
TYPES = {
    "BOOL": "|b1", "U8": "|u1", "I8": "|i1", "I16": "<i2", "U16": "<u2", "F16": "<f2",
    "I32": "<i4", "U32": "<u4", "F32": "<f4", "F64": "<f8", "I64": "<i8", "U64": "<u8",
}  # fmt: skip


@dataclass(frozen=True)
class Shard:
    """One data file: its name without a folder, how many rows it holds, and its size in bytes."""

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
        """The number of rows in all shards together."""
        return sum(shard.rows for shard in self.shards)

    @property
    def row_bytes(self) -> int:
        """The size of a row in bytes."""
        return row_bytes(self.descr, self.shape)


def row_bytes(descr: str, shape: Sequence[int]) -> int:
    """Return the size in bytes of one row of this element type and shape."""
    return int(descr[2:]) * math.prod(shape)


@dataclass(frozen=True)
class Index:
    """Everything that is known of a data set except its pixels.

    ``row`` is int64 ``(n,)``, ``flags`` uint8 ``(n,)``, ``keys`` has n names, ``columns`` maps names to arrays
    ``(n, …)``, and ``crc32`` maps the name of an array to uint32 ``(rows,)``. All are in memory, but for the names
    of an index that was read, which are mapped.
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

    def __len__(self) -> int:
        return len(self.row)

    @property
    def image(self) -> Array:
        """The array of the pixels."""
        return next(array for array in self.arrays if array.name == "image")

    def subset(self, indices: np.ndarray) -> "Index":
        """Return the index of some samples, in the order given, over the same shards.

        ``indices`` are int64 within the data set. Statistics of pixels stay those of the whole data set.
        """
        columns = {name: column[indices] for name, column in self.columns.items()}
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
        )

    def check_unaltered(self) -> None:
        """Do nothing: a shim until no caller is left."""

    @classmethod
    def open(cls, path: str | Path) -> "Index":
        """Read the index of a data set given as ``out.bin``, ``out``, ``out.idx`` or one of its shards.

        Raises FormatError as `read` does, and if ``path`` names pixels of another data set. A copy of ``out.bin`` and
        ``out.idx`` under another name would otherwise pass for the original, which its index names.
        """
        path = Path(path)
        index = cls.read(index_path(path))
        arrays = [[shard.file for shard in array.shards] for array in index.arrays]
        if path.suffix == ".bin" and not any(
            path.name in files or files == shard_names(path, len(files)) for files in arrays
        ):
            raise FormatError(
                f"{path} is not a file that {index.path.name} names; it names {arrays[0][0]}. Rename the file back, or "
                f"open {index.path.name} to read {arrays[0][0]}.",
                path=path,
            )
        return index

    @classmethod
    def read(cls, path: str | Path) -> "Index":
        """Read an index file into memory and check it.

        Checks the structure, types and bounds, the fingerprint of the metadata, and the checksums of all tensors but
        the names, which are checked when they are first used. Raises FormatError, and MissingError (also a
        FileNotFoundError) if there is no such file.
        """
        path = Path(path)
        try:
            if path.exists() and not path.is_file():
                raise OSError("it is a folder, a pipe or a device")
            with path.open("rb") as file:
                return _read_index(path, file)
        except FileNotFoundError:
            raise _missing(path) from None
        except OSError as error:
            raise FormatError(f"{path} cannot be read: {error}.", path=path) from error
        except _DAMAGE as error:
            detail = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise FormatError(
                f"{path} is damaged or was not written by memload: {_shorten(detail)}. Restore it, or run "
                "'memload build' again.",
                path=path,
            ) from None

    def write(self, path: str | Path) -> "Index":
        """Write the index to ``path``, flush it to the disk, and return it as written.

        It is written under a temporary name and renamed, so that it replaces what was at ``path`` in one step. Raises
        OSError, and ValueError if the metadata exceed 100 MB, which is a million classes with names of 80 letters.
        """
        path = Path(path)
        offsets, names = self.keys.pack()
        tensors = {
            "row": self.row,
            "flags": self.flags,
            "key/offsets": offsets,
            "key/bytes": names,
            **{f"crc32/{name}": checks for name, checks in self.crc32.items()},
            **self.columns,
        }
        tensors = {
            name: np.ascontiguousarray(tensor, tensor.dtype.newbyteorder("<"))
            for name, tensor in tensors.items()
        }
        metadata = self._metadata(tensors)
        fingerprint = hashlib.sha256(_canonical(metadata)).hexdigest()
        text = _canonical(metadata | {"fingerprint": fingerprint}).decode()
        header, order = _safetensors_header(tensors, text)
        # Random, so that two processes that write the same index do not rename each other's file. Short, since the
        # name of the index may have the maximal length already.
        temporary = path.with_name(f".{os.urandom(8).hex()}.tmp")
        try:
            with temporary.open("xb") as file:
                file.write(header)
                for name in order:
                    file.write(tensors[name].reshape(-1).view(np.uint8).data)
            sync(temporary)
            temporary.replace(path)
        except OSError as error:
            if error.errno is None:
                raise
            raise OSError(error.errno, error.strerror, str(path)) from error
        finally:
            temporary.unlink(missing_ok=True)
        sync(path.parent)
        return replace(self, path=path, fingerprint=fingerprint)

    def _metadata(self, tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Return the metadata of a file with these tensors, without the fingerprint."""
        return {
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


def class_counts(labels: np.ndarray, classes: int) -> list[int]:
    """Return how many samples each class has."""
    return [int(count) for count in np.bincount(labels, minlength=classes)]


def sync(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        # After a failed write, the kernel keeps the pages and calls them clean: reading them would find nothing wrong.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        raise
    finally:
        os.close(descriptor)


class _Tensor(NamedTuple):
    """Where a tensor is in the file, and what it is: its type as NumPy writes it, its shape, first byte and size."""

    descr: str
    shape: tuple[int, ...]
    start: int
    size: int


def _safetensors_header(
    tensors: Mapping[str, np.ndarray], metadata: str
) -> tuple[bytes, list[str]]:
    """Return the header of a safetensors file with these tensors, and their names in the order of their data.

    Both are to the byte what the safetensors library makes: wide types first, then by name. The library would copy
    all tensors twice.
    """
    types = {descr: name for name, descr in TYPES.items()}
    widths = list(types)
    order = sorted(tensors, key=lambda name: (-widths.index(tensors[name].dtype.str), name))
    entries: dict[str, Any] = {"__metadata__": {METADATA_KEY: metadata}}
    end = 0
    for name in order:
        tensor = tensors[name]
        entries[name] = {
            "dtype": types[tensor.dtype.str],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(
            f"the metadata take {len(text):,} bytes, but an index may have {MAX_HEADER_BYTES:,} at most"
        )
    return len(text).to_bytes(8, "little") + text, order


def _read_header(file: BufferedReader) -> tuple[dict[str, _Tensor], Any]:
    """Return the tensors of a safetensors file by name, and memload's metadata. Raises ValueError, KeyError, TypeError.

    Read here and not by the safetensors library, which would map the file, and end the process with SIGBUS if the disk
    fails.
    """
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    _require(8 + length <= size, f"its header of {length:,} bytes does not fit in {size:,} bytes")
    _require(length <= MAX_HEADER_BYTES, f"its header has {length:,} bytes")
    entries = _load_json(file.read(length).decode("utf-8"))
    metadata = entries.pop("__metadata__")[METADATA_KEY]
    tensors = {}
    end = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        (start, stop), shape = entry["data_offsets"], tuple(entry["shape"])
        descr = TYPES[entry["dtype"]]
        integers = all(
            type(number) is int and 0 <= number < 2**63 for number in (start, stop, *shape)
        )
        _require(integers and len(shape) <= _MAX_DIMENSIONS, f"tensor {name!r} has a wrong shape")
        _require(8 + length + start == end, f"tensor {name!r} does not follow the one before")
        _require(stop - start == row_bytes(descr, shape), f"tensor {name!r} has a wrong size")
        tensors[name] = _Tensor(descr, shape, end, stop - start)
        end += stop - start
    _require(end == size, f"it has {size:,} bytes instead of {end:,}")
    return tensors, _load_json(metadata)


def _read_index(path: Path, file: BufferedReader) -> Index:
    """Read an index. Raises FormatError, KeyError, TypeError, ValueError, OverflowError, RecursionError or OSError."""
    tensors, metadata = _read_header(file)
    fingerprint = _check_identity(path, metadata)
    arrays = _parse_arrays(metadata["arrays"])
    samples, rows, order = metadata["samples"], arrays[0].rows, metadata["columns"]
    _check_tensors(tensors, metadata, [array.name for array in arrays], samples, rows)

    checksums = {name: entry["crc32"] for name, entry in metadata["tensors"].items()}
    stored = {
        name: _read_tensor(path, file, name, tensor, checksums[name])
        for name, tensor in tensors.items()
        if not name.startswith("key/")
    }
    columns = {name: stored[name] for name in order}
    classes, points = metadata["classes"], metadata["points"]
    _require(_in_range(stored["row"], rows), f"a sample has a row outside of 0 to {rows - 1}")
    if classes is not None:
        _require(
            type(classes) is list and all(type(name) is str for name in classes),
            "'classes' is no list of names",
        )
        label = tensors["label"]
        _require((label.descr, label.shape) == ("<i8", (samples,)), "labels are not int64 (n,)")
        _require(_in_range(columns["label"], len(classes)), "a label is outside of the classes")
    _require_names(points, "points")
    for name in points:
        _require(columns[name].shape[2:] == (2,), f"the points {name!r} have no shape (n, k, 2)")
    for name in ("build", "statistics"):
        _require(type(metadata[name]) is dict, f"{name!r} is no object")
        _require(_depth(metadata[name]) <= MAX_DEPTH, f"{name!r} is nested too deeply")
    return Index(
        path=path,
        arrays=arrays,
        row=stored["row"],
        flags=stored["flags"],
        keys=_map_keys(path, file, tensors, checksums),
        columns=columns,
        crc32={array.name: stored[f"crc32/{array.name}"] for array in arrays},
        classes=None if classes is None else tuple(classes),
        points=tuple(points),
        build=metadata["build"],
        statistics=metadata["statistics"],
        fingerprint=fingerprint,
    )


def _check_identity(path: Path, metadata: Any) -> str:
    """Check the format's version and the fingerprint of the metadata. Returns the fingerprint."""
    version = metadata["format_version"]
    _require(type(version) is int and version >= FORMAT_VERSION, "it has no format version")
    if version > FORMAT_VERSION:
        raise FormatError(
            f"{path} has format version {version}, but this memload reads version {FORMAT_VERSION}. Update it: "
            "'pip install --upgrade memload'.",
            path=path,
        )
    content = {key: value for key, value in metadata.items() if key != "fingerprint"}
    expected = hashlib.sha256(_canonical(content)).hexdigest()
    _require(metadata["fingerprint"] == expected, "its fingerprint does not fit its metadata")
    return expected


def _parse_arrays(entries: Any) -> tuple[Array, ...]:
    arrays = tuple(_parse_array(entry) for entry in entries)
    names = [array.name for array in arrays]
    files = [shard.file for array in arrays for shard in array.shards]
    _require_names(names, "arrays")
    _require_names(files, "shards")
    _require("image" in names, "it has no array named 'image'")
    _require(len({array.rows for array in arrays}) == 1, "its arrays differ in their rows")
    return arrays


def _parse_array(entry: Any) -> Array:
    descr, shape = entry["descr"], tuple(entry["shape"])
    _require(descr in DESCRS, f"its element type is none of {', '.join(DESCRS)}")
    integers = all(type(extent) is int and 0 < extent < 2**31 for extent in shape)
    _require(integers and len(shape) == 3, "the shape of its images is not [H, W, C]")
    shards = tuple(Shard(shard["file"], shard["rows"], shard["bytes"]) for shard in entry["shards"])
    _require(bool(shards), "it names no shards")
    for shard in shards:
        _require(_is_bare(shard.file), f"{shard.file!r} is not a file name without a folder")
        _require(type(shard.rows) is int and shard.rows > 0, "a shard has no rows")
        size = HEADER_BYTES + shard.rows * row_bytes(descr, shape)
        _require(shard.bytes == size < 2**63, f"the size of {shard.file} does not fit its rows")
    return Array(entry["name"], descr, shape, shards)


def _check_tensors(
    tensors: Mapping[str, _Tensor], metadata: Any, arrays: Sequence[str], samples: Any, rows: int
) -> None:
    """Check that the file has the tensors that the metadata list, with the types and shapes that the format says."""
    listed = {
        name: _Tensor(
            entry["dtype"], tuple(entry["shape"]), tensors[name].start, tensors[name].size
        )
        for name, entry in metadata["tensors"].items()
    }
    _require(listed == tensors, "its tensors differ from those that its metadata list")
    _require(all(type(entry["crc32"]) is int for entry in metadata["tensors"].values()), "crc32")
    _require(type(samples) is int, "the number of samples is no integer")
    required = {
        "row": ("<i8", (samples,)),
        "flags": ("|u1", (samples,)),
        "key/offsets": ("<i8", (samples + 1,)),
        "key/bytes": ("|u1", (tensors["key/bytes"].size,)),
        **{f"crc32/{name}": ("<u4", (rows,)) for name in arrays},
    }
    for name, expected in required.items():
        found = (tensors[name].descr, tensors[name].shape)
        _require(found == expected, f"tensor {name!r} is {found} instead of {expected}")
    columns = metadata["columns"]
    _require_names(columns, "columns")
    _require(sorted([*columns, *required]) == sorted(tensors), "its columns are not its tensors")
    for name in columns:
        _require("/" not in name and name not in RESERVED, f"a column has the name {name!r}")
        _require(tensors[name].shape[:1] == (samples,), f"column {name!r} has no {samples} entries")


def _read_tensor(
    path: Path, file: BufferedReader, name: str, tensor: _Tensor, checksum: int
) -> np.ndarray:
    data = np.empty(tensor.size, np.uint8)
    file.seek(tensor.start)
    _require(file.readinto(data.data) == tensor.size, "it has become shorter")
    _check_checksum(path, name, data, checksum)
    return data.view(tensor.descr).reshape(tensor.shape)


def _check_checksum(path: Path, name: str, data: np.ndarray, checksum: int) -> None:
    found = zlib.crc32(data.data)
    if found != checksum:
        raise ChecksumError(
            f"{path} is damaged: its tensor {_shorten(name)!r} has checksum {found:08x} instead of {checksum:08x}. "
            "Restore it, or run 'memload build' again.",
            path=path,
        )


def _map_keys(
    path: Path, file: BufferedReader, tensors: Mapping[str, _Tensor], checksums: Mapping[str, int]
) -> Keys:
    """Return the names, mapped. They are checked when they are first used."""
    mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    parts = {
        name: mapped[tensors[name].start :][: tensors[name].size]
        for name in ("key/offsets", "key/bytes")
    }
    verify = functools.partial(_check_keys, path, parts, checksums)
    return Keys(parts["key/offsets"].view("<i8"), parts["key/bytes"], path, verify)


def _check_keys(path: Path, parts: Mapping[str, np.ndarray], checksums: Mapping[str, int]) -> None:
    for name, data in parts.items():
        try:
            fault_in(address_of(data), data.nbytes)
        except OSError as error:
            raise FormatError(
                f"{path} cannot be read: {error.strerror}. Check the disk. Then restore the file, or run "
                "'memload build' again.",
                path=path,
            ) from error
        _check_checksum(path, name, data, checksums[name])


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


def _require_names(names: Any, subject: str) -> None:
    """Raise ValueError unless this is a list of different texts."""
    fine = type(names) is list and all(type(name) is str for name in names)
    _require(fine and len(set(names)) == len(names), f"{subject!r} is no list of different names")


def _in_range(numbers: np.ndarray, stop: int) -> bool:
    return not numbers.size or (numbers.min() >= 0 and numbers.max() < stop)


def _is_bare(file: Any) -> bool:
    """Return whether a shard's name stays in the data set's own folder."""
    try:
        os.fsencode(file)
    except UnicodeError:
        return False
    return file not in ("", ".", "..") and len(file) <= _MAX_NAME and not set(file) & {"/", "\0"}


def _depth(value: object) -> int:
    """Return how deeply objects and lists are nested; 0 for anything else."""
    depth, level = 0, [value]
    while level := [part for part in level if isinstance(part, (dict, list))]:
        level = [
            inner for part in level for inner in (part.values() if isinstance(part, dict) else part)
        ]
        depth += 1
    return depth


def _load_json(text: str) -> Any:
    """Return what a JSON text says. Unlike Python's own, it refuses NaN, and two entries of the same name."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    def make_object(entries: list[tuple[str, Any]]) -> dict[str, Any]:
        _require(len(dict(entries)) == len(entries), "an entry of its metadata is there twice")
        return dict(entries)

    return json.loads(text, parse_constant=refuse, object_pairs_hook=make_object)


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def _array_json(array: Array) -> dict[str, Any]:
    shards = [
        {"file": shard.file, "rows": shard.rows, "bytes": shard.bytes} for shard in array.shards
    ]
    return {"name": array.name, "descr": array.descr, "shape": list(array.shape), "shards": shards}


def _tensor_json(tensor: np.ndarray) -> dict[str, Any]:
    checksum = zlib.crc32(tensor.reshape(-1).view(np.uint8).data)
    return {"dtype": tensor.dtype.str, "shape": list(tensor.shape), "crc32": checksum}


def _shorten(text: str) -> str:
    """Return a text in at most 200 letters. A name in a forged file may have millions."""
    return text if len(text) <= 200 else text[:199] + "…"


def _missing(path: Path) -> MissingError:
    """Return the error for an index that does not exist, with advice that depends on what does."""
    pixels, building = path.with_suffix(".bin"), output_paths(path.with_suffix(".bin"))[1]
    if os.path.exists(building):  # noqa: PTH110  # no name is too long for os.path
        message = (
            f"{path} is missing: its build is not complete ({building}). Run the same 'memload build' again; it "
            "goes on where it stopped."
        )
    elif os.path.exists(pixels):  # noqa: PTH110
        message = (
            f"{path} is missing: without an index, {pixels.name} has no labels and no names. Copy the index here too, "
            "or run 'memload build' again."
        )
    else:
        message = f"{path} does not exist. Check the path, or make a data set with 'memload build'."
    return MissingError(message, path=path)
