"""A list of transforms, done in as few passes over memory as it allows."""

import copy
import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from memload import ranks
from memload.transforms.draws import Draws
from memload.transforms.fused import Fused, Plan, fits, kind
from memload.transforms.transform import Columns, Transform, is_integer

#: Of so many samples plans are made at once: of 256 in 98 µs, of 2,048 in 180, of 32,768 in 1,560.
_PLANNED = 2048
#: What images may be of.
_DTYPES = (torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _untraced(method: Callable[..., Any]) -> Callable[..., Any]:
    """Have a compiled function step out for the time of a call: NumPy's part is not for tracing."""

    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(method)(*args, **options)  # type: ignore[no-untyped-call]  # torch's
        return method(*args, **options)

    return call


class Compose(Transform):
    """Transforms one after another.

    Neighbours are fused where they can be: crops, resizes, flips, Normalize and ToDtype are one pass over memory, a
    Triton kernel on CUDA. The others, and any callable or module that takes the images and returns them, follow in
    order, each by itself; `repr` shows which. What is called from the list draws as it does elsewhere.

    ``points`` names columns ``(N, K, 2)`` of x and y, in pixels whose centres are the integers, which follow every
    crop, resize and flip. With ``views=2`` the list is gone through twice, with different draws: images is then a
    tuple of two, and so is every column that came out differently. ``memory_format`` is that of the images
    returned.
    """

    def __init__(
        self,
        transforms: Sequence[Callable[..., Any]],
        *more: object,
        points: Sequence[str] = (),
        views: int = 1,
        memory_format: torch.memory_format = torch.channels_last,
    ) -> None:
        if more:
            raise TypeError(
                f"Compose: transforms: expected one list, found {1 + len(more)} arguments. Write [...]"
            )
        if isinstance(points, str) or not isinstance(points, Sequence):
            raise self._wrong("points", "names of columns", repr(points))
        if not is_integer(views) or views < 1:
            raise self._wrong("views", "an integer of at least 1", repr(views))
        if memory_format not in (torch.channels_last, torch.contiguous_format):
            raise self._wrong(
                "memory_format",
                "torch.channels_last or torch.contiguous_format",
                repr(memory_format),
            )
        self.transforms, self.points, self.views = (
            tuple(_flat(transforms, memory_format)),
            tuple(points),
            views,
        )
        self.memory_format = memory_format
        self._steps = _grouped(self.transforms)
        self._seen = 0

    def __repr__(self) -> str:
        options = [f"points={self.points}"] * bool(self.points) + [f"views={self.views}"] * (
            self.views > 1
        )
        lines = [repr(step).replace("\n", "\n    ") for _, step in self._steps] + options
        return "Compose(" + "".join(f"\n    {line}," for line in lines) + "\n)"

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_seen": 0}  # a copy is a new object

    def bind(
        self,
        *,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        num_classes: int | None = None,
    ) -> "Compose":
        """Return this list with what its transforms leave to the data set filled in."""
        bound = [
            step.bind(mean=mean, std=std, num_classes=num_classes)
            if isinstance(step, Transform)
            else step
            for step in self.transforms
        ]
        made = copy.copy(self)  # of its own class
        made.transforms, made._steps = tuple(bound), _grouped(bound)
        return made

    @_untraced
    def __call__(
        self,
        images: Tensor,
        columns: Mapping[str, Tensor] | None = None,
        *,
        samples: Any = None,
        seed: int = 0,
        epoch: int = 0,
    ) -> Any:
        """See `Transform`."""
        if samples is None:
            count = len(images) if isinstance(images, Tensor) and images.ndim else 0
            samples = np.arange(self._seen, self._seen + count)
            self._seen += count
            seed = int(seed) + here() if is_integer(seed) else seed
        return self.prepare(samples, seed=seed, epoch=epoch)(images, columns)

    @_untraced
    def prepare(self, samples: Any, *, seed: int = 0, epoch: int = 0) -> "Prepared":
        """See `Transform`."""
        numbers = samples.cpu().numpy() if isinstance(samples, Tensor) else np.asarray(samples)
        if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
            raise self._wrong("samples", "integers (N,)", f"{numbers.dtype} {numbers.shape}")
        for name, value in (("seed", seed), ("epoch", epoch)):
            if not is_integer(value):
                raise self._wrong(name, "an integer", repr(value))
        return Prepared(self, numbers.astype(np.int64), int(seed), int(epoch))


class Prepared:
    """A list of transforms with its draws for a stretch of samples, some of whose images each call is given.

    What the fused steps need is computed, and uploaded, for 2,048 samples or more at a time, which for `train` takes
    the host 22 µs of 256 samples instead of 100. Several threads may call it; on CUDA, all with the same stream.
    """

    def __init__(self, compose: Compose, samples: np.ndarray, seed: int, epoch: int) -> None:
        self._compose, self._samples, self._seed, self._epoch = compose, samples, seed, epoch
        self._plans: dict[tuple[int, int], tuple[Any, int, Plan]] = {}
        self._planning = threading.Lock()

    @_untraced
    def __call__(
        self,
        images: Tensor,
        columns: Mapping[str, Tensor] | None = None,
        start: int = 0,
        stop: int | None = None,
    ) -> Any:
        """Transform the images of ``samples[start:stop]``."""
        if not (is_integer(start) and (stop is None or is_integer(stop)) and start >= 0):
            raise self._compose._wrong(
                "start and stop", "integers of at least 0", f"{start!r} and {stop!r}"
            )
        given = self._checked(
            images, {} if columns is None else columns, len(self._samples[start:stop])
        )
        views = [self._view(images, given, start, view) for view in range(self._compose.views)]
        if len(views) == 1:
            return views[0][0] if columns is None else views[0]
        pictures = tuple(view[0] for view in views)
        if columns is None:
            return pictures
        values = {name: tuple(view[1][name] for view in views) for name in views[0][1]}
        return pictures, {
            n: v[0] if all(one is v[0] for one in v) else v for n, v in values.items()
        }

    def _view(
        self, images: Tensor, columns: Columns, start: int, view: int
    ) -> tuple[Tensor, Columns]:
        given, stop = images, start + images.shape[0]
        for position, step in self._compose._steps:
            if isinstance(step, Fused):
                plan, first = self._plan(step, position, images, start, view)
                images, columns = step(images, columns, plan, start - first, self._compose.points)
            elif isinstance(step, Transform):
                made = step.apply(images, columns, self._draws(start, stop, position, view))
                if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[1], dict):
                    raise self._returns(step, "(images, columns)", made)
                images, columns = self._checked_images(made[0], step, stop - start), made[1]
                for name in self._compose.points:
                    if name not in columns:
                        found = ", ".join(sorted(columns)) or "none"
                        raise self._wrong(step, f"columns with {name!r}, which points names", found)
            else:
                if images is given and self._compose.views > 1:
                    images = (
                        images.clone()
                    )  # which a step of the user's may change, before the next view sees them
                images = self._checked_images(step(images), step, stop - start)
        return images.contiguous(memory_format=self._compose.memory_format), columns

    def _plan(
        self, step: Fused, position: int, images: Tensor, start: int, view: int
    ) -> tuple[Plan, int]:
        """Return a plan that holds for these images, and its first sample's place in the stretch."""
        kind = images.shape[1:], images.dtype
        with self._planning:
            known, first, plan = self._plans.get((position, view), (None, 0, None))
            stop = start + images.shape[0]  # len() of a tensor takes 1.5 µs
            if plan is None or known != kind or not first <= start <= stop <= first + len(plan):
                first, stop = start, min(max(stop, start + _PLANNED), len(self._samples))
                plan = step.plan(
                    images,
                    stop - first,
                    lambda place: self._draws(first, stop, place, view),
                    self._compose.memory_format,
                )
                self._plans[position, view] = kind, first, plan
            return plan, first

    def _draws(self, start: int, stop: int, position: int, view: int) -> Draws:
        return Draws(self._samples[start:stop], self._seed, self._epoch, position, view)

    def _checked(self, images: Any, columns: Any, count: int) -> Columns:
        wrong, points = self._compose._wrong, self._compose.points
        if not isinstance(images, Tensor) or images.ndim != 4:
            found = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
            raise wrong(
                "images", "a tensor (N, C, H, W)", found, ". A Loader gives it whole batches"
            )
        first = self._compose.transforms[:1]
        given_to_ours = not first or isinstance(
            first[0], Transform
        )  # one of the user's may take what it likes
        if given_to_ours and images.dtype not in _DTYPES:
            advice = ". Begin the list with what makes floats of them: lambda images: images.float() / 65535"
            raise wrong(
                "images",
                "uint8 or a floating dtype",
                images.dtype,
                advice if images.dtype == torch.uint16 else "",
            )
        if 0 in images.shape[1:]:
            raise wrong("images", "pixels", tuple(images.shape))
        # no picture is so narrow, and has so many channels
        if given_to_ours and min(images.shape[1:3]) > 16 and images.shape[3] in (1, 3, 4):
            raise wrong(
                "images",
                "(N, C, H, W)",
                f"{tuple(images.shape)}, channels last",
                ". Write images.permute(0, 3, 1, 2)",
            )
        if not isinstance(columns, Mapping):
            raise TypeError(
                str(
                    wrong(
                        "columns", "tensors by name", type(columns).__name__, ". Write {'label': …}"
                    )
                )
            )
        for name, value in columns.items():
            if not isinstance(value, Tensor) or not value.ndim or len(value) != len(images):
                found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise wrong(f"columns: {name!r}", f"a tensor ({len(images)}, …)", found)
        if len(images) != count:
            raise wrong("samples", f"integers ({len(images)},)", f"({count},)")
        for name in points:
            value = columns.get(name)
            if (
                value is None
                or value.shape[0] != len(images)
                or value.ndim != 3
                or value.shape[2] != 2
            ):
                found = "none" if value is None else tuple(value.shape)
                raise wrong(f"points: column {name!r}", f"a tensor ({len(images)}, K, 2)", found)
        return {
            name: value.float() if name in points and not value.is_floating_point() else value
            for name, value in columns.items()
        }

    def _checked_images(self, images: Any, step: object, count: int) -> Tensor:
        if not isinstance(images, Tensor) or images.ndim != 4 or len(images) != count:
            raise self._returns(step, f"images ({count}, C, H, W)", images)
        if images.dtype not in _DTYPES:
            raise self._returns(step, "uint8 or a floating dtype", images.dtype)
        return images

    def _returns(self, step: object, expected: str, made: Any) -> ValueError:
        found: Any = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
        if made is None or isinstance(made, torch.dtype):
            found = made
        return self._wrong(step, expected, found)

    def _wrong(self, step: object, expected: str, found: Any) -> ValueError:
        return self._compose._wrong(
            f"{type(step).__name__} in its list", f"to return {expected}", found
        )


def here() -> int:
    """Return what is this process's own of a seed: workers of a DataLoader, and ranks, count the same samples."""
    worker = get_worker_info()
    return ((0 if worker is None else worker.seed + 1) << 64) + (ranks.rank() << 128)


def _flat(transforms: Any, memory_format: torch.memory_format) -> list[Any]:
    if not isinstance(transforms, Iterable):
        raise TypeError(
            f"Compose: transforms: expected a list of callables, found {transforms!r}. Write [...]"
        )
    flat: list[Any] = []
    for step in transforms:
        if isinstance(step, Compose):
            if (
                step.points
                or step.views != 1
                or step.memory_format not in (torch.channels_last, memory_format)
            ):
                raise ValueError(
                    "Compose: transforms: expected points, views and memory_format at the outermost, found them inside"
                )
            flat += step.transforms
        elif getattr(step, "__module__", "") == "memload.transforms.recipes":
            raise TypeError(
                f"Compose: transforms: expected callables of images, found {step.__name__} itself. Call it"
            )
        elif callable(step) and not isinstance(step, type):
            flat.append(step)
        else:
            advice = f". Write {step.__name__}()" if isinstance(step, type) else ""
            raise TypeError(f"Compose: transforms: expected callables, found {step!r}{advice}")
    return flat


def _grouped(transforms: Sequence[Any]) -> list[tuple[int, Any]]:
    """Return (position, step): steps by themselves, and runs that can be fused, at the position of their first."""
    steps: list[tuple[int, Any]] = []
    run: list[tuple[int, Any]] = []
    for position, step in enumerate(transforms):
        name = kind(step)
        if run and not fits([kind(other) for _, other in run], name):
            steps.append((run[0][0], Fused(run)))
            run = []
        if name:
            run.append((position, step))
        else:
            steps.append((position, step))
    return [*steps, (run[0][0], Fused(run))] if run else steps
