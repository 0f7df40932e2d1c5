"""What every transform has in common, and how arguments are checked."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memload.transforms.draws import Draws
from memload.transforms.geometry import Axis

Columns = dict[str, Tensor]


class Transform:
    """A step that works on whole batches, with a random draw of its own for every sample.

    Called with images ``(N, C, H, W)`` of uint8 or a floating dtype, and perhaps ``columns``, tensors ``(N, …)`` by
    name; returns the images, or (images, columns) where columns were given. What is random is a function of
    (``seed``, ``epoch``, ``samples``, place in the list) alone. ``samples`` are the samples' numbers in the data
    set, int64 ``(N,)`` as an array or tensor (one on a GPU has to be waited for); without them a counter of the
    object's own goes on from call to call. The state of no other generator is read or changed. Objects can be
    pickled, and used by several threads where samples are given.

    Raises TypeError and ValueError that name the transform, what it expected and what it found.
    """

    @functools.cached_property
    def _alone(self) -> "Transform":
        from memload.transforms.compose import Compose

        return Compose([self])

    def __call__(
        self,
        images: Tensor,
        columns: Mapping[str, Tensor] | None = None,
        *,
        samples: Any = None,
        seed: int = 0,
        epoch: int = 0,
    ) -> Any:
        """Do the step."""
        return self._alone(images, columns, samples=samples, seed=seed, epoch=epoch)

    def bind(
        self,
        *,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        num_classes: int | None = None,
    ) -> "Transform":
        """Return this transform with what it leaves to the data set filled in: statistics, for pixels 0 to 1."""
        return self

    def apply(self, images: Tensor, columns: Columns, draws: Draws) -> tuple[Tensor, Columns]:
        """Do the step, in new memory."""
        raise NotImplementedError

    def __repr__(self) -> str:
        settings = (f"{name}={value}" for name, value in vars(self).items() if name[0] != "_")
        return f"{type(self).__name__}({', '.join(settings)})"

    def _wrong(self, argument: str, expected: str, found: object, advice: str = "") -> ValueError:
        return ValueError(f"{type(self).__name__}: {argument}: expected {expected}, found {found}{advice}")

    def _pair(self, argument: str, value: Any, least: int = 1) -> tuple[int, int]:
        """Return (height, width) of one integer or two."""
        pair = (value, value) if isinstance(value, int) else tuple(value) if isinstance(value, Sequence) else ()
        pair = pair * 2 if len(pair) == 1 else pair
        if len(pair) != 2 or not all(isinstance(side, int) and side >= least for side in pair):
            raise self._wrong(argument, f"an integer of at least {least}, or (height, width) of them", repr(value))
        return pair[0], pair[1]

    def _range(self, argument: str, value: Any, least: float, most: float = math.inf) -> tuple[float, float]:
        """Return (low, high) of two numbers in order and within bounds."""
        if not isinstance(value, Sequence) or len(value) != 2 or not least <= value[0] <= value[1] <= most:
            raise self._wrong(argument, f"(low, high) within {least} to {most}", repr(value))
        return float(value[0]), float(value[1])

    def _probability(self, value: Any) -> float:
        if not isinstance(value, (int, float)) or not 0 <= value <= 1:
            raise self._wrong("p", "a number from 0 to 1", repr(value))
        return float(value)

    def _per_channel(self, argument: str, value: Any, channels: int) -> tuple[float, ...]:
        """Return a number for each channel of one number or of as many as there are channels."""
        values = (value,) if isinstance(value, (int, float)) else tuple(value)
        if len(values) not in (1, channels):
            raise self._wrong(argument, f"one number or one for each of {channels} channels", f"{len(values)}")
        return tuple(map(float, values)) * (channels if len(values) == 1 else 1)


class Geometric(Transform):
    """A step that says where pixels come from; steps of this kind are done together."""

    #: What outside of the image counts as, a number or one for each channel, in the units of the images.
    fill: float | Sequence[float] = 0

    def place(self, height: Axis, width: Axis, draws: Draws) -> None:
        """Put the step behind those that the axes know of."""
        raise NotImplementedError


class Pointwise(Transform):
    """A step that takes every pixel by itself, by a line: ``factor`` · pixel + ``offset``."""

    def line(self, whole: bool, channels: int) -> tuple[Any, Any, torch.dtype | None]:
        """Return factor and offset, a number each or float64 ``(C,)``, and the dtype, None for float32.

        ``whole`` says whether pixels are integers from 0 to 255.
        """
        raise NotImplementedError


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Return a small array on a device, without waiting for what the device is doing."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
