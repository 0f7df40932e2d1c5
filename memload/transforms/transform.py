"""What every transform has in common, and how arguments are checked."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypeGuard

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
    object's own goes on from call to call, from 0 for every new object, and in a DataLoader's workers their seeds
    count too. The state of no other generator is read or changed. Objects can be pickled, and used by several threads
    where samples are given.

    Subclasses define `apply`; what is random in it they take from its ``draws``: ``draws.uniform(count)`` is float64
    ``(count, N)``, from 0 to below 1.

    Raises TypeError and ValueError that name the transform, what it expected and what it found.
    """

    #: What was called, where that is another object.
    _called = ""

    @functools.cached_property
    def _alone(self) -> "Transform":
        from memload.transforms.compose import Compose

        alone = Compose([self])
        alone._called = type(self).__name__
        return alone

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value for name, value in vars(self).items() if name != "_alone"
        }  # which holds the original

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

    def prepare(self, samples: Any, *, seed: int = 0, epoch: int = 0) -> Callable[..., Any]:
        """Return what does the step for parts of ``samples``: called with (images, columns, start, stop).

        The same as calls with ``samples[start:stop]``, in less of the host's time. Several threads may call it; on
        CUDA, all with the same stream.
        """
        return self._alone.prepare(samples, seed=seed, epoch=epoch)

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
        """Return (images, columns) with the step done, in new memory."""
        raise NotImplementedError(
            f"{type(self).__name__}: expected a method apply(images, columns, draws), found none"
        )

    def __repr__(self) -> str:
        settings = (f"{name}={value}" for name, value in vars(self).items() if name[0] != "_")
        return f"{type(self).__name__}({', '.join(settings)})"

    def _wrong(self, argument: str, expected: str, found: object, advice: str = "") -> ValueError:
        return ValueError(
            f"{self._called or type(self).__name__}: {argument}: expected {expected}, found {found}{advice}"
        )

    def _pair(self, argument: str, value: Any, least: int = 1) -> tuple[int, int]:
        """Return (height, width) of one integer or two."""
        pair = (
            (value, value)
            if is_integer(value)
            else tuple(value)
            if isinstance(value, Sequence)
            else ()
        )
        pair = pair * 2 if len(pair) == 1 else pair
        if len(pair) != 2 or not all(is_integer(side) and side >= least for side in pair):
            raise self._wrong(
                argument, f"an integer of at least {least}, or (height, width) of them", repr(value)
            )
        return int(pair[0]), int(pair[1])

    def _range(
        self, argument: str, value: Any, least: float, most: float = math.inf
    ) -> tuple[float, float]:
        """Return (low, high) of two numbers in order and within bounds."""
        numbers = value if isinstance(value, Sequence) and all(map(is_finite, value)) else ()
        if len(numbers) != 2 or not least <= numbers[0] <= numbers[1] <= most:
            bounds = (
                f", neither below {least:g}" if most == math.inf else f" from {least:g} to {most:g}"
            )
            raise self._wrong(argument, f"(low, high) with low <= high{bounds}", repr(value))
        return float(numbers[0]), float(numbers[1])

    def _probability(self, value: Any) -> float:
        if not is_finite(value) or not 0 <= value <= 1:
            raise self._wrong("p", "a number from 0 to 1", repr(value))
        return float(value)

    def _flag(self, argument: str, value: Any) -> bool:
        if not isinstance(value, bool | np.bool_):
            raise self._wrong(argument, "True or False", repr(value))
        return bool(value)

    def _numbers(self, argument: str, value: Any) -> Any:
        """Return one finite number or several, as they were given."""
        values = (
            (value,) if isinstance(value, Real) else value if isinstance(value, Sequence) else ()
        )
        if not values or isinstance(values, str) or not all(map(is_finite, values)):
            raise self._wrong(argument, "a number, or one for each channel", repr(value))
        return value

    def _per_channel(
        self, argument: str, value: Any, channels: int, dtype: torch.dtype
    ) -> tuple[float, ...]:
        """Return a number for each channel of one number or of as many as there are channels, as a dtype has it."""
        values = (value,) if isinstance(value, Real) else tuple(value)
        if len(values) not in (1, channels):
            raise self._wrong(
                argument, f"one number or one for each of {channels} channels", f"{len(values)}"
            )
        if dtype == torch.uint8 and not all(0 <= one <= 255 and one == int(one) for one in values):
            raise self._wrong(
                argument, "integers from 0 to 255, as the images are uint8", repr(value)
            )
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


def is_integer(value: Any) -> TypeGuard[int]:
    """Return whether a value is an integer, NumPy's too, but no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Return whether a value is a number, no bool, and neither infinite nor NaN."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond any float
        return False


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Return a small array on a device, without waiting for what the device is doing."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
