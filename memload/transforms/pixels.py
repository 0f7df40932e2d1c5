"""Normalize and ToDtype: the steps that take every pixel by itself."""

from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch

from memload.transforms.transform import Pointwise, Transform

#: Means and standard deviations by name, for pixels from 0 to 1; ImageNet's as in torchvision's recipes.
STATISTICS = {"imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Normalize(Pointwise):
    """``(pixel - mean) / std``, a number a channel, for pixels from 0 to 1.

    Without arguments mean and std are those of the data set, which a Loader fills in (see `bind`);
    ``Normalize("imagenet")`` takes ImageNet's. uint8 counts as 0 to 1 too, so that no ToDtype is needed before, and
    comes out as float32.
    """

    def __init__(self, mean: Sequence[float] | str | None = None, std: Sequence[float] | None = None) -> None:
        if isinstance(mean, str):
            if mean not in STATISTICS or std is not None:
                found = repr(mean) if std is None else f"{mean!r} and a std"
                raise self._wrong("mean", f"numbers or one of {', '.join(STATISTICS)}", found)
            mean, std = STATISTICS[mean]
        if (mean is None) != (std is None):
            raise self._wrong("mean and std", "both or neither", f"{mean} and {std}")
        self.mean = None if mean is None else tuple(map(float, self._several("mean", mean)))
        self.std = None if std is None else tuple(map(float, self._several("std", std)))
        if self.mean is not None and self.std is not None and (len(self.mean) != len(self.std) or min(self.std) <= 0):
            raise self._wrong("mean and std", "as many numbers, those of std above 0", f"{self.mean} and {self.std}")

    def _several(self, argument: str, value: Any) -> Any:
        return (self._numbers(argument, value),) if isinstance(value, Real) else self._numbers(argument, list(value))

    def bind(
        self,
        *,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        num_classes: int | None = None,
    ) -> Transform:
        """Return this one if it has its numbers, else one with these."""
        return self if self.mean is not None or mean is None else Normalize(mean, std)

    def line(self, whole: bool, channels: int) -> tuple[Any, Any, torch.dtype | None]:
        """See `Pointwise.line`."""
        if self.mean is None or self.std is None:
            raise self._wrong("mean and std", "numbers", "none", ". Give them, or bind() the data set's")
        if len(self.mean) not in (1, channels):
            raise self._wrong(
                "images",
                f"{len(self.mean)} channels, as mean and std have",
                f"{channels}",
                ". mean=None takes the data set's own",
            )
        mean, std = np.array(self.mean), np.array(self.std)
        return 1 / (255 * std if whole else std), -mean / std, None


class ToDtype(Pointwise):
    """The images as float32, float16 or bfloat16; with ``scale`` uint8 becomes 0 to 1.

    What comes after it in the list is computed in float32 all the same, and rounded once, at the end.
    """

    def __init__(self, dtype: torch.dtype, scale: bool = False) -> None:
        if dtype not in _DTYPES:
            raise self._wrong("dtype", "float32, float16 or bfloat16 of torch", repr(dtype))
        self.dtype, self.scale = dtype, scale

    def line(self, whole: bool, channels: int) -> tuple[Any, Any, torch.dtype | None]:
        """See `Pointwise.line`."""
        return 1 / 255 if whole and self.scale else 1.0, 0.0, self.dtype
