"""The names of samples, packed into two arrays."""

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Self, overload

import numpy as np

from memload.wording import counted, listed


class Keys(Sequence[str]):
    """The names of samples, a read-only sequence of str. Each is decoded when it is asked for.

    ``data``, uint8, has the bytes of all names; name ``i`` is ``data[offsets[i]:offsets[i + 1]]``.

    >>> keys = Keys.of(["ant/1.jpg", "bee/2.jpg", "cat/3.jpg"])
    >>> keys.take(np.array([2, 0]))[0]
    'cat/3.jpg'
    """

    def __init__(self, offsets: np.ndarray, data: np.ndarray) -> None:
        self._load: Callable[[], tuple[np.ndarray, np.ndarray]] = lambda: (offsets, data)
        #: Which of the loaded names these are.
        self._chosen: range | np.ndarray = range(len(offsets) - 1)

    @classmethod
    def of(cls, names: Sequence[str]) -> Self:
        """Pack names."""
        offsets, data = np.zeros(len(names) + 1, np.int64), bytearray()
        for number, name in enumerate(names, 1):
            data += os.fsencode(name)
            offsets[number] = len(data)
        return cls(offsets, np.frombuffer(data, np.uint8))

    @classmethod
    def loaded_by(cls, load: Callable[[], tuple[np.ndarray, np.ndarray]], size: int) -> Self:
        """Return ``size`` names whose offsets and data ``load`` returns.

        It is called each time that names are used.
        """
        keys = cls.__new__(cls)
        keys._load, keys._chosen = load, range(size)
        return keys

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the names themselves, not how to load them."""
        return type(self), self.pack()

    def __len__(self) -> int:
        return len(self._chosen)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        position = range(len(self))[index]
        if isinstance(position, range):
            return [self[each] for each in position]
        number = self._chosen[position]
        offsets, data = self._load()
        return os.fsdecode(data[offsets[number] : offsets[number + 1]].tobytes())

    def __iter__(self) -> Iterator[str]:
        offsets, data = self.pack()  # six times as fast as one name after another
        names = data.tobytes()
        return (os.fsdecode(names[start:stop]) for start, stop in pairwise(offsets.tolist()))

    def __repr__(self) -> str:
        return f"Keys({counted(len(self), 'name')}: {listed(self[:4], 3)})"

    def take(self, indices: np.ndarray) -> "Keys":
        """Return a view of some names, in the order given. ``indices`` are int64 and in range."""
        view = self.loaded_by(self._load, 0)
        view._chosen = indices if isinstance(self._chosen, range) else self._chosen[indices]
        return view

    def pack(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the offsets, int64 ``(n + 1,)``, and the bytes of these names, uint8.

        The names of a view are copied. Raises FormatError if they are damaged.
        """
        offsets, data = self._load()
        if isinstance(self._chosen, range):
            return offsets, data
        starts, stops = offsets[self._chosen], offsets[self._chosen + 1]
        names, packed = data.data, bytearray()
        for start, stop in zip(starts, stops, strict=True):
            packed += names[start:stop]
        return np.append(0, np.cumsum(stops - starts)), np.frombuffer(packed, np.uint8)
