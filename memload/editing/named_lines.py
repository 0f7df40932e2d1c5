"""The lines of a table about the samples of a data set, by their names."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from memload.errors import SourceError
from memload.sources.columns import MAX_CATEGORIES, Columns
from memload.sources.tables import KEY, PATH, image_column, read_table, typed


class NamedLines:
    """The lines of a table about the samples of a data set, by their names.

    ``key_column`` has the names. By default it is ``key`` of a table that ``memload export`` has
    written, or else the column that a build takes for the paths. Raises SourceError.
    """

    def __init__(self, path: Path, key_column: str | None = None) -> None:
        #: what the user should know
        self.notes: list[str] = []
        self._path, self._table = path, read_table(path, {}, self.notes)
        self._is_exported = {PATH, KEY} <= self._table.keys()
        column = key_column or (KEY if self._is_exported else image_column(self._table, self.notes))
        if column not in self._table:
            raise SourceError(f"{path}: there is no column {column!r:.80}. Name another one.")
        self.names: Sequence[str] = [*map(str, self._table[column])]
        for name in {column, *((KEY, PATH) if self._is_exported else ())}:
            self._table.pop(name)

    def columns(
        self,
        lines: np.ndarray,
        known_texts: Mapping[str, Collection[str]],
        label_column: str | None = None,
    ) -> Columns:
        """Return the columns, with the values of these lines, int64 ``(n,)``.

        ``known_texts`` are the texts of columns that the data set has, such as its classes. A
        column in which one of them occurs is text.
        """
        positions = lines.tolist()
        cells: dict[str, Any] = {
            name: [values[line] for line in positions] for name, values in self._table.items()
        }
        if label_column is not None and label_column not in cells:
            raise SourceError(f"{self._path}: there is no column {label_column!r:.80}.")
        label = label_column or next((each for each in ("label", "class") if each in cells), None)
        found, skipped = typed(self._path, cells, label)
        columns = Columns(skipped=skipped)
        for name, values in found.items():
            stored = "label" if name == label else name
            known = known_texts.get(stored, ())
            if not {*known}.isdisjoint(map(str, cells[name])):
                values = [*map(str, cells[name])]
            is_kept = self._is_exported or stored in known_texts
            is_kept = is_kept or len({*map(str, cells[name])}) <= MAX_CATEGORIES
            columns.add_values(stored, values, is_kept=is_kept)
        self._check_labels(columns)
        self.notes += columns.finish().notes
        return columns

    def _check_labels(self, columns: Columns) -> None:
        labels = columns.values.get("label", np.zeros(0))
        if np.isnan(labels).any() or "" in (columns.classes or ()):
            raise SourceError(
                f"{self._path}: labels are missing. Fill them in, or remove these lines.",
                path=self._path,
            )
