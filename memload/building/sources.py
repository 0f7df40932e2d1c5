"""Sources of records: a folder of images, or a data set. A record is one image and its columns."""

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from PIL import Image

from memload.building.pool import Chunk, NoteRow, run
from memload.errors import DecodeError, SourceError, describe_error
from memload.storage.keys import Keys

logger = logging.getLogger("memload")

#: The extensions that torchvision's ImageFolder takes for images, in any case.
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")

#: The first samples of a data set may be broken. So many are tried to find out its columns, and the
#: shape and type of arrays. Of these, a few may crash or hang.
_MAX_FIRST_SAMPLES, _MAX_LOST_SAMPLES = 100, 3


class Column(NamedTuple):
    """Type and shape of a column's entries. Points are pairs x, y that move with the image."""

    dtype: str
    shape: tuple[int, ...] = ()
    points: bool = False


class Record(NamedTuple):
    """One image, its name, and the values of its columns.

    ``image`` is the path of a file, which is read when its turn comes, the bytes of one, a PIL
    image, or an array ``(H, W)`` or ``(H, W, C)`` of uint8, or ``(H, W)`` of uint16. A build with
    ``mode="array"`` takes only arrays, of uint8, uint16, float16 or float32 and with any number of
    channels.
    """

    key: str
    image: Path | bytes | Image.Image | np.ndarray
    columns: Mapping[str, Any]


@runtime_checkable
class Source(Protocol):
    """What `memload.build` reads. Several processes ask for records by position."""

    @property
    def classes(self) -> Sequence[str] | None:
        """The names of the classes that the column ``label`` counts into, or None."""

    @property
    def schema(self) -> Mapping[str, Column]:
        """The columns that every record has."""

    @property
    def keys(self) -> Sequence[str]:
        """The names of the records."""

    @property
    def notes(self) -> Sequence[str]:
        """What the user should know, such as what was skipped and why."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Record:
        """Return one record. An exception rejects this one record."""


class Files:
    """Image files below ``root``. ``columns`` has an array of values for each column.

    No file is looked at.
    """

    def __init__(self, root: Path, names: Sequence[str], columns: dict[str, np.ndarray]) -> None:
        self.root, self.columns = root, columns
        self.keys = Keys.of(names)

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> Record:
        key = self.keys[index]
        columns = {name: values[index] for name, values in self.columns.items()}
        return Record(key, self.root / key, columns)


# ----------------------------------------------------------------------------------------- folders


class ImageFolder(Files):
    """A folder of images with one sub-folder for each class, in torchvision's order.

    A flat folder of images is read too, and has no labels. Classes are the names of the
    sub-folders, sorted. The images of a class are those in its folder and in all folders below. A
    file is taken for an image by its extension. Hidden files and folders are skipped. ``notes``
    reports what was skipped. If images lie only in folders within the class folders, as when
    ``root`` holds ``train/`` and ``val/``, a warning is logged to ``memload``. A broken link counts
    as an image, and is rejected when it is read.

    Opening a folder lists it, and reads no file. Raises SourceError if there is no folder or no
    image in it.

    >>> source = memload.ImageFolder("pets", extensions=(".jpg", ".gif"))  # doctest: +SKIP
    >>> source.classes, len(source)  # doctest: +SKIP
    (['cat', 'dog'], 7390)
    """

    def __init__(self, root: str | Path, *, extensions: Sequence[str] = EXTENSIONS) -> None:
        if isinstance(extensions, str):  # each of its characters would count as an extension
            raise TypeError(f"extensions must be a sequence such as ('.jpg',), not {extensions!r}")
        self._extensions = tuple(extension.lower() for extension in extensions)
        self.root = _checked_root(root)
        self._skipped: dict[str, list[str]] = {}
        _, flat, folders = next(self._walk(""))
        names, labels = self._find_images(folders)
        if names:
            self._skipped["skipped images outside the class folders"] = flat
        self.notes = [
            f"{kind} ({len(skipped):,}): {_first_names(sorted(skipped))}"
            for kind, skipped in sorted(self._skipped.items())
            if skipped
        ]
        if not names and not flat:
            raise SourceError(
                f"{root} has no image files ({' '.join(self._extensions)}): "
                f"{'; '.join(self.notes) or 'the folder is empty'}. Check the path, or name other "
                "extensions with --extensions.",
                path=root,
            )
        if not names:
            self.notes.append(f"no labels: {root} has no class folders with images")
        elif not any(name.count("/") == 1 for name in names):
            first = names[0]
            logger.warning(
                f"{root}: the class folders ({_first_names(folders)}) have no images of their own, "
                f"only folders with images, such as {first.rpartition('/')[0]}. If those are the "
                f"classes, build {self.root / first.partition('/')[0]} instead."
            )
        self.classes: list[str] | None = folders if names else None
        self.schema = {"label": Column("<i8")} if names else {}
        columns = {"label": np.array(labels, np.int64)} if names else {}
        super().__init__(self.root, names or sorted(flat), columns)

    def _find_images(self, folders: list[str]) -> tuple[list[str], list[int]]:
        """Return the names and labels of all images in the class folders."""
        names: list[str] = []
        labels: list[int] = []
        for label, name in enumerate(folders):
            in_class = [
                f"{folder}/{file}"
                for folder, files, _ in sorted(self._walk(name))
                for file in sorted(files)
            ]
            if not in_class:
                self._skip("class folders without images (which still count as classes)", name)
            names += in_class
            labels += [label] * len(in_class)
        return names, labels

    def _walk(self, start: str) -> Iterator[tuple[str, list[str], list[str]]]:
        """Yield a folder and each folder below it, with the images and the folders in it."""
        todo: list[tuple[str, tuple[tuple[int, int], ...]]] = [(start, ())]
        while todo:
            folder, parents = todo.pop()
            path = self.root / folder
            try:
                status = path.stat()
                identity = (status.st_dev, status.st_ino)
                if identity in parents:  # following this link would never end
                    self._skip("skipped links to a folder that contains them", folder)
                    continue
                files, folders = self._scan(folder)
            except OSError as error:
                raise SourceError(
                    f"{path} cannot be read: {error.strerror or error}", path=path
                ) from error
            yield folder, files, folders
            todo += [(f"{folder}/{name}", (*parents, identity)) for name in folders]

    def _scan(self, folder: str) -> tuple[list[str], list[str]]:
        """Return the images and the folders in one folder. The folders are sorted."""
        files, folders = [], []
        with os.scandir(self.root / folder) as entries:
            for entry in entries:
                name = f"{folder}/{entry.name}" if folder else entry.name
                is_folder = _is_folder(entry)
                if entry.name.startswith("."):
                    self._skip("skipped hidden files and folders", name)
                elif is_folder:
                    is_build = (
                        entry.name.endswith(".building") and Path(entry.path, "lock").exists()
                    )
                    if is_build:  # of an output that lies here too
                        self._skip("skipped unfinished builds", name)
                    else:
                        folders.append(entry.name)
                elif entry.name.lower().endswith(self._extensions):
                    files.append(entry.name)
                else:
                    self._skip("skipped files without an image extension", name)
        return files, sorted(folders)

    def _skip(self, kind: str, name: str) -> None:
        self._skipped.setdefault(kind, []).append(name)


def _checked_root(root: str | Path) -> Path:
    if not os.fspath(root):  # pathlib would take it for the current folder
        raise SourceError("The path of the image folder is empty. Write . for the current folder.")
    path = Path(root)
    if path.is_dir():
        return path
    if path.is_file() and path.suffix.lower() == ".csv":
        manifest = f"memload.Manifest({str(root)!r})"
        remedy = f"If it lists images, say --manifest {root}; in Python, {manifest}."
    else:
        remedy = "Check the path."
    what = "is a file, not a folder of images" if path.exists() else "does not exist"
    raise SourceError(f"{root} {what}. {remedy}", path=root)


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, which is rejected when it is read
        return False


def _first_names(names: Sequence[str]) -> str:
    return ", ".join(repr(name)[1:-1] for name in names[:3]) + (", …" if len(names) > 3 else "")


# --------------------------------------------------------------------------------------- data sets


class DatasetSource:
    """Any map-style data set: an object with ``len()`` and ``[index]``, such as torchvision's or
    Hugging Face's.

    A sample is ``(image, target)``, an image alone, or a dict with an entry ``image``. An image is
    a PIL image, an array as in `Record`, a tensor ``(C, H, W)`` of such an array, encoded bytes, or
    a path. A target is a label, or a tuple (its first entry is the ``label`` if it is an integer,
    the others are ``target_0``, ``target_1``, …), or a dict of columns. Columns are numbers and
    arrays of numbers. The first sample that can be read fixes their names, types and shapes.
    A sample whose columns differ is rejected, but an integer may stand for a float. ``classes`` are
    taken from the data set.

    ``num_workers`` and ``timeout`` are those of the build, see `first_usable`.

    Raises SourceError if none of the first samples can be read.
    """

    def __init__(self, dataset: Any, num_workers: int = 0, timeout: float = 60.0) -> None:
        self._dataset = dataset
        self.notes: list[str] = []
        if not len(dataset):
            raise SourceError("The data set has no samples")
        self.schema = first_usable(self._columns, len(dataset), num_workers, timeout)
        counts = self.schema.get("label") == Column("<i8")
        self.classes = _class_names(dataset) if counts else None
        self.keys = Keys.of([str(index) for index in range(len(dataset))])

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Record:
        image, columns = self._sample(index)
        if columns.keys() != self.schema.keys():
            raise DecodeError(
                f"its columns are {sorted(columns)}, but those of the first sample are "
                f"{sorted(self.schema)}"
            )
        for name, value in columns.items():
            first, column = self.schema[name], _column(name, value)
            is_integer_for_float = (first.dtype, column.dtype) == ("<f8", "<i8")
            is_same_type = column.dtype == first.dtype or is_integer_for_float
            if column.shape != first.shape or not is_same_type:
                raise DecodeError(
                    f"column {name!r} has type and shape {column[:2]}, but the first sample has "
                    f"{first[:2]}"
                )
        return Record(str(index), _plain_image(image), columns)

    def _columns(self, index: int) -> dict[str, Column]:
        return {name: _column(name, value) for name, value in self._sample(index)[1].items()}

    def _sample(self, index: int) -> tuple[Any, dict[str, Any]]:
        """Return the image and the columns of a sample."""
        sample = self._dataset[index]
        if sample is None:
            raise DecodeError("the data set returned None")
        if isinstance(sample, Mapping):
            columns = dict(sample)
            if "image" not in columns:
                raise SourceError(
                    f"The samples of the data set have no entry 'image', only {sorted(columns)}. "
                    "Rename the image's."
                )
            return columns.pop("image"), columns
        if not isinstance(sample, (tuple, list)):
            return sample, {}
        image, *targets = sample
        target = targets[0] if len(targets) == 1 else tuple(targets)
        if isinstance(target, Mapping):
            return image, dict(target)
        if not isinstance(target, tuple):
            return image, {"label": target}
        has_label = bool(target) and _column("label", target[0]) == Column("<i8")
        names = ["label"] if has_label else []
        names += [f"target_{number}" for number in range(len(target) - has_label)]
        return image, dict(zip(names, target, strict=True))


def first_usable(look: Callable[[int], Any], samples: int, num_workers: int, timeout: float) -> Any:
    """Return what ``look`` returns for the first sample for which it does not fail.

    Unless ``num_workers`` is 0, it is called in a worker, since it runs the user's code. If that
    opened files in this process, workers that are forked later would move each other's position in
    them. Raises SourceError if ``look`` does, or if it fails for all of the first samples.
    """
    results = run(
        functools.partial(_Look, look, BaseException if num_workers else Exception),
        iter([Chunk(0, min(samples, _MAX_FIRST_SAMPLES))]),
        num_workers=min(num_workers, 1),
        timeout=timeout,
    )
    with contextlib.closing(results):
        _, (found, reasons) = next(results)
    if found is None:
        raise SourceError(
            f"None of the first {len(reasons)} samples of the data set can be used. The first is "
            f"sample 0: {reasons[0]}"
        )
    return found


class _Look:
    """The work of `first_usable`: finds what ``look`` returns first, and why it failed before."""

    def __init__(self, look: Callable[[int], Any], failures: type[BaseException]) -> None:
        self.look, self.failures = look, failures

    def __call__(self, chunk: Chunk, note_row: NoteRow) -> tuple[Any, list[str]]:
        reasons: list[str] = []
        for row in range(chunk.start, chunk.stop):
            note_row(row)
            if row in chunk.lost:
                reasons.append(chunk.lost[row])
                if len(chunk.lost) == _MAX_LOST_SAMPLES:
                    break
                continue
            try:
                return self.look(row), reasons
            except SourceError:
                raise
            except self.failures as error:
                reasons.append(describe_error(error)[:500])
        return None, reasons

    def close(self) -> None:
        pass


def _class_names(dataset: Any) -> list[str] | None:
    """Return the names of the classes, if they are where torchvision or Hugging Face have them."""
    names = getattr(dataset, "classes", None)
    features = getattr(dataset, "features", None)
    if names is None and isinstance(features, Mapping):
        names = getattr(features.get("label"), "names", None)
    if isinstance(names, str) or not isinstance(names, (Sequence, np.ndarray)):
        return None
    return [str(name) for name in names]


def _plain_image(image: Any) -> Any:
    """Return an image of a data set as `Record` has it."""
    if isinstance(image, Mapping):  # images that Hugging Face has not decoded
        image = image.get("bytes") or image.get("path")
    if isinstance(image, (str, os.PathLike)):
        return Path(image)
    # Tensors and their subclasses are recognized without importing torch.
    if any(kind.__module__.partition(".")[0] == "torch" for kind in type(image).__mro__):
        return image.permute(1, 2, 0).numpy() if image.ndim == 3 else image.numpy()
    return image


def _column(name: object, value: Any) -> Column:
    """Return type and shape of a value. A single number becomes int64 or float64."""
    try:
        array = np.asarray(value)
    # Lists of different lengths or a tensor on a device, for example. It may raise anything.
    except Exception as error:
        raise SourceError(
            f"Column {name!r:.80} is not a number or an array of numbers: "
            f"{describe_error(error):.500}"
        ) from error
    if array.dtype.kind not in "biuf":
        raise SourceError(
            f"Column {name!r:.80} is not a number or an array of numbers, but "
            f"{type(value).__name__} {value!r:.40}. Turn it into numbers, or leave it out."
        )
    if array.ndim == 0:
        return Column("<f8" if array.dtype.kind == "f" else "<i8")
    return Column(array.dtype.newbyteorder("<").str, array.shape)
