"""MixUp and CutMix: images and labels of two samples mixed into one."""

import copy
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memload.transforms.arguments import describe, integer, is_finite, wrong
from memload.transforms.boxes import each_box, edges_of
from memload.transforms.draws import Draws
from memload.transforms.following import Followers, TensorsByName
from memload.transforms.geometry import HAS_TRITON
from memload.transforms.options import Mixing, MixingPlan, Mixture
from memload.transforms.sub_batches import parts, put_some, take_some
from memload.transforms.transform import Transform
from memload.upload import Parameters, upload
from memload.wording import listed


class MixUp(Mixing, Transform):
    """Mix each image and label with those before it in the batch, like torchvision's ``v2.MixUp``.

    Each sample keeps a share of its own, drawn from Beta(``alpha``, ``alpha``). The partner is the
    sample before it in the batch; that of the first is the last. So the result depends on the batch
    too. Images ``(N, C, H, W)`` must be floats, so put it after Normalize. Masks and boxes cannot
    be mixed: a `Compose` that names them, or a Loader that has them, raises ValueError.

    The column "label" holds integers ``(N,)`` below ``num_classes``, or shares ``(N,
    num_classes)``. It becomes float32 ``(N, num_classes)``. A Loader fills in the ``num_classes``
    of the data set. (Zhang et al., https://arxiv.org/abs/1710.09412)

    >>> images, columns = MixUp(alpha=0.2, num_classes=1000)(images, {"label": labels})
    """

    _cuts_masks = False

    def __init__(
        self, *, alpha: float = 1.0, num_classes: int | None = None, labels_getter: str = "default"
    ) -> None:
        if labels_getter != "default":
            advice = "The labels are the column 'label'."
            raise wrong(self, "labels_getter", "'default'", repr(labels_getter), advice)
        if not is_finite(alpha) or alpha <= 0:
            raise wrong(self, "alpha", "a number above 0", repr(alpha))
        self.alpha = float(alpha)
        self.num_classes = (
            None if num_classes is None else integer(self, "num_classes", num_classes, 1)
        )

    def bind(
        self,
        *,
        num_classes: int | None = None,
        masks: Sequence[str] | None = None,
        boxes: Sequence[str] | None = None,
        **other: Any,
    ) -> Transform:
        """Return the transform with the number of classes filled in, and with these masks.

        Raises ValueError for masks and boxes that it cannot mix.
        """
        name = type(self).__name__
        for argument, names in (("masks", () if self._cuts_masks else masks), ("boxes", boxes)):
            if names:
                hint = " CutMix cuts masks." if argument == "masks" else ""
                raise ValueError(
                    f"{name} cannot mix {argument}, such as those in {names[0]!r}. Leave {name} "
                    f"out or, in a Loader, the {argument} with columns=….{hint}"
                )
        bound = copy.copy(self)
        if self.num_classes is None:
            bound.num_classes = num_classes
        bound._followers = Followers.of({"masks": masks})
        return bound

    def check(self, images: Tensor) -> None:
        """See `Mixing.check`."""
        if not images.is_floating_point():
            advice = "Put ToDtype or Normalize before it."
            raise wrong(self, "images", "floating", images.dtype, advice)

    def unmixed(self, columns: TensorsByName, count: int) -> TensorsByName:
        """See `Mixing.unmixed`."""
        if "label" in columns:
            return columns | {"label": self._class_shares(columns["label"], count)}
        if self._followers.masks:  # the labels of pixels
            return columns
        raise ValueError(
            f"{type(self).__name__}: there is no column 'label' to mix. The columns given are: "
            f"{listed(columns) or 'none'}. Give labels by this name, in a Loader by columns=…, or "
            "leave MixUp and CutMix out, in a recipe by mix=False."
        )

    def mixed(
        self, images: Tensor, columns: TensorsByName, plan: MixingPlan, first_in_plan: int
    ) -> tuple[Tensor, TensorsByName]:
        """See `Mixing.mixed`."""
        masks = {
            name: mix(columns[name][:, None], None, plan.boxes, first_in_plan)[:, 0]
            for name in self._followers.masks
        }
        columns = columns | masks
        if "label" in columns:
            shares = columns["label"][:, None, None]
            columns["label"] = mix(shares, plan.kept, None, first_in_plan)[:, 0, 0]
        factor = plan.factor if images.is_floating_point() else None
        return mix(images, factor, plan.boxes, first_in_plan), columns

    def mixtures(self, draws: Draws, images: Tensor) -> list[Mixture]:
        """See `Mixing.mixtures`."""
        kept = _beta(draws.uniform(1)[0], self.alpha).astype(np.float32)
        return [Mixture(kept, np.zeros((len(kept), 4), np.int32), kept)]

    def _class_shares(self, labels: Tensor, count: int) -> Tensor:
        """Return the share of every class, float32 ``(N, num_classes)``."""
        is_index = labels.ndim == 1 and not labels.is_floating_point()
        if not (is_index or labels.ndim == 2):
            expected = f"integers ({count},) or shares ({count}, num_classes)"
            raise wrong(self, "columns['label']", expected, describe(labels))
        if labels.ndim == 2:
            if self.num_classes not in (None, labels.shape[1]):
                expected = f"of {self.num_classes} classes"
                raise wrong(self, "columns['label']", expected, f"of {labels.shape[1]}")
            return labels.float()
        if self.num_classes is None:
            name = type(self).__name__
            raise ValueError(
                f"{name} does not know the number of classes. Write {name}(num_classes=…)."
            )
        # Labels on a GPU are not looked at, since the host would have to wait for them.
        if labels.device.type == "cpu" and count:
            lowest, highest = int(labels.min()), int(labels.max())
            if lowest < 0 or highest >= self.num_classes:
                expected = f"from 0 to {self.num_classes - 1}, as num_classes says"
                raise wrong(self, "columns['label']", expected, f"{lowest} to {highest}")
        classes = torch.arange(self.num_classes, device=labels.device)
        shares = torch.empty(count, self.num_classes, dtype=torch.float32, device=labels.device)
        return torch.eq(labels[:, None], classes, out=shares)  # one_hot() would wait for a GPU


class CutMix(MixUp):
    """Replace a box of each image by that of the image before it, like torchvision's ``v2.CutMix``.

    The share of the area that is kept is drawn from Beta(``alpha``, ``alpha``), and the labels are
    mixed by what is left of the image. Images ``(N, C, H, W)`` may be uint8. For arguments, labels
    and partners see `MixUp`. Masks that a `Compose` names are cut in the same way, and then there
    need not be labels. Boxes cannot be cut and are refused. (Yun et al.,
    https://arxiv.org/abs/1905.04899)

    >>> images, columns = CutMix(num_classes=1000)(images, {"label": labels})
    """

    _cuts_masks = True

    def __init__(  # its own, so that Python's errors name CutMix
        self, *, alpha: float = 1.0, num_classes: int | None = None, labels_getter: str = "default"
    ) -> None:
        super().__init__(alpha=alpha, num_classes=num_classes, labels_getter=labels_getter)

    def check(self, images: Tensor) -> None:
        """See `Mixing.check`. All images can be cut."""

    def mixtures(self, draws: Draws, images: Tensor) -> list[Mixture]:
        """See `Mixing.mixtures`."""
        uniform = draws.uniform(3)
        kept = _beta(uniform[0], self.alpha)
        extents = np.array(images.shape[-2:])[:, np.newaxis]
        centre = (uniform[1:] * extents).astype(np.int64)
        half = (0.5 * np.sqrt(1 - kept) * extents).astype(np.int64)
        start, end = np.maximum(centre - half, 0), np.minimum(centre + half, extents)
        left_over = (1 - (end - start).prod(0) / extents.prod()).astype(np.float32)
        return [Mixture(np.ones_like(left_over), edges_of(start, end), left_over)]


def mix(
    images: Tensor, factor: Parameters | None, boxes: Parameters | None, first_in_plan: int = 0
) -> Tensor:
    """Return images ``(N, C, H, W)`` mixed with the one before; the first with the last.

    They are a plan's samples from ``first_in_plan`` on. ``factor``, float32 ``(any,)``, is the
    share of an image that is kept; with 1, its bits stay. Only floats can have factors. They are
    mixed in float32, or in float64 if they are that. ``boxes``, int32 ``(any, 4)``, are edges; see
    `boxes.edges_of`. Within the box of a sample, the image before it is shown instead. The result
    has the layout of the images.
    """
    if images.is_cuda and HAS_TRITON:
        from memload.transforms import painting_kernel

        return painting_kernel.mix(images, factor, boxes, first_in_plan)
    mixed, samples = images.clone(), slice(first_in_plan, first_in_plan + len(images))
    if factor is not None:
        _blend(mixed, images, factor.array[samples])
    if boxes is not None:
        for index, rows, columns in each_box(boxes.array[samples]):
            mixed[index, :, rows, columns] = images[index - 1, :, rows, columns]
    return mixed


def _blend(mixed: Tensor, images: Tensor, factor: np.ndarray) -> None:
    """Write images that are blended with the one before to ``mixed``, where the factor is not 1."""
    blended = np.flatnonzero(factor != 1)
    # Four times an image, in float32 at least: both of them, and each times its share.
    bytes_of_one = 4 * max(4, images.element_size()) * images.shape[1:].numel()
    for part in parts(images[: len(blended)], bytes_of_one):
        places = blended[part]
        own, before = (take_some(images, at) for at in (places, (places - 1) % len(images)))
        share = upload(factor[places], images.device)[:, None, None, None]
        new = (own * share).add_(before * (1 - share)).to(images.dtype)
        put_some(mixed, places, new)


def _beta(drawn: np.ndarray, alpha: float) -> np.ndarray:
    """Return numbers distributed as Beta(alpha, alpha), from numbers uniform between 0 and 1.

    This inverts the distribution function by interpolation. The upper half mirrors the lower.
    """
    points, cumulative = _lower_half_of_beta(alpha)
    upper = drawn >= 0.5
    point = np.interp(np.where(upper, 2 - 2 * drawn, 2 * drawn), cumulative, points)
    value = 0.5 * point ** (1 / min(alpha, 1))
    return np.asarray(np.where(upper, 1 - value, value))


@functools.lru_cache(maxsize=16)
def _lower_half_of_beta(alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """Return points from 0 to 1, and the share of the lower half of Beta(alpha, alpha) below each.

    Point s stands for the value x = s^(1 / min(alpha, 1)) / 2. For alpha < 1 the density in x has a
    pole at 0, but that in s is (1 - x)^(alpha - 1), which is smooth. For alpha >= 1, s = 2x. Points
    start nine standard deviations below the mean; below that, the density is 0 in float64.
    """
    if alpha < 1:
        points = np.linspace(0, 1, 4097)
        density = (1 - 0.5 * points ** (1 / alpha)) ** (alpha - 1)
    else:
        points = np.linspace(max(0.0, 1 - 9 / math.sqrt(2 * alpha + 1)), 1, 4097)
        density = (points * (2 - points)) ** (alpha - 1)
    cumulative = np.concatenate([[0], np.cumsum(density[1:] + density[:-1])])
    return points, cumulative / cumulative[-1]
