"""MixUp and CutMix: images and labels of two samples in one."""

import copy
import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from memload.transforms.draws import Draws
from memload.transforms.erasing import inside
from memload.transforms.transform import Columns, Transform, is_finite, is_integer, to_device


class _Mixing(Transform):
    """What both have in common. Subclasses mix the images."""

    def __init__(self, alpha: float, num_classes: int | None, labels_getter: str) -> None:
        if labels_getter != "default":
            raise self._wrong(
                "labels_getter", "'default'", repr(labels_getter), ". Labels are the column 'label'"
            )
        if not is_finite(alpha) or alpha <= 0:
            raise self._wrong("alpha", "a number above 0", repr(alpha))
        if num_classes is not None and not (is_integer(num_classes) and num_classes > 0):
            raise self._wrong("num_classes", "an integer of at least 1", repr(num_classes))
        self.alpha = float(alpha)
        self.num_classes: int | None = num_classes

    def bind(
        self,
        *,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        num_classes: int | None = None,
    ) -> Transform:
        """Return this one if it knows the number of classes, else one that does."""
        if self.num_classes is not None:
            return self
        bound = copy.copy(self)
        bound.num_classes = num_classes
        return bound

    def apply(self, images: Tensor, columns: Columns, draws: Draws) -> tuple[Tensor, Columns]:
        """Mix every sample with the one before it in the batch, the first with the last."""
        labels = self._labels(columns.get("label"), len(images))
        drawn = draws.uniform(3)
        images, share = self._mix(images, images.roll(1, 0), _beta(drawn[0], self.alpha), drawn[1:])
        kept = to_device(share.astype(np.float32), labels.device)[:, None]
        return images, columns | {"label": (labels * kept).add_(labels.roll(1, 0) * (1 - kept))}

    def _mix(
        self, images: Tensor, others: Tensor, share: np.ndarray, drawn: np.ndarray
    ) -> tuple[Tensor, np.ndarray]:
        """Return the mixed images, and the share ``(N,)`` that ``images`` have in them."""
        raise NotImplementedError

    def _labels(self, labels: Tensor | None, count: int) -> Tensor:
        """Return a share of every class, float32 ``(N, num_classes)``."""
        if labels is None or labels.ndim not in (1, 2) or len(labels) != count:
            found = "none" if labels is None else tuple(labels.shape)
            raise self._wrong(
                "columns: 'label'", f"a tensor ({count},) or ({count}, num_classes)", found
            )
        if labels.ndim == 2:
            if self.num_classes not in (None, labels.shape[1]):
                raise self._wrong(
                    "columns: 'label'", f"{self.num_classes} classes", labels.shape[1]
                )
            return labels.float()
        if self.num_classes is None or labels.is_floating_point():
            found = "no num_classes" if self.num_classes is None else str(labels.dtype)
            advice = (
                f". Write {type(self).__name__}(num_classes=…)" if self.num_classes is None else ""
            )
            raise self._wrong(
                "columns: 'label'",
                "shares (N, num_classes), or integers and num_classes",
                found,
                advice,
            )
        if (
            labels.device.type == "cpu"
            and count
            and not 0 <= int(labels.min()) <= int(labels.max()) < self.num_classes
        ):
            found = f"{int(labels.min())} to {int(labels.max())}"
            raise self._wrong(
                "columns: 'label'", f"0 to {self.num_classes - 1}, as num_classes says", found
            )
        classes = torch.arange(self.num_classes, device=labels.device)
        return (labels[:, None] == classes).float()  # one_hot() waits for a GPU


class MixUp(_Mixing):
    """Every image and label mixed with those before it (Zhang et al., https://arxiv.org/abs/1710.09412).

    The share that an image keeps is drawn for each from Beta(``alpha``, ``alpha``). The column "label", integers
    ``(N,)`` below ``num_classes`` (by default as many as the data set has, which a Loader fills in) or shares ``(N,
    num_classes)``, becomes float32 ``(N, num_classes)``. Images are of a floating dtype. The partner is the sample
    before it in the batch, as in torchvision, the first one's the last: so these pixels alone depend on who else is
    in the batch.
    """

    def __init__(
        self, *, alpha: float = 1.0, num_classes: int | None = None, labels_getter: str = "default"
    ) -> None:
        super().__init__(alpha, num_classes, labels_getter)

    def _mix(
        self, images: Tensor, others: Tensor, share: np.ndarray, drawn: np.ndarray
    ) -> tuple[Tensor, np.ndarray]:
        if not images.is_floating_point():
            raise self._wrong(
                "images", "a floating dtype", images.dtype, ". Put ToDtype or Normalize before it"
            )
        kept = to_device(share.astype(np.float32), images.device)[:, None, None, None]
        return (images * kept).add_(others * (1 - kept)).to(images.dtype), share


class CutMix(_Mixing):
    """A box of every image replaced by that of the image before it (Yun et al., https://arxiv.org/abs/1905.04899).

    The labels are mixed by the share that is left. For arguments, labels and partners see `MixUp`; images may be
    uint8.
    """

    def __init__(
        self, *, alpha: float = 1.0, num_classes: int | None = None, labels_getter: str = "default"
    ) -> None:
        super().__init__(alpha, num_classes, labels_getter)

    def _mix(
        self, images: Tensor, others: Tensor, share: np.ndarray, drawn: np.ndarray
    ) -> tuple[Tensor, np.ndarray]:
        extents = np.array(images.shape[-2:])[:, np.newaxis]
        middle = (drawn * extents).astype(np.int64)
        half = (0.5 * np.sqrt(1 - share) * extents).astype(np.int64)
        start, end = np.maximum(middle - half, 0), np.minimum(middle + half, extents)
        (top, left), (height, width) = start, end - start
        mixed = torch.where(inside(images, top, left, height, width), others, images)
        return mixed, 1 - height * width / extents.prod()


def _beta(drawn: np.ndarray, alpha: float) -> np.ndarray:
    """Return numbers distributed as Beta(alpha, alpha), of numbers from 0 to 1."""
    places, cumulative = _half_beta(alpha)
    upper = drawn >= 0.5
    place = np.interp(np.where(upper, 2 - 2 * drawn, 2 * drawn), cumulative, places)
    value = 0.5 * place ** (1 / min(alpha, 1))
    return np.asarray(np.where(upper, 1 - value, value))


@functools.lru_cache(maxsize=16)
def _half_beta(alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """The distribution's lower half: values s up to 1, and how much of it lies below 0.5 · s^(1/min(alpha, 1))."""
    if (
        alpha < 1
    ):  # in s the density is (1 - x)^(alpha - 1), which is smooth, where that in x has a pole
        places = np.linspace(0, 1, 4097)
        density = (1 - 0.5 * places ** (1 / alpha)) ** (alpha - 1)
    else:  # s is 2x, from where nothing is left: nine standard deviations from the middle
        places = np.linspace(max(0.0, 1 - 9 / math.sqrt(2 * alpha + 1)), 1, 4097)
        density = (places * (2 - places)) ** (alpha - 1)
    cumulative = np.concatenate([[0], np.cumsum(density[1:] + density[:-1])])
    return places, cumulative / cumulative[-1]
