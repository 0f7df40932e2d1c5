"""Batch: images and columns of some samples between two steps; parts of it, and layouts."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from memload.transforms.following import Followers, TensorsByName, as_signed
from memload.upload import upload

#: On the CPU, a part of a batch needs at most this many bytes, so that they stay in the caches.
#: Images of 224×224 are blurred 1.8 times as fast as in parts of 50 MB, and 1.3 times as fast as in
#: parts of 2 MB. On a device, parts of less would cost more in launches than they save.
_PART_BYTES = {"cpu": 10_000_000}
_DEVICE_PART_BYTES = 64_000_000


class Batch(NamedTuple):
    """Images and columns of some samples, after the steps so far."""

    images: Tensor  #: ``(N, C, H, W)``
    columns: TensorsByName
    #: The columns that move with the images.
    followers: Followers = Followers()
    #: The layout of images that are made.
    memory_format: torch.memory_format = torch.channels_last

    def with_images(self, images: Tensor) -> "Batch":
        """Return the batch with other images."""
        return Batch(images, self.columns, self.followers, self.memory_format)

    def follow(
        self,
        *matrices: Tensor,
        size: tuple[int, int] | None = None,
        shown: Tensor | None = None,
        padding_mode: str = "constant",
    ) -> "Batch":
        """Return the batch with masks, points and boxes moved as the images are.

        Args:
            matrices: Where pixels come from, float64 ``(N, 3, 3)``, one for each movement. A matrix
                maps ``(x, y, 1)`` in the new images to the place in the old ones. (0, 0) is the
                upper left corner of the image, and (0.5, 0.5) the centre of its first pixel.
            size: Height and width of the new images. By default these stay as they are.
            shown: Of the old images, the box that is shown: top, bottom, left and right, int64
                ``(N, 4)``. By default that is all.
            padding_mode: What is outside of the old images, for masks; see `RandomCrop`.
        """
        size = size or (self.images.shape[2], self.images.shape[3])
        columns = self.followers.move(self.columns, matrices, size, shown, padding_mode)
        return self._replace(columns=columns)

    def take(self, places: np.ndarray) -> "Batch":
        """Return a copy of the samples at some places, int64 ``(n,)``."""
        columns = {name: take_some(column, places) for name, column in self.columns.items()}
        return self._replace(images=take_some(self.images, places), columns=columns)


def layout_of(images: Tensor) -> torch.memory_format:
    """Return channels-last for images in this layout, and contiguous for all others."""
    is_last = images.ndim == 4 and images.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if is_last else torch.contiguous_format


def in_layout(images: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Return images in a layout. They are copied if they have another one."""
    is_last = memory_format == torch.channels_last
    if images.device.type != "cpu" or images.is_contiguous(memory_format=memory_format):
        return images.contiguous(memory_format=memory_format)
    # Channel by channel: 42 µs for an image of 224² on a core, and with ``contiguous`` 100 to 170.
    stacked = torch.stack(images.unbind(1), 3 if is_last else 1)
    return stacked.permute(0, 3, 1, 2) if is_last else stacked


def take_some(values: Tensor, places: np.ndarray) -> Tensor:
    """Return the rows ``(n, …)`` of a tensor at some places, in new memory and its layout."""
    signed = as_signed(values)
    is_last = layout_of(values) == torch.channels_last
    # index_select copies whole rows of memory, in 6 µs for an image of 224² on a core. An index in
    # brackets goes value by value, in 75 to 210 µs.
    rows = signed.permute(0, 2, 3, 1) if is_last else signed.contiguous()
    taken = rows.flatten(1) if rows.ndim > 1 else rows
    taken = taken.index_select(0, upload(places, values.device)).view(len(places), *rows.shape[1:])
    return (taken.permute(0, 3, 1, 2) if is_last else taken).view(values.dtype)


def put_some(target: Tensor, places: np.ndarray, values: Tensor) -> None:
    """Write ``values`` ``(n, …)`` to the rows of a tensor at some places, each once."""
    if target.device.type != "cpu":
        as_signed(target).index_copy_(0, upload(places, target.device), as_signed(values))
        return
    # 5 µs for an image of 224² on a core. index_copy_ goes value by value, in 120 µs.
    for place, value in zip(places.tolist(), values, strict=True):
        target[place] = value


def parts(images: Tensor, bytes_of_one: int) -> Iterator[slice]:
    """Yield parts of a batch to compute one after another, to save memory: an image or more each.

    ``bytes_of_one`` is what is needed for an image while its part is computed.
    """
    available = _PART_BYTES.get(images.device.type, _DEVICE_PART_BYTES)
    count = max(1, available // max(1, bytes_of_one))
    for start in range(0, len(images), count):
        yield slice(start, start + count)


def change_some(
    images: Tensor,
    places: np.ndarray,
    change: Callable[[Tensor, np.ndarray], Tensor],
    *,
    in_place: bool = False,
) -> Tensor:
    """Return images of which those at some places are changed, in new memory or in their own.

    ``places`` are int64 ``(n,)``, in ascending order. ``change`` gets some of these images ``(m,
    …)``, which it leaves as they are, and their places. It returns as many of the same shape and
    dtype.
    """
    takes_all = len(places) == len(images)
    if in_place:
        changed = images
    elif takes_all:
        changed = torch.empty_like(images, memory_format=layout_of(images))
    else:
        changed = images.clone(memory_format=layout_of(images))
    # What most changes need for a value, where they compute in float32.
    for part in parts(images[: len(places)], 16 * images.shape[1:].numel()):
        chosen = places[part]
        if takes_all:
            changed[part] = change(images[part], chosen)
        else:
            put_some(changed, chosen, change(take_some(images, chosen), chosen))
    return changed
