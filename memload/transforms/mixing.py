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
from memload.transforms.batch import Batch
from memload.transforms.boxes import each_box, edges_of
from memload.transforms.draws import Drawn, Draws
from memload.transforms.following import TensorsByName
from memload.transforms.geometry import HAS_TRITON
from memload.transforms.transform import Transform
from memload.wording import listed

#: What is drawn for samples that are not mixed, by name; see `MixUp.draw`.
NOTHING = {"factor": 1, "boxes": 0, "kept": 1}


class MixUp(Transform):
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

    kind = "mixing"

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
        """Return the transform with the number of classes filled in.

        Raises ValueError for masks and boxes, which it cannot mix.
        """
        name = type(self).__name__
        for argument, names in (("masks", masks), ("boxes", boxes)):
            if names:
                raise ValueError(
                    f"{name} cannot mix {argument}, such as those in {names[0]!r}. Leave {name} "
                    f"out or, in a Loader, the {argument} with columns=…."
                )
        bound = copy.copy(self)
        if self.num_classes is None:
            bound.num_classes = num_classes
        return bound

    def draw(self, draws: Draws, images: Tensor) -> dict[str, Any]:
        """See `Transform.draw`.

        "factor" is the share of the image that is kept, and "kept" that of the label, float32
        ``(N,)``. Within "boxes", int32 ``(N, 4)``, the image before is shown; see
        `boxes.edges_of`.
        """
        if not images.is_floating_point():
            advice = "Put ToDtype or Normalize before it."
            raise wrong(self, "images", "floating", images.dtype, advice)
        kept = _beta(draws.uniform(1)[0], self.alpha).astype(np.float32)
        return {"factor": kept, "boxes": np.zeros((len(kept), 4), np.int32), "kept": kept}

    def apply(self, batch: Batch, drawn: Drawn) -> Batch:
        """See `Transform.apply`."""
        images, columns = batch.images, self.unmixed(batch.columns, len(batch.images))
        shares = mix(columns["label"][:, :, None, None], drawn, "kept", None)[:, :, 0, 0]
        factor = "factor" if images.is_floating_point() else None
        return batch._replace(
            images=mix(images, drawn, factor, "boxes"), columns=columns | {"label": shares}
        )

    def unmixed(self, columns: TensorsByName, count: int) -> TensorsByName:
        """Return the columns of ``count`` samples with labels as shares, which can be mixed."""
        if "label" not in columns:
            raise ValueError(
                f"{type(self).__name__}: there is no column 'label' to mix. The columns given are: "
                f"{listed(columns) or 'none'}. Give labels by this name, in a Loader by columns=…, "
                "or leave MixUp and CutMix out, in a recipe by mix=False."
            )
        return columns | {"label": self._class_shares(columns["label"], count)}

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
    and partners see `MixUp`. Masks and boxes cannot be cut and are refused. (Yun et al.,
    https://arxiv.org/abs/1905.04899)

    >>> images, columns = CutMix(num_classes=1000)(images, {"label": labels})
    """

    kind = "mixing"

    def __init__(  # its own, so that Python's errors name CutMix
        self, *, alpha: float = 1.0, num_classes: int | None = None, labels_getter: str = "default"
    ) -> None:
        super().__init__(alpha=alpha, num_classes=num_classes, labels_getter=labels_getter)

    def draw(self, draws: Draws, images: Tensor) -> dict[str, Any]:
        """See `MixUp.draw`."""
        uniform = draws.uniform(3)
        kept = _beta(uniform[0], self.alpha)
        extents = np.array(images.shape[-2:])[:, np.newaxis]
        centre = (uniform[1:] * extents).astype(np.int64)
        half = (0.5 * np.sqrt(1 - kept) * extents).astype(np.int64)
        start, end = np.maximum(centre - half, 0), np.minimum(centre + half, extents)
        left_over = (1 - (end - start).prod(0) / extents.prod()).astype(np.float32)
        return {
            "factor": np.ones_like(left_over), "boxes": edges_of(start, end), "kept": left_over
        }  # fmt: skip


def mix(images: Tensor, drawn: Drawn, factor: str | None, boxes: str | None) -> Tensor:
    """Return images ``(N, C, H, W)`` mixed with the one before; the first with the last.

    ``factor`` and ``boxes`` are names of what was drawn; see `MixUp.draw`. With a factor of 1, the
    bits of an image stay. Only floats can have factors. They are mixed in float32. The result has
    the layout of the images.
    """
    if images.is_cuda and HAS_TRITON:
        from memload.transforms.kernels import painting

        return painting.mix(
            images, drawn[factor] if factor else None, drawn[boxes] if boxes else None
        )
    mixed = images.clone()
    for index, share in enumerate(drawn.on_host(factor).tolist() if factor else ()):
        if share != 1:
            torch.lerp(images[index - 1], images[index], share, out=mixed[index])
    for index, rows, columns in each_box(drawn.on_host(boxes)) if boxes else ():
        mixed[index, :, rows, columns] = images[index - 1, :, rows, columns]
    return mixed


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
