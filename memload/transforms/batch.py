"""Images and columns of a batch between two steps, and batches that are put together."""

import functools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from memload.transforms.arguments import wrong
from memload.transforms.following import Followers, Movement, TensorsByName, as_signed
from memload.transforms.sub_batches import in_layout, layout_of, put_some, take_some
from memload.upload import upload


class Batch(NamedTuple):
    """Images and columns of some samples, after the steps so far."""

    images: Tensor  #: ``(N, C, H, W)``
    columns: TensorsByName
    #: How much is left of the area that each box had before the list, ``(N, K)`` by column.
    shares: TensorsByName

    @classmethod
    def of(cls, images: Tensor, columns: TensorsByName, followers: Followers) -> "Batch":
        """Return a batch before the first step."""
        return cls(images, columns, {name: _whole(columns[name]) for name in followers.boxes})

    def moved(self, followers: Followers, movement: Movement) -> "Batch":
        """Return the batch with columns that followed a movement of the images."""
        columns, shares = followers.move(self.columns, self.shares, movement)
        return self._replace(columns=columns, shares=shares)

    def after(self, images: Tensor, columns: TensorsByName) -> "Batch":
        """Return what a step made of the batch. The full area of other boxes counts again."""
        shares = {
            name: share if columns[name] is self.columns[name] else _whole(columns[name])
            for name, share in self.shares.items()
        }
        return Batch(images, columns, shares)

    def laid_out(self, memory_format: torch.memory_format) -> "Batch":
        """Return the batch with images in a layout."""
        return self._replace(images=in_layout(self.images, memory_format))

    def take(self, places: np.ndarray, names: Iterable[str] | None = None) -> "Batch":
        """Return a copy of the samples at some places, with all columns or some."""
        where = functools.cache(functools.partial(upload, places))
        columns = {name: self.columns[name] for name in (self.columns if names is None else names)}
        return Batch(
            take_some(self.images, places),
            {
                name: as_signed(column).index_select(0, where(column.device)).view(column.dtype)
                for name, column in columns.items()
            },
            {
                name: share.index_select(0, where(share.device))
                for name, share in self.shares.items()
                if name in columns
            },
        )

    def changed_since(self, before: "Batch") -> "Batch":
        """Return the batch with only those columns that a step changed."""
        columns = {
            name: column
            for name, column in self.columns.items()
            if column is not before.columns[name]
        }
        shares = {name: share for name, share in self.shares.items() if name in columns}
        return Batch(self.images, columns, shares)


class Target:
    """A batch in new memory, into which samples are put.

    It begins as a copy of ``given``. With ``is_filled``, all images will be put, so none are
    copied. Columns are copied when the first samples are put there. ``origin`` says where the
    samples come from, for messages.
    """

    def __init__(self, given: Batch, origin: str, *, is_filled: bool) -> None:
        images, columns, shares = given
        new = torch.empty_like(images, memory_format=layout_of(images))
        self.batch = Batch(new if is_filled else new.copy_(images), dict(columns), dict(shares))
        self.origin = origin
        self._given = given

    def put(self, places: np.ndarray, values: Batch) -> None:
        """Put samples at places, each once. Columns that ``values`` lacks stay as they are.

        Raises ValueError if shapes or dtypes differ.
        """
        where = functools.cache(functools.partial(upload, places))
        images = self.batch.images
        _check_kind(self.origin, images, values.images)
        put_some(images, places, values.images)
        for given, columns, new in (
            (self._given.columns, self.batch.columns, values.columns),
            (self._given.shares, self.batch.shares, values.shares),
        ):
            for name, column in new.items():
                _check_kind(f"columns[{name!r}] of {self.origin}", columns[name], column)
                if columns[name] is given[name]:
                    columns[name] = given[name].clone(memory_format=torch.contiguous_format)
                rows = as_signed(columns[name])
                rows.index_copy_(0, where(rows.device), as_signed(column))


def _check_kind(subject: str, before: Tensor, after: Tensor) -> None:
    """Check that shape and dtype for each sample are as before."""
    if after.shape[1:] != before.shape[1:] or after.dtype != before.dtype:
        expected = f"as before, {before.dtype} {tuple(before.shape[1:])} for each sample"
        found = f"{after.dtype} {tuple(after.shape[1:])}"
        raise wrong(subject, "shape and dtype", expected, found)


def _whole(boxes: Tensor) -> Tensor:
    """Return the shares ``(N, K)`` of boxes ``(N, K, 4)`` whose area is all there."""
    return torch.ones_like(boxes[..., 0])
