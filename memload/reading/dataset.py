"""Random access to the samples of a data set, as torch's DataLoader and its users expect it."""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from memload.editing.columns import column_of, replace_columns
from memload.editing.export import ExportReport, ImageFormat, export
from memload.editing.report import check_index_output
from memload.feeds.gathered import StayingRows, claim_pages
from memload.feeds.interface import Samples
from memload.feeds.limits import NO_LIMITS
from memload.reading.columns import INDEX, choose_names
from memload.reading.origin import (
    Concatenation,
    IndexFile,
    InMemory,
    Member,
    Origin,
    fingerprint_of,
)
from memload.storage.index import Array, Index
from memload.storage.keys import Keys
from memload.storage.shards import Shards, check_files
from memload.storage.where import matching
from memload.wording import listed, shape_text

#: Attributes that are lists of all samples. They are made when they are first asked for.
_LISTS = ("targets", "samples")


class _Rows:
    """The rows of one array as tensors over the mapped files, without a copy."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self._maps = [torch.from_numpy(rows) for rows in shards.maps]
        if shards.array.kind == "image":
            self._maps = [rows.permute(0, 3, 1, 2) for rows in self._maps]

    @property
    def dtype(self) -> torch.dtype:
        return self._maps[0].dtype

    def at(self, row: int) -> Tensor:
        """Return a row: of images ``(C, H, W)``. Raises FormatError if its shard was truncated."""
        shard, row = self.shards.locate(row)
        self.shards.check_sizes((shard,))
        return self._maps[shard][row]


class MemmapDataset(Dataset[Any]):
    """The samples of a data set: ``dataset[i]`` is ``(image, label)``, neither decoded nor copied.

    ``image`` is a tensor ``(C, H, W)``: uint8, or uint16 for pictures built with mode I;16, or the
    dtype of the arrays that were built. Its memory is channels-last (``H × W × C``) and is the
    mapped file itself. It can be written to. That changes neither the file nor what other processes
    see. In this process, ``dataset[i]`` shows the change until the data set is opened again.
    `gather` and the batches of a `Loader` may be read from the file, and then do not show it. Clone
    an image before you work on it in place.

    The image is followed by all else that belongs to the sample: the ``label``, then the rows of
    other arrays, such as a mask ``(H, W)``, then the values of other columns, each in their order.
    ``columns`` is a list of those that you want instead, in your order, or ``"all"``. ``"index"``
    in that list gives the number of the sample, its position in this data set or view, unless a
    column has this name. A data set without columns gives the image alone. Single numbers are
    Python numbers; all else are tensors. Those of arrays are the mapped file itself, as images are.
    Columns of text are numbers: see `categories`. `arrays` and `columns` have what there is.

    ``transform`` is called with the image, and ``target_transform`` with the value of the first
    column, as in torchvision. ``transforms`` is called with the image and the columns together and
    returns the sample, as in torchvision's v2.

    ``path`` is ``out.bin``, or an index such as ``out.idx`` or a saved subset. Opening takes
    milliseconds: it reads rows, labels and other columns into memory, 21 bytes a sample, and maps
    the rest. Arrays that ``columns`` leaves out are opened when they are first used. A data set
    pickles as its path, and an unsaved subset also as the numbers of its samples; the worker opens
    it again. One with other columns (`with_columns`) that is not saved pickles as its whole index.
    Reading is thread-safe.

    A list of paths or data sets is read as one: their samples, one after another. No file is
    written, and they may lie in different folders. Classes are united by name, as
    `memload.concat` does. All need the same arrays and columns or, if ``columns`` lists some, at
    least these.

    The files must not change while they are open. Do not truncate or rewrite a shard in place;
    replace it by renaming another file, as ``memload build`` does. See `Shards`.

    Raises FormatError if files are damaged, MissingError (also a FileNotFoundError) if they are
    missing, and ValueError if several data sets do not fit together.

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
        self._origin: Origin
        if isinstance(path, str | Path):
            self._origin, index = IndexFile.open(path)
        else:
            self._origin, index, columns = _open_several(path, columns)
        #: the names of what is behind the image: columns, and arrays such as masks
        self.sample_names = choose_names(columns, index.names)
        self._set_up(index, {}, None)
        self.transform = transform
        self.target_transform = target_transform
        self.transforms = transforms

    def _set_up(self, index: Index, opened: "dict[str, _Rows]", chosen: np.ndarray | None) -> None:
        """Set everything that is not pickled. ``chosen`` are the samples of a subset, int64.

        ``opened`` are the arrays that are open already. Views share it.
        """
        self.index = index if chosen is None else index.subset(chosen)
        self._whole_index, self._chosen, self._opened = index, chosen, opened
        self._staying: dict[str, StayingRows] = {}
        for name in _LISTS:  # those of the data set that this is a view of
            vars(self).pop(name, None)
        #: every column of the data set by name, tensors ``(n, …)``
        self.columns: Mapping[str, Tensor] = {
            name: torch.from_numpy(column) for name, column in self.index.columns.items()
        }
        #: every array of the data set by name, with its kind, element type and shape: ``"image"``,
        #: and others such as masks
        self.arrays: Mapping[str, Array] = {array.name: array for array in self.index.arrays}
        self._image = self._rows_of("image")
        for name in self.sample_names:
            if name in self.arrays:
                self._rows_of(name)

    def _rows_of(self, name: str) -> "_Rows":
        """Return the rows of an array, which is opened when it is first asked for."""
        rows = self._opened.get(name)
        if rows is None:  # two threads may come here: then both open it, and one is dropped
            rows = self._opened[name] = _Rows(Shards(self._whole_index, name))
        return rows

    def __len__(self) -> int:
        return len(self.index)

    @property
    def has_transform(self) -> bool:
        """Whether there is a transform of single samples."""
        return self._transforms != (None, None, None)

    @property
    def _transforms(self) -> tuple[Any, Any, Any]:
        return self.transform, self.target_transform, self.transforms

    def _like(self) -> "MemmapDataset":
        """Return another object of this class, also if it is derived, with the same attributes."""
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def _without_transforms(self) -> "MemmapDataset":
        plain = self._like()
        plain.transform = plain.target_transform = plain.transforms = None
        return plain

    @property
    def shards(self) -> Shards:
        """The mapped pixels: all rows, including those that no sample uses."""
        return self._image.shards

    def shards_of(self, name: str) -> Shards:
        """Return the mapped rows of an array, such as ``"mask"``, which opens it.

        ``dataset.index.rows_of(name)`` has the row of each sample. Raises ValueError for an unknown
        name, and FormatError as opening the data set does.

        >>> dataset.shards_of("mask").maps[0].shape
        (1000, 256, 256)
        """
        self._check_array(name)
        return self._rows_of(name).shards

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
        if labels is None:
            of_boxes = (
                " The column 'labels' has those of boxes." if "labels" in self.columns else ""
            )
            raise ValueError(
                f"{self.path} has no column 'label', and therefore no classes.{of_boxes} Give the "
                "number of classes yourself."
            )
        if labels.ndim != 1 or labels.dtype.kind not in "iu" or (labels.size and labels.min() < 0):
            raise ValueError(
                f"The labels of {self.path} do not number classes: they are {labels.dtype.name} of "
                f"shape {labels.shape}, from {labels.min()}. Give the number of classes yourself."
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

    @cached_property
    def samples(self) -> list[tuple[str, Any]]:
        """(name, label) of each sample, as in torchvision's ImageFolder.

        Names are those of `keys`, such as ``cat/1.jpg``: paths below the folder that was built. The
        list is made when it is first asked for, and kept. It takes about 200 bytes a sample.
        """
        return list(zip(self.keys, self.targets, strict=True))

    @property
    def imgs(self) -> list[tuple[str, Any]]:
        """The same as `samples`, as in torchvision's ImageFolder."""
        return self.samples

    @property
    def keys(self) -> Keys:
        """The names of the samples: a sequence of str, decoded on demand."""
        return self.index.keys

    @property
    def fingerprint(self) -> str:
        """64 hexadecimal digits that identify the data set, or the samples of a subset."""
        return fingerprint_of(self._whole_index, self._chosen)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> "MemmapDataset": ...
    def __getitem__(self, index: int | slice) -> Any:
        """Return a sample, or a subset for a slice.

        Raises IndexError, and FormatError if the sample's shard has been truncated.
        """
        if isinstance(index, slice):
            return self.subset(index)
        size, position = len(self), operator.index(index)
        if not -size <= position < size:
            raise IndexError(f"index {position} is out of range: the data set has {size:,} samples")
        image: Any = self._image.at(int(self.index.row[position]))
        if not self.sample_names and self.transforms is None:
            return image if self.transform is None else self.transform(image)
        values = [self._value(name, position) for name in self.sample_names]
        if self.transforms is not None:
            return self.transforms(image, *values)
        if self.transform is not None:
            image = self.transform(image)
        if self.target_transform is not None:
            values[0] = self.target_transform(values[0])
        return (image, *values)

    def _value(self, name: str, position: int) -> Any:
        """Return the value of a sample: a Python number or a tensor; its row in an array."""
        column = self.index.columns.get(name)
        if column is not None:
            return column[position].item() if column.ndim == 1 else self.columns[name][position]
        if name in self.arrays:
            return self._rows_of(name).at(int(self.index.rows_of(name)[position]))
        return position % len(self)  # "index"

    def __iter__(self) -> Iterator[Any]:
        return (self[position] for position in range(len(self)))

    def gather(self, indices: Any, out: Tensor | None = None, name: str = "image") -> Tensor:
        """Copy images into ``out`` ``(n, H, W, C)`` and return it.

        ``indices`` are integers (a sequence, array or tensor); negative ones count from the end.
        ``out`` is a contiguous CPU tensor of the data set's dtype; without it, memory is allocated.
        ``name`` is that of another array whose rows to copy instead: ``(n, H, W)`` for masks, and
        ``(n, …)`` for other arrays. Blocks while rows are read from the disk; the GIL is released
        meanwhile. Raises IndexError, ValueError and TypeError, and FormatError if a shard has been
        truncated or cannot be read.

        If all rows of the samples, in all arrays that are open, fit in 80 % of the RAM that was
        available when the disk was first read, they stay in the page cache. Of larger data sets the
        first rows that fit stay, and the others are dropped from it once they were copied. Then the
        same rows are found in RAM in every epoch, and nothing else is pushed out. A Loader of the
        same file may drop any of them, to keep to its own limit.

        >>> masks = dataset.gather(range(32), name="mask")
        """
        positions = self._positions(indices)
        shards, dtype = self.shards_of(name), self._rows_of(name).dtype
        shape = (len(positions), *shards.array.shape)
        if out is None:
            out = torch.empty(shape, dtype=dtype)
        if not isinstance(out, Tensor):
            raise TypeError(
                f"out is of type {type(out).__name__} instead of a tensor. Wrap an array in "
                "torch.from_numpy()."
            )
        fits = tuple(out.shape) == shape and out.dtype == dtype
        if not fits or out.device.type != "cpu" or not out.is_contiguous():
            layout = "contiguous" if out.is_contiguous() else "not contiguous"
            raise ValueError(
                f"out is {tuple(out.shape)} of {out.dtype} on {out.device}, {layout}, but "
                f"{shape} of {dtype} on cpu, contiguous, is needed"
            )
        rows = self.index.rows_of(name)[positions]
        shards.gather(rows, out.numpy(), partial(self._drop_others, name))
        return out

    def _drop_others(self, name: str, rows: np.ndarray) -> None:
        """Drop rows of an array from the page cache, except for those that stay there.

        Which ones stay is found out when rows are first read from the disk.
        """
        if name not in self._staying:
            arrays = {
                opened: Samples(array.shards, self.index.rows_of(opened), ())
                for opened, array in list(self._opened.items())
            }
            first, *others = arrays.values()
            # The claims end here: what a data set gathers takes no room from a Loader.
            claims = claim_pages(replace(first, others=others), NO_LIMITS.in_ram("cpu").size)
            for (opened, array), claim in zip(arrays.items(), claims, strict=True):
                # What was found before stays, also if another array was opened since.
                staying = StayingRows(array.shards, array.used_rows(), claim)
                self._staying.setdefault(opened, staying)
        self._staying[name].drop_others(rows)

    def subset(self, indices: Any) -> "MemmapDataset":
        """Return a view of some samples, in the order given. No pixel is copied.

        ``indices`` are integers (a sequence, array, tensor or slice) or booleans ``(n,)``, one
        for each sample. Transforms are kept. Raises IndexError.
        """
        is_slice = isinstance(indices, slice)
        positions = np.arange(len(self))[indices] if is_slice else self._positions(indices)
        chosen = positions if self._chosen is None else self._chosen[positions]
        view = self._like()
        view._set_up(self._whole_index, self._opened, chosen)
        return view

    def where(self, /, **conditions: Any) -> "MemmapDataset":
        """Return a view of the samples whose columns have these values. No pixel is copied.

        A value is a text for a column with categories and for a label with class names, and a
        number for any other column. A list means any of its values. All conditions must hold.
        Values are compared exactly.

        >>> train = dataset.where(split="train", label=["cat", "dog"])

        Raises ValueError for a column or a value that the data set does not have, and TypeError
        for a value of the wrong type. The message lists what there is.
        """
        return self.subset(matching(self.index, conditions))

    def with_columns(self, /, **columns: Any) -> "MemmapDataset":
        """Return the data set with other columns. Neither pixels are copied nor files written.

        Each value is an array, a tensor or a list with one entry for each sample, ``(n, …)``. It
        replaces the column of this name, or is added. None removes a column, or an array such as
        ``mask``. `save` writes the result.

        Texts are numbered: those of ``label`` are names of classes, those of others categories.
        Those that the data set has keep their numbers, and new ones are appended. If none of them
        is known, they are sorted, and take the place of the old ones.
        Integers that count into the texts that a column has keep these texts; other numbers stand
        for themselves. Points and boxes stay such, as float32, if their shape fits. If only some
        columns are handed out, new ones are, too. Every sample is then one value longer: unpack
        ``image, label, *others``.

        >>> cleaned = dataset.with_columns(label=labels, age=None)
        >>> cleaned.save("cleaned.idx")

        Raises ValueError for another number of values than samples, for values that are neither
        numbers nor texts, for a name that no column can have, and for one to remove that is not
        there.
        """
        values = {
            name: None if value is None else column_of(name, _as_array(value), len(self))
            for name, value in columns.items()
        }
        index = replace_columns(self.index, values).identified()
        names = index.names
        chosen = choose_names(None, names)
        if self.sample_names != choose_names(None, self.index.names):
            wanted = dict.fromkeys([*self.sample_names, *columns])
            chosen = tuple(name for name in wanted if name in names or name == INDEX)
        changed = self._like()
        changed._origin, changed.sample_names = InMemory(index), chosen
        changed._set_up(index, self._opened, None)
        return changed

    def __add__(self, other: Any) -> Any:
        """Return both data sets, one after another, as ``MemmapDataset([self, other])`` does.

        So labels follow the names of classes. Transforms stay if both data sets have the same ones.
        Otherwise, and with a data set of another kind, this is torch's ``ConcatDataset``, in which
        each data set keeps its own labels. Raises ValueError if they do not fit together.
        """
        if not isinstance(other, MemmapDataset) or other._transforms != self._transforms:
            return super().__add__(other)
        both = MemmapDataset([dataset._without_transforms() for dataset in (self, other)])
        both.transform, both.target_transform, both.transforms = self._transforms
        return both

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write an index of these samples, in this order; ``MemmapDataset(path)`` opens it.

        ``path`` ends in ``.idx`` and is in the folder of the pixels, since an index can name no
        other. Raises ValueError, FileExistsError, FormatError if files of pixels have been renamed
        or replaced since they were opened, and OSError.
        """
        target = check_index_output(path, self.index.path.parent, overwrite)
        check_files(self.index)
        self.index.write(target)

    def export(
        self,
        output: str | Path,
        *,
        format: ImageFormat = "png",
        num_threads: int | None = None,
        progress: bool | None = None,
    ) -> ExportReport:
        """Write these samples as image files into a folder, or into a tar file as WebDataset.

        See `memload.export`, which explains the arguments and the errors.

        >>> dataset.where(label="cat").export("cats/")  # doctest: +SKIP
        """
        return export(self.index, output, format=format, num_threads=num_threads, progress=progress)

    def __getstate__(self) -> dict[str, Any]:
        opened_again = (
            "index",
            "columns",
            "arrays",
            "_whole_index",
            "_image",
            "_opened",
            "_staying",
            *_LISTS,
        )
        return {name: value for name, value in vars(self).items() if name not in opened_again}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._set_up(self._origin.read(), {}, self._chosen)

    def __repr__(self) -> str:
        shape = shape_text(self.index.image.shape)
        names = [
            f"{name} {shape_text(self.arrays[name].shape)}" if name in self.arrays else name
            for name in choose_names(None, self.index.names)
        ]
        described = ", ".join(names) or "no columns"
        kind = type(self).__name__
        return f"{kind}({self._origin}: {len(self):,} samples of {shape}, {described})"

    def _check_array(self, name: str) -> None:
        if name not in self.arrays:
            raise ValueError(
                f"name: there is no array {name!r}. The data set has {', '.join(self.arrays)}."
            )

    def _positions(self, indices: Any) -> np.ndarray:
        """Return indices or booleans as int64 positions ``(k,)``, none of them negative."""
        positions, size = np.asarray(indices), len(self)
        if positions.dtype == bool and positions.shape == (size,):
            return np.flatnonzero(positions)
        if not positions.size:
            positions = positions.astype(np.int64)
        if positions.ndim != 1 or positions.dtype.kind not in "iu":
            raise IndexError(
                f"indices are {positions.dtype} {positions.shape}, but must be integers (k,) or "
                f"booleans ({size},)"
            )
        outside = positions[(positions < -size) | (positions >= size)]
        if outside.size:
            raise IndexError(
                f"index {outside[0]} is out of range: the data set has {size:,} samples"
            )
        positions = positions.astype(np.int64)
        return np.where(positions < 0, positions + size, positions)


def _as_array(values: Any) -> Any:
    """Return a tensor as an array on the CPU, and anything else as it is."""
    if not isinstance(values, Tensor):
        return values
    values = values.detach().cpu()
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()


def _open_several(
    items: Any, columns: Any
) -> tuple[Concatenation, Index, Sequence[str] | Literal["all"] | None]:
    """Return several data sets as one, their index, and the columns to hand out.

    If ``columns`` is None, these are the columns that the data sets themselves hand out.
    """
    if not isinstance(items, list | tuple) or not items:
        raise TypeError(f"path is {items!r:.80} instead of a path or a list of paths.")
    datasets = [
        item if isinstance(item, MemmapDataset) else MemmapDataset(item, columns=columns)
        for item in items
    ]
    for dataset in datasets:
        if dataset.has_transform:
            raise ValueError(
                f"path: {dataset.path} has a transform of its own. Give it to the data set of all."
            )
    if columns is None:
        columns = _shared_columns(datasets)
    origin = Concatenation(
        tuple(Member(dataset._origin, dataset._chosen) for dataset in datasets),
        None if columns is None or columns == "all" else tuple(columns),
    )
    index = origin.united(
        [dataset.index for dataset in datasets], [dataset.fingerprint for dataset in datasets]
    )
    return origin, index, columns


def _shared_columns(datasets: "Sequence[MemmapDataset]") -> tuple[str, ...] | None:
    """Return the columns that data sets hand out; None if these are all that they have.

    Raises ValueError if they hand out different ones.
    """
    first = datasets[0]
    shared = first.sample_names
    for dataset in datasets[1:]:
        if dataset.sample_names != shared:
            common = [name for name in shared if name in dataset.sample_names]
            raise ValueError(
                f"{first.path} hands out {listed(shared) or 'images alone'}, but {dataset.path} "
                f"{listed(dataset.sample_names) or 'images alone'}. Name the columns that you "
                f"want, such as columns={common}, or make them alike with 'memload relabel' or "
                "'memload join'."
            )
    return None if set(first.index.names) <= set(shared) else shared
