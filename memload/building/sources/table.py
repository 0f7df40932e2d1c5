"""A table as a source: a CSV or TSV file with paths of images, labels, numbers, landmarks."""

import csv
import fnmatch
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

import numpy as np

from memload.building.sources.columns import EXACT, MAX_CATEGORIES, ColumnCollector
from memload.building.sources.entries import ArrayEntries
from memload.building.sources.exported import (
    KEY,
    PATH,
    ArrayCells,
    add_array,
    arrays_in_cells,
    is_exported,
)
from memload.building.sources.listed import Files
from memload.building.sources.names import BOX_COLUMNS, are_splits
from memload.building.sources.places import check_places
from memload.building.sources.record import EXTENSIONS
from memload.errors import SourceError
from memload.wording import counted, listed

_INTEGER = re.compile(r"[+-]?[0-9]+")
_DECIMAL_COMMA = re.compile(r"[+-]?[0-9]*(,[0-9]+)?([eE][+-]?[0-9]+)?")

#: What the columns of a point and of a box are.
_PARTS = {"points": ("x", "y"), "boxes": ("x1", "y1", "x2", "y2")}

#: What may stand between the cells of a line.
DELIMITERS = ",;\t"


class Manifest(Files):
    """A table (CSV or TSV in UTF-8, with a line of column names) that lists images, their labels,
    and numbers.

    The cells of a line are separated by commas, semicolons or tabs, whichever the first line has
    most of. Spaces around a cell are ignored. Numbers have a decimal point, so ``1.000`` is 1. If
    semicolons or tabs separate the cells, a column whose cells are all like ``0,50`` is read with
    decimal commas, which ``notes`` reports.

    ``path_column`` has the paths of the images, relative to ``root``, which by default is the
    folder of the table. By default it is ``file_name``, else the first column whose first cell is
    an image, else the first column. ``notes`` reports it if it is not the first. ``extension``,
    such as ``".jpg"``, is added to paths without the extension of an image. ``where``, such as
    ``{"split": "train"}``, keeps only the lines with these texts.

    ``label_column`` holds either names of classes, which are sorted and counted, or integers, which
    are kept. By default it is ``label``, else the only other column of text with fewer than 10,000
    different texts, else ``class``, which ``notes`` reports. A column of splits, such as ``train``
    and ``val``, is never taken. Every other column of numbers becomes
    a column of the data set under its own name: int64 if all its cells are integers, otherwise
    float64 with NaN for empty cells. Columns of text with few values become categories (see
    `memload.building.sources.columns`). Others are skipped, which ``notes`` reports.

    ``points`` and ``arrays`` combine columns into one float32 array for each image. They are chosen
    by patterns, as file names are:

    - ``points={"landmarks": "part_*"}`` takes the matching columns in the file's order as x, y, x,
      y, …;
    - ``points={"landmarks": "x*,y*"}`` pairs the first column like ``x*`` with the first like
      ``y*``, and so on;
    - ``points={"landmarks": 2}`` takes all columns of numbers that no pattern takes as x, y, x, y,
      …;
    - ``boxes={"boxes": "x1_*,y1_*,x2_*,y2_*"}`` takes the columns like each pattern, or
      ``boxes={"boxes": "box_*"}`` those in the file's order as x1, y1, x2, y2, x1, …;
    - ``arrays={"pose": "r*:3x3"}`` gives the array a shape; without one it is flat.

    ``masks=["mask"]`` and ``arrays=["depth"]`` are columns with the paths of masks and other
    arrays, also relative to ``root``. A mapping gives them other names. An empty cell means that
    the image has none. In a mapping ``arrays``, a column of text has paths, and other texts are
    patterns.

    A table that `memload.export` has written has the columns ``file_name`` and ``key``. The latter
    are the names of the samples. Its arrays, points and boxes need no patterns.

    Points are in pixels of the image as it is stored, and (0, 0) is the center of its top left
    pixel. They become an array ``(k, 2)`` and stay on the same spot of the image when it is turned,
    resized and cropped. So do boxes ``(k, 4)``, which are in pixels of the edges, and (0, 0) is the
    top left corner. Empty cells are NaN, and so no box.

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
        boxes: Mapping[str, str] | None = None,
        masks: Sequence[str] | Mapping[str, str] = (),
        arrays: Sequence[str] | Mapping[str, str] | None = None,
        path_column: str | None = None,
        label_column: str | None = None,
        extension: str = "",
        where: Mapping[str, str] | None = None,
    ) -> None:
        self.path = Path(path)
        folder = self.path.parent if root is None else Path(root)
        if not folder.is_dir():
            raise SourceError(
                f"The folder of the images, {folder}, does not exist. Check --root.", path=folder
            )
        names, columns = list_images(
            self.path,
            points=points,
            boxes=boxes,
            masks=masks,
            arrays=arrays,
            path_column=path_column,
            label_column=label_column,
            extension=extension,
            where=where,
        )
        if "://" in names[0]:
            raise SourceError(
                f"{path} lists URLs, such as {names[0]:.200}. Write what follows their common "
                "beginning into the table, and that URL as --root.",
                path=path,
            )
        check_places(self.path, folder, names)
        _check_files(self.path, folder, columns.files)
        super().__init__(folder, names, columns)
        #: the names and the kinds of the records' arrays
        self.arrays = {name: "mask" if name in masks else "array" for name in columns.files}
        if self.arrays:
            self.identity = f"arrays {self.arrays!r} in {masks!r} and {arrays!r}"


def list_images(
    path: Path,
    *,
    points: Mapping[str, str | int] | None = None,
    boxes: Mapping[str, str] | None = None,
    masks: Sequence[str] | Mapping[str, str] = (),
    arrays: Sequence[str] | Mapping[str, str] | None = None,
    path_column: str | None = None,
    label_column: str | None = None,
    extension: str = "",
    where: Mapping[str, str] | None = None,
) -> tuple[list[str], ColumnCollector]:
    """Return the paths in a table and its other columns. `Manifest` explains the arguments."""
    table = _read_table(path, where or {})
    notes: list[str] = []
    files, patterns = _take_files(table, masks, arrays or {})
    paths = _take_column(table, path_column or _find_paths(table, extension, notes))
    keys = _take_column(table, KEY) if table.is_exported else None
    _read_decimal_commas(table, notes)
    label = label_column or _find_label(table, notes)
    columns = _columns(table, label, points or {}, boxes or {}, patterns)
    columns.keys, columns.files = keys, files
    columns.notes[:0] = notes
    columns.notes += _notes_on_boxes(columns.values)
    ending = f".{extension.lstrip('.')}" if extension else ""
    return [_with_extension(name, ending) for name in paths], columns


def _notes_on_boxes(names: Iterable[str]) -> Iterator[str]:
    """Yield a note on columns of numbers that are stored as they are, but are called as boxes."""
    name_of = {name.lower(): name for name in names}
    for corners in BOX_COLUMNS:
        if name_of.keys() >= set(corners):
            columns = ",".join(name_of[corner] for corner in corners)
            yield (
                f"{columns} are stored as they are; --boxes 'boxes={columns}' lets them move with "
                "their images, as boxes"
            )


class NamedLines:
    """The lines of a table about the samples of a data set, by their names.

    ``key_column`` has the names. By default it is ``key`` of a table that ``memload export`` has
    written, or else the column that `Manifest` takes for the paths. Raises SourceError.
    """

    def __init__(self, path: Path, key_column: str | None = None) -> None:
        self._table = _read_table(path, {})
        #: what the user should know
        self.notes: list[str] = []
        is_exported = self._table.is_exported
        column = key_column or (KEY if is_exported else _find_paths(self._table, "", self.notes))
        self.names: Sequence[str] = _take_column(self._table, column)
        for other in (KEY, PATH) if is_exported else ():
            self._table.cells.pop(other, None)

    def columns(
        self,
        lines: np.ndarray,
        known_texts: Mapping[str, Collection[str]],
        label_column: str | None = None,
    ) -> ColumnCollector:
        """Return the columns, with the values of these lines, int64 ``(n,)``.

        Only ``label`` or ``label_column`` are labels. ``known_texts`` are the texts of columns that
        the data set has, such as its classes. A column in which one of them occurs is text. Columns
        of text with up to 10,000 values are categories.
        """
        table, positions = self._table, lines.tolist()
        table.lines = [table.lines[line] for line in positions]
        for name, cells in table.cells.items():
            table.cells[name] = [cells[line] for line in positions]
        table.known_texts = known_texts
        _read_decimal_commas(table, self.notes)
        label = label_column or ("label" if "label" in table.cells else None)
        columns = _columns(table, label, {}, {}, {})
        self.notes += columns.notes
        return columns


def _take_files(
    table: "_Table",
    masks: Sequence[str] | Mapping[str, str],
    arrays: Sequence[str] | Mapping[str, str],
) -> tuple[dict[str, Sequence[str]], dict[str, str]]:
    """Return the paths of masks and arrays by name, and the arrays that are patterns."""
    patterns: dict[str, str] = {}
    if isinstance(arrays, Mapping):
        patterns = {
            name: pattern
            for name, pattern in arrays.items()
            if pattern not in table.cells or _numbers(table.cells[pattern]) is not None
        }
        arrays = {name: column for name, column in arrays.items() if name not in patterns}
    entries = ArrayEntries(masks, arrays).entry_of
    return {name: _take_column(table, column) for name, column in entries.items()}, patterns


def _check_files(table: Path, root: Path, files: Mapping[str, Sequence[str]]) -> None:
    """Raise SourceError if the first masks or arrays are all missing."""
    for name, paths in files.items():
        first = [path for path in paths if path][:3]
        if not any((root / path).exists() for path in first):
            found = f"there is no {root / first[0]}" if first else "all its cells are empty"
            raise SourceError(
                f"{table}: none of the first files for {name!r} exists: {found}. Paths are "
                f"relative to {root}, or to --root.",
                path=table,
            )


class _Table:
    """The cells of the columns by name, and the number of each row's line."""

    def __init__(self, path: Path) -> None:
        self.path, self.delimiter = path, ","
        self.cells: dict[str, list[str]] = {}
        self.lines: list[int] = []
        #: whether ``memload export`` has written it
        self.is_exported = False
        #: the texts of columns that a data set has already, if the table is about one
        self.known_texts: Mapping[str, Collection[str]] | None = None

    def first_text(self, name: str) -> tuple[int, str]:
        """Return line and text of the first cell because of which a column is not numbers."""
        cells = list(zip(self.lines, self.cells[name], strict=True))
        return next(((line, cell) for line, cell in cells if _numbers([cell]) is None), cells[0])

    def are_texts(self, column: str, cells: Sequence[str]) -> bool:
        """Return whether a cell is a known text of a column, even if all could be numbers."""
        return not {*(self.known_texts or {}).get(column, ())}.isdisjoint(cells)

    def keeps_text(self, column: str) -> bool:
        """Return whether a column of text is a category even if it has many values."""
        if self.is_exported or self.known_texts is None:
            return self.is_exported
        return column in self.known_texts or len(set(self.cells[column])) <= MAX_CATEGORIES

    def error(self, problem: str, line: int | None = None) -> SourceError:
        place = f"{self.path}" if line is None else f"{self.path}, line {line}"
        return SourceError(f"{place}: {problem}", path=self.path)


# ----------------------------------------------------------------------------------------- reading


def _read_table(path: Path, where: Mapping[str, str]) -> _Table:
    """Read the lines that ``where`` keeps. Raises SourceError."""
    table = _Table(path)
    rows: list[list[str]] = []
    try:
        # Pipes are read, such as <(…) in a shell. Devices such as /dev/zero have no end.
        if path.is_dir() or path.is_block_device() or path.is_char_device():
            raise table.error("it is a folder or a device, not a CSV file. Check the path.")
        with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
            first = file.readline()
            table.delimiter = max(DELIMITERS, key=lambda mark: len(_split(first, mark)))
            header = _checked_header(_split(first, table.delimiter), table)
            table.is_exported = is_exported(header)
            kept = [
                (header.index(_checked_name(table, header, name)), str(text))
                for name, text in where.items()
            ]
            for line, cells in _read_lines(file, table, len(header)):
                if all(cells[column] == text for column, text in kept):
                    rows.append(cells)
                    table.lines.append(line)
    except OSError as error:
        raise table.error(f"it cannot be read: {error.strerror or error}") from error
    if not rows:
        chosen = " and ".join(f"{name}={text}" for name, text in where.items())
        if chosen:
            raise table.error(f"it lists no images with {chosen}")
        raise table.error(
            "it lists no images. Give a table whose first line names its columns, such as "
            "'path,label', with a line for each image."
        )
    table.cells = {
        name: list(column) for name, column in zip(header, zip(*rows, strict=True), strict=True)
    }
    return table


def _read_lines(file: TextIO, table: _Table, columns: int) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the cells of each line below the first that is not blank."""
    reader = csv.reader(file, strict=True, skipinitialspace=True, delimiter=table.delimiter)
    line = 1
    try:
        for row in reader:
            line = reader.line_num + 1
            if not any(row) and len(row) <= 1:
                continue
            if len(row) != columns:
                count = counted(len(row), "column")
                raise table.error(
                    f"it has {count}, but the first line has {columns}. Correct it.", line
                )
            if table.is_exported:
                yield line, row
            else:
                _check_text(row, table, line)
                yield line, [cell.strip() for cell in row]
    except csv.Error as error:
        raise table.error(f"this is not CSV: {error}. Correct it.", line + 1) from error


def _split(line: str, delimiter: str) -> list[str]:
    return next(csv.reader([line], delimiter=delimiter, skipinitialspace=True), [])


def _checked_header(cells: Sequence[str], table: _Table) -> list[str]:
    header = [name.strip() for name in cells]
    if any("\0" in name or "\udcff" in name for name in header):
        raise table.error("it is not a table in UTF-8, but perhaps in UTF-16. Save it as UTF-8.")
    image = next((name for name in header if name.lower().endswith(EXTENSIONS)), None)
    if image is not None and not is_exported(header):
        raise table.error(
            f"the column names are missing: the first line has an image ({image}). Put a "
            "line such as 'path,label' above it.",
            1,
        )
    _check_text(header, table, 1)
    if "" in header:
        raise table.error(
            "a column has no name. Name it, or leave out its column; with pandas: "
            "to_csv(index=False).",
            1,
        )
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise table.error(f"two columns have the same name: {', '.join(twice)}. Rename one.", 1)
    return header


def _check_text(cells: Sequence[str], table: _Table, line: int) -> None:
    """Raise SourceError if a cell has bytes that are not UTF-8."""
    if "".join(cells).isascii():
        return
    for cell in cells:
        content = cell.strip().encode(errors="surrogateescape")
        try:
            content.decode()
        except UnicodeDecodeError:
            raise table.error(
                f"{str(content)[1:61]} is not in UTF-8, but perhaps in Latin-1, where it is "
                f"{content.decode('latin-1')!r:.60}. Save the table as UTF-8.",
                line,
            ) from None


def _checked_name(table: _Table, names: Sequence[str], name: str) -> str:
    if name not in names:
        raise table.error(
            f"there is no column {name!r}, only {', '.join(names)}. Name one of them."
        )
    return name


def _find_paths(table: _Table, extension: str, notes: list[str]) -> str:
    """Return the column of the paths, if none was named: ``file_name``, as in tables of Hugging
    Face, else the first whose first cell is an image, else the first.
    """
    names = list(table.cells)
    if PATH in names:
        return PATH
    images = [name for name in names if table.cells[name][0].lower().endswith(EXTENSIONS)]
    if extension or not images or names[0] in images:
        return names[0]
    notes.append(f"the paths are taken from column {images[0]!r}")
    return images[0]


def _take_column(table: _Table, name: str) -> list[str]:
    """Take a column out of a table."""
    return table.cells.pop(_checked_name(table, list(table.cells), name))


def _with_extension(path: str, extension: str) -> str:
    return path if path.lower().endswith(EXTENSIONS) else path + extension


# ----------------------------------------------------------------------------------------- columns


def _read_decimal_commas(table: _Table, notes: list[str]) -> None:
    """Write numbers such as ``0,50`` with a point, where commas do not separate the cells.

    A column is taken for such numbers if all of its cells have the form.
    """
    if table.delimiter == ",":
        return
    changed = []
    for name, cells in table.cells.items():
        example = next((cell for cell in cells if "," in cell), None)
        if example is not None and all(map(_DECIMAL_COMMA.fullmatch, cells)):
            table.cells[name] = [cell.replace(",", ".") for cell in cells]
            changed.append(f"{name} ({example} is {float(example.replace(',', '.'))})")
    if changed:
        notes.append(f"commas are read as decimal points: {listed(changed, 3)}")


def _columns(
    table: _Table,
    label: str | None,
    points: Mapping[str, str | int],
    boxes: Mapping[str, str],
    arrays: Mapping[str, str],
) -> ColumnCollector:
    """Return all columns but that of the paths."""
    columns = ColumnCollector()
    if label is not None:
        _add_labels(columns, _take_column(table, label), table)
    others = list(table.cells)
    arrays_of = {name: _choose_array(name, pattern, others) for name, pattern in arrays.items()}
    used = {column for chosen, _ in arrays_of.values() for column in chosen}
    for (kind, name), chosen in _choose_all_groups(table, points, boxes, used).items():
        values = _stack(chosen, table)
        values = values.reshape(len(values), -1, len(_PARTS[kind]))
        _check_order(kind, name, values, table)
        columns.add(name, values, points=kind == "points", boxes=kind == "boxes")
    for name, (chosen, shape) in arrays_of.items():
        values = _stack(chosen, table)
        columns.add(name, values.reshape(len(values), *shape))
    arrays_at = _exported_arrays([name for name in others if name not in used], table)
    for name in others:
        if name in arrays_at:
            whole, cells = arrays_at[name]
            add_array(columns, whole, cells, [_numbers(table.cells[cell]) for cell in cells.names])
            used.update(cells.names)
        if name in used:
            continue
        if name in points or name in boxes or name in arrays:
            raise table.error(f"two columns would be named {name!r}. Rename one.")
        _add_column(columns, name, table)
    return columns.finish()


def _exported_arrays(names: Sequence[str], table: _Table) -> dict[str, tuple[str, ArrayCells]]:
    """Return the arrays of an exported table by the name of their first cell."""
    return {
        cells.names[0]: (name, cells)
        for name, cells in (arrays_in_cells(names) if table.is_exported else {}).items()
        if name not in names
        and all(_numbers(table.cells[cell]) is not None for cell in cells.names)
    }


def _find_label(table: _Table, notes: list[str]) -> str | None:
    """Return the column of the labels, if none was named."""
    if "label" in table.cells:
        return "label"
    if table.is_exported:
        return None
    texts = [
        name
        for name, cells in table.cells.items()
        if len(set(cells)) < MAX_CATEGORIES
        and all(_numbers([cell]) is None for cell in cells)
        and not are_splits(cells)
    ]
    name = texts[0] if len(texts) == 1 else "class"
    if name in table.cells:
        notes.append(f"the labels are taken from column {name!r}")
        return name
    notes.append("no labels: name their column with --label-column")
    return None


def _add_labels(columns: ColumnCollector, cells: list[str], table: _Table) -> None:
    empty = [line for line, cell in zip(table.lines, cells, strict=True) if not cell]
    if empty:
        missing = counted(len(empty), "label is", "labels are")
        raise table.error(
            f"{missing} missing, the first one here. Fill them in, or remove these lines.",
            empty[0],
        )
    numbers = None if table.are_texts("label", cells) else _numbers(cells)
    columns.add_labels(cells if numbers is None else numbers)
    if columns.schema["label"].dtype == "<i8" and numbers is not None and not table.is_exported:
        columns.label_texts = dict(zip(numbers.tolist(), cells, strict=True))


def _add_column(columns: ColumnCollector, name: str, table: _Table) -> None:
    """Add a column of numbers or of text with few values."""
    cells = table.cells[name]
    values = _numbers(cells)
    if name in columns.values:
        columns.skip(name, "its name is taken")
        return
    if table.are_texts(name, cells):
        columns.add_text(name, cells, always=True)
        return
    if values is not None and values.dtype.kind == "f" and (np.abs(values) >= EXACT).any():
        large = (cell for cell in cells if _INTEGER.fullmatch(cell) and abs(int(cell)) > EXACT)
        if (example := next(large, None)) is not None:
            columns.skip(name, f"{example:.20} would lose digits beside empty cells or fractions")
            return
    if values is not None:
        columns.add(name, values)
        return
    line, cell = table.first_text(name)
    example = f"{cell!r:.20} in line {line}"
    numeric = sum(_numbers([cell]) is not None for cell in cells)
    if numeric > len(cells) // 2:  # a few cells are wrong
        columns.skip(name, f"{example} is not a number")
    else:
        columns.add_text(name, cells, example, always=table.keeps_text(name))


def _stack(names: Sequence[str], table: _Table) -> np.ndarray:
    """Return some columns of numbers as one float32 array ``(images, columns)``."""
    columns = []
    for name in names:
        values = _numbers(table.cells[name])
        if values is None:
            line, cell = table.first_text(name)
            raise table.error(
                f"{cell!r:.60} in column {name!r} is not a number. Correct it, or leave the "
                "column out.",
                line,
            )
        columns.append(values.astype(np.float32))
    return np.stack(columns, axis=1)


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


def _are_mostly_numbers(cells: Sequence[str]) -> bool:
    """Return whether at least half of the cells are numbers: the others may be mistakes."""
    if _numbers(cells) is not None:
        return True
    texts = [cell for cell in cells if cell]
    return 2 * sum(_numbers([cell]) is not None for cell in texts) >= len(texts)


def _choose_all_groups(
    table: _Table, points: Mapping[str, str | int], boxes: Mapping[str, str], used: set[str]
) -> dict[tuple[str, str], list[str]]:
    """Return the columns of points and boxes by kind and name, and add them to ``used``."""
    patterns = {("points", name): pattern for name, pattern in points.items()}
    patterns |= {("boxes", name): pattern for name, pattern in boxes.items()}
    if not patterns:
        return {}
    numeric = [name for name, cells in table.cells.items() if _are_mostly_numbers(cells)]
    chosen: dict[tuple[str, str], list[str]] = {}
    # A number takes what the patterns leave, so it comes last.
    for (kind, name), pattern in sorted(patterns.items(), key=lambda item: _is_rest(*item)):
        is_rest = _is_rest((kind, name), pattern)
        columns = [column for column in numeric if not (is_rest and column in used)]
        chosen[kind, name] = _choose_groups(kind, name, pattern, columns)
        used.update(chosen[kind, name])
    return {group: chosen[group] for group in patterns}


def _is_rest(group: tuple[str, str], pattern: str | int) -> bool:
    """Return whether a pattern is the number of coordinates, which stands for all other columns."""
    return str(pattern) == str(len(_PARTS[group[0]]))


def _choose_groups(kind: str, name: str, pattern: str | int, columns: Sequence[str]) -> list[str]:
    """Return the columns x, y, x, y, … of points, or x1, y1, x2, y2, … of boxes."""
    parts = _PARTS[kind]
    if _is_rest((kind, name), pattern):
        chosen = list(columns)
    else:
        groups = [fnmatch.filter(columns, part.strip()) for part in str(pattern).split(",")]
        if len(groups) not in (1, len(parts)) or len({len(group) for group in groups}) > 1:
            counts = " and ".join(str(len(group)) for group in groups)
            raise ValueError(
                f"{kind} {name!r}: {pattern!r} fits {counts} columns. Give one pattern, or one for "
                f"each of {', '.join(parts)}, which fit as many columns."
            )
        chosen = [column for group in zip(*groups, strict=True) for column in group]
    if not chosen or len(chosen) % len(parts):
        what = "pairs of columns" if len(parts) == 2 else "groups of four columns"
        raise ValueError(
            f"{kind} {name!r}: {pattern!r} fits {len(chosen)} of the columns "
            f"{', '.join(columns) or '(none)'}, but {kind} are {what}. Give another pattern."
        )
    return chosen


def _check_order(kind: str, name: str, values: np.ndarray, table: _Table) -> None:
    """Raise SourceError if a box ends before it begins."""
    if kind != "boxes":
        return
    is_wrong = (values[:, :, :2] > values[:, :, 2:]).any(axis=2)
    if is_wrong.any():
        row, number = np.argwhere(is_wrong)[0].tolist()
        raise table.error(
            f"the box {values[row, number].tolist()} of {name!r} is not x1, y1, x2, y2: it ends "
            "before it begins. If it is x, y, width, height, convert it.",
            table.lines[row],
        )


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
