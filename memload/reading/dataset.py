"""Random access to the samples of a data set, as torch's DataLoader and its users expect it."""

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset

from memload.editing.index_files import write
from memload.reading.concat import open_index, unite
from memload.storage.index import Array, Index
from memload.storage.keys import Keys
from memload.storage.shards import Shards
from memload.storage.where import matching
from memload.wording import listed, shape_text

#: What is not pickled: it is made again from the origin.
_READ_AGAIN = ("index", "_whole_index", "_opened", "targets")


class MemmapDataset(Dataset[Any]):
    """The samples of a data set: ``dataset[i]`` is ``(image, label)``, neither decoded nor copied.

    The image is a tensor ``(C, H, W)`` of the stored dtype, such as uint8, channels-last in memory.
    Then follow the label, the rows of other arrays, such as a mask ``(H, W)``, and the values of
    other columns. Single numbers are Python numbers; all else are tensors. Texts are stored as
    numbers: see `categories`. A data set without columns gives the image alone.

    Images and other rows are the mapped file itself. You may write to them: that changes neither
    the file nor what other processes see. ``dataset[i]`` shows the change until the data set is
    opened again; `gather` and a `Loader` may not show it. Clone an image before you change it.
    Do not rewrite or truncate the files while they are open. Replace them by renaming others, as
    ``memload build`` does.

    A data set pickles as its path, and a view also as the numbers of its samples. So all worker
    processes share one copy of the pixels. Reading is thread-safe.

    Args:
        path: ``out.bin``, or an index such as ``out.idx``. A list of paths or data sets is read as
            one, the samples of one after those of another. Classes are united by name, as
            `memload.concat` does. All need the same arrays and columns, or those in ``columns``.
        columns: The names of what follows the image, in your order; by default all. ``"index"``
            is the position of the sample in this data set or view, unless a column has this name.
            The files of arrays that are not named are opened when they are first used.
        transform: A function of the image.
        target_transform: A function of the value behind the image, which is usually the label.
        transforms: A function of the image and all values behind it. It returns the sample.

    Raises FormatError if files are damaged, MissingError (also a FileNotFoundError) if they are
    missing, TypeError for a wrong argument, and ValueError for a column that is not there or if
    several data sets do not fit together.

    >>> dataset = MemmapDataset("train.bin")
    >>> image, label = dataset[0]
    >>> image, mask = MemmapDataset("streets.bin", columns=["mask"])[0]
    """

    def __init__(
        self,
        path: "str | Path | Sequence[str | Path | MemmapDataset]",
        *,
        columns: Sequence[str] | Literal["all"] | None = None,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        transforms: Callable[..., Any] | None = None,
    ) -> None:
        if transforms is not None and (transform is not None or target_transform is not None):
            raise ValueError(
                "transforms cannot be combined with transform or target_transform. Give either."
            )
        if isinstance(path, str | Path):
            self._origin, index = open_index(path)
        else:
            if not path:
                raise ValueError("path: the list of data sets is empty. Name at least one.")
            datasets = [open_dataset(part, columns) for part in path]
            if columns is None:
                columns = [*dict.fromkeys(chain(*(one.sample_names for one in datasets)))]
            self._origin, index = unite(
                [dataset._origin for dataset in datasets],
                [dataset.index for dataset in datasets],
                None if columns == "all" else columns,
            )
        #: the names of what is behind the image: columns, and arrays such as masks
        self.sample_names: tuple[str, ...] = choose_names(columns, index.names)
        self.transform = transform
        self.target_transform = target_transform
        self.transforms = transforms
        self._open(index, {})

    def _open(self, whole_index: Index, opened: dict[str, Shards]) -> None:
        """Set what is not pickled. Views share ``opened``, the arrays that are open."""
        chosen = self._origin.chosen
        self.index = whole_index if chosen is None else whole_index.subset(chosen)
        self._whole_index, self._opened = whole_index, opened
        for name in ("image", *self.sample_names):
            if name in self.arrays:
                self.shards_of(name)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _READ_AGAIN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open(self._origin.read(), {})

    def __len__(self) -> int:
        return len(self.index)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> "MemmapDataset": ...
    def __getitem__(self, index: int | slice) -> Any:
        """Return a sample, or a view for a slice.

        Raises IndexError, and FormatError if the file of the sample has been truncated.
        """
        if isinstance(index, slice):
            return self.subset(index)
        position = operator.index(index)
        image: Any = self._row("image", position).permute(2, 0, 1)
        values = [self._value(name, position) for name in self.sample_names]
        if self.transforms is not None:
            return self.transforms(image, *values)
        if self.transform is not None:
            image = self.transform(image)
        if self.target_transform is not None and values:
            values[0] = self.target_transform(values[0])
        return (image, *values) if values else image

    def _value(self, name: str, position: int) -> Any:
        """Return a sample's value in a column, its row in an array, or its position."""
        column = self.index.columns.get(name)
        if column is not None:
            value = column[position]
            return value.item() if column.ndim == 1 else torch.from_numpy(value)
        return self._row(name, position) if name in self._opened else position % len(self)

    def _row(self, name: str, position: int) -> Tensor:
        """Return a sample's row in an array that is open, as stored, over the mapped file."""
        index, shards = self.index, self._opened[name]
        rows = index.other_rows.get(name, index.row)  # as rows_of, 0.3 µs faster
        return torch.from_numpy(shards.row(int(rows[position])))

    def __iter__(self) -> Iterator[Any]:
        return (self[position] for position in range(len(self)))

    def gather(self, indices: Any, out: Tensor | None = None, name: str = "image") -> Tensor:
        """Copy the rows of some samples into one tensor ``(n, H, W, C)``, and return it.

        Blocks while rows are read from the disk; the GIL is released meanwhile.

        Args:
            indices: Integers (a sequence, array or tensor), a slice, or booleans
                ``(len(dataset),)``. Negative integers count from the end.
            out: A contiguous CPU tensor of the right shape and dtype to copy to; by default a new
                one.
            name: The array: ``"image"``, or another one such as ``"mask"``, whose rows are
                ``(n, H, W)``, or ``(n, …)`` for arrays of other shapes.

        Raises IndexError, ValueError and TypeError, and FormatError if a file has been truncated or
        cannot be read.

        >>> masks = dataset.gather(range(32), name="mask")
        """
        shards = self.shards_of(name)
        rows = self.index.rows_of(name)[_as_index(indices)]
        shape = (len(rows), *shards.array.shape)
        dtype = torch.from_numpy(np.empty(0, shards.array.descr)).dtype
        if out is None:
            out = torch.empty(shape, dtype=dtype, device="cpu")
        is_alike = tuple(out.shape) == shape and out.dtype == dtype and out.device.type == "cpu"
        if not is_alike or not out.is_contiguous():
            raise ValueError(
                f"out is {tuple(out.shape)} of {out.dtype} on {out.device} with strides "
                f"{out.stride()}. Give a contiguous tensor {shape} of {dtype} on cpu."
            )
        shards.gather(rows, out.numpy())
        return out

    def subset(self, indices: Any) -> "MemmapDataset":
        """Return a view of some samples, in the order given. No pixel is copied.

        Args:
            indices: Integers (a sequence, array or tensor), a slice, or booleans
                ``(len(dataset),)``. Negative integers count from the end.

        Transforms are kept. Raises IndexError.

        >>> without_cats = dataset.subset(dataset.labels != dataset.class_to_idx["cat"])
        """
        whole = self._origin.chosen
        positions = np.arange(len(self)) if whole is None else whole
        view = type(self).__new__(type(self))  # also if the class is derived
        vars(view).update(vars(self))
        vars(view).pop("targets", None)
        view._origin = replace(self._origin, chosen=positions[_as_index(indices)])
        view._open(self._whole_index, self._opened)
        return view

    def where(self, /, **conditions: Any) -> "MemmapDataset":
        """Return a view of the samples whose columns have these values. No pixel is copied.

        Args:
            conditions: For each column, a value, or a list that means any of its values. A text
                such as ``"cat,dog"`` means any of them, too, unless it is a value itself. A value
                is a text for a column with categories and for a label with class names, and a
                number for any other column. All conditions must hold. Values are compared exactly.

        Raises ValueError for a column or a value that the data set does not have. The message lists
        what there is.

        >>> train = dataset.where(split="train", label=["cat", "dog"])
        """
        index = self.index
        return self.subset(matching(len(index), index.columns, index.texts, conditions))

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write an index of these samples, in this order; ``MemmapDataset(path)`` opens it.

        Args:
            path: A name that ends in ``.idx``, in the folder of the pixels.
            overwrite: Whether to replace an index of this name.

        Raises ValueError for another folder or name, FileExistsError, FormatError if files of
        pixels have been renamed or replaced since they were opened, and OSError.

        >>> dataset.where(split="val").save("val.idx")
        """
        write(self.index, path, overwrite)

    @property
    def columns(self) -> Mapping[str, Tensor]:
        """Every column of the data set by name, tensors ``(n, …)``, without a copy."""
        return {name: torch.from_numpy(column) for name, column in self.index.columns.items()}

    @property
    def arrays(self) -> Mapping[str, Array]:
        """Every array by name, with its kind, element type and shape: ``"image"`` and others."""
        return {array.name: array for array in self.index.arrays}

    @property
    def shards(self) -> Shards:
        """The mapped pixels: all rows, including those that no sample uses."""
        return self._opened["image"]

    def shards_of(self, name: str) -> Shards:
        """Return the mapped rows of an array, such as ``"mask"``, which opens it.

        ``dataset.index.rows_of(name)`` has the row of each sample. Raises ValueError for an unknown
        name, and FormatError as opening the data set does.

        >>> dataset.shards_of("mask").maps[0].shape
        (1000, 256, 256)
        """
        shards = self._opened.get(name)
        if shards is None:
            if name not in self.arrays:
                raise ValueError(
                    f"name: there is no array {name!r}. The data set has {', '.join(self.arrays)}."
                )
            # Two threads may come here. Then both open it, and one is dropped.
            shards = self._opened[name] = Shards(self._whole_index, name)
        return shards

    @property
    def path(self) -> Path:
        """The index file; of several data sets, that of the first."""
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
    def num_classes(self) -> int:
        """How many classes there are, which is the number of outputs that a classifier needs.

        Without names of classes it is the largest label plus one, of the whole file also in a view.
        Raises ValueError if there are no labels, or if they are not integers of at least 0.
        """
        if self.index.classes is not None:
            return len(self.index.classes)
        labels = self._whole_index.columns.get("label")
        are_numbers = labels is not None and labels.ndim == 1 and labels.dtype.kind in "iu"
        if labels is None or not are_numbers or (labels < 0).any():
            found = "no labels" if labels is None else f"{labels.dtype} {labels.shape} as labels"
            raise ValueError(
                f"{self.path} has {found}, so its classes cannot be counted. Give their number "
                "yourself."
            )
        return int(labels.max()) + 1 if labels.size else 0

    @property
    def categories(self) -> dict[str, list[str]]:
        """The texts that columns of integers stand for, by the name of the column.

        >>> dataset.categories["split"][dataset.columns["split"][0]]
        'train'
        """
        return {name: list(texts) for name, texts in self.index.categories.items()}

    @property
    def labels(self) -> Tensor | None:
        """The labels, ``(n,)`` and usually int64; None if there are none."""
        return self.columns.get("label")

    @cached_property
    def targets(self) -> list[Any]:
        """The labels as a list of int, as in torchvision; float if the labels are.

        The list is made when it is first asked for, and kept. `labels` is the same without a copy.
        """
        if self.labels is None:
            raise AttributeError(f"{self.path} has no labels, and therefore no targets.")
        targets: list[Any] = self.labels.tolist()
        return targets

    @property
    def keys(self) -> Keys:
        """The names of the samples: a sequence of str, decoded on demand."""
        return self.index.keys

    @property
    def fingerprint(self) -> str:
        """64 hexadecimal digits that identify the data set, or the samples of a view."""
        return self._origin.fingerprint

    @property
    def has_transform(self) -> bool:
        """Whether there is a transform of single samples."""
        return (self.transform, self.target_transform, self.transforms) != (None, None, None)

    def __repr__(self) -> str:
        names = listed(choose_names(None, self.index.names)) or "no columns"
        shape = shape_text(self.index.image.shape)
        return f"{type(self).__name__}({self._origin}: {len(self):,} samples of {shape}, {names})"


def _as_index(indices: Any) -> Any:
    """Return indices or booleans as NumPy takes them. NumPy raises IndexError for wrong ones."""
    if isinstance(indices, slice):
        return indices
    array = np.asarray(indices)
    if array.ndim != 1:
        raise IndexError(f"indices have the shape {array.shape}. Give a list of integers.")
    return array if array.size else array.astype(np.int64)  # NumPy makes floats of an empty list


def open_dataset(dataset: Any, columns: Any = None) -> MemmapDataset:
    """Return a data set, opened for these columns if it is a path.

    A list, or torch's ConcatDataset, is read as one data set, and torch's Subset is a view. Raises
    TypeError for any other kind of data set, and ValueError if one has a transform.
    """
    if isinstance(dataset, Subset):
        return open_dataset(dataset.dataset, columns).subset(dataset.indices)
    if isinstance(dataset, ConcatDataset):
        dataset = dataset.datasets
    if isinstance(dataset, str | Path | list | tuple):
        return MemmapDataset(dataset, columns=columns)
    if not isinstance(dataset, MemmapDataset):
        raise TypeError(
            "dataset must be a MemmapDataset or its path, or a list of these, not a "
            f"{type(dataset).__name__}. Build one of it first: memload.build(dataset, 'out.bin')."
        )
    if dataset.has_transform:
        raise ValueError(
            f"{dataset.path} has a transform for single samples. Give a Loader a transform of "
            "batches instead, and several data sets one for all."
        )
    return dataset


def choose_names(requested: Any, available: Collection[str]) -> tuple[str, ...]:
    """Return the names to hand out: all for None and ``"all"``, the label first, or those listed.

    Raises TypeError if ``requested`` is no list of names, and ValueError for an unknown name.
    """
    if requested is None or (isinstance(requested, str) and requested == "all"):
        return tuple(sorted(available, key=lambda name: name != "label"))
    if isinstance(requested, str) or not isinstance(requested, Sequence):
        raise TypeError(
            f"columns is {requested!r} instead of a list of names. Write ['label'], for example, "
            "or 'all'."
        )
    unknown = [name for name in requested if name not in (*available, "index")]
    if unknown:
        raise ValueError(
            f"columns names {unknown[0]!r}, which the data set does not have. It has "
            f"{listed(available) or 'no columns'}. The image always comes first."
        )
    return tuple(requested)
