"""The folder of a build in parts: which shards are done, and their journals as one."""

import contextlib
import functools
import json
import logging
import os
import re
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from memload.building.checked_json import read_record
from memload.building.journal import REJECTED, Journal, crc32_field
from memload.building.lock import Holder, Lock, is_locked
from memload.building.progress import Show
from memload.building.rows import OnError, convert_rows
from memload.building.workspace import Workspace, read_plan
from memload.building.writer import ShardWriter
from memload.errors import BuildError
from memload.storage.index import Index, sync
from memload.wording import counted

logger = logging.getLogger("memload")

#: Ends the name of a file in ``done/`` whose shard has to be built again.
_AGAIN = ".again"

#: What `_name` returns.
_SHARD_NAME = re.compile(r"[0-9]{5}|[1-9][0-9]{5,8}")

#: The part i of n.
Part = tuple[int, int]


class DoneShard(NamedTuple):
    """A shard that is complete on the disk: the file in ``done/``."""

    machine: str
    process: int
    work: str  #: such as ``part 0 of 8``
    rows: int
    rejected: int
    converted: int  #: rows that the last call converted
    seconds: float  #: what that took
    crc32: int  #: of the records in the journal


class Running(NamedTuple):
    """How shards are built, which does not change the result. ``work`` is for messages."""

    num_workers: int
    timeout: float
    lock_timeout: float
    on_error: OnError
    work: str


class PartsWorkspace(Workspace):
    """A build whose shards have a journal and a lock each, for several machines to share."""

    _records: np.ndarray | None = None

    @property
    def how_to_begin_anew(self) -> str:
        """What to do if settings are changed."""
        return f"delete {self.folder}"

    @functools.cached_property
    def plan(self) -> dict[str, Any]:
        """The plan. Parts on machines with other versions of memload are refused."""
        from memload import __version__

        return {**super().plan, "memload": __version__}

    @functools.cached_property
    def starts(self) -> list[int]:
        """The first row of each shard, and the end."""
        rows = [shard.rows for shard in self.arrays[0].shards]
        starts: list[int] = np.cumsum([0, *rows]).tolist()
        return starts

    @property
    def num_shards(self) -> int:
        """The number of shards of each array."""
        return len(self.starts) - 1

    def rows_of(self, shard: int) -> int:
        """Return how many rows a shard has."""
        return self.starts[shard + 1] - self.starts[shard]

    def is_in_folder(self) -> bool:
        """Return whether the folder still holds this build: it may be published by now."""
        return (read_plan(self.folder) or {}).get("plan") == self.plan

    def lock_of(self, shard: int) -> Lock:
        """Return the lock of a shard. Whoever builds it has to hold this alone."""
        path = shard_folder(self.folder, shard)
        path.parent.mkdir(exist_ok=True)
        return Lock(path, within=self.folder / "lock")

    def done(self) -> set[int]:
        """Return the shards that are done. One whose file was removed since is not."""
        names = names_in(self.folder)
        return {shard for shard in self._said_done() if names.issuperset(self._files_of(shard))}

    def reopened(self) -> set[int]:
        """Return the shards that were done and have to be built again, by whichever part comes."""
        names = names_in(self.folder / "done")
        return {shard for shard in range(self.num_shards) if _name(shard) + _AGAIN in names}

    def reopen_missing(self) -> None:
        """Let shards count as not done whose files were removed since, and say so."""
        names = names_in(self.folder)
        for shard in self._said_done():
            missing = [file for file in self._files_of(shard) if file not in names]
            if missing:
                logger.warning(
                    f"{self.folder / missing[0]} is missing, so this shard is built again"
                )
                self.reopen(shard)

    def reopen(self, shard: int) -> None:
        """Let a shard count as not done. Its rows are checked when it is built again."""
        path = self.folder / "done" / _name(shard)
        path.parent.mkdir(exist_ok=True)
        if path.exists():
            path.replace(path.with_name(path.name + _AGAIN))
        else:
            path.with_name(path.name + _AGAIN).touch()

    def reopen_rejects(self) -> None:
        """Let shards with rejected samples count as not done, so that these are tried again."""
        for shard in self._said_done():
            done = read_done(self.folder, shard)
            if done is None or done.rejected:
                self.reopen(shard)

    def check(self) -> None:
        """Look at the files of all shards, which have to be done. Pixels are not read.

        Raises BuildError if some were changed since: these shards count as not done then.
        """
        damaged = {}
        for shard in range(self.num_shards):
            what = self._damage(shard)
            if what:
                damaged[shard] = what
                self.reopen(shard)
        if damaged:
            raise BuildError(
                f"{self.name}: {counted(len(damaged), 'shard')} of {self.num_shards:,} changed "
                f"after they were done: {next(iter(damaged.values()))}. Run the same command "
                "again: it builds only these again.",
                path=self.output,
            )

    def is_done(self, shard: int) -> bool:
        """Return whether a shard is done."""
        return _name(shard) in names_in(self.folder / "done")

    def build_shard(self, shard: int, lock: Lock, running: Running, show: Show) -> int:
        """Convert what is not done of a shard whose ``lock`` is held, and put it on the disk.

        Returns how many rows were converted.
        """

        def show_life(done: int, rejected: int | None) -> None:
            lock.show_life()
            show(done, rejected)

        began, journal = time.monotonic(), self._journal_of(shard)
        is_resumed = (journal.folder / "rows").exists()
        journal.create()
        before = np.count_nonzero(journal.mapped()["status"]) if is_resumed else 0
        (journal.folder / "begun").write_text(str(before))  # for the speed in `memload info`
        writers = [ShardWriter(self.folder, array) for array in self.arrays]
        for writer in writers:
            writer.create_shard(shard)
        converted = convert_rows(
            self.target_of(journal, is_resumed=is_resumed),
            num_workers=min(running.num_workers, journal.rows),
            timeout=running.timeout,
            on_error=running.on_error,
            show=show_life,
            discard=journal.remove,
        )
        with lock.alive():  # to flush a large shard may take long
            records = self._seal_shard(shard, journal, writers)
        here = Holder.here(running.work)
        rejected = int(np.count_nonzero(records["status"] == REJECTED))
        seconds = time.monotonic() - began
        done = DoneShard(
            *here, journal.rows, rejected, converted, round(seconds, 3), _crc32(records)
        )
        self._write_done(shard, done)
        return converted

    def _seal_shard(
        self, shard: int, journal: Journal, writers: Sequence[ShardWriter]
    ) -> np.ndarray:
        """Complete the headers of a shard's files, and flush these. Returns its records."""
        records = journal.mapped()
        for writer in writers:
            crc32 = np.ascontiguousarray(records[crc32_field(writer.array.name)])
            writer.create_shard(shard, crc32)
            sync(self.folder / writer.array.shards[shard].file)
        journal.sync()
        for folder in (journal.folder.parent, self.folder):  # the names of what is in them
            sync(folder)
        return records

    def records(self) -> np.ndarray:
        """Return a copy of the records of all rows. All shards have to be done."""
        if self._records is None:
            self._records = np.empty(self.starts[-1], self.record_type)
            for shard in range(self.num_shards):
                journal = self._journal_of(shard)
                rows = slice(journal.first_row, journal.stop_row)
                self._records[rows] = journal.read(journal.first_row, journal.stop_row)
        return self._records

    def reasons_in(self, shards: Iterable[int]) -> dict[int, str]:
        """Return why rows of shards that are done are rejected."""
        found: dict[int, str] = {}
        for shard in sorted(shards):
            done, journal = read_done(self.folder, shard), self._journal_of(shard)
            if done is not None and done.rejected:
                rows = np.flatnonzero(journal.mapped()["status"] == REJECTED) + journal.first_row
                reasons = journal.reasons()
                found |= {row: reasons.get(row, "") for row in rows.tolist()}
        return found

    def reasons(self) -> Mapping[int, str]:
        """Return why rows were rejected."""
        reasons: dict[int, str] = {}
        for shard in range(self.num_shards):
            reasons |= self._journal_of(shard).reasons()
        return reasons

    def seal(self, index: Index) -> None:
        """Do nothing: whoever built a shard has sealed and flushed it."""

    def _said_done(self) -> list[int]:
        return [shard for shard in done_shards(self.folder) if shard < self.num_shards]

    def _files_of(self, shard: int) -> list[str]:
        return [array.shards[shard].file for array in self.arrays]

    def _damage(self, shard: int) -> str:
        """Say what is wrong with the files of a shard that is done."""
        done, journal = read_done(self.folder, shard), self._journal_of(shard)
        if done is None:
            return f"{self.folder / 'done' / _name(shard)} is missing or damaged"
        for array in self.arrays:
            path, size = self.folder / array.shards[shard].file, array.shards[shard].bytes
            found = path.stat().st_size if path.exists() else 0
            if found != size:
                return f"{path} has {found:,} bytes instead of {size:,}"
        try:
            records = journal.mapped()
        except (OSError, ValueError):  # it is gone, or too short
            records = np.zeros(0, journal.dtype)
        if _crc32(records) != done.crc32:
            return f"{journal.folder / 'rows'} is missing or has other bytes"
        if done.rejected:
            rejected = journal.first_row + np.flatnonzero(records["status"] == REJECTED)
            if not set(rejected.tolist()) <= journal.reasons().keys():
                return f"{journal.folder / 'rejects.jsonl'} is missing or damaged"
        return ""

    def _journal_of(self, shard: int) -> Journal:
        return Journal(
            shard_folder(self.folder, shard),
            self.rows_of(shard),
            self.record_type,
            first_row=self.starts[shard],
        )

    def _write_done(self, shard: int, done: DoneShard) -> None:
        folder = self.folder / "done"
        folder.mkdir(exist_ok=True)
        temporary = shard_folder(self.folder, shard) / "done"
        temporary.write_text(json.dumps(done._asdict()), encoding="ascii")
        sync(temporary)
        temporary.replace(folder / _name(shard))
        (folder / (_name(shard) + _AGAIN)).unlink(missing_ok=True)
        sync(folder)


def build_locked(
    workspace: PartsWorkspace, shard: int, lock: Lock, running: Running, show: Show
) -> int:
    """Build a shard whose lock is held, unless it is done, and release the lock.

    Returns how many rows were converted.
    """
    try:
        if workspace.is_done(shard):
            show(workspace.rows_of(shard), 0)
            return 0
        return workspace.build_shard(shard, lock, running, show)
    finally:
        lock.release()


def work_of(part: Part | None) -> str:
    """Return what messages call a part."""
    return "" if part is None else f"part {part[0]} of {part[1]}"


def part_of_work(work: str) -> Part | None:
    """Return the part that `work_of` gave a text; None for all other texts.

    >>> part_of_work("part 0 of 8")
    (0, 8)
    """
    match = re.fullmatch(r"part ([0-9]{1,9}) of ([0-9]{1,9})", work)
    part = (int(match[1]), int(match[2])) if match else (0, 0)
    return part if part[0] < part[1] else None


def is_in_parts(folder: Path) -> bool:
    """Return whether the build of a folder was begun in parts, or is being begun.

    The plan may be damaged or missing then.
    """
    plan = read_plan(folder)
    if plan is not None:
        return "begun" in plan
    is_damaged = "plan.json" in names_in(folder) or bool(done_shards(folder))
    # A build by itself says nothing of its work.
    is_begun_now = is_locked(folder) and bool(Holder.of(folder / "lock").work)
    return is_begun_now or (is_damaged and "shards" in names_in(folder))


def shard_folder(folder: Path, shard: int) -> Path:
    """Return where the lock and the journal of a shard are."""
    return folder / "shards" / _name(shard)


def done_shards(folder: Path) -> list[int]:
    """Return the shards that are done, in order."""
    return sorted(shards_in(folder / "done"))


def shards_in(folder: Path) -> set[int]:
    """Return the shards that the names in a folder are those of. Other names are passed over.

    NFS keeps files that are removed while they are open, under names of its own, and macOS adds
    ``.DS_Store``.
    """
    return {int(name) for name in names_in(folder) if _SHARD_NAME.fullmatch(name)}


def read_done(folder: Path, shard: int) -> DoneShard | None:
    """Return who built a shard, or None if that is missing or damaged."""
    return read_record(DoneShard, done_file(folder, shard))


def done_file(folder: Path, shard: int) -> Path:
    """Return the file that says that a shard is done."""
    return folder / "done" / _name(shard)


def rows_before(folder: Path) -> int:
    """Return how many rows of a shard were finished when its holder began."""
    with contextlib.suppress(OSError, ValueError):  # it is being written
        return int((folder / "begun").read_text())
    return 0


def names_in(folder: Path) -> set[str]:
    """Return the names in a folder; none if it is missing.

    Whether a file exists is asked in this way, since a client of NFS may remember for a minute that
    there was none. It asks the server again when a folder is opened.
    """
    with contextlib.suppress(FileNotFoundError):
        return set(os.listdir(folder))  # noqa: PTH208  # no paths of thousands of names
    return set()


def _crc32(records: np.ndarray) -> int:
    return zlib.crc32(records.tobytes())


def _name(shard: int) -> str:
    return f"{shard:05d}"
