"""RandomApply and RandomChoice: other transforms, for some samples of a batch.

Options that are operations are drawn for all samples and done in one pass, with none for the
others; options that mix samples likewise. Others get copies of the samples that are chosen.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from memload.transforms.arguments import is_finite, share, shown, wrong
from memload.transforms.batch import Batch, put_some
from memload.transforms.compose import Compose
from memload.transforms.draws import Drawn, Draws
from memload.transforms.mixing import NOTHING, MixUp
from memload.transforms.operation_step import OperationStep
from memload.transforms.operations_pass import OperationsPass, OperationsTransform
from memload.transforms.passes import group
from memload.transforms.prepared import is_own, run_once
from memload.transforms.transform import Transform
from memload.wording import listed


class Choosing(OperationsTransform):
    """The base of transforms that choose between lists of others, the ``options``.

    Subclasses define `choose`.
    """

    def __init__(self, options: Sequence[Compose]) -> None:
        self._set_options(options)
        kinds = {getattr(step, "kind", "") for option in options for step in option.transforms}
        self.kind = kinds.pop() if len(kinds) == 1 else ""
        if self.kind == "mixing" and any(len(option.transforms) > 1 for option in options):
            self.kind = ""
        self.pass_type: Any = OperationsPass if self.kind == "operations" else None

    def _set_options(self, options: Sequence[Compose]) -> None:
        self.options = tuple(options)
        self._steps = [group(option.transforms) for option in options]
        self.moves_pixels = any(option.moves_pixels for option in options)

    def choose(self, draws: Draws) -> np.ndarray:
        """Return the number of each sample's list by draw 0, int64 ``(N,)``; -1 for none."""
        raise NotImplementedError

    def bind(self, **facts: Any) -> Transform:
        """See `Transform.bind`."""
        bound = copy.copy(self)
        bound._followers = super().bind(**facts)._followers
        bound._set_options([option.bind(**facts) for option in self.options])
        return bound

    def operation_steps(self, draws: Draws, images: Tensor) -> list[OperationStep]:
        """See `OperationsTransform.operation_steps`."""
        numbers = self.choose(draws)
        return [
            operation.only_for(numbers == number)
            for number, option in enumerate(self.options)
            for position, step in enumerate(option.transforms)
            for operation in step.operation_steps(
                draws.inside(number).at_position(position), images
            )
        ]

    def draw(self, draws: Draws, images: Tensor) -> dict[str, Any]:
        """See `Transform.draw`."""
        numbers = self.choose(draws)
        if self.kind == "mixing":
            drawn: dict[str, Any] = {}
            for number, option in enumerate(self.options):
                for step in option.transforms:
                    for name, array in step.draw(
                        draws.inside(number).at_position(0), images
                    ).items():
                        nothing = drawn.get(name, NOTHING[name])
                        chosen = (numbers == number).reshape(-1, *[1] * (array.ndim - 1))
                        drawn[name] = np.where(chosen, array, nothing).astype(array.dtype)
            return drawn
        # Images that an option does not take are refused in the first batch, whatever is drawn.
        for number, steps in enumerate(self._steps):
            first: Any = steps[0][1] if steps else None
            if is_own(first):
                first.draw(draws.of_samples(np.arange(0)).inside(number).at_position(0), images)
        return {"numbers": numbers, "draws": draws, "samples": draws.samples}

    def apply(self, batch: Batch, drawn: Drawn) -> Batch:
        """See `Transform.apply`."""
        mixers = list(_mixers(self))
        # All batches get the same kind of labels, also those in which nothing is mixed.
        for mixer in mixers:
            batch = batch._replace(columns=mixer.unmixed(batch.columns, len(batch.images)))
        if self.kind == "mixing":  # what is drawn says who mixes which sample
            return mixers[0].apply(batch, drawn)
        draws = replace(drawn.on_host("draws"), samples=drawn.on_host("samples"))
        numbers = drawn.on_host("numbers")
        result = batch._replace(images=batch.images.clone(), columns=dict(batch.columns))
        for number, steps in enumerate(self._steps):
            places = np.flatnonzero(numbers == number)
            if not steps or not places.size:
                continue
            # Any sample may be needed by those that are mixed.
            mixes = any(any(_mixers(step)) for step in self.options[number].transforms)
            taken = np.arange(len(batch.images)) if mixes else places
            given = batch.take(taken)
            new = run_once(steps, given, draws.of_samples(taken).inside(number))
            self._put(result, places, given, new.take(places) if mixes else new)
        return result

    def _put(self, target: Batch, places: np.ndarray, given: Batch, new: Batch) -> None:
        """Put samples into a batch, at places of which copies were ``given``."""
        origin = f"what {type(self).__name__} chooses"
        if new.columns.keys() != given.columns.keys():
            expected = f"as before, {listed(given.columns) or 'none'}"
            raise wrong(origin, "the columns", expected, listed(new.columns) or "none")
        _check_kind(origin, target.images, new.images)
        put_some(target.images, places, new.images)
        for name, column in new.columns.items():
            if column is not given.columns[name]:
                _check_kind(f"columns[{name!r}] of {origin}", target.columns[name], column)
                target.columns[name] = target.columns[name].clone()
                put_some(target.columns[name], places, column)


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
        return self.options[0].transforms

    def choose(self, draws: Draws) -> np.ndarray:
        """See `Choosing.choose`."""
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
            for option in self.options
        )

    def choose(self, draws: Draws) -> np.ndarray:
        """See `Choosing.choose`."""
        ends = np.cumsum(self.p)
        # The last sum may be a little below 1.
        return np.asarray(np.searchsorted(ends[:-1], draws.uniform(1)[0], side="right"))

    def __repr__(self) -> str:
        return f"RandomChoice({list(self.transforms)}, p={shown(self.p)})"


def _mixers(step: Any) -> Iterator[MixUp]:
    """Yield a step if it mixes samples, or those inside of it that do."""
    if isinstance(step, MixUp):
        yield step
    for option in getattr(step, "options", ()):
        for inner in option.transforms:
            yield from _mixers(inner)


def _check_kind(subject: str, before: Tensor, after: Tensor) -> None:
    """Check that shape and dtype for each sample are as before."""
    if after.shape[1:] != before.shape[1:] or after.dtype != before.dtype:
        expected = f"as before, {before.dtype} {tuple(before.shape[1:])} for each sample"
        found = f"{after.dtype} {tuple(after.shape[1:])}"
        raise wrong(subject, "shape and dtype", expected, found)


def _listed(owner: Choosing, transforms: Any) -> tuple[Any, ...]:
    """Return a list of at least one transform as a tuple."""
    steps = tuple(transforms) if isinstance(transforms, Iterable) else ()
    if not steps:
        expected = "a list of at least one transform"
        raise wrong(owner, "transforms", expected, repr(transforms), "Write [...].")
    return steps
