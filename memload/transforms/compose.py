"""A list of transforms, done in as few passes over memory as possible."""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from memload.transforms.arguments import wrong
from memload.transforms.fused import group
from memload.transforms.prepared import Prepared
from memload.transforms.transform import Transform

#: The functions there return a Compose; they are no transforms.
_RECIPES = "memload.transforms.recipes"


class Compose(Transform):
    """Transforms one after another, like torchvision's ``v2.Compose``.

    Neighbours are fused where possible: crops, resizes, flips, Normalize and ToDtype take one pass
    over memory; on CUDA that is a Triton kernel. Other transforms follow in order, each by itself.
    So does any callable or module that takes images and returns images, such as
    ``torch.nn.AvgPool2d``. `repr` shows the passes. For how to call it see `Transform`.

    ``points`` names columns ``(N, K, 2)`` of x and y in pixels; pixel centres have integer
    coordinates. Points follow every crop, resize and flip.

    With ``views=2`` the list is applied twice with different random numbers. Then images are a
    tuple of two, and so is each column that differs between the views.

    ``memory_format`` is that of the images returned: ``torch.channels_last`` or
    ``torch.contiguous_format``.

    >>> pretrain = Compose([RandomResizedCrop(224), RandomHorizontalFlip(), Normalize("imagenet")],
    ...                    points=["eyes"], views=2)
    >>> (one, other), columns = pretrain(images, {"eyes": eyes, "label": labels}, samples=samples)
    """

    def __init__(
        self,
        transforms: Sequence[Callable[..., Any]],
        *others: object,
        points: Sequence[str] = (),
        views: int = 1,
        memory_format: torch.memory_format = torch.channels_last,
    ) -> None:
        if others:
            given = 1 + len(others)
            raise TypeError(f"Compose takes one list, not {given} arguments. Write Compose([...]).")
        if isinstance(points, str) or not isinstance(points, Sequence):
            raise wrong(self, "points", "a list of column names", repr(points))
        if not isinstance(views, int | np.integer) or views < 1:
            raise wrong(self, "views", "an integer of at least 1", repr(views))
        if memory_format not in (torch.channels_last, torch.contiguous_format):
            formats = "torch.channels_last or torch.contiguous_format"
            raise wrong(self, "memory_format", formats, repr(memory_format))
        self.transforms = tuple(_flatten(transforms, memory_format))
        self.points = tuple(points)
        self.views = views
        self.memory_format = memory_format
        self._steps = group(self.transforms)

    def __repr__(self) -> str:
        lines = [repr(step).replace("\n", "\n    ") for _, step in self._steps]
        if self.points:
            lines.append(f"points={self.points}")
        if self.views > 1:
            lines.append(f"views={self.views}")
        return "Compose(" + "".join(f"\n    {line}," for line in lines) + "\n)"

    def prepare(self, samples: Any, *, seed: int = 0, epoch: int = 0) -> Prepared:
        """See `Transform.prepare`."""
        return Prepared(
            type(self).__name__,
            self._steps,
            samples,
            seed,
            epoch,
            points=self.points,
            views=self.views,
            memory_format=self.memory_format,
        )

    def bind(self, **statistics: Any) -> "Compose":
        """Return the list with what its transforms leave to the data set filled in."""
        bound = copy.copy(self)
        bound.transforms = tuple(
            step.bind(**statistics) if isinstance(step, Transform) else step
            for step in self.transforms
        )
        bound._steps = group(bound.transforms)
        return bound


def _flatten(transforms: Any, memory_format: torch.memory_format) -> list[Any]:
    """Return a list of transforms without lists inside."""
    if not isinstance(transforms, Iterable):
        raise TypeError(f"Compose takes a list of transforms, not {transforms!r}. Write [...].")
    flat: list[Any] = []
    for step in transforms:
        if isinstance(step, Compose):
            formats = (torch.channels_last, memory_format)
            if step.points or step.views != 1 or step.memory_format not in formats:
                raise ValueError(
                    "A Compose inside another has points, views or memory_format. "
                    "Give them to the outer one."
                )
            flat += step.transforms
        elif isinstance(step, type) or getattr(step, "__module__", "") == _RECIPES:
            raise TypeError(f"Compose got {step.__name__} itself. Write {step.__name__}(...).")
        elif callable(step):
            flat.append(step)
        else:
            expected = "a transform, such as Resize(224), nor a function of images"
            raise TypeError(f"Compose got {step!r}, which is neither {expected}.")
    return flat
