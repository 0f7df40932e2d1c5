"""Notices a machine that sees another source than the machine that began a build in parts.

A folder that is not mounted on one machine would otherwise only show as pictures that cannot be
read there, and a data set in another order as pictures under the names of others.
"""

import functools
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from memload.building.first_samples import look_at_first
from memload.building.sources.record import Source
from memload.building.worker import runs_user_code
from memload.wording import counted

#: How many samples are looked at.
_SAMPLES = 8


def checksums(source: Source, num_workers: int, timeout: float) -> dict[str, int | None]:
    """Return the CRC-32 of up to eight samples by row, as JSON has it; None if one is unreadable.

    The rows are spread over the source. Pictures and masks are read and not decoded. Code of the
    user's runs in a worker, as long as ``num_workers`` is not 0.
    """
    rows = np.unique(np.linspace(0, len(source) - 1, _SAMPLES).round().astype(int)).tolist()
    look = functools.partial(_checksum, source, rows)
    workers = num_workers if runs_user_code(source) else 0
    found, _ = look_at_first(look, len(rows), workers, timeout, count=len(rows))
    return dict.fromkeys(map(str, rows)) | dict(found)


def difference(
    source: Source, now: Mapping[str, int | None], before: Mapping[str, int | None]
) -> str:
    """Say what differs between the checksums of two machines, if none of them is the same.

    Some pictures may have been mended, changed or removed meanwhile.
    """
    if now.keys() != before.keys():
        return f"it has {len(source):,} samples here, and had another number there"
    if any(now[row] == before[row] for row in now):
        return ""
    row, checksum = next(iter(now.items()))
    what = "cannot be read" if checksum is None else "has other bytes"
    text = (
        f"{counted(len(now), 'sample')} that were looked at differ; {source.keys[int(row)]}, for "
        f"example, {what} here"
    )
    if runs_user_code(source):
        text += ". Pictures that change at random cannot be built in parts"
    return text


def _checksum(source: Source, rows: Sequence[int], position: int) -> tuple[str, int | None]:
    """Return the checksum of a sample's image, masks and other arrays."""
    row, checksum = rows[position], 0
    try:
        record = source[row]
        for content in (record.image, *(record.arrays[name] for name in sorted(record.arrays))):
            checksum = zlib.crc32(_bytes_of(content), checksum)
    except Exception:  # noqa: BLE001  # a source may raise anything, which rejects the sample
        return str(row), None
    return str(row), checksum


def _bytes_of(content: Any) -> Any:
    if isinstance(content, Path):
        return content.read_bytes()
    # a picture of Pillow's, or an array
    return content.tobytes() if hasattr(content, "tobytes") else content
