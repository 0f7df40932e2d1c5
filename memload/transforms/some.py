"""Take some images of a batch, and change them."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from memload.upload import upload


def change_some(images: Tensor, places: np.ndarray, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return images of which those at some places are changed, in new memory.

    ``places`` are int64 ``(n,)``, each once. ``change`` gets these images ``(n, …)`` as a copy, and
    returns as many of the same shape and dtype. It is not called if there are none.
    """
    if not len(places):
        return images.clone()
    if len(places) == len(images) and (places[1:] > places[:-1]).all():
        return change(images.clone())
    changed = take_some(images, np.arange(len(images)))
    rows, is_last = _rows(changed)
    new = change(take_some(images, places))
    new_rows = (new.permute(0, 2, 3, 1) if is_last else new).flatten(1)
    rows.flatten(1).index_copy_(0, upload(places, images.device), new_rows)
    return changed


def take_some(images: Tensor, places: np.ndarray) -> Tensor:
    """Return the images at some places, int64 ``(n,)``, in new memory and in the same layout.

    Layouts other than channels-last become contiguous.
    """
    if not len(places):
        return images[:0].clone()
    # index_select copies whole rows of memory, in 6 µs for an image of 224² on a core. An index in
    # brackets goes value by value, in 75 to 210 µs.
    rows, is_last = _rows(images)
    taken = rows.flatten(1).index_select(0, upload(places, images.device))
    taken = taken.view(len(places), *rows.shape[1:])
    return taken.permute(0, 3, 1, 2) if is_last else taken


def _rows(images: Tensor) -> tuple[Tensor, bool]:
    """Return images so that each is one row of memory, and whether channels come last there."""
    is_last = images.is_contiguous(memory_format=torch.channels_last)
    return (images.permute(0, 2, 3, 1) if is_last else images.contiguous()), is_last
