"""A CSV file as a source: image, label, numbers, landmarks."""

import csv
import fnmatch
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from memload.building.sources import EXTENSIONS, Column, Files, Record
from memload.errors import SourceError
from memload.storage.format import RESERVED

_INTEGER = re.compile(r"[+-]?[0-9]+")


class Manifest:
    """A CSV file (UTF-8, with a line of column names): the path of an image, its label, and numbers.

    The first column is the path, relative to ``root``, which is the manifest's own folder by default. A
    column ``label`` holds names of classes, which are sorted, or numbers, which are taken as they are. Every
    further column of numbers becomes a column of the data set under its own name: int64 if all entries are
    integers, else float64, with NaN for empty ones. Columns of text are left out, which is told in ``notes``.

    ``points`` and ``arrays`` gather columns into one float32 array an image, by patterns as of file names:

    - ``points={"landmarks": "part_*"}`` takes the matching columns in the file's order as x, y, x, y, …;
    - ``points={"landmarks": "x*,y*"}`` pairs the first column like ``x*`` with the first like ``y*``, and so on;
    - ``points={"landmarks": 2}`` takes all further columns as x, y, x, y, …;
    - ``arrays={"pose": "r*:3x3"}`` gives any shape; without one it is flat.

    Points are in pixels of the stored picture, where (0, 0) is the centre of the top left one; they become
    ``(k, 2)`` and follow the picture through its geometry, so that they stay on the same pixel.

    Raises SourceError, naming the file and line, and ValueError for a pattern that fits no columns.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        root: str | Path | None = None,
        points: Mapping[str, str | int] | None = None,
        arrays: Mapping[str, str] | None = None,
    ) -> None:
        self.path = Path(path)
        self.notes: list[str] = []
        self.classes: list[str] | None = None
        self.schema: dict[str, Column] = {}
        self._values: dict[str, np.ndarray] = {}
        self._lines: list[int] = []
        self.root = self.path.parent if root is None else Path(root)
        if not self.root.is_dir():
            raise SourceError(
                f"{self.root}: expected the folder of the images, found none. Check --root",
                path=self.root,
            )
        names, cells = self._read()
        if "label" in cells:
            self._add_label(cells.pop("label"))
        rest, used = list(cells), set[str]()
        for name, pattern in (points or {}).items():
            chosen = _choose_points(
                name, pattern, [c for c in rest if _numbers(cells[c][:1]) is not None]
            )
            self._add(name, self._stack(chosen, cells).reshape(len(names), -1, 2), points=True)
            used.update(chosen)
        for name, pattern in (arrays or {}).items():
            chosen, shape = _choose_array(name, pattern, rest)
            self._add(name, self._stack(chosen, cells).reshape(len(names), *shape))
            used.update(chosen)
        text = []
        for name in rest:
            if name not in used:
                values = _numbers(cells[name])
                if values is None:
                    text.append(name)
                else:
                    self._add(name, values)
        if text:
            self.notes.append(f"{len(text)} columns of text are left out: {', '.join(text[:5])}")
        self._lines.clear()  # errors told, no one needs them
        self._files = Files(self.root, names)
        self.keys = self._files.keys

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> Record:
        return self._files.record(
            index, {name: values[index] for name, values in self._values.items()}
        )

    def listing(self) -> Mapping[str, np.ndarray]:
        """See `Source.listing`."""
        return self._files.listing() | {
            f"column/{name}": values for name, values in self._values.items()
        }

    def _read(self) -> tuple[list[str], dict[str, list[str]]]:
        """Return the paths, and the cells of the other columns by name."""
        try:
            # A pipe is read, as <(…) of a shell is one; a device such as /dev/zero has no end.
            if self.path.is_dir() or self.path.is_block_device() or self.path.is_char_device():
                raise SourceError(
                    f"{self.path}: expected a CSV file, found a folder or a device. Check the path",
                    path=self.path,
                )
            with self.path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
                reader = csv.reader(file, strict=True, skipinitialspace=True)
                header = [name.strip() for name in next(reader, [])]
                rows = []
                for row in reader:
                    if not row:
                        continue
                    if len(row) != len(header):
                        raise SourceError(
                            f"{self.path}, line {reader.line_num}: expected {len(header)} columns as in the first "
                            f"line, found {len(row)}. Mend the line",
                            path=self.path,
                        )
                    if "\0" in row[0]:
                        raise SourceError(
                            f"{self.path}, line {reader.line_num}: expected a path, found {row[0]!r:.60}. Is it a "
                            "CSV file in UTF-8?",
                            path=self.path,
                        )
                    rows.append(row)
                    self._lines.append(reader.line_num)
        except OSError as error:
            raise SourceError(
                f"{self.path}: expected a CSV file, found: {error}", path=self.path
            ) from error
        except csv.Error as error:
            raise SourceError(
                f"{self.path}, line {reader.line_num}: expected a line of a CSV file, found: {error}. Mend the line",
                path=self.path,
            ) from error
        if header and header[0].lower().endswith(EXTENSIONS):
            raise SourceError(
                f"{self.path}, line 1: expected the names of the columns, found an image ({header[0]}). "
                "Put a line such as 'path,label' above it",
                path=self.path,
            )
        double = sorted({name for name in header if header.count(name) > 1})
        if double or "" in header:
            what = (
                f"{', '.join(double)} twice" if double and double != [""] else "one without a name"
            )
            raise SourceError(
                f"{self.path}, line 1: expected different column names, found {what}",
                path=self.path,
            )
        if not rows:
            raise SourceError(f"{self.path}: expected a line an image, found none", path=self.path)
        names, *columns = (list(column) for column in zip(*rows, strict=True))
        return names, dict(zip(header[1:], columns, strict=True))

    def _add_label(self, cells: list[str]) -> None:
        values = _numbers(cells)
        empty = [line for line, cell in zip(self._lines, cells, strict=True) if not cell.strip()]
        if empty:
            raise SourceError(
                f"{self.path}, line {empty[0]}: expected a label in every line, found none for {len(empty)} images. "
                "Fill them in, or drop these lines",
                path=self.path,
            )
        if values is None:
            self.classes = sorted(set(cells))
            number = {name: label for label, name in enumerate(self.classes)}
            values = np.array([number[cell] for cell in cells], np.int64)
        self._add("label", values)

    def _add(self, name: str, values: np.ndarray, *, points: bool = False) -> None:
        if name in RESERVED or "/" in name or name in self._values:
            raise SourceError(
                f"{self.path}: column {name!r}: expected another name: this one is taken. Rename the column",
                path=self.path,
            )
        self._values[name] = values
        self.schema[name] = Column(values.dtype.str, values.shape[1:], points)

    def _stack(self, names: Sequence[str], cells: Mapping[str, list[str]]) -> np.ndarray:
        columns = []
        for name in names:
            values = _numbers(cells[name])
            if values is None:
                line, cell = next(
                    (line, cell)
                    for line, cell in zip(self._lines, cells[name], strict=True)
                    if _numbers([cell]) is None
                )
                raise SourceError(
                    f"{self.path}, line {line}: column {name!r}: expected a number, found {cell!r:.60}. Mend the line, "
                    "or leave the column out",
                    path=self.path,
                )
            columns.append(values.astype(np.float32))
        return np.stack(columns, axis=1)


def _numbers(cells: Sequence[str]) -> np.ndarray | None:
    """Return int64 or float64, or None where a cell is no number."""
    try:
        if all(_INTEGER.fullmatch(cell) for cell in cells):
            return np.array([int(cell) for cell in cells], np.int64)
        if any("_" in cell for cell in cells):  # Python reads 1_000 as a number
            return None
        return np.array([float(cell) if cell.strip() else np.nan for cell in cells], np.float64)
    except (ValueError, OverflowError):
        return None


def _choose_points(name: str, pattern: str | int, columns: Sequence[str]) -> list[str]:
    """Return the columns x, y, x, y, … that a pattern stands for."""
    if str(pattern) == "2":
        chosen = list(columns)
    else:
        patterns = str(pattern).split(",")
        groups = [fnmatch.filter(columns, part.strip()) for part in patterns]
        if len(groups) > 2 or len({len(group) for group in groups}) > 1:
            raise ValueError(
                f"points {name!r}: expected one pattern, or one for x and one for y that fit as many columns, "
                f"found {pattern!r}, which fits {' and '.join(str(len(group)) for group in groups)}"
            )
        chosen = [column for pair in zip(*groups, strict=True) for column in pair]
    if not chosen or len(chosen) % 2:
        raise ValueError(
            f"points {name!r}: expected a pattern that fits an even number of columns, found {pattern!r}, "
            f"which fits {len(chosen)} of {', '.join(columns) or 'none'}"
        )
    return chosen


def _choose_array(
    name: str, pattern: str, columns: Sequence[str]
) -> tuple[list[str], tuple[int, ...]]:
    """Return the columns that a pattern such as ``r*:3x3`` stands for, and the shape."""
    glob, _, shape_text = pattern.partition(":")
    chosen = fnmatch.filter(columns, glob)
    sizes = shape_text.split("x") if shape_text else [str(len(chosen))]
    shape = tuple(int(size) if size.isdecimal() else 0 for size in sizes)
    if not chosen or int(np.prod(shape)) != len(chosen):
        raise ValueError(
            f"arrays {name!r}: expected a pattern and a shape of as many columns, such as 'r*:3x3', found "
            f"{pattern!r}, which fits {len(chosen)} of {', '.join(columns) or 'none'}"
        )
    return chosen, shape
