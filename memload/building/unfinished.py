"""An unfinished build: its folder is begun or gone on with, and in the end renamed into place."""

import contextlib
import csv
import logging
import math
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from memload.building.conversion import ArraySettings, Settings
from memload.building.journal import (
    DONE,
    OWNER,
    Journal,
    differences,
    intact,
    is_folder,
    listing_changes,
    locked,
    read_json,
    record_type,
    remove,
    set_columns,
    write_json,
    write_listing,
)
from memload.building.sources import Source
from memload.building.workers import here
from memload.building.writer import ShardWriter, plan_shards
from memload.errors import BuildError, FormatError, describe_error
from memload.storage.format import HEADER_BYTES, output_paths, shard_names
from memload.storage.index import Array, Index, Shard, row_bytes, sync
from memload.storage.shards import describe

logger = logging.getLogger("memload")

#: What the folder may hold besides shards, index and ledger.
_OURS = ("plan.json", "publish.json", "source", "rows", "rejects.jsonl")

#: What an index is called while it is written.
_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.tmp")


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
        self.source, self.output, self.settings, self.overwrite = (
            source,
            output,
            settings,
            overwrite,
        )
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
        self.array = Array(
            "image", settings.descr, settings.shape, plan_shards(names, rows, held, size)
        )
        self.journal = Journal(
            self.folder, rows, record_type(settings.shape[2], source.schema, settings.descr)
        )
        self.plan = {
            "settings": settings.as_dict(),
            "libraries": settings.libraries(),
            "shards": [shard.file for shard in self.array.shards],
            "rows a shard": held,
            "classes": None if source.classes is None else list(source.classes),
            "columns": {
                name: [column.dtype, list(column.shape), column.points]
                for name, column in source.schema.items()
            },
        }
        self.resumed = False
        #: how to do what reads the source before the workers do, see `memload.building.workers.aside`
        self.aside: Callable[[Callable[[], Any]], Any] = here

    @property
    def publishing(self) -> bool:
        """Whether all is converted, and only the renaming is left to do."""
        return all((self.folder / name).exists() for name in ("publish.json", "plan.json"))

    @contextlib.contextmanager
    def begin(self) -> Iterator[None]:
        """Take the folder, with its lock, after all that can be checked beforehand."""
        try:
            if not self.output.parent.is_dir():
                raise BuildError(
                    f"{self.output.parent}: expected a folder for the output, found none. Make it first",
                    path=self.output,
                )
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
                except BaseException:  # Ctrl-C too is to leave no empty folder behind
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
        there = [path for path in (self.index, self.ledger, *shards) if _exists(path)]
        if there and not self.overwrite:
            raise BuildError(
                f"{there[0]}: expected no such file yet, found one. Choose another output, or say --overwrite",
                path=self.output,
            )
        for path in there:
            if path.is_dir():
                raise BuildError(
                    f"{path}: expected a file to write to, found a folder", path=self.output
                )

    def _check_room(self) -> None:
        total = sum(shard.bytes for shard in self.array.shards)
        taken = 0
        for shard in self.array.shards:
            with contextlib.suppress(
                OSError, AttributeError
            ):  # not begun yet; no st_blocks on Windows
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
            known = (
                "stat" in listing or self.publishing
            )  # by its files, or nothing more is asked of it
            if not differs and not known and (changes := self.aside(self._sample_changes)):
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
            logger.info(
                "%s: going on with an unfinished build, %s rows done", self.output, f"{done:,}"
            )
        else:  # last: without it the folder is as good as empty
            write_json(self.folder / "plan.json", self.plan)

    def _sample_changes(self) -> str:
        """Say whether some of the rows that are done become something else now; an empty text where they do not.

        Of files, sizes and times tell that; of a data set nothing is known beforehand. Looked at are the first row, the
        last and six between. In this process Pillow's own limit holds, so that larger pictures are passed over.
        """
        self.journal.create()  # or mended, where it was cut short
        records = self.journal.read(0, self.journal.rows)
        done = [
            row
            for row in np.flatnonzero(records["status"] == DONE).tolist()
            if intact(records[row])
        ]
        limit = Image.MAX_IMAGE_PIXELS
        done = [
            row
            for row in done
            if limit is None or math.prod(records["size"][row].tolist()) <= limit
        ]
        convert, schema = self.settings.converter(self.source.schema), self.source.schema
        for row in sorted(
            {done[round(place)] for place in np.linspace(0, len(done) - 1, 8)} if done else ()
        ):
            before, now = records[row], np.zeros(1, self.journal.dtype)[0]
            try:
                found = convert(self.source[row])
                set_columns(now, schema, found.columns)
            except Exception as error:  # noqa: BLE001  # a data set of the user's may raise anything
                return (
                    f"its sample {row} could be used, and now cannot: {describe_error(error):.200}"
                )
            if zlib.crc32(found.pixels) != int(before["crc32"]):
                return f"its sample {row} has other pixels, as another data set has, or one that draws at random"
            for name in schema:
                if now[f"column/{name}"].tobytes() != before[f"column/{name}"].tobytes():
                    return f"its sample {row} has another {name!r}"
        return ""

    def _clear(self, shards: Iterable[str]) -> None:
        """Remove an unfinished build, and of one that was being published what it has left beside its folder."""
        # Folders are a file server's own, as @eaDir is: nothing of memload's, and left.
        there = [
            path
            for path in self.folder.iterdir()
            if path.name not in ("lock", OWNER) and not is_folder(path)
        ]
        ours = {*_OURS, self.index.name, self.ledger.name}
        foreign = [
            path.name
            for path in there
            if not self._shard.fullmatch(path.name)
            and path.name.removesuffix(".tmp") not in ours
            and not _TEMPORARY.fullmatch(path.name)
        ]
        if foreign:
            raise BuildError(
                f"{self.folder}: expected a folder of memload's own, found other files ({', '.join(foreign[:3])}). "
                "Move them away, or choose another output",
                path=self.output,
            )
        if (
            self.publishing and not self.index.exists()
        ):  # the index that named the old shards is gone
            for name in self._unused({*shards, *read_json(self.folder / "publish.json")["remove"]}):
                (self.output.parent / name).unlink(missing_ok=True)
        # First: what a kill leaves behind it would else pass for a build that waits to be published.
        (self.folder / "publish.json").unlink(missing_ok=True)
        sync(self.folder)
        for path in there:
            path.unlink(missing_ok=True)

    def complete(self, index: Index, reasons: Mapping[int, str]) -> None:
        """Write index and ledger, and flush everything to the disk. ``reasons`` are those of the rejected rows."""
        writer = ShardWriter(self.folder, self.array)
        with contextlib.closing(writer):
            writer.seal(index.crc32[self.array.name])
        for shard in self.array.shards:
            path = self.folder / shard.file
            sync(path)
            if (
                found := path.stat().st_size
            ) != shard.bytes:  # or rows that are missing would only be seen by readers
                raise BuildError(
                    f"{path}: expected {shard.bytes:,} bytes, found {found:,}: somebody else has written to it. Run "
                    "the same command again: it goes on where it stopped",
                    path=self.output,
                )
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
        # Without --overwrite there was nothing; what has come since is somebody else's.
        stale = self._unused(_shards_of(self.index)) - {shard.file for shard in self.array.shards}
        remove = sorted(stale) if self.overwrite else []
        write_json(
            self.folder / "publish.json",
            {"remove": remove, "ledger": bool(reasons), "overwrite": self.overwrite},
        )

    def _unused(self, shards: Iterable[str]) -> set[str]:
        """Return those shards of this output that no other index stands over."""
        unused = {name for name in shards if self._shard.fullmatch(name)}
        if unused:
            for other in self.output.parent.glob("*.idx"):
                if other != self.index:
                    unused -= _shards_of(other)
        return unused

    def publish(self) -> None:
        """Rename everything into place, the index last. Begun again after a crash it goes on where it stopped.

        Raises BuildError where files of these names have come since the build began, and --overwrite was not said.
        """
        index = self.folder / self.index.name
        if index.exists():
            publish = read_json(self.folder / "publish.json")
            overwrite = self.overwrite or publish.get("overwrite", True)
            files = [self.folder / shard.file for shard in self.array.shards]
            if publish["ledger"]:
                files.append(self.folder / self.ledger.name)
            for shard in self.array.shards:
                self._check_there(shard)
            if not overwrite:
                for path in (
                    *files,
                    index,
                ):  # all of them first, so that none is moved beside somebody else's
                    self._check_free(path)
            else:
                stale = self._unused(_shards_of(self.index)) - {
                    shard.file for shard in self.array.shards
                }
                if not stale <= set(publish["remove"]):  # of what has come since the build began
                    publish["remove"] = sorted(stale.union(publish["remove"]))
                    write_json(self.folder / "publish.json", publish)
                self.index.unlink(
                    missing_ok=True
                )  # from here on until the end there is no data set
                sync(self.output.parent)
            for path in files:
                if not overwrite:
                    self._check_free(path)
                _move(path, self.output.parent)
            for name in publish["remove"]:
                (self.output.parent / name).unlink(missing_ok=True)
            if overwrite and not publish["ledger"]:
                self.ledger.unlink(missing_ok=True)
            sync(self.output.parent)
            if not overwrite:
                self._check_free(index)
            _move(index, self.output.parent)
            sync(self.output.parent)
        # This one first: without it, whatever else is left of the folder, the data set beside it counts as complete,
        # and is left alone.
        (self.folder / "publish.json").unlink()
        remove(self.folder)

    def _check_there(self, shard: Shard) -> None:
        """Raise BuildError where a shard is neither here nor, moved before a crash, in its place."""
        for folder in (self.folder, self.output.parent):
            path = folder / shard.file
            if _exists(path) and path.stat().st_size == shard.bytes:
                return
        raise BuildError(
            f"{self.folder / shard.file}: expected {shard.bytes:,} bytes that wait to be published, found none: "
            f"somebody else has removed or altered it. Remove {self.folder}, and build again",
            path=self.output,
        )

    def _check_free(self, path: Path) -> None:
        """Raise BuildError where somebody else's file has the name that a finished one is to get."""
        target = self.output.parent / path.name
        if _exists(path) and _exists(target):
            raise BuildError(
                f"{target}: expected no such file, found one that was made while the build ran. The finished build "
                f"waits in {self.folder}: move that file away, or say --overwrite, and run the same command again",
                path=self.output,
            )


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
        path.replace(folder / path.name)


def _names(found: Any) -> list[str]:
    """Return the file names of a plan, none where it was damaged: they are removed."""
    return (
        [name for name in found if isinstance(name, str) and Path(name).name == name]
        if isinstance(found, list)
        else []
    )
