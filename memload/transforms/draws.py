"""Random numbers that are a function of what they are for: of (seed, epoch, sample, position, view, number)."""

import functools
import hashlib
from typing import TypeVar

import numpy as np
import torch

Integers = TypeVar("Integers", np.ndarray, torch.Tensor)

# SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014); as signed numbers, since
# torch has no uint64 arithmetic. Overflow wraps in both libraries.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_ONE, _TWO = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)
_ROUNDS = tuple(
    (np.uint64(bits), np.uint64(factor % (1 << 64))) for bits, factor in ((30, _ONE), (27, _TWO))
)
_LAST, _KEPT = np.uint64(31), np.uint64(11)


def mix(values: Integers) -> Integers:
    """Spread every bit of int64 numbers over all of them: the finaliser of SplitMix64, which is a permutation."""
    if isinstance(values, np.ndarray):
        return _mixed(values).view(np.int64)
    values = (values ^ _shifted(values, 30)) * _ONE
    values = (values ^ _shifted(values, 27)) * _TWO
    mixed: torch.Tensor = values ^ _shifted(values, 31)
    return mixed


def _mixed(values: np.ndarray) -> np.ndarray:
    """Return what `mix` does, as uint64, whose shifts need no masks: half the time of a small batch's draws."""
    mixed = values.view(np.uint64)
    for bits, factor in _ROUNDS:
        mixed = (mixed ^ (mixed >> bits)) * factor
    return mixed ^ (mixed >> _LAST)


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift as if the numbers were unsigned."""
    return (values >> bits) & ((1 << 64 - bits) - 1)


class Draws:
    """What is random for one transform, about every sample of a batch.

    ``samples`` are the samples' numbers in the data set, int64 ``(N,)``; ``position`` is that of the transform in
    its list. Each sample has a stream of its own, whose numbers can be asked for in any order; nothing but the
    arguments goes into them. Made on the host, so that devices cannot differ.
    """

    def __init__(
        self, samples: np.ndarray, seed: int, epoch: int, position: int, view: int
    ) -> None:
        self._samples, self._key = samples, _key(seed, epoch, position, view)

    def __len__(self) -> int:
        return len(self._samples)

    @functools.cached_property
    def streams(self) -> np.ndarray:
        """A number of 64 bits for each sample, int64 ``(N,)``; different ones for different samples."""
        return mix(self._samples + self._key)

    def uniform(self, count: int, first: int = 0, among: np.ndarray | None = None) -> np.ndarray:
        """Return numbers ``first`` to ``first + count`` of each sample, float64 ``(count, N)`` from 0 to below 1.

        ``among`` picks samples of the batch by their places in it.
        """
        streams = self.streams if among is None else self.streams[among]
        drawn: np.ndarray = (_mixed(streams + _steps(first, count)) >> _KEPT) * 2.0**-53
        return drawn


def numbers_at(streams: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """Return 16 random bits, int64: the numbers counted by ``number`` of streams, on their device."""
    return _shifted(mix(streams + (number + 1) * _STEP), 48)


@functools.lru_cache(maxsize=64)
def _steps(first: int, count: int) -> np.ndarray:
    return (np.arange(first + 1, first + count + 1) * _STEP)[:, np.newaxis]


@functools.lru_cache(maxsize=1024)
def _key(*parts: int) -> int:
    digest = hashlib.blake2b(
        " ".join(map(str, ("memload.transforms", *parts))).encode(), digest_size=8
    )
    return int.from_bytes(digest.digest(), "little", signed=True)
