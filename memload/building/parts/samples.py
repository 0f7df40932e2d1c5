"""Notices a machine that sees another source than the machine that began a build in parts.

A folder that is not mounted on one machine would otherwise only show as pictures that cannot be
read there, and a data set in another order as pictures that are stored twice.
"""

import functools
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from memload.building.conversion import AnySettings
from memload.building.files import read_value
from memload.building.first_samples import look_at_first
from memload.building.sources.record import Source, optional
from memload.building.worker import runs_user_code, spread
from memload.errors import DecodeError
from memload.wording import counted

#: CRC-32 by what a sample has, such as ``the image`` and ``the column 'label'``, and by row.
Checksums = dict[str, dict[str, int]]

_IMAGE = "the image"

_REMEDY = (
    ". Samples of a data set have to be in the same order on all machines, and the same each time "
    "that they are read: sort lists of files, and change nothing at random"
)


def checksums(source: Source, settings: AnySettings, num_workers: int, timeout: float) -> Checksums:
    """Return the checksums of up to eight samples, as JSON has them. They are spread evenly.

    What cannot be read is left out. So are samples of the user's own code that cannot be converted,
    since they may be mended. Unless ``num_workers`` is 0, a worker reads the samples.
    """
    rows: list[int] = spread(len(source)).tolist()
    look = functools.partial(_look, source, settings, rows)
    samples, _ = look_at_first(look, len(rows), num_workers, timeout, count=len(rows))
    found: Checksums = {}
    for row, sample in samples:
        for name, checksum in sample.items():
            found.setdefault(name, {})[str(row)] = checksum
    return found


def difference(source: Source, now: Checksums, before: Checksums) -> str:
    """Say what differs from the checksums of another machine.

    Files may have been mended, changed or removed meanwhile. So images and arrays of memload's own
    sources differ only if none of them is the same. Of the user's code, all have to be the same.
    """
    is_users = runs_user_code(source)
    for name in sorted(before, key=lambda name: name != _IMAGE):
        here, there = now.get(name, {}), before[name]
        rows = [row for row in spread(len(source)).tolist() if str(row) in there]
        other = [row for row in rows if here.get(str(row)) != there[str(row)]]
        if other and (is_users or other == rows):
            key, row = source.keys[other[0]], str(other[0])
            sample = f"sample {row}" if key == row else key
            what = "is another one" if row in here else "cannot be read"
            return (
                f"{counted(len(other), 'sample')} of {len(rows)} that were looked at differ: "
                f"{name} of {sample}, for example, {what} here{_REMEDY * is_users}"
            )
    return ""


def _look(
    source: Source, settings: AnySettings, rows: Sequence[int], position: int
) -> tuple[int, dict[str, int]]:
    """Return a row, and the checksums of what can be read of its sample."""
    row, schema = rows[position], source.schema
    record = source[row]
    if runs_user_code(source):
        points = [name for name, column in schema.items() if column.points]
        settings.convert(record, points, [name for name in schema if schema[name].boxes])
    values: dict[str, Any] = {_IMAGE: record.image}
    for name, kind in optional(source).arrays.items():
        values[f"the {kind} {name!r}"] = record.arrays.get(name)
    contents = {name: _bytes_of(value, settings.max_pixels) for name, value in values.items()}
    found = {name: zlib.crc32(data) for name, data in contents.items() if data is not None}
    for name, value in record.columns.items():
        found[f"the column {name!r}"] = zlib.crc32(np.asarray(value).tobytes())
    return row, found


def _bytes_of(value: Any, max_pixels: int) -> bytes | None:
    """Return the bytes of an image or array, not decoded if it is a file. None if it is missing."""
    try:
        content, _ = read_value(value, max_pixels)
    except DecodeError:
        return None
    return content if isinstance(content, bytes) else content.tobytes()
