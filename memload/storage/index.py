"""Read, check and write the index file. `memload.storage.format` is its specification."""

import functools
import hashlib
import json
import math
import mmap
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from memload.errors import ChecksumError, FormatError, MissingError
from memload.storage.format import (
    DESCRS,
    DESCRS_OF_ARRAYS,
    DESCRS_OF_MASKS,
    FORMAT_VERSION,
    HEADER_BYTES,
    MAX_DEPTH,
    MAX_NPY_HEADER_BYTES,
    METADATA_KEY,
    index_path,
    output_paths,
    shard_pattern,
)
from memload.storage.keys import Keys
from memload.storage.mapping import address_of, fault_in
from memload.storage.tensors import (
    Tensor,
    in_file_order,
    make_header,
    read_header,
    read_tensor,
    require,
)
from memload.wording import listed, shape_text

#: What a damaged or forged index may raise while it is read, besides FormatError.
_DAMAGE = (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError)
#: A name that a file can have: no folder, no zero, and no surrogates but those of single bytes.
_FILE_NAME = re.compile("[^/\\0\ud800-\udc7f\udd00-\udfff]{1,255}")


@dataclass(frozen=True)
class Shard:
    """One data file: its name, how many rows it holds, and its size in bytes.

    The name has no folder: the file is in that of the index. Only in an index in memory, such as
    that of data sets in several folders, it may be an absolute path.
    """

    file: str
    rows: int
    bytes: int


#: What the rows of an array are: pictures (H, W, C), ids (H, W) of their pixels, or anything else.
ArrayKind = Literal["image", "mask", "array"]


@dataclass(frozen=True)
class Array:
    """A named array: rows of ``shape`` and element type ``descr``, spread over shards.

    The shape is (H, W, C) for images and (H, W) for masks.
    """

    name: str
    descr: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]
    kind: ArrayKind = "image"

    @property
    def rows(self) -> int:
        """The number of rows in all shards together."""
        return sum(shard.rows for shard in self.shards)

    @property
    def row_bytes(self) -> int:
        """The size of a row in bytes."""
        return row_bytes(self.descr, self.shape)

    @property
    def data_bytes(self) -> int:
        """The size of all shards in bytes, headers included."""
        return sum(shard.bytes for shard in self.shards)

    @property
    def header_bytes(self) -> int:
        """Where the first row begins in each shard: at 4,096, unless another program wrote them."""
        return self.shards[0].bytes - self.shards[0].rows * self.row_bytes

    def as_dict(self) -> dict[str, Any]:
        """Return the entry of the metadata. The kind is left out for images."""
        entry = asdict(self)
        return {name: value for name, value in entry.items() if (name, value) != ("kind", "image")}


def row_bytes(descr: str, shape: Sequence[int]) -> int:
    """Return the size in bytes of a row of this element type and shape."""
    return int(descr[2:]) * math.prod(shape)


@dataclass(frozen=True)
class Index:
    """Everything that is known of a data set except its pixels.

    ``row`` is int64 ``(n,)``: the row of each sample in the array of the images. ``other_rows`` has
    the same for those other arrays whose rows are in another order; `rows_of` returns either.
    ``flags`` is uint8 ``(n,)``, and ``keys`` has n names. ``columns`` maps names to arrays
    ``(n, …)``, and ``crc32`` the name of an array to uint32 ``(rows,)``. Of an index that was read,
    all of these are in memory, except for the names, which are mapped.

    ``categories`` maps names of columns, int64 ``(n,)``, to the texts that they count into.
    ``points`` and ``boxes`` are names of columns that move with the image.
    """

    path: Path
    arrays: tuple[Array, ...]
    row: np.ndarray
    flags: np.ndarray
    keys: Keys
    columns: Mapping[str, np.ndarray]
    crc32: Mapping[str, np.ndarray]
    classes: tuple[str, ...] | None = None
    other_rows: Mapping[str, np.ndarray] = field(default_factory=dict)
    points: tuple[str, ...] = ()
    boxes: tuple[str, ...] = ()
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    build: Mapping[str, Any] = field(default_factory=dict)
    statistics: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: str = ""

    def __len__(self) -> int:
        return len(self.row)

    def __repr__(self) -> str:
        samples = f"{len(self):,} samples of {shape_text(self.image.shape)}"
        return f"Index({str(self.path)!r}: {samples}, {listed(self.columns) or 'no columns'})"

    @property
    def format_version(self) -> int:
        """The version of the index file: 1 as long as there are only images."""
        return 1 if len(self.arrays) == 1 else FORMAT_VERSION

    @property
    def image(self) -> Array:
        """The array of the pixels."""
        return self.array("image")

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The shards of all arrays."""
        return tuple(shard for array in self.arrays for shard in array.shards)

    @property
    def data_bytes(self) -> int:
        """The size of all shards in bytes, headers included."""
        return sum(array.data_bytes for array in self.arrays)

    @property
    def names(self) -> list[str]:
        """What each sample has besides its image: the names of arrays, then those of columns."""
        return [*(array.name for array in self.arrays if array.name != "image"), *self.columns]

    def setting(self, name: str) -> Any:
        """Return a setting of the build. None if it is not known, as in an index of other tools."""
        settings = self.build.get("settings")
        return settings.get(name) if isinstance(settings, Mapping) else None

    def array(self, name: str) -> Array:
        """Return the array of this name. Raises KeyError."""
        for array in self.arrays:
            if array.name == name:
                return array
        raise KeyError(name)

    def rows_of(self, name: str) -> np.ndarray:
        """Return the row of each sample in the array of this name, int64 ``(n,)``.

        Raises KeyError if there is no such array.
        """
        self.array(name)
        return self.other_rows.get(name, self.row)

    def subset(self, indices: np.ndarray) -> "Index":
        """Return the index of some samples, in the order given, over the same shards.

        ``indices`` are int64 within the data set. Statistics of pixels stay those of all samples.
        """
        columns = {name: column[indices] for name, column in self.columns.items()}
        statistics = dict(self.statistics)
        if "class_counts" in statistics and self.classes is not None:
            statistics["class_counts"] = class_counts(columns["label"], len(self.classes))
        return replace(
            self,
            row=self.row[indices],
            other_rows={name: rows[indices] for name, rows in self.other_rows.items()},
            flags=self.flags[indices],
            keys=self.keys.take(indices),
            columns=columns,
            statistics=statistics,
            fingerprint="",
        )

    @classmethod
    def open(cls, path: str | Path) -> "Index":
        """Read the index of a data set given as ``out.bin``, ``out``, ``out.idx`` or a shard.

        Raises FormatError as `read` does, and if ``path`` names pixels that the index does not.
        Otherwise a copy of ``out.bin`` and ``out.idx`` under another name would open the original.
        Raises TypeError for what is no path.
        """
        if not isinstance(path, str | os.PathLike):
            kind = type(path).__name__
            raise TypeError(f"The data set is a {kind}. Give its path, such as 'out.bin'.")
        path = Path(path)
        try:
            index = cls.read(index_path(path))
        except FileNotFoundError:
            raise _missing(index_path(path), path) from None
        pattern, first = shard_pattern(path), index.image.shards[0].file
        if path.suffix == ".bin" and not any(
            shard.file == path.name or pattern.fullmatch(shard.file) for shard in index.shards
        ):
            raise FormatError(
                f"{path} is not a file that {index.path.name} names; it names {first}. "
                f"Rename the file back, or open {index.path.name} to read {first}.",
                path=path,
            )
        return index

    @classmethod
    def read(cls, path: str | Path) -> "Index":
        """Read an index file into memory and check it.

        Checks the structure, types and bounds, the fingerprint of the metadata, and the checksums
        of all tensors. The names are checked when the first of them is used. Raises FormatError,
        and MissingError (also a FileNotFoundError) if there is no such file.
        """
        path = Path(path)
        try:
            if path.exists() and not path.is_file():
                raise OSError("it is a folder, a pipe or a device")
            with path.open("rb") as file:
                return _read_index(path, file)
        except FileNotFoundError:
            raise _missing(path, path) from None
        except OSError as error:
            reason = error.strerror or error
            raise FormatError(f"{path} cannot be read: {reason}.", path=path) from error
        except _DAMAGE as error:
            if path.suffix == ".bin":
                raise FormatError(
                    f"{path} is not an index: it holds pixels. Read {path.with_suffix('.idx')}, or "
                    "open it with memload.MemmapDataset.",
                    path=path,
                ) from None
            detail = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise FormatError(
                f"{path} is damaged or was not written by memload: {_shorten(detail)}. Restore it, "
                "or run 'memload build' again.",
                path=path,
            ) from None

    def write(self, path: str | Path) -> "Index":
        """Write the index to ``path``, flush it to the disk, and return it as written.

        The file is written under a temporary name and renamed, so that it replaces in one step
        whatever was at ``path``. Raises OSError, and ValueError if a file of the data set is named
        with its folder, or if the metadata exceed 100 MB, which is a million classes with names of
        80 letters.
        """
        path = Path(path)
        for shard in self.shards:
            if "/" in shard.file:
                raise ValueError(
                    f"{path.name} cannot name {shard.file}: all files of an index must lie in its "
                    "folder. Move them there, or make hard links with 'ln'."
                )
        tensors = self._tensors()
        metadata = self._metadata(tensors)
        text = _canonical(metadata).decode()
        header = make_header(tensors, {METADATA_KEY: text})
        data = [_bytes_of(tensors[name]) for name in in_file_order(tensors)]
        _replace_file(path, [header, *data])
        return replace(self, path=path, fingerprint=metadata["fingerprint"])

    def identified(self) -> "Index":
        """Return this index with the fingerprint that it would be written with."""
        return replace(self, fingerprint=self._metadata(self._tensors())["fingerprint"])

    def _metadata(self, tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Return the metadata of the file, with the fingerprint."""
        metadata = {
            "format_version": self.format_version,
            "samples": len(self),
            "arrays": [array.as_dict() for array in self.arrays],
            "tensors": {
                name: {
                    "dtype": tensor.dtype.str,
                    "shape": list(tensor.shape),
                    "crc32": zlib.crc32(_bytes_of(tensor)),
                }
                for name, tensor in tensors.items()
            },
            "columns": list(self.columns),
            "classes": None if self.classes is None else list(self.classes),
            "points": list(self.points),
            **self._optional_entries(),
            "build": dict(self.build),
            "statistics": dict(self.statistics),
        }
        return metadata | {"fingerprint": hashlib.sha256(_canonical(metadata)).hexdigest()}

    def _optional_entries(self) -> dict[str, Any]:
        """Return the entries of the metadata that are only there if there is something in them."""
        texts = {name: list(names) for name, names in self.categories.items()}
        entries = {"categories": texts, "boxes": list(self.boxes)}
        return {name: entry for name, entry in entries.items() if entry}

    def _tensors(self) -> dict[str, np.ndarray]:
        """Return the tensors of the file, contiguous and little-endian."""
        offsets, names = self.keys.pack()
        tensors = {
            "row": self.row,
            "flags": self.flags,
            "key/offsets": offsets,
            "key/bytes": names,
            **{f"crc32/{name}": checksums for name, checksums in self.crc32.items()},
            **{f"row/{name}": rows for name, rows in self.other_rows.items()},
            **self.columns,
        }
        return {
            name: np.ascontiguousarray(tensor, tensor.dtype.newbyteorder("<"))
            for name, tensor in tensors.items()
        }


def class_counts(labels: np.ndarray, classes: int) -> list[int]:
    """Return how many samples each class has."""
    return [int(count) for count in np.bincount(labels, minlength=classes)]


def _replace_file(path: Path, parts: Sequence[bytes | memoryview]) -> None:
    """Write a file under a temporary name, flush it to the disk, and rename it to ``path``."""
    # A random name, so that two processes do not write to the same file. A short one, since the
    # name of the index may be as long as a name can be.
    temporary = path.with_name(f".{os.urandom(8).hex()}.tmp")
    try:
        with temporary.open("xb") as file:
            file.writelines(parts)
        sync(temporary)
        temporary.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        # The kernel now takes the pages for written and would serve them. Drop them, so that
        # readers see what is on the disk.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        raise
    finally:
        os.close(descriptor)


def _read_index(path: Path, file: BufferedReader) -> Index:
    """Read an index. Raises FormatError, OSError, or one of `_DAMAGE`."""
    tensors, texts = read_header(file)
    metadata = json.loads(texts[METADATA_KEY])
    _check_identity(path, metadata)
    arrays = _parse_arrays(metadata["arrays"])
    _check_tensors(tensors, metadata, arrays)
    stored = {}
    for name, tensor in tensors.items():
        if not name.startswith("key/"):
            stored[name] = read_tensor(file, tensor)
            _check_crc32(path, name, stored[name], metadata)
    _check_rows(stored, arrays)
    _check_contents(stored, metadata)
    classes = metadata["classes"]
    return Index(
        path=path,
        arrays=arrays,
        row=stored["row"],
        flags=stored["flags"],
        keys=_map_keys(path, file, tensors, metadata),
        columns={name: stored[name] for name in metadata["columns"]},
        crc32={array.name: stored[f"crc32/{array.name}"] for array in arrays},
        classes=None if classes is None else tuple(classes),
        other_rows={a.name: stored[f"row/{a.name}"] for a in arrays if f"row/{a.name}" in stored},
        points=tuple(metadata["points"]),
        boxes=tuple(metadata.get("boxes", ())),
        categories={name: tuple(texts) for name, texts in metadata.get("categories", {}).items()},
        build=metadata["build"],
        statistics=metadata["statistics"],
        fingerprint=metadata["fingerprint"],
    )


def _check_identity(path: Path, metadata: Any) -> None:
    """Check the version of the format and the fingerprint of the metadata."""
    version = metadata["format_version"]
    require(type(version) is int and version >= 1, "it has no format version")
    if version > FORMAT_VERSION:
        raise FormatError(
            f"{path} has format version {version}, but this memload reads versions up to "
            f"{FORMAT_VERSION}. Run 'pip install --upgrade memload'.",
            path=path,
        )
    content = {key: value for key, value in metadata.items() if key != "fingerprint"}
    expected = hashlib.sha256(_canonical(content)).hexdigest()
    require(metadata["fingerprint"] == expected, "its fingerprint does not fit its metadata")


def _parse_arrays(entries: Any) -> tuple[Array, ...]:
    arrays = tuple(_parse_array(entry) for entry in entries)
    names = [array.name for array in arrays]
    require("image" in names, "it has no array named 'image'")
    require(len(set(names)) == len(names), "two of its arrays have the same name")
    for array in arrays:
        is_image = array.name == "image"
        require((array.kind == "image") == is_image, "its images are not the array 'image'")
    return arrays


#: For each kind of array, its element types and what its shape is; None for any shape.
_KINDS: Mapping[str, tuple[Sequence[str], tuple[str, ...] | None]] = {
    "image": (DESCRS, ("H", "W", "C")),
    "mask": (DESCRS_OF_MASKS, ("H", "W")),
    "array": (DESCRS_OF_ARRAYS, None),
}


def _parse_array(entry: Any) -> Array:
    name, descr, shape = entry["name"], entry["descr"], tuple(entry["shape"])
    kind = entry.get("kind", "image")
    require(kind in get_args(ArrayKind), f"array {name!r} has the unknown kind {kind!r}")
    descrs, sides = _KINDS[kind]
    require(descr in descrs, f"the element type of {name!r} is none of {', '.join(descrs)}")
    integers = all(type(extent) is int and 0 < extent < 2**31 for extent in shape)
    fits = bool(shape) if sides is None else len(shape) == len(sides)
    require(integers and fits, f"the shape of {name!r} is not [{', '.join(sides or ('…',))}]")
    shards = tuple(Shard(shard["file"], shard["rows"], shard["bytes"]) for shard in entry["shards"])
    require(bool(shards), f"array {name!r} has no shards")
    array = Array(name, descr, shape, shards, kind)
    for shard in shards:
        is_name = _FILE_NAME.fullmatch(shard.file) and shard.file not in (".", "..")
        require(bool(is_name), f"{shard.file!r} is not a file name without a folder")
        require(type(shard.rows) is int and shard.rows > 0, "a shard has no rows")
        size = array.header_bytes + shard.rows * array.row_bytes
        require(shard.bytes == size < 2**63, f"the size of {shard.file} does not fit its rows")
    is_ours = array.header_bytes == HEADER_BYTES
    is_other = kind != "image" and 0 < array.header_bytes < MAX_NPY_HEADER_BYTES
    require(is_ours or is_other, f"the size of {shards[0].file} does not fit its rows")
    return array


def _check_tensors(tensors: Mapping[str, Tensor], metadata: Any, arrays: Sequence[Array]) -> None:
    """Check that the tensors are those that the metadata list and that the format requires."""
    found = {name: (tensor.descr, tensor.shape) for name, tensor in tensors.items()}
    listed = metadata["tensors"]
    described = {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in listed.items()}
    require(described == found, "its tensors are not those that its metadata list")
    require(all(type(entry["crc32"]) is int for entry in listed.values()), "a crc32 is no integer")
    samples, columns = metadata["samples"], metadata["columns"]
    required = {
        "row": ("<i8", (samples,)),
        "flags": ("|u1", (samples,)),
        "key/offsets": ("<i8", (samples + 1,)),
        "key/bytes": ("|u1", (tensors["key/bytes"].size,)),
        **{f"crc32/{array.name}": ("<u4", (array.rows,)) for array in arrays},
        **{
            f"row/{array.name}": ("<i8", (samples,))
            for array in arrays
            if f"row/{array.name}" in found and array.kind != "image"
        },
    }
    for name, expected in required.items():
        require(found[name] == expected, f"tensor {name!r} is {found[name]}, not {expected}")
    require(sorted([*columns, *required]) == sorted(found), "its columns do not fit its tensors")
    require(not {array.name for array in arrays} & {*columns}, "an array and a column share a name")
    for name in columns:
        require(found[name][1][:1] == (samples,), f"column {name!r} has not {samples} entries")


def _check_rows(stored: Mapping[str, np.ndarray], arrays: Sequence[Array]) -> None:
    """Check that the rows of all samples are in range."""
    for array in arrays:
        rows = stored.get(f"row/{array.name}", stored["row"])
        require(_in_range(rows, array.rows), f"a sample has a row beyond 0 to {array.rows - 1}")


def _check_contents(stored: Mapping[str, np.ndarray], metadata: Any) -> None:
    """Check that labels are in range, and the rest of the metadata."""
    classes = metadata["classes"]
    if classes is not None:
        require(all(type(name) is str for name in classes), "its classes are no list of names")
        label = stored["label"]
        require(label.dtype.str == "<i8" and label.ndim == 1, "its labels are not int64 (n,)")
        require(_in_range(label, len(classes)), "a label is beyond the classes")
    for name in metadata["points"]:
        require(name in metadata["columns"], f"its points {name!r} are no column")
        require(stored[name].shape[2:] == (2,), f"its points {name!r} are not (n, k, 2)")
    for name in metadata.get("boxes", ()):
        require(name in metadata["columns"], f"its boxes {name!r} are no column")
        is_boxes = stored[name].dtype.str == "<f4" and stored[name].shape[2:] == (4,)
        require(is_boxes, f"its boxes {name!r} are not float32 (n, k, 4)")
    for name, texts in metadata.get("categories", {}).items():
        require(name in metadata["columns"], f"its categories {name!r} are no column")
        are_texts = type(texts) is list and all(type(text) is str for text in texts)
        require(are_texts, f"its categories {name!r} are no list of texts")
        is_numbered = stored[name].dtype.str == "<i8" and stored[name].ndim == 1
        require(is_numbered, f"its column {name!r} with categories is not int64 (n,)")
        require(_in_range(stored[name], len(texts)), f"its {name!r} is beyond its categories")
    for name in ("build", "statistics"):
        require(type(metadata[name]) is dict, f"its {name} are no object")
        require(_depth(metadata[name]) <= MAX_DEPTH, f"its {name} are nested too deeply")


def _map_keys(
    path: Path, file: BufferedReader, tensors: Mapping[str, Tensor], metadata: Any
) -> Keys:
    """Return the names, mapped. They are checked when the first of them is used."""
    mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    offsets, data = (
        mapped[tensors[name].start :][: tensors[name].size].view(tensors[name].descr)
        for name in ("key/offsets", "key/bytes")
    )

    @functools.cache
    def verify() -> None:
        for name, tensor in (("key/offsets", offsets), ("key/bytes", data)):
            try:
                fault_in(address_of(tensor), tensor.nbytes)
            except OSError as error:
                raise FormatError(f"{path} cannot be read: {error.strerror}.", path=path) from error
            _check_crc32(path, name, tensor, metadata)
        rises = not np.any(offsets[1:] < offsets[:-1])  # np.diff could overflow
        if not rises or offsets[0] != 0 or offsets[-1] != data.size:
            raise FormatError(
                f"{path} is damaged: its key/offsets do not rise from 0 to {data.size}. "
                "Restore it, or run 'memload build' again.",
                path=path,
            )

    return Keys(offsets, data, verify)


def _check_crc32(path: Path, name: str, tensor: np.ndarray, metadata: Any) -> None:
    found, expected = zlib.crc32(_bytes_of(tensor)), metadata["tensors"][name]["crc32"]
    if found != expected:
        raise ChecksumError(
            f"{path} is damaged: its tensor {_shorten(name)!r} has checksum {found:08x} instead of "
            f"{expected:08x}. Restore it, or run 'memload build' again.",
            path=path,
        )


def _bytes_of(tensor: np.ndarray) -> memoryview:
    return tensor.reshape(-1).view(np.uint8).data


def _in_range(numbers: np.ndarray, stop: int) -> bool:
    return not numbers.size or (numbers.min() >= 0 and numbers.max() < stop)


def _depth(value: object) -> int:
    """Return how deeply objects and lists are nested; 0 for anything else."""
    if not isinstance(value, (dict, list)):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(map(_depth, inner), default=0)


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def _shorten(text: str) -> str:
    """Return a text in at most 200 letters. A name in a forged file may have millions."""
    return text if len(text) <= 200 else text[:199] + "…"


def _missing(path: Path, given: Path) -> MissingError:
    """Return the error for an index that does not exist. The advice depends on what does.

    ``given`` is what the user named, such as ``out.bin``.
    """
    pixels, building = path.with_suffix(".bin"), output_paths(path.with_suffix(".bin"))[1]
    copying = path.with_suffix(".copying")
    owner = path.with_name(f"{path.stem.rpartition('.')[0]}.idx")  # out.idx of out.mask.bin
    if os.path.exists(building):  # noqa: PTH110  # no name is too long for os.path
        message = (
            f"{given} is missing: its build is not complete ({building}). If it is running, wait "
            "for it. Otherwise run the same 'memload build' again; it goes on where it stopped."
        )
    elif os.path.exists(copying):  # noqa: PTH110  # as above
        message = (
            f"{given} is missing: it is a copy that is not complete ({copying}). Run the same "
            "'memload copy' again."
        )
    elif os.path.exists(given) and os.path.exists(owner):  # noqa: PTH110  # as above
        message = f"{given} holds an array of {owner.name}, not its images. Open {owner}."
    elif os.path.exists(pixels):  # noqa: PTH110  # as above
        message = (
            f"{path} is missing: without an index, {pixels.name} has no labels and no names. Copy "
            "the index here too, or run 'memload build' again."
        )
    else:
        message = (
            f"{given} does not exist. Check the path, or make a data set with 'memload build'."
        )
    return MissingError(message, path=path)
