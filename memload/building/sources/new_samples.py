"""Only those samples of a source that a data set does not have."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from memload.building.sources.record import Source, optional
from memload.building.sources.wrapped import WrappedSource
from memload.errors import NothingNewError
from memload.storage.index import Index
from memload.storage.keys import Keys
from memload.wording import listed

#: The settings of pictures that concatenated data sets should have in common.
_SHARED_SETTINGS = ("fit", "interpolation", "fast", "exif", "background", "fill", "mask_fill")


class NewSamples(WrappedSource):
    """Those samples of a source whose keys a data set of memload's does not have.

    ``dataset`` is the path of the data set. Only keys are compared: a file that has changed is not
    new, and an image that was rejected is. Classes and categories are those of the whole source.
    Raises FormatError, and NothingNewError if no sample is new.

    >>> more = NewSamples(memload.ImageFolder("images"), "out.bin")  # doctest: +SKIP
    """

    def __init__(self, source: Source, dataset: str | Path) -> None:
        super().__init__(source)
        index = Index.open(dataset)
        known = set(index.keys)
        self._positions = np.flatnonzero([key not in known for key in source.keys])
        if not len(self._positions):
            raise NothingNewError(
                f"Nothing is new: {dataset} has all {len(source):,} samples of the source, so "
                "nothing was built.",
                path=dataset,
            )
        keys = source.keys if isinstance(source.keys, Keys) else Keys.of(list(source.keys))
        self.keys = keys.take(self._positions)
        if self.group_starts is not None:
            starts = np.searchsorted(self._positions, self.group_starts)
            self.group_starts = np.unique(starts).tolist()
        known_samples = len(source) - len(self._positions)
        note = f"{known_samples:,} of {len(source):,} samples are left out: {dataset} has "
        if known_samples or not known:
            note += "them"
        else:  # perhaps since one was built from a folder above or below
            note += (
                f"none of their names. The first is {source.keys[0]!r:.200}, and that of {dataset} "
                f"is {index.keys[0]!r:.200}. If these are the same samples, build from the same "
                "folder as then"
            )
        self.notes = [*source.notes, note, *_different_arrays(dataset, index, source)]

    def __len__(self) -> int:
        return len(self._positions)

    def _position(self, index: int) -> int:
        return int(self._positions[index])


def _different_arrays(dataset: str | Path, index: Index, source: Source) -> Iterator[str]:
    """Yield a note if the source has other masks and arrays than the data set."""
    before = sorted(array.name for array in index.arrays if array.name != "image")
    here = sorted(optional(source).arrays)
    if before != here:
        yield (
            f"other masks and arrays than those of {dataset}: {listed(before) or 'none'} there and "
            f"{listed(here) or 'none'} here (--masks, --array)"
        )


def size_and_mode(dataset: str | Path, size: Any, mode: Any) -> tuple[Any, Any]:
    """Return size and mode for more samples of a data set: where they are None, its own."""
    index = Index.open(dataset)
    return index.image.shape[:2] if size is None else size, mode or index.setting("mode")


def different_settings(dataset: str | Path, settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield a note if other settings make other pictures of the new samples."""
    index = Index.open(dataset)
    differences = [
        f"{name} {before} there and {settings[name]} here"
        for name in _SHARED_SETTINGS
        if (before := index.setting(name)) is not None and settings.get(name, before) != before
    ]
    if differences:
        yield f"other settings than those of {dataset}: {', '.join(differences)}"
