"""Which rows are done, provably: one record for each row, with checksums.

A record carries a checksum of itself and one of its row's pixels. After a crash a row counts as
done only if both are right, so that records and pixels may reach the disk in any order, from any
number of processes.
"""

import contextlib
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from memload.building.checked_json import parse_json
from memload.building.extra_arrays import ExtraArray
from memload.building.sources.record import Column
from memload.building.writer import check_regular
from memload.errors import DecodeError
from memload.storage.index import sync

#: What a record's ``status`` may be, besides 0: not converted yet.
DONE, REJECTED = 1, 2

#: Where a record's ``status`` lies in it.
STATUS_BYTE = 4


def record_type(
    channels: int,
    schema: Mapping[str, Column],
    descr: str = "|u1",
    arrays: Sequence[ExtraArray] = (),
) -> np.dtype[Any]:
    """Return the type of a record. ``channels`` and ``descr`` are those of the images.

    ``file_state`` is that of the file that was read, see `FileState`, or `NO_FILE`. ``given_crc32``
    is the checksum of the columns as the source gives them. ``total`` and ``squares`` are sums over
    the pixels, one a channel: exact for unsigned integers; for other types ``squares`` sums the
    squared differences from the row's own mean. ``remarks`` and ``value_range``, the lowest and
    the highest value of a picture whose depth was reduced, are explained in
    `memload.building.notes`. Each of ``arrays`` has a checksum and a file of its own. For each
    column of boxes, ``boxes`` says how many the source gives, and ``largest_edge`` how far they go.
    """
    sums = "<u8" if np.dtype(descr).kind == "u" else "<f8"
    fields: list[tuple[Any, ...]] = [
        ("check", "<u4"),
        ("status", "|u1"),
        ("flags", "|u1"),
        ("crc32", "<u4"),
        ("given_crc32", "<u4"),
        ("file_state", "<i8", (3,)),
        ("size", "<u4", (2,)),
        ("total", sums, (channels,)),
        ("squares", sums, (channels,)),
        ("remarks", "|u1"),
        ("value_range", "<i8", (2,)),
    ]
    for array in arrays:
        fields += [
            (crc32_field(array.name), "<u4"),
            (f"file_state/{array.name}", "<i8", (3,)),
            (f"ids/{array.name}", "|u1", (array.bitmap_size,)),
        ]
    for name in names_of_boxes(schema):
        fields += [(f"boxes/{name}", "<u4"), (f"largest_edge/{name}", "<f8")]
    return np.dtype(
        fields + [(f"column/{name}", column.dtype, column.shape) for name, column in schema.items()]
    )


def names_of_boxes(schema: Mapping[str, Column]) -> list[str]:
    """Return the names of the columns of boxes."""
    return [name for name, column in schema.items() if column.boxes]


def set_boxes(record: np.void, name: str, boxes: Any) -> None:
    """Keep for notes what the boxes ``(k, 4)`` are that a source gives. Those with NaN are none."""
    given = np.asarray(boxes, np.float64)
    given = given[~np.isnan(given).any(axis=1)]
    record[f"boxes/{name}"] = len(given)
    record[f"largest_edge/{name}"] = given.max(initial=0)


def crc32_field(array: str) -> str:
    """Return the field of a record with the checksum of the row of an array."""
    return "crc32" if array == "image" else f"crc32/{array}"


def set_columns(record: np.void, schema: Mapping[str, Column], columns: Mapping[str, Any]) -> None:
    """Put the values of the columns into a record.

    Floats are rounded to a float column. An integer column takes only integers within its range.
    Raises DecodeError if a value cannot be kept.
    """
    for name, column in schema.items():
        value = columns[name]
        if np.ma.is_masked(value):
            raise DecodeError(f"column {name!r}: some values are masked. Fill them")
        array = np.asarray(value)
        if array.shape != column.shape:  # NumPy would repeat a single number
            raise DecodeError(
                f"column {name!r}: its shape is {array.shape} instead of {column.shape}"
            )
        if array.dtype.kind not in "biuf":
            raise DecodeError(f"column {name!r}: {array.dtype} is not a type of numbers")
        field = f"column/{name}"
        if array.dtype.str == column.dtype:
            record[field] = array
            continue
        with np.errstate(invalid="ignore", over="ignore"):  # compared below
            record[field] = array.astype(column.dtype)
        if np.dtype(column.dtype).kind == "f":
            is_kept = np.array_equal(np.isfinite(record[field]), np.isfinite(array))
        else:
            is_kept = np.array_equal(record[field], array)
        if not is_kept:
            raise DecodeError(
                f"column {name!r}: {array.tolist()!r:.60} does not fit "
                f"{np.dtype(column.dtype).name}"
            )


def columns_crc32(schema: Mapping[str, Column], columns: Mapping[str, Any]) -> int:
    """Return the checksum of a sample's columns as the source gives them.

    Only points and boxes are included: they are stored moved to where they are in the stored
    picture, so the stored values cannot be compared. Without them, it is 0.
    """
    checksum = 0
    for name, column in schema.items():
        if column.follows:
            checksum = zlib.crc32(np.asarray(columns[name], np.float64).tobytes(), checksum)
    return checksum


def is_intact(record: np.void) -> bool:
    """Say whether a record was signed by `Journal.write` and is as it was then."""
    return bool(record["status"]) and int(record["check"]) == zlib.crc32(record.tobytes()[4:])


class Journal:
    """The records of a build, and why rows were rejected: the files ``rows`` and ``rejects.jsonl``.

    It has ``rows`` rows from ``first_row`` on, which is above 0 if the shards of a build have
    journals of their own. Several processes may write to it at once, each to rows of its own. It
    holds no file open.
    """

    def __init__(
        self, folder: Path, rows: int, dtype: np.dtype[Any], *, first_row: int = 0
    ) -> None:
        self.folder, self.rows, self.dtype, self.first_row = folder, rows, dtype, first_row

    @property
    def stop_row(self) -> int:
        """The row after the last one."""
        return self.first_row + self.rows

    def create(self) -> None:
        """Make the file of the records at its full size; records that are there stay.

        A file that is too short or too long is damaged.
        """
        for name in ("rows", "rejects.jsonl"):
            check_regular(self.folder / name)
        with (self.folder / "rows").open("ab") as file:
            file.truncate(self.rows * self.dtype.itemsize)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return a copy of some records."""
        with (self.folder / "rows").open("rb") as file:
            file.seek((start - self.first_row) * self.dtype.itemsize)
            data = file.read((stop - start) * self.dtype.itemsize)
        return np.frombuffer(bytearray(data), self.dtype, stop - start)

    def write(self, start: int, records: np.ndarray, rejects: list[tuple[int, str]]) -> None:
        """Sign and keep the records of some rows, and why some of them were rejected."""
        for position, record in enumerate(records):
            records["check"][position] = zlib.crc32(record.tobytes()[4:])
        if rejects:  # the reasons first, so that no rejected row lacks one
            # The line break comes first, so that a line that a crash cut short ends there.
            lines = "".join("\n" + json.dumps([row, reason]) for row, reason in rejects)
            with (self.folder / "rejects.jsonl").open("ab") as file:
                file.write(lines.encode("ascii"))
        with (self.folder / "rows").open("r+b") as file:
            file.seek((start - self.first_row) * self.dtype.itemsize)
            file.write(records.tobytes())

    def sync(self) -> None:
        """Flush the files and their names to the disk."""
        for name in ("rows", "rejects.jsonl"):
            with contextlib.suppress(FileNotFoundError):
                sync(self.folder / name)
        sync(self.folder)

    def remove(self) -> None:
        """Remove the records, so that no row counts as done."""
        (self.folder / "rows").unlink(missing_ok=True)

    def mapped(self) -> np.ndarray:
        """Return all records, mapped for reading. The first one is that of ``first_row``."""
        return np.memmap(self.folder / "rows", self.dtype, "r", shape=(self.rows,))

    def reasons(self) -> dict[int, str]:
        """Return why rows were rejected; the last reason of each row."""
        reasons = {}
        with (
            contextlib.suppress(FileNotFoundError),
            (self.folder / "rejects.jsonl").open("rb") as file,
        ):
            for line in file:
                with contextlib.suppress(ValueError):  # a crash cut it short
                    match parse_json(line):
                        case [int(row), str(reason)] if self.first_row <= row < self.stop_row:
                            reasons[row] = reason
        return reasons
