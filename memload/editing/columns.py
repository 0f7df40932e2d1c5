"""Other columns for a data set: labels, texts, numbers and arrays for each sample."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from memload.editing.report import check_column_name
from memload.storage.index import Index, class_counts


class NewColumn(NamedTuple):
    """The values of all samples, ``(n, …)``, and the texts that they count into, if they do.

    ``is_final`` says that the texts are those that the user wants, in this order.
    """

    values: np.ndarray
    texts: tuple[str, ...] | None = None
    is_final: bool = False


def replace_columns(index: Index, columns: Mapping[str, NewColumn]) -> Index:
    """Return the index with other columns.

    Texts that are known, as classes or as those of the same column, keep their numbers, and others
    are appended. If none is known, the new ones take their place. Numbers that count into known
    texts keep these texts. Points and boxes stay such if the shape fits.

    Raises ValueError for a name that is taken.
    """
    arrays = {array.name for array in index.arrays}
    values, texts = dict(index.columns), dict(index.categories)
    if index.classes is not None:
        texts["label"] = index.classes
    for name, column in columns.items():
        known = texts.pop(name, None)
        check_column_name(name)
        if name in arrays:
            raise ValueError(f"{name}: an array has this name. Choose another one for the column.")
        values[name], new_texts = renumbered(column, known)
        values[name] = _as_points_or_boxes(index, name, values[name])
        if new_texts is not None:
            texts[name] = new_texts
    classes = texts.pop("label", None)
    if "label" in columns:
        index = _with_class_counts(index, values["label"], classes)
    return replace(
        index,
        columns=values,
        classes=classes,
        categories=texts,
        points=tuple(name for name in index.points if _are(values.get(name), "f", 2)),
        boxes=tuple(name for name in index.boxes if _are(values.get(name), "<f4", 4)),
        fingerprint="",
    )


def _with_class_counts(index: Index, labels: np.ndarray, classes: Collection[str] | None) -> Index:
    """Return the index with the counts of other labels, or without if they have no classes."""
    statistics = {name: fact for name, fact in index.statistics.items() if name != "class_counts"}
    if classes is not None:
        statistics["class_counts"] = class_counts(labels, len(classes))
    return replace(index, statistics=statistics)


def renumbered(
    column: NewColumn, known: tuple[str, ...] | None, *, always: bool = False
) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """Return the values and texts of a column that takes the place of one with the known texts.

    With ``always``, the known texts stay even if none of them occurs.
    """
    values, texts, is_final = column
    if known is None or is_final:
        return values, texts
    if texts is None:
        is_whole = values.ndim == 1 and values.dtype.kind == "i"
        counts = is_whole and bool(np.all((values >= 0) & (values < len(known))))
        return values, known if counts else None
    if texts and not always and {*texts}.isdisjoint(known):
        return values, texts
    united = (*known, *sorted({*texts} - {*known}))
    number = {text: position for position, text in enumerate(united)}
    return np.array([number[text] for text in texts], np.int64)[values], united


def _as_points_or_boxes(index: Index, name: str, values: np.ndarray) -> np.ndarray:
    """Return numbers that take the place of points or boxes in a type that these can have."""
    is_box = name in index.boxes and values.shape[2:] == (4,) and values.dtype.kind in "iuf"
    is_point = name in index.points and values.shape[2:] == (2,) and values.dtype.kind in "iu"
    return values.astype("<f4", copy=False) if is_box or is_point else values


def _are(values: np.ndarray | None, types: str, size: int) -> bool:
    """Return whether a column is still one of points (size 2) or boxes (size 4)."""
    is_float = values is not None and (values.dtype.str == types or values.dtype.kind == types)
    return values is not None and is_float and values.shape[2:] == (size,)
