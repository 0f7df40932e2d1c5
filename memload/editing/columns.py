"""Other columns for a data set: labels, texts, numbers and arrays of all samples."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
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
            texts or numbers, or an array or a tensor ``(n, …)``. None is a missing number or an
            empty text. Texts of ``label`` are names of classes; those of other columns are
            categories. Classes and texts that the data set has keep their numbers, and others
            follow. If none is known, the new ones are sorted. Integers that count into the texts
            of the data set keep these texts. Points and boxes stay such if the shape fits.

    Raises ValueError for a wrong name, length or value, and FormatError.

    >>> weights = [1.0, 0.5, 2.0]
    >>> memload.with_columns("out.bin", weight=weights).write("weighted.idx")  # doctest: +SKIP
    """
    index = index_of(dataset)
    values, texts, moving = dict(index.columns), index.texts, {*index.points, *index.boxes}
    for name, new in columns.items():
        numbers, new_texts = _typed(index, name, new, texts.pop(name, ()))
        if len(numbers) != len(index):
            raise ValueError(
                f"{name}: there are {len(numbers):,} values for {len(index):,} samples of "
                f"{index.path.name}. Give a value for each sample."
            )
        if name in moving and numbers.shape[2:] == values[name].shape[2:]:
            numbers = numbers.astype(values[name].dtype)
        else:
            moving.discard(name)
        values[name] = numbers
        texts |= {name: new_texts} if new_texts else {}
    return replace_columns(index, values, texts, moving)


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
    categories, statistics = dict(texts), dict(index.statistics)
    classes = categories.pop("label", None)
    statistics.pop("class_counts", None)
    if classes is not None:
        statistics["class_counts"] = class_counts(values["label"], len(classes))
    return replace(
        index,
        columns=values,
        classes=classes,
        categories=categories,
        points=tuple(name for name in index.points if name in moving),
        boxes=tuple(name for name in index.boxes if name in moving),
        statistics=statistics,
        fingerprint="",
    )


def _typed(
    index: Index, name: str, values: Any, known: Sequence[str]
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return a column ``(n, …)``, and the texts that it counts into, if it does."""
    columns = Columns()
    columns.add_values(name, _numbers_or_list(values), known=known)
    if any(array.name == name for array in index.arrays):
        columns.skipped[name] = "its name is taken"
    if name in columns.skipped:
        raise ValueError(
            f"{name:.80}: {columns.skipped[name]}. Give another name, or all texts, all numbers, "
            "or arrays of one shape."
        )
    numbers = columns.values[name]
    texts = (columns.classes if name == "label" else columns.categories.get(name)) or known
    is_whole = numbers.ndim == 1 and numbers.dtype.kind == "i"
    is_count = is_whole and bool(np.all((numbers >= 0) & (numbers < len(texts))))
    return numbers, tuple(texts) if is_count else ()


def _numbers_or_list(values: Any) -> Any:
    """Return an array of numbers, or else a list of Python's values."""
    if hasattr(values, "__array__"):
        array = np.asarray(values)
        return array if array.dtype.kind in "biuf" else array.tolist()
    several = [values] if isinstance(values, str) else values
    return [value.item() if isinstance(value, np.generic) else value for value in several]
