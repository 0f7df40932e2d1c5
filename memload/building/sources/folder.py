"""A folder of images as a source."""

import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from memload.building.sources.columns import ColumnCollector
from memload.building.sources.listed import Files
from memload.building.sources.names import are_splits
from memload.building.sources.record import EXTENSIONS
from memload.errors import SourceError
from memload.wording import listed

logger = logging.getLogger("memload")


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
        columns = ColumnCollector()
        columns.notes += [
            f"{kind} ({len(skipped):,}): {listed(sorted(skipped), 3)}"
            for kind, skipped in sorted(self._skipped.items())
            if skipped
        ]
        if not names and not flat:
            raise SourceError(
                f"{root} has no image files ({' '.join(self._extensions)}): "
                f"{'; '.join(columns.notes) or 'the folder is empty'}. {self._remedy()}",
                path=root,
            )
        if not names:
            columns.notes.append(f"no labels: {root} has no class folders with images")
        elif not any(name.count("/") == 1 for name in names):
            first = names[0]
            logger.warning(
                f"{root}: the class folders ({listed(folders, 3)}) have no images of their own, "
                f"only folders with images, such as {first.rpartition('/')[0]}. If those are the "
                f"classes, build {self.root / first.partition('/')[0]} instead."
            )
        if names:
            columns.add("label", np.array(labels, np.int64))
            columns.classes = folders
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

    def _remedy(self) -> str:
        """Say what to do about a folder without images."""
        for kind in (".parquet", ".tar"):
            files = [name for names in self._skipped.values() for name in names]
            found = min((name for name in files if name.lower().endswith(kind)), default=None)
            if found is not None:
                folder, slash, name = found.rpartition("/")
                part = re.match("[A-Za-z]*", name)[0]  # type: ignore[index]  # it always matches
                part = part if are_splits([part]) else ""  # such as train-00000-of-00002.parquet
                pattern = self.root / f"{folder}{slash}{part}*{name[-len(kind) :]}"
                return f"Build these files: memload build '{pattern}' out.bin."
        return "Check the path, or name other extensions with --extensions."

    def _skip(self, kind: str, name: str) -> None:
        self._skipped.setdefault(kind, []).append(name)


def _checked_root(root: str | Path) -> Path:
    if not os.fspath(root):  # pathlib would take it for the current folder
        raise SourceError("The path of the image folder is empty. Write . for the current folder.")
    path = Path(root)
    if path.is_dir():
        return path
    what = "is a file, not a folder of images" if path.exists() else "does not exist"
    raise SourceError(f"{root} {what}. Check the path.", path=root)


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, which is rejected when it is read
        return False
