"""The folder of an unfinished build: what is in it, and what becomes of it in the end.

::

    out.building/
        lock           held while a build runs; it names the process
        plan.json      the settings; an unfinished build goes on only with the same
        keys           the names of the source's samples
        rows           one record for each row, see `memload.building.journal`
        rejects.jsonl  row and reason of every rejected sample
        out*.bin       the shards of all arrays
        changed/       temporary: finished rows at their new positions, after samples were added to
                       the source or removed
        out.idx, out.rejects.csv    written last; then only renaming is left to do
        replaced.idx   the index of the data set that is being replaced, while files are renamed

Nothing in it has to be trusted after a crash, because records carry checksums. The index is renamed
last: an index in the folder without all of its shards says that only renaming is left to do. If you
begin a build with other settings then, the finished one is published first.

A build in parts has its rows elsewhere, and more in its folder: see `memload.building.parts`.
"""

import contextlib
import csv
import functools
import json
import logging
import shutil
import uuid
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from memload.building.checked_json import parse_json
from memload.building.conversion import AnySettings
from memload.building.destination import is_partly_published
from memload.building.journal import Journal, record_type
from memload.building.plans import checked_plan, plan_of
from memload.building.sources.record import Source
from memload.building.target import RowTarget
from memload.building.writer import with_shards
from memload.errors import BuildError, FormatError
from memload.storage.format import output_paths, shard_pattern
from memload.storage.index import Array, Index, Shard, sync
from memload.storage.keys import Keys
from memload.storage.shards import describe
from memload.wording import size_text

logger = logging.getLogger("memload")

#: The files of a workspace besides the lock and those named after the output.
_FILES = ("plan.json", "keys", "rows", "rejects.jsonl", "replaced.idx", "source")

#: The folders of a build in parts.
_FOLDERS = ("done", "shards")

#: What files are called until they are complete, and pickled data sets.
_PATTERNS = ("." + "[0-9a-f]" * 16 + ".tmp", "source-*.pickle")


class Workspace(ABC):
    """One build: its plan, its folder, and how that becomes a data set."""

    def __init__(
        self,
        source: Source,
        output: Path,
        settings: AnySettings,
        *,
        name: Path,
        rows_per_shard: int | None,
        overwrite: bool,
    ) -> None:
        self.source, self.settings = source, settings
        #: ``output`` is absolute, and ``name`` is what messages call it
        self.output, self.name, self.overwrite = output, name, overwrite
        self.index_path, self.folder, self.ledger = output_paths(output)
        #: the rows of a shard of any array; None for all rows
        self.rows_per_shard = rows_per_shard
        self.arrays = self._arrays_of(len(source))
        self.keys = source.keys if isinstance(source.keys, Keys) else Keys.of(list(source.keys))
        self.record_type = record_type(
            settings.shape[2], source.schema, settings.descr, settings.extra_arrays
        )
        self.libraries = settings.libraries()

    @property
    @abstractmethod
    def how_to_begin_anew(self) -> str:
        """What to do if settings are changed, for messages."""

    @abstractmethod
    def records(self) -> np.ndarray:
        """Return the records of all rows, see `record_type`."""

    @abstractmethod
    def reasons(self) -> Mapping[int, str]:
        """Return why rows were rejected."""

    @abstractmethod
    def seal(self, index: Index) -> None:
        """Put the seals into the headers of all shards, and flush them to the disk."""

    def _arrays_of(self, rows: int) -> tuple[Array, ...]:
        """Return the arrays of a build of so many rows."""
        return tuple(
            with_shards(array, self.output, rows, self.rows_per_shard)
            for array in arrays_of(self.settings)
        )

    @functools.cached_property
    def plan(self) -> dict[str, Any]:
        """What decides on the rows, see `plan_of`."""
        return plan_of(self.source, self.settings, self.rows_per_shard)

    def target_of(self, journal: Journal, *, is_resumed: bool) -> RowTarget:
        """Return what workers have to know to convert the rows of a journal."""
        return RowTarget(
            self.source,
            self.settings,
            self.output,
            self.folder,
            self.arrays,
            journal,
            is_resumed,
        )

    @property
    def shards(self) -> list[Shard]:
        """The files of all arrays."""
        return [shard for array in self.arrays for shard in array.shards]

    def write_plan(self, folder: Path, plan: Mapping[str, Any]) -> None:
        """Write the names of the samples and the plan, whose presence makes the rest count."""
        offsets, data = self.keys.pack()
        with (folder / "keys").open("wb") as file:
            np.savez(file, offsets=offsets, bytes=data)
        sync(folder / "keys")
        text = json.dumps(plan, indent=1, sort_keys=True)
        write_at_once(folder / "plan.json", text.encode("ascii"))

    def write_index(self, index: Index, reasons: Mapping[int, str]) -> Index:
        """Write the index and the ledger, and flush everything to the disk. Returns the index.

        ``reasons`` says why rows were rejected.
        """
        self.seal(index)
        (self.folder / self.ledger.name).unlink(missing_ok=True)
        if reasons:
            self.write_ledger(reasons)
        return index.write(self.folder / self.index_path.name)

    def write_ledger(self, reasons: Mapping[int, str]) -> Path:
        """Write the list of rejected samples into the folder, and return its path."""
        path = self.folder / self.ledger.name
        with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
            ledger = csv.writer(file)
            ledger.writerow(["path", "reason"])
            for row, reason in reasons.items():
                # An exception's text may hold half a surrogate pair.
                text = reason.encode("utf-8", "backslashreplace").decode()
                ledger.writerow((self.source.keys[row], text))
        sync(path)
        return path

    def check_space(self) -> None:
        """Raise BuildError if the disk has no room for what is left to write."""
        total = sum(shard.bytes for shard in self.shards)
        allocated = 0
        for shard in self.shards:
            with contextlib.suppress(OSError):  # not begun yet
                allocated += (self.folder / shard.file).stat().st_blocks * 512
        needed, free = total - allocated, shutil.disk_usage(self.folder.parent).free
        image, *others = self.arrays
        rows = describe((len(self.source), *image.shape), image.descr)
        if others:
            rows += f" with {', '.join(array.name for array in others)}"
        if needed > free:
            raise BuildError(
                f"{self.name}: the disk is too small: {rows} need {size_text(needed)}, but "
                f"{size_text(free)} are free. Make room, or choose a smaller --size or another "
                "disk.",
                path=self.output,
            )
        logger.info(f"{self.name}: {rows}, {size_text(total)}; {size_text(free)} free on the disk")


def arrays_of(settings: AnySettings) -> list[Array]:
    """Return the arrays of a build without their shards, the images first."""
    arrays = [Array("image", settings.descr, settings.shape, ())]
    for array in settings.extra_arrays:
        arrays.append(Array(array.name, array.descr, array.shape, (), array.kind))
    return arrays


def write_at_once(path: Path, data: bytes) -> None:
    """Write a file that is complete, and on the disk, as soon as it has its name."""
    temporary = path.with_name(f".{uuid.uuid4().hex[:16]}.tmp")
    temporary.write_bytes(data)
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def read_plan(folder: Path) -> dict[str, Any] | None:
    """Return the plan of an unfinished build, or None if it is missing or damaged."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return checked_plan(parse_json((folder / "plan.json").read_bytes()))
    return None


def read_keys(path: Path) -> Keys | None:
    """Return the keys of an unfinished build, or None if they are missing or damaged."""
    try:
        with np.load(path) as arrays:
            return Keys(arrays["offsets"], arrays["bytes"])
    except (FileNotFoundError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def partly_published(output: Path) -> Index | None:
    """Return the index of a finished build, some of whose files are renamed already."""
    index_path, folder, _ = output_paths(output)
    with contextlib.suppress(FormatError):  # it is missing or damaged
        index = Index.read(folder / index_path.name)
        if is_partly_published(index, folder):
            return index
    return None


def remove(output: Path) -> None:
    """Remove the folder of a build.

    The lock goes last: until then no other build can begin. Other people's files stay.
    """
    folder = output_paths(output)[1]
    remove_files(output)
    shutil.rmtree(folder / "changed", ignore_errors=True)
    (folder / "lock").unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # other files are in it, or another build's lock by now
        folder.rmdir()


def remove_files(output: Path) -> None:
    """Remove all that belongs to a build from its folder, except the lock."""
    index_path, folder, ledger = output_paths(output)
    # The index first: without shards beside it, it would pass for a build that was being
    # published. The plan next: without it, the rest is as good as gone.
    for name in (index_path.name, "plan.json"):
        (folder / name).unlink(missing_ok=True)
    for name in _FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)
    # Those of any array: another plan may have had others.
    shards = shard_pattern(output, None)
    for path in folder.iterdir():
        if (
            path.name in (*_FILES, ledger.name)
            or shards.fullmatch(path.name)
            or any(map(path.match, _PATTERNS))
        ):
            path.unlink()
