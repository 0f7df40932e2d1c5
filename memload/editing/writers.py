"""Where the files of samples go: into folders with a table, or into a tar."""

import csv
import io
import itertools
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from memload.editing.cells import TABLE
from memload.editing.facts import Facts, Table
from memload.editing.file_names import file_stems, folder_names, safe_name
from memload.sources.tables import PATH
from memload.storage.index import Index, sync


class FolderWriter:
    """Writes a file for each array of a sample, and a line of ``metadata.csv``."""

    def __init__(self, index: Index, folder: Path, endings: Mapping[str, str]) -> None:
        self._roots = array_folders(index, folder)
        self._endings = {name: f".{ending}" for name, ending in endings.items()}
        self.stems = file_stems(
            index.keys, _class_folders(index), endings={*self._endings.values()}
        )
        self._facts = Table(index)
        self._made = set[Path]()

    def __enter__(self) -> Self:
        for root in self._roots.values():
            root.mkdir()
        path = self._roots["image"] / TABLE
        self._file = path.open("x", newline="", encoding="utf-8", errors="surrogateescape")
        # Numbers are not quoted. Texts are, since readers cut off spaces around cells without.
        self._table = csv.writer(self._file, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
        self._table.writerow([PATH, *self._facts.header])
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, position: int, contents: Mapping[str, bytes]) -> None:
        """Write the files of a sample."""
        stem = self.stems[position]
        for name, content in contents.items():
            path = self._roots[name] / f"{stem}{self._endings[name]}"
            if path.parent not in self._made:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._made.add(path.parent)
            with path.open("xb") as file:  # where a and A are the same name, one of them fails
                file.write(content)
        self._table.writerow([f"{stem}{self._endings['image']}", *self._facts.cells(position)])


class TarWriter:
    """Writes the files of a sample into a tar, in the layout of WebDataset.

    Its members have no owner and no time, so that the same samples give the same bytes.
    """

    def __init__(self, index: Index, path: Path, endings: Mapping[str, str]) -> None:
        self._path = path
        self._endings = {
            name: ending if name == "image" else member_ending(name, ending)
            for name, ending in endings.items()
        }
        # The key of a WebDataset ends at the first dot in the name of the file.
        no_folders = itertools.repeat(None, len(index))
        all_endings = {f".{ending}" for ending in (*self._endings.values(), "cls", "json")}
        self.stems = file_stems(index.keys, no_folders, endings=all_endings, dots=False)
        self._facts = Facts(index)
        label = index.columns.get("label")
        is_class = label is not None and label.ndim == 1 and label.dtype.kind in "iu"
        self._labels = label if is_class else None

    def __enter__(self) -> Self:
        # GNU's format holds names of any length and bytes.
        self._tar = tarfile.open(  # __exit__ closes it
            self._path, "x", format=tarfile.GNU_FORMAT, encoding="utf-8", errors="surrogateescape"
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._tar.close()
        sync(self._path)

    def write(self, position: int, contents: Mapping[str, bytes]) -> None:
        """Write the files of a sample."""
        members = {self._endings[name]: content for name, content in contents.items()}
        if self._labels is not None:
            members["cls"] = str(self._labels[position]).encode()
        members["json"] = json.dumps(self._facts.entries(position)).encode()
        for ending, content in members.items():
            member = tarfile.TarInfo(f"{self.stems[position]}.{ending}")
            member.size = len(content)
            self._tar.addfile(member, io.BytesIO(content))
        self._tar.members.clear()  # type: ignore[attr-defined]  # 1 KB for each member


def member_ending(name: str, ending: str) -> str:
    """Return how the files of an array in a tar end, such as ``mask.png``."""
    return f"{safe_name(name)}.{ending}"


def array_folders(index: Index, folder: Path) -> dict[str, Path]:
    """Return the folder of each array by its name. That of the images, ``folder``, is the last."""
    beside = {
        array.name: folder.with_name(f"{folder.name}.{safe_name(array.name)}")
        for array in index.arrays
        if array.kind != "image"
    }
    return {**beside, "image": folder}


def _class_folders(index: Index) -> list[str | None]:
    """Return the folder for each sample: its class, or its label as a number; None without."""
    label = index.columns.get("label")
    if label is None or label.ndim > 1 or label.dtype.kind not in "iu":
        return [None] * len(index)
    if index.classes is not None:
        names = folder_names(index.classes)
        return [names[number] for number in label.tolist()]
    digits = len(str(label.max()))  # as many for all, so that the folders sort as the labels do
    return [f"{number:0{digits}}" for number in label.tolist()]
