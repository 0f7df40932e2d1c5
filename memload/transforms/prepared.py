"""A list of steps, ready to be applied to parts of a chunk of samples."""

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from memload.transforms.arguments import describe, integer, wrong
from memload.transforms.draws import Draws
from memload.transforms.following import (
    Followers,
    MovedBoxes,
    TensorsByName,
    as_signed,
)
from memload.transforms.fused import Together
from memload.transforms.some import in_layout
from memload.upload import upload

#: Plans are made for this many samples at once. TrivialAugmentWide then takes 49 µs of the host's
#: time for each 256 samples. In plans of 2,048 it takes 76 µs, of 512 it takes 168 µs, and of
#: 16,384, which do not fit in a core's cache, 60 µs.
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


class Option(NamedTuple):
    """Steps for some samples of a batch, as a transform chooses that has others inside."""

    number: int
    #: (position, step) as `group` returns them.
    steps: Sequence[tuple[int, Any]]
    #: The samples' places in the batch, int64 ``(n,)``.
    places: np.ndarray


class Prepared:
    """Lists of steps for a chunk of samples. Each call transforms a part of them.

    ``name`` is the transform that the user called, for messages. ``steps_of_views`` has a list for
    each view, of (position, step) as `group` returns them. For ``followers`` and ``memory_format``
    see `Compose`. Steps inside of another transform have its position in ``inside_of``, and belong
    to the view ``first_view``.

    Random numbers are drawn at the first call that needs them. Steps that are done together are
    planned for 8,192 samples or more at a time, which takes less of the host's time. Several
    threads may call it; on CUDA, all with the same stream.
    """

    def __init__(
        self,
        name: str,
        steps_of_views: Sequence[Sequence[tuple[int, Any]]],
        samples: Any,
        seed: int,
        epoch: int,
        *,
        followers: Followers = Followers(),  # noqa: B008  # it is frozen
        memory_format: torch.memory_format = torch.channels_last,
        inside_of: str = "",
        first_view: int = 0,
    ) -> None:
        numbers = samples.cpu().numpy() if isinstance(samples, Tensor) else np.asarray(samples)
        if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
            raise wrong(name, "samples", "integers (N,)", f"{numbers.dtype} {numbers.shape}")
        self._name, self._steps_of_views = name, steps_of_views
        self._followers, self._memory_format = followers, memory_format
        self._samples = numbers.astype(np.int64)
        self._seed = integer(name, "seed", seed)
        self._epoch = integer(name, "epoch", epoch)
        self._inside_of, self._first_view = inside_of, first_view
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
        views = [
            self._view(steps, images, checked, start, self._first_view + number)
            for number, steps in enumerate(self._steps_of_views)
        ]
        if len(views) == 1:
            return views[0] if columns is not None else views[0][0]
        all_images = tuple(images for images, _ in views)
        return all_images if columns is None else (all_images, _merge([c for _, c in views]))

    def _check(self, images: Any, columns: Any, count: int) -> TensorsByName:
        """Check what ``count`` samples are given. Return the columns; points, boxes as floats."""
        if not isinstance(images, Tensor) or images.ndim != 4 or 0 in images.shape[1:]:
            advice = "A Loader passes whole batches."
            raise wrong(self._name, "images", "a tensor (N, C, H, W)", describe(images), advice)
        shape = tuple(images.shape)
        # A callable of the user's that comes first may take any dtype and layout.
        first_steps = [steps[0][1] for steps in self._steps_of_views if steps]
        is_ours = all(isinstance(step, Together) or _is_transform(step) for step in first_steps)
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

    def _view(
        self,
        steps: Sequence[tuple[int, Any]],
        images: Tensor,
        columns: TensorsByName,
        start: int,
        view: int,
    ) -> tuple[Tensor, TensorsByName]:
        """Return images and columns after all steps of a view."""
        original = images
        moved_boxes: dict[str, MovedBoxes] = {}
        for position, step in steps:
            if not isinstance(step, Together):
                if images is original and len(self._steps_of_views) > 1 and not _is_transform(step):
                    # A function may change them in place, but the next view must not see that.
                    images = images.clone()
                images, columns = self._apply(
                    step, position, images, columns, start, view, moved_boxes
                )
                continue
            plan, first_in_plan = self._plan(step, position, images, start, view)
            if self._followers and step.moves_pixels:
                movement = step.movement(plan, first_in_plan, images.shape[0])
                columns = self._followers.move(columns, movement, moved_boxes)
            images = step.run(images, plan, first_in_plan)
        return in_layout(images, self._memory_format), columns

    def _plan(
        self, step: Together, position: int, images: Tensor, start: int, view: int
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

    def _choose(
        self, step: Any, images: Tensor, columns: TensorsByName, draws: Draws
    ) -> tuple[Tensor, TensorsByName]:
        """Return images and columns after the steps that were drawn for each sample."""
        name, options = type(step).__name__, step.options(draws)
        mixing = {option.number: _mixers(option.steps) for option in options}
        for mixer in [mixer for mixers in mixing.values() for mixer in mixers][:1]:
            columns = mixer.unmixed(columns, len(images))
        changed, changed_columns = images.clone(), dict(columns)
        for option in options:
            # Partners may be samples for which another option was drawn.
            is_whole = bool(mixing[option.number]) or len(option.places) == len(images)
            places = np.arange(len(images)) if is_whole else option.places
            taken, put = upload(places, images.device), upload(option.places, images.device)
            part = Prepared(
                self._name,
                [option.steps],
                draws.samples[places],
                self._seed,
                self._epoch,
                followers=self._followers,
                memory_format=self._memory_format,
                inside_of=f"{draws.position}.{option.number}.",
                first_view=draws.view,
            )
            given = {
                key: as_signed(column)[taken.to(column.device)].view(column.dtype)
                for key, column in columns.items()
            }
            new, new_columns = part(images[taken], given)
            _put(f"what {name} chooses", changed, put, new[put] if is_whole else new)
            for key, column in new_columns.items():
                if column is not given[key]:
                    if changed_columns[key] is columns[key]:
                        changed_columns[key] = columns[key].clone()
                    where = put.to(column.device)
                    column = as_signed(column)[where].view(column.dtype) if is_whole else column
                    _put(
                        f"columns[{key!r}] of what {name} chooses",
                        changed_columns[key],
                        where,
                        column,
                    )
        return changed, changed_columns

    def _apply(
        self,
        step: Any,
        position: int,
        images: Tensor,
        columns: TensorsByName,
        start: int,
        view: int,
        moved_boxes: dict[str, MovedBoxes],
    ) -> tuple[Tensor, TensorsByName]:
        """Return what a step returns that cannot be fused."""
        name, count = getattr(step, "__name__", type(step).__name__), images.shape[0]
        returned = f"what {name} returns"
        if _is_transform(step):
            draws = self._draws(self._samples[start : start + count], position, view)
            if self._followers and hasattr(step, "movement"):
                movement = step.movement(images, draws)
                columns = self._followers.move(columns, movement, moved_boxes)
            if hasattr(step, "options"):
                result = self._choose(step, images, columns, draws)
            else:
                result = step.apply(images, columns, draws)
            if not isinstance(result, tuple) or len(result) != 2:
                raise wrong(self._name, returned, "(images, columns)", describe(result))
            images, columns = result
            for lost in self._followers.missing(columns):
                expected = f"images and columns with {lost}"
                raise wrong(self._name, returned, expected, ", ".join(columns) or "no columns")
        else:
            images = step(images)
        is_batch = isinstance(images, Tensor) and images.ndim == 4 and images.shape[0] == count
        if not is_batch or images.dtype not in _DTYPES:
            expected = f"uint8 or floating images ({count}, C, H, W)"
            raise wrong(self._name, returned, expected, describe(images))
        if self._followers:
            after = f" after {name}"
            columns = {**columns, **self._followers.check(self._name, columns, count, after)}
            self._followers.check_sizes(self._name, columns, images, after)
        return images, columns


def _mixers(steps: Sequence[tuple[int, Any]]) -> list[Any]:
    """Return the steps that mix samples."""
    return [step for _, step in steps if hasattr(step, "mixes_samples")]


def _put(subject: str, target: Tensor, places: Tensor, values: Tensor) -> None:
    """Put values at places of a tensor. Raises ValueError if they are not of the same kind."""
    if values.shape[1:] != target.shape[1:] or values.dtype != target.dtype:
        expected = f"as before, {target.dtype} {tuple(target.shape[1:])} for each sample"
        raise wrong(
            subject, "shape and dtype", expected, f"{values.dtype} {tuple(values.shape[1:])}"
        )
    as_signed(target)[places] = as_signed(values)


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
