"""Other labels and columns for a data set, from a table."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from memload.editing.columns import NewColumn, renumbered, replace_columns
from memload.editing.matching import match_samples
from memload.editing.named_lines import NamedLines
from memload.editing.report import EditReport, check_index_output, report_on
from memload.errors import SourceError
from memload.sources.columns import Columns
from memload.sources.matching import stem_of
from memload.sources.opening import read_classes
from memload.storage.index import Index
from memload.wording import counted, listed

#: What becomes of samples without a line.
Missing = Literal["error", "drop", "keep"]


def relabel(
    path: str | Path,
    table: str | Path,
    output: str | Path,
    *,
    missing: Missing = "error",
    classes: Any = None,
    key_column: str | None = None,
    label_column: str | None = None,
    overwrite: bool = False,
) -> EditReport:
    """Write an index of the data set ``path`` with the columns of a table. Pixels stay as they are.

    ``table`` is a CSV or TSV file with a line of column names, such as ``key,label``.
    ``key_column`` has the names of samples, with or without extension: ``cat/1.jpg`` or ``cat/1``.
    By default it is ``key`` in a table that `memload.export` has written, else ``file_name``, else
    the first column whose first cell is the path of an image, else the first column. The others
    replace the columns of the same name, or are added; `memload.Manifest` tells how they are read.
    Columns that the table lacks stay. Columns of text with up to 10,000 values become categories.

    ``label``, or ``label_column``, has the labels. If one of them is the name of a class, all are
    names. Classes that the data set has keep their numbers, and new ones are appended. If none of
    the names is a class, the classes are those of the table, sorted. ``classes`` gives the whole
    list instead: names, a data set that has them, or a text file. Labels that are numbers count
    into the classes of the data set, if all of them do. Other columns of text do likewise.

    Lines without a sample are skipped, which the report notes. A sample without a line is an error;
    with ``missing="drop"`` it is left out, and with ``"keep"`` it keeps the values that it has.
    ``output`` is the new index, in the folder of the pixels.

    Returns a report whose ``notes`` tell of lines that were skipped, of samples that were left out,
    and of new classes. Raises SourceError for a wrong table, ValueError for one that does not fit
    the data set, FileExistsError, FormatError and OSError.

    >>> memload.relabel("out.bin", "labels.csv", "new.idx")  # doctest: +SKIP
    """
    if missing not in get_args(Missing):
        raise ValueError(f"missing: {missing!r} is none of 'error', 'drop' and 'keep'.")
    if missing == "keep" and classes is not None:
        raise ValueError(
            "classes: no list can be given with missing='keep'. Leave out one of them."
        )
    index, table = Index.open(path), Path(table)
    target = check_index_output(output, index.path.parent, overwrite)
    if table.suffix in (".bin", ".idx"):
        raise SourceError(
            f"{table} belongs to a data set, and is no table. Give a CSV or TSV file with a line "
            "of column names, such as key,label.",
            path=table,
        )
    read = NamedLines(table, key_column)
    lines = match_samples(index, read.names, table.name)
    _check_lines(index, lines, read.names, table)
    notes = list(_notes_on_lines(index, lines, read.names, table, missing))
    kept = np.flatnonzero(lines >= 0)
    known_texts = _texts_of(index)
    if classes is not None:
        known_texts["label"] = tuple(read_classes(classes))
    columns = _columns(index, read.columns(lines[kept], known_texts, label_column), table)
    if classes is not None:
        columns["label"] = _with_classes(columns.get("label"), known_texts["label"], table)
    if missing == "keep":
        columns = {name: _merged(index, name, column, kept) for name, column in columns.items()}
    else:
        index = index.subset(kept)
    changed = replace_columns(index, columns)
    changed.write(target)
    notes = [*read.notes, *notes, *_notes_on_classes(index, changed)]
    return report_on(target, changed, notes)


def _check_lines(index: Index, lines: np.ndarray, names: Sequence[str], table: Path) -> None:
    """Raise ValueError if no sample has a line, or if one seems to have two."""
    if not (lines >= 0).any():
        raise ValueError(
            f"{table} names no sample of {index.path}. Its first name is {names[0]!r:.200}, and "
            f"the first sample is {index.keys[0]!r:.200}. Check the column of the names "
            "(--key-column)."
        )
    line_of = {stem_of(names[line]): line for line in lines[lines >= 0].tolist()}
    for line in _unused(lines, names):
        other = line_of.get(names[line])
        if other is not None:
            raise ValueError(
                f"{table.name} has {names[other]!r:.200} and {names[line]!r:.200}, which stand for "
                "the same sample. Remove one of them."
            )


def _unused(lines: np.ndarray, names: Sequence[str]) -> list[int]:
    unused: list[int] = np.setdiff1d(np.arange(len(names)), lines).tolist()
    return unused


def _notes_on_lines(
    index: Index, lines: np.ndarray, names: Sequence[str], table: Path, missing: Missing
) -> Iterator[str]:
    """Yield notes on samples without a line and lines without a sample.

    Raises ValueError if there are such samples and ``missing`` is "error".
    """
    without = np.flatnonzero(lines < 0).tolist()
    if without:
        is_one = len(without) == 1
        has_none = f"{'has' if is_one else 'have'} no line in {table}"
        count = f"{len(without):,} of {counted(len(index), 'sample')} {has_none}"
        examples = listed([index.keys[number] for number in without[:4]], 3)
        if missing == "error":
            raise ValueError(
                f"{count}: {examples}. Add them, leave these samples out with --missing drop, or "
                "let them keep what they have with --missing keep (missing='drop' or 'keep' in "
                "Python)."
            )
        are_left_out = "is left out" if is_one else "are left out"
        keep = "keeps what it has" if is_one else "keep what they have"
        yield f"{count} and {are_left_out if missing == 'drop' else keep}: {examples}"
    if unused := _unused(lines, names):
        count = f"{len(unused):,} of {counted(len(names), 'line')}"
        verb = "belongs" if len(unused) == 1 else "belong"
        yield f"{count} {verb} to no sample: {listed([names[line] for line in unused[:4]], 3)}"


def _columns(index: Index, columns: Columns, table: Path) -> dict[str, NewColumn]:
    """Return the columns of a table. Raises ValueError if one that is there could not be read."""
    stale = [name for name in columns.skipped if name in index.columns]
    if stale:
        raise ValueError(
            f"{table}: column {stale[0]!r:.80} cannot be read ({columns.skipped[stale[0]]}), and "
            "the data set has one of this name, which would stay as it is. Correct it, or leave it "
            "out of the table."
        )
    texts = dict(columns.categories)
    if columns.classes is not None:
        texts["label"] = columns.classes
    return {
        name: NewColumn(values, tuple(texts[name]) if name in texts else None)
        for name, values in columns.values.items()
    }


def _texts_of(index: Index) -> dict[str, tuple[str, ...]]:
    """Return the texts that columns count into, those of the labels included."""
    labels = {} if index.classes is None else {"label": index.classes}
    return {**index.categories, **labels}


def _with_classes(column: NewColumn | None, classes: Sequence[str], table: Path) -> NewColumn:
    """Return labels that count into a list of classes. Raises ValueError if they do not."""
    if column is None:
        raise ValueError(f"classes: {table} has no labels. Name their column with label_column.")
    unknown = [text for text in column.texts or () if text not in classes]
    values, _ = renumbered(column, tuple(classes), always=True)
    if column.texts is None and renumbered(column, tuple(classes))[1] is None:
        unknown = [str(value) for value in np.unique(values).tolist()]
    if unknown:
        raise ValueError(
            f"classes: labels of {table} are not among the {len(classes):,} classes: "
            f"{listed(unknown, 3)}. Add them to the list, or correct the table."
        )
    return NewColumn(values, tuple(classes), is_final=True)


def _merged(index: Index, name: str, column: NewColumn, kept: np.ndarray) -> NewColumn:
    """Return a column in which only these samples have new values, and all others the old ones.

    Raises ValueError if the data set has no such column.
    """
    old, known = index.columns.get(name), _texts_of(index).get(name)
    if old is None:
        raise ValueError(
            f"{name}: the data set has no such column, so samples without a line have nothing to "
            "keep. Add their lines, or leave them out with --missing drop."
        )
    values, texts = renumbered(column, known, always=True)
    if known is not None and texts is None:
        _check_numbers(name, values, known)
    if (texts is None) != (known is None) or values.shape[1:] != old.shape[1:]:
        raise ValueError(
            f"{name}: the table and the data set have values of different kinds, so samples "
            "without a line cannot keep theirs. Add their lines, or say --missing drop."
        )
    merged = old.astype(np.result_type(old, values))
    merged[kept] = values
    return NewColumn(merged, texts, column.is_final)


def _check_numbers(name: str, values: np.ndarray, known: Sequence[str]) -> None:
    """Raise ValueError if integers are not the numbers of known texts, such as classes."""
    if values.ndim > 1 or values.dtype.kind != "i":
        return
    outside = np.unique(values[(values < 0) | (values >= len(known))]).tolist()
    are_no_numbers = "is no number" if len(outside) == 1 else "are no numbers"
    raise ValueError(
        f"{name}: {listed(outside, 3)} of the table {are_no_numbers} of {listed(known, 5)}, which "
        f"count from 0 to {len(known) - 1:,}. Samples without a line keep these. Correct the "
        "table, or write the texts into it."
    )


def _notes_on_classes(before: Index, after: Index) -> Iterator[str]:
    """Yield a note if the names of the classes are others than before."""
    old, new = before.classes, after.classes
    if old is None or new == old:
        return
    if new is None:
        yield "the labels do not count into the classes of before, which are gone"
    elif new[: len(old)] == old:
        yield f"new classes, after those of before: {listed(new[len(old) :], 5)}"
    else:
        yield f"the list of classes is new: {listed(new, 5)}. Before: {listed(old, 5)}"
