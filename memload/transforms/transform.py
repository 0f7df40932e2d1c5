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
from memload.transforms.batch import Batch
from memload.transforms.draws import Drawn, Draws
from memload.transforms.following import Followers
from memload.transforms.passes import Pass, group
from memload.transforms.prepared import Prepared, not_compiled


class Transform:
    """A step that works on whole batches, and draws random numbers for every sample on its own.

    Call it with images ``(N, C, H, W)`` of uint8 or a floating dtype, on any device, and optionally
    ``columns``, tensors ``(N, …)`` by name. It returns the images, or (images, columns) if columns
    were given. The images given are never changed.

    Random numbers depend only on ``seed``, ``epoch``, the sample, the position in the list and the
    view. ``samples`` are the samples' numbers in the data set, int64 ``(N,)``, as an array or
    tensor. A tensor on a GPU makes the host wait. Without them, each object counts its samples from
    0; the rank and a DataLoader's worker are added to the seed. No other random state is read or
    changed. Objects can be pickled; with ``samples``, several threads can use one.

    What moves pixels, such as a crop, also moves masks, points and boxes: the columns that a
    `Compose` names, or in a Loader those of the data set. All other transforms leave them alone.

    A subclass has two verbs. `draw` makes the random numbers on the host, for thousands of samples
    at once. `apply` changes a batch by them.

    >>> class Invert(Transform):
    ...     def __init__(self, p=0.5):
    ...         self.p = p
    ...     def draw(self, draws, images):
    ...         return {"chosen": draws.uniform(1)[0] < self.p}
    ...     def apply(self, batch, drawn):
    ...         chosen = drawn["chosen"][:, None, None, None]
    ...         return batch.with_images(torch.where(chosen, 255 - batch.images, batch.images))
    >>> images = Invert()(images, samples=samples, seed=0, epoch=3)

    Wrong arguments raise TypeError or ValueError, which name the transform and the argument.
    """

    #: What does it together with its neighbours in a list. None: it is done by itself.
    pass_type: type[Pass] | None = None
    #: "crop", "resize", "flip" or "pixels" for a `CropPass`, which calls ``add_to(plan, draws)``;
    #: "operations" for an `OperationsPass`, which calls ``operation_steps(draws, images)``; or
    #: "mixing".
    kind: str = ""
    #: Whether it, or one of its steps, moves pixels, so that masks and others have to follow.
    moves_pixels: bool = False
    #: The columns that move with the images; a `Compose` has its own.
    _followers: Followers = Followers()
    #: How many samples were transformed without ``samples``.
    _samples_seen = 0

    def __init_subclass__(cls) -> None:
        """Have verbs that a subclass of another transform defines done by themselves."""
        own = vars(cls)
        if "draw" in own or "apply" in own:
            cls.pass_type, cls.kind = own.get("pass_type"), own.get("kind", "")

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

    def draw(self, draws: Draws, images: Tensor) -> Mapping[str, Any]:
        """Return the random numbers of many samples: NumPy arrays ``(N, …)`` by name.

        Args:
            draws: The random numbers of N samples, 8,192 or more at once; ``len(draws)`` is N.
                ``draws.uniform(count)`` is float64 ``(count, N)``, at least 0 and below 1.
            images: Images like those of these samples. Only the shape ``(any, C, H, W)``, the dtype
                and the device matter.
        """
        return {}

    def apply(self, batch: Batch, drawn: Drawn) -> Batch:
        """Return what becomes of a batch, in new memory.

        Args:
            batch: Some of the samples. ``batch.images`` are ``(n, C, H, W)``, and
                ``batch.columns`` tensors ``(n, …)`` by name. ``batch.with_images(images)`` is the
                batch with other images, and `Batch.follow` moves masks, points and boxes.
            drawn: What `draw` returned for these samples. ``drawn["name"]`` is a tensor ``(n, …)``
                on the device of the images, and ``drawn.on_host("name")`` a NumPy array.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no method apply(batch, drawn). Define it."
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
