"""CSV, TSV and JSON lines: columns of values, one of which names the files of images."""

import csv
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from memload.errors import SourceError
from memload.sources.boxes import Table
from memload.sources.columns import EXACT, LABEL_NAMES, columns_of
from memload.sources.contents import EXTENSIONS, Contents, Files
from memload.sources.remote import Urls, is_url, read_url
from memload.sources.samples import Reading, Samples
from memload.storage.keys import Keys
from memload.storage.where import matching
from memload.wording import listed

#: What may stand between the cells of a line.
DELIMITERS = ",;\t"
#: The column of paths that Hugging Face's ImageFolder reads.
PATH = "file_name"
#: The column of names that only ``memload export`` writes. It tells that a table is an export.
EXPORTED_KEY = "memload_key"
_INTEGER = re.compile(r"[+-]?[0-9]+")


def open_table(path: str | Path, reading: Reading) -> Samples:
    """Open a table that lists images: CSV, TSV or JSON lines, in UTF-8.

    The images are in the column that is named, else in ``file_name``, else in the first whose first
    cell is an image, else in the first. A template such as ``train_images/{image_id}.jpg`` names
    them, too. Of CSV, the first line names the columns, and commas, semicolons or tabs separate
    cells.

    Raises SourceError.

    >>> open_table("faces.csv", Reading(points={"marks": "x*,y*"})).schema  # doctest: +SKIP
    {'marks': Column(dtype='<f4', shape=(5, 2), points=True, boxes=False)}
    """
    notes: list[str] = []
    table = read_table(path, reading.where, notes)
    root: str | Path | None = reading.root
    if root is None:
        root = str(path).rpartition("/")[0] if is_url(path) else Path(path).parent
    image = reading.image or image_column(table, notes)

    def files(text: str) -> Files | Urls:
        names = Keys.of(file_names(table, text, path))
        return Urls(str(root).rstrip("/"), names) if is_url(root) else Files(Path(root), names)

    images = files(image)
    _check_images(path, images)
    others = {name: cells for name, cells in table.items() if name != image}
    values, skipped = typed(path, others, reading.label)
    samples = table_samples(
        Samples(images.names, images),
        values,
        files,
        replace(reading, where={}),  # the lines are chosen already
        path,
        skipped=skipped,
    )
    return samples.with_note(*notes)


def table_samples(
    samples: Samples,
    table: Table,
    contents: Callable[[str], Contents],
    reading: Reading,
    place: object,
    *,
    class_names: Mapping[str, Sequence[str]] | None = None,
    skipped: Mapping[str, str] | None = None,
) -> Samples:
    """Return samples with the columns of a table, and with masks and other arrays.

    An export has the names of the samples in a column. They count unless two are the same.

    Args:
        samples: Names and images of all rows.
        table: The values of the other columns.
        contents: Returns a mask or another array of all rows, by its column or template.
        reading: How the table is read.
        place: What it is called in messages.
        class_names: The texts that columns of numbers count into.
        skipped: Columns that could not be read, and why.
    """
    names = [*table.get(EXPORTED_KEY, [None])]
    is_exported = all(type(name) is str for name in names)
    if is_exported and len({*names}) == len(names):
        samples = samples.changed(keys=Keys.of(names))
    for name, (kind, text) in reading.entries.items():
        samples = samples.with_extra(name, kind, contents(text))
    left_out = {*(text for _, text in reading.entries.values()), *[EXPORTED_KEY] * is_exported}
    try:
        if reading.where:
            table, rows = selected(table, reading.where, class_names)
            samples = samples.take(rows)
        columns = columns_of(
            {name: table[name] for name in table if name not in left_out},
            label=reading.label,
            class_names=class_names,
            points=reading.points,
            boxes=reading.boxes,
            skipped=skipped,
            is_exported=is_exported,
        )
    except SourceError as error:
        raise SourceError(f"{place}: {error}") from None
    return samples.changed(columns=columns)


def selected(
    table: Table, where: Mapping[str, Any], texts: Mapping[str, Sequence[str]] | None = None
) -> tuple[dict[str, Any], np.ndarray]:
    """Return the columns of a table, and the rows, int64, that have these values.

    ``texts`` are those that columns of numbers count into. Raises SourceError for a column or a
    value that there is not, and if no row is left.

    >>> selected({"id": [1, 2, 3], "split": ["a", "b", "b"]}, {"split": "b"})
    ({'id': [2, 3], 'split': ['b', 'b']}, array([1, 2]))
    """
    try:
        rows = matching(len(next(iter(table.values()), ())), table, texts or {}, where)
    except ValueError as error:
        raise SourceError(str(error)) from None
    if not len(rows):
        chosen = " and ".join(f"{name}={wanted}" for name, wanted in where.items())
        raise SourceError(f"there are no images with {chosen}. Check these values.")
    return {name: _taken(values, rows) for name, values in table.items()}, rows


def _taken(values: Any, rows: np.ndarray) -> Any:
    return values[rows] if isinstance(values, np.ndarray) else [values[row] for row in rows]


def file_names(table: Table, text: str, place: object) -> list[str]:
    """Return the names in a column, or those that a template makes of columns; "" if missing.

    >>> file_names({"id": ["0a", "1b"]}, "masks/{id}.png", "masks.csv")
    ['masks/0a.png', 'masks/1b.png']
    """
    literals = re.split(r"\{([^{}]*)\}", text)
    columns = literals[1::2] or [text]
    if unknown := [name for name in columns if name not in table]:
        raise SourceError(
            f"{place}: there is no column {unknown[0]!r:.80}, only {listed(table)}. Name one of "
            "them, or give a template such as 'images/{id}.jpg'."
        )
    values = [[_text(value) for value in table[name]] for name in columns]
    if len(literals) == 1:
        return values[0]
    rows = zip(*values, strict=True)
    return [
        "".join(part for pair in zip(literals[::2], (*row, ""), strict=True) for part in pair)
        if all(row)
        else ""
        for row in rows
    ]


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def image_column(table: Table, notes: list[str]) -> str:
    """Return the column with the paths of the images, if none was named."""
    if PATH in table:
        return PATH
    names = list(table)
    found = [name for name in names if str(table[name][0]).lower().endswith(EXTENSIONS)]
    if found and found[0] != names[0]:
        notes.append(f"the paths are taken from column {found[0]!r}")
    return found[0] if found else names[0]


def _check_images(path: str | Path, images: Files | Urls) -> None:
    """Raise SourceError if the first images are not where the table says."""
    if isinstance(images, Files):
        first = [images.root / name for name in images.names[:3]]
        if not any(map(os.path.lexists, first)):
            raise SourceError(
                f"{path}: the first images are missing, such as {first[0]}. Say where they are: "
                "with --root, which may be a URL, with the column of their paths (--image COLUMN), "
                "or with a template such as --image 'images/{id}.jpg'.",
                path=path,
            )


# ----------------------------------------------------------------------------------------- reading


def read_table(
    path: str | Path, where: Mapping[str, Any], notes: list[str]
) -> dict[str, Sequence[Any]]:
    """Return the columns of a table, of the lines that ``where`` keeps. Raises SourceError.

    The cells of CSV are texts. `typed` makes numbers of them.

    >>> read_table("pets.csv", {"split": "train"}, [])  # doctest: +SKIP
    {'path': ['1.jpg', '2.jpg'], 'split': ['train', 'train'], 'age': ['3', '5']}
    """
    table: dict[str, Sequence[Any]]
    try:
        with _opened(path) as file:
            table = {**(_read_json(file) if _is_json(path) else _read_cells(file, notes))}
        if not table:
            raise ValueError("it lists no images, below a line with the names of columns")
        return selected(table, where)[0] if where else table
    except UnicodeDecodeError as error:
        raise SourceError(f"{path} is not in UTF-8: {error}. Save it as UTF-8.") from error
    except (OSError, ValueError, csv.Error, RecursionError) as error:
        raise SourceError(f"{path} cannot be read: {error}.", path=str(path)) from error
    except SourceError as error:
        raise SourceError(f"{path}: {error}") from None


def _is_json(path: object) -> bool:
    return str(path).lower().endswith((".jsonl", ".ndjson"))


def _opened(path: str | Path) -> io.TextIOBase:
    if is_url(path):
        return io.StringIO(read_url(str(path)).decode("utf-8-sig"), newline="")
    return Path(path).open(newline="", encoding="utf-8-sig")


def _read_json(file: Iterator[str]) -> dict[str, list[Any]]:
    """Read JSON lines, such as Hugging Face's ``metadata.jsonl``."""
    table: dict[str, list[Any]] = {}
    rows = 0
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            entries = json.loads(line)
        except ValueError as error:
            raise ValueError(f"line {number} is no JSON: {error}") from None
        if not isinstance(entries, dict):
            raise ValueError(f'line {number} is no object, such as {{"file_name": "1.jpg"}}')
        for name, value in entries.items():
            if name not in table:
                table[name] = [None] * rows
            table[name].append(value)
        rows += 1
        for values in table.values():
            if len(values) < rows:
                values.append(None)
    return table


def _read_cells(file: io.TextIOBase, notes: list[str]) -> dict[str, list[str]]:
    """Read CSV, with a line of column names."""
    first = file.readline()
    delimiter = max(DELIMITERS, key=first.count)
    (header,) = csv.reader([first], delimiter=delimiter, skipinitialspace=True) if first else [[]]
    header = [name.strip() for name in header]
    _check_header(header)
    if "" in header:
        notes.append(
            "left out a column without a name, as pandas writes for the index; "
            "to_csv(index=False) leaves it out"
        )
    reader = csv.reader(file, strict=True, skipinitialspace=True, delimiter=delimiter)
    rows: list[list[str]] = []
    for row in reader:
        if len(row) != len(header):
            if not any(row):  # a blank line
                continue
            raise ValueError(
                f"line {reader.line_num + 1} has {len(row)} cells, and the first line {len(header)}"
            )
        rows.append(row)
    columns = zip(header, zip(*rows, strict=True), strict=True) if rows else ()
    return {name: [cell.strip() for cell in cells] for name, cells in columns if name}


def _check_header(header: Sequence[str]) -> None:
    """Raise ValueError if the first line does not name the columns, or two have one name."""
    if image := next((name for name in header if name.lower().endswith(EXTENSIONS)), None):
        raise ValueError(
            f"the first line has an image ({image}). Put a line such as 'path,label' above it"
        )
    if twice := {name for name in header if name and header.count(name) > 1}:
        raise ValueError(f"two columns are called {min(twice)!r:.80}. Rename one")


def typed(path: object, table: Table, label: str | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the columns of a table with numbers in place of the texts of CSV.

    Also return why others are left out: most of their cells are numbers, and some are not.
    """
    if _is_json(path):
        return dict(table), {}
    values = {name: numbers_or_texts(cells) for name, cells in table.items()}
    skipped: dict[str, str] = {}
    for name, cells in table.items():
        is_text = isinstance(values[name], list) and name not in (label, *LABEL_NAMES)
        if is_text and 2 * sum(map(_is_number, cells[:100])) > len(cells[:100]):
            wrong = (cell for cell in cells if cell and not _is_number(cell))
            if cell := next(wrong, None):
                skipped[name] = f"{cell!r:.40} is not a number"
                del values[name]
    return values, skipped


def _is_number(cell: Any) -> bool:
    try:
        return bool(np.isfinite(float(cell)))
    except (TypeError, ValueError):
        return False


def numbers_or_texts(cells: Any) -> Any:
    """Return the cells of a column as numbers, or else as texts. An empty cell is NaN.

    >>> numbers_or_texts(["3", "", "5.5"]), numbers_or_texts(["3", "cat"])
    (array([3. , nan, 5.5]), ['3', 'cat'])
    """
    cells = list(cells)
    text = "".join(cells)
    if "_" in text or not text.isascii():  # Python would take 1_000 for a number
        return cells
    try:
        return np.array(list(map(int, cells)), np.int64)
    except OverflowError:
        return cells
    except ValueError:
        pass
    try:
        numbers = np.array([float(cell) if cell else np.nan for cell in cells])
    except ValueError:
        return cells
    if (np.abs(numbers) >= EXACT).any():  # these may lose digits, which `Columns` finds out
        return [
            None if not cell else int(cell) if _INTEGER.fullmatch(cell) else float(cell)
            for cell in cells
        ]
    return numbers
