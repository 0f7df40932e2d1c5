"""What a build keeps of a row: one record, which is written once the row is.

A record has a checksum of itself and one of the pixels. So the row counts as done only if both are
right, and neither has to reach the disk before the other.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from memload.errors import BuildError, DecodeError
from memload.sources.columns import Column

#: What a record's ``status`` may be, besides 0: not converted yet.
DONE, REJECTED = 1, 2

# What a record's ``remarks`` say of its picture, one bit each. A note counts them in the end.
#: The picture grew in width or in height.
ENLARGED = 1
#: The background shows through its transparent pixels.
FLATTENED = 2
#: It had more than 8 bits per channel, which were reduced to 8.
REDUCED = 4

#: Where a record's ``status`` lies in it.
STATUS_BYTE = 4


def record_type(
    channels: int,
    schema: Mapping[str, Column],
    descr: str = "|u1",
    arrays: Sequence[str] = (),
) -> np.dtype[Any]:
    """Return the type of a record.

    Args:
        channels: How many channels an image has.
        schema: The columns of the source.
        descr: The element type of the images.
        arrays: The names of the masks and other arrays beside the images.

    ``total`` and ``squares`` are sums over the pixels, one per channel. For unsigned integers they
    are exact. For other types, ``squares`` sums the squared differences from the row's own mean.
    """
    sums = "<u8" if np.dtype(descr).kind == "u" else "<f8"
    fields: list[tuple[Any, ...]] = [
        ("check", "<u4"),
        ("status", "|u1"),
        ("flags", "|u1"),
        ("crc32", "<u4"),
        ("size", "<u4", (2,)),
        ("total", sums, (channels,)),
        ("squares", sums, (channels,)),
        ("remarks", "|u1"),
    ]
    for array in arrays:
        fields += [(crc32_field(array), "<u4"), (f"is_missing/{array}", "?")]
    fields += [(f"rest/{name}", "<f8") for name in schema if may_be_floats(name, schema)]
    return np.dtype(
        fields + [(f"column/{name}", column.dtype, column.shape) for name, column in schema.items()]
    )


def may_be_floats(name: str, schema: Mapping[str, Column]) -> bool:
    """Return whether integers become floats if one of the numbers is a fraction or missing.

    The integer part is in ``column/NAME``, the fraction or NaN in ``rest/NAME``.
    """
    return schema[name] == Column("<i8") and name != "label"


def column_values(
    records: np.ndarray, used: np.ndarray, name: str, schema: Mapping[str, Column]
) -> np.ndarray:
    """Return some values of a column: integers are floats if one has a rest, such as NaN.

    Raises BuildError if integers are too large for that.
    """
    values: np.ndarray = records[f"column/{name}"][used]
    rest = records[f"rest/{name}"][used] if may_be_floats(name, schema) else np.zeros(0)
    if not rest.any():
        return values
    if np.abs(values).max() > 2**53:
        raise BuildError(
            f"column {name!r} has integers above 2**53 and missing numbers, and float64 keeps only "
            "one of them. Give the missing ones a number, or the column as texts."
        )
    floats: np.ndarray = values + rest
    return floats


def crc32_field(array: str) -> str:
    """Return the field of a record with the checksum of the row of an array."""
    return "crc32" if array == "image" else f"crc32/{array}"


def sign(records: np.ndarray, seed: int) -> None:
    """Put into records their own checksums. ``seed`` is that of the build's plan."""
    records["check"] = _checks(records, seed)


def are_intact(records: np.ndarray, seed: int) -> np.ndarray:
    """Return for each record whether it is as it was signed, bool ``(n,)``.

    A record that a kill cut short is not, nor is one of another plan, nor one that was never
    written.
    """
    intact: np.ndarray = (records["status"] > 0) & (records["check"] == _checks(records, seed))
    return intact


def _checks(records: np.ndarray, seed: int) -> np.ndarray:
    view, size = records.view(np.uint8).data, records.itemsize
    starts = range(0, len(records) * size, size)
    checks = (zlib.crc32(view[start + 4 : start + size], seed) for start in starts)
    return np.fromiter(checks, np.uint32, len(records))


def set_columns(record: np.void, schema: Mapping[str, Column], columns: Mapping[str, Any]) -> None:
    """Put the values of the columns into a record.

    Floats are rounded to a float column. An integer column takes only integers within its range.
    Raises DecodeError if a value cannot be kept.
    """
    for name, column in schema.items():
        value, field = columns[name], f"column/{name}"
        array = np.asarray(value)
        if array.shape != column.shape:  # NumPy would repeat a single number
            raise DecodeError(
                f"column {name!r}: its shape is {array.shape} instead of {column.shape}"
            )
        if array.dtype.kind not in "biuf" or np.ma.is_masked(value):
            raise DecodeError(f"column {name!r}: {array.dtype} is no type of numbers, or masked")
        if array.dtype.str == column.dtype:
            record[field] = array
            continue
        if may_be_floats(name, schema) and array.dtype.kind == "f":
            whole = np.trunc(array) if abs(array) < 2**63 else 0
            record[field], record[f"rest/{name}"] = whole, array - whole
            continue
        with np.errstate(invalid="ignore", over="ignore"):  # compared below
            record[field] = array.astype(column.dtype)
        kept = record[field]
        if np.dtype(column.dtype).kind != "f":
            is_kept = np.array_equal(kept, array)
        elif array.dtype.kind in "iu" and column.dtype == "<f8":  # such as ids above 2**53
            is_kept = np.array_equal(kept.astype(array.dtype), array)
        else:
            is_kept = np.array_equal(np.isfinite(kept), np.isfinite(array))
        if not is_kept:
            raise DecodeError(
                f"column {name!r}: {array.tolist()!r:.60} does not fit "
                f"{np.dtype(column.dtype).name}"
            )
