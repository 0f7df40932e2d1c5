"""A CSV file as a source: paths of images, labels, numbers, landmarks."""

import csv
import fnmatch
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from memload.building.sources import EXTENSIONS, Column, Files
from memload.errors import SourceError

_INTEGER = re.compile(r"[+-]?[0-9]+")


class Manifest(Files):
    """A CSV file (UTF-8, with a line of column names) that lists images, their labels, and numbers.

    The first column is the path of an image, relative to ``root``, which by default is the folder
    of the manifest. A column ``label`` holds either names of classes, which are sorted and counted,
    or integers, which are kept. Every other column of numbers becomes a column of the data set
    under its own name: int64 if all its cells are integers, otherwise float64 with NaN for empty
    cells. Columns of text are skipped, which ``notes`` reports.

    ``points`` and ``arrays`` combine columns into one float32 array for each image. They are chosen
    by patterns, as file names are:

    - ``points={"landmarks": "part_*"}`` takes the matching columns in the file's order as x, y, x,
      y, …;
    - ``points={"landmarks": "x*,y*"}`` pairs the first column like ``x*`` with the first like
      ``y*``, and so on;
    - ``points={"landmarks": 2}`` takes all other columns of numbers as x, y, x, y, …;
    - ``arrays={"pose": "r*:3x3"}`` gives the array a shape; without one it is flat.

    Points are in pixels of the image as it is stored, and (0, 0) is the center of its top left
    pixel. They become an array ``(k, 2)`` and stay on the same spot of the image when it is turned,
    resized and cropped.

    Raises SourceError, which names file and line, and ValueError for a pattern that fits no
    columns.

    >>> marks = {"landmarks": "x*,y*"}
    >>> faces = memload.Manifest("faces.csv", root="images", points=marks)  # doctest: +SKIP
    >>> memload.build(faces, "faces.bin", size=128)  # doctest: +SKIP
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
        folder = self.path.parent if root is None else Path(root)
        if not folder.is_dir():
            raise SourceError(
                f"The folder of the images, {folder}, does not exist. Check --root.", path=folder
            )
        names, table = self._read()
        super().__init__(folder, names, {})
        if "label" in table.cells:
            self._add_labels(table.cells.pop("label"), table)
        others = list(table.cells)
        used = set[str]()
        for name, pattern in (points or {}).items():
            numeric = [other for other in others if _numbers(table.cells[other][:1]) is not None]
            chosen = _choose_points(name, pattern, numeric)
            self._add(name, self._stack(chosen, table).reshape(len(names), -1, 2), points=True)
            used.update(chosen)
        for name, array_pattern in (arrays or {}).items():
            chosen, shape = _choose_array(name, array_pattern, others)
            self._add(name, self._stack(chosen, table).reshape(len(names), *shape))
            used.update(chosen)
        self._add_numbers([name for name in others if name not in used], table)

    def _read(self) -> tuple[list[str], "_Table"]:
        """Return the paths, and the other columns."""
        header: list[str] = []
        rows: list[list[str]] = []
        lines: list[int] = []
        try:
            # Pipes are read, such as <(…) in a shell. Devices such as /dev/zero have no end.
            if self.path.is_dir() or self.path.is_block_device() or self.path.is_char_device():
                raise self._error("it is a folder or a device, not a CSV file. Check the path.")
            with self.path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
                reader = csv.reader(file, strict=True, skipinitialspace=True)
                header = self._checked_header(next(reader, []))
                for row in reader:
                    if not row:
                        continue
                    if len(row) != len(header):
                        count = "1 column" if len(row) == 1 else f"{len(row)} columns"
                        raise self._error(
                            f"it has {count}, but the first line has {len(header)}. Correct it.",
                            reader.line_num,
                        )
                    rows.append(row)
                    lines.append(reader.line_num)
        except OSError as error:
            raise self._error(f"it cannot be read: {error.strerror or error}") from error
        except csv.Error as error:
            raise self._error(f"this is not CSV: {error}. Correct it.", reader.line_num) from error
        if not rows:
            raise self._error("it lists no images")
        names, *columns = (list(column) for column in zip(*rows, strict=True))
        return names, _Table(dict(zip(header[1:], columns, strict=True)), lines)

    def _checked_header(self, cells: list[str]) -> list[str]:
        header = [name.strip() for name in cells]
        if any("\0" in name for name in header):
            raise self._error("it is not CSV in UTF-8, but perhaps in UTF-16. Save it as UTF-8.")
        if header and header[0].lower().endswith(EXTENSIONS):
            raise self._error(
                f"the column names are missing: the first line has an image ({header[0]}). Put a "
                "line such as 'path,label' above it.",
                1,
            )
        if "" in header:
            raise self._error("a column has no name. Name it.", 1)
        twice = sorted({name for name in header if header.count(name) > 1})
        if twice:
            raise self._error(f"two columns have the same name: {', '.join(twice)}. Rename one.", 1)
        return header

    def _error(self, problem: str, line: int | None = None) -> SourceError:
        place = f"{self.path}" if line is None else f"{self.path}, line {line}"
        return SourceError(f"{place}: {problem}", path=self.path)

    def _add_labels(self, cells: list[str], table: "_Table") -> None:
        empty = [line for line, cell in zip(table.lines, cells, strict=True) if not cell.strip()]
        if empty:
            missing = "1 label is" if len(empty) == 1 else f"{len(empty):,} labels are"
            raise self._error(
                f"{missing} missing, the first one here. Fill them in, or remove these lines.",
                empty[0],
            )
        values = _numbers(cells)
        if values is None:
            self.classes = sorted(set(cells))
            number = {name: label for label, name in enumerate(self.classes)}
            values = np.array([number[cell] for cell in cells], np.int64)
        self._add("label", values)

    def _add_numbers(self, names: Sequence[str], table: "_Table") -> None:
        text = []
        for name in names:
            values = _numbers(table.cells[name])
            if values is not None:
                self._add(name, values)
            else:
                line, cell = table.first_text(name)
                text.append(f"{name} ({cell!r:.20} in line {line})")
        if text:
            kind = "1 column" if len(text) == 1 else f"{len(text)} columns"
            more = ", …" if len(text) > 5 else ""
            self.notes.append(f"skipped {kind} of text: {', '.join(text[:5])}{more}")

    def _add(self, name: str, values: np.ndarray, *, points: bool = False) -> None:
        if name in self.columns:
            raise self._error(f"two columns would be named {name!r}. Rename one.")
        self.columns[name] = values
        self.schema[name] = Column(values.dtype.str, values.shape[1:], points)

    def _stack(self, names: Sequence[str], table: "_Table") -> np.ndarray:
        """Return some columns of numbers as one float32 array ``(images, columns)``."""
        columns = []
        for name in names:
            values = _numbers(table.cells[name])
            if values is None:
                line, cell = table.first_text(name)
                raise self._error(
                    f"{cell!r:.60} in column {name!r} is not a number. Correct it, or leave the "
                    "column out.",
                    line,
                )
            columns.append(values.astype(np.float32))
        return np.stack(columns, axis=1)


class _Table:
    """The cells of the columns by name, and the number of each row's line."""

    def __init__(self, cells: dict[str, list[str]], lines: list[int]) -> None:
        self.cells, self.lines = cells, lines

    def first_text(self, name: str) -> tuple[int, str]:
        """Return line and text of the first cell because of which a column is not numbers."""
        cells = list(zip(self.lines, self.cells[name], strict=True))
        return next(((line, cell) for line, cell in cells if _numbers([cell]) is None), cells[0])


def _numbers(cells: Sequence[str]) -> np.ndarray | None:
    """Return int64 or float64 values, or None if a cell is not a number."""
    try:
        if all(_INTEGER.fullmatch(cell) for cell in cells):
            return np.array([int(cell) for cell in cells], np.int64)
        if any("_" in cell for cell in cells):  # Python would read 1_000 as a number
            return None
        return np.array([float(cell) if cell.strip() else np.nan for cell in cells], np.float64)
    except (ValueError, OverflowError):
        return None


def _choose_points(name: str, pattern: str | int, columns: Sequence[str]) -> list[str]:
    """Return the columns x, y, x, y, … that a pattern stands for."""
    if str(pattern) == "2":
        chosen = list(columns)
    else:
        groups = [fnmatch.filter(columns, part.strip()) for part in str(pattern).split(",")]
        if len(groups) > 2 or len({len(group) for group in groups}) > 1:
            counts = " and ".join(str(len(group)) for group in groups)
            raise ValueError(
                f"points {name!r}: {pattern!r} fits {counts} columns. Give one pattern, or one "
                "for x and one for y that fit as many columns."
            )
        chosen = [column for pair in zip(*groups, strict=True) for column in pair]
    if not chosen or len(chosen) % 2:
        raise ValueError(
            f"points {name!r}: {pattern!r} fits {len(chosen)} of the columns "
            f"{', '.join(columns) or '(none)'}, but points are pairs of columns. Give another "
            "pattern"
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
    if not chosen or math.prod(shape) != len(chosen):
        raise ValueError(
            f"arrays {name!r}: {pattern!r} fits {len(chosen)} of the columns "
            f"{', '.join(columns) or '(none)'}. Give a pattern and a shape of as many columns, "
            "such as 'r*:3x3'."
        )
    return chosen, shape
