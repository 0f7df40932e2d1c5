"""Other columns for a data set: labels, texts, numbers and arrays for each sample."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from memload.building.sources.columns import number_texts
from memload.editing.report import check_column_name
from memload.editing.statistics import ids_of_masks
from memload.storage.format import DESCRS_OF_COLUMNS
from memload.storage.index import Index, class_counts
from memload.wording import listed


class NewColumn(NamedTuple):
    """The values of all samples, ``(n, …)``, and the texts that they count into, if they do.

    ``is_final`` says that the texts are those that the user wants, in this order.
    """

    values: np.ndarray
    texts: tuple[str, ...] | None = None
    is_final: bool = False


def column_of(name: str, values: Any, samples: int) -> NewColumn:
    """Return a user's array or list, with one entry for each sample, as a column.

    Texts are numbered in alphabetical order. Single integers and booleans become int64, and single
    floats float64, as in a build. Arrays keep their type. Raises ValueError.
    """
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: the values are no array: {error}.") from None
    if array.ndim == 0 or len(array) != samples:
        found = "is one value" if array.ndim == 0 else f"are {len(array):,} values"
        raise ValueError(f"{name}: there {found}, but {samples:,} samples. Give one for each.")
    are_texts = array.dtype.kind == "U" or (array.dtype.kind == "O" and array.ndim == 1)
    if are_texts and array.ndim == 1 and all(isinstance(value, str) for value in values):
        texts, numbers = number_texts([str(value) for value in values])
        return NewColumn(numbers, tuple(texts))
    if array.ndim == 1 and array.dtype.kind in "biuf":
        if array.dtype.kind == "u" and (array > np.iinfo(np.int64).max).any():
            raise ValueError(f"{name}: it has numbers above 2⁶³. Give int64.")
        array = array.astype("<f8" if array.dtype.kind == "f" else "<i8")
    little = array.dtype.newbyteorder("<")
    if little.str not in DESCRS_OF_COLUMNS:
        raise ValueError(
            f"{name}: {array.dtype} of shape {array.shape} is neither numbers of at most 64 bits "
            "nor a text for each sample. Convert it."
        )
    return NewColumn(np.array(array, little, order="C"))  # a copy: the user may change the values


def replace_columns(index: Index, columns: Mapping[str, NewColumn | None]) -> Index:
    """Return the index with other columns. None removes a column, or an array such as masks.

    Texts that are known, as classes or as those of the same column, keep their numbers, and others
    are appended. If none is known, the new ones take their place. Numbers that count into known
    texts keep these texts. Points and boxes stay such if the shape fits.

    Raises ValueError for a name that is taken, or that is to be removed and is not there.
    """
    arrays = {array.name for array in index.arrays}
    values, texts = dict(index.columns), dict(index.categories)
    if index.classes is not None:
        texts["label"] = index.classes
    for name, column in columns.items():
        known = texts.pop(name, None)
        if column is None:
            _check_removable(index, name)
            values.pop(name, None)
            continue
        check_column_name(name)
        if name in arrays:
            raise ValueError(f"{name}: an array has this name. Choose another one for the column.")
        values[name], new_texts = renumbered(column, known)
        values[name] = _as_points_or_boxes(index, name, values[name])
        if new_texts is not None:
            texts[name] = new_texts
    classes = texts.pop("label", None)
    removed = [name for name, column in columns.items() if column is None]
    kept = _without_arrays(index, removed) if arrays & {*removed} else index
    if "label" in columns:
        kept = _with_class_counts(kept, values.get("label"), classes)
    return replace(
        kept,
        columns=values,
        classes=classes,
        categories=texts,
        points=tuple(name for name in index.points if _are(values.get(name), "f", 2)),
        boxes=tuple(name for name in index.boxes if _are(values.get(name), "<f4", 4)),
        fingerprint="",
    )


def _with_class_counts(
    index: Index, labels: np.ndarray | None, classes: Collection[str] | None
) -> Index:
    """Return the index with the counts of other labels, or without if they have no classes."""
    statistics = {name: fact for name, fact in index.statistics.items() if name != "class_counts"}
    if labels is not None and classes is not None:
        statistics["class_counts"] = class_counts(labels, len(classes))
    return replace(index, statistics=statistics)


def _without_arrays(index: Index, names: Collection[str]) -> Index:
    """Return the index without the arrays of these names."""
    statistics = {name: fact for name, fact in index.statistics.items() if name != "mask_ids"}
    ids = {name: numbers for name, numbers in ids_of_masks(index).items() if name not in names}
    if ids:
        statistics["mask_ids"] = ids
    return replace(
        index,
        statistics=statistics,
        arrays=tuple(array for array in index.arrays if array.name not in names),
        other_rows={name: rows for name, rows in index.other_rows.items() if name not in names},
        crc32={name: checksums for name, checksums in index.crc32.items() if name not in names},
    )


def _check_removable(index: Index, name: str) -> None:
    if name == "image":
        raise ValueError("image: a data set cannot be without its images.")
    if name not in index.names:
        raise ValueError(
            f"{name}: there is no such column to remove. There is {listed(index.names) or 'none'}."
        )


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
