"""The names of samples, packed into two arrays."""

import copy
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self, overload

import numpy as np

from memload.errors import FormatError

#: Names that `Keys.pack` copies at a time. This needs 24 bytes of memory for each byte of a name.
_NAMES_COPIED = 1024


class Keys(Sequence[str]):
    """The names of samples, a read-only sequence of str. Each is decoded when it is asked for.

    ``data``, uint8, has the bytes of all names; name ``i`` is ``data[offsets[i]:offsets[i + 1]]``.
    The offsets are checked when the first name is used, after a call of ``verify`` if it is given.
    Using a name raises FormatError if the names are damaged; ``path`` is the index file, which the
    error names.

    >>> keys = Keys.of(["ant/1.jpg", "bee/2.jpg", "cat/3.jpg"])
    >>> keys.take(np.array([2, 0]))[0]
    'cat/3.jpg'
    """

    def __init__(
        self,
        offsets: np.ndarray,
        data: np.ndarray,
        path: Path | None = None,
        verify: Callable[[], None] | None = None,
    ) -> None:
        self._names = _PackedNames(offsets, data, path, verify)
        self._chosen: np.ndarray | None = None

    @classmethod
    def of(cls, names: Sequence[str]) -> Self:
        """Pack names."""
        encoded = [os.fsencode(name) for name in names]
        offsets = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum([len(name) for name in encoded], out=offsets[1:])
        return cls(offsets, np.frombuffer(b"".join(encoded), np.uint8))

    def __len__(self) -> int:
        return len(self._names.offsets) - 1 if self._chosen is None else len(self._chosen)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"key {index} is out of range: there are {len(self)} names")
        self._names.check()
        position = index % len(self)
        number = position if self._chosen is None else int(self._chosen[position])
        start, stop = self._names.offsets[number : number + 2].tolist()
        return os.fsdecode(self._names.data[start:stop].tobytes())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # compares by content, as a list does

    def __repr__(self) -> str:
        shown = ", ".join(repr(name) for name in self[:3])
        count = "1 name" if len(self) == 1 else f"{len(self):,} names"
        return f"Keys([{shown}{', …' if len(self) > 3 else ''}], {count})"

    def take(self, indices: np.ndarray) -> "Keys":
        """Return a view of some names, in the order given. ``indices`` are int64 and in range."""
        view = copy.copy(self)
        view._chosen = indices if self._chosen is None else self._chosen[indices]
        return view

    def pack(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the offsets, int64 ``(n + 1,)``, and the bytes of these names.

        The names of a view are copied. Raises FormatError if they are damaged.
        """
        self._names.check()
        offsets, data, chosen = self._names.offsets, self._names.data, self._chosen
        if chosen is None:
            return offsets, data
        lengths = offsets[1:][chosen]
        lengths -= offsets[:-1][chosen]
        packed_offsets = np.zeros(len(chosen) + 1, np.int64)
        np.cumsum(lengths, out=packed_offsets[1:])
        packed_data = np.empty(packed_offsets[-1], np.uint8)
        for first in range(0, len(chosen), _NAMES_COPIED):
            last = min(first + _NAMES_COPIED, len(chosen))
            start, stop = packed_offsets[first], packed_offsets[last]
            # For each byte of these names, how far its source is from its destination.
            shifts = offsets[chosen[first:last]] - packed_offsets[first:last]
            shifts = np.repeat(shifts, lengths[first:last])
            packed_data[start:stop] = data[shifts + np.arange(start, stop)]
        return packed_offsets, packed_data

    def check(self) -> None:
        """Check the names now instead of at first use. Raises FormatError if they are damaged."""
        self._names.check()


class _PackedNames:
    """The names that a sequence of keys shares with its views, and whether they were checked."""

    def __init__(
        self,
        offsets: np.ndarray,
        data: np.ndarray,
        path: Path | None = None,
        verify: Callable[[], None] | None = None,
    ) -> None:
        self.offsets, self.data = offsets, data
        self._path, self._verify, self._checked = path, verify, False

    def check(self) -> None:
        """Check the names, once. Raises FormatError if they are damaged."""
        if self._checked:
            return
        if self._verify is not None:
            self._verify()
        offsets = self.offsets
        rises = not np.any(offsets[1:] < offsets[:-1])  # np.diff could overflow
        if not rises or offsets[0] != 0 or offsets[-1] != self.data.size:
            where = "key/offsets" if self._path is None else f"{self._path}: key/offsets"
            raise FormatError(
                f"{where} is damaged: the offsets of names do not rise from 0 to {self.data.size}. "
                "Restore the index, or run 'memload build' again.",
                path=self._path,
            )
        self._checked = True
