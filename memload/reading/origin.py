"""Where the index of a data set comes from: a file, several data sets, or memory.

A data set pickles its origin in place of its index, and reads the index again from there.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from memload.editing.concat import concatenate
from memload.errors import FormatError
from memload.storage.index import Index


@dataclass(frozen=True)
class IndexFile:
    """An index file: its absolute path, and the fingerprint that it had when it was opened."""

    path: str
    fingerprint: str

    def __str__(self) -> str:
        return repr(self.path)

    @classmethod
    def open(cls, path: str | Path) -> "tuple[IndexFile, Index]":
        """Return the file of a data set, and its index. Raises FormatError."""
        index = Index.open(path)
        # Absolute, since the user may change the folder, and a worker may start in another one.
        index = replace(index, path=index.path.absolute())
        return cls(str(index.path), index.fingerprint), index

    def read(self) -> Index:
        """Read the index again. Raises FormatError if it is another one by now."""
        index = Index.read(self.path)
        if index.fingerprint != self.fingerprint:
            raise FormatError(
                f"{self.path} is another data set (fingerprint {index.fingerprint[:8]}…) than the "
                f"one opened before ({self.fingerprint[:8]}…): it was built again meanwhile. Open "
                "it anew.",
                path=Path(self.path),
            )
        return index


@dataclass(frozen=True)
class InMemory:
    """An index that is in no file, such as one with other columns. It is pickled whole."""

    index: Index

    def __str__(self) -> str:
        return repr(str(self.index.path))

    def read(self) -> Index:
        """Return the index."""
        return self.index


class Member(NamedTuple):
    """A data set of several, or those of its samples that a view of it has, int64 ``(n,)``."""

    origin: "Origin"
    chosen: np.ndarray | None


@dataclass(frozen=True)
class Concatenation:
    """Several data sets, one after another, united in memory.

    ``names`` are the columns and arrays that are used. Others may differ: other arrays are left
    out, and so are other columns that differ. None means all, and all must be the same.
    """

    members: tuple[Member, ...]
    names: tuple[str, ...] | None

    def __str__(self) -> str:
        return f"[{', '.join(str(member.origin) for member in self.members)}]"

    def read(self) -> Index:
        """Read all indexes again, and unite them. Raises FormatError."""
        whole = [member.origin.read() for member in self.members]
        chosen = [member.chosen for member in self.members]
        return self.united(
            [
                index if samples is None else index.subset(samples)
                for index, samples in zip(whole, chosen, strict=True)
            ],
            [fingerprint_of(index, samples) for index, samples in zip(whole, chosen, strict=True)],
        )

    def united(self, indexes: Sequence[Index], fingerprints: Sequence[str]) -> Index:
        """Return the index of all samples. Raises ValueError if the data sets do not fit together.

        Its fingerprint follows from those of the members, so that it is the same if they are moved.
        """
        if self.names is None:
            index = concatenate(indexes)
        else:
            indexes = [_with_arrays(index, self.names) for index in indexes]
            index = concatenate(indexes, columns="common", required=self.names)
        digest = hashlib.sha256("".join(fingerprints).encode()).hexdigest()
        return replace(index, fingerprint=digest)


Origin = IndexFile | Concatenation | InMemory


def fingerprint_of(index: Index, chosen: np.ndarray | None) -> str:
    """Return the fingerprint of a data set or, if samples are chosen, of a view of them."""
    if chosen is None:
        return index.fingerprint
    whole = index.fingerprint.encode()
    return hashlib.sha256(whole + chosen.astype("<i8").tobytes()).hexdigest()


def _with_arrays(index: Index, names: Sequence[str]) -> Index:
    """Return an index without the arrays that are not among these names."""
    arrays = tuple(a for a in index.arrays if a.name == "image" or a.name in names)
    return replace(index, arrays=arrays)
