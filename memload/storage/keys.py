"""The names of samples, packed into two arrays."""

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Self, overload

import numpy as np

from memload.wording import counted


class Keys(Sequence[str]):
    """The names of samples, a read-only sequence of str. Each is decoded when it is asked for.

    ``data``, uint8, has the bytes of all names; name ``i`` is ``data[offsets[i]:offsets[i + 1]]``.
    ``verify`` is called before a name is used. It raises FormatError if the names are damaged.

    >>> keys = Keys.of(["ant/1.jpg", "bee/2.jpg", "cat/3.jpg"])
    >>> keys.take(np.array([2, 0]))[0]
    'cat/3.jpg'
    """

    def __init__(
        self, offsets: np.ndarray, data: np.ndarray, verify: Callable[[], None] | None = None
    ) -> None:
        self._offsets, self._data, self._verify = offsets, data, verify
        self._chosen: np.ndarray | None = None

    @classmethod
    def of(cls, names: Sequence[str]) -> Self:
        """Pack names."""
        text = "".join(names)
        data = os.fsencode(text)
        lengths: Iterator[int] = map(len, names)
        if len(data) != len(text):  # some letters have several bytes
            lengths = (len(os.fsencode(name)) for name in names)
        offsets = np.zeros(len(names) + 1, np.int64)
        np.cumsum(np.fromiter(lengths, np.int64, len(names)), out=offsets[1:])
        return cls(offsets, np.frombuffer(data, np.uint8))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the names themselves, not the file that they are mapped from."""
        return type(self), self.pack()

    def __len__(self) -> int:
        return len(self._offsets) - 1 if self._chosen is None else len(self._chosen)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"key {index} is out of range: there are {len(self)} names")
        self.check()
        position = index % len(self)
        number = position if self._chosen is None else int(self._chosen[position])
        start, stop = self._offsets[number : number + 2].tolist()
        return os.fsdecode(self._data[start:stop].tobytes())

    def __iter__(self) -> Iterator[str]:
        offsets, data = self.pack()  # six times as fast as one name after another
        ends, names = offsets.tolist(), data.tobytes()
        return (os.fsdecode(names[start:end]) for start, end in pairwise(ends))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # compares by content, as a list does

    def __repr__(self) -> str:
        shown = ", ".join(repr(name) for name in self[:3])
        count = counted(len(self), "name")
        return f"Keys([{shown}{', …' if len(self) > 3 else ''}], {count})"

    def take(self, indices: np.ndarray) -> "Keys":
        """Return a view of some names, in the order given. ``indices`` are int64 and in range."""
        view = type(self)(self._offsets, self._data, self._verify)
        view._chosen = indices if self._chosen is None else self._chosen[indices]
        return view

    def pack(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the offsets, int64 ``(n + 1,)``, and the bytes of these names.

        The names of a view are copied. Raises FormatError if they are damaged.
        """
        self.check()
        if self._chosen is None:
            return self._offsets, self._data
        starts, stops = self._offsets[:-1][self._chosen], self._offsets[1:][self._chosen]
        offsets = np.zeros(len(self) + 1, np.int64)
        np.cumsum(stops - starts, out=offsets[1:])
        # Most views leave out few names, so that many follow each other.
        is_first = np.ones(len(self), bool)
        is_first[1:] = starts[1:] != stops[:-1]
        is_last = np.append(is_first[1:], True)[: len(self)]
        names, packed = self._data.data, bytearray()
        for start, stop in zip(starts[is_first], stops[is_last], strict=True):
            packed += names[start:stop]
        return offsets, np.frombuffer(packed, np.uint8)

    def check(self) -> None:
        """Check the names now instead of at first use. Raises FormatError if they are damaged."""
        if self._verify is not None:
            self._verify()
