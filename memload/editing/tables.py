"""Tables about samples: their names, and columns of texts, numbers and lists."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from memload.errors import SourceError
from memload.sources import tables
from memload.sources.columns import LABEL_NAMES
from memload.storage.index import Index
from memload.wording import listed

logger = logging.getLogger("memload")


def read_table(
    path: Path, index: Index, key: str | None, label: str | None
) -> tuple[Sequence[str], dict[str, Sequence[Any]]]:
    """Return the names in a table, and its columns: texts, numbers, lists; None is missing.

    A column of CSV in which a text of the data set occurs is text, even if all cells could be
    numbers. Raises SourceError.
    """
    notes: list[str] = []
    table = dict(tables.read_table(path, {}, notes))
    is_exported = {tables.PATH, tables.KEY} <= table.keys()
    key = key or (tables.KEY if is_exported else tables.image_column(table, notes))
    own = [name for name in LABEL_NAMES if name == "label" or name not in index.columns]
    label = label or next((name for name in own if name in table and name != key), None)
    if unknown := [name for name in (key, label) if name and name not in table]:
        found = f"only {listed(table)}. Name one of them."
        raise SourceError(f"{path}: there is no column {unknown[0]!r}, {found}", path=path)
    names = table.pop(key)
    if is_exported:
        table.pop(tables.PATH, None)
    if label is None:
        notes.append(f"{path.name} has no column {own[0]} or {own[1]}, so labels stay as they are")
    elif label != "label":
        notes.append(f"the labels are taken from column {label!r}")
        table["label"] = table.pop(label)
    texts = {
        name: cells
        for name, cells in table.items()
        if not {*(index.texts.get(name) or ())}.isdisjoint(c for c in cells if type(c) is str)
    }
    others = {name: cells for name, cells in table.items() if name not in texts}
    values, skipped = tables.typed(path, others, "label")
    notes += [
        f"the column {name!r} is left out, since {reason}" for name, reason in skipped.items()
    ]
    columns = texts | values
    for note in notes:
        logger.info(note)
    return names, {name: _listed(values) for name, values in columns.items()}


def _listed(values: Any) -> Any:
    """Return values as a list, with None for NaN. They are integers if all others are whole."""
    if not isinstance(values, np.ndarray):
        return values
    missing = np.isnan(values)
    is_whole = missing.any() and bool(np.all(values[~missing] % 1 == 0))
    return [None if v != v else int(v) if is_whole else v for v in values.tolist()]
