"""Random numbers as a pure function of (seed, epoch, sample, position, view, number)."""

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memload.upload import upload

#: The constants of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
#: Generators", 2014). Overflow wraps.
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
#: A float64 has 53 bits of precision.
_UNUSED_BITS = np.uint64(64 - 53)


def mix(values: np.ndarray) -> np.ndarray:
    """Spread every bit of uint64 numbers over all of them. This permutes the uint64 numbers.

    It is the last step of SplitMix64.
    """
    for bits, factor in zip(_SHIFTS, _FACTORS, strict=False):
        values = (values ^ (values >> bits)) * factor
    mixed: np.ndarray = values ^ (values >> _SHIFTS[2])
    return mixed


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
    position: int | str = ""
    view: int = 0
    #: What the positions of all transforms in the same list begin with.
    prefix: str = ""
    #: Whether the numbers are the same in every epoch.
    in_every_epoch: bool = False

    def __len__(self) -> int:
        return len(self.samples)

    def same_in_every_epoch(self) -> "Draws":
        """Return random numbers that do not depend on the epoch."""
        return replace(self, in_every_epoch=True)

    def of_samples(self, places: np.ndarray) -> "Draws":
        """Return the random numbers of the samples at some places, int64 ``(n,)``."""
        return replace(self, samples=self.samples[places])

    def at_position(self, position: int) -> "Draws":
        """Return the random numbers of the transform at a position of the same list."""
        return replace(self, position=f"{self.prefix}{position}")

    def inside(self, number: int) -> "Draws":
        """Return the random numbers of a list inside of the transform, by its number."""
        return replace(self, prefix=f"{self.position}.{number}.")

    @functools.cached_property
    def streams(self) -> np.ndarray:
        """Where each sample's stream starts, uint64 ``(N,)``. No two samples share one."""
        epoch = "every" if self.in_every_epoch else self.epoch
        key = f"memload.transforms {self.seed} {epoch} {self.position} {self.view}"
        digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
        return mix(self.samples.view(np.uint64) + np.frombuffer(digest, "<u8"))

    def uniform(self, count: int, first: int = 0, among: np.ndarray | None = None) -> np.ndarray:
        """Return numbers ``first`` to ``first + count`` of each sample's stream.

        They are float64 ``(count, N)``, at least 0 and below 1. ``among`` selects samples by their
        indices in the batch.
        """
        streams = self.streams if among is None else self.streams[among]
        steps = np.arange(first + 1, first + count + 1, dtype=np.uint64)[:, np.newaxis]
        uniform: np.ndarray = (mix(streams + steps * _INCREMENT) >> _UNUSED_BITS) * 2.0**-53
        return uniform


class Drawn:
    """What a transform drew for the samples of a batch: the arrays of `Transform.draw` by name.

    ``drawn["angle"]`` is a tensor ``(N, …)`` on the device of the images, and
    ``drawn.on_host("angle")`` the same as a NumPy array. An array of many batches is uploaded once,
    when it is first used. ``samples`` are those of the batch among all for which it was drawn.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        device: torch.device,
        uploaded: dict[str, Tensor] | None = None,
        samples: slice = slice(None),
    ) -> None:
        self._values, self._device, self.samples = values, device, samples
        self._uploaded = {} if uploaded is None else uploaded

    def part(self, start: int, count: int) -> "Drawn":
        """Return what was drawn for ``count`` samples from ``start`` on."""
        samples = slice(start, start + count)
        return Drawn(self._values, self._device, self._uploaded, samples)

    def __getitem__(self, name: str) -> Tensor:
        return self.of_all(name)[self.samples]

    def of_all(self, name: str) -> Tensor:
        """Return an array on the device as it was drawn, such as one that all samples share."""
        if name not in self._uploaded:
            self._uploaded[name] = upload(self._all(name), self._device)
        return self._uploaded[name]

    def on_host(self, name: str) -> Any:
        """Return a NumPy array of these samples, or what else was drawn by this name."""
        values = self._all(name)
        return values[self.samples] if isinstance(values, np.ndarray) else values

    def _all(self, name: str) -> Any:
        """Return what was drawn for all samples. What not every batch needs is a function."""
        value = self._values[name]
        return value() if callable(value) else value
