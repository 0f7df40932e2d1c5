"""Lists of steps that are drawn for each sample, and steps that mix samples with others.

choose ─▶ Chosen: a list of steps, ─▶ those that mix: one Mixture for the whole batch ─▶ Target
          and places of samples    ─▶ others: copies of samples go through the steps  ─▶
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from memload.transforms.arguments import wrong
from memload.transforms.batch import Batch, Target
from memload.transforms.draws import Draws
from memload.transforms.following import TensorsByName
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
    #: Within these, the image before is shown: top, left, height and width, int64 ``(4, N)``.
    boxes: np.ndarray
    kept: np.ndarray  #: the share of the label that is kept, float32 ``(N,)``

    @classmethod
    def of_nothing(cls, count: int) -> "Mixture":
        """Return that of samples that stay as they are."""
        whole = np.ones(count, np.float32)
        return cls(whole, np.zeros((4, count), np.int64), whole.copy())

    def put(self, places: np.ndarray, values: "Mixture") -> None:
        """Put in what is mixed for the samples at some places."""
        for own, new in zip(self, values, strict=True):
            own[..., places] = new


class Mixing:
    """The base of transforms that mix each sample with the one before it in the batch."""

    def unmixed(self, columns: TensorsByName, count: int) -> TensorsByName:
        """Return the columns of ``count`` samples as `mixed` needs them."""
        raise NotImplementedError

    def mixture(self, images: Tensor, draws: Draws) -> Mixture:
        """Return how samples are mixed, which are those of ``draws``.

        Only the shape ``(any, C, H, W)`` and the dtype of ``images`` matter.
        """
        raise NotImplementedError

    def mixed(
        self, images: Tensor, columns: TensorsByName, mixture: Mixture
    ) -> tuple[Tensor, TensorsByName]:
        """Return the images in new memory, and the columns, mixed."""
        raise NotImplementedError


class Chosen(NamedTuple):
    """A list of steps, and the samples for which it was drawn."""

    steps: Steps
    places: np.ndarray  #: in the batch, int64 ``(n,)``
    inside_of: str  #: what the positions of the steps begin with
    origin: str  #: where its results come from, for messages


def choose(step: Options, batch: Batch, draws: Draws, run: Run) -> Batch:
    """Return a batch after the steps that were drawn for each sample."""
    step.check(batch.images)
    count, columns = len(batch.images), batch.columns
    # All batches get the same kind of labels, also those in which nothing is mixed.
    for mixer in _mixers([(0, step)]):
        columns = mixer.unmixed(columns, count)
    batch = batch._replace(columns=columns)
    mixing: list[Chosen] = []
    others: list[Chosen] = []
    for chosen in _drawn(step, draws, np.arange(count)):
        mixes_only = len(chosen.steps) == 1 and isinstance(chosen.steps[0][1], Mixing)
        (mixing if mixes_only else others).append(chosen)
    is_filled = sum(len(chosen.places) for chosen in others) == count
    target = Target(batch, _mixed(mixing, batch, draws) if mixing else None, is_filled=is_filled)
    for chosen in others:
        _put_changed(target, chosen, batch, draws, run)
    return target.batch


def _drawn(step: Options, draws: Draws, places: np.ndarray) -> Iterator[Chosen]:
    """Yield the lists of steps that are drawn for the samples at some places.

    ``draws`` are those of the whole batch. If a list has just one step, which draws again, there
    are its lists instead.
    """
    chosen = step.choose(draws.at(places))
    for number, steps in enumerate(step.steps_of_options):
        where, inside_of = places[chosen == number], f"{draws.position}.{number}."
        if len(steps) == 1 and isinstance(steps[0][1], Options):
            position, inner = steps[0]
            yield from _drawn(inner, replace(draws, position=f"{inside_of}{position}"), where)
        elif steps and where.size:
            yield Chosen(steps, where, inside_of, f"what {type(step).__name__} chooses")


def _mixed(mixing: Sequence[Chosen], batch: Batch, draws: Draws) -> Batch:
    """Return a batch in new memory after steps that mix its samples, all in one pass."""
    mixture = Mixture.of_nothing(len(batch.images))
    for chosen in mixing:
        position, mixer = chosen.steps[0]
        inside = replace(draws, position=f"{chosen.inside_of}{position}").at(chosen.places)
        mixture.put(chosen.places, mixer.mixture(batch.images, inside))
    return batch.after(*mixer.mixed(batch.images, batch.columns, mixture))


def _put_changed(target: Target, chosen: Chosen, batch: Batch, draws: Draws, run: Run) -> None:
    """Put samples into the target after several steps, or one that mixes nothing.

    If one of the steps mixes, the whole batch goes through them, as any sample may be needed.
    """
    mixes = any(_mixers(chosen.steps))
    places = np.arange(len(batch.images)) if mixes else chosen.places
    given = batch.take(places)
    new = run(chosen.steps, given, draws.at(places), chosen.inside_of)
    if new.columns.keys() != given.columns.keys():
        expected = (
            f"as before, {listed(given.columns) or 'none'}, since not all samples have others"
        )
        raise wrong(chosen.origin, "the columns", expected, listed(new.columns) or "none")
    changed = new.changed_since(given)
    target.put(chosen.places, changed.take(chosen.places) if mixes else changed, chosen.origin)


def _mixers(steps: Steps) -> Iterator[Mixing]:
    """Yield the steps that mix samples, also those inside of others."""
    for _, step in steps:
        if isinstance(step, Mixing):
            yield step
        elif isinstance(step, Options):
            for option in step.steps_of_options:
                yield from _mixers(option)
