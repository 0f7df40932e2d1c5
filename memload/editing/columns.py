"""Other columns for a data set: labels, texts, numbers and arrays of all samples."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from memload.editing.index_files import index_of
from memload.sources.columns import Columns
from memload.storage.format import RESERVED
from memload.storage.index import Index, class_counts
from memload.storage.where import matching


def where(dataset: Any, /, **conditions: Any) -> Index:
    """Return an index of the samples whose columns have these values. No pixel is copied.

    Args:
        dataset: A path such as ``"out.bin"``, a `MemmapDataset`, or an index.
        conditions: For each column, a value, or a list that means any of its values. All
            conditions must hold. `MemmapDataset.where` explains which values there are.

    Raises ValueError and TypeError as `MemmapDataset.where` does, and FormatError.

    >>> memload.where("out.bin", split="train").write("train.idx")  # doctest: +SKIP
    """
    index = index_of(dataset)
    return index.subset(matching(index, conditions))


def with_columns(dataset: Any, /, **columns: Any) -> Index:
    """Return an index with other columns. Those of the same name are replaced.

    Args:
        dataset: A path such as ``"out.bin"``, a `MemmapDataset`, or an index.
        columns: For each column, a value for each sample, in the order of the data set: a list of
            texts or numbers, or an array or a tensor ``(n, …)``. Texts of ``label`` are names of
            classes; those of other columns are categories. Classes and texts that the data set has
            keep their numbers, and others follow. If none is known, the new ones are sorted.
            Integers that count into the texts of the data set keep these texts.

    Raises ValueError for a wrong name, length or value, and FormatError.

    >>> weights = [1.0, 0.5, 2.0]
    >>> memload.with_columns("out.bin", weight=weights).write("weighted.idx")  # doctest: +SKIP
    """
    index = index_of(dataset)
    found = {name: typed(name, new, index.texts.get(name)) for name, new in columns.items()}
    return with_typed(index, found)


class Column(NamedTuple):
    """The values of all samples, ``(n, …)``, and the texts that they count into, if they do."""

    values: np.ndarray
    texts: tuple[str, ...] | None = None


def typed(
    name: str, values: Any, known: Sequence[str] | None = None, *, keeps_known: bool = False
) -> Column:
    """Return a column of the values of all samples. None is a missing number or an empty text.

    ``known`` are the texts that the column counts into so far. With ``keeps_known``, they keep
    their numbers even if none of them occurs. Raises ValueError.
    """
    if not name or name in RESERVED or "/" in name or not name.isprintable():
        raise ValueError(
            f"{name!r:.80} cannot be the name of a column. Names have no '/', and "
            f"{', '.join(RESERVED)} are taken. Choose another name."
        )
    values, columns = _numbers_or_list(values), Columns()
    if isinstance(values, np.ndarray):
        columns.add(name, values)
    elif {type(value) for value in values} - {type(None)} == {str}:
        return _numbered([value or "" for value in values], known or (), keeps_known)
    else:
        columns.add_values(name, values)
    if name in columns.skipped:
        raise ValueError(
            f"{name}: {columns.skipped[name]}. Give all texts, all numbers, or arrays of one shape."
        )
    numbers = columns.values[name]
    is_whole = known is not None and numbers.ndim == 1 and numbers.dtype.kind == "i"
    counts = is_whole and bool(np.all((numbers >= 0) & (numbers < len(known or ()))))
    return Column(numbers, tuple(known or ()) if counts else None)


def _numbers_or_list(values: Any) -> Any:
    """Return an array of numbers, or else a list of Python's values."""
    if hasattr(values, "__array__"):
        array = np.asarray(values)
        return array if array.dtype.kind in "biuf" else array.tolist()
    several = [values] if isinstance(values, str) else values
    return [value.item() if isinstance(value, np.generic) else value for value in several]


def _numbered(texts: Sequence[str], known: Sequence[str], keeps_known: bool) -> Column:
    """Number texts: first the known ones, unless none of them occurs, then the others, sorted."""
    found = {*texts}
    first = () if found.isdisjoint(known) and not keeps_known else tuple(known)
    united = (*first, *sorted(found - {*first}))
    number = {text: position for position, text in enumerate(united)}
    return Column(np.array([number[text] for text in texts], np.int64), united)


def with_typed(index: Index, columns: Mapping[str, Column]) -> Index:
    """Return an index with other columns. Points and boxes stay such if the shape fits.

    Raises ValueError for a name that is taken, and for a column of another length.
    """
    values, texts, classes = dict(index.columns), dict(index.categories), index.classes
    moving, statistics = {*index.points, *index.boxes}, dict(index.statistics)
    for name, (numbers, texts_of_column) in columns.items():
        _check(index, name, numbers)
        values[name] = numbers
        if name in moving:
            old, is_number = index.columns[name], numbers.dtype.kind in "iuf"
            fits = is_number and numbers.ndim == old.ndim and numbers.shape[2:] == old.shape[2:]
            values[name] = numbers.astype(old.dtype) if fits else numbers
            moving -= set() if fits else {name}
        texts.pop(name, None)
        if name == "label":
            classes = texts_of_column
        elif texts_of_column is not None:
            texts[name] = texts_of_column
    if "label" in columns:
        statistics.pop("class_counts", None)
        if classes is not None:
            statistics["class_counts"] = class_counts(values["label"], len(classes))
    return replace(
        index,
        columns=values,
        classes=classes,
        categories=texts,
        points=tuple(name for name in index.points if name in moving),
        boxes=tuple(name for name in index.boxes if name in moving),
        statistics=statistics,
        fingerprint="",
    )


def _check(index: Index, name: str, values: np.ndarray) -> None:
    if any(array.name == name for array in index.arrays):
        raise ValueError(f"{name}: an array has this name. Choose another one for the column.")
    if len(values) != len(index):
        raise ValueError(
            f"{name}: there are {len(values):,} values for {len(index):,} samples of "
            f"{index.path.name}. Give a value for each sample."
        )
