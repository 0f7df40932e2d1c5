"""A build by itself: it goes on with what is in its folder, and takes in changes of the source."""

import contextlib
import functools
import logging
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from memload.building.destination import check_output, move, publish_before_another
from memload.building.journal import DONE, Journal, is_intact
from memload.building.lock import locked
from memload.building.plans import differences
from memload.building.target import RowTarget
from memload.building.workspace import (
    Workspace,
    partly_published,
    read_keys,
    read_plan,
    remove,
    remove_files,
)
from memload.building.writer import ShardWriter
from memload.errors import BuildError
from memload.storage.index import Index, sync
from memload.storage.keys import Keys

logger = logging.getLogger("memload")


class SoleWorkspace(Workspace):
    """A build by one process and its workers, with one journal for all rows."""

    #: whether the folder may hold finished rows
    resumed = False

    @property
    def how_to_begin_anew(self) -> str:
        """What to do if settings are changed."""
        return "add --overwrite (overwrite=True)"

    @functools.cached_property
    def journal(self) -> Journal:
        """The journal of all rows."""
        return Journal(self.folder, len(self.source), self.record_type)

    def target(self) -> RowTarget:
        """Return what workers have to know."""
        return self.target_of(self.journal, is_resumed=self.resumed)

    def records(self) -> np.ndarray:
        """Return the records of all rows, mapped for reading."""
        self.journal.create()
        return self.journal.mapped()

    def reasons(self) -> Mapping[int, str]:
        """Return why rows were rejected."""
        return self.journal.reasons()

    def seal(self, index: Index) -> None:
        """Put the seals into the headers of all shards, and flush them to the disk."""
        self._create_shards(self.folder, index.crc32)
        for shard in self.shards:
            sync(self.folder / shard.file)

    def _create_shards(self, folder: Path, crc32: Mapping[str, np.ndarray] | None = None) -> None:
        """Make the shards of all arrays, see `ShardWriter.create`. Rows that are there stay."""
        for array in self.arrays:
            ShardWriter(folder, array).create(None if crc32 is None else crc32[array.name])

    @contextlib.contextmanager
    def opened(self, lock_timeout: float) -> Iterator[Index | None]:
        """Hold the lock of the folder, and go on with the unfinished build in it, or begin.

        Yields the index if all but renaming is done.
        """
        with locked(self.folder, lock_timeout):
            is_new = {path.name for path in self.folder.iterdir()} <= {"lock"}
            try:
                finished_index = self._begin()
            except BaseException:  # a Ctrl-C, too, is to leave no empty folder behind
                if is_new:
                    remove(self.output)
                raise
            yield finished_index

    def _begin(self) -> Index | None:
        """Begin anew, or go on with what is in the folder.

        ===================  ==========================  ==========================
        In the folder        as when it was begun        ``overwrite`` is new now
        ===================  ==========================  ==========================
        nothing, or no plan  begin anew                  begin anew
        the same plan        go on                       begin anew
        another plan         begin anew if it is true,   begin anew
                             otherwise raise BuildError
        ===================  ==========================  ==========================

        If a build of the same plan is finished and some of its files are renamed already, only
        renaming the others is left to do, whatever ``overwrite`` is. Its index is returned then.
        A finished build of another plan is published before this one begins anew.
        """
        former_plan = read_plan(self.folder)
        if former_plan is not None and "begun" in former_plan:
            # It began after `memload.build` had looked, as opening the source takes a while.
            raise BuildError(
                f"{self.folder}: a build in parts has just begun there. Run the same command "
                "again: it does what the parts leave.",
                path=self.output,
            )
        former_overwrite = former_plan is not None and former_plan.pop("overwrite", False)
        is_same_plan = former_plan == self.plan
        finished_index = partly_published(self.output)
        if former_plan is not None and not is_same_plan and not self.overwrite:
            state, remedy = "an unfinished build", "go on with it"
            if finished_index is not None:
                state, remedy = "a finished build that is not in its place yet", "put it there"
            raise BuildError(
                f"{self.folder} holds {state}, with other settings: "
                f"{differences(former_plan, self.plan)}. Give the same settings to {remedy}, or "
                "say --overwrite to begin anew.",
                path=self.output,
            )
        if finished_index is not None:
            if is_same_plan:
                return finished_index
            publish_before_another(finished_index, self.folder, self.output, self.overwrite)
        check_output(self.output, self.arrays, self.overwrite)
        self.check_space()
        overwrite_is_new = self.overwrite and not former_overwrite
        may_go_on = is_same_plan and not overwrite_is_new
        former_keys = read_keys(self.folder / "keys") if may_go_on else None
        if former_keys is None:
            remove_files(self.output)
            self._create(self.folder)
        else:
            self._go_on(former_keys)
        return None

    def _create(self, folder: Path) -> None:
        """Make the files of a build without finished rows."""
        Journal(folder, len(self.source), self.journal.dtype).create()
        self._create_shards(folder)
        self.write_plan(folder, {**self.plan, "overwrite": self.overwrite})

    def _go_on(self, former_keys: Keys) -> None:
        """Keep the rows that are done, and see whether the source has other samples by now."""
        # An index here is of a build that was finished but not published. Rejected samples may be
        # mended by now, so it is written anew.
        (self.folder / self.index_path.name).unlink(missing_ok=True)
        if not all(map(np.array_equal, former_keys.pack(), self.keys.pack())):
            self._take_in_changes(former_keys)
        self.resumed = True
        self.journal.create()
        self._create_shards(self.folder)
        done = np.count_nonzero(self.journal.mapped()["status"] == DONE)
        logger.info(f"{self.name}: going on with an unfinished build; {done:,} rows are done")

    def _take_in_changes(self, former_keys: Keys) -> None:
        """Bring each finished row to where its sample is in the source now.

        The rows are copied to files in ``changed/``, which then replace those in the folder. If a
        crash cuts that short, it is done again. `RowWork` checks all rows afterwards.
        """
        former_journal = Journal(self.folder, len(former_keys), self.journal.dtype)
        former_journal.create()
        records = former_journal.mapped()
        without_file = np.flatnonzero(
            (records["status"] == DONE) & (records["file_state"][:, 0] < 0)
        )
        if any(is_intact(records[row]) for row in without_file):
            # The state of a file shows a change. For a sample without a file nothing does.
            raise self.target().other_data_set(
                f"it had {len(former_keys):,} samples and has {len(self.keys):,}"
            )
        former_rows = {key: row for row, key in enumerate(former_keys)}
        rows = [former_rows.get(key, -1) for key in self.keys]
        kept = len(set(rows) - {-1})
        logger.warning(
            f"{self.name}: the source has changed since the build began. Samples added: "
            f"{rows.count(-1):,}, removed: {len(former_keys) - kept:,}, kept: {kept:,}. Rows of "
            "kept samples are reused if their files are unchanged."
        )
        changed = self.folder / "changed"
        shutil.rmtree(changed, ignore_errors=True)
        changed.mkdir()
        self._create(changed)
        journal = Journal(changed, len(rows), self.journal.dtype)
        with contextlib.ExitStack() as stack:
            copies = []
            for former, array in zip(self._arrays_of(len(former_keys)), self.arrays, strict=True):
                reader, writer = ShardWriter(self.folder, former), ShardWriter(changed, array)
                reader.create()
                copies.append((reader, writer))
                stack.callback(reader.close)
                stack.callback(writer.close)
            for row, former_row in enumerate(rows):
                record = records[former_row : former_row + 1].copy()
                if former_row >= 0 and record["status"] == DONE and is_intact(record[0]):
                    for reader, writer in copies:
                        writer.write(row, reader.read(former_row))
                    journal.write(row, record, [])
        remove_files(self.output)
        for path in sorted(changed.iterdir(), key=lambda path: path.name == "plan.json"):
            move(path, self.folder)
