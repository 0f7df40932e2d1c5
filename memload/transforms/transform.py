"""The base of all transforms."""

import copy
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import get_worker_info

from memload import ranks
from memload.transforms.arguments import shown
from memload.transforms.draws import Draws
from memload.transforms.following import Followers, TensorsByName
from memload.transforms.fused import Fused, Fusion, PlannedSteps, group
from memload.transforms.prepared import Prepared, not_compiled


class Transform:
    """A step that works on whole batches, and draws random numbers for every sample on its own.

    Call it with images ``(N, C, H, W)`` of uint8 or a floating dtype, on any device, and optionally
    ``columns``, tensors ``(N, …)`` by name. It returns the images, or (images, columns) if columns
    were given, in new memory; the images given are never changed.

    Random numbers depend only on ``seed``, ``epoch``, the sample, the position in the list and the
    view. ``samples`` are the samples' numbers in the data set, int64 ``(N,)``, as an array or
    tensor. A tensor on a GPU makes the host wait. Without them, each object counts its samples from
    0; the rank and a DataLoader's worker are added to the seed. No other random state is read or
    changed. Objects can be pickled; with ``samples``, several threads can use one.

    What moves pixels, such as a crop, also moves masks, points and boxes: the columns that a
    `Compose` names, or in a Loader those of the data set. All other transforms leave them alone,
    but for CutMix, which cuts masks.

    Subclasses define `apply`, and take what is random from its ``draws``: ``draws.uniform(count)``
    is float64 ``(count, N)``, at least 0 and below 1. One that moves pixels has to move the masks,
    points and boxes in ``columns`` by itself, or has a method ``movement(images, draws)``, which
    returns a `following.Movement`.

    >>> class Invert(Transform):
    ...     def __init__(self, p=0.5):
    ...         self.p = p
    ...     def apply(self, images, columns, draws):
    ...         chosen = torch.from_numpy(draws.uniform(1)[0] < self.p).to(images.device)
    ...         return torch.where(chosen[:, None, None, None], 255 - images, images), columns
    >>> images = Invert()(images, samples=samples, seed=0, epoch=3)

    Wrong arguments raise TypeError or ValueError, which name the transform and the argument.
    """

    #: How it is planned with its neighbours in a list. Unless it is "no", the class defines
    #: something else than `apply`: for "operations" see `operations_transform.OperationsTransform`,
    #: for "painting" `erasing.PaintingTransform`, and for "mixing" `options.Mixing`; for others
    #: ``add_to(plan, draws)``, which adds the transform to a `geometry.Plan`.
    fuses_as: Fusion = "no"
    #: The columns that move with the images; a `Compose` has its own.
    _followers: Followers = Followers()
    #: How many samples were transformed without ``samples``.
    _samples_seen = 0

    @property
    def moves_pixels(self) -> bool:
        """Whether it, or one of its steps, moves pixels, so that masks have to follow."""
        return self.fuses_as in ("crop", "resize", "flip") or hasattr(self, "movement")

    @not_compiled
    def __call__(
        self,
        images: Tensor,
        columns: Mapping[str, Tensor] | None = None,
        *,
        samples: Any = None,
        seed: int = 0,
        epoch: int = 0,
    ) -> Any:
        """Transform a batch."""
        if samples is None:
            count = len(images) if isinstance(images, Tensor) and images.ndim else 0
            samples = np.arange(self._samples_seen, self._samples_seen + count)
            self._samples_seen += count
            seed = int(seed) + seed_offset() if isinstance(seed, Integral) else seed
        return self.prepare(samples, seed=seed, epoch=epoch)(images, columns)

    def prepare(self, samples: Any, *, seed: int = 0, epoch: int = 0) -> Prepared:
        """Return a function ``(images, columns, start, stop)`` for parts of many samples.

        It does what calls with ``samples[start:stop]`` do, in less of the host's time. Several
        threads may call it; on CUDA, all with the same stream.

        >>> prepared = transforms.train(224).prepare(np.arange(10_000), seed=0, epoch=3)
        >>> images = prepared(images, None, 512, 768)
        """
        steps, name = group([self]), type(self).__name__
        return Prepared(name, [steps], samples, seed, epoch, followers=self._followers)

    def bind(
        self,
        *,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        num_classes: int | None = None,
        points: Sequence[str] | None = None,
        masks: Sequence[str] | None = None,
        boxes: Sequence[str] | None = None,
    ) -> "Transform":
        """Return the transform with what it leaves to the data set filled in. A Loader calls this.

        ``mean`` and ``std`` are those of pixels from 0 to 1, one for each channel. ``points``,
        ``masks`` and ``boxes`` are the names of columns that follow the images; see `Compose`.
        """
        if not self.moves_pixels or not (points or masks or boxes):
            return self
        bound = copy.copy(self)
        bound._followers = Followers.of({"points": points, "masks": masks, "boxes": boxes})
        return bound

    def planned(self, position: int) -> PlannedSteps:
        """Return the transform, at a position of a list, for neighbours to join."""
        return Fused([(position, self)])

    def apply(
        self, images: Tensor, columns: TensorsByName, draws: Draws
    ) -> tuple[Tensor, TensorsByName]:
        """Return (images, columns) in new memory."""
        raise NotImplementedError(
            f"{type(self).__name__} has no method apply(images, columns, draws). Define it."
        )

    def __repr__(self) -> str:
        settings = (
            f"{name}={shown(value)}" for name, value in vars(self).items() if name[0] != "_"
        )
        return f"{type(self).__name__}({', '.join(settings)})"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which counts its samples from 0."""
        return {name: value for name, value in vars(self).items() if name != "_samples_seen"}


def seed_offset() -> int:
    """Return what to add to a seed so that each rank and DataLoader worker draws differently."""
    worker = get_worker_info()
    worker_seed = 0 if worker is None else worker.seed + 1
    return (worker_seed << 64) + (ranks.rank_or_zero() << 128)
