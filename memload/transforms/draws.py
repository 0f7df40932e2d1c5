"""Random numbers as a pure function of (seed, epoch, sample, position, view, number)."""

import functools
import hashlib
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch

Integers = TypeVar("Integers", np.ndarray, torch.Tensor)

#: The constants of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
#: Generators", 2014). They are signed, since torch has no uint64 arithmetic. Overflow wraps both in
#: NumPy and in torch.
INCREMENT = 0x9E3779B97F4A7C15 - (1 << 64)
FACTORS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
SHIFTS = (30, 27, 31)
_UNSIGNED_FACTORS = tuple(np.uint64(factor % (1 << 64)) for factor in FACTORS)
_UNSIGNED_SHIFTS = tuple(map(np.uint64, SHIFTS))
#: A float64 has 53 bits of precision.
_UNUSED_BITS = np.uint64(64 - 53)


def mix(values: Integers) -> Integers:
    """Spread every bit of int64 numbers over all of them. This permutes the int64 numbers.

    It is the last step of SplitMix64.
    """
    if isinstance(values, np.ndarray):
        unsigned = values.view(np.uint64)  # whose shifts need no masks: twice as fast
        for bits, factor in zip(_UNSIGNED_SHIFTS, _UNSIGNED_FACTORS, strict=False):
            unsigned = (unsigned ^ (unsigned >> bits)) * factor
        return (unsigned ^ (unsigned >> _UNSIGNED_SHIFTS[2])).view(np.int64)
    values = (values ^ _shift_right(values, SHIFTS[0])) * FACTORS[0]
    values = (values ^ _shift_right(values, SHIFTS[1])) * FACTORS[1]
    mixed: torch.Tensor = values ^ _shift_right(values, SHIFTS[2])
    return mixed


def _shift_right(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift int64 numbers as if they were unsigned."""
    return (values >> bits) & ((1 << 64 - bits) - 1)


@dataclass
class Draws:
    """The random numbers of one transform for every sample of a batch.

    ``samples`` are the samples' numbers in the data set, int64 ``(N,)``. ``position`` is the
    transform's position in its list, or a text such as "3.0.1" for one inside of another. Each
    sample has a stream of its own. Its numbers can be asked for in any order, and depend on nothing
    but the arguments. They are computed on the host, so they are the same for every device.

    >>> draws = Draws(np.array([7, 8]), seed=0, epoch=0, position=0, view=0)
    >>> draws.uniform(3).shape
    (3, 2)
    """

    samples: np.ndarray
    seed: int
    epoch: int
    position: int | str
    view: int
    #: Whether the numbers are the same in every epoch.
    in_every_epoch: bool = False

    def same_in_every_epoch(self) -> "Draws":
        """Return random numbers that do not depend on the epoch."""
        return replace(self, in_every_epoch=True)

    def at(self, places: np.ndarray) -> "Draws":
        """Return the random numbers of the samples at some places, int64 ``(n,)``."""
        return replace(self, samples=self.samples[places])

    @functools.cached_property
    def streams(self) -> np.ndarray:
        """Where each sample's stream starts, int64 ``(N,)``. No two samples share one."""
        epoch = "every" if self.in_every_epoch else self.epoch
        key = f"memload.transforms {self.seed} {epoch} {self.position} {self.view}"
        digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
        return mix(self.samples + int.from_bytes(digest, "little", signed=True))

    def uniform(self, count: int, first: int = 0, among: np.ndarray | None = None) -> np.ndarray:
        """Return numbers ``first`` to ``first + count`` of each sample's stream.

        They are float64 ``(count, N)``, at least 0 and below 1. ``among`` selects samples by their
        indices in the batch.
        """
        streams = self.streams if among is None else self.streams[among]
        steps = np.arange(first + 1, first + count + 1)[:, np.newaxis]
        bits = mix(streams + steps * INCREMENT).view(np.uint64) >> _UNUSED_BITS
        uniform: np.ndarray = bits * 2.0**-53
        return uniform


def numbers_at(streams: Integers, number: Integers) -> Integers:
    """Return 16 random bits of streams, as int64, on their device: those of the given numbers."""
    if isinstance(streams, np.ndarray):
        mixed_bits = mix(streams + (number + 1) * INCREMENT).view(np.uint64) >> np.uint64(48)
        return np.asarray(mixed_bits.view(np.int64))
    return _shift_right(mix(streams + (number + 1) * INCREMENT), 48)
