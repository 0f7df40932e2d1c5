"""Take some images of a batch, and change them, or all of them in parts."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from memload.upload import upload

#: On the CPU, a part of a batch needs at most this many bytes, so that they stay in the caches.
#: Images of 224×224 are blurred 1.8 times as fast as in parts of 50 MB, and 1.3 times as fast as in
#: parts of 2 MB. Other changes differ less.
_CACHED_BYTES = 10_000_000
#: On a device, a part needs at most this many bytes, or as many as the batch has. Smaller parts of
#: small batches would cost more in launches than they save, as 64 MB are little beside a model.
_DEVICE_BYTES = 64_000_000


def change_some(
    images: Tensor,
    places: np.ndarray,
    change: Callable[[Tensor, slice], Tensor],
    *,
    in_place: bool = False,
) -> Tensor:
    """Return images of which those at some places are changed, in new memory.

    ``places`` are int64 ``(n,)``, each once. ``change`` gets some of these images ``(m, …)`` as a
    copy, and which of the ``n`` they are. It returns as many of the same shape and dtype. It is not
    called if there are none. With ``in_place``, the images are written to in place of a copy, and
    must not be used again.
    """
    changed = images if in_place else take_some(images, np.arange(len(images)))
    if not len(places):
        return changed
    if len(places) == len(images) and (places[1:] > places[:-1]).all():
        return change(changed, slice(None))
    rows, is_last = _rows(changed)
    # Images as they were and as they become, and those of the part before.
    bytes_of_one = 3 * images.element_size() * images.shape[1:].numel()
    for part in parts(images[: len(places)], bytes_of_one):
        new = change(take_some(changed, places[part]), part)
        new_rows = (new.permute(0, 2, 3, 1) if is_last else new).flatten(1)
        _put(rows.flatten(1), places[part], new_rows)
    return changed


def _put(rows: Tensor, places: np.ndarray, new_rows: Tensor) -> None:
    """Write rows of memory to some places among others."""
    if rows.device.type == "cpu" and not rows.is_floating_point():  # floats may have gradients
        # index_copy_ goes value by value: 120 µs for a uint8 image of 224² on a core, and not 4.
        rows.numpy()[places] = new_rows.numpy()
    else:
        rows.index_copy_(0, upload(places, rows.device), new_rows)


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


def parts(images: Tensor, bytes_of_one: int) -> Iterator[slice]:
    """Yield parts of a batch to compute one after another, to save memory: an image or more each.

    ``bytes_of_one`` is what is needed for an image while its part is computed, beyond the input and
    the output, with what is still there of the part before. It is the least that can be needed, as
    images are never split. Bilinear warps on a GPU have the most, 56 bytes a value.
    """
    is_host = images.device.type == "cpu"
    available = _CACHED_BYTES if is_host else max(images.nbytes, _DEVICE_BYTES)
    count = max(1, available // max(1, bytes_of_one))
    for start in range(0, len(images), count):
        yield slice(start, start + count)
