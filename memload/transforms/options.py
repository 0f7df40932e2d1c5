"""Lists of steps that are drawn for each sample, and steps that mix samples with others.

Options ─▶ where all mix samples: PlannedMixing: a Mixture, by which the batch is mixed in one pass
        ─▶ others: apply_options: copies of samples go through their steps ─▶ Target
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from memload.transforms.arguments import wrong
from memload.transforms.batch import Batch, Target
from memload.transforms.draws import Draws
from memload.transforms.following import TensorsByName
from memload.transforms.fused import Fusion, PlannedSteps
from memload.upload import Parameters
from memload.wording import listed

#: (position, step) as `fused.group` returns them.
Steps = Sequence[tuple[int, Any]]
#: A function (steps, batch, draws, inside_of) that returns a batch after a list of steps. Their
#: positions begin with ``inside_of``; all else that is random is as in ``draws``.
Run = Callable[[Steps, Batch, Draws, str], Batch]


class Options:
    """The base of transforms that draw one of several lists of steps for each sample."""

    #: The lists.
    steps_of_options: Sequence[Steps] = ()

    def check(self, images: Tensor) -> None:
        """Raise ValueError for images that a step cannot change, also if it is not drawn now."""
        raise NotImplementedError

    def choose(self, draws: Draws) -> np.ndarray:
        """Return the number of each sample's list, int64 ``(N,)``; -1 for none."""
        raise NotImplementedError


class Mixture(NamedTuple):
    """How much each sample of a batch gets of the one before it."""

    factor: np.ndarray  #: the share of the image that is kept, float32 ``(N,)``
    #: Within these, the image before is shown: edges, int32 ``(N, 4)``; see `boxes.edges_of`.
    boxes: np.ndarray
    kept: np.ndarray  #: the share of the label that is kept, float32 ``(N,)``

    def only_for(self, chosen: np.ndarray) -> "Mixture":
        """Return the same where ``chosen``, bool ``(N,)``, and elsewhere what mixes nothing."""
        return Mixture(
            np.where(chosen, self.factor, np.float32(1)),
            np.where(chosen[:, np.newaxis], self.boxes, np.int32(0)),
            np.where(chosen, self.kept, np.float32(1)),
        )


class MixingPlan(NamedTuple):
    """A `Mixture` of many samples."""

    factor: Parameters
    boxes: Parameters
    kept: Parameters


class Mixing:
    """The base of transforms that mix each sample with the one before it in the batch."""

    fuses_as: Fusion = "mixing"

    def check(self, images: Tensor) -> None:
        """Raise ValueError for images that cannot be mixed, whatever is drawn."""

    def unmixed(self, columns: TensorsByName, count: int) -> TensorsByName:
        """Return the columns of ``count`` samples as `mixed` needs them."""
        raise NotImplementedError

    def mixtures(self, draws: Draws, images: Tensor) -> list[Mixture]:
        """Return how samples are mixed: one or more mixtures, of which at most one mixes a sample.

        Only the shape ``(any, C, H, W)`` and the dtype of ``images`` matter.
        """
        raise NotImplementedError

    def mixed(
        self, images: Tensor, columns: TensorsByName, plan: MixingPlan, first_in_plan: int
    ) -> tuple[Tensor, TensorsByName]:
        """Return the images in new memory, and the columns, mixed.

        They are the plan's samples from ``first_in_plan`` on.
        """
        raise NotImplementedError

    def planned(self, position: int) -> PlannedSteps:
        """See `Transform.planned`."""
        return PlannedMixing([(position, self)])


class PlannedMixing(PlannedSteps):
    """A step that mixes samples, or draws one of several that do, planned by itself."""

    def plan(
        self,
        images: Tensor,
        count: int,
        draws: Callable[[int], Draws],
        memory_format: torch.memory_format,
    ) -> MixingPlan:
        """See `PlannedSteps.plan`."""
        ((position, step),) = self.steps
        step.check(images)
        factors, boxes, kept = zip(*step.mixtures(draws(position), images), strict=True)
        # All but one mix nothing: their factors are 1, and their boxes have the edges 0.
        mixture = np.prod(factors, 0), np.max(boxes, 0), np.prod(kept, 0)
        return MixingPlan(*map(Parameters, mixture))

    def run(
        self, images: Tensor, columns: TensorsByName, plan: MixingPlan, first_in_plan: int
    ) -> tuple[Tensor, TensorsByName]:
        """See `PlannedSteps.run`."""
        mixers = list(_mixers(self))
        for mixer in mixers:
            columns = mixer.unmixed(columns, len(images))
        # The plan says who mixes which sample, so any of them can do it for all.
        return mixers[0].mixed(images, columns, plan, first_in_plan)


class Chosen(NamedTuple):
    """A list of steps, and the samples for which it was drawn."""

    steps: Steps
    places: np.ndarray  #: in the batch, int64 ``(n,)``
    inside_of: str  #: what the positions of the steps begin with


def apply_options(step: Options, batch: Batch, draws: Draws, run: Run) -> Batch:
    """Return a batch after the steps that were drawn for each sample."""
    step.check(batch.images)
    count, columns = len(batch.images), batch.columns
    # All batches get the same kind of labels, also those in which nothing is mixed.
    for mixer in _mixers(step):
        columns = mixer.unmixed(columns, count)
    batch = batch._replace(columns=columns)
    numbers = step.choose(draws)
    options = [
        Chosen(steps, np.flatnonzero(numbers == number), f"{draws.position}.{number}.")
        for number, steps in enumerate(step.steps_of_options)
        if steps
    ]
    is_filled = sum(len(chosen.places) for chosen in options) == count
    target = Target(batch, f"what {type(step).__name__} chooses", is_filled=is_filled)
    for chosen in options:
        if chosen.places.size:
            _put_changed(target, chosen, batch, draws, run)
    return target.batch


def _put_changed(target: Target, chosen: Chosen, batch: Batch, draws: Draws, run: Run) -> None:
    """Put samples into the target after a list of steps.

    If one of the steps mixes, the whole batch goes through them, as any sample may be needed.
    """
    mixes = any(any(_mixers(step)) for _, step in chosen.steps)
    places = np.arange(len(batch.images)) if mixes else chosen.places
    # What the user has written may change in place what it gets.
    is_ours = all(isinstance(step, PlannedSteps | Options) for _, step in chosen.steps)
    given = batch if mixes and is_ours else batch.take(places)
    new = run(chosen.steps, given, draws.at(places), chosen.inside_of)
    if new.columns.keys() != given.columns.keys():
        expected = (
            f"as before, {listed(given.columns) or 'none'}, since not all samples have others"
        )
        raise wrong(target.origin, "the columns", expected, listed(new.columns) or "none")
    changed = new.changed_since(given)
    target.put(chosen.places, changed.take(chosen.places) if mixes else changed)


def _mixers(step: Any) -> Iterator[Mixing]:
    """Yield a step if it mixes samples, or those inside of it that do."""
    return (inner for inner in innermost(step) if isinstance(inner, Mixing))


def innermost(step: Any) -> Iterator[Any]:
    """Yield a transform, or those that are inside of it."""
    if isinstance(step, Options):
        for _, inner in chain(*step.steps_of_options):
            yield from innermost(inner)
    elif isinstance(step, PlannedSteps):
        for _, inner in step.steps:
            yield from innermost(inner)
    else:
        yield step
