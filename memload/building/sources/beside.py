"""Masks and other arrays in files of their own, beside the images of any source."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NoReturn

import numpy as np

from memload.building.sources.listed import ListedSource
from memload.building.sources.matching import Conflict, match
from memload.building.sources.record import EXTENSIONS, Record, Source
from memload.building.sources.wrapped import WrappedSource
from memload.errors import SourceError
from memload.storage.keys import Keys
from memload.wording import counted, listed

#: The extensions of files by kind. A mask is no JPEG, which does not keep numbers as they are.
EXTENSIONS_OF_KIND: Mapping[str, tuple[str, ...]] = {
    "mask": (".png", ".tif", ".tiff", ".bmp", ".gif", ".pgm", ".npy"),
    "array": (*EXTENSIONS, ".npy"),
}


class FilesBeside(WrappedSource):
    """A source whose records also get masks and other arrays, which lie in folders.

    ``masks`` and ``arrays`` map the names of arrays to folders. The file of the image ``cat/1.jpg``
    is ``cat/1.png`` there, or has another extension of a picture, or ``.npy``. If no file has the
    name of an image with all its folders, those fit whose path is the end of the other's:
    ``train/cat/1.jpg`` and ``cat/1.png``, or ``cat/1.jpg`` and ``1.png``. So masks may all lie in
    one folder, as long as their names differ. If an image has no file, its record lacks the array.

    The folders are listed at once, and no file in them is read. ``notes`` says how many files
    belong to no image. The build says how many samples lack an array. Raises SourceError if a
    folder is missing, if no image has a file in it, for two files of one image, for two images of
    one file, and if samples have only numbers for names; and ValueError if two arrays have the same
    name.

    >>> source = FilesBeside(ImageFolder("images"), masks={"mask": "masks"})  # doctest: +SKIP
    >>> source[0].arrays  # doctest: +SKIP
    {'mask': PosixPath('masks/cat/1.png')}
    """

    def __init__(
        self,
        source: Source,
        *,
        masks: Mapping[str, str | Path] | None = None,
        arrays: Mapping[str, str | Path] | None = None,
    ) -> None:
        super().__init__(source)
        masks, arrays = masks or {}, arrays or {}
        given = [*self.arrays, *masks, *arrays]
        if twice := sorted({name for name in given if given.count(name) > 1}):
            raise ValueError(f"arrays: {twice[0]!r:.80} is given twice. Give each name once.")
        folders = {name: Path(folder) for name, folder in {**masks, **arrays}.items()}
        for folder in folders.values():
            _check_folder(folder)
        if folders and self.has_numbers_as_keys:
            folder = next(iter(folders.values()))
            raise SourceError(
                f"{folder} cannot belong to these samples: its files are found by the names of "
                "samples, and these have only numbers. Name them: "
                "DatasetSource(dataset, key=[…]). Or save the arrays in one NPY file, in the order "
                "of the samples, and add it with 'memload join'.",
                path=folder,
            )
        kinds: dict[str, Literal["mask", "array"]] = {
            name: "mask" if name in masks else "array" for name in folders
        }
        self.arrays = {**self.arrays, **kinds}
        names = source.names if isinstance(source, ListedSource) else self.keys
        for folder in folders.values():
            _check_not_images(self.root, folder, names)
        self._folders = {
            name: _Folder(folder, name, kinds[name], names) for name, folder in folders.items()
        }
        self.notes = [
            *source.notes,
            *(note for folder in self._folders.values() for note in folder.notes),
        ]
        # Only their names: an unfinished build goes on after all folders were moved.
        places = {name: folder.path.absolute().name for name, folder in self._folders.items()}
        self.identity = [self.identity, places]

    def _changed(self, index: int, record: Record) -> Record:
        files = {name: folder.file_of(index) for name, folder in self._folders.items()}
        found = {name: file for name, file in files.items() if file is not None}
        return record._replace(arrays={**record.arrays, **found})


class _Folder:
    """The files of one array in a folder, and which of them belongs to each image."""

    def __init__(self, path: Path, name: str, kind: str, keys: Sequence[str]) -> None:
        self.path = path
        files, others = _list(path, EXTENSIONS_OF_KIND[kind])
        if not files:
            found = f"only {listed(others, 3)}" if others else "it is empty"
            extensions = " ".join(EXTENSIONS_OF_KIND[kind])
            raise SourceError(
                f"{path} has no files for {name!r} ({extensions}): {found}. Check the folder.",
                path=path,
            )
        #: for each image the number of its file, or -1
        self._numbers = _assign(path, files, keys)
        self._files = Keys.of(files)
        self.notes = list(self._describe(name, others))

    def file_of(self, index: int) -> Path | None:
        """Return the file of an image, if it has one."""
        number = int(self._numbers[index])
        return None if number < 0 else self.path / self._files[number]

    def _describe(self, name: str, others: Sequence[str]) -> Iterator[str]:
        """Yield notes on files without an image, and on other files."""
        unused = np.setdiff1d(np.arange(len(self._files)), self._numbers).tolist()
        if unused:
            shown = listed((self._files[number] for number in unused), 3)
            count = f"{len(unused):,} of {len(self._files):,} files"
            verb = "belongs" if len(unused) == 1 else "belong"
            yield f"{name}: {count} in {self.path} {verb} to no image: {shown}"
        if others:
            count = counted(len(others), "other file")
            yield f"{name}: skipped {count} in {self.path}: {listed(others, 3)}"


def _check_folder(root: Path) -> None:
    if root.is_dir():
        return
    remedy = "Check the path"
    if root.suffix in (".npy", ".bin", ".idx"):
        remedy = "Build the images, and add it with 'memload join'"
    what = "is a file, not a folder" if root.exists() else "does not exist"
    raise SourceError(f"{root} {what}. {remedy}.", path=root)


def _list(root: Path, endings: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the files below a folder with these endings, and others. Hidden ones are left out."""
    chosen: list[str] = []
    others: list[str] = []
    for folder, folders, files in os.walk(root, followlinks=True, onerror=_raise):
        folders[:] = sorted(
            name for name in folders if name[0] != "." and not _is_loop(Path(folder), name)
        )
        relative = os.path.relpath(folder, root)
        prefix = "" if relative == "." else f"{relative}/"
        for name in sorted(files):
            if not name.startswith("."):
                kept = chosen if name.lower().endswith(tuple(endings)) else others
                kept.append(f"{prefix}{name}")
    return chosen, others


def _check_not_images(images: Path | str | None, folder: Path, keys: Sequence[str]) -> None:
    """Raise SourceError if the source has files of a folder as images."""
    if not isinstance(images, Path) or not folder.resolve().is_relative_to(images.resolve()):
        return
    relative = folder.resolve().relative_to(images.resolve()).as_posix()
    prefix = "" if relative == "." else f"{relative}/"
    taken = next((key for key in keys if key.startswith(prefix) and _is_mask(key)), None)
    if taken is not None:
        raise SourceError(
            f"{folder} lies within the images, so that {taken} would be an image. Move it out of "
            f"{images}, or name the extensions of the images, such as --extensions .jpg.",
            path=folder,
        )


def _is_mask(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS_OF_KIND["mask"])


def _raise(error: OSError) -> NoReturn:
    raise SourceError(
        f"{error.filename} cannot be read: {error.strerror}.", path=error.filename
    ) from error


def _is_loop(folder: Path, name: str) -> bool:
    """Return whether a folder in a folder is a link to what contains it."""
    path = folder / name
    return path.is_symlink() and folder.resolve().is_relative_to(path.resolve())


# -------------------------------------------------------------------------- which file is whose


def _assign(root: Path, files: Sequence[str], keys: Sequence[str]) -> np.ndarray:
    """Return for each key the number of its file, or -1, int64 ``(n,)``. Raises SourceError."""
    numbers, conflict = match(keys, files, are_files=True)
    if conflict is not None:
        raise _conflict_error(root, conflict)
    if (numbers >= 0).any():
        return numbers
    remedy = " If names differ otherwise, list both in a table, and name its column of masks."
    raise SourceError(
        f"{root} has no file of any image. The first image is {keys[0]}, and the first file is "
        f"{files[0]}. The file of an image has its name, in folders of the same names, "
        f"and another extension. Check the folder.{remedy}",
        path=root,
    )


def _conflict_error(root: Path, conflict: Conflict) -> SourceError:
    """Return the error for two files of an image, a file of two images, or files in two folders."""
    key, file = conflict.keys[0], conflict.names[0]
    if len(conflict.keys) == len(conflict.names):
        return SourceError(
            f"{root} has {file} and {conflict.names[1]} in different folders, but the images {key} "
            f"and {conflict.keys[1]} have no such folders. Name the folder that belongs to the "
            "images, or sort the images into folders of the same names.",
            path=root,
        )
    if len(conflict.names) == 2:
        return SourceError(
            f"{root} has two files of the image {key}: {file} and {conflict.names[1]}. Keep one of "
            "them, or sort them into folders as the images are.",
            path=root,
        )
    return SourceError(
        f"{root / file} would belong to two images, {key} and {conflict.keys[1]}. Sort these files "
        "into folders as the images are.",
        path=root,
    )
