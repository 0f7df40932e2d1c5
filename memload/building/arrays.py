"""One record's array to the bytes of its row: stored as it is, nothing is decoded, resized or rounded."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from memload.building.conversion import Row, outside
from memload.building.sources import Column, Record, Source
from memload.errors import DecodeError, SourceError
from memload.storage.format import DESCRS, FLAG_OUTSIDE

_TYPES = ", ".join(np.dtype(descr).name for descr in DESCRS)

#: So many records are looked at for one that can be used, as a data set's first samples may be broken.
_FIRST = 100


@dataclass(frozen=True)
class ArraySettings:
    """What every array of a build is: its shape (H, W, C) and its element type, one of the format's."""

    shape: tuple[int, int, int]
    descr: str

    @classmethod
    def of(cls, source: Source) -> "ArraySettings":
        """Take over shape and type of the first record that can be used. Raises SourceError where there is none."""
        reasons = []
        for index in range(min(_FIRST, len(source))):
            try:
                pixels = as_stored(source[index].image)
            except DecodeError as error:
                reasons.append(error.reason or "no reason was given")
            except Exception as error:  # noqa: BLE001  # a data set of the user's may raise anything
                reasons.append(f"{type(error).__name__}: {error}")
            else:
                height, width, channels = pixels.shape
                return cls((height, width, channels), pixels.dtype.str)
        told = "; ".join(f"{reason:.300}" for reason in [*dict.fromkeys(reasons)][:3])
        raise SourceError(
            f"mode 'array': expected samples that are arrays, found none in the first {len(reasons)}: {told}"
        )

    def __str__(self) -> str:
        return f"{self.shape} of {np.dtype(self.descr).name}"

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as JSON has them."""
        height, width, channels = self.shape
        dtype = np.dtype(self.descr).name
        return {"mode": "array", "size": [height, width], "channels": channels, "dtype": dtype}

    def libraries(self) -> dict[str, str]:
        """Return name and version of the library that takes part."""
        return {"numpy": np.__version__}

    def converter(self, schema: Mapping[str, Column]) -> "ArrayConverter":
        """Return what turns records into rows."""
        return ArrayConverter(self, schema)


class ArrayConverter:
    """Turns records into rows, as `memload.building.conversion.Converter` does, but only those that hold arrays."""

    def __init__(self, settings: ArraySettings, schema: Mapping[str, Column]) -> None:
        self.settings = settings
        self._points = [name for name, column in schema.items() if column.points]

    def __call__(self, record: Record) -> Row:
        """Return the row of a record. Raises DecodeError."""
        pixels = as_stored(record.image)
        height, width, channels = pixels.shape
        found = ArraySettings((height, width, channels), pixels.dtype.str)
        if found != self.settings:
            raise DecodeError(f"array: expected {self.settings} as in the first, found {found}")
        outsiders = [
            name
            for name in self._points
            if outside(np.asarray(record.columns[name]), (height, width))
        ]
        total, squares = _sums(pixels.reshape(-1, channels))
        flags = FLAG_OUTSIDE * bool(outsiders)
        return Row(pixels.tobytes(), flags, (width, height), total, squares, record.columns)


def as_stored(image: Any) -> np.ndarray:
    """Return an array as a shard holds it: ``(H, W, C)``, contiguous, little-endian. Raises DecodeError."""
    if not isinstance(image, np.ndarray):
        raise DecodeError(
            f"array: expected a NumPy array or a tensor, found {_kind(image)}: mode 'array' decodes nothing"
        )
    if np.ma.is_masked(image):
        raise DecodeError(
            "array: expected values, found some that are masked, which nothing here can keep. Fill them"
        )
    descr = image.dtype.newbyteorder("<").str
    if descr not in DESCRS or image.ndim not in (2, 3) or not image.size:
        raise DecodeError(
            f"array: expected (H, W) or (H, W, C) of one of {_TYPES}, found {image.shape} of {image.dtype.name}. "
            "Convert it"
        )
    return np.ascontiguousarray(image, descr).reshape(*image.shape[:2], -1)


def _kind(image: Any) -> str:
    return f"{type(image).__module__}.{type(image).__qualname__}".removeprefix("builtins.")


def _sums(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return what the journal keeps of pixels ``(H × W, C)``, see `memload.building.journal.record_type`."""
    if values.dtype.kind == "u":
        whole = values.astype(np.uint64)
        return whole.sum(axis=0), (whole * whole).sum(axis=0)
    with np.errstate(
        all="ignore"
    ):  # of NaN and infinities, which may be there, and make sums like themselves
        exact = values.astype(np.float64)
        total = exact.sum(axis=0)
        return total, np.square(exact - total / len(exact)).sum(axis=0)
