"""CSV, TSV and JSON lines: columns of values, one of which names the files of images."""

import csv
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from memload.wording import listed

#: What may stand between the cells of a line.
DELIMITERS = ",;\t"
#: The columns of a table that ``memload export`` has written: paths, and the names of samples.
PATH, KEY = "file_name", "key"
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
    names = file_names(table, image, path)
    _check_images(path, root, names)
    others = {name: cells for name, cells in table.items() if name != image}
    is_exported = image == PATH and KEY in table
    values, skipped = typed(path, others, reading.label)
    images = _files(root, names)
    samples = table_samples(
        values,
        [*map(str, others[KEY])] if is_exported else images.names,
        images,
        lambda text: _files(root, file_names(table, text, path)),
        reading,
        path,
        skipped=skipped,
        is_exported=is_exported,
    )
    remedy = "Name the column of the classes with --label, and build each part with --where."
    samples.columns.part_remedy = remedy
    return samples.with_note(*notes)


def table_samples(
    values: Table,
    keys: Sequence[str],
    images: Contents,
    open_entry: Callable[[str], Contents],
    reading: Reading,
    place: object,
    **options: Any,
) -> Samples:
    """Return the samples of a table.

    Args:
        values: Its columns, but for that of the images.
        keys: The names of the samples.
        images: Their images.
        open_entry: Returns the contents of a mask or an array, by its column or template.
        reading: How it is read.
        place: What the table is called in messages.
        options: Further arguments of `columns_of`.
    """
    left_out = {*reading.entries.values(), *[KEY] * bool(options.get("is_exported"))}
    try:
        columns = columns_of(
            {name: values[name] for name in values if name not in left_out},
            label=reading.label,
            points=reading.points,
            boxes=reading.boxes,
            **options,
        )
    except SourceError as error:
        raise SourceError(f"{place}: {error}") from None
    samples = Samples(keys if isinstance(keys, Keys) else Keys.of(keys), images, columns)
    for name, text in reading.entries.items():
        samples = samples.with_extra(name, reading.kind_of(name), open_entry(text))
    return samples


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


def _files(root: str | Path, names: Sequence[str]) -> Files | Urls:
    keys = Keys.of(names)
    return Urls(str(root).rstrip("/"), keys) if is_url(root) else Files(Path(root), keys)


def image_column(table: Table, notes: list[str]) -> str:
    """Return the column with the paths of the images, if none was named."""
    if PATH in table:
        return PATH
    names = list(table)
    found = [name for name in names if str(table[name][0]).lower().endswith(EXTENSIONS)]
    if found and found[0] != names[0]:
        notes.append(f"the paths are taken from column {found[0]!r}")
    return found[0] if found else names[0]


def _check_images(path: str | Path, root: str | Path, names: Sequence[str]) -> None:
    """Raise SourceError if the first images are not where the table says, or at URLs."""
    if not is_url(root) and not Path(root).is_dir():
        raise SourceError(f"The folder of the images, {root}, does not exist. Check --root.")
    if "://" in names[0]:
        raise SourceError(
            f"{path} lists URLs, such as {names[0]:.200}. Write what follows their common "
            "beginning into the table, and that URL as --root.",
            path=path,
        )
    first = [] if is_url(root) else [Path(root) / name for name in names[:3]]
    if first and not any(map(os.path.lexists, first)):
        raise SourceError(
            f"{path}: the first images are missing, such as {first[0]}. Say where they are: with "
            "--root, with the column of their paths (--image COLUMN), or with a template such as "
            "--image 'images/{id}.jpg'.",
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
    place = str(path)
    try:
        with _opened(path) as file:
            table: dict[str, Sequence[Any]] = {}
            table |= _read_json(file, where) if _is_json(path) else _read_cells(file, where, notes)
    except UnicodeDecodeError as error:
        raise SourceError(f"{place} is not in UTF-8: {error}. Save it as UTF-8.") from error
    except (OSError, ValueError, csv.Error, RecursionError) as error:
        raise SourceError(f"{place} cannot be read: {error}.", path=place) from error
    if not table or not len(next(iter(table.values()))):
        chosen = " and ".join(f"{name}={text}" for name, text in where.items())
        raise SourceError(
            f"{place} lists no images{f' with {chosen}' if chosen else ''}. Give a table with a "
            "line for each image, below one with the names of columns.",
            path=place,
        )
    return table


def _is_json(path: object) -> bool:
    return str(path).lower().endswith((".jsonl", ".ndjson"))


def _opened(path: str | Path) -> io.TextIOBase:
    if is_url(path):
        return io.StringIO(read_url(str(path)).decode("utf-8-sig"), newline="")
    path = Path(path)
    if path.is_dir() or path.is_block_device() or path.is_char_device():  # /dev/zero has no end
        raise ValueError("it is a folder or a device")
    return path.open(newline="", encoding="utf-8-sig")


def _read_json(file: Iterator[str], where: Mapping[str, Any]) -> dict[str, list[Any]]:
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
        if any(str(entries.get(name)) != str(text) for name, text in where.items()):
            continue
        for name, value in entries.items():
            if name not in table:
                table[name] = [None] * rows
            table[name].append(value)
        rows += 1
        for values in table.values():
            if len(values) < rows:
                values.append(None)
    return table


def _read_cells(
    file: io.TextIOBase, where: Mapping[str, Any], notes: list[str]
) -> dict[str, list[str]]:
    """Read CSV, with a line of column names."""
    first = file.readline()
    delimiter = max(DELIMITERS, key=first.count)
    (header,) = csv.reader([first], delimiter=delimiter, skipinitialspace=True) if first else [[]]
    header = _checked_header([name.strip() for name in header], where)
    if "" in header:
        notes.append(
            "left out a column without a name, as pandas writes for the index; "
            "to_csv(index=False) leaves it out"
        )
    kept = [(header.index(name), str(text)) for name, text in where.items()]
    reader = csv.reader(file, strict=True, skipinitialspace=True, delimiter=delimiter)
    rows: list[list[str]] = []
    for row in reader:
        if len(row) != len(header):
            if not any(row):  # a blank line
                continue
            raise ValueError(
                f"line {reader.line_num + 1} has {len(row)} cells, and the first line {len(header)}"
            )
        if all(row[column].strip() == text for column, text in kept):
            rows.append(row)
    columns = zip(header, zip(*rows, strict=True), strict=True) if rows else ()
    return {name: [cell.strip() for cell in cells] for name, cells in columns if name}


def _checked_header(header: list[str], where: Mapping[str, Any]) -> list[str]:
    """Return the names of columns. Raises ValueError."""
    if image := next((name for name in header if name.lower().endswith(EXTENSIONS)), None):
        raise ValueError(
            f"the first line has an image ({image}). Put a line such as 'path,label' above it"
        )
    named = [name for name in header if name]
    if twice := {name for name in named if named.count(name) > 1}:
        raise ValueError(f"two columns are called {min(twice)!r:.80}. Rename one")
    if unknown := [name for name in where if name not in named]:
        raise ValueError(f"there is no column {unknown[0]!r:.80}, only {listed(named)}")
    return header


def typed(path: object, table: Table, label: str | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the columns of a table with numbers in place of the texts of CSV.

    Also return why others are left out: most of their cells are numbers, and some are not.
    """
    if _is_json(path):
        return dict(table), {}
    values: dict[str, Any] = {name: _values(list(cells)) for name, cells in table.items()}
    skipped: dict[str, str] = {}
    for name, cells in table.items():
        is_text = isinstance(values[name], list) and name not in (label, *LABEL_NAMES)
        if is_text and 2 * sum(map(_is_number, cells[:100])) > len(cells[:100]):
            wrong = next((cell for cell in cells if cell and not _is_number(cell)), None)
            if wrong is not None:
                skipped[name] = f"{wrong!r:.40} is not a number"
                del values[name]
    return values, skipped


def _is_number(cell: Any) -> bool:
    try:
        return bool(np.isfinite(float(cell)))
    except (TypeError, ValueError):
        return False


def _values(cells: Sequence[str]) -> Any:
    """Return the cells of a column as numbers, or else as texts. An empty cell is NaN."""
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
