"""Normalize and ToDtype: the steps that take every pixel by itself."""

import copy
from collections.abc import Iterable, Sequence
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

    def __init__(
        self,
        mean: Sequence[float] | float | str | None = None,
        std: Sequence[float] | float | None = None,
        inplace: bool = False,
    ) -> None:
        if inplace is not False:
            raise self._wrong("inplace", "False", repr(inplace), ". Batches come out in new memory")
        if isinstance(mean, str):
            if mean not in STATISTICS or std is not None:
                found = repr(mean) if std is None else f"{mean!r} and a std"
                raise self._wrong("mean", f"numbers or one of {', '.join(STATISTICS)}", found)
            mean, std = STATISTICS[mean]
        if (mean is None) != (std is None):
            raise self._wrong("mean and std", "both or neither", f"{mean} and {std}")
        self.mean: tuple[float, ...] | None = None
        self.std: tuple[float, ...] | None = None
        if mean is not None and std is not None:
            means, stds = (
                tuple(map(float, self._several(*both))) for both in (("mean", mean), ("std", std))
            )
            channels = max(len(means), len(stds))
            if {len(means), len(stds)} - {1, channels} or min(stds) <= 0:
                raise self._wrong(
                    "mean and std", "as many numbers, those of std above 0", f"{means} and {stds}"
                )
            self.mean = means * channels if len(means) == 1 else means
            self.std = stds * channels if len(stds) == 1 else stds

    def _several(self, argument: str, value: Any) -> Any:
        value = value.tolist() if isinstance(value, np.ndarray | torch.Tensor) else value
        if isinstance(value, Real):
            return (self._numbers(argument, value),)
        several = isinstance(value, Iterable) and not isinstance(value, str)
        return self._numbers(argument, list(value) if several else value)

    def bind(
        self,
        *,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        num_classes: int | None = None,
    ) -> Transform:
        """Return this one if it has its numbers, else one with these."""
        if self.mean is not None or mean is None:
            return self
        made, filled = copy.copy(self), Normalize(mean, std)  # of its own class
        made.mean, made.std = filled.mean, filled.std
        return made

    def line(self, whole: bool, channels: int) -> tuple[Any, Any, torch.dtype | None]:
        """See `Pointwise.line`."""
        if self.mean is None or self.std is None:
            raise self._wrong(
                "mean and std", "numbers", "none", ". Give them; a Loader takes the data set's own"
            )
        if len(self.mean) not in (1, channels):
            raise self._wrong(
                "images",
                f"{len(self.mean)} channels, as mean and std have",
                f"{channels}",
                ". mean=None takes the data set's own",
            )
        mean, std = np.array(self.mean), np.array(self.std)
        if whole and mean.max() > 1:  # FFCV's, which would make of every picture one that is black
            raise self._wrong(
                "mean",
                "those of pixels from 0 to 1",
                f"{self.mean}",
                ". Divide mean and std by 255",
            )
        return 1 / (255 * std if whole else std), -mean / std, None


class ToDtype(Pointwise):
    """The images as float32, float16 or bfloat16; with ``scale`` uint8 becomes 0 to 1.

    What comes after it in the list is computed in float32 all the same, and rounded once, at the end.
    """

    def __init__(self, dtype: torch.dtype, scale: bool = False) -> None:
        if dtype not in _DTYPES:
            raise self._wrong("dtype", "float32, float16 or bfloat16 of torch", repr(dtype))
        self.dtype, self.scale = dtype, self._flag("scale", scale)

    def line(self, whole: bool, channels: int) -> tuple[Any, Any, torch.dtype | None]:
        """See `Pointwise.line`."""
        return 1 / 255 if whole and self.scale else 1.0, 0.0, self.dtype
