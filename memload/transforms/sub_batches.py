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
#: On the CPU, a part of a small batch may need this much, as parts of less cost more in calls.
_SMALL_BYTES = 1_000_000
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

    ``places`` are int64 ``(n,)``, each once. ``change`` gets some of these images ``(m, …)``, and
    which of the ``n`` they are. It returns as many of the same shape and dtype, and leaves what it
    gets as it is. It is not called if there are none. With ``in_place``, the images are written to
    in place of a copy, and must not be used again.
    """
    if in_place:
        change_into(images, images, places, change)
        return images
    changed = torch.empty_like(images, memory_format=layout_of(images))
    others = np.setdiff1d(np.arange(len(images)), places)
    copy_some(changed, images, others)
    change_into(changed, images, places, change)
    return changed


def change_into(
    target: Tensor, images: Tensor, places: np.ndarray, change: Callable[[Tensor, slice], Tensor]
) -> None:
    """Change images at some places, and write them to the same places of a target.

    See `change_some`. The target may be the images themselves.
    """
    # Images as they were and as they become, and those of the part before.
    bytes_of_one = 3 * images.element_size() * images.shape[1:].numel()
    for part in parts(images[: len(places)], bytes_of_one):
        chosen = places[part]
        first, count = int(chosen[0]), len(chosen)
        if (chosen == np.arange(first, first + count)).all() and target is not images:
            target[first : first + count] = change(images[first : first + count], part)
        else:
            put_some(target, chosen, change(take_some(images, chosen), part))


def copy_some(target: Tensor, images: Tensor, places: np.ndarray) -> None:
    """Copy images at some places to the same places of a target, in the target's layout."""
    if images.device.type != "cpu":
        put_some(target, places, take_some(images, places))
        return
    for place in places.tolist():
        target[place] = images[place]


def in_layout(images: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Return images in a layout. They are copied if they have another one."""
    is_last = memory_format == torch.channels_last
    if images.device.type != "cpu" or images.is_contiguous(memory_format=memory_format):
        return images.contiguous(memory_format=memory_format)
    # Channel by channel: 42 µs for an image of 224² on a core, and with ``contiguous`` 100 to 170.
    stacked = torch.stack(images.unbind(1), 3 if is_last else 1)
    return stacked.permute(0, 3, 1, 2) if is_last else stacked


def put_some(images: Tensor, places: np.ndarray, values: Tensor) -> None:
    """Write ``values`` ``(n, …)`` to the images at some places, int64 ``(n,)``, each once."""
    if images.device.type != "cpu":
        images.index_copy_(0, upload(places, images.device), values)
        return
    # 5 µs for an image of 224² on a core. index_copy_ goes value by value, in 120 µs.
    for place, value in zip(places.tolist(), values, strict=True):
        images[place] = value


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


def layout_of(images: Tensor) -> torch.memory_format:
    """Return channels-last for images in this layout, and contiguous for all others."""
    is_last = images.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if is_last else torch.contiguous_format


def _rows(images: Tensor) -> tuple[Tensor, bool]:
    """Return images so that each is one row of memory, and whether channels come last there."""
    is_last = layout_of(images) == torch.channels_last
    return (images.permute(0, 2, 3, 1) if is_last else images.contiguous()), is_last


def parts(images: Tensor, bytes_of_one: int) -> Iterator[slice]:
    """Yield parts of a batch to compute one after another, to save memory: an image or more each.

    ``bytes_of_one`` is what is needed for an image while its part is computed, beyond the input and
    the output, with what is still there of the part before. It is the least that can be needed, as
    images are never split. Bilinear warps on a GPU have the most, 56 bytes a value.
    """
    is_host = images.device.type == "cpu"
    available = max(images.nbytes, _SMALL_BYTES if is_host else _DEVICE_BYTES)
    if is_host:
        available = min(available, _CACHED_BYTES)
    count = max(1, available // max(1, bytes_of_one))
    for start in range(0, len(images), count):
        yield slice(start, start + count)
