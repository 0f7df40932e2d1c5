"""Sources that change the records of another source."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from memload.building.sources.record import Record, Source, optional
from memload.errors import DecodeError


class WrappedSource:
    """A source with the records of another one, ``source``, which a subclass changes.

    It has the attributes of the other source, and its optional methods if the other has them.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.classes, self.schema = source.classes, source.schema
        self.keys, self.notes = source.keys, source.notes
        found = optional(source)
        self.categories, self.arrays, self.root = found.categories, found.arrays, found.root
        self.group_starts, self.identity = found.group_starts, found.identity
        self.has_numbers_as_keys, self.label_texts = found.has_numbers_as_keys, found.label_texts
        self.is_portable = found.is_portable
        self._add_optional_methods()

    def _add_optional_methods(self) -> None:
        # Set for each object: callers ask with hasattr() what a source has, as torch does.
        if hasattr(self.source, "__getitems__"):
            self.__getitems__ = self._get_several
        if hasattr(self.source, "without_image"):
            self.without_image = self._get_without_image

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the methods, which would be pickled as calls of `getattr`."""
        methods = ("__getitems__", "without_image")
        return {name: value for name, value in vars(self).items() if name not in methods}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._add_optional_methods()

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Record:
        return self._changed(index, self.source[self._position(index)])

    def _get_without_image(self, index: int) -> Record:
        position = self._position(index)
        found = self.source.without_image(position)  # type: ignore[attr-defined]  # it has it
        return self._changed(index, found)

    def _get_several(self, indices: Sequence[int]) -> list[Record | Exception]:
        positions = [self._position(index) for index in indices]
        found = self.source.__getitems__(positions)  # type: ignore[attr-defined]  # it has it
        return list(self._changed_records(indices, found))

    def _changed_records(
        self, indices: Sequence[int], records: Sequence[Record | Exception]
    ) -> Iterator[Record | Exception]:
        for index, record in zip(indices, records, strict=True):
            try:
                yield record if isinstance(record, Exception) else self._changed(index, record)
            except DecodeError as error:
                yield error

    def _position(self, index: int) -> int:
        """Return the position of a record in the other source."""
        return index

    def _changed(self, index: int, record: Record) -> Record:
        """Return a record of the other source as this one has it. Raises DecodeError."""
        return record


def unwrapped(source: Source) -> Source:
    """Return what really reads the records."""
    while isinstance(source, WrappedSource):
        source = source.source
    return source
