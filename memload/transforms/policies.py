"""The operations, magnitudes and policies of TrivialAugment, RandAugment and AutoAugment."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from memload.transforms.operation_step import INDEX_OF, MOVES, OPERATIONS, is_one_of

#: How many operations TrivialAugment and torchvision's RandAugment choose from: the first, which
#: does nothing, and those up to "Equalize". timm's RandAugment has those from the second on.
NUM_COMMON, NUM_TIMM = 14, 15
#: The magnitude of these is a factor.
HAS_FACTOR = is_one_of("Brightness", "Color", "Contrast", "Sharpness")
#: These go either way.
HAS_SIGN = MOVES | HAS_FACTOR


class Ranges(NamedTuple):
    """The magnitudes of the last bin. Those of the first change nothing."""

    shear: float
    translate: float  #: in pixels
    translate_share: float  #: and in addition, of the width or height
    rotate: float
    enhance: float
    posterize: int  #: how many of the 8 bits are lost


#: TrivialAugment's (Müller and Hutter, https://arxiv.org/abs/2103.10158).
WIDE = Ranges(0.99, 32.0, 0.0, 135.0, 0.99, 6)
#: RandAugment's and AutoAugment's, for which images of 331 pixels moved by up to 150.
NARROW = Ranges(0.3, 0.0, 150.0 / 331.0, 30.0, 0.9, 4)


@functools.lru_cache(maxsize=64)
def magnitudes(ranges: Ranges, bins: int, height: int, width: int) -> np.ndarray:
    """Return the magnitude of each operation and bin, float64 ``(len(OPERATIONS), bins)``.

    They are computed in float32, as torchvision computes them on processors with AVX2. Operations
    without one have 0.
    """

    def steps(first: float, last: float) -> np.ndarray:
        # The values of torch.linspace with AVX2. Without, it rounds some in another way: a shift of
        # 15.999999 pixels becomes one of 16.
        start, end = np.array([first, last], np.float32)
        step, index = float((end - start) / np.float32(bins - 1)), np.arange(bins)
        from_start, from_end = start + step * index, end - step * (bins - 1 - index)
        values: np.ndarray = np.where(index < bins // 2, from_start, from_end).astype(np.float32)
        return values.astype(np.float64)

    shifts = [ranges.translate + ranges.translate_share * extent for extent in (width, height)]
    lost = torch.arange(bins, dtype=torch.float32, device="cpu") / ((bins - 1) / ranges.posterize)
    rows = {
        **dict.fromkeys(("ShearX", "ShearY"), steps(0, ranges.shear)),
        "TranslateX": np.trunc(steps(0, shifts[0])),
        "TranslateY": np.trunc(steps(0, shifts[1])),
        "Rotate": steps(0, ranges.rotate),
        **dict.fromkeys(("Brightness", "Color", "Contrast", "Sharpness"), steps(0, ranges.enhance)),
        "Posterize": (8 - lost).round().double().numpy(),
        "Solarize": steps(1, 0),
    }
    return np.stack([rows.get(name, np.zeros(bins)) for name in OPERATIONS])


def timm_magnitudes(
    operation: np.ndarray,
    level: np.ndarray,
    sign: np.ndarray,
    increasing: bool,
    size: Sequence[int],
) -> tuple[np.ndarray, np.ndarray]:
    """Return timm's operations and their magnitudes, for levels from 0 to 10 and signs, -1 or 1.

    ``size`` is the images' (height, width). A solarization that changes nothing is "Identity".
    """
    share = level / 10
    posterize, solarize = np.trunc(share * 4), np.trunc(share * 256)
    if increasing:
        enhance = np.maximum(0.1, 1 + sign * share * 0.9)
        posterize, solarize = 4 - posterize, 256 - solarize
    else:
        enhance = share * 1.8 + 0.1
    rows = {
        **dict.fromkeys(("ShearX", "ShearY"), sign * share * 0.3),
        "TranslateX": sign * share * 0.45 * size[1],
        "TranslateY": sign * share * 0.45 * size[0],
        "Rotate": sign * share * 30,
        **dict.fromkeys(("Brightness", "Color", "Contrast", "Sharpness"), enhance),
        "Posterize": posterize,
        "Solarize": solarize / 255,
        "SolarizeAdd": np.trunc(share * 110),
    }
    table = np.stack([rows.get(name, np.zeros_like(share)) for name in OPERATIONS])
    changes_nothing = (operation == INDEX_OF["Solarize"]) & (solarize > 255)
    chosen = table[operation, np.arange(len(operation))]
    return np.where(changes_nothing, 0, operation), chosen


class Policy(NamedTuple):
    """AutoAugment's pairs of operations, of which one is drawn for each image."""

    operation: np.ndarray  #: index into `OPERATIONS`, int64 ``(25, 2)``
    share: np.ndarray  #: of the images to which it is done, ``(25, 2)``
    bin: np.ndarray  #: of 10, int64 ``(25, 2)``


@functools.cache
def policy(name: str) -> Policy:
    """Return a policy by its name."""
    pairs = [pair.split(",") for pair in _POLICIES[name].split(";")]
    entries = np.array([[(*half.split(), "0")[:3] for half in pair] for pair in pairs])
    operation = np.vectorize(INDEX_OF.__getitem__)(entries[..., 0])
    return Policy(operation, entries[..., 1].astype(float), entries[..., 2].astype(np.int64))


#: Operation, share of the images, and the bin of the magnitude, if it has one. The pairs were found
#: by search (Cubuk et al., https://arxiv.org/abs/1805.09501).
_POLICIES = {
    "imagenet": """
        Posterize 0.4 8, Rotate 0.6 9; Solarize 0.6 5, AutoContrast 0.6;
        Equalize 0.8, Equalize 0.6; Posterize 0.6 7, Posterize 0.6 6;
        Equalize 0.4, Solarize 0.2 4; Equalize 0.4, Rotate 0.8 8; Solarize 0.6 3, Equalize 0.6;
        Posterize 0.8 5, Equalize 1.0; Rotate 0.2 3, Solarize 0.6 8;
        Equalize 0.6, Posterize 0.4 6; Rotate 0.8 8, Color 0.4 0; Rotate 0.4 9, Equalize 0.6;
        Equalize 0.0, Equalize 0.8; Invert 0.6, Equalize 1.0; Color 0.6 4, Contrast 1.0 8;
        Rotate 0.8 8, Color 1.0 2; Color 0.8 8, Solarize 0.8 7; Sharpness 0.4 7, Invert 0.6;
        ShearX 0.6 5, Equalize 1.0; Color 0.4 0, Equalize 0.6; Equalize 0.4, Solarize 0.2 4;
        Solarize 0.6 5, AutoContrast 0.6; Invert 0.6, Equalize 1.0; Color 0.6 4, Contrast 1.0 8;
        Equalize 0.8, Equalize 0.6
    """,
    "cifar10": """
        Invert 0.1, Contrast 0.2 6; Rotate 0.7 2, TranslateX 0.3 9;
        Sharpness 0.8 1, Sharpness 0.9 3; ShearY 0.5 8, TranslateY 0.7 9;
        AutoContrast 0.5, Equalize 0.9; ShearY 0.2 7, Posterize 0.3 7;
        Color 0.4 3, Brightness 0.6 7; Sharpness 0.3 9, Brightness 0.7 9;
        Equalize 0.6, Equalize 0.5; Contrast 0.6 7, Sharpness 0.6 5;
        Color 0.7 7, TranslateX 0.5 8; Equalize 0.3, AutoContrast 0.4;
        TranslateY 0.4 3, Sharpness 0.2 6; Brightness 0.9 6, Color 0.2 8;
        Solarize 0.5 2, Invert 0.0; Equalize 0.2, AutoContrast 0.6; Equalize 0.2, Equalize 0.6;
        Color 0.9 9, Equalize 0.6; AutoContrast 0.8, Solarize 0.2 8;
        Brightness 0.1 3, Color 0.7 0; Solarize 0.4 5, AutoContrast 0.9;
        TranslateY 0.9 9, TranslateY 0.7 9; AutoContrast 0.9, Solarize 0.8 3;
        Equalize 0.8, Invert 0.1; TranslateY 0.7 9, AutoContrast 0.9
    """,
    "svhn": """
        ShearX 0.9 4, Invert 0.2; ShearY 0.9 8, Invert 0.7; Equalize 0.6, Solarize 0.6 6;
        Invert 0.9, Equalize 0.6; Equalize 0.6, Rotate 0.9 3; ShearX 0.9 4, AutoContrast 0.8;
        ShearY 0.9 8, Invert 0.4; ShearY 0.9 5, Solarize 0.2 6; Invert 0.9, AutoContrast 0.8;
        Equalize 0.6, Rotate 0.9 3; ShearX 0.9 4, Solarize 0.3 3; ShearY 0.8 8, Invert 0.7;
        Equalize 0.9, TranslateY 0.6 6; Invert 0.9, Equalize 0.6; Contrast 0.3 3, Rotate 0.8 4;
        Invert 0.8, TranslateY 0.0 2; ShearY 0.7 6, Solarize 0.4 8; Invert 0.6, Rotate 0.8 4;
        ShearY 0.3 7, TranslateX 0.9 3; ShearX 0.1 6, Invert 0.6;
        Solarize 0.7 2, TranslateY 0.6 7; ShearY 0.8 4, Invert 0.8;
        ShearX 0.7 9, TranslateY 0.8 3; ShearY 0.8 5, AutoContrast 0.7; ShearX 0.7 2, Invert 0.1
    """,
}
#: The names of all policies.
POLICIES = tuple(_POLICIES)
