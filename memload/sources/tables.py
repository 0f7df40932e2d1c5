"""CSV, TSV and JSON lines: columns of values, one of which names the files of images."""

import csv
import io
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from memload.errors import SourceError
from memload.sources.boxes import Table
from memload.sources.columns import EXACT, columns_of
from memload.sources.contents import EXTENSIONS, Contents, Files
from memload.sources.reading import Kind, Reading
from memload.sources.remote import files_below, is_url, read_url
from memload.sources.samples import Source
from memload.storage.keys import Keys
from memload.storage.where import matching
from memload.wording import listed

#: The name of a column in a template.
FIELD = re.compile(r"\{([^{}]*)\}")
#: What may stand between the cells of a line.
DELIMITERS = ",;\t"
#: The column of paths that Hugging Face's ImageFolder reads.
PATH = "file_name"
#: The column of names that only ``memload export`` writes. It tells that a table is an export.
EXPORTED_KEY = "memload_key"


def open_table(path: str | Path, reading: Reading) -> Source:
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
    table = read_table(path)
    root: str | Path | None = reading.root
    if root is None:
        root = str(path).rpartition("/")[0] if is_url(path) else Path(path).parent
    reading = replace(reading, image=reading.image or image_column(table, notes))
    names = file_names(table, str(reading.image), path)
    if again := len(names) - len({*names}):
        notes.append(f"each line is a sample of its own, also {again:,} whose image came before")
    keys = Keys.of(names)
    images = files_below(root, keys)
    if isinstance(images, Files):
        _check_images(path, images)
    source = table_source(
        Source(keys=keys, images=images),
        table,
        lambda text, _: files_below(root, Keys.of(file_names(table, text, path))),
        reading,
        path,
        are_cells=not is_json(path),
    )
    return source.with_note(*notes)


def table_source(
    source: Source,
    table: Table,
    contents: Callable[[str, Kind], Contents],
    reading: Reading,
    place: object,
    *,
    class_names: Mapping[str, Sequence[str]] | None = None,
    skipped: Mapping[str, str] | None = None,
    are_cells: bool = False,
) -> Source:
    """Return a source with the columns of a table, and with masks and other arrays.

    An export has the names of the samples in a column. They are the keys, unless two samples have
    the same name.

    Args:
        source: Names and images of all rows.
        table: The values of the columns.
        contents: Returns a mask or another array of all rows, by its column or template, and kind.
        reading: How the table is read.
        place: What it is called in messages.
        class_names: The texts that columns of numbers count into.
        skipped: Columns that could not be read, and why.
        are_cells: Whether the values are texts of CSV, some of which mean numbers.

    Raises SourceError.
    """
    names = [*table.get(EXPORTED_KEY, [None])]
    is_exported = all(type(name) is str for name in names)
    if is_exported and len({*names}) == len(names):
        source = source.changed(keys=Keys.of(names))
    texts = [reading.image, *(text for _, text in reading.entries.values())]
    texts += [EXPORTED_KEY] * is_exported
    for name, (kind, text) in reading.entries.items():
        source = source.with_extra(name, kind, contents(text, kind))
    try:
        if reading.where:
            rows = matching(len(source), table, class_names or {}, reading.where)
            if not len(rows):
                chosen = " and ".join(f"{name}={value}" for name, value in reading.where.items())
                raise ValueError(f"there are no images with {chosen}. Check these values.")
            source = source.take(rows)
            table = {name: _taken(values, rows) for name, values in table.items()}
        columns = columns_of(
            {
                name: numbers_or_texts(values) if are_cells else values
                for name, values in table.items()
                if name not in texts
            },
            reading,
            class_names=class_names,
            skipped=skipped,
            is_exported=is_exported,
        )
    except (SourceError, ValueError) as error:
        raise SourceError(f"{place}: {error}") from None
    return source.changed(**vars(columns))


def _taken(values: Any, rows: np.ndarray) -> Any:
    return values[rows] if isinstance(values, np.ndarray) else [values[n] for n in rows.tolist()]


def file_names(table: Table, text: str, place: object) -> list[str]:
    """Return the names in a column, or those that a template makes of columns; "" if missing.

    >>> file_names({"id": ["0a", "1b"]}, "masks/{id}.png", "masks.csv")
    ['masks/0a.png', 'masks/1b.png']
    """
    columns = FIELD.findall(text) or [text]
    if unknown := [name for name in columns if name not in table]:
        raise SourceError(
            f"{place}: there is no column {unknown[0]!r:.80}, only {listed(table)}. Name one of "
            "them, or give a template such as 'images/{id}.jpg'."
        )
    values = [["" if each is None else str(each) for each in table[name]] for name in columns]
    if columns == [text]:
        return values[0]
    template = FIELD.sub("{}", text)
    return [template.format(*row) if all(row) else "" for row in zip(*values, strict=True)]


def image_column(table: Table, notes: list[str]) -> str:
    """Return the column with the paths of the images, if none was named."""
    if PATH in table:
        return PATH
    names = list(table)
    found = [name for name in names if str(table[name][0]).lower().endswith(EXTENSIONS)]
    if found and found[0] != names[0]:
        notes.append(f"the paths are taken from column {found[0]!r}")
    return found[0] if found else names[0]


def _check_images(path: str | Path, images: Files) -> None:
    """Raise SourceError if the first images are not where the table says."""
    first = [images.root / name for name in images.names[:3]]
    if not any(map(os.path.lexists, first)):
        raise SourceError(
            f"{path}: the first images are missing, such as {first[0]}. Say where they are: with "
            "--root, which may be a URL, with the column of their paths (--image COLUMN), or with "
            "a template such as --image 'images/{id}.jpg'.",
            path=path,
        )


# ----------------------------------------------------------------------------------------- reading


def read_table(path: str | Path) -> dict[str, Sequence[Any]]:
    """Return the columns of a table. Raises SourceError.

    The cells of CSV are texts. `numbers_or_texts` makes numbers of them.

    >>> read_table("pets.csv")  # doctest: +SKIP
    {'path': ['1.jpg', '2.jpg'], 'split': ['train', 'train'], 'age': ['3', '5']}
    """
    try:
        with _opened(path) as file:
            table = table_of(_read_json(file)) if is_json(path) else _read_cells(file)
        if not table:
            raise ValueError("it lists no images, below a line with the names of columns")
    except UnicodeDecodeError as error:
        raise SourceError(f"{path} is not in UTF-8: {error}. Save it as UTF-8.") from error
    except (OSError, ValueError, csv.Error, RecursionError) as error:
        raise SourceError(f"{path} cannot be read: {error}.", path=str(path)) from error
    return table


def is_json(path: object) -> bool:
    """Return whether a table is JSON lines."""
    return str(path).lower().endswith((".jsonl", ".ndjson"))


def _opened(path: str | Path) -> io.TextIOBase:
    if is_url(path):
        return io.StringIO(read_url(str(path)).decode("utf-8-sig"), newline="")
    return Path(path).open(newline="", encoding="utf-8-sig")


def _read_json(file: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects of JSON lines, such as Hugging Face's ``metadata.jsonl``."""
    for number, line in enumerate(file, 1):
        try:
            entries = json.loads(line) if line.strip() else None
        except ValueError as error:
            raise ValueError(f"line {number} is no JSON: {error}") from None
        if isinstance(entries, dict):
            yield entries
        elif line.strip():
            raise ValueError(f'line {number} is no object, such as {{"file_name": "1.jpg"}}')


def table_of(objects: Iterable[Mapping[str, Any]]) -> dict[str, Sequence[Any]]:
    """Return the values of objects by their names. None means missing.

    >>> table_of([{"a": 1}, {"a": 2, "b": "x"}])
    {'a': [1, 2], 'b': [None, 'x']}
    """
    table: dict[str, list[Any]] = {}
    row = -1
    for row, entries in enumerate(objects):  # not a list of all: it takes 0.4 KB per object
        for name, value in entries.items():
            values = table.setdefault(name, [])
            values += [None] * (row - len(values))
            values.append(value)
    return {name: values + [None] * (row + 1 - len(values)) for name, values in table.items()}


def _read_cells(file: io.TextIOBase) -> dict[str, Sequence[Any]]:
    """Read CSV, with a line of column names. One without a name is left out, as pandas' index."""
    first = file.readline()
    reader = csv.reader(
        itertools.chain([first], file),
        strict=True,
        skipinitialspace=True,
        delimiter=max(DELIMITERS, key=first.count),
    )
    header = [name.strip() for name in next(reader, [])]
    _check_header(header)
    rows: list[list[str]] = []
    for row in reader:
        if len(row) != len(header):
            if not any(row):  # a blank line
                continue
            raise ValueError(
                f"line {reader.line_num} has {len(row)} cells, and the first line {len(header)}"
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


def numbers_or_texts(cells: Any) -> Any:
    """Return the cells of a column as numbers, or else as texts. An empty cell is NaN.

    >>> numbers_or_texts(["3", "", "5.5"]), numbers_or_texts(["3", "cat"])
    (array([3. , nan, 5.5]), ['3', 'cat'])
    """
    text = "".join(cells)
    if "_" in text or not text.isascii():  # Python would take 1_000 for a number
        return cells
    try:
        return np.array([*map(int, cells)], np.int64)
    except OverflowError:
        return cells
    except ValueError:
        pass
    try:
        numbers = np.array([float(cell or "nan") for cell in cells])
    except ValueError:
        return cells
    if not (np.abs(numbers) >= EXACT).any():
        return numbers
    # These may lose digits as floats, which `Columns.add_values` finds out.
    return [int(cell) if cell.lstrip("+-").isdigit() else float(cell or "nan") for cell in cells]
