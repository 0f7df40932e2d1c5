"""Map-style random access to a memory map, as torch's DataLoader and its users expect it."""

import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from memload.errors import FormatError
from memload.storage.index import Index
from memload.storage.keys import Keys
from memload.storage.shards import Shards


class MemmapDataset(Dataset[Any]):
    """The samples of ``out.bin``: ``dataset[i]`` is ``(image, label)``, and no pixel is decoded or copied.

    ``image`` is a tensor ``(C, H, W)``, uint8 unless other arrays were built, whose memory is channels-last
    (``H × W × C``) and is the mapped file itself. It can be written to: that changes neither the file nor what other
    processes see, but it does change what this process reads from that row until the data set is opened again; clone
    before working in place. After the image come the values of ``columns``: by default ``label`` if there is one, else
    all columns; a data set without any gives the image alone. Single numbers are Python numbers, arrays are tensors.

    ``transform`` is called with the image, ``target_transform`` with the first column's value, as in torchvision;
    ``transforms`` is called with image and columns together and returns the sample, as torchvision's v2 does.

    ``path`` is ``out.bin`` or an index such as ``out.idx`` or a saved subset. Opening takes milliseconds and private
    memory for neither pixels nor columns, whose pages all processes share. It pickles as its path (and, for
    an unsaved subset, the samples' numbers) and opens again in the worker. Reading is thread-safe.

    Raises FormatError, and MissingError (also a FileNotFoundError), where files are missing or damaged.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        columns: Sequence[str] | None = None,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        transforms: Callable[..., Any] | None = None,
    ) -> None:
        if transforms is not None and (transform is not None or target_transform is not None):
            raise ValueError(
                "transforms: expected it alone, found transform or target_transform beside it"
            )
        index = Index.open(path)
        # Absolute from here on: the user may change to another folder, and a worker may start in one.
        self._setup(replace(index, path=index.path.absolute()), Shards(index), None)
        if columns is None:
            columns = ("label",) if "label" in self.columns else tuple(self.columns)
        if isinstance(columns, str):  # each of its letters would count as a name
            raise TypeError(
                f"columns: expected a sequence of names such as [{columns!r}], found {columns!r}"
            )
        if any(name not in self.columns for name in columns):
            raise ValueError(
                f"columns: expected names among {', '.join(self.columns) or 'none at all'}, found {columns!r}"
            )
        self.sample_columns = tuple(columns)
        self.transform, self.target_transform, self.transforms = (
            transform,
            target_transform,
            transforms,
        )

    def _setup(self, index: Index, shards: Shards, chosen: np.ndarray | None) -> None:
        self.index = index if chosen is None else index.subset(chosen)
        self._whole, self._shards, self._chosen = index, shards, chosen
        # one view a shard, made once: (rows, C, H, W) over rows of H × W × C
        self._images = [torch.from_numpy(pixels).permute(0, 3, 1, 2) for pixels in shards.maps]
        #: every column of the data set by name, tensors ``(n, …)``, mapped
        self.columns: Mapping[str, Tensor] = {
            name: torch.from_numpy(column) for name, column in self.index.columns.items()
        }

    def __len__(self) -> int:
        return len(self.index)

    @property
    def path(self) -> Path:
        """The index file."""
        return self.index.path

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of an image."""
        height, width, channels = self.index.image.shape
        return channels, height, width

    @property
    def classes(self) -> list[str]:
        """The names of the classes in the order of their labels; empty if there are none."""
        return list(self.index.classes or ())

    @property
    def class_to_idx(self) -> dict[str, int]:
        """The label of each class."""
        return {name: label for label, name in enumerate(self.classes)}

    @property
    def labels(self) -> Tensor | None:
        """The labels, ``(n,)`` and int64 as a rule, mapped; None if there are none."""
        return self.columns.get("label")

    @property
    def keys(self) -> Keys:
        """The names of the samples: a sequence of str, decoded on demand."""
        return self.index.keys

    @property
    def fingerprint(self) -> str:
        """The identity of the data set, 64 hexadecimal digits; of a subset, that of the whole and its samples."""
        if self._chosen is None:
            return self.index.fingerprint
        return hashlib.sha256(
            self._whole.fingerprint.encode() + self._chosen.astype("<i8").tobytes()
        ).hexdigest()

    @property
    def shards(self) -> Shards:
        """The mapped pixels: all rows, also those that no sample uses."""
        return self._shards

    def check_unaltered(self) -> None:
        """Do nothing: a shim until no caller is left."""

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> "MemmapDataset": ...
    def __getitem__(self, index: int | slice) -> Any:
        """Return a sample, or for a slice a subset. Raises IndexError, and FormatError where its file has changed."""
        if isinstance(index, slice):
            return self.subset(index)
        position = self._position(index)
        shard, inside = self._shards.locate(int(self.index.row[position]))
        self._shards.check_sizes((shard,))
        image: Any = self._images[shard][inside]
        if not self.sample_columns and self.transforms is None:
            return image if self.transform is None else self.transform(image)
        values = [_value(self.columns[name], position) for name in self.sample_columns]
        if self.transforms is not None:
            return self.transforms(image, *values)
        if self.transform is not None:
            image = self.transform(image)
        if self.target_transform is not None:
            values[0] = self.target_transform(values[0])
        return (image, *values)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return samples; what DataLoader calls for a batch."""
        return [self[operator.index(index)] for index in indices]

    def __iter__(self) -> Iterator[Any]:
        return (self[position] for position in range(len(self)))

    def gather(self, indices: Any, out: Tensor | None = None) -> Tensor:
        """Copy the images of samples into ``out`` ``(n, H, W, C)`` and return it; without ``out``, into new memory.

        ``indices`` are integers (a sequence, array or tensor), negative ones counted from the end. ``out`` is a
        contiguous CPU tensor of the data set's type. Blocks while pages are read; the GIL is released. Raises
        IndexError, ValueError and TypeError.
        """
        positions = self._positions(indices)
        shape = (len(positions), *self.index.image.shape)
        dtype = self._images[0].dtype
        if out is None:
            out = torch.empty(shape, dtype=dtype)
        if not isinstance(out, Tensor):
            raise TypeError(
                f"out: expected a tensor, found {type(out).__name__}: wrap an array in torch.from_numpy()"
            )
        if (
            tuple(out.shape) != shape
            or out.dtype != dtype
            or not out.is_contiguous()
            or out.device.type != "cpu"
        ):
            raise ValueError(
                f"out: expected a contiguous CPU tensor {shape} of {dtype}, found {tuple(out.shape)} of {out.dtype} "
                f"on {out.device}{'' if out.is_contiguous() else ', not contiguous'}"
            )
        self._shards.gather(self.index.row[positions], out.numpy())
        return out

    def subset(self, indices: Any) -> "MemmapDataset":
        """Return a view of some samples in the order given; no pixel is copied.

        ``indices`` are integers (a sequence, array, tensor or slice) or a mask of booleans ``(n,)``. Transforms are
        kept. Raises IndexError.
        """
        if isinstance(indices, slice):
            positions = np.arange(*indices.indices(len(self)), dtype=np.int64)
        else:
            positions = self._positions(indices)
        view = type(self).__new__(type(self))
        view.__dict__.update(self.__dict__)
        view._setup(
            self._whole,
            self._shards,
            positions if self._chosen is None else self._chosen[positions],
        )
        return view

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write an index of these samples, in this order, over the same pixels; ``MemmapDataset(path)`` opens it.

        ``path`` ends in ``.idx`` and lies in the folder of the pixels, since an index names no other. Raises
        ValueError, FileExistsError and OSError.
        """
        path = Path(path)
        folder = self.index.path.parent
        if path.suffix != ".idx":
            raise ValueError(f"path: expected a file name that ends in '.idx', found {str(path)!r}")
        if path.resolve().parent != folder.resolve():
            raise ValueError(
                f"path: expected a file beside the pixels in {folder.resolve()}, found {str(path)!r}: "
                f"write '{folder / path.name}'"
            )
        if path.exists() and not overwrite:
            raise FileExistsError(
                f"{path}: expected no such file yet, found one. Say overwrite=True to replace it"
            )
        self.index.write(path)

    def __reduce__(self) -> tuple[Any, ...]:
        options = {
            name: value
            for name, value in self.__dict__.items()
            if name not in ("index", "columns", "_whole", "_shards", "_images", "_chosen")
        }
        # The rest as state, which is pickled once the object itself is known: a transform may be a method of it.
        return (
            _reopen,
            (type(self), str(self._whole.path), self._whole.fingerprint, self._chosen),
            options,
        )

    def __repr__(self) -> str:
        shape = "×".join(map(str, self.index.image.shape))
        columns = ", ".join(self.columns) or "no columns"
        return f"{type(self).__name__}({str(self.path)!r}: {len(self):,} samples of {shape}, {columns})"

    def _position(self, index: int) -> int:
        size, index = len(self), operator.index(index)
        if not -size <= index < size:
            raise IndexError(f"index: expected -{size} <= index < {size}, found {index}")
        return index + size if index < 0 else index

    def _positions(self, indices: Any) -> np.ndarray:
        positions = np.asarray(indices)
        size = len(self)
        if positions.dtype == bool and positions.shape == (size,):
            return np.flatnonzero(positions)
        if not positions.size:
            positions = positions.astype(np.int64)
        if positions.ndim != 1 or positions.dtype.kind not in "iu":
            raise IndexError(
                f"indices: expected integers (k,) or booleans ({size},), found {positions.dtype} {positions.shape}"
            )
        if positions.size and not (-size <= positions.min() and positions.max() < size):
            raise IndexError(
                f"indices: expected -{size} <= index < {size}, found {positions.min()} to {positions.max()}"
            )
        positions = positions.astype(np.int64)
        return np.where(positions < 0, positions + size, positions)


def _value(column: Tensor, position: int) -> Any:
    return column[position].item() if column.ndim == 1 else column[position]


def _reopen(
    kind: type[MemmapDataset], path: str, fingerprint: str, chosen: np.ndarray | None
) -> MemmapDataset:
    index = Index.read(path)
    if index.fingerprint != fingerprint:
        raise FormatError(
            f"{path}: expected the data set that was opened ({fingerprint[:8]}…), found another "
            f"({index.fingerprint[:8]}…): it was built again meanwhile. Open it anew",
            path=path,
        )
    dataset = kind.__new__(kind)
    dataset._setup(index, Shards(index), chosen)
    return dataset
