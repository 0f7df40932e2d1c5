"""Where the pixels of an output come from, one axis at a time."""

import copy
import functools

import numpy as np


class Axis:
    """Height or width of a batch: a box of the source, resized, of that a window, flipped; for each sample its own.

    Everything is counted in pixels, in the source's direction: ``start`` and ``length`` of the box ``(N,)``, the
    extent it is ``resized`` to or None, and where in that the window lies, ``shift`` ``(N,)``. The steps take
    places as they come out of the steps before them. ``extent`` is what has come out so far, ``inside`` whether it is
    all of the source, and nothing of it a margin, ``whole`` whether there was neither crop nor resize.
    """

    def __init__(self, source: int, count: int) -> None:
        self.source = self.extent = source
        self.start, self.shift = np.zeros((2, count), np.int64)
        self.length = np.full(count, source)
        self.flipped = np.zeros(count, bool)
        self.resized: int | None = None
        self.inside = self.whole = True

    def part(self, which: slice) -> "Axis":
        """Return the same for some of the samples, without a copy."""
        part = copy.copy(self)
        part.start, part.length = self.start[which], self.length[which]
        part.shift, part.flipped = self.shift[which], self.flipped[which]
        return part

    def crop(self, start: np.ndarray | int, length: int) -> None:
        """Take the window of this length that begins at ``start``, which may lie outside."""
        self.whole = False
        self.inside &= bool(np.all((start >= 0) & (start <= self.extent - length)))
        self._move(start, length)
        self.extent = length
        if self.resized is None:
            self.length = np.full_like(self.length, length)

    def resize(
        self, extent: int, start: np.ndarray | int = 0, length: np.ndarray | None = None
    ) -> None:
        """Resize the box from ``start``, inside and by default all, to ``extent`` pixels. Possible once."""
        self.whole = False
        if length is not None:
            self._move(start, length)
            self.length = length
        self.extent = self.resized = extent

    def flip(self, which: np.ndarray) -> None:
        """Turn the samples round where bool ``(N,)`` says so."""
        self.flipped = self.flipped ^ which

    def _move(self, start: np.ndarray | int, length: np.ndarray | int) -> None:
        start = np.where(self.flipped, self.extent - length - start, start)
        if self.resized is None:
            self.start = self.start + start
        else:
            self.shift = self.shift + start

    def line(self) -> tuple[np.ndarray, np.ndarray]:
        """Return factor and offset, float64 ``(N,)``, that take a coordinate of the source to one of the output.

        Coordinates are of pixels whose centres are the integers.
        """
        factor = (self.extent if self.resized is None else self.resized) / self.length
        offset = (0.5 - self.start) * factor - 0.5 - self.shift
        turned = np.where(self.flipped, -1.0, 1.0)
        return turned * factor, np.where(self.flipped, self.extent - 1 - offset, offset)


def precision(axis: Axis, antialias: bool) -> np.ndarray:
    """Return with how many bits behind the binary point weights are kept, int64 ``(N,)``.

    For uint8, torch's `interpolate` rounds the weights of an axis to 16 bits, with as many of them behind the point
    as the largest weight allows (``compute_index_ranges_int16_weights`` in ATen's UpSampleKernel.cpp).
    """
    if axis.resized is None:
        return np.zeros_like(axis.length)
    known, longest = _known(axis.resized, antialias), int(axis.length.max(initial=1))
    table = known[0]
    if longest >= len(table):
        table = known[0] = np.concatenate([table, np.full(longest + 1 - len(table), -1)])
    bits = table[axis.length]
    if (bits < 0).any():  # 46 µs for each length that is new, and none later
        for length in np.unique(axis.length[bits < 0]).tolist():
            table[length] = precision_of(length, axis.resized, antialias)
    return np.asarray(table[axis.length])


@functools.lru_cache(maxsize=64)
def _known(resized: int, antialias: bool) -> list[np.ndarray]:
    """Return a list of one array, with what is known of each length, or -1; that of none is 0."""
    return [np.zeros(1, np.int64)]


def precision_of(length: int, resized: int, antialias: bool) -> int:
    """Return what `precision` does, for boxes of one length."""
    largest = weights(length, resized, antialias).max()
    return next(
        bit for bit in range(23) if bit == 22 or int(0.5 + largest * (1 << bit + 1)) >= 1 << 15
    )


def weights(length: int, resized: int, antialias: bool) -> np.ndarray:
    """Return what the pixels of a box count for in those it is resized to, float64 ``(resized, taps)``.

    The triangle filter of Pillow and of torch, as wide as two pixels of the source, or with ``antialias`` of the
    output where those are larger. Distances are counted in units of 1/(2·resized) of a pixel: so they are integers.
    """
    half = 2 * max(length, resized) if antialias else 2 * resized
    centre = (2 * np.arange(resized) + 1)[:, np.newaxis] * length
    first = np.maximum(
        (centre - half + resized) // (2 * resized), 0
    )  # the weight of the one before it is 0
    pixels = first + np.arange(-(-half // resized) + 1)
    values = np.maximum(half - np.abs((2 * pixels + 1) * resized - centre), 0) * (pixels < length)
    whole: np.ndarray = values / values.sum(1, keepdims=True)
    return whole
