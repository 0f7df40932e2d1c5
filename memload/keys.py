"""The names of samples, packed."""

import os
from collections.abc import Sequence
from typing import Self, overload

import numpy as np

from memload.errors import FormatError


class Keys(Sequence[str]):
    """The names of the samples: text on demand over two mapped arrays, so that opening costs nothing."""

    def __init__(self, offsets: np.ndarray, data: np.ndarray) -> None:
        self.offsets, self.data = offsets, data

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
            raise FormatError(
                f"key/offsets: expected 0 <= start <= stop <= {self.data.size}, found {start} and {stop} "
                f"for sample {index}: the index is damaged. Build it again"
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
        return Keys(offsets, self.data[places])

    def check(self) -> None:
        """Raise FormatError unless every name lies within the bytes, which `__getitem__` checks one by one."""
        steps_back = np.flatnonzero(self.offsets[1:] < self.offsets[:-1])  # a difference could overflow
        if steps_back.size or self.offsets[0] != 0 or self.offsets[-1] != self.data.size:
            position = int(steps_back[0]) if steps_back.size else len(self)
            raise FormatError(
                f"key/offsets: expected numbers that rise from 0 to {self.data.size}, found "
                f"{self.offsets[position]} at {position}: the index is damaged. Build it again"
            )
