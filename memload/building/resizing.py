"""Turns pictures upright and fits them into the stored shape, with masks, points and boxes."""

from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from PIL import Image

from memload.errors import DecodeError

Fit = Literal["crop", "squash", "pad"]
Interpolation = Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]

FITS: tuple[str, ...] = get_args(Fit)
INTERPOLATIONS: tuple[str, ...] = get_args(Interpolation)

#: More pixels than these (3 bytes each) are not computed only to be cropped. A strip of 1×60,000
#: pixels, resized to cover 256×256, would be 15 million pixels high.
_MAX_RESIZED = 1 << 27


class Placement(NamedTuple):
    """How a picture goes into its row: it is turned upright, resized, and cropped or padded.

    The upright picture is resized to ``resized``. Then a window of the target's size is cut out,
    whose top left corner lies at (``left``, ``top``) in the resized picture. Where the window
    reaches beyond the picture, a margin remains to be filled. All sizes are (width, height).
    """

    size: tuple[int, int]  #: that of the picture in its file
    orientation: int  #: the EXIF orientation from which it is turned upright, 1 to 8
    resized: tuple[int, int]
    target: tuple[int, int]
    left: int = 0
    top: int = 0

    @classmethod
    def of(
        cls,
        size: tuple[int, int],
        target: tuple[int, int],
        fit: Fit = "crop",
        orientation: int = 1,
    ) -> "Placement":
        """Return where a picture of a size goes in a ``target``; both are (width, height).

        ``crop`` covers the target and cuts off the rest evenly. For a square target this is
        torchvision's ``Resize(side)`` and ``CenterCrop(side)``, with the same rounding. ``squash``
        changes the aspect ratio. ``pad`` shows the whole picture with an even margin, as Pillow's
        ``ImageOps.pad`` does.
        """
        (width, height), (target_width, target_height) = turn_size(size, orientation), target
        is_wider = width * target_height > height * target_width
        resized_width, resized_height = target
        if fit == "crop":  # torchvision truncates the longer side
            if is_wider:
                resized_width = max(target_width, int(target_height * width / height))
            else:
                resized_height = max(target_height, int(target_width * height / width))
        elif fit == "pad":
            if is_wider:
                resized_height = max(1, round(target_width * height / width))
            else:
                resized_width = max(1, round(target_height * width / height))
        left = round((resized_width - target_width) / 2)  # half to even, as torchvision does
        top = round((resized_height - target_height) / 2)
        return cls(size, orientation, (resized_width, resized_height), target, left, top)

    @property
    def upright(self) -> tuple[int, int]:
        """The size of the upright picture."""
        return turn_size(self.size, self.orientation)

    @property
    def visible(self) -> tuple[int, int, int, int]:
        """The box of the resized picture that lies inside the window."""
        return (
            max(0, self.left),
            max(0, self.top),
            min(self.resized[0], self.left + self.target[0]),
            min(self.resized[1], self.top + self.target[1]),
        )

    def points(self, points: Any) -> np.ndarray:
        """Return where points ``(k, 2)`` of the picture in its file are in the target, float64.

        A point is x and y in pixels, where (0, 0) is the center of the top left pixel.
        """
        points = np.asarray(points, np.float64)
        if self.orientation > 1:
            turned = _TURNS[self.orientation]
            points = points[:, ::-1] if turned.swaps else points
            last = np.array(self.upright) - 1
            points = np.where([turned.flips_x, turned.flips_y], last - points, points)
        if self.resized != self.upright:  # otherwise, not even a rounding is to change them
            points = (points + 0.5) * (np.array(self.resized) / np.array(self.upright)) - 0.5
        return np.asarray(points - np.array([self.left, self.top]))

    def boxes(self, boxes: Any) -> np.ndarray:
        """Return where boxes ``(k, 4)`` of the picture in its file are in the target, float32.

        A box has the edges x1, y1, x2, y2, so that the whole picture is (0, 0, width, height).
        Boxes are clipped. Those of which nothing is left are NaN, as are those with NaN.
        """
        corners = self.points(np.asarray(boxes, np.float64).reshape(-1, 2) - 0.5) + 0.5
        corners = np.sort(corners.reshape(-1, 2, 2), axis=1).clip(0, self.target)
        moved: np.ndarray = corners.reshape(-1, 4).astype(np.float32)
        is_empty = ~np.less(moved[:, :2], moved[:, 2:]).all(axis=1)  # so are those with NaN
        moved[is_empty] = np.nan
        return moved

    def mask(self, mask: np.ndarray, fill: int) -> np.ndarray:
        """Return a mask ``(H, W)`` of the picture in its file where its picture went, contiguous.

        Each id of the result is the nearest one of the mask, see `nearest`, or ``fill`` beyond the
        picture.
        """
        left, top, right, bottom = self.visible
        columns = nearest(self.upright[0], self.resized[0], left, right)
        rows = nearest(self.upright[1], self.resized[1], top, bottom)
        visible = turn_mask(mask, self.orientation).take(rows, axis=0).take(columns, axis=1)
        width, height = self.target
        if visible.shape == (height, width):
            return visible
        padded = np.full((height, width), fill, mask.dtype)
        x, y = max(0, -self.left), max(0, -self.top)
        padded[y : y + bottom - top, x : x + right - left] = visible
        return padded


def nearest(length: int, resized: int, start: int, stop: int) -> np.ndarray:
    """Return which of ``length`` pixels are nearest to pixels ``start`` to ``stop`` of ``resized``.

    These are the pixels that contain the centers of the new ones, as with Pillow's NEAREST and
    torch's ``nearest-exact``. Of two that are equally near it is always the later one, since
    integers are exact. Pillow and torch, which round, take either.
    """
    return (2 * np.arange(start, stop) + 1) * length // (2 * resized)


def resize(
    image: Image.Image,
    placement: Placement,
    interpolation: Interpolation = "bilinear",
    fill: tuple[int, ...] = (0, 0, 0),
) -> Image.Image:
    """Return an upright picture in mode L, RGB or F at the placement's target size.

    ``fill`` is the color (R, G, B) of a margin. Mode F is for gray of 16 bits: white is 65,535.
    ``image`` may be smaller than the upright picture, since a decoder may have scaled it down.

    Pixels are those of Pillow's ``resize`` of the whole picture, then cropped or padded, to the
    bit. Raises DecodeError for an extreme strip, which would take gigabytes.
    """
    (width, height), target = placement.resized, placement.target
    if width * height > max(_MAX_RESIZED, 8 * target[0] * target[1]):
        raise DecodeError(
            "its sides are too unlike ({:,}×{:,}) to cover the stored size. Use --fit pad or "
            "squash".format(*placement.upright)
        )
    resample = Image.Resampling[interpolation.upper()]
    left, top, right, bottom = placement.visible
    if right - left < width and image.width >= image.height:
        # Pillow resizes a picture that is wider than high along its rows, rounds, and then resizes
        # along its columns. Columns outside the window can be cropped in between: no pixel changes,
        # and it takes 8 % less time.
        image = image.resize((width, image.height), resample)
        image = image.crop((left, 0, right, image.height))
        left, right, width = 0, right - left, right - left
    image = image.resize((width, height), resample)
    if (left, top, right, bottom) != (0, 0, width, height):
        image = image.crop((left, top, right, bottom))
    if image.size == target:
        return image
    color: Any = fill
    if image.mode != "RGB":
        color = fill[0] * (257 if image.mode == "F" else 1)
    padded = Image.new(image.mode, target, color)
    padded.paste(image, (max(0, -placement.left), max(0, -placement.top)))
    return padded


class _Turn(NamedTuple):
    """How a stored picture becomes upright: its axes are swapped first, then it is flipped."""

    swaps: bool
    flips_x: bool
    flips_y: bool
    operation: Image.Transpose  #: the same for Pillow


#: By EXIF orientation.
_TURNS = {
    2: _Turn(False, True, False, Image.Transpose.FLIP_LEFT_RIGHT),
    3: _Turn(False, True, True, Image.Transpose.ROTATE_180),
    4: _Turn(False, False, True, Image.Transpose.FLIP_TOP_BOTTOM),
    5: _Turn(True, False, False, Image.Transpose.TRANSPOSE),
    6: _Turn(True, True, False, Image.Transpose.ROTATE_270),
    7: _Turn(True, True, True, Image.Transpose.TRANSVERSE),
    8: _Turn(True, False, True, Image.Transpose.ROTATE_90),
}


def turn(image: Image.Image, orientation: int) -> Image.Image:
    """Return upright a picture that was stored with this EXIF orientation (1 to 8)."""
    return image if orientation == 1 else image.transpose(_TURNS[orientation].operation)


def turn_mask(mask: np.ndarray, orientation: int) -> np.ndarray:
    """Return a view of an array ``(H, W)`` or ``(H, W, C)``, turned as `turn` does it."""
    if orientation == 1:
        return mask
    turned = _TURNS[orientation]
    mask = mask.swapaxes(0, 1) if turned.swaps else mask
    return mask[:: -1 if turned.flips_y else 1, :: -1 if turned.flips_x else 1]


def turn_size(size: tuple[int, int], orientation: int) -> tuple[int, int]:
    """Return the (width, height) that `turn` gives a picture of this size."""
    return size[::-1] if orientation >= 5 else size
