"""Read, check and write the index file. `memload.storage.format` is its specification."""

import contextlib
import functools
import hashlib
import json
import math
import os
import re
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from memload.errors import FormatError, MissingError, describe_error
from memload.storage.format import (
    DESCRS,
    DESCRS_OF_ARRAYS,
    DESCRS_OF_MASKS,
    FORMAT_VERSION,
    HEADER_BYTES,
    MAX_NPY_HEADER_BYTES,
    METADATA_KEY,
    array_path,
    index_path,
    output_paths,
    shard_pattern,
)
from memload.storage.keys import Keys
from memload.wording import listed, shape_text


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

    @functools.cached_property
    def rows(self) -> int:
        """The number of rows in all shards together."""
        return sum(shard.rows for shard in self.shards)

    @functools.cached_property
    def row_bytes(self) -> int:
        """The size of a row in bytes."""
        return int(self.descr[2:]) * math.prod(self.shape)

    @property
    def data_bytes(self) -> int:
        """The size of all shards in bytes, headers included."""
        return sum(shard.bytes for shard in self.shards)

    @functools.cached_property
    def header_bytes(self) -> int:
        """Where the first row begins in each shard: at 4,096, unless another program wrote them."""
        return self.shards[0].bytes - self.shards[0].rows * self.row_bytes

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """The first row of each shard, then the number of all rows: int64 ``(shards + 1,)``."""
        return np.cumsum([0, *(shard.rows for shard in self.shards)], dtype=np.int64)

    def shard_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the number of the shard that holds each row, int64 ``(n,)``."""
        return self.starts.searchsorted(rows, side="right") - 1

    def rows_within(self, sizes: Sequence[int]) -> int:
        """Return how many whole rows lie in the first ``sizes[s]`` bytes of each shard s."""
        rows = (np.array(sizes) - self.header_bytes) // self.row_bytes
        return int(np.clip(rows, 0, np.diff(self.starts)).sum())

    def locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the shard of each row, and where the row begins in that file in bytes.

        ``rows`` is int64 ``(n,)``, and both results are, too. The caller checks that all rows are
        at least 0 and below `rows`.

        >>> shards = (Shard("a.bin", 2, 4106), Shard("b.bin", 3, 4111))
        >>> Array("image", "|u1", (1, 1, 5), shards).locate(np.array([0, 4]))
        (array([0, 1]), array([4096, 4106]))
        """
        shard = self.shard_of(rows)
        return shard, self.header_bytes + (rows - self.starts[shard]) * self.row_bytes


@dataclass(frozen=True)
class Index:
    """Everything that is known of a data set except its pixels.

    An index of n samples that was read is in memory, except for the names, which are read when one
    is first used.

    Attributes:
        path: The index file.
        arrays: The images and all other arrays, each with its files.
        row: The row of each sample in the array of the images, int64 ``(n,)``.
        flags: Bits that the build has set for each sample, uint8 ``(n,)``.
        keys: The names of the samples.
        columns: Arrays ``(n, …)`` by name, such as ``"label"``.
        crc32: The checksums of the rows, uint32 ``(rows,)``, by the name of the array.
        classes: The names of the classes; None if labels have no names.
        other_rows: The same as ``row`` for those other arrays whose rows are in another order;
            `rows_of` returns either.
        points: Names of columns with points, which move with the image.
        boxes: Names of columns with boxes, which do, too.
        categories: By the name of a column, int64 ``(n,)``, the texts that it counts into.
        build: Settings and versions of the build.
        statistics: Mean, standard deviation and others.
        fingerprint: 64 hexadecimal digits that identify the data set.
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
        return sum(shard.bytes for shard in self.shards)

    @property
    def names(self) -> list[str]:
        """What each sample has besides its image: the names of arrays, then those of columns."""
        return [*(array.name for array in self.arrays if array.name != "image"), *self.columns]

    def setting(self, name: str) -> Any:
        """Return a setting of the build. None if it is not known, as in an index of other tools."""
        return self.build.get("settings", {}).get(name)

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

    @property
    def texts(self) -> dict[str, tuple[str, ...]]:
        """The texts that columns count into: the categories, and the classes for the labels."""
        labels = {} if self.classes is None else {"label": self.classes}
        return {**self.categories, **labels}

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
        """
        path = Path(path)
        index = cls.read(index_path(path))
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

        Checks the fingerprint of the metadata, the checksums of all tensors but the names, where
        the rows lie, and that numbers are in range. The names are read and checked when one is
        first used, from the file that was opened here, even if another one has taken its place.

        Raises FormatError, and MissingError (also a FileNotFoundError) if there is no such file.
        """
        path = Path(path)
        with _reading(path):
            return _with_moved_files(_read_index(path, _Tensors(path)))

    def write(self, path: str | Path) -> "Index":
        """Write the index to ``path``, flush it to the disk, and return it as written.

        The file is written under a temporary name and renamed, so that it replaces in one step
        whatever was at ``path``.

        Args:
            path: A name that ends in ``.idx``, in the folder of the pixels.

        Raises ValueError for another name or folder, OSError, and SafetensorError if the metadata
        exceed 100 MB, which is a million classes with names of 80 letters.

        >>> memload.where("out.bin", label="cat").write("cats.idx")  # doctest: +SKIP
        """
        from safetensors.numpy import save

        path = Path(path)
        if path.suffix != ".idx":
            raise ValueError(f"The index is to be written to {path}. Its name must end in '.idx'.")
        is_elsewhere = path.resolve().parent != self.path.resolve().parent
        for shard in self.shards:
            if "/" in shard.file or (is_elsewhere and not path.with_name(shard.file).exists()):
                own = self.path.with_name(path.name)
                remedy = "Move" if "/" in shard.file else f"Write '{own}', or move"
                raise ValueError(
                    f"{path} would not find {self.path.parent / shard.file}: an index must be in "
                    f"the folder of the pixels. {remedy} them there, or make hard links with 'ln'."
                )
        tensors = self._tensors()
        metadata = self._metadata(tensors)
        # Not by safetensors.numpy.save_file, whose files only their owner may read.
        _replace_file(path, save(tensors, {METADATA_KEY: _canonical(metadata).decode()}))
        return replace(self, path=path, fingerprint=metadata["fingerprint"])

    def _metadata(self, tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Return the metadata of the file, with the fingerprint."""
        metadata: dict[str, Any] = {
            "format_version": self.format_version,
            "samples": len(self),
            "arrays": [asdict(array) for array in self.arrays],
            "tensors": {name: _entry_of(tensor) for name, tensor in tensors.items()},
            "columns": list(self.columns),
            "classes": self.classes,
            "points": self.points,
            "build": dict(self.build),
            "statistics": dict(self.statistics),
        }
        # The rest is left out where it says nothing: version 1 was there before.
        metadata |= {"categories": dict(self.categories)} if self.categories else {}
        metadata |= {"boxes": self.boxes} if self.boxes else {}
        for entry in metadata["arrays"]:
            if entry["kind"] == "image":
                del entry["kind"]
        return metadata | {"fingerprint": hashlib.sha256(_canonical(metadata)).hexdigest()}

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
    counts: list[int] = np.bincount(labels, minlength=classes).tolist()
    return counts


def _replace_file(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, flush it to the disk, and rename it to ``path``."""
    # A random name, so that two processes do not write to the same file. A short one, since the
    # name of the index may be as long as a name can be.
    temporary = path.with_name(f".{os.urandom(8).hex()}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
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


class _Tensors:
    """The tensors of an index file. Each is read and checked when it is asked for.

    They come from the file that was opened here, even if another one has taken its name since.
    safetensors' ``safe_open`` would do, but it maps the file: that takes three times as long, and
    the pages count as memory of this process as long as the index is open.
    """

    def __init__(self, path: Path) -> None:
        # Without O_NONBLOCK, a pipe would be waited for.
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        weakref.finalize(self, os.close, self._descriptor)
        self._start = 8 + int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
        self._header = json.loads(os.pread(self._descriptor, self._start - 8, 8))
        self.metadata = json.loads(self._header["__metadata__"][METADATA_KEY])

    def __getitem__(self, name: str) -> np.ndarray:
        entry = self.metadata["tensors"][name]
        offset = self._start + self._header[name]["data_offsets"][0]
        # Opened once more, for a position of its own: a forked process shares that of a descriptor.
        path, count = f"/dev/fd/{self._descriptor}", math.prod(entry["shape"])
        flat: np.ndarray = np.fromfile(path, entry["dtype"], count, offset=offset)
        tensor = flat.reshape(entry["shape"])
        _require(_entry_of(tensor) == entry, f"its tensor {name!r} differs from its checksum")
        return tensor


def _entry_of(tensor: np.ndarray) -> dict[str, Any]:
    """Return what the metadata say of a tensor."""
    shape, crc32 = list(tensor.shape), zlib.crc32(tensor.data)
    return {"dtype": tensor.dtype.str, "shape": shape, "crc32": crc32}


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn whatever a missing, unreadable or damaged index raises into FormatError."""
    try:
        yield
    except FileNotFoundError:
        raise _missing(path) from None
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error.strerror}.", path=path) from error
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        MemoryError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise FormatError(
            f"{path} is damaged or was not written by memload ({describe_error(error):.200}). "
            "Restore it, or run 'memload build' again.",
            path=path,
        ) from None


def _read_index(path: Path, tensors: _Tensors) -> Index:
    """Check an index and return it. Raises any of the exceptions that `_reading` knows."""
    metadata = tensors.metadata
    _check_identity(path, metadata)

    @functools.cache
    def load_names() -> tuple[np.ndarray, np.ndarray]:
        with _reading(path):
            return tensors["key/offsets"], tensors["key/bytes"]

    entries, classes = metadata["tensors"], metadata["classes"]
    arrays = tuple(_parse_array(entry) for entry in metadata["arrays"])
    index = Index(
        path=path,
        arrays=arrays,
        row=tensors["row"],
        flags=tensors["flags"],
        keys=Keys.loaded_by(load_names, entries["key/offsets"]["shape"][0] - 1),
        columns={name: tensors[name] for name in metadata["columns"]},
        crc32={array.name: tensors[f"crc32/{array.name}"] for array in arrays},
        classes=None if classes is None else tuple(classes),
        other_rows={
            array.name: tensors[f"row/{array.name}"]
            for array in arrays
            if f"row/{array.name}" in entries
        },
        points=tuple(metadata["points"]),
        boxes=tuple(metadata.get("boxes", ())),
        categories={name: tuple(texts) for name, texts in metadata.get("categories", {}).items()},
        build=metadata["build"],
        statistics=metadata["statistics"],
        fingerprint=metadata["fingerprint"],
    )
    values = index.row, *index.other_rows.values(), index.flags, *index.columns.values()
    sizes = {len(index.keys), *map(len, values)}
    _require(sizes == {metadata["samples"]}, "it has not one value for each sample")
    _require(index.image.kind == "image", "its images are of another kind")
    for array in arrays:
        _check_range(index.rows_of(array.name), array.rows, f"row of {array.name!r}")
        has_all = index.crc32[array.name].shape == (array.rows,)
        _require(has_all, f"{array.name!r} has not one checksum for each row")
    for name, texts in index.texts.items():
        _check_range(index.columns[name], len(texts), f"number in {name!r}")
    return index


def _with_moved_files(index: Index) -> Index:
    """Return the index with the names of files that were renamed as the index was.

    ``photos.idx`` may name ``out-00002-of-00004.bin``. If that is missing, its file is
    ``photos-00002-of-00004.bin``. Seal and checksums prove it when it is opened.
    """

    def found(array: Array, shard: Shard) -> Shard:
        moved = moved_name(index.path, array, shard)
        is_there = index.path.with_name(shard.file).exists()
        is_moved = not is_there and index.path.with_name(moved).exists()
        return replace(shard, file=moved) if is_moved else shard

    arrays = (replace(a, shards=tuple(found(a, shard) for shard in a.shards)) for a in index.arrays)
    return replace(index, arrays=tuple(arrays))


def moved_name(path: Path, array: Array, shard: Shard) -> str:
    """Return what a file of an array is called if it was renamed as its index ``path`` was."""
    named = array_path(path.with_suffix(".bin"), array.name)
    number = "".join(re.findall(r"-\d{5,}-of-\d{5,}(?=\.bin$)", shard.file))
    return f"{named.stem}{number}.bin"


def _check_identity(path: Path, metadata: Any) -> None:
    """Check the version of the format and the fingerprint of the metadata."""
    version = metadata["format_version"]
    if version > FORMAT_VERSION:
        raise FormatError(
            f"{path} has format version {version}, but this memload reads versions up to "
            f"{FORMAT_VERSION}. Run 'pip install --upgrade memload'.",
            path=path,
        )
    content = {key: value for key, value in metadata.items() if key != "fingerprint"}
    expected = hashlib.sha256(_canonical(content)).hexdigest()
    _require(metadata["fingerprint"] == expected, "its fingerprint does not fit its metadata")


_DESCRS_OF_KINDS = {"image": DESCRS, "mask": DESCRS_OF_MASKS, "array": DESCRS_OF_ARRAYS}


def _parse_array(entry: Any) -> Array:
    """Return the array of an entry of the metadata. Raises ValueError if it cannot be right."""
    shards = tuple(Shard(**shard) for shard in entry["shards"])
    array = Array(**{**entry, "shape": tuple(entry["shape"]), "shards": shards})
    _require(array.descr in _DESCRS_OF_KINDS[array.kind], f"{array.name!r} is of {array.descr}")
    header = array.header_bytes
    is_other = array.kind != "image" and 0 < header < MAX_NPY_HEADER_BYTES
    for shard in shards:
        fits = shard.bytes == header + shard.rows * array.row_bytes
        _require(fits and (is_other or header == HEADER_BYTES), f"{shard.file} has a wrong size")
        is_name = Path(shard.file).name == shard.file not in ("", "..")
        _require(is_name, f"{shard.file!r} is not a file name without a folder")
    return array


def _check_range(numbers: np.ndarray, stop: int, what: str) -> None:
    """Check that numbers are int64 ``(n,)`` from 0 to ``stop - 1``."""
    is_right = numbers.dtype.str == "<i8" and numbers.ndim == 1
    if is_right and numbers.size:
        is_right = bool(numbers.min() >= 0 and numbers.max() < stop)
    _require(is_right, f"a {what} is not a whole number from 0 to {stop - 1}")


def _require(condition: bool, problem: str) -> None:
    """Raise ValueError with this text unless a condition holds."""
    if not condition:
        raise ValueError(problem)


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def _missing(path: Path) -> MissingError:
    """Return the error for an index that does not exist."""
    building = output_paths(path.with_suffix(".bin"))[1]
    url = re.fullmatch(r"([a-z]\w+):/+(.*)\.idx", str(path))  # a path has lost a slash of it
    if url:
        message = (
            f"{url[1]}://{url[2]}.bin is not on this machine. Copy it first: 'memload copy "
            f"{url[1]}://{url[2]}.bin .', or memload.copy."
        )
    elif building.exists():
        message = (
            f"{path} is missing: its build is not complete ({building}). If it is running, wait "
            "for it. Otherwise run the same 'memload build' again; it goes on where it stopped."
        )
    else:
        message = (
            f"{path} does not exist. Check the path, copy the index beside its pixels, or make a "
            "data set with 'memload build'."
        )
    return MissingError(message, path=path)
