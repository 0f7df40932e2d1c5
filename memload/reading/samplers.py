"""In what order samples are visited: a pure function of (seed, epoch), of which each rank takes its part.

An order answers for any stretch of an epoch at once (`take`), without what came before it: resuming costs
nothing, and an epoch of 10⁹ samples takes no memory. Orders hold no state; the same arguments give the same
numbers on every machine and with every version of NumPy, since what is random about them is hashed here.
"""

import functools
import hashlib
import zlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

#: Positions worked on at a time: the few arrays of them stay in a core's cache (16 ns a position, 19 with half and 20
#: with twice as many). Sharing them out among threads was slower: 48 against 26 ns on 16 cores.
_CHUNK = 1 << 15
#: With 6 rounds over at least 2¹⁰ values all permutations of 2 to 5 samples come up equally often, within chance.
_ROUNDS, _LEAST_BITS = 6, 10


class Order(Protocol):
    """An order of visits: ``len()`` positions an epoch, each of which holds the number of a sample."""

    def __len__(self) -> int: ...

    def take(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Return the samples at positions ``start`` to ``stop`` of an epoch, int64 ``(stop - start,)``."""


class _Sized:
    """What the orders here have in common: a size, and a text that tells them apart."""

    def __init__(self, size: int) -> None:
        if not isinstance(size, int | np.integer) or size < 0:
            advice = ". Write len(dataset)" if hasattr(size, "__len__") else ""
            raise ValueError(
                f"{type(self).__name__}: size: expected an integer of at least 0, found {size!r}{advice}"
            )
        self.size = int(size)

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        facts = ", ".join(
            f"{name}={value!r}" for name, value in vars(self).items() if not name.startswith("_")
        )
        return f"{type(self).__name__}({facts})"


class SequentialSampler(_Sized):
    """0, 1, 2, … in every epoch."""

    def take(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """See `Order.take`."""
        return np.arange(start, stop, dtype=np.int64)


class ShuffledSampler(_Sized):
    """Every sample once an epoch, in another order each epoch.

    The permutation is a Feistel network over the smallest power of two that holds ``size``, keyed by a hash of
    (seed, epoch) and walked on where it leaves the range (Black and Rogaway, "Ciphers with Arbitrary Finite
    Domains", 2002). It is computed where it is asked for, and never stored. Of the ``size!`` orders it reaches
    as many as there are keys, like every seeded shuffle.
    """

    def __init__(self, size: int, *, seed: int = 0) -> None:
        super().__init__(size)
        self.seed = seed

    def take(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """See `Order.take`."""
        return _permute(np.arange(start, stop, dtype=np.int64), self.size, _key(self.seed, epoch))


class BlockShuffledSampler(_Sized):
    """Every sample once an epoch, shuffled so that a slow disk reads long stretches.

    The data set is cut into blocks of ``block`` consecutive samples, whose order is shuffled; then samples are
    shuffled within windows of ``window`` blocks of that order. So ``block × window`` samples at a time come from
    ``window`` places on the disk.

    How far that is from uniform: two samples of one block, neighbours in the data set, are never further apart
    than a window in any epoch, and a batch is drawn from ``window`` blocks, not from all. Where neighbours are
    alike (one class a folder), have a window of many times as many blocks as there are samples in a batch; or
    use `ShuffledSampler`, which is what every disk that is an SSD wants.
    """

    def __init__(self, size: int, *, block: int = 64, window: int = 256, seed: int = 0) -> None:
        if block < 1 or window < 1:
            raise ValueError(f"block and window: expected 1 or more, found {block} and {window}")
        super().__init__(size)
        self.block, self.window, self.seed = block, window, seed

    def take(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """See `Order.take`. Computes whole windows."""
        if start >= stop:
            return np.empty(0, np.int64)
        full = self.size // self.block
        span = self.block * self.window
        parts = []
        # The samples that fill no block stay at the end of the epoch, in the last window.
        for window in range(start // span, -(-stop // span)):
            first = window * span
            positions = np.arange(first, min(first + span, self.size), dtype=np.int64)
            shuffled = first + _permute(
                positions - first, len(positions), _key(self.seed, epoch, window)
            )
            blocks = shuffled // self.block
            inside = blocks < full
            blocks[inside] = _permute(blocks[inside], full, _key(self.seed, epoch))
            parts.append(blocks * self.block + shuffled % self.block)
        offset = start // span * span
        return np.concatenate(parts)[start - offset : stop - offset]


class WeightedSampler(_Sized):
    """Samples drawn with replacement, each as often as its weight says; ``size`` draws an epoch.

    ``weights`` ``(n,)`` are at least 0 and need not sum to one. Takes 8 bytes a sample.
    """

    def __init__(
        self, weights: Sequence[float] | np.ndarray, *, size: int | None = None, seed: int = 0
    ) -> None:
        _refuse_data_set(
            "weights: expected numbers (n,)",
            weights,
            "WeightedSampler(class_weights[dataset.labels])",
        )
        values = np.asarray(weights, np.float64)
        if (
            values.ndim != 1
            or not values.size
            or not np.isfinite(values).all()
            or (values < 0).any()
        ):
            raise ValueError(
                f"weights: expected numbers (n,) of at least 0, found an array {values.shape}"
            )
        self._cumulative = np.cumsum(values)
        if self._cumulative[-1] <= 0:
            raise ValueError("weights: expected at least one above 0, found none")
        self._last = int(
            np.flatnonzero(values)[-1]
        )  # rounding must not lead to a weight of 0 behind it
        super().__init__(len(values) if size is None else size)
        self.seed = seed
        self.weights_crc32 = zlib.crc32(values.tobytes())  # for the text

    def take(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """See `Order.take`."""
        drawn = (
            _uniform(np.arange(start, stop, dtype=np.int64), _key(self.seed, epoch))
            * self._cumulative[-1]
        )
        found: np.ndarray = np.searchsorted(self._cumulative, drawn, side="right")
        return np.asarray(np.minimum(found, self._last))


class ClassBalancedSampler(WeightedSampler):
    """Every class that has samples equally often, drawn with replacement; ``labels`` are int64 ``(n,)``."""

    def __init__(self, labels: Any, *, size: int | None = None, seed: int = 0) -> None:
        _refuse_data_set(
            "labels: expected integers (n,)", labels, "ClassBalancedSampler(dataset.labels)"
        )
        values = np.asarray(labels)
        if values.ndim != 1 or values.dtype.kind not in "iu" or not values.size or values.min() < 0:
            raise ValueError(
                f"labels: expected integers (n,) of at least 0, found {values.dtype} {values.shape}"
            )
        counts = np.bincount(values)
        super().__init__(1.0 / counts[values], size=size, seed=seed)


def _refuse_data_set(expected: str, values: Any, advice: str) -> None:
    if hasattr(values, "labels"):  # an array of it would be one of all its pixels
        raise TypeError(f"{expected}, one a sample, found {type(values).__name__}. Write {advice}")


def _key(*parts: int) -> np.ndarray:
    """Return 8 words of 64 bits that belong to these numbers and no others."""
    digest = hashlib.blake2b(" ".join(map(str, ("memload", *map(int, parts)))).encode()).digest()
    return np.frombuffer(digest, "<u8")


def _permute(positions: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    """Return where a permutation of 0 … size − 1 takes these positions, int64, in their own memory if it can."""
    bits = max(_LEAST_BITS, int(size - 1).bit_length())
    tables = _tables(bits, key.tobytes())
    if size <= 1 << (
        _LEAST_BITS - 1
    ):  # walking would take up to a thousand turns; those of all values in range do
        values = _feistel(np.arange(1 << bits, dtype=np.int64), bits, tables)
        return np.asarray(values[values < size][positions])
    for start in range(0, len(positions), _CHUNK):
        values = _feistel(positions[start : start + _CHUNK], bits, tables)
        outside = np.flatnonzero(values >= size)
        while (
            outside.size
        ):  # fewer than half of them a turn, as the range is more than half of the power of two
            walked = _feistel(values[outside], bits, tables)
            values[outside] = walked
            outside = outside[walked >= size]
        positions[start : start + _CHUNK] = values
    return positions


def _feistel(values: np.ndarray, bits: int, tables: Sequence[np.ndarray]) -> np.ndarray:
    low = bits // 2
    left, right = values >> low, values & ((1 << low) - 1)
    looked_up = np.empty_like(values)
    for turn, table in enumerate(tables):
        source, target = (right, left) if turn % 2 == 0 else (left, right)
        np.take(table, source, out=looked_up, mode="clip")  # the other modes copy once more
        np.bitwise_xor(target, looked_up, out=target)
    np.left_shift(left, low, out=left)
    np.bitwise_or(left, right, out=left)
    return left


@functools.lru_cache(maxsize=4)
def _tables(bits: int, key: bytes) -> tuple[np.ndarray, ...]:
    """Return a random function for every round, as the values that it takes: 2¹⁵ of them for 10⁹ samples."""
    low = bits // 2
    words = np.frombuffer(key, "<u8")
    tables = []
    for turn in range(_ROUNDS):
        known, kept = (low, bits - low) if turn % 2 == 0 else (bits - low, low)
        values = _mixed(
            np.arange(1 << known, dtype=np.uint64), words[[turn, (turn + 1) % 8, (turn + 2) % 8]]
        )
        tables.append((values >> np.uint64(64 - kept)).astype(np.int64))
    return tuple(tables)


def _mixed(values: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Return 64 random bits for every value and key of three words, by odd multipliers of xxHash."""
    for word in words:
        values = (values + word) * np.uint64(0x9E3779B185EBCA87)
        values ^= values >> np.uint64(29)
        values *= np.uint64(0xC2B2AE3D27D4EB4F)
        values ^= values >> np.uint64(32)
    return values


def _uniform(positions: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Return a number from 0 to 1, exclusively, for every position, float64 of 53 random bits."""
    values = _mixed(positions.astype(np.uint64), np.frombuffer(key.tobytes(), "<u8")[:3])
    return np.asarray((values >> np.uint64(11)).astype(np.float64) * 2.0**-53)
