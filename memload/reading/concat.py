"""Where the samples of a data set come from: one index file, or several data sets read as one.

MemmapDataset ─▶ Origin ─▶ pickled ─▶ Origin.read ─▶ the same Index, in another process
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from memload.editing.concat import concatenate
from memload.errors import FormatError
from memload.storage.index import Index


@dataclass(frozen=True, eq=False)
class Origin:
    """What a data set pickles in place of its index.

    ``source`` is the absolute path of an index file, or the origins of several data sets that are
    read one after another. ``source_fingerprint`` is that of all samples of the source, as it was
    when it was opened. ``names`` are the columns and arrays that several data sets have to agree
    in; None means all. ``chosen`` are the samples of a view, int64 ``(n,)``; None means all.
    """

    source: "str | tuple[Origin, ...]"
    source_fingerprint: str
    names: tuple[str, ...] | None = None
    chosen: np.ndarray | None = None

    def __str__(self) -> str:
        if isinstance(self.source, str):
            return repr(self.source)
        return f"[{', '.join(map(str, self.source))}]"

    @property
    def fingerprint(self) -> str:
        """64 hexadecimal digits that identify the samples, and their order."""
        if self.chosen is None:
            return self.source_fingerprint
        source = self.source_fingerprint.encode()
        return hashlib.sha256(source + self.chosen.astype("<i8").tobytes()).hexdigest()

    def read(self) -> Index:
        """Return the index of all samples of the source, which is read again.

        Raises FormatError if an index file is another one by now.
        """
        if not isinstance(self.source, str):
            wholes = [part.read() for part in self.source]
            indexes = [
                whole if part.chosen is None else whole.subset(part.chosen)
                for part, whole in zip(self.source, wholes, strict=True)
            ]
            return unite(self.source, indexes, self.names)[1]
        index = Index.read(self.source)
        if index.fingerprint != self.source_fingerprint:
            raise FormatError(
                f"{self.source} is another data set (fingerprint {index.fingerprint[:8]}…) than "
                f"the one opened before ({self.source_fingerprint[:8]}…): it was built again "
                "meanwhile. Open it anew.",
                path=Path(self.source),
            )
        return index


def open_index(path: str | Path) -> tuple[Origin, Index]:
    """Read the index of a data set. Raises FormatError, and MissingError if there is none."""
    index = Index.open(path)
    # Absolute, since the user may change the folder, and a worker may start in another one.
    index = replace(index, path=index.path.absolute())
    return Origin(str(index.path), index.fingerprint), index


def unite(
    origins: Sequence[Origin], indexes: Sequence[Index], names: Sequence[str] | None
) -> tuple[Origin, Index]:
    """Return several data sets as one, their samples one after another, united in memory.

    They must agree in the columns and arrays that ``names`` lists; other arrays are left out, and
    so are other columns that differ. The fingerprint follows from those of the data sets, so it
    stays the same if files are moved. Raises ValueError if the data sets do not fit together.
    """
    fingerprints = "".join(origin.fingerprint for origin in origins)
    fingerprint = hashlib.sha256(fingerprints.encode()).hexdigest()
    if names is not None:
        names = tuple(names)
        indexes = [
            replace(index, arrays=tuple(a for a in index.arrays if a.name in ("image", *names)))
            for index in indexes
        ]
    index = replace(concatenate(indexes, names), fingerprint=fingerprint)
    return Origin(tuple(origins), fingerprint, names), index
