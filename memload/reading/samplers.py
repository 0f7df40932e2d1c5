"""Orders: in what order the samples of an epoch are visited, as a pure function of (seed, epoch).

An order is random access: `Order.take` returns the samples at any positions of any epoch without
going through what comes before them. So resuming costs nothing, each rank asks for its own
positions only, and an epoch of 10⁹ samples takes no memory. Orders hold no state. The same
arguments give the same numbers on every machine and with every version of NumPy, because all random
bits are hashed in this module.
"""

import contextlib
import functools
import hashlib
import operator
import zlib
from collections.abc import Sequence
from typing import Any, Protocol, Self

import numpy as np

#: With 6 rounds over at least 2¹⁰ values, all permutations of 2 to 5 samples are equally frequent.
_ROUNDS = 6
_MIN_BITS = 10
#: A `RepeatedSampler` visits a sample again after so many positions. This is prime, so that visits
#: meet only if it divides the number of ranks, or the size of a batch less one.
_BETWEEN_VISITS = 17
#: A pattern of `MixtureSampler` has at most so many samples, and is exact if shares differ from
#: whole numbers by less than this.
_MAX_PATTERN, _EXACT = 10_000, 1e-6


class Order(Protocol):
    """An order of visits: ``len()`` positions an epoch, each of which holds the number of a sample.

    Write your own by defining these two methods; the Loader takes it as ``sampler``:

        class Reversed:
            def __init__(self, size):
                self.size = size

            def __len__(self):
                return self.size

            def take(self, epoch, positions):
                return self.size - 1 - positions

    An order may also have three attributes. An order of your own that lacks one has False there:

    - ``even_ranks``: whether every rank gets the same number of samples, as training needs. If the
      epoch does not divide evenly, up to ``num_replicas - 1`` samples then come twice. Otherwise
      the ranks together visit each position exactly once, as an evaluation needs. The orders of
      memload that shuffle or draw set it; `SequentialSampler` does not.
    - ``repeats``: whether a sample may come more than once an epoch. Random transforms are then
      drawn for the position in the epoch instead of for the sample, so that no two visits look the
      same.
    - ``strides_ranks``: whether neighbours in the order go to different ranks. In each step, rank r
      of R then takes positions r, r + R, r + 2·R, … Otherwise it takes consecutive ones.
    """

    def __len__(self) -> int: ...

    def take(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Return the samples at these positions of an epoch; both are int64 ``(n,)``.

        Positions are at least 0, less than ``len()``, and in any order. The array is the caller's:
        return new memory.
        """


class _SizedOrder:
    """What the orders here share: a size, and a `repr` that identifies them for resuming.

    All but `SequentialSampler` shuffle or draw, so ``even_ranks`` is True here, unlike in an order
    without the attribute. An order in this module that does neither sets it to False.
    """

    even_ranks = True
    repeats: int = False
    strides_ranks = False

    def __init__(self, size: int) -> None:
        self.size = check_integer(f"{type(self).__name__}: size", size, 0)

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        arguments = ", ".join(
            f"{name}={value!r}" for name, value in vars(self).items() if not name.startswith("_")
        )
        return f"{type(self).__name__}({arguments})"


class SequentialSampler(_SizedOrder):
    """0, 1, 2, … up to ``size - 1`` in every epoch.

    Ranks share an epoch so that each sample comes exactly once. Raises ValueError for a wrong size.

    >>> SequentialSampler(5).take(epoch=0, positions=np.array([0, 1, 4]))
    array([0, 1, 4])
    """

    even_ranks = False

    def take(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """See `Order.take`."""
        return np.array(positions, np.int64)


class ShuffledSampler(_SizedOrder):
    """Every sample once an epoch, in a different order each epoch.

    Args:
        size: How many samples the data set has.
        seed: An integer. Another one gives other orders.

    The permutation is a Feistel network over the smallest power of two that holds ``size``, keyed
    by a hash of (seed, epoch); values outside of the range are permuted again until they are inside
    (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). It is computed on demand and
    never stored. Like every seeded shuffle it reaches as many of the ``size!`` orders as there are
    keys. Raises ValueError for wrong arguments.

    >>> ShuffledSampler(5, seed=1).take(epoch=0, positions=np.arange(5))
    array([1, 2, 3, 4, 0])
    """

    def __init__(self, size: int, *, seed: int = 0) -> None:
        super().__init__(size)
        self.seed = check_integer("ShuffledSampler: seed", seed)

    def take(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """See `Order.take`."""
        return _permute(positions, self.size, _key(self.seed, epoch))


class WeightedSampler(_SizedOrder):
    """Samples drawn with replacement, in proportion to their weights.

    Args:
        weights: A number for each sample, ``(n,)``: finite, at least 0, and not all 0. They need
            not sum to one.
        size: How many samples an epoch draws; by default ``n``.
        seed: An integer. Another one gives other draws.

    Takes 8 bytes per sample. Raises ValueError for other weights.

    >>> WeightedSampler([1, 0, 3], size=6).take(epoch=0, positions=np.arange(6))
    array([2, 2, 2, 0, 0, 0])
    """

    repeats = True

    def __init__(
        self, weights: Sequence[float] | np.ndarray, *, size: int | None = None, seed: int = 0
    ) -> None:
        values = np.asarray(weights, np.float64)
        valid = values.ndim == 1 and values.size and np.isfinite(values.sum())
        if not valid or (values < 0).any() or not values.any():
            raise ValueError(
                "weights must be finite numbers (n,) of at least 0, and not all 0. They are an "
                f"array of shape {values.shape} with other values."
            )
        self._cumulative = np.cumsum(values)
        # Rounding could draw a sample behind the last one whose weight is above 0.
        self._last = int(np.flatnonzero(values)[-1])
        super().__init__(len(values) if size is None else size)
        self.seed = check_integer("WeightedSampler: seed", seed)
        self.weights_crc32 = zlib.crc32(values.tobytes())  # for the repr

    @classmethod
    def balanced(cls, labels: Any, *, size: int | None = None, seed: int = 0) -> Self:
        """Return an order that draws each class equally often, whatever its size.

        Args:
            labels: The class of each sample, integers ``(n,)`` of at least 0: an array, a tensor
                such as ``dataset.labels``, or a list.
            size: How many samples an epoch draws; by default ``n``.
            seed: An integer. Another one gives other draws.

        Raises ValueError for other labels.

        >>> WeightedSampler.balanced([0, 0, 0, 1]).take(epoch=0, positions=np.arange(6))
        array([3, 3, 3, 1, 0, 1])
        """
        values = np.asarray(labels)
        if values.ndim != 1 or values.dtype.kind not in "iu" or not values.size or values.min() < 0:
            raise ValueError(
                "labels must be integers (n,) of at least 0, not "
                f"{values.dtype} of shape {values.shape}."
            )
        return cls(1.0 / np.bincount(values)[values], size=size, seed=seed)

    def take(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """See `Order.take`."""
        draws = _uniform(np.asarray(positions, np.int64), _key(self.seed, epoch))
        samples = np.searchsorted(self._cumulative, draws * self._cumulative[-1], side="right")
        return np.asarray(np.minimum(samples, self._last))


class RepeatedSampler(_SizedOrder):
    """Some samples of each epoch, several times each: repeated augmentation.

    Args:
        size: How many samples the data set has. An epoch has as many positions. It visits the first
            ``size / repeats`` samples of the order of a `ShuffledSampler` with the same seed.
        repeats: How often each of them is visited. Every visit gets its own random transform.
        seed: An integer. Another one gives other orders.

    The visits of a sample are 17 positions apart, and ranks take positions in turn. So they are on
    different ranks if there are at least ``repeats`` ranks, and not a multiple of 17. `MixUp` and
    `CutMix` never mix a picture with itself, unless the number of ranks is a multiple of 17, or a
    batch has 1, 18, 35, 52, … samples; ``drop_last=True`` leaves out a last batch of such a size.

    At the end of an epoch, up to 17 samples may have fewer visits. With less than ``17 · repeats``
    samples, visits are closer together, and nothing of this is certain. (Hoffer et al.,
    https://arxiv.org/abs/1901.09335; Berman et al., https://arxiv.org/abs/1902.05509)

    Raises ValueError for wrong arguments.

    >>> RepeatedSampler(6, 3).take(epoch=0, positions=np.arange(6))
    array([0, 2, 0, 2, 0, 2])
    >>> train = memload.Loader(dataset, 256, sampler=RepeatedSampler(len(dataset), 3))
    """

    strides_ranks = True

    def __init__(self, size: int, repeats: int = 3, *, seed: int = 0) -> None:
        super().__init__(size)
        self.repeats = check_integer("RepeatedSampler: repeats", repeats, 1)
        self.seed = check_integer("RepeatedSampler: seed", seed)
        self._apart = max(1, min(_BETWEEN_VISITS, -(-self.size // self.repeats)))

    def take(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """See `Order.take`."""
        positions = np.asarray(positions, np.int64)
        group = positions // (self._apart * self.repeats)
        visited = group * self._apart + positions % self._apart
        return _permute(visited, self.size, _key(self.seed, epoch))


class MixtureSampler(_SizedOrder):
    """Several data sets in fixed shares: 60 % of A, 30 % of B and 10 % of C, in every batch.

    Args:
        sizes: How many samples each data set has. The Loader gets the data sets as a list.
        weights: The share of each, numbers of at least 0. They need not sum to one, and are rounded
            to whole parts of 10,000 at most.
        length: How many samples an epoch has. By default, until the first data set has been visited
            once, so that no sample comes twice in the first epoch.
        seed: An integer. Another one gives other orders.

    The shares follow a fixed pattern, and are not drawn. Weights of 0.6, 0.3 and 0.1 have a pattern
    of 10 samples: any 10 neighbours are 6 of A, 3 of B and 1 of C, and so is a batch of 10, 20,
    30, … samples on any rank. Among the first n samples of an epoch, each data set has its share of
    n to within one sample, and among any n neighbours to within two. If the batch of a rank is no
    multiple of the pattern, ranks get different shares, and all of them together the right ones.

    Each data set is shuffled anew whenever it has been visited once, also if that is in a later
    epoch. So all of its samples are visited equally often, but for those that a Loader leaves out
    or repeats at the end of an epoch.

    The pattern is a schedule by earliest deadline (Baruah, Cohen, Plaxton and Varvel,
    "Proportionate Progress", Algorithmica 1996). Raises ValueError for wrong arguments.

    >>> order = MixtureSampler([4, 100], [0.25, 0.75])
    >>> len(order)
    16
    >>> order.take(epoch=0, positions=np.arange(8))
    array([33, 66,  3, 81, 13, 88,  2, 75])
    >>> train = memload.Loader([a, b], 256, sampler=MixtureSampler([len(a), len(b)], [1, 3]))
    """

    repeats = True

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        *,
        length: int | None = None,
        seed: int = 0,
    ) -> None:
        self.sizes = tuple(check_integer("MixtureSampler: sizes", size, 0) for size in sizes)
        #: How many samples of each data set a pattern has.
        self.shares = _whole_shares(weights, len(self.sizes))
        for number, (size, share) in enumerate(zip(self.sizes, self.shares, strict=True)):
            if share and not size:
                raise ValueError(f"data set {number} has a weight, but no samples. Leave it out.")
        self._pattern = _pattern(self.shares)
        if length is None:
            shares = zip(self.sizes, self.shares, strict=True)
            length = min(size * len(self._pattern) // share for size, share in shares if share)
        super().__init__(check_integer("MixtureSampler: length", length, 0))
        self.seed = check_integer("MixtureSampler: seed", seed)
        chosen = self._pattern == np.arange(len(self.sizes))[:, None]
        #: How many samples of each data set come before each place of the pattern, and in all.
        self._before = np.cumsum(chosen, axis=1) - chosen
        self._offsets = np.cumsum([0, *self.sizes])

    def take(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """See `Order.take`."""
        positions = np.asarray(positions, np.int64)
        patterns, places = np.divmod(positions, len(self._pattern))
        samples = np.empty_like(positions)
        for number, share in enumerate(self.shares):
            here = np.flatnonzero(self._pattern[places] == number)
            visits = patterns[here] * share + self._before[number, places[here]]
            samples[here] = self._offsets[number] + self._shuffled(number, int(epoch), visits)
        return samples

    def _shuffled(self, number: int, epoch: int, visits: np.ndarray) -> np.ndarray:
        """Return the samples of a data set at some of its visits in an epoch, both ``(n,)``."""
        size, samples = max(self.sizes[number], 1), np.empty_like(visits)
        # Counted from the first visit of the first epoch, in Python's integers.
        first_turn, first_place = divmod(epoch * self._visits(number), size)
        turns, places = np.divmod(visits + first_place, size)
        for turn in np.unique(turns).tolist():
            here = turns == turn
            key = _key(self.seed, number, first_turn + turn)
            samples[here] = _permute(places[here], size, key)
        return samples

    def _visits(self, number: int) -> int:
        """Return how often a data set is visited in an epoch."""
        patterns, place = divmod(self.size, len(self._pattern))
        return patterns * self.shares[number] + int((self._pattern[:place] == number).sum())


def check_integer(argument: str, value: Any, minimum: int | None = None) -> int:
    """Return an integer, also of NumPy or torch, as int: the repr of an order is part of a state.

    Raises ValueError for anything else, and for an integer below ``minimum``.
    """
    with contextlib.suppress(TypeError):
        number = int(operator.index(value))
        if minimum is None or number >= minimum:
            return number
    at_least = "" if minimum is None else f" of at least {minimum}"
    raise ValueError(f"{argument} must be an integer{at_least}, not {value!r:.200}.")


def _whole_shares(weights: Sequence[float], count: int) -> tuple[int, ...]:
    """Return weights as whole numbers with the smallest sum that is exact, 10,000 at most."""
    values = np.asarray(weights, np.float64)
    if values.shape != (count,) or not np.isfinite(values).all() or (values < 0).any():
        raise ValueError(
            f"weights must be {count} finite numbers of at least 0, one for each data set, not "
            f"{weights!r:.200}."
        )
    if not values.any():
        raise ValueError("weights are all 0. Give the share of each data set, such as [0.6, 0.4].")
    values = values / values.max()  # their sum could overflow
    values /= values.sum()
    parts = next((n for n in range(1, _MAX_PATTERN) if _is_whole(values * n)), _MAX_PATTERN)
    shares = np.floor(values * parts + _EXACT).astype(int)
    # What rounding has left goes to the largest remainders.
    shares[np.argsort(shares - values * parts, kind="stable")[: parts - shares.sum()]] += 1
    if (shares == 0)[values > 0].any():
        raise ValueError(
            f"weights must be at least 1/{_MAX_PATTERN:,} of their sum, or 0. They are "
            f"{weights!r:.200}."
        )
    return tuple(shares.tolist())


def _is_whole(values: np.ndarray) -> bool:
    return bool(np.abs(values - np.rint(values)).max() < _EXACT)


def _pattern(shares: Sequence[int]) -> np.ndarray:
    """Return numbers from 0 to ``len(shares) - 1``, each as often as its share, evenly spread.

    The j-th of n samples may come from place j/n of the pattern on, and must come before (j + 1)/n.
    The one whose deadline is earliest comes first.
    """
    period, done, pattern = sum(shares), [0] * len(shares), []
    for place in range(period):
        _, chosen = min(
            (-(-(done[number] + 1) * period // share), number)
            for number, share in enumerate(shares)
            if share and done[number] * period < (place + 1) * share
        )
        done[chosen] += 1
        pattern.append(chosen)
    return np.array(pattern, np.int64)


def _key(*parts: int) -> np.ndarray:
    """Return 8 words of 64 bits that are a hash of these numbers."""
    text = " ".join(map(str, ("memload", *map(int, parts))))
    return np.frombuffer(hashlib.blake2b(text.encode()).digest(), "<u8")


def _permute(positions: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    """Return where a permutation of 0 … size - 1 takes positions, both int64 ``(n,)``."""
    bits = max(_MIN_BITS, int(size - 1).bit_length())
    tables = _round_tables(bits, key.tobytes())
    if size <= 1 << (_MIN_BITS - 1):
        # In so small a range, values could stay outside for up to a thousand turns. Permute all of
        # them once.
        values = _feistel(np.arange(1 << bits, dtype=np.int64), bits, tables)
        return np.asarray(values[values < size][positions])
    values = _feistel(np.asarray(positions, np.int64), bits, tables)
    outside = np.flatnonzero(values >= size)
    # Each turn leaves at most about half of them, as more than half of the values are inside.
    while outside.size:
        again = _feistel(values[outside], bits, tables)
        values[outside] = again
        outside = outside[again >= size]
    return values


def _feistel(values: np.ndarray, bits: int, tables: Sequence[np.ndarray]) -> np.ndarray:
    """Return a permutation of 0 … 2**bits - 1 at some values: each half is hashed in turn."""
    low_bits = bits // 2
    left, right = values >> low_bits, values & ((1 << low_bits) - 1)
    hashed = np.empty_like(values)
    for turn, table in enumerate(tables):
        source, target = (right, left) if turn % 2 == 0 else (left, right)
        np.take(table, source, out=hashed, mode="clip")  # the other modes make one more copy
        np.bitwise_xor(target, hashed, out=target)
    np.left_shift(left, low_bits, out=left)
    np.bitwise_or(left, right, out=left)
    return left


@functools.lru_cache(maxsize=4)
def _round_tables(bits: int, key: bytes) -> tuple[np.ndarray, ...]:
    """Return the random function of each round as a table: 2¹⁵ entries for 10⁹ samples."""
    low_bits = bits // 2
    words = np.frombuffer(key, "<u8")
    tables = []
    for turn in range(_ROUNDS):
        from_bits, to_bits = (
            (low_bits, bits - low_bits) if turn % 2 == 0 else (bits - low_bits, low_bits)
        )
        round_key = words[[turn, (turn + 1) % 8, (turn + 2) % 8]]
        values = _mix(np.arange(1 << from_bits, dtype=np.uint64), round_key)
        tables.append((values >> np.uint64(64 - to_bits)).astype(np.int64))
    return tuple(tables)


def _mix(values: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Return 64 random bits for each value and three words of a key (xxHash's multipliers)."""
    for word in words:
        values = (values + word) * np.uint64(0x9E3779B185EBCA87)
        values ^= values >> np.uint64(29)
        values *= np.uint64(0xC2B2AE3D27D4EB4F)
        values ^= values >> np.uint64(32)
    return values


def _uniform(positions: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Return a number in [0, 1) for each position: float64, of 53 random bits."""
    values = _mix(positions.astype(np.uint64), np.frombuffer(key.tobytes(), "<u8")[:3])
    return np.asarray((values >> np.uint64(11)).astype(np.float64) * 2.0**-53)
