"""The names of samples, packed."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Self, overload

import numpy as np

from memload.errors import FormatError


class Keys(Sequence[str]):
    """The names of the samples: text on demand over two mapped arrays, so that opening costs nothing.

    ``path`` is the index that they are of, which errors name.
    """

    def __init__(self, offsets: np.ndarray, data: np.ndarray, path: Path | None = None) -> None:
        self.offsets, self.data, self.path = offsets, data, path

    @classmethod
    def of(cls, names: Sequence[str]) -> Self:
        """Pack names."""
        encoded = [os.fsencode(name) for name in names]
        offsets = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum([len(name) for name in encoded], out=offsets[1:])
        return cls(offsets, np.frombuffer(b"".join(encoded), np.uint8))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"key: expected -{len(self)} <= index < {len(self)}, found {index}")
        index = index % len(self)
        start, stop = int(self.offsets[index]), int(self.offsets[index + 1])
        if not 0 <= start <= stop <= self.data.size:
            raise self._damaged(
                f"0 <= start <= stop <= {self.data.size}, found {start} and {stop} for sample {index}"
            )
        return os.fsdecode(self.data[start:stop].tobytes())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # compares by content, as a list does

    def __repr__(self) -> str:
        shown = ", ".join(repr(name) for name in self[:3])
        return f"Keys([{shown}{', …' if len(self) > 3 else ''}], {len(self)} names)"

    def take(self, indices: np.ndarray) -> "Keys":
        """Return the keys of some samples, in their order. Raises FormatError where the offsets are damaged."""
        self.check()
        starts, lengths = self.offsets[:-1][indices], np.diff(self.offsets)[indices]
        offsets = np.zeros(len(indices) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        # every byte's place: where its name starts, less where that comes to lie, and then one by one
        places = np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])
        return Keys(offsets, self.data[places], self.path)

    def check(self) -> None:
        """Raise FormatError unless every name lies within the bytes, which `__getitem__` checks one by one."""
        steps_back = np.flatnonzero(
            self.offsets[1:] < self.offsets[:-1]
        )  # a difference could overflow
        if steps_back.size or self.offsets[0] != 0 or self.offsets[-1] != self.data.size:
            position = int(steps_back[0]) if steps_back.size else len(self)
            raise self._damaged(
                f"numbers that rise from 0 to {self.data.size}, found {self.offsets[position]} at {position}"
            )

    def _damaged(self, told: str) -> FormatError:
        place = "" if self.path is None else f"{self.path}: "
        return FormatError(
            f"{place}key/offsets: expected {told}: the index is damaged. Restore it, or build again",
            path=self.path,
        )
