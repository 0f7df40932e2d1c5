"""Other labels and columns for a data set, from a table."""

import logging
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from memload.editing.columns import change_columns
from memload.editing.index_files import index_of
from memload.editing.matching import match_samples
from memload.errors import SourceError
from memload.sources import tables
from memload.sources.columns import LABEL_NAMES
from memload.sources.opening import read_classes
from memload.storage.index import Index
from memload.wording import counted, listed

logger = logging.getLogger("memload")

#: What becomes of samples without a line.
Missing = Literal["error", "drop", "keep"]


def relabel(
    dataset: Any,
    table: str | Path,
    *,
    missing: Missing = "error",
    classes: Any = None,
    key: str | None = None,
    label: str | None = None,
) -> Index:
    """Return an index of a data set with the columns of a table. Pixels stay as they are.

    Columns of the table replace those of the same name, or are added. Columns of text become
    categories. Columns that the table lacks stay. Lines without a sample are skipped. The logger
    ``memload`` tells how many labels changed, and which lines were skipped.

    The classes of the result depend on the labels in the table, and the texts of other columns
    likewise:

    - Names, some known: those of the data set, and new ones behind them.
    - Names, none known: those of the table, sorted.
    - Numbers of known classes: those of the data set.
    - Numbers, some of no class: none, as the labels are numbers.

    Args:
        dataset: A path such as ``"out.bin"``, a `MemmapDataset`, or an index.
        table: A CSV or TSV file with a line of column names, such as ``key,label``, or a JSON Lines
            file (``.jsonl``) with an object for each sample.
        missing: What becomes of a sample without a line. ``"error"``: ValueError. ``"drop"``: it is
            left out. ``"keep"``: it keeps the values that it has, and so does a sample with an
            empty cell or null in a column.
        classes: The whole list of classes: names, a data set that has them, or a text file.
        key: The column with the names of samples, with or without extension: ``cat/1.jpg`` or
            ``cat/1``. By default it is ``memload_key``, which an export has, else ``key``, else
            ``file_name``, else the first column with paths of images, else the first column.
        label: The column with the labels. By default it is ``label``, else ``class``.

    Raises SourceError for a wrong table, ValueError for one that does not fit the data set,
    FormatError and OSError.

    >>> memload.relabel("out.bin", "labels.csv").write("new.idx")  # doctest: +SKIP
    """
    if missing not in get_args(Missing):
        raise ValueError(f"missing: {missing!r} is none of 'error', 'drop' and 'keep'.")
    index, table = index_of(dataset), Path(table)
    names, columns = _read_table(table, index, key, label)
    lines = match_samples(index, names, table.name)
    _check_lines(index, lines, names, table, missing)
    samples = np.flatnonzero(lines >= 0)
    values: dict[str, Sequence[Any]] = {
        name: [cells[line] for line in lines[samples]] for name, cells in columns.items()
    }
    if missing == "keep":
        values = {name: _merged(index, name, new, samples) for name, new in values.items()}
    else:
        index = index.subset(samples)
    if any(value is None or value == "" for value in values.get("label", ())):
        raise SourceError(f"{table}: labels are missing. Fill them in.", path=table)
    given = None if classes is None else read_classes(classes)
    changed = change_columns(
        index,
        values,
        {} if given is None else {"label": given},
        kept=values if missing == "keep" else ["label"] * (given is not None),
    )
    if given is not None and [*(changed.classes or ())] != given:
        new = listed((name for name in changed.classes or () if name not in given), 3)
        raise ValueError(
            f"classes: labels are not among the {len(given):,} classes: "
            f"{new or 'they are numbers'}. Add them to the list, or correct the table."
        )
    _log_labels(index, changed)
    return changed


def _read_table(
    path: Path, index: Index, key: str | None, label: str | None
) -> tuple[Sequence[str], dict[str, Sequence[Any]]]:
    """Return the names in a table, and its columns: texts, numbers, lists. None means missing.

    A column of CSV in which a text of the data set occurs is text, even if all cells could be
    numbers. Raises SourceError.
    """
    notes: list[str] = []
    table = tables.read_table(path, notes)
    own_keys = [name for name in (tables.EXPORTED_KEY, "key") if name in table]
    key = key or (own_keys[0] if own_keys else tables.image_column(table, notes))
    own = [name for name in LABEL_NAMES if name == "label" or name not in index.columns]
    label = label or next((name for name in own if name in table and name != key), None)
    if unknown := [name for name in (key, label) if name and name not in table]:
        found = f"only {listed(table)}. Name one of them."
        raise SourceError(f"{path}: there is no column {unknown[0]!r}, {found}", path=path)
    names = table.pop(key)
    if key in own_keys:  # the paths beside it are those of an export, or say the same
        table.pop(tables.PATH, None)
    if label is None:
        notes.append(f"{path.name} has no column {own[0]} or {own[1]}, so labels stay as they are")
    elif label != "label":
        notes.append(f"the labels are taken from column {label!r}")
        table["label"] = table.pop(label)
    texts = {
        name: cells
        for name, cells in table.items()
        if not {*index.texts.get(name, ())}.isdisjoint(c for c in cells if type(c) is str)
    }
    others = {name: cells for name, cells in table.items() if name not in texts}
    if not tables.is_json(path):
        others = {name: tables.numbers_or_texts(cells) for name, cells in others.items()}
    for note in notes:
        logger.info(note)
    return names, {name: _listed(cells) for name, cells in (texts | others).items()}


def _listed(values: Any) -> Any:
    """Return values as a list, with None for NaN. They are integers if all others are whole."""
    if not isinstance(values, np.ndarray):
        return values
    missing = np.isnan(values)
    is_whole = missing.any() and bool(np.all(values[~missing] % 1 == 0))
    return [None if v != v else int(v) if is_whole else v for v in values.tolist()]


def _check_lines(
    index: Index, lines: np.ndarray, names: Sequence[str], table: Path, missing: Missing
) -> None:
    """Log which samples have no line, and which lines no sample.

    Raises ValueError if there are such samples and ``missing`` is "error".
    """
    if without := np.flatnonzero(lines < 0).tolist():
        examples = listed((index.keys[number] for number in without), 3)
        count = f"{len(without):,} of {counted(len(index), 'sample')} without a line in {table}"
        if missing == "error":
            raise ValueError(
                f"{count}: {examples}. Add them, leave these samples out with --missing drop, or "
                "let them keep what they have with --missing keep (missing='drop' or 'keep' in "
                "Python)."
            )
        logger.info(f"{count} {'left out' if missing == 'drop' else 'unchanged'}: {examples}")
    if unused := np.setdiff1d(np.arange(len(names)), lines).tolist():
        examples = listed((names[line] for line in unused), 3)
        logger.warning(f"{counted(len(unused), 'line')} in {table} without a sample: {examples}")


def _merged(index: Index, name: str, values: Sequence[Any], samples: np.ndarray) -> Sequence[Any]:
    """Return the values of all samples: new ones where there are any, else those of the data set.

    Raises ValueError if the data set has no such column.
    """
    if name not in index.columns:
        raise ValueError(
            f"{name}: the data set has no such column, so samples without a line have nothing to "
            "keep. Add their lines, or leave them out with --missing drop."
        )
    texts = index.texts.get(name)
    merged: list[Any] = index.columns[name].tolist()
    if texts is not None:
        merged = [texts[number] for number in merged]
    for sample, value in zip(samples.tolist(), values, strict=True):
        if value is not None and value != "":
            is_number = texts is not None and type(value) is int and 0 <= value < len(texts)
            merged[sample] = texts[value] if texts is not None and is_number else value
    return merged


def _log_labels(before: Index, after: Index) -> None:
    """Log how many labels changed, and which classes are new."""
    old, new = _labels(before), _labels(after)
    changed = sum(one != other for one, other in zip_longest(old, new))
    if new:
        level = logging.INFO if changed else logging.WARNING
        logger.log(level, f"{changed:,} of {counted(len(new), 'label')} changed")
    if added := [name for name in after.classes or () if name not in (before.classes or ())]:
        logger.info(f"new classes: {listed(added, 5)}")


def _labels(index: Index) -> list[Any]:
    """Return the names of the labels, or their numbers if they have no names."""
    numbers: list[Any] = index.columns.get("label", np.zeros(0)).tolist()
    return numbers if index.classes is None else [index.classes[number] for number in numbers]
