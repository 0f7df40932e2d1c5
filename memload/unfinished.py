"""An unfinished build: its folder is begun or gone on with, and in the end renamed into place."""

import contextlib
import csv
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from memload.arrays import ArraySettings
from memload.conversion import Settings
from memload.errors import BuildError, FormatError
from memload.format import HEADER_BYTES, output_paths, shard_names
from memload.index import Array, Index, row_bytes, sync
from memload.journal import (
    OWNER,
    Journal,
    differences,
    listing_changes,
    locked,
    read_json,
    record_type,
    remove,
    write_json,
    write_listing,
)
from memload.shards import ShardWriter, describe, plan_shards
from memload.sources import Source

logger = logging.getLogger("memload")

#: What the folder may hold besides shards, index and ledger.
_OURS = ("plan.json", "publish.json", "source", "rows", "rejects.jsonl")


class Unfinished:
    """One build: its plan, its folder, and how that becomes a data set. Travels to the workers."""

    def __init__(
        self,
        source: Source,
        output: Path,
        settings: Settings | ArraySettings,
        shard_size: int | None,
        overwrite: bool,
    ) -> None:
        self.source, self.output, self.settings, self.overwrite = source, output, settings, overwrite
        self.index, self.folder, self.ledger = output_paths(output)
        #: what the shards of this output are called, however many there are
        self._shard = re.compile(re.escape(output.stem) + r"(-\d{5,}-of-\d{5,})?\.bin")
        rows, size = len(source), row_bytes(settings.descr, settings.shape)
        held = rows if shard_size is None else (shard_size - HEADER_BYTES) // size
        if held < 1:
            raise ValueError(
                f"shard_size: expected at least {HEADER_BYTES + size:,} bytes, the size of a shard of one row, "
                f"found {shard_size:,}"
            )
        names = shard_names(output, -(-rows // held))
        self.array = Array("image", settings.descr, settings.shape, plan_shards(names, rows, held, size))
        self.journal = Journal(self.folder, rows, record_type(settings.shape[2], source.schema, settings.descr))
        self.plan = {
            "settings": settings.as_dict(),
            "libraries": settings.libraries(),
            "shards": [shard.file for shard in self.array.shards],
            "rows a shard": held,
            "classes": None if source.classes is None else list(source.classes),
            "columns": {
                name: [column.dtype, list(column.shape), column.points] for name, column in source.schema.items()
            },
        }
        self.resumed = False

    @property
    def publishing(self) -> bool:
        """Whether all is converted, and only the renaming is left to do."""
        return all((self.folder / name).exists() for name in ("publish.json", "plan.json"))

    @contextlib.contextmanager
    def begin(self) -> Iterator[None]:
        """Take the folder, with its lock, after all that can be checked beforehand."""
        if not self.output.parent.is_dir():
            raise BuildError(
                f"{self.output.parent}: expected a folder for the output, found none. Make it first", path=self.output
            )
        try:
            if not self.publishing:
                self._check_existing()
                self._check_room()
            if _exists(self.folder) and (self.folder.is_symlink() or not self.folder.is_dir()):
                raise BuildError(
                    f"{self.folder}: expected a folder of memload's own, found a link or a file. Move it away",
                    path=self.output,
                )
            with locked(self.folder):
                fresh = {path.name for path in self.folder.iterdir()} <= {"lock", OWNER}
                try:
                    self._take_up()
                except BaseException:
                    if fresh:
                        remove(self.folder)
                    raise
                yield
        except OSError as error:
            raise BuildError(
                f"{self.output}: expected to be able to write there, found: {error}. Mend that or choose another place",
                path=self.output,
            ) from error

    def _check_existing(self) -> None:
        shards = [self.output.parent / shard.file for shard in self.array.shards]
        for path in shards:
            own = path.with_suffix(".idx")
            if path != self.output and own.exists():
                raise BuildError(
                    f"{path}: expected a name for a shard, found the data set of {own.name}. Choose another output",
                    path=self.output,
                )
        # All names that will be written, so that one that is too long is told now.
        paths = [self.index, self.ledger, self.folder / f"{self.index.name}.tmp", *shards]
        there = [path for path in paths if _exists(path) and path.parent != self.folder]
        if there and not self.overwrite:
            raise BuildError(
                f"{there[0]}: expected no such file yet, found one. Choose another output, or say --overwrite",
                path=self.output,
            )
        for path in there:
            if path.is_dir():
                raise BuildError(f"{path}: expected a file to write to, found a folder", path=self.output)

    def _check_room(self) -> None:
        total = sum(shard.bytes for shard in self.array.shards)
        taken = 0
        for shard in self.array.shards:
            with contextlib.suppress(OSError, AttributeError):  # not begun yet; no st_blocks on Windows
                taken += (self.folder / shard.file).stat().st_blocks * 512
        free = shutil.disk_usage(self.output.parent).free
        what = f"{describe((len(self.source), *self.array.shape), self.array.descr)}, {size_text(total)}"
        if total - taken > free:
            raise BuildError(
                f"{self.output}: expected {size_text(total - taken)} of room on the disk for {what}, found "
                f"{size_text(free)}. Make room, choose a smaller --size or another disk",
                path=self.output,
            )
        logger.info("%s: %s; %s free on the disk", self.output, what, size_text(free))

    def _take_up(self) -> None:
        """Go on with an unfinished build of the same plan, or begin."""
        before = read_json(self.folder / "plan.json")
        listing = self.source.listing()
        differs = []
        if before is not None:
            differs = differences(before, self.plan)
            if changes := listing_changes(self.folder, listing):
                differs.append(f"the source: {changes}")
        if differs and not self.overwrite:
            raise BuildError(
                f"{self.folder}: expected the unfinished build of the same command, found differences: "
                f"{'; '.join(differs)}. Give the same settings and source to go on with it, or say --overwrite "
                "to begin anew",
                path=self.output,
            )
        self.resumed = before is not None and not differs
        if self.resumed and self.publishing:
            return
        self._check_existing()  # again: another build may have come to its end meanwhile
        if not self.resumed:
            self._clear(_names((before or {}).get("shards")))
            write_listing(self.folder, listing)
        self.journal.create()
        ShardWriter(self.folder, self.array).create()
        if self.resumed:
            done = int(np.count_nonzero(self.journal.mapped()["status"]))
            logger.info("%s: going on with an unfinished build, %s rows done", self.output, f"{done:,}")
        else:  # last: without it the folder is as good as empty
            write_json(self.folder / "plan.json", self.plan)

    def _clear(self, shards: Iterable[str]) -> None:
        """Remove an unfinished build, and of one that was being published what it has left beside its folder."""
        there = [path for path in self.folder.iterdir() if path.name not in ("lock", OWNER)]
        ours = {*_OURS, self.index.name, self.ledger.name}
        foreign = [
            path.name
            for path in there
            if not self._shard.fullmatch(path.name) and path.name.removesuffix(".tmp") not in ours
        ]
        if foreign:
            raise BuildError(
                f"{self.folder}: expected a folder of memload's own, found other files ({', '.join(foreign[:3])}). "
                "Move them away, or choose another output",
                path=self.output,
            )
        if self.publishing and not self.index.exists():  # the index that named the old shards is gone
            for name in self._unused({*shards, *read_json(self.folder / "publish.json")["remove"]}):
                (self.output.parent / name).unlink(missing_ok=True)
        for path in there:
            path.unlink()

    def complete(self, index: Index, reasons: Mapping[int, str]) -> None:
        """Write index and ledger, and flush everything to the disk. ``reasons`` are those of the rejected rows."""
        for shard in self.array.shards:
            sync(self.folder / shard.file)
        if reasons:
            path = self.folder / self.ledger.name
            with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
                ledger = csv.writer(file)
                ledger.writerow(["path", "reason"])
                ledger.writerows(
                    (
                        self.source.keys[row],
                        reason.encode("utf-8", "backslashreplace").decode(),
                    )  # as exceptions have it
                    for row, reason in reasons.items()
                )
            sync(path)
        index.write(self.folder / self.index.name)
        stale = self._unused(_shards_of(self.index)) - {shard.file for shard in self.array.shards}
        write_json(self.folder / "publish.json", {"remove": sorted(stale), "ledger": bool(reasons)})

    def _unused(self, shards: Iterable[str]) -> set[str]:
        """Return those shards of this output that no other index stands over."""
        unused = {name for name in shards if self._shard.fullmatch(name)}
        if unused:
            for other in self.output.parent.glob("*.idx"):
                if other != self.index:
                    unused -= _shards_of(other)
        return unused

    def publish(self) -> None:
        """Rename everything into place, the index last. Begun again after a crash it goes on where it stopped."""
        index = self.folder / self.index.name
        if index.exists():
            publish = read_json(self.folder / "publish.json")
            self.index.unlink(missing_ok=True)  # from here on until the end there is no data set
            sync(self.output.parent)
            for shard in self.array.shards:
                _move(self.folder / shard.file, self.output.parent)
            for name in publish["remove"]:
                (self.output.parent / name).unlink(missing_ok=True)
            if publish["ledger"]:
                _move(self.folder / self.ledger.name, self.output.parent)
            else:
                self.ledger.unlink(missing_ok=True)
            sync(self.output.parent)
            _move(index, self.output.parent)
            sync(self.output.parent)
        # This one first: without it, whatever else is left of the folder, the data set beside it counts as complete,
        # and is left alone.
        (self.folder / "publish.json").unlink()
        remove(self.folder)


def size_text(size: int) -> str:
    """Return e.g. ``51.1 MB``."""
    value, unit = float(size), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}" if unit != "bytes" else f"{size} bytes"


def _shards_of(index: Path) -> set[str]:
    try:
        return {shard.file for array in Index.read(index).arrays for shard in array.shards}
    except FormatError:  # what cannot be read names no files
        return set()


def _exists(path: Path) -> bool:
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True


def _move(path: Path, folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # moved before a crash
        os.replace(path, folder / path.name)  # noqa: PTH105


def _names(found: Any) -> list[str]:
    """Return the file names of a plan, none where it was damaged: they are removed."""
    return (
        [name for name in found if isinstance(name, str) and Path(name).name == name] if isinstance(found, list) else []
    )
