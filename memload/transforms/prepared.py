"""A list of steps, ready to be applied to parts of a chunk of samples."""

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memload.transforms.arguments import describe, integer, wrong
from memload.transforms.batch import Batch, in_layout
from memload.transforms.draws import Drawn, Draws
from memload.transforms.following import Followers, TensorsByName

#: (position, step) as `passes.group` returns them.
Steps = Sequence[tuple[int, Any]]
#: Numbers are drawn for this many samples at once. RandomResizedCrop and TrivialAugmentWide then
#: take 75 µs of the host's time for each 256 samples. With 2,048 they take 1.7 times as long, and
#: with 512 four times.
_SAMPLES_AT_ONCE = 8192
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
    each view. For ``followers`` and ``memory_format`` see `Compose`.

    Random numbers are drawn at the first call that needs them, for 8,192 samples or more at a time,
    which takes less of the host's time. Several threads may call it; on CUDA, all with the same
    stream.
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
    ) -> None:
        numbers = samples.cpu().numpy() if isinstance(samples, Tensor) else np.asarray(samples)
        if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
            raise wrong(name, "samples", "integers (N,)", f"{numbers.dtype} {numbers.shape}")
        self._name, self._steps_of_views = name, steps_of_views
        self._followers, self._memory_format = followers, memory_format
        seed, epoch = integer(name, "seed", seed), integer(name, "epoch", epoch)
        self._draws = Draws(numbers.astype(np.int64), seed, epoch)
        #: By position and view: shape, dtype and device of the images, first sample, stop, drawn.
        self._drawn: dict[tuple[int, int], tuple[Any, int, int, Drawn]] = {}
        self._drawing = threading.Lock()

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
        checked = self._check(images, given, len(self._draws.samples[start:stop]))
        views = []
        for view, steps in enumerate(self._steps_of_views):
            batch = Batch(images, checked, self._followers, self._memory_format)
            if len(self._steps_of_views) > 1 and steps and not is_transform(steps[0][1]):
                # A function may change them in place, but the next view must not see that.
                batch = batch.with_images(images.clone())
            batch = run(steps, batch, functools.partial(self._drawn_for, start, view))
            views.append(batch.with_images(in_layout(batch.images, self._memory_format)))
        if len(views) == 1:
            return views[0].images if columns is None else (views[0].images, views[0].columns)
        all_images = tuple(view.images for view in views)
        if columns is None:
            return all_images
        return all_images, self._merge([view.columns for view in views])

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
        is_checked = all(is_transform(steps[0][1]) for steps in self._steps_of_views if steps)
        if is_checked and images.dtype not in _DTYPES:
            advice = "Begin the list with a function that makes floats of them."
            raise wrong(self._name, "images", "uint8 or floating", images.dtype, advice)
        # More than 16 channels and a width of 1, 3 or 4: these are channels last.
        if is_checked and min(shape[1:3]) > 16 and shape[3] in (1, 3, 4):
            advice = "Write images.permute(0, 3, 1, 2)."
            raise wrong(self._name, "images", "(N, C, H, W)", f"{shape}, channels last", advice)
        if shape[0] != count:
            expected = f"{count}, one for each sample"
            raise wrong(self._name, "the number of images", expected, shape[0])
        if not isinstance(columns, Mapping):
            advice = "Write {'label': labels}."
            raise wrong(self._name, "columns", "tensors by name", describe(columns), advice)
        for key, column in columns.items():
            if not isinstance(column, Tensor) or column.shape[:1] != (count,):
                expected = f"a tensor ({count}, …)"
                raise wrong(self._name, f"columns[{key!r}]", expected, describe(column))
        at_once = images if is_checked else None
        return {**columns, **self._followers.check(self._name, columns, at_once, count)}

    def _merge(self, views: list[TensorsByName]) -> dict[str, Any]:
        """Return a tuple of every column, one for each view; or the column if all views share it.

        Whatever is drawn, what may move with the images is a tuple.
        """
        steps = (step for steps in self._steps_of_views for _, step in steps)
        moves_pixels = any(getattr(step, "moves_pixels", False) for step in steps)
        following = self._followers.names if moves_pixels else ()
        merged = {}
        for name, column in views[0].items():
            values = tuple(view[name] for view in views)
            is_shared = name not in following and all(value is column for value in values)
            merged[name] = column if is_shared else values
        return merged

    def _drawn_for(self, start: int, view: int, position: int, step: Any, images: Tensor) -> Drawn:
        """Return what a step draws for these images, of which the first is sample ``start``."""
        like = images.shape[1:], images.dtype, images.device
        stop = start + images.shape[0]  # len() of a tensor takes 1.5 µs
        with self._drawing:
            known = self._drawn.get((position, view))
            if known is None or not (known[0] == like and known[1] <= start and stop <= known[2]):
                samples = slice(start, max(stop, start + _SAMPLES_AT_ONCE))
                draws = Draws(
                    self._draws.samples[samples],
                    self._draws.seed,
                    self._draws.epoch,
                    position,
                    view,
                )
                known = like, start, start + len(draws), _draw(step, draws, images)
                self._drawn[position, view] = known
            return known[3].part(start - known[1], images.shape[0])


def run(steps: Steps, batch: Batch, drawn_for: Callable[[int, Any, Tensor], Drawn]) -> Batch:
    """Return a batch after steps.

    ``drawn_for(position, step, images)`` returns what a step draws for these images.
    """
    for position, step in steps:
        if not is_transform(step):
            result: Any = batch.with_images(step(batch.images))
            batch = _checked(step, result, batch)
        else:
            result = step.apply(batch, drawn_for(position, step, batch.images))
            batch = result if is_own(step) else _checked(step, result, batch)
    return batch


def run_once(steps: Steps, batch: Batch, draws: Draws) -> Batch:
    """Return a batch after steps of a list inside of another transform; see `Draws.inside`."""
    return run(
        steps,
        batch,
        lambda position, step, images: _draw(step, draws.at_position(position), images),
    )


@np.errstate(all="ignore")  # a weight of 0 is no error, whatever the user's ``np.seterr`` says
def _draw(step: Any, draws: Draws, images: Tensor) -> Drawn:
    return Drawn(step.draw(draws, images), images.device)


def is_transform(step: Any) -> bool:
    """Return whether a step has the verbs of a `Transform`. Others are functions of images."""
    return hasattr(step, "draw")


def is_own(step: Any) -> bool:
    """Return whether a step is memload's, and not the user's."""
    return type(step).__module__.startswith("memload.")


def _checked(step: Any, result: Any, before: Batch) -> Batch:
    """Return the batch that a step of the user's returned, once it is checked."""
    owner, count = getattr(step, "__name__", type(step).__name__), before.images.shape[0]
    if not isinstance(result, Batch):
        raise wrong(owner, "what apply returns", "a Batch", describe(result))
    images: Any = result.images
    is_batch = isinstance(images, Tensor) and images.ndim == 4 and images.shape[0] == count
    if not is_batch or images.dtype not in _DTYPES:
        expected = f"uint8 or floating images ({count}, C, H, W)"
        raise wrong(owner, "what it returns", expected, describe(images))
    checked = result.followers.check(owner, result.columns, images, count)
    return result._replace(columns={**result.columns, **checked})
