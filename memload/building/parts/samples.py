"""Notices a machine that sees another source than the machine that began a build in parts.

A folder that is not mounted on one machine would otherwise only show as pictures that cannot be
read there.
"""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from memload.building.sources.record import Source
from memload.wording import counted

#: So many samples are looked at.
_SAMPLES = 8


def checksums(source: Source) -> dict[str, int | None]:
    """Return the CRC-32 of up to eight samples by row, as JSON has it; None if one is unreadable.

    The rows are spread over the source. Pictures are read and not decoded.
    """
    rows = np.unique(np.linspace(0, len(source) - 1, _SAMPLES).round().astype(int)).tolist()
    return {str(row): _checksum(source, row) for row in rows}


def difference(source: Source, before: Mapping[str, int | None]) -> str:
    """Say what differs from the checksums of another machine, if none of them is the same.

    Some pictures may have been mended, changed or removed meanwhile.
    """
    now = checksums(source)
    if now.keys() != before.keys():
        return f"it has {len(source):,} samples here, and had another number there"
    if any(now[row] == before[row] for row in now):
        return ""
    first = next(iter(now))
    what = "cannot be read" if now[first] is None else "has other bytes"
    return (
        f"{counted(len(now), 'sample')} that were looked at differ; {source.keys[int(first)]}, for "
        f"example, {what} here"
    )


def _checksum(source: Source, row: int) -> int | None:
    try:
        image: Any = source[row].image
        if isinstance(image, Path):
            image = image.read_bytes()
        elif hasattr(image, "tobytes"):  # a picture of Pillow's, or an array
            image = image.tobytes()
        return zlib.crc32(image)
    except Exception:  # noqa: BLE001  # a source may raise anything, which rejects the sample
        return None
