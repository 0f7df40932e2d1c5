"""Other labels and columns for a data set, from a table."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from memload.editing.columns import with_columns
from memload.editing.index_files import index_of
from memload.editing.matching import match_samples
from memload.errors import SourceError
from memload.sources import tables
from memload.sources.columns import label_among
from memload.sources.opening import read_classes
from memload.storage.index import Index
from memload.wording import counted, listed

logger = logging.getLogger("memload")

#: What becomes of samples without a line.
Missing = Literal["error", "drop", "keep"]
#: What a cell without a value holds, in CSV and in JSON.
_EMPTY = ("", None)


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
    index, path = index_of(dataset), Path(table)
    names, columns = _read_table(path, index, key, label)
    lines = match_samples(index, names, path.name)
    _check_lines(index, lines, names, path, missing)
    found = np.flatnonzero(lines >= 0)
    # The samples that have a value in each column. Others may keep theirs.
    samples = {
        name: [s for s in found.tolist() if missing != "keep" or cells[lines[s]] not in _EMPTY]
        for name, cells in columns.items()
    }
    values = _typed(
        path, index, {name: [columns[name][lines[s]] for s in own] for name, own in samples.items()}
    )
    given = None if classes is None else tuple(read_classes(classes))
    if missing == "keep":
        texts = index.texts | ({} if given is None else {"label": given})
        values = {
            name: _merged(index, name, samples[name], new, texts.get(name, ()))
            for name, new in values.items()
        }
    else:
        index = index.subset(found)
    is_counted_anew = given is not None and "label" in values
    changed = with_columns(replace(index, classes=given) if is_counted_anew else index, **values)
    if given not in (None, changed.classes):
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
    """Return the names in a table, and its other columns. The cells of CSV are texts.

    Raises SourceError.
    """
    notes: list[str] = []
    table = tables.read_table(path)
    own_keys = [name for name in (tables.EXPORTED_KEY, "key") if name in table]
    key = key or next(iter(own_keys), None) or tables.image_column(table, notes)
    # A column of the data set that is called so is no label.
    taken = index.columns.keys() - {"label"} | {key}
    label = label or label_among(table.keys() - taken)
    if unknown := [name for name in (key, label) if name and name not in table]:
        found = f"only {listed(table)}. Name one of them."
        raise SourceError(f"{path}: there is no column {unknown[0]!r}, {found}", path=path)
    names = table.pop(key)
    table.pop(tables.PATH, None)  # the paths beside the names are those of an export
    if label is None:
        notes.append(
            f"{path.name} has no column label or class, so labels stay as they are. "
            "Name one with --label (label=… in Python)"
        )
    elif label != "label":
        notes.append(f"the labels are taken from column {label!r}")
        table["label"] = table.pop(label)
    for note in notes:
        logger.info(note)
    return names, table


def _typed(path: Path, index: Index, table: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return the columns of a table with numbers in place of the texts of CSV.

    A column in which a text of the data set occurs is text, even if all cells could be numbers.
    Raises SourceError if a label is missing.
    """
    if any(cell in _EMPTY for cell in table.get("label", ())):
        raise SourceError(f"{path}: labels are missing. Fill them in.", path=path)
    texts = {
        name: cells
        for name, cells in table.items()
        if not {*index.texts.get(name, ())}.isdisjoint(c for c in cells if type(c) is str)
    }
    others = {name: cells for name, cells in table.items() if name not in texts}
    if not tables.is_json(path):
        others = {name: tables.numbers_or_texts(cells) for name, cells in others.items()}
    return texts | others


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


def _merged(
    index: Index, name: str, samples: Sequence[int], values: Any, texts: Sequence[str]
) -> list[Any]:
    """Return the values of all samples: the new ones of these samples, else those they have.

    New numbers count into ``texts``, if there are any. Raises ValueError if the data set has no
    such column.
    """
    if name not in index.columns:
        raise ValueError(
            f"{name}: the data set has no such column, so samples without a line have nothing to "
            "keep. Add their lines, or leave them out with --missing drop."
        )
    own = index.texts.get(name)
    merged: list[Any] = index.columns[name].tolist()
    if own:
        merged = [own[number] for number in merged]
    for sample, value in zip(samples, values, strict=True):
        is_number = isinstance(value, int | np.integer) and value in range(len(texts))
        merged[sample] = texts[value] if texts and is_number else value
    return merged


def _log_labels(before: Index, after: Index) -> None:
    """Log how many labels changed, and which classes are new."""
    old, new = _labels(before), _labels(after)
    changed = sum(one != other for one, other in zip_longest(old, new))
    if new:
        level = logging.INFO if changed else logging.WARNING
        logger.log(level, f"{changed:,} of {counted(len(new), 'label')} changed")
    if before.classes is not None and after.classes is None:
        logger.warning("the labels are numbers now: one of them counts into no class")
    if added := [name for name in after.classes or () if name not in (before.classes or ())]:
        logger.info(f"new classes: {listed(added, 5)}")


def _labels(index: Index) -> list[Any]:
    """Return the names of the labels, or their numbers if they have no names."""
    numbers: list[Any] = index.columns.get("label", np.zeros(0)).tolist()
    return numbers if index.classes is None else [index.classes[number] for number in numbers]
