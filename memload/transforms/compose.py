"""A list of transforms, done in as few passes over memory as it allows."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memload.transforms.draws import Draws
from memload.transforms.fused import Fused, fits, kind
from memload.transforms.transform import Columns, Transform


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
        *,
        points: Sequence[str] = (),
        views: int = 1,
        memory_format: torch.memory_format = torch.channels_last,
    ) -> None:
        if isinstance(points, str):
            raise self._wrong("points", "names of columns", repr(points))
        if not isinstance(views, int) or views < 1:
            raise self._wrong("views", "an integer of at least 1", repr(views))
        self.transforms, self.points, self.views = tuple(_flat(transforms)), tuple(points), views
        self.memory_format = memory_format
        self._steps = _grouped(self.transforms)
        self._seen = 0

    def __repr__(self) -> str:
        options = [f"points={self.points}"] * bool(self.points) + [f"views={self.views}"] * (self.views > 1)
        lines = [repr(step).replace("\n", "\n    ") for _, step in self._steps] + options
        return "Compose(" + "".join(f"\n    {line}," for line in lines) + "\n)"

    def bind(
        self,
        *,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        num_classes: int | None = None,
    ) -> "Compose":
        """Return this list with what its transforms leave to the data set filled in."""
        bound = [
            step.bind(mean=mean, std=std, num_classes=num_classes) if isinstance(step, Transform) else step
            for step in self.transforms
        ]
        return Compose(bound, points=self.points, views=self.views, memory_format=self.memory_format)

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
        if torch.compiler.is_compiling():  # a compiled function steps out here: NumPy's part is not for tracing
            return torch.compiler.disable(self._run)(  # type: ignore[no-untyped-call]
                images, columns, samples, seed, epoch
            )
        return self._run(images, columns, samples, seed, epoch)

    def _run(self, images: Tensor, columns: Mapping[str, Tensor] | None, samples: Any, seed: int, epoch: int) -> Any:
        given = self._checked(images, columns or {})
        if samples is None:
            samples = np.arange(self._seen, self._seen + len(images))
            self._seen += len(images)
        numbers = self._numbers(samples, len(images))
        views = [self._view(images, given, functools.partial(Draws, numbers, seed, epoch, view=view))
                 for view in range(self.views)]  # fmt: skip
        if self.views == 1:
            return views[0][0] if columns is None else views[0]
        pictures = tuple(view[0] for view in views)
        if columns is None:
            return pictures
        values = {name: tuple(view[1][name] for view in views) for name in given}
        return pictures, {n: v[0] if all(one is v[0] for one in v) else v for n, v in values.items()}

    def _view(self, images: Tensor, columns: Columns, draws: Callable[..., Draws]) -> tuple[Tensor, Columns]:
        for position, step in self._steps:
            if isinstance(step, Fused):
                images, columns = step(images, columns, draws, self.points, self.memory_format)
            elif isinstance(step, Transform):
                images, columns = step.apply(images, columns, draws(position))
            else:
                images = self._returned(step(images), step, len(images))
        return images.contiguous(memory_format=self.memory_format), columns

    def _checked(self, images: Any, columns: Mapping[str, Any]) -> Columns:
        if not isinstance(images, Tensor) or images.ndim != 4:
            found = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
            raise self._wrong("images", "a tensor (N, C, H, W)", found)
        if images.dtype != torch.uint8 and not images.is_floating_point():
            raise self._wrong("images", "uint8 or a floating dtype", images.dtype)
        for name in self.points:
            points = columns.get(name)
            if points is None or points.shape[0] != len(images) or points.ndim != 3 or points.shape[2] != 2:
                found = "none" if points is None else tuple(points.shape)
                raise self._wrong(f"points: column {name!r}", f"a tensor ({len(images)}, K, 2)", found)
        return {
            name: value.float() if name in self.points and not value.is_floating_point() else value
            for name, value in columns.items()
        }

    def _numbers(self, samples: Any, count: int) -> np.ndarray:
        numbers = samples.cpu().numpy() if isinstance(samples, Tensor) else np.asarray(samples)
        if numbers.shape != (count,) or numbers.dtype.kind not in "iu":
            raise self._wrong("samples", f"integers ({count},)", f"{numbers.dtype} {numbers.shape}")
        return numbers.astype(np.int64, copy=False)

    def _returned(self, images: Any, step: object, count: int) -> Tensor:
        if not isinstance(images, Tensor) or images.ndim != 4 or len(images) != count:
            found = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
            raise self._wrong(f"{type(step).__name__} in its list", f"to return images ({count}, C, H, W)", found)
        return images


def _flat(transforms: Sequence[Any]) -> list[Any]:
    flat: list[Any] = []
    for step in transforms:
        if isinstance(step, Compose):
            if step.points or step.views != 1:
                raise ValueError("Compose: transforms: expected points and views at the outermost, found them inside")
            flat += step.transforms
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
