"""A list of steps, ready to be applied to parts of a chunk of samples."""

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memload.transforms.arguments import describe, is_integer, wrong
from memload.transforms.draws import Draws
from memload.transforms.fused import Columns, Fused
from memload.transforms.geometry import Plan

#: Plans are made for this many samples at once: 256 take 98 µs, 2,048 take 180 µs, and 32,768 take
#: 1,560 µs.
_SAMPLES_PER_PLAN = 2048
_DTYPES = (torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64)


def not_compiled(method: Callable[..., Any]) -> Callable[..., Any]:
    """Have torch.compile leave a method out, as NumPy's work cannot be traced.

    ``torch.compiler.disable`` as a decorator would import the compiler with memload.
    """

    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(method)(*args, **options)  # type: ignore[no-untyped-call]  # torch's
        return method(*args, **options)

    return call


class Prepared:
    """A list of steps with the random numbers for a chunk of samples. Each call transforms a part.

    ``name`` is the transform that the user called, for messages. ``steps`` are (position, step) as
    `group` returns them. For the other options see `Compose`.

    The plans of the fused steps are computed and uploaded for 2,048 samples or more at a time. For
    `train` that takes 22 µs of the host's time for each 256 samples instead of 100. Several threads
    may call it; on CUDA, all with the same stream.
    """

    def __init__(
        self,
        name: str,
        steps: Sequence[tuple[int, Any]],
        samples: Any,
        seed: int,
        epoch: int,
        *,
        points: Sequence[str] = (),
        views: int = 1,
        memory_format: torch.memory_format = torch.channels_last,
    ) -> None:
        numbers = samples.cpu().numpy() if isinstance(samples, Tensor) else np.asarray(samples)
        if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
            found = f"{numbers.dtype} {numbers.shape}"
            raise wrong(name, "samples", "integers (N,)", found)
        for argument, value in (("seed", seed), ("epoch", epoch)):
            if not is_integer(value):
                raise wrong(name, argument, "an integer", repr(value))
        self._name, self._steps = name, steps
        self._points, self._views, self._memory_format = points, views, memory_format
        self._samples = numbers.astype(np.int64)
        self._seed, self._epoch = int(seed), int(epoch)
        #: By position and view: shape and dtype of the images, first sample, stop, plan.
        self._plans: dict[tuple[int, int], tuple[Any, int, int, Plan]] = {}
        self._planning = threading.Lock()

    @not_compiled
    def __call__(
        self,
        images: Tensor,
        columns: Mapping[str, Tensor] | None = None,
        start: int = 0,
        stop: int | None = None,
    ) -> Any:
        """Return the transformed images of ``samples[start:stop]``; see `Transform`."""
        if not is_integer(start) or start < 0 or not (stop is None or is_integer(stop)):
            found = f"{start!r} and {stop!r}"
            raise wrong(self._name, "start and stop", "integers of at least 0", found)
        self._check_images(images, len(self._samples[start:stop]))
        original = self._checked_columns({} if columns is None else columns, len(images))
        views = [self._view(images, original, start, view) for view in range(self._views)]
        if self._views == 1:
            return views[0] if columns is not None else views[0][0]
        all_images = tuple(images for images, _ in views)
        return all_images if columns is None else (all_images, _merge([c for _, c in views]))

    def _view(
        self, images: Tensor, columns: Columns, start: int, view: int
    ) -> tuple[Tensor, Columns]:
        """Return images and columns after all steps."""
        original, stop = images, start + images.shape[0]  # len() of a tensor takes 1.5 µs
        for position, step in self._steps:
            if isinstance(step, Fused):
                # start and stop count in the chunk, but first_in_plan counts in the plan.
                plan, plan_start = self._plan(step, position, images, start, view)
                first_in_plan = start - plan_start
                images, columns = step(images, columns, plan, first_in_plan, self._points)
            elif hasattr(step, "fuses_as"):  # a Transform
                draws = self._draws(start, stop, position, view)
                result = step.apply(images, columns, draws)
                images, columns = self._checked_result(step, result, stop - start)
            else:
                if images is original and self._views > 1:
                    # The step may change them in place, but the next view must not see that.
                    images = images.clone()
                images = self._checked_output(step, step(images), stop - start)
        return images.contiguous(memory_format=self._memory_format), columns

    def _plan(
        self, step: Fused, position: int, images: Tensor, start: int, view: int
    ) -> tuple[Plan, int]:
        """Return a plan that covers these images, and which sample of the chunk is its first."""
        shape_and_dtype = images.shape[1:], images.dtype
        stop = start + images.shape[0]
        with self._planning:
            if (position, view) in self._plans:
                planned_for, plan_start, plan_stop, plan = self._plans[position, view]
                if plan_start <= start and stop <= plan_stop and planned_for == shape_and_dtype:
                    return plan, plan_start
            plan_stop = min(max(stop, start + _SAMPLES_PER_PLAN), len(self._samples))
            plan = step.plan(
                images,
                plan_stop - start,
                lambda of_step: self._draws(start, plan_stop, of_step, view),
                self._memory_format,
            )
            self._plans[position, view] = shape_and_dtype, start, plan_stop, plan
            return plan, start

    def _draws(self, start: int, stop: int, position: int, view: int) -> Draws:
        return Draws(self._samples[start:stop], self._seed, self._epoch, position, view)

    def _check_images(self, images: Any, count: int) -> None:
        """Check the images of a call, and that there is a sample for each."""
        if not isinstance(images, Tensor) or images.ndim != 4:
            advice = "A Loader passes whole batches."
            raise wrong(self._name, "images", "a tensor (N, C, H, W)", describe(images), advice)
        shape = tuple(images.shape)
        # A callable of the user's that comes first may take any dtype and layout.
        first = self._steps[0][1] if self._steps else None
        if first is None or isinstance(first, Fused) or hasattr(first, "fuses_as"):
            if images.dtype not in _DTYPES:
                advice = "Begin the list with a function that makes floats of them."
                raise wrong(self._name, "images", "uint8 or floating", images.dtype, advice)
            # More than 16 channels and a width of 1, 3 or 4: these are channels last.
            if min(shape[1:3]) > 16 and shape[3] in (1, 3, 4):
                advice = "Write images.permute(0, 3, 1, 2)."
                raise wrong(self._name, "images", "(N, C, H, W)", f"{shape}, channels last", advice)
        if 0 in shape[1:]:
            raise wrong(self._name, "images", "without an empty side", shape)
        if len(images) != count:
            raise ValueError(
                f"{self._name}: the number of images is {len(images)}, but that of samples is "
                f"{count}."
            )

    def _checked_columns(self, columns: Any, count: int) -> Columns:
        """Return the columns of a call, with points as floats."""
        if not isinstance(columns, Mapping):
            advice = "Write {'label': labels}."
            found = describe(columns)
            raise TypeError(str(wrong(self._name, "columns", "tensors by name", found, advice)))
        checked = dict(columns)
        for key, column in columns.items():
            if not isinstance(column, Tensor) or not column.ndim or len(column) != count:
                raise wrong(
                    self._name, f"columns[{key!r}]", f"a tensor ({count}, …)", describe(column)
                )
        for key in self._points:
            column = columns.get(key)
            if column is None or column.ndim != 3 or column.shape[2] != 2:
                expected = f"a tensor ({count}, K, 2), since points names it"
                raise wrong(self._name, f"columns[{key!r}]", expected, describe(column))
            checked[key] = column if column.is_floating_point() else column.float()
        return checked

    def _checked_result(self, step: Any, result: Any, count: int) -> tuple[Tensor, Columns]:
        """Return what ``step.apply`` returned."""
        is_pair = isinstance(result, tuple) and len(result) == 2
        if not is_pair or not isinstance(result[1], dict):
            raise self._wrong_result(step, "(images, columns)", describe(result))
        images, columns = result
        for name in self._points:
            if name not in columns:
                found = f"only {', '.join(map(repr, sorted(columns)))}" if columns else "none"
                raise self._wrong_result(step, f"the column {name!r}, which points names", found)
        return self._checked_output(step, images, count), columns

    def _checked_output(self, step: Any, images: Any, count: int) -> Tensor:
        """Return the images that a step returned."""
        if not isinstance(images, Tensor) or images.ndim != 4 or len(images) != count:
            raise self._wrong_result(step, f"images ({count}, C, H, W)", describe(images))
        if images.dtype not in _DTYPES:
            raise self._wrong_result(step, "uint8 or floating images", images.dtype)
        return images

    def _wrong_result(self, step: object, expected: str, found: object) -> ValueError:
        name = getattr(step, "__name__", type(step).__name__)
        return ValueError(f"{self._name}: {name} must return {expected}, but it returned {found}.")


def _merge(views: list[Columns]) -> dict[str, Any]:
    """Return a tuple of every column, one for each view; or the column if all views share it."""
    merged = {}
    for name, column in views[0].items():
        values = tuple(view[name] for view in views)
        merged[name] = column if all(value is column for value in values) else values
    return merged
