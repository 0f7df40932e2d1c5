"""Crops, resizes and flips: the transforms that move pixels, and what follows them.

Masks, points and boxes are described in `Compose`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from memload.transforms.arguments import (
    interpolation_name,
    interval,
    numbers,
    pair,
    per_channel,
    share,
    size_of_epoch,
    wrong,
)
from memload.transforms.boxes import random_boxes
from memload.transforms.draws import Draws
from memload.transforms.geometry import PADDING_MODES, Plan
from memload.transforms.passes import CropPass
from memload.transforms.transform import Transform

#: The interpolations of a resize.
_INTERPOLATIONS = ("bilinear", "bicubic")
#: A function of the epoch that returns a size.
SizeOfEpoch = Callable[[int], int | Sequence[int]]


class RandomHorizontalFlip(Transform):
    """Flip each image left to right with share ``p``, like torchvision's.

    Images ``(N, C, H, W)`` keep their shape and dtype.

    With ``alternate=True`` the share ``p`` of the images is flipped in epochs 0, 2, 4, …, always
    the same ones, and all others in epochs 1, 3, 5, … So two epochs show both versions of each
    image. That is not torchvision's, but the alternating flip of https://arxiv.org/abs/2404.00498.
    A Loader counts the epochs. Where a sample may come more than once an epoch, each of its visits
    is drawn on its own, so it may look the same in two epochs.

    >>> flipped = RandomHorizontalFlip(p=0.5)(images, samples=samples)
    """

    pass_type, kind, moves_pixels = CropPass, "flip", True
    _flips_height = False

    def __init__(self, p: float = 0.5, alternate: bool = False) -> None:
        self.p = share(self, "p", p)
        if not isinstance(alternate, bool):
            raise wrong(self, "alternate", "True or False", repr(alternate))
        self.alternate = alternate

    def add_to(self, plan: Plan, draws: Draws) -> None:
        """Flip the drawn samples."""
        axis = plan.height if self._flips_height else plan.width
        if self.alternate:
            in_even_epochs = draws.same_in_every_epoch().uniform(1)[0] < self.p
            chosen = in_even_epochs ^ (draws.epoch % 2 == 1)
        else:
            chosen = draws.uniform(1)[0] < self.p
        axis.flipped = axis.flipped ^ chosen

    def __repr__(self) -> str:
        alternate = ", alternate=True" if self.alternate else ""
        return f"{type(self).__name__}(p={self.p}{alternate})"


class RandomVerticalFlip(RandomHorizontalFlip):
    """Flip each image top to bottom with share ``p``, like torchvision's.

    Images ``(N, C, H, W)`` keep their shape and dtype. For ``alternate`` see
    `RandomHorizontalFlip`.

    >>> flipped = RandomVerticalFlip(p=0.5)(images, samples=samples)
    """

    _flips_height = True


class CenterCrop(Transform):
    """Crop the middle of each image, like torchvision's.

    ``size`` is a number of pixels, (height, width), or a function of the epoch that returns one of
    these; see `RandomResizedCrop`. Smaller images get a margin of 0. Images ``(N, C, H, W)`` keep
    their dtype.

    >>> CenterCrop(224)(images).shape[2:]
    torch.Size([224, 224])
    """

    pass_type, kind, moves_pixels = CropPass, "crop", True

    def __init__(self, size: int | Sequence[int] | SizeOfEpoch) -> None:
        self.size = size if callable(size) else pair(self, "size", size)

    def add_to(self, plan: Plan, draws: Draws) -> None:
        """Crop both axes."""
        sizes = size_of_epoch(self, self.size, draws.epoch)
        for axis, size in zip((plan.height, plan.width), sizes, strict=True):
            missing = size - axis.extent
            # As in torchvision: a crop's start is rounded half to even, but the smaller half of a
            # margin comes first.
            start = -(missing // 2) if missing > 0 else round(-missing / 2)
            axis.crop(start, size)


class RandomCrop(Transform):
    """Crop a random window of each image and its padding, like torchvision's.

    ``size`` is a number of pixels or (height, width). ``padding`` is the width of the padding: one
    number, two (left and right, top and bottom), or four (left, top, right, bottom). Padding has
    the value ``fill``, one number, one for each channel, or None for 0, in the units of the images;
    for uint8, fractions are cut off. ``pad_if_needed`` pads images that are still too small on both
    sides. Images ``(N, C, H, W)`` keep their dtype. Padding of masks is the ``mask_fill`` of the
    `Compose`.

    ``padding_mode`` may also be ``"edge"``, which repeats the pixels at the edge, or one that
    mirrors the image: ``"reflect"`` without the pixels at the edge, ``"symmetric"`` with them. The
    padding of ``"reflect"`` has to be less than the side of the image, and that of ``"symmetric"``
    at most as much. Masks are padded in the same way. Points and boxes move as with constant
    padding: what is in the mirror has none.

    >>> crops = RandomCrop(32, padding=4)(images, samples=samples)
    """

    pass_type, kind, moves_pixels = CropPass, "crop", True

    def __init__(
        self,
        size: int | Sequence[int],
        padding: int | Sequence[int] | None = None,
        pad_if_needed: bool = False,
        fill: float | Sequence[float] | None = 0,
        padding_mode: str = "constant",
    ) -> None:
        self.size = pair(self, "size", size)
        self.pad_if_needed = pad_if_needed
        self.fill = 0 if fill is None else numbers(self, "fill", fill)
        sides = tuple(padding) if isinstance(padding, Sequence) else (padding or 0,)
        are_integers = all(isinstance(side, int | np.integer) for side in sides)
        if len(sides) not in (1, 2, 4) or not are_integers or min(sides) < 0:
            raise wrong(self, "padding", "1, 2 or 4 integers of at least 0", repr(padding))
        if padding_mode not in PADDING_MODES:
            expected = f"one of {', '.join(map(repr, PADDING_MODES))}"
            raise wrong(self, "padding_mode", expected, repr(padding_mode))
        if padding_mode != "constant" and isinstance(fill, Sequence):
            expected = f"one number with padding_mode={padding_mode!r}, which does not use it"
            raise wrong(self, "fill", expected, repr(fill))
        self.padding_mode = padding_mode
        # (a,) becomes (a, a, a, a), and (a, b) becomes (a, b, a, b).
        self.padding = sides * (4 // len(sides))

    def add_to(self, plan: Plan, draws: Draws) -> None:
        """Crop both axes."""
        left, top, right, bottom = self.padding
        axes = (plan.height, top, bottom), (plan.width, left, right)
        for (axis, before, after), size, drawn in zip(
            axes, self.size, draws.uniform(2), strict=True
        ):
            padded = axis.extent + before + after
            if padded < size and self.pad_if_needed:
                missing = size - padded
                before, after, padded = before + missing, after + missing, padded + 2 * missing
            if padded < size:
                expected = f"at most the {padded} pixels of the padded image"
                raise wrong(self, "size", expected, size, "Give padding or pad_if_needed.")
            largest = {"reflect": axis.extent - 1, "symmetric": axis.extent}
            if max(before, after) > largest.get(self.padding_mode, max(before, after)):
                expected = f"at most {largest[self.padding_mode]} for {axis.extent} pixels"
                expected += f" with padding_mode={self.padding_mode!r}"
                raise wrong(self, "padding", expected, max(before, after))
            start = (drawn * (padded - size + 1)).astype(np.int64) - before
            axis.crop(start, size, padding_mode=self.padding_mode)
        fill = per_channel(self, "fill", self.fill, len(plan.fill), plan.dtype)
        plan.fill = tuple(np.trunc(fill).tolist()) if plan.dtype == torch.uint8 else fill


class Resize(Transform):
    """Resize each image, like torchvision's.

    ``size`` is (height, width), or one number for the shorter side: then the longer side keeps the
    aspect ratio, rounded down, and has at most ``max_size`` pixels. With ``size=None`` the longer
    side becomes ``max_size``. ``size`` may also be a function of the epoch that returns one of
    these; see `RandomResizedCrop`.

    ``interpolation`` is ``"bilinear"`` or ``"bicubic"``. torchvision's ``InterpolationMode`` and
    Pillow's numbers mean the same. ``antialias`` widens the filter where images become smaller, as
    Pillow does. Bicubic weights are those of torch: with ``antialias`` the cubic has a = -0.5, as
    in Pillow, and without a = -0.75, as in OpenCV.

    Images ``(N, C, H, W)`` keep their dtype. On the CPU, pixels are those of
    `torch.nn.functional.interpolate`. On CUDA, uint8 pixels differ from these by at most two
    levels, and but for few pixels bilinear ones by at most one. Those of images with a side of more
    than 16,384 may differ by more, as bicubic values are not cut off between rows and columns.
    Bicubic floats may lie a little outside of the images' range, since torch does not cut them off.

    Pillow's uint8 pixels differ from torch's, since its weights have more bits: bilinear ones by at
    most 2 levels, bicubic ones by at most 3. Where Pillow 13 shrinks the height, it resizes columns
    before rows. If the width changes as well, it cuts off other bicubic values in between. At sharp
    edges, pixels then differ by up to 10 levels in photographs that become smaller, by up to 20
    where their width grows, and by up to 28 in noise.

    Masks are resized to the nearest neighbour: pixel ``i`` of ``new`` pixels is pixel
    ``((2·i + 1)·old) // (2·new)`` of the ``old`` ones.

    >>> Resize(256, interpolation="bicubic")(torch.zeros(1, 3, 512, 1024)).shape
    torch.Size([1, 3, 256, 512])
    """

    pass_type, kind, moves_pixels = CropPass, "resize", True

    def __init__(
        self,
        size: int | Sequence[int] | SizeOfEpoch | None,
        interpolation: Any = "bilinear",
        max_size: int | None = None,
        antialias: bool = True,
    ) -> None:
        if size is None and max_size is None:
            raise ValueError("Resize: neither size nor max_size was given. Give one of them.")
        self.size: int | tuple[int, int] | SizeOfEpoch | None = None  # repr shows it first
        self.max_size = max_size
        self.size = size if callable(size) else self._checked("size", size)
        self.interpolation = interpolation_name(self, interpolation, *_INTERPOLATIONS)
        self.antialias = _antialias(self, antialias)

    def add_to(self, plan: Plan, draws: Draws) -> None:
        """Resize both axes."""
        height, width = plan.height.extent, plan.width.extent
        size = self.size
        if callable(size):
            size = self._checked(f"size in epoch {draws.epoch}", size(draws.epoch))
        if not isinstance(size, tuple):
            shorter, longer = sorted((height, width))
            if size is not None:
                shorter, longer = size, int(size * longer / shorter)
            if self.max_size is not None and (size is None or longer > self.max_size):
                shorter, longer = max(1, int(self.max_size * shorter / longer)), self.max_size
            size = (longer, shorter) if height > width else (shorter, longer)
        plan.height.crop(0, height, resized=size[0])
        plan.width.crop(0, width, resized=size[1])
        plan.antialias = self.antialias
        plan.bicubic = self.interpolation == "bicubic"

    def _checked(self, argument: str, size: Any) -> int | tuple[int, int] | None:
        """Return a size: one number for the shorter side, (height, width), or None."""
        checked: int | tuple[int, int] | None = None
        if size is not None:
            both = pair(self, argument, size)
            checked = both if isinstance(size, Sequence) and len(size) == 2 else both[0]
        largest = self.max_size
        if largest is not None and (isinstance(checked, tuple) or largest <= (checked or 0)):
            expected = "an integer above size, which is then one number or None"
            raise wrong(self, "max_size", expected, f"{largest} with size {size}")
        return checked


class RandomResizedCrop(Transform):
    """Crop a box of random area and aspect ratio from each image, and resize it to ``size``.

    The algorithm is torchvision's: the area is uniform between ``scale[0]`` and ``scale[1]`` times
    that of the image, and the logarithm of width / height is uniform over ``ratio``. If ten
    attempts do not fit, the box is as much of the middle as ``ratio`` allows.

    ``size`` is a number of pixels or (height, width). Images ``(N, C, H, W)`` keep their dtype. For
    ``interpolation``, ``antialias`` and rounding see `Resize`.

    >>> RandomResizedCrop(224)(images, samples=samples).shape[2:]
    torch.Size([224, 224])

    ``size`` may also be a function of the epoch that returns one of these: progressive resizing.
    A Loader counts the epochs, and training that is resumed goes on at the same size. The function
    must always return the same for an epoch. Threads that make batches call it. To pickle the
    transform or its Loader, pickle has to know the function: it is one of a module, not a lambda.
    With the ``static_buffers`` of a Loader, the size must be the same in all epochs.

    >>> def size(epoch):
    ...     return min(128 + 4 * epoch, 192) // 32 * 32
    >>> loader = memload.Loader("train.bin", 256, transform=Compose([RandomResizedCrop(size)]))
    """

    pass_type, kind, moves_pixels = CropPass, "resize", True

    def __init__(
        self,
        size: int | Sequence[int] | SizeOfEpoch,
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        interpolation: Any = "bilinear",
        antialias: bool = True,
    ) -> None:
        self.size = size if callable(size) else pair(self, "size", size)
        self.scale = interval(self, "scale", scale, 0)
        self.ratio = interval(self, "ratio", ratio, 1e-6)
        self.interpolation = interpolation_name(self, interpolation, *_INTERPOLATIONS)
        self.antialias = _antialias(self, antialias)

    def add_to(self, plan: Plan, draws: Draws) -> None:
        """Resize a box of both axes."""
        height, width = extents = plan.height.extent, plan.width.extent
        start, length, fits = random_boxes(draws, extents, self.scale, self.ratio, smallest=1)
        if not fits.all():
            # The box is in the middle, and has a pixel at least.
            middle_height = max(1, min(height, round(width / self.ratio[0])))
            middle_width = max(1, min(width, round(height * self.ratio[1])))
            middle = np.array([[middle_height], [middle_width]])
            length = np.where(fits, length, middle)
            start = np.where(fits, start, (np.array([[height], [width]]) - middle) // 2)
        size = size_of_epoch(self, self.size, draws.epoch)
        plan.height.crop(start[0], length[0], resized=size[0])
        plan.width.crop(start[1], length[1], resized=size[1])
        plan.antialias = self.antialias
        plan.bicubic = self.interpolation == "bicubic"


def _antialias(owner: Transform, given: Any) -> bool:
    if not isinstance(given, bool):
        advice = "torchvision's None means False." if given is None else ""
        raise wrong(owner, "antialias", "True or False", repr(given), advice)
    return given
