"""What is said of transforms that only torchvision has, and of its random ones."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from torch import Tensor

#: Those that have an equivalent of the same name here. It draws for each sample.
_HERE = (
    *("RandomHorizontalFlip", "RandomVerticalFlip", "RandomCrop", "RandomResizedCrop"),
    *("ColorJitter", "RandomGrayscale", "RandomErasing", "MixUp", "CutMix"),
    *("AutoAugment", "RandAugment", "TrivialAugmentWide"),
    *("RandomAdjustSharpness", "GaussianBlur"),
    *("RandomAffine", "RandomRotation", "RandomPerspective"),
    *("RandomSolarize", "RandomPosterize", "RandomInvert", "RandomAutocontrast"),
    *("RandomEqualize", "RandomApply", "RandomChoice"),
)
#: Further random ones, which have none. For the warning, so is all that is called "Random…".
_OTHERS = (
    *("AugMix", "ElasticTransform", "JPEG", "ScaleJitter"),
    *("RandomChannelPermutation", "RandomIoUCrop", "RandomPhotometricDistort", "RandomResize"),
    *("RandomShortestSize", "RandomZoomOut"),
)
#: With p=1, these draw nothing else.
_ONLY_P = (
    *("RandomHorizontalFlip", "RandomVerticalFlip", "RandomGrayscale", "RandomApply"),
    *("RandomInvert", "RandomPosterize", "RandomSolarize", "RandomEqualize"),
    *("RandomAutocontrast", "RandomAdjustSharpness"),
)

#: What takes the place of other names that torchvision has.
_INSTEAD = {
    **dict.fromkeys(
        ("ToTensor", "ToImage", "PILToTensor"),
        "Leave it out, since images arrive as uint8 tensors; Normalize and ToDtype make floats.",
    ),
    "ConvertImageDtype": "Use ToDtype(dtype, scale=True).",
    "Grayscale": "Use RandomGrayscale(p=1), which keeps the channels.",
    "Pad": "Use RandomCrop(size, padding), or CenterCrop to a larger size.",
    "Lambda": "Put the function itself into the list: it gets images (N, C, H, W).",
    "RandomOrder": "Use RandomChoice of lists in several orders, each a Compose.",
    "InterpolationMode": "Write interpolation='bilinear', 'bicubic' or 'nearest'.",
    "AutoAugmentPolicy": "Write AutoAugment('imagenet'), 'cifar10' or 'svhn'.",
}


def advice_for(name: str) -> str:
    """Return what to do in place of a name that torchvision has, or an empty text."""
    if name in _INSTEAD:
        return _INSTEAD[name]
    if name in _OTHERS:
        return "For a draw for each image, give torchvision's to MemmapDataset(transform=…)."
    return ""


def draws_once_a_batch(transform: Any) -> str:
    """Return a warning that names torchvision's random transforms in a transform of batches.

    It is empty if there are none. Lists, modules and other callable objects are searched through,
    but no functions. torchvision is not imported.
    """
    names = list(dict.fromkeys(_random_names(transform, set())))
    if not names:
        return ""
    here = [name for name in names if name in _HERE]
    missing = [name for name in names if name not in _HERE]
    text = (
        f"transform: torchvision's {', '.join(names)} would draw once for a whole batch, and "
        "change all of its images in the same way."
    )
    if here:
        text += f" Use {', '.join(f'memload.transforms.{name}' for name in here)} instead."
    if missing:
        text += (
            f" memload.transforms has no {', '.join(missing)}: for a draw for each image, give it "
            "to MemmapDataset(transform=…), in a DataLoader, or to its transforms=…, which gets "
            "masks, points and boxes together with the image."
        )
    return text


def _random_names(value: Any, seen: set[int]) -> Iterator[str]:
    """Yield the names of torchvision's random transforms in a value, in their order."""
    if id(value) in seen or isinstance(value, Tensor | ModuleType | type):
        return
    seen.add(id(value))
    if name := _random_name(value):
        yield name
    if isinstance(value, dict):
        parts: Any = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    else:
        parts = vars(value).values() if callable(value) and hasattr(value, "__dict__") else ()
    for part in tuple(parts):
        yield from _random_names(part, seen)


def _random_name(value: Any) -> str:
    """Return the name of the class if it is one of torchvision's, and draws at random."""
    for base in type(value).__mro__:  # also of a class that is derived from torchvision's
        name, is_foreign = base.__name__, base.__module__.startswith("torchvision.")
        if is_foreign and (name.startswith("Random") or name in (*_HERE, *_OTHERS)):
            return "" if _is_fixed(name, value) else name
    return ""


def _is_fixed(name: str, value: Any) -> bool:
    """Return whether the arguments leave nothing to chance."""
    p = getattr(value, "p", None)
    if p == 0 or (p == 1 and name in _ONLY_P):
        return True
    ranges = {"GaussianBlur": "sigma", "JPEG": "quality"}
    low, high = getattr(value, ranges.get(name, ""), None) or (0, 1)
    return bool(low == high)
