"""Where encoded images come from: a source is a sequence of records, a record is one image and its columns."""

import functools
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from PIL import Image

from memload.building.pool import Call, call_here
from memload.errors import BuildError, DecodeError, SourceError, describe_error
from memload.storage.format import RESERVED
from memload.storage.keys import Keys

logger = logging.getLogger("memload")

#: What torchvision's ImageFolder counts as an image, by the end of its name in any case.
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


#: How often links may lead to the same folder within a class.
_MOST_LINKS = 100


class Column(NamedTuple):
    """Element type and shape of one entry of a column; points are x, y pairs that follow the picture."""

    dtype: str
    shape: tuple[int, ...] = ()
    points: bool = False


class Record(NamedTuple):
    """One image with its name and the values of its columns.

    ``image`` is the path of a file, which is read when its turn comes, the bytes of one, a PIL image, or an
    array ``(H, W)`` or ``(H, W, C)`` of uint8, or ``(H, W)`` of uint16. A build with ``mode="array"`` takes arrays
    alone, of uint8, uint16, float16 or float32, and of any number of channels.
    """

    key: str
    image: Path | bytes | Image.Image | np.ndarray
    columns: Mapping[str, Any]


@runtime_checkable
class Source(Protocol):
    """What `memload.build` reads. Records are asked for by position, once each, by several processes."""

    @property
    def classes(self) -> Sequence[str] | None:
        """The names of the classes that the column ``label`` counts into, if it does."""

    @property
    def schema(self) -> Mapping[str, Column]:
        """The columns that every record has."""

    @property
    def keys(self) -> Sequence[str]:
        """The names of the records."""

    @property
    def notes(self) -> Sequence[str]:
        """What a person should know: what was left out, and why."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Record:
        """Return one record. What it raises costs this one record."""

    def listing(self) -> Mapping[str, np.ndarray]:
        """Return the names and columns as arrays, by which an unfinished build knows its source again.

        It reads no files. That a file has changed is told by its size and time in the record of its row.
        """


class Files:
    """Image files below a root, their names packed."""

    def __init__(self, root: Path, names: Sequence[str]) -> None:
        self.root = root
        self.keys = Keys.of(names)

    def record(self, index: int, columns: Mapping[str, Any]) -> Record:
        """Return the record of one file."""
        key = self.keys[index]
        return Record(key, self.root / key, columns)

    def listing(self) -> dict[str, np.ndarray]:
        """See `Source.listing`."""
        return {"key/offsets": self.keys.offsets, "key/bytes": self.keys.data}


class ImageFolder:
    """A folder with one class a sub-folder, in torchvision's order; or one with images only, and no label.

    Classes are the names of the sub-folders, sorted; a class's images are those in it and in all folders
    below it. What counts as an image is told by the end of its name. Hidden files and folders are left out.
    ``notes`` tell that, and where there is no label. Where images lie in folders of the class folders alone, as a
    class's do if ``root`` holds ``train/`` and ``val/``, a line in the log ``memload`` warns of it. A link to nothing
    is an image that cannot be read, and ends in the ledger.

    Raises SourceError where there is no folder, or no image in it.
    """

    def __init__(self, root: str | Path, *, extensions: Sequence[str] = EXTENSIONS) -> None:
        if not os.fspath(root):  # which would be the current folder
            raise SourceError(
                "source: expected a folder of images, found an empty path. Write . for the current one"
            )
        self.root = Path(root)
        if isinstance(extensions, str):  # each of its letters would count as an ending
            raise TypeError(
                f"extensions: expected a sequence of endings such as ('.jpg',), found {extensions!r}"
            )
        self._extensions = tuple(extension.lower() for extension in extensions)
        self._left_out: dict[str, list[str]] = {}
        if not self.root.is_dir():
            found, advice = "a file" if self.root.exists() else "no such folder", "Check the path"
            if self.root.is_file() and self.root.suffix.lower() == ".csv":
                advice = f"If it lists images, say --manifest {root}; in Python, memload.Manifest({str(root)!r})"
            raise SourceError(
                f"{root}: expected a folder of images, found {found}. {advice}", path=root
            )
        flat, folders = self._scan("")
        names: list[str] = []
        labels: list[int] = []
        for label, name in enumerate(folders):
            before = len(names)
            for folder, files in sorted(self._walk(name)):
                names += [f"{folder}/{file}" for file in sorted(files)]
            labels += [label] * (len(names) - before)
            if len(names) == before:
                self._left_out.setdefault(
                    "class folders without an image (they count as classes)", []
                ).append(name)
        if names:
            self._left_out["images outside the class folders"] = flat
        self.notes = [_told(kind, left) for kind, left in sorted(self._left_out.items()) if left]
        if not names and not flat:
            raise SourceError(
                f"{root}: expected image files ({' '.join(self._extensions)}), found "
                f"{'; '.join(self.notes) or 'an empty folder'}. Check the path, or name other endings with "
                "--extensions",
                path=root,
            )
        if not names:
            self.notes.append(f"no labels: no class folders with images in {root}")
        elif not any(name.count("/") == 1 for name in names):
            first = names[0].rpartition("/")[0]
            logger.warning(
                f"{root}: expected images in the class folders ({_few(folders)}), found them only in folders within "
                f"these, such as {first}. If those are the classes, build {self.root / folders[labels[0]]} instead"
            )
        self.classes: list[str] | None = folders if names else None
        self.schema = {"label": Column("<i8")} if names else {}
        self._labels = np.array(labels, np.int64)
        self._files = Files(self.root, names or sorted(flat))
        self.keys = self._files.keys

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> Record:
        return self._files.record(
            index, {"label": self._labels[index]} if self.classes is not None else {}
        )

    def listing(self) -> Mapping[str, np.ndarray]:
        """See `Source.listing`."""
        return self._files.listing() | {"label": self._labels}

    def _walk(self, start: str) -> Iterator[tuple[str, list[str]]]:
        todo = [(start, frozenset[tuple[int, int]]())]
        met: Counter[tuple[int, int]] = Counter()
        while todo:
            folder, above = todo.pop()
            try:
                status = (self.root / folder).stat()
            except OSError as error:
                raise self._unreadable(folder, error) from error
            identity = (status.st_dev, status.st_ino)
            if identity in above:  # a link to a folder that it lies in would be walked without end
                self._left_out.setdefault("links that lead back into themselves", []).append(folder)
                continue
            met[identity] += 1
            if (
                met[identity] > _MOST_LINKS
            ):  # folders that link to one another make more paths than can be walked
                kind = f"links to a folder that is there {_MOST_LINKS} times already"
                self._left_out.setdefault(kind, []).append(folder)
                continue
            files, folders = self._scan(folder)
            todo += [(f"{folder}/{name}", above | {identity}) for name in folders]
            yield folder, files

    def _scan(self, folder: str) -> tuple[list[str], list[str]]:
        """Return the images and the folders of one folder; the folders sorted."""
        files, folders = [], []
        try:
            with os.scandir(self.root / folder) as entries:
                for entry in entries:
                    name = f"{folder}/{entry.name}" if folder else entry.name
                    if entry.name.startswith("."):
                        self._left_out.setdefault("hidden files and folders", []).append(name)
                    elif _is_folder(entry) and _is_build(
                        entry
                    ):  # beside its output, which may lie here too
                        self._left_out.setdefault("unfinished builds", []).append(name)
                    elif _is_folder(entry):
                        folders.append(entry.name)
                    elif entry.name.lower().endswith(self._extensions):
                        files.append(entry.name)
                    else:
                        self._left_out.setdefault(
                            "files that are no images by their names", []
                        ).append(name)
        except OSError as error:
            raise self._unreadable(folder, error) from error
        return files, sorted(folders)

    def _unreadable(self, folder: str, error: OSError) -> SourceError:
        path = self.root / folder
        return SourceError(f"{path}: expected a folder that can be read, found: {error}", path=path)


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, which is told when its turn comes to be read
        return False


def _is_build(entry: "os.DirEntry[str]") -> bool:
    return entry.name.endswith(".building") and (Path(entry.path) / "lock").exists()


def _told(kind: str, names: Sequence[str]) -> str:
    return f"{kind} ({len(names):,}): {_few(sorted(names))}"


def _few(names: Sequence[str]) -> str:
    return ", ".join(repr(name)[1:-1] for name in names[:3]) + (", …" if len(names) > 3 else "")


class DatasetSource:
    """Any map-style data set: something with ``len()`` and ``[index]``, such as torchvision's or Hugging Face's.

    A sample is ``(image, target)``, or an image alone, or a dict with an entry ``image``. An image is a PIL
    image, an array as in `Record`, a tensor ``(C, H, W)`` likewise, encoded bytes or a path. A target is a label, or
    a tuple (its first entry is the ``label`` if it is an integer, the others are ``target_0``, ``target_1`` …), or
    a dict of columns by name. Columns are numbers and arrays of numbers; the first sample fixes their types and
    shapes, and a sample that differs is rejected. ``classes`` are taken over from the data set.

    Raises SourceError where the first sample cannot be used. ``call`` calls a function that looks at it,
    in this process or another: if workers are forked later, they would share the files that it opens in this process.
    """

    def __init__(self, dataset: Any, call: Call = call_here) -> None:
        self._dataset = dataset
        self.notes: list[str] = []
        if not len(dataset):
            raise SourceError("data set: expected samples, found none")
        self.schema = self._first(call)
        names = getattr(dataset, "classes", None)
        if names is None:  # Hugging Face's way of naming them
            features = getattr(dataset, "features", None)
            names = (
                getattr(features.get("label"), "names", None)
                if isinstance(features, Mapping)
                else None
            )
        if not isinstance(names, (Sequence, np.ndarray)) or isinstance(names, str):
            names = None  # an attribute may mean anything: a number of classes, say, names none
        counts = self.schema.get("label") == Column("<i8")
        self.classes = [str(name) for name in names] if names is not None and counts else None
        self.keys = Keys.of([str(index) for index in range(len(dataset))])

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Record:
        image, columns = self._sample(index)
        if isinstance(image, Mapping):  # Hugging Face's pictures that are not decoded
            image = image.get("bytes") or image.get("path")
        if columns.keys() != self.schema.keys():
            raise DecodeError(
                f"expected the columns {sorted(self.schema)}, found {sorted(columns)}"
            )
        for name, value in columns.items():
            expected, found = self.schema[name], _column(name, value)
            whole_number_for_float = (expected.dtype, found.dtype) == ("<f8", "<i8")
            if found.shape != expected.shape or (
                found.dtype != expected.dtype and not whole_number_for_float
            ):
                raise DecodeError(
                    f"column {name!r}: expected {expected[:2]} as in the first, found {found[:2]}"
                )
        if self.classes is not None and not 0 <= columns["label"] < len(self.classes):
            raise DecodeError(
                f"label: expected 0 to {len(self.classes) - 1}, found {columns['label']}"
            )
        # A tensor, or a kind of tensor such as torchvision's, told without importing torch.
        if any(kind.__module__.partition(".")[0] == "torch" for kind in type(image).__mro__):
            image = image.permute(1, 2, 0).numpy() if image.ndim == 3 else image.numpy()
        return Record(
            str(index), Path(image) if isinstance(image, (str, os.PathLike)) else image, columns
        )

    def listing(self) -> Mapping[str, np.ndarray]:
        """See `Source.listing`; nothing but its length is known of a data set beforehand."""
        return {"length": np.array([len(self)], np.int64)}

    def _first(self, call: Call) -> dict[str, Column]:
        """Return the types of the columns of the first sample that is not broken, of which there may be some."""
        errors = []
        for index in range(min(100, len(self._dataset))):
            try:
                found = call(functools.partial(self._types, index))
            except TimeoutError as error:
                raise SourceError(f"data set: sample {index} cannot be read: {error}.") from None
            except BuildError as error:  # it ended the process
                found = str(error)
            if not isinstance(found, str):
                return dict(found)
            errors.append(found)
        raise SourceError(
            f"data set: expected samples, found that the first {len(errors)} fail: {errors[0]:.500}"
        )

    def _types(self, index: int) -> dict[str, Column] | str:
        """Return the types of a sample's columns, or why there are none."""
        try:
            return {name: _column(name, value) for name, value in self._sample(index)[1].items()}
        except SourceError:
            raise
        except Exception as error:  # noqa: BLE001  # a data set of the user's may raise anything
            return describe_error(error)[:500]

    def _sample(self, index: int) -> tuple[Any, dict[str, Any]]:
        sample = self._dataset[index]
        if sample is None:
            raise DecodeError("the data set gave None")
        if isinstance(sample, Mapping):
            if "image" not in sample:
                raise SourceError(
                    f"data set: expected samples with an entry 'image', found {sorted(sample)}"
                )
            return sample["image"], {
                name: value for name, value in sample.items() if name != "image"
            }
        if not isinstance(sample, (tuple, list)):
            return sample, {}
        image, *rest = sample
        target = rest[0] if len(rest) == 1 else tuple(rest)
        if isinstance(target, Mapping):
            return image, dict(target)
        if not isinstance(target, tuple):
            return image, {"label": target}
        whole = bool(target) and _column("label", target[0]) == Column("<i8")
        names = [f"target_{number}" for number in range(len(target) - whole)]
        return image, dict(zip(["label"] * whole + names, target, strict=True))


_LARGEST = np.iinfo(np.int64).max


def _column(name: str, value: Any) -> Column:
    """Return the type and shape of one value: int64 and float64 for single numbers, else the array's own."""
    if not isinstance(name, str):
        raise SourceError(
            f"column {name!r:.80}: expected a text as its name, found {type(name).__name__}"
        )
    if np.ma.is_masked(value):
        raise SourceError(
            f"column {name!r:.80}: expected numbers, found some that are masked. Fill them"
        )
    if name in RESERVED or "/" in name:
        raise SourceError(
            f"column {name!r}: expected another name: this one has a meaning of its own"
        )
    try:
        array = np.asarray(value)
    except Exception as error:  # lists of different lengths, a tensor on a device: what it raises is its own affair
        raise SourceError(
            f"column {name!r}: expected a number or an array of numbers, found {error}"
        ) from error
    too_large = array.dtype.itemsize > 8 or (
        array.ndim == 0 and array.dtype == np.uint64 and array > _LARGEST
    )
    if array.dtype.kind not in "biuf" or too_large:
        raise SourceError(
            f"column {name!r}: expected a number or an array of numbers, found {type(value).__name__} "
            f"{value!r:.40}. Turn it into numbers, or leave it out"
        )
    if array.ndim == 0:
        return Column("<f8" if array.dtype.kind == "f" else "<i8")
    return Column(array.dtype.newbyteorder("<").str, array.shape)
