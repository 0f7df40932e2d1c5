"""What `memload.build` returns: what a build did, in numbers and in a line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from memload.wording import counted, listed, shape_text, size_text


class ArrayReport(NamedTuple):
    """A mask or another array that was stored beside the images."""

    name: str
    kind: str  #: ``mask`` or ``array``
    shape: tuple[int, ...]  #: of a row: (H, W) of a mask
    dtype: str  #: such as ``uint8``


@dataclass(frozen=True)
class BuildReport:
    """What a build did. ``str()`` of it is the closing line.

    If shards of a build in parts are left to others, there is no data set so far. Then
    ``is_published`` is false, and ``samples`` is 0.
    """

    path: Path  #: the output
    samples: int  #: samples in the data set
    classes: Sequence[str] | None  #: the names of the classes, if they have names
    columns: Sequence[str]  #: the names of the columns, such as ``label``
    rejected: int  #: pictures left out; the ledger says why
    bytes: int  #: size of the files of all arrays
    shape: tuple[int, ...]  #: (H, W, C)
    dtype: str  #: such as ``uint8``
    num_workers: int
    libraries: Mapping[str, str]  #: what decoded, with versions, as far as it is known
    converted: int = 0  #: pictures converted by this call, not those that were done before
    seconds: float = 0.0  #: what that took
    notes: Sequence[str] = ()  #: what the source left out, and what was done to pictures
    arrays: Sequence[ArrayReport] = ()  #: the masks and other arrays beside the images
    part: tuple[int, int] | None = None  #: i and n of a build in parts
    unfinished_shards: int = 0  #: those that others have still to build

    @property
    def ledger(self) -> Path | None:
        """Where the rejected pictures are listed, if there are any."""
        return self.path.with_suffix(".rejects.csv") if self.rejected and self.samples else None

    @property
    def is_published(self) -> bool:
        """Whether the data set is complete."""
        return not self.unfinished_shards

    @property
    def images_per_second(self) -> float:
        """Pictures converted per second."""
        return self.converted / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON has it."""
        return {
            **vars(self),
            "path": str(self.path),
            "ledger": None if self.ledger is None else str(self.ledger),
            "arrays": [array._asdict() for array in self.arrays],
            "images_per_second": round(self.images_per_second, 1),
            "is_published": self.is_published,
        }

    def __repr__(self) -> str:
        return "\n".join([str(self), *(f"note: {note}" for note in self.notes)])

    def __str__(self) -> str:
        if not self.is_published:
            number, count = self.part or (0, 1)
            left = counted(self.unfinished_shards, "shard is", "shards are")
            return f"{self.path}: part {number} of {count} is done; {left} not done yet"
        if not self.converted and self.part is not None:
            return f"{self._stored()}; published already"
        before = self.samples + self.rejected - self.converted
        kept = f", {before:,} done before" if before else ""
        ledger = f" (see {self.ledger})" if self.ledger else ""
        workers = counted(self.num_workers, "worker")
        by = f"by {workers}" if self.num_workers else "in this process"
        libraries = ", ".join(f"{name} {version}" for name, version in self.libraries.items())
        return (
            f"{self._stored()}{ledger}; "
            f"{self.images_per_second:,.0f} images/s in {self.seconds:.1f} s {by}{kept}"
            f"{'; ' * bool(libraries)}{libraries}"
        )

    def _stored(self) -> str:
        labels = "" if "label" in self.columns else ", no labels"
        if self.classes is not None:
            names = listed(self.classes, 3)
            labels = f", {counted(len(self.classes), 'class', 'classes')} ({names})"
        arrays = "".join(
            f", {array.name} {shape_text(array.shape)} {array.dtype}" for array in self.arrays
        )
        return (
            f"{self.path}: {counted(self.samples, 'sample')} of {shape_text(self.shape)} "
            f"{self.dtype}{arrays}{labels}, {size_text(self.bytes)}, {self.rejected:,} rejected"
        )
