"""A list of steps, ready to be applied to parts of a chunk of samples."""

import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memload.transforms.arguments import describe, integer, wrong
from memload.transforms.batch import Batch
from memload.transforms.draws import Draws
from memload.transforms.following import Followers, TensorsByName
from memload.transforms.fused import PlannedSteps
from memload.transforms.options import Options, Steps, apply_options

#: Plans are made for this many samples at once. RandomResizedCrop and TrivialAugmentWide then take
#: 75 µs of the host's time for each 256 samples. In plans of 2,048 they take 1.7 times as long, and
#: of 512 four times.
_SAMPLES_PER_PLAN = 8192
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
    """Lists of steps for a chunk of samples. Each call transforms a part of them.

    ``name`` is the transform that the user called, for messages. ``steps_of_views`` has a list for
    each view, of (position, step) as `group` returns them. For ``followers`` and ``memory_format``
    see `Compose`. Positions of steps inside of another transform begin with ``inside_of``.

    Random numbers are drawn at the first call that needs them. `PlannedSteps` are planned for 8,192
    samples or more at a time, which takes less of the host's time. Several threads may call it; on
    CUDA, all with the same stream.
    """

    def __init__(
        self,
        name: str,
        steps_of_views: Sequence[Steps],
        samples: Any,
        seed: int,
        epoch: int,
        *,
        followers: Followers = Followers(),  # noqa: B008  # it is frozen
        memory_format: torch.memory_format = torch.channels_last,
        inside_of: str = "",
    ) -> None:
        numbers = samples.cpu().numpy() if isinstance(samples, Tensor) else np.asarray(samples)
        if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
            raise wrong(name, "samples", "integers (N,)", f"{numbers.dtype} {numbers.shape}")
        self._name, self._steps_of_views = name, steps_of_views
        self._followers, self._memory_format = followers, memory_format
        self._samples = numbers.astype(np.int64)
        self._seed = integer(name, "seed", seed)
        self._epoch = integer(name, "epoch", epoch)
        self._inside_of = inside_of
        #: By position and view: shape and dtype of the images, first sample, stop, plan.
        self._plans: dict[tuple[int, int], tuple[Any, int, int, Any]] = {}
        self._planning = threading.Lock()

    @not_compiled
    def __call__(
        self,
        images: Tensor,
        columns: Mapping[str, Tensor] | None = None,
        start: int = 0,
        stop: int | None = None,
    ) -> Any:
        """Return the transformed images of ``samples[start:stop]``; see `Transform`.

        ``start`` and ``stop`` are at least 0.
        """
        given = {} if columns is None else columns
        checked = self._check(images, given, len(self._samples[start:stop]))
        batch = Batch.of(images, checked, self._followers)
        views = [
            self._run(steps, batch, start, view).laid_out(self._memory_format)
            for view, steps in enumerate(self._steps_of_views)
        ]
        if len(views) == 1:
            return views[0].images if columns is None else (views[0].images, views[0].columns)
        all_images = tuple(view.images for view in views)
        return all_images if columns is None else (all_images, _merge([v.columns for v in views]))

    def _check(self, images: Any, columns: Any, count: int) -> TensorsByName:
        """Check what ``count`` samples are given. Return the columns; points, boxes as floats."""
        if not isinstance(images, Tensor) or images.ndim != 4 or 0 in images.shape[1:]:
            advice = (
                "It is for whole batches: give it to Loader(transform=…), or behind a DataLoader "
                "to CudaPrefetcher(transform=…), instead of a data set."
            )
            raise wrong(self._name, "images", "a tensor (N, C, H, W)", describe(images), advice)
        shape = tuple(images.shape)
        # A callable of the user's that comes first may take any dtype and layout.
        first_steps = [steps[0][1] for steps in self._steps_of_views if steps]
        is_ours = all(isinstance(step, PlannedSteps) or _is_transform(step) for step in first_steps)
        if is_ours and images.dtype not in _DTYPES:
            advice = "Begin the list with a function that makes floats of them."
            raise wrong(self._name, "images", "uint8 or floating", images.dtype, advice)
        # More than 16 channels and a width of 1, 3 or 4: these are channels last.
        if is_ours and min(shape[1:3]) > 16 and shape[3] in (1, 3, 4):
            advice = "Write images.permute(0, 3, 1, 2)."
            raise wrong(self._name, "images", "(N, C, H, W)", f"{shape}, channels last", advice)
        if shape[0] != count:
            raise wrong(
                self._name, "the number of images", f"{count}, one for each sample", shape[0]
            )
        if not isinstance(columns, Mapping):
            advice = "Write {'label': labels}."
            raise wrong(self._name, "columns", "tensors by name", describe(columns), advice)
        checked = dict(columns)
        for key, column in columns.items():
            if not isinstance(column, Tensor) or column.shape[:1] != (count,):
                expected = f"a tensor ({count}, …)"
                raise wrong(self._name, f"columns[{key!r}]", expected, describe(column))
        if self._followers:
            checked |= self._followers.check(self._name, columns, count)
            if is_ours:
                self._followers.check_sizes(self._name, columns, images)
        return checked

    def _run(self, steps: Steps, batch: Batch, start: int, view: int) -> Batch:
        """Return a batch, whose first sample is ``start``, after the steps of a view."""
        given = batch.images
        for position, step in steps:
            if isinstance(step, PlannedSteps):
                batch = self._run_planned(step, position, batch, start, view)
            elif _is_transform(step):
                samples = self._samples[start : start + given.shape[0]]
                batch = self._transform(step, batch, self._draws(samples, position, view))
            else:
                images = batch.images
                if images is given and len(self._steps_of_views) > 1:
                    # A function may change them in place, but the next view must not see that.
                    images = images.clone()
                batch = self._checked(step, step(images), batch.columns, batch)
        return batch

    def _run_planned(
        self, step: PlannedSteps, position: int, batch: Batch, start: int, view: int
    ) -> Batch:
        """Return a batch after steps that are planned."""
        plan, first_in_plan = self._plan(step, position, batch.images, start, view)
        if self._followers and step.moves_pixels:
            movement = step.movement(plan, first_in_plan, batch.images.shape[0])
            batch = batch.moved(self._followers, movement)
        images, columns = step.run(batch.images, batch.columns, plan, first_in_plan)
        return batch._replace(images=images, columns=columns)

    def _plan(
        self, step: PlannedSteps, position: int, images: Tensor, start: int, view: int
    ) -> tuple[Any, int]:
        """Return a plan that covers these images, and which of its samples is their first."""
        shape_and_dtype = images.shape[1:], images.dtype
        stop = start + images.shape[0]  # len() of a tensor takes 1.5 µs
        with self._planning:
            if (position, view) in self._plans:
                planned_for, plan_start, plan_stop, plan = self._plans[position, view]
                if plan_start <= start and stop <= plan_stop and planned_for == shape_and_dtype:
                    return plan, start - plan_start
            samples = self._samples[start : max(stop, start + _SAMPLES_PER_PLAN)]
            draws = functools.partial(self._draws, samples, view=view)
            plan = step.plan(images, len(samples), draws, self._memory_format)
            self._plans[position, view] = shape_and_dtype, start, start + len(samples), plan
            return plan, 0

    def _draws(self, samples: np.ndarray, position: int, view: int) -> Draws:
        """Return the random numbers of the step at a position."""
        where = f"{self._inside_of}{position}" if self._inside_of else position
        return Draws(samples, self._seed, self._epoch, where, view)

    def _transform(self, step: Any, batch: Batch, draws: Draws) -> Batch:
        """Return a batch after a `Transform` that is done by itself."""
        if isinstance(step, Options):
            return apply_options(step, batch, draws, self._inside)
        if self._followers and inspect.ismethod(getattr(step, "movement", None)):
            batch = batch.moved(self._followers, step.movement(batch.images, draws))
        result = step.apply(batch.images, batch.columns, draws)
        if not isinstance(result, tuple) or len(result) != 2:
            returned = f"what {_name(step)} returns"
            raise wrong(self._name, returned, "(images, columns)", describe(result))
        return self._checked(step, *result, batch)

    def _inside(self, steps: Steps, batch: Batch, draws: Draws, inside_of: str) -> Batch:
        """Return a batch after steps inside of a transform, whose random numbers are ``draws``."""
        prepared = Prepared(
            self._name,
            [steps],
            draws.samples,
            self._seed,
            self._epoch,
            followers=self._followers,
            memory_format=self._memory_format,
            inside_of=inside_of,
        )
        return prepared._run(steps, batch, 0, draws.view)

    def _checked(self, step: Any, images: Any, columns: TensorsByName, before: Batch) -> Batch:
        """Return the batch of images and columns that a step returned, once they are checked."""
        returned, count = f"what {_name(step)} returns", before.images.shape[0]
        for lost in self._followers.missing(columns):
            expected = f"images and columns with {lost}"
            raise wrong(self._name, returned, expected, ", ".join(columns) or "no columns")
        is_batch = isinstance(images, Tensor) and images.ndim == 4 and images.shape[0] == count
        if not is_batch or images.dtype not in _DTYPES:
            expected = f"uint8 or floating images ({count}, C, H, W)"
            raise wrong(self._name, returned, expected, describe(images))
        if self._followers:
            after = f" after {_name(step)}"
            columns = {**columns, **self._followers.check(self._name, columns, count, after)}
            self._followers.check_sizes(self._name, columns, images, after)
        return before.after(images, columns)


def _name(step: Any) -> str:
    """Return the name of a step for messages."""
    return getattr(step, "__name__", type(step).__name__)


def _is_transform(step: Any) -> bool:
    """Return whether a step is a `Transform`, which this module must not import."""
    return hasattr(step, "fuses_as")


def _merge(views: list[TensorsByName]) -> dict[str, Any]:
    """Return a tuple of every column, one for each view; or the column if all views share it."""
    merged = {}
    for name, column in views[0].items():
        values = tuple(view[name] for view in views)
        merged[name] = column if all(value is column for value in values) else values
    return merged
