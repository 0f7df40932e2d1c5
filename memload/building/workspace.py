"""The folder of an unfinished build: going on with it, and renaming it into place in the end.

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
"""

import contextlib
import csv
import json
import logging
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from memload.building.conversion import AnySettings
from memload.building.destination import (
    check_output,
    is_partly_published,
    move,
    publish_before_another,
)
from memload.building.journal import DONE, STATUS_BYTE, Journal, is_intact, record_type
from memload.building.lock import is_locked, locked
from memload.building.plans import differences, plan_of
from memload.building.sources.record import Source
from memload.building.writer import ShardWriter, rows_per_shard, with_shards
from memload.errors import BuildError, FormatError
from memload.storage.format import output_paths, shard_pattern
from memload.storage.index import Array, Index, Shard, sync
from memload.storage.keys import Keys
from memload.storage.shards import describe
from memload.wording import size_text

logger = logging.getLogger("memload")

#: The files of a workspace besides the lock and those named after the output.
_FILES = ("plan.json", "keys", "rows", "rejects.jsonl", "replaced.idx")

#: What `Index.write` calls an index until it is complete.
_TEMPORARY_INDEX = "." + "[0-9a-f]" * 16 + ".tmp"


class Workspace:
    """One build: its plan, its folder, and how that becomes a data set.

    Every worker has a copy of it.
    """

    def __init__(
        self,
        source: Source,
        output: Path,
        settings: AnySettings,
        *,
        name: Path,
        shard_size: int | None,
        overwrite: bool,
    ) -> None:
        self.source, self.settings = source, settings
        #: ``output`` is absolute, and ``name`` is what messages call it
        self.output, self.name, self.overwrite = output, name, overwrite
        self.index_path, self.folder, self.ledger = output_paths(output)
        #: the arrays without their shards, the images first
        self._kinds = [Array("image", settings.descr, settings.shape, ())]
        for array in settings.extra_arrays:
            self._kinds.append(Array(array.name, array.descr, array.shape, (), array.kind))
        #: of each array; None for all rows
        self.rows_per_shard = {
            array.name: rows_per_shard(array, shard_size) for array in self._kinds
        }
        self.arrays = self._arrays_of(len(source))
        self.keys = source.keys if isinstance(source.keys, Keys) else Keys.of(list(source.keys))
        record = record_type(
            settings.shape[2], source.schema, settings.descr, settings.extra_arrays
        )
        self.journal = Journal(self.folder, len(source), record)
        self.libraries = settings.libraries()
        self.plan = plan_of(source, settings, self.rows_per_shard)
        #: whether the folder may hold finished rows
        self.resumed = False

    def _arrays_of(self, rows: int) -> tuple[Array, ...]:
        """Return the arrays of a build of so many rows."""
        return tuple(
            with_shards(array, self.output, rows, self.rows_per_shard[array.name])
            for array in self._kinds
        )

    @property
    def _shards(self) -> list[Shard]:
        return [shard for array in self.arrays for shard in array.shards]

    def _create_shards(self, folder: Path, crc32: Mapping[str, np.ndarray] | None = None) -> None:
        """Make the shards of all arrays, see `ShardWriter.create`. Rows that are there stay."""
        for array in self.arrays:
            ShardWriter(folder, array).create(None if crc32 is None else crc32[array.name])

    @contextlib.contextmanager
    def opened(self) -> Iterator[Index | None]:
        """Hold the lock of the folder, and go on with the unfinished build in it, or begin.

        Yields the index if all but renaming is done.
        """
        with locked(self.folder):
            is_new = {path.name for path in self.folder.iterdir()} <= {"lock"}
            try:
                finished_index = self._begin()
            except BaseException:  # a Ctrl-C, too, is to leave no empty folder behind
                if is_new:
                    self.remove()
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
        former_plan = None
        with contextlib.suppress(FileNotFoundError, ValueError, TypeError):  # missing or damaged
            text = (self.folder / "plan.json").read_text(encoding="ascii")
            former_plan = dict(json.loads(text))
        former_overwrite = former_plan is not None and former_plan.pop("overwrite", False)
        is_same_plan = former_plan == self.plan
        finished_index = self._partly_published()
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
        self._check_space()
        overwrite_is_new = self.overwrite and not former_overwrite
        may_go_on = is_same_plan and not overwrite_is_new
        former_keys = _read_keys(self.folder / "keys") if may_go_on else None
        if former_keys is None:
            self._remove_files()
            self._create(self.folder)
        else:
            self._go_on(former_keys)
        return None

    def _partly_published(self) -> Index | None:
        """Return the index of a finished build, some of whose files are renamed already."""
        with contextlib.suppress(FormatError):  # it is missing or damaged
            index = Index.read(self.folder / self.index_path.name)
            if is_partly_published(index, self.folder):
                return index
        return None

    def _create(self, folder: Path) -> None:
        """Make the files of a build without finished rows."""
        Journal(folder, len(self.source), self.journal.dtype).create()
        self._create_shards(folder)
        offsets, data = self.keys.pack()
        with (folder / "keys").open("wb") as file:
            np.savez(file, offsets=offsets, bytes=data)
        sync(folder / "keys")
        # The plan last: without it, the rest is as good as gone.
        plan = folder / "plan.json"
        content = {**self.plan, "overwrite": self.overwrite}
        plan.write_text(json.dumps(content, indent=1, sort_keys=True), encoding="ascii")
        sync(plan)
        sync(folder)

    def _go_on(self, former_keys: Keys) -> None:
        """Keep the rows that are done, and see whether the source has other samples by now."""
        # An index here is of a build that was finished but not published. Rejected samples may be
        # mended by now, so it is written anew.
        (self.folder / self.index_path.name).unlink(missing_ok=True)
        if not all(map(np.array_equal, former_keys.pack(), self.keys.pack())):
            self._take_in_changes(former_keys)
        self.resumed = True
        self.journal.create()  # at full size, should they be damaged
        self._create_shards(self.folder)
        done = np.count_nonzero(self.journal.mapped()["status"] == DONE)
        logger.info(f"{self.name}: going on with an unfinished build; {done:,} rows are done")

    def other_data_set(self, difference: str) -> BuildError:
        """Return the error for an unfinished build of another data set. It says what differs."""
        return BuildError(
            f"{self.folder} holds an unfinished build of another data set: {difference}. Give the "
            "same data set to go on with it, or delete that folder to begin anew.",
            path=self.output,
        )

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
            raise self.other_data_set(
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
                reader.create()  # at full size, should they be damaged
                copies.append((reader, writer))
                stack.callback(reader.close)
                stack.callback(writer.close)
            for row, former_row in enumerate(rows):
                record = records[former_row : former_row + 1].copy()
                if former_row >= 0 and record["status"] == DONE and is_intact(record[0]):
                    for reader, writer in copies:
                        writer.write(row, reader.read(former_row))
                    journal.write(row, record, [])
        self._remove_files()
        for path in sorted(changed.iterdir(), key=lambda path: path.name == "plan.json"):
            move(path, self.folder)

    def complete(self, index: Index, reasons: Mapping[int, str]) -> Index:
        """Write the index and the ledger, and flush everything to the disk. Returns the index.

        ``reasons`` says why rows were rejected.
        """
        self._create_shards(self.folder, index.crc32)
        for shard in self._shards:
            sync(self.folder / shard.file)
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

    def remove(self) -> None:
        """Remove the folder.

        The lock goes last: until then no other build can begin. Other people's files stay.
        """
        self._remove_files()
        shutil.rmtree(self.folder / "changed", ignore_errors=True)
        (self.folder / "lock").unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # other files are in it, or another build's lock by now
            self.folder.rmdir()

    def _remove_files(self) -> None:
        # The index first: without shards beside it, it would pass for a build that was being
        # published. The plan next: without it, the rest is as good as gone.
        for name in (self.index_path.name, "plan.json"):
            (self.folder / name).unlink(missing_ok=True)
        # Those of any array: another plan may have had others.
        shards = shard_pattern(self.output, None)
        for path in self.folder.iterdir():
            if (
                path.name in (*_FILES, self.ledger.name)
                or shards.fullmatch(path.name)
                or path.match(_TEMPORARY_INDEX)
            ):
                path.unlink()

    def _check_space(self) -> None:
        total = sum(shard.bytes for shard in self._shards)
        allocated = 0
        for shard in self._shards:
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


def unfinished_build(path: str | Path) -> str | None:
    """Say how far the build of ``out.bin`` (or ``out.idx``) is. None if no row is known yet."""
    output = Path(path).with_suffix(".bin")
    folder = output_paths(output)[1]
    keys = _read_keys(folder / "keys")
    try:
        records = np.fromfile(folder / "rows", np.uint8).reshape(len(keys or ()), -1)
        done = np.count_nonzero(records[:, STATUS_BYTE])
    except (OSError, ValueError, IndexError):  # there is no build, or it has only just begun
        return None
    progress = f"{done:,} of {len(records):,} samples are done"
    if is_locked(folder):
        return f"{output.name} is being built right now: {progress}"
    return (
        f"{path} is missing: its build is not complete ({folder}): {progress}. Run the same "
        "'memload build' again; it goes on where it stopped."
    )


def _read_keys(path: Path) -> Keys | None:
    """Return the keys of an unfinished build, or None if they are missing or damaged."""
    try:
        with np.load(path) as arrays:
            return Keys(arrays["offsets"], arrays["bytes"])
    except (FileNotFoundError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
