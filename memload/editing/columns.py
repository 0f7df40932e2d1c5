"""Other columns for a data set: labels, texts, numbers and arrays of all samples."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from memload.editing.index_files import index_of
from memload.sources.columns import Columns
from memload.storage.index import Index, class_counts
from memload.storage.where import matching


def where(dataset: Any, /, **conditions: Any) -> Index:
    """Return an index of the samples whose columns have these values. No pixel is copied.

    Args:
        dataset: A path such as ``"out.bin"``, a `MemmapDataset`, or an index.
        conditions: For each column, a value, or a list that means any of its values. All
            conditions must hold. `MemmapDataset.where` explains which values there are.

    Raises ValueError as `MemmapDataset.where` does, and FormatError.

    >>> memload.where("out.bin", split="train").write("train.idx")  # doctest: +SKIP
    """
    index = index_of(dataset)
    return index.subset(matching(len(index), index.columns, index.texts, conditions))


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
    return change_columns(index_of(dataset), columns)


def change_columns(
    index: Index,
    columns: Mapping[str, Any],
    texts: Mapping[str, Sequence[str]] = MappingProxyType({}),
    kept: Collection[str] = (),
) -> Index:
    """Return an index with other columns. Points and boxes stay such if the shape fits.

    Args:
        index: The index.
        columns: For each column, a value for each sample. None means a missing number or an
            empty text.
        texts: The texts that these columns count into, if they are others than those of the index.
        kept: The columns whose texts keep their numbers even if none of them occurs.

    Raises ValueError.
    """
    values, moving = dict(index.columns), {*index.points, *index.boxes}
    known = dict(index.texts)
    for name, new in columns.items():
        if any(array.name == name for array in index.arrays):
            raise ValueError(f"{name}: an array has this name. Choose another one for the column.")
        own_texts = known.pop(name, ())
        numbers, new_texts = _typed(name, new, texts.get(name, own_texts), name in kept)
        if len(numbers) != len(index):
            raise ValueError(
                f"{name}: there are {len(numbers):,} values for {len(index):,} samples of "
                f"{index.path.name}. Give a value for each sample."
            )
        is_fitting = name in moving and numbers.shape[2:] == values[name].shape[2:]
        moving -= set() if is_fitting else {name}
        values[name] = numbers.astype(values[name].dtype) if is_fitting else numbers
        known |= {} if new_texts is None else {name: tuple(new_texts)}
    return replace_columns(index, values, known, moving)


def replace_columns(
    index: Index,
    values: Mapping[str, np.ndarray],
    texts: Mapping[str, tuple[str, ...]],
    moving: Collection[str],
) -> Index:
    """Return an index with these columns instead of its own. The samples of classes are counted.

    Args:
        index: The index.
        values: The columns, each ``(n, …)``.
        texts: What columns count into. Those of ``label`` are the classes.
        moving: Columns that stay points or boxes if they are such in ``index``. Others do not move.
    """
    categories, statistics = dict(texts), index.statistics
    classes = categories.pop("label", None)
    counts = (
        {} if classes is None else {"class_counts": class_counts(values["label"], len(classes))}
    )
    return replace(
        index,
        columns=values,
        classes=classes,
        categories=categories,
        points=tuple(name for name in index.points if name in moving),
        boxes=tuple(name for name in index.boxes if name in moving),
        statistics={n: v for n, v in statistics.items() if n != "class_counts"} | counts,
        fingerprint="",
    )


def _typed(
    name: str, values: Any, known: Sequence[str], keeps_known: bool
) -> tuple[np.ndarray, Sequence[str] | None]:
    """Return a column ``(n, …)``, and the texts that it counts into, if it does."""
    values, columns = _numbers_or_list(values), Columns()
    if isinstance(values, list) and {type(value) for value in values} - {type(None)} == {str}:
        numbers, texts = _numbered([value or "" for value in values], known, keeps_known)
        columns.add(name, numbers)
    else:
        texts = known
        columns.add_values(name, values)
    if name in columns.skipped:
        raise ValueError(
            f"{name:.80}: {columns.skipped[name]}. Give another name, or all texts, all numbers, "
            "or arrays of one shape."
        )
    numbers = columns.values[name]
    counts = texts and numbers.ndim == 1 and numbers.dtype.kind == "i"
    is_within = bool(counts) and bool(np.all((numbers >= 0) & (numbers < len(texts))))
    return numbers, texts if is_within else None


def _numbers_or_list(values: Any) -> Any:
    """Return an array of numbers, or else a list of Python's values."""
    if hasattr(values, "__array__"):
        array = np.asarray(values)
        return array if array.dtype.kind in "biuf" else array.tolist()
    several = [values] if isinstance(values, str) else values
    return [value.item() if isinstance(value, np.generic) else value for value in several]


def _numbered(
    texts: Sequence[str], known: Sequence[str], keeps_known: bool
) -> tuple[np.ndarray, Sequence[str]]:
    """Number texts: first the known ones, unless none of them occurs, then the others, sorted."""
    found = {*texts}
    first = () if found.isdisjoint(known) and not keeps_known else tuple(known)
    united = (*first, *sorted(found - {*first}))
    number = {text: position for position, text in enumerate(united)}
    return np.array([number[text] for text in texts], np.int64), united
