"""RandomApply and RandomChoice: other transforms, for some samples of a batch.

choose(draws) ─▶ an option ─▶ where all options are operations: operations_transform.FusedOperations
                 per sample ─▶ where all options mix samples: options.PlannedMixing
                            ─▶ others: options.apply_options
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import numpy as np
from torch import Tensor

from memload.transforms.arguments import is_finite, share, shown, wrong
from memload.transforms.compose import Compose
from memload.transforms.draws import Draws
from memload.transforms.fused import PlannedSteps, group
from memload.transforms.operations_plan import OperationStep
from memload.transforms.operations_transform import FusedOperations
from memload.transforms.options import Mixture, Options, PlannedMixing
from memload.transforms.transform import Transform


class Choosing(Transform, Options):
    """The base of transforms that choose between lists of others, the options.

    Subclasses define `Options.choose`. `options.apply_options` does the rest. Where all options are
    operations, or all mix samples, they are planned instead.
    """

    def __init__(self, options: Sequence[Compose]) -> None:
        self._set_options(options)
        steps = [step for option in options for step in option.transforms]
        fusions = {getattr(step, "fuses_as", "no") for step in steps}
        self.fuses_as = "operations" if fusions <= {"operations"} else "no"
        if fusions == {"mixing"} and all(len(option.transforms) <= 1 for option in options):
            self.fuses_as = "mixing"

    def _set_options(self, options: Sequence[Compose]) -> None:
        self._options = tuple(options)
        self.steps_of_options = [group(option.transforms) for option in options]

    @property
    def moves_pixels(self) -> bool:
        """See `Transform.moves_pixels`."""
        return any(option.moves_pixels for option in self._options)

    def bind(self, **facts: Any) -> Transform:
        """See `Transform.bind`."""
        bound = copy.copy(self)
        bound._followers = super().bind(**facts)._followers
        bound._set_options([option.bind(**facts) for option in self._options])
        return bound

    def check(self, images: Tensor) -> None:
        """See `Options.check`. Steps behind others may get different images."""
        for option in self._options:
            for step in takewhile(_has_check, option.transforms):
                step.check(images)

    def planned(self, position: int) -> PlannedSteps:
        """See `Transform.planned`."""
        steps = [(position, self)]
        return PlannedMixing(steps) if self.fuses_as == "mixing" else FusedOperations(steps)

    def operation_steps(self, draws: Draws, images: Tensor) -> list[OperationStep]:
        """See `OperationsTransform.operation_steps`."""
        return self._of_options(draws, lambda step, inside: step.operation_steps(inside, images))

    def mixtures(self, draws: Draws, images: Tensor) -> list[Mixture]:
        """See `Mixing.mixtures`."""
        return self._of_options(draws, lambda step, inside: step.mixtures(inside, images))

    def _of_options(self, draws: Draws, of_step: Callable[[Any, Draws], list[Any]]) -> list[Any]:
        """Return what ``of_step(step, draws)`` returns for the steps of all options.

        Draw 0 chooses. Each option has steps of its own, which do nothing to other samples.
        """
        chosen, of_options = self.choose(draws), []
        for number, option in enumerate(self._options):
            for position, step in enumerate(option.transforms):
                inside = replace(draws, position=f"{draws.position}.{number}.{position}")
                of_options += [each.only_for(chosen == number) for each in of_step(step, inside)]
        return of_options


class RandomApply(Choosing):
    """Do a list of transforms with share ``p``, like torchvision's, for each sample on its own.

    ``transforms`` are those of this package, or functions of images ``(n, C, H, W)``. They get the
    chosen samples of a batch, and must keep shape, dtype and the names of columns. MixUp and CutMix
    mix a chosen sample with the one before it in the whole batch. Masks, points and boxes follow,
    as in a `Compose`.

    >>> jitter = RandomApply([ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8)
    >>> images = jitter(images, samples=samples)
    """

    def __init__(self, transforms: Sequence[Callable[..., Any]], p: float = 0.5) -> None:
        super().__init__([Compose(_listed(self, transforms))])
        self.p = share(self, "p", p)

    @property
    def transforms(self) -> tuple[Any, ...]:
        """What is done with the chosen samples."""
        return self._options[0].transforms

    def choose(self, draws: Draws) -> np.ndarray:
        """See `Options.choose`."""
        return np.where(draws.uniform(1)[0] < self.p, 0, -1)

    def __repr__(self) -> str:
        return f"RandomApply({list(self.transforms)}, p={shown(self.p)})"


class RandomChoice(Choosing):
    """Do one of several transforms, like torchvision's, drawn for each sample on its own.

    ``transforms`` are those of this package, a `Compose` of them, or functions of images ``(n, C,
    H, W)``. ``p`` has a weight for each, in a list or a tensor; by default all are equal. Each gets
    the samples for which it was drawn, and must keep shape and dtype. MixUp and CutMix mix these
    with the samples before them in the whole batch. Masks, points and boxes follow, as in a
    `Compose`.

    >>> mix = RandomChoice([MixUp(alpha=0.2), CutMix(alpha=1.0)])
    >>> loader = memload.Loader("train.bin", 256, transform=Compose([train(224), mix]))
    """

    def __init__(
        self,
        transforms: Sequence[Callable[..., Any]],
        p: Sequence[float] | np.ndarray | Tensor | None = None,
    ) -> None:
        steps = _listed(self, transforms)
        super().__init__([Compose([step]) for step in steps])
        given: Any = [1.0] * len(steps) if p is None else p
        weights = given.tolist() if isinstance(given, np.ndarray | Tensor) else given
        are_weights = isinstance(weights, Sequence) and all(map(is_finite, weights))
        if not are_weights or len(weights) != len(steps) or min(weights) < 0 or not sum(weights):
            expected = f"{len(steps)} numbers of at least 0, not all 0, one for each transform"
            raise wrong(self, "p", expected, repr(p))
        self.p = tuple(weight / sum(weights) for weight in weights)

    @property
    def transforms(self) -> tuple[Any, ...]:
        """What is chosen from."""
        return tuple(
            option.transforms[0] if len(option.transforms) == 1 else option
            for option in self._options
        )

    def choose(self, draws: Draws) -> np.ndarray:
        """See `Options.choose`."""
        ends = np.cumsum(self.p)
        # The last sum may be a little below 1.
        return np.asarray(np.searchsorted(ends[:-1], draws.uniform(1)[0], side="right"))

    def __repr__(self) -> str:
        return f"RandomChoice({list(self.transforms)}, p={shown(self.p)})"


def _has_check(step: Any) -> bool:
    """Return whether a step checks images, whose shape and dtype it keeps."""
    fusion = getattr(step, "fuses_as", "no")
    return isinstance(step, Options) or fusion in ("operations", "painting", "mixing")


def _listed(owner: Choosing, transforms: Any) -> tuple[Any, ...]:
    """Return a list of at least one transform as a tuple."""
    steps = tuple(transforms) if isinstance(transforms, Iterable) else ()
    if not steps:
        expected = "a list of at least one transform"
        raise wrong(owner, "transforms", expected, repr(transforms), "Write [...].")
    return steps
