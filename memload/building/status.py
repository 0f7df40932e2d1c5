"""How far an unfinished build is: what `memload info` says of it."""

from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from memload.building.plan import read_plan
from memload.building.record import STATUS_BYTE
from memload.errors import FormatError
from memload.storage.format import index_path, output_paths


class BuildStatus(NamedTuple):
    """How far an unfinished build is. ``str()`` of it is one line."""

    path: Path  #: the output
    folder: Path  #: the folder of the unfinished build
    samples: int  #: those of the source
    samples_done: int  #: samples that are converted or rejected

    @property
    def replaces(self) -> bool:
        """Whether there is a data set now that the build replaces in the end."""
        return output_paths(self.path)[0].exists()

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON has it."""
        paths = {"path": str(self.path), "folder": str(self.folder)}
        return self._asdict() | paths | {"replaces": self.replaces}

    def __str__(self) -> str:
        share = self.samples_done / max(1, self.samples)
        return (
            f"{self.folder}: {self.samples_done:,} of {self.samples:,} rows are done "
            f"({share:.0%}). If nothing is building it now, run the same command again to go on"
        )


def build_status(path: str | Path) -> BuildStatus | None:
    """Return how far the build of a data set is, or None if there is no unfinished one.

    Args:
        path: The output, its index, or the folder ``out.building``.

    Raises BuildError if the folder is of another version of memload, or its plan is damaged.

    >>> print(memload.build_status("out.bin"))  # doctest: +SKIP
    out.building: 812,000 of 1,281,167 rows are done (63%). If nothing is building it now, run the
    same command again to go on
    """
    try:
        output = Path(path).with_suffix(".bin")
        if Path(path).suffix != ".building":
            output = index_path(path).with_suffix(".bin")
        folder = output_paths(output)[1]
        plan = read_plan(folder)
    except (FormatError, ValueError, NotADirectoryError):
        return None
    if plan is None:
        return None
    samples, rows = plan["samples"], plan["rows per shard"]
    done = sum(
        _rows_done(folder / f"{number:05d}", min(rows, samples - start))
        for number, start in enumerate(range(0, samples, rows))
    )
    return BuildStatus(output, folder, samples, done)


def _rows_done(shard: Path, rows: int) -> int:
    """Return how many rows of a shard have a record."""
    if shard.with_suffix(".done").exists():
        return rows
    with suppress(FileNotFoundError):
        data = np.fromfile(shard.with_suffix(".rows"), np.uint8)
        if data.size:  # it is made at its full size
            return int(np.count_nonzero(data.reshape(rows, -1)[:, STATUS_BYTE]))
    return 0
