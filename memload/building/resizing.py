"""Any picture to the fixed shape: where its pixels, and the points upon it, come to lie."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
from PIL import Image

from memload.errors import DependencyError

Fit = Literal["crop", "squash", "pad"]
Interpolation = Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]
Resizer = Literal["pillow", "torch"]

FITS: tuple[str, ...] = get_args(Fit)
INTERPOLATIONS: tuple[str, ...] = get_args(Interpolation)
RESIZERS: tuple[str, ...] = get_args(Resizer)
#: the filters that torch has for uint8 with antialias
TORCH_INTERPOLATIONS = ("bilinear", "bicubic")
#: So many pixels, 256 MiB, may be resized only to be cut off: a strip of 60,000×1 would be 15 million wide at 256.
_CUT_OFF = 1 << 26


@dataclass(frozen=True)
class Placement:
    """How a picture of ``source`` (width, height) comes to the ``target`` (width, height).

    It is resized to ``resized``; then the window of the target's size whose top left corner lies at ``left``,
    ``top`` of the resized picture is taken. Negative values leave room at that side, to be filled.
    """

    source: tuple[int, int]
    resized: tuple[int, int]
    target: tuple[int, int]
    left: int
    top: int

    def points(self, points: np.ndarray) -> np.ndarray:
        """Carry points ``(k, 2)``, x and y in pixels where (0, 0) is the centre of the top left one."""
        scale = np.array(self.resized) / np.array(self.source)
        return np.asarray((points + 0.5) * scale - 0.5 - np.array([self.left, self.top]))


def place(source: tuple[int, int], target: tuple[int, int], fit: Fit = "crop") -> Placement:
    """Say where a picture of ``source`` (width, height) goes in a ``target`` (width, height).

    ``crop`` covers the target and cuts what stands over, evenly; for a square this is torchvision's
    ``Resize(side)`` and ``CenterCrop(side)``, with their rounding. ``squash`` changes the aspect ratio.
    ``pad`` shows the whole picture and leaves an even margin, as Pillow's ``ImageOps.pad`` does.
    """
    (w, h), (tw, th) = source, target
    if fit == "squash":
        return Placement(source, target, target, 0, 0)
    wide = w * th > h * tw  # wider than the target
    if fit == "crop":
        # torchvision truncates the longer side and rounds the margins half to even
        rw, rh = (max(tw, int(th * w / h)), th) if wide else (tw, max(th, int(tw * h / w)))
        return Placement(source, (rw, rh), target, round((rw - tw) / 2), round((rh - th) / 2))
    if fit == "pad":
        rw, rh = (tw, max(1, round(tw * h / w))) if wide else (max(1, round(th * w / h)), th)
        return Placement(source, (rw, rh), target, round((rw - tw) / 2), round((rh - th) / 2))
    raise ValueError(f"fit: expected one of {', '.join(FITS)}, found {fit!r}")


def resize(
    image: Image.Image,
    placement: Placement,
    *,
    interpolation: Interpolation = "bilinear",
    resizer: Resizer = "pillow",
    fill: tuple[int, ...] = (0, 0, 0),
    box: tuple[float, float, float, float] | None = None,
) -> Image.Image:
    """Return a picture in modes L or RGB at the placement's target size.

    ``box`` asks for the matched box: only the pixels inside the target are computed, in one step. It is the
    region of ``image`` that shows the whole source, which a decoder may already have scaled down. Results
    differ from the exact way by a level here and there, since Pillow keeps boxes in single precision. A strip
    of which nearly all is cut off is always done so, by Pillow.
    """
    inner, size = _window(placement)
    if math.prod(placement.resized) - math.prod(size) > max(_CUT_OFF, 8 * math.prod(size)):
        box = box or (0.0, 0.0, float(image.width), float(image.height))
    if resizer == "torch" and box is None:
        image = _resize_torch(image, placement.resized, interpolation)
        image = image.crop(inner) if inner != (0, 0, *placement.resized) else image
    elif box is not None:
        sx, sy = (box[2] - box[0]) / placement.resized[0], (box[3] - box[1]) / placement.resized[1]
        matched = (
            inner[0] * sx,
            inner[1] * sy,
            min(inner[2] * sx, box[2]),
            min(inner[3] * sy, box[3]),
        )
        image = image.resize(size, Image.Resampling[interpolation.upper()], box=matched)
    else:
        width, height = placement.resized
        if size[0] < width and interpolation != "nearest":
            # Pillow resizes along the rows and then along the columns, rounding between. So the columns that
            # are cut off can go in between, and every pixel stays as it is; 3 % of a photograph saved.
            image = image.resize((width, image.height), Image.Resampling[interpolation.upper()])
            image = image.crop((inner[0], 0, inner[2], image.height))
            inner, width = (0, inner[1], size[0], inner[3]), size[0]
        image = image.resize((width, height), Image.Resampling[interpolation.upper()])
        image = image.crop(inner) if inner != (0, 0, width, height) else image
    if size == placement.target:
        return image
    padded = Image.new(image.mode, placement.target, fill if image.mode != "L" else fill[0])
    padded.paste(image, (max(0, -placement.left), max(0, -placement.top)))
    return padded


#: EXIF orientation → what Pillow does to the stored picture to show it upright
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def turn(image: Image.Image, orientation: int) -> Image.Image:
    """Show upright a picture that was stored with this EXIF orientation (1 to 8)."""
    return image.transpose(_TURNS[orientation]) if orientation in _TURNS else image


def flip(placement: Placement, orientation: int) -> Placement:
    """Mirror the window, whose margins may differ by a pixel, as `turn` will: the rounding is the upright picture's."""
    (rw, rh), (tw, th) = placement.resized, placement.target
    left = rw - tw - placement.left if orientation in (2, 3, 7, 8) else placement.left
    top = rh - th - placement.top if orientation in (3, 4, 6, 7) else placement.top
    return replace(placement, left=left, top=top)


def turn_points(points: np.ndarray, size: tuple[int, int], orientation: int) -> np.ndarray:
    """Carry points ``(k, 2)`` through `turn` of a picture of ``size`` (width, height)."""
    x, y = points[:, 0], points[:, 1]
    right, bottom = size[0] - 1, size[1] - 1
    turned = {
        2: (right - x, y),
        3: (right - x, bottom - y),
        4: (x, bottom - y),
        5: (y, x),
        6: (bottom - y, x),
        7: (bottom - y, right - x),
        8: (y, right - x),
    }.get(orientation, (x, y))
    return np.stack(turned, axis=1)


def _window(placement: Placement) -> tuple[tuple[int, int, int, int], tuple[int, int]]:
    """Return the part of the resized picture that shows, and its size."""
    (rw, rh), (tw, th) = placement.resized, placement.target
    left, top = max(0, placement.left), max(0, placement.top)
    right, bottom = min(rw, placement.left + tw), min(rh, placement.top + th)
    return (left, top, right, bottom), (right - left, bottom - top)


def _resize_torch(image: Image.Image, size: tuple[int, int], interpolation: str) -> Image.Image:
    torch = import_torch()
    pixels = torch.from_numpy(np.array(image)).view(image.height, image.width, -1)
    batch = pixels.permute(2, 0, 1)[
        None
    ]  # channels_last in memory, for which torch has its fast uint8 path
    mode, to = interpolation, (size[1], size[0])
    if mode not in TORCH_INTERPOLATIONS:
        raise ValueError(
            f"interpolation: expected one of {', '.join(TORCH_INTERPOLATIONS)} for torch, found {mode!r}"
        )
    resized = torch.nn.functional.interpolate(batch, to, mode=mode, antialias=True)[0].permute(
        1, 2, 0
    )
    return Image.fromarray(
        resized.contiguous().numpy().squeeze(2)
        if image.mode == "L"
        else resized.contiguous().numpy()
    )


def import_torch() -> Any:
    """Import torch, which everything else here does without. Raises DependencyError."""
    try:
        import torch  # the one place: it takes a second, and only this resizer needs it
    except ImportError as error:
        raise DependencyError(
            f"resizer 'torch': expected torch to be installed, found {error}. "
            "Install it, or leave --resizer at 'pillow'",
            name="torch",
        ) from None
    return torch
