"""What each operation does, in torch's own operations: the reference of `operations_kernel`."""

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from memload.transforms.color import (
    adjust_brightness,
    adjust_contrast,
    adjust_hue,
    adjust_saturation,
    grayscale,
    jitter_contrast,
    jitter_saturation,
)
from memload.transforms.filtering import gaussian_blur, sharpen
from memload.transforms.lookup import autocontrast, equalize, invert, posterize, solarize
from memload.transforms.operations_plan import INDEX_OF, MOVES, OPERATIONS, OperationStep
from memload.transforms.sub_batches import change_into, copy_some, layout_of
from memload.transforms.warping import matrices_of, warp
from memload.upload import upload

#: Stands for all operations that move pixels. They are done together, by a matrix for each image.
_MOVING = -1


def change_each(images: Tensor, steps: Sequence[OperationStep]) -> Tensor:
    """Return images in new memory, each changed by its operations, one step after another.

    The samples of each operation are changed together.
    """
    before, after = images, torch.empty_like(images, memory_format=layout_of(images))
    for step in steps or [_nothing(len(images))]:
        groups = np.where(MOVES[step.operation], _MOVING, step.operation)
        for number in np.unique(groups):
            places = np.flatnonzero(groups == number)
            if number != INDEX_OF["Identity"]:
                change = functools.partial(_change, number, step.at(places))
                change_into(after, before, places, change)
            elif before is images:
                copy_some(after, images, places)
        before = after
    return after


def _nothing(count: int) -> OperationStep:
    return OperationStep(np.full(count, INDEX_OF["Identity"]), np.zeros(count))


def _change(number: int, step: OperationStep, images: Tensor, part: slice) -> Tensor:
    """Return images changed by an operation, or moved, each by its magnitude.

    The images are a part of those of the step.
    """
    step = step.at(part)
    if number == INDEX_OF["Blur"]:
        return gaussian_blur(images, step.kernel_size, step.magnitude)
    if number != _MOVING:
        return _CHANGES[OPERATIONS[number]](images, step.magnitude)
    return warp(images, matrices_of(step, *images.shape[2:]), step.interpolation, step.fill)


def _solarize_add(images: Tensor, added: np.ndarray) -> Tensor:
    """Return uint8 images whose values below 128 have grown by ``added``, which is at most 127."""
    levels = upload(added.astype(np.uint8), images.device)[:, None, None, None]
    return torch.where(images < 128, images + levels, images)


def _white(images: Tensor) -> int:
    return 255 if images.dtype == torch.uint8 else 1


#: Functions of images and magnitudes by the operation, where it changes values.
_CHANGES: dict[str, Callable[[Tensor, np.ndarray], Tensor]] = {
    "Brightness": adjust_brightness,
    "Color": adjust_saturation,
    "Contrast": adjust_contrast,
    "Sharpness": sharpen,
    "Posterize": lambda images, magnitude: posterize(images, magnitude.astype(np.int64)),
    "Solarize": lambda images, magnitude: solarize(images, magnitude * _white(images)),
    "AutoContrast": lambda images, magnitude: autocontrast(images),
    "Equalize": lambda images, magnitude: equalize(images),
    "Invert": lambda images, magnitude: invert(images),
    "SolarizeAdd": _solarize_add,
    "JitterContrast": jitter_contrast,
    "JitterSaturation": jitter_saturation,
    "Hue": adjust_hue,
    "Grayscale": lambda images, magnitude: grayscale(images),
}
