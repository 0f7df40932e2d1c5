"""Other labels and columns for a data set, from a table."""

from pathlib import Path
from typing import Literal

import numpy as np

from memload.building.sources.table import list_images
from memload.editing.columns import Column, replace_columns
from memload.editing.matching import match_samples
from memload.editing.report import EditReport, check_output, report_on
from memload.storage.index import Index
from memload.wording import listed


def relabel(
    path: str | Path,
    table: str | Path,
    output: str | Path,
    *,
    missing: Literal["error", "drop"] = "error",
    key_column: str | None = None,
    label_column: str | None = None,
    overwrite: bool = False,
) -> EditReport:
    """Write an index of the data set ``path`` with the columns of a table. Pixels stay as they are.

    ``table`` is a CSV or TSV file with a line of column names, such as ``key,label``. The first
    column, or ``key_column``, has the names of samples, with or without extension: ``cat/1.jpg`` or
    ``cat/1``. The others replace the columns of the same name, or are added; `memload.Manifest`
    tells how they are read. Columns that the table lacks stay.

    Labels that are texts are the names of classes. If the data set has all of them as classes, its
    classes and their numbers stay; otherwise the classes are those of the table, sorted. Labels
    that are numbers count into the classes of the data set, if all of them do.

    Lines without a sample are skipped, which the report notes. A sample without a line is an error;
    with ``missing="drop"`` it is left out. ``output`` is the new index, in the folder of the
    pixels.

    Returns a report whose ``notes`` tell of lines that were skipped and of samples that were left
    out. Raises SourceError for a wrong table, ValueError for one that does not fit the data set,
    FileExistsError, FormatError and OSError.

    >>> memload.relabel("out.bin", "labels.csv", "new.idx")  # doctest: +SKIP
    """
    if missing not in ("error", "drop"):
        raise ValueError(f"missing: {missing!r} is neither 'error' nor 'drop'.")
    index, table = Index.open(path), Path(table)
    target = check_output(output, index.path.parent, overwrite)
    names, read = list_images(table, path_column=key_column, label_column=label_column)
    texts = dict(read.categories) | ({} if read.classes is None else {"label": read.classes})
    notes = [note for note in read.notes if not note.startswith("no labels")]  # they stay
    lines = match_samples(index, names, table.name)
    kept = _with_line(index, lines, names, table, missing, notes)
    columns = {
        name: Column(values[lines[kept]], tuple(texts[name]) if name in texts else None)
        for name, values in read.values.items()
    }
    changed = replace_columns(index.subset(kept), columns)
    if "label" in columns and index.classes is not None and changed.classes is None:
        notes.append("the labels do not count into the classes of before, which are gone")
    changed.write(target)
    return report_on(target, changed, notes)


def _with_line(
    index: Index,
    lines: np.ndarray,
    names: list[str],
    table: Path,
    missing: str,
    notes: list[str],
) -> np.ndarray:
    """Return the positions of the samples that have a line, and add notes on those left out.

    Raises ValueError if no sample has a line, or if one has none and ``missing`` is "error".
    """
    kept, without = np.flatnonzero(lines >= 0), np.flatnonzero(lines < 0).tolist()
    if not len(kept):
        raise ValueError(
            f"{table} names no sample of {index.path}. Its first name is {names[0]!r:.200}, and "
            f"the first sample is {index.keys[0]!r:.200}. Check the column of the names "
            "(--key-column)."
        )
    if without:
        count = f"{len(without):,} of {len(index):,} samples have no line in {table}"
        examples = listed([index.keys[number] for number in without[:4]], 3)
        if missing == "error":
            raise ValueError(
                f"{count}: {examples}. Add them, or leave these samples out with --missing drop "
                "(missing='drop' in Python)."
            )
        notes.append(f"{count} and are left out: {examples}")
    unused = np.setdiff1d(np.arange(len(names)), lines).tolist()
    if unused:
        examples = listed([names[number] for number in unused[:4]], 3)
        notes.append(f"{len(unused):,} of {len(names):,} lines belong to no sample: {examples}")
    return kept
