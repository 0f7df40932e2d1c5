"""The folder of an unfinished build: what was asked for, which rows are done, what is known of them.

::

    out.building/
        lock           held while a build runs
        plan.json      the settings, by which the same command is known again
        source         the names, sizes and times of the source's files, likewise
        rows           one record a row, all zeros while the row is not done
        rejects.jsonl  row and reason of every rejected picture
        out*.bin       the shards
        out.idx, out.rejects.csv, publish.json    complete: only the renaming is left to do

Nothing in it is trusted after a crash: a record carries its own checksum, and that of its row's pixels.
"""

import contextlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from memload.errors import BuildError
from memload.index import sync
from memload.keys import Keys
from memload.sources import Column

DONE, REJECTED = 1, 2

#: Edges of the histogram of the sources' shorter sides, in pixels.
_SIDES = (0, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 768, 1024, 1536, 2048, 4096, 8192)


def record_type(channels: int, schema: Mapping[str, Column]) -> np.dtype[Any]:
    """Return what is kept of a row: ``total`` and ``squares`` are sums over its pixels, a channel each."""
    fields: list[tuple[Any, ...]] = [
        ("check", "<u4"),
        ("status", "|u1"),
        ("flags", "|u1"),
        ("crc32", "<u4"),
        ("size", "<u4", (2,)),
        ("total", "<u8", (channels,)),
        ("squares", "<u8", (channels,)),
    ]
    return np.dtype(fields + [(f"column/{name}", column.dtype, column.shape) for name, column in schema.items()])


def seal(records: np.ndarray) -> None:
    """Put the checksum of each record into it."""
    for position in range(len(records)):
        records["check"][position] = _checksum(records[position])


def intact(record: np.void) -> bool:
    """Say whether a record is one that was sealed."""
    return bool(record["status"]) and int(record["check"]) == _checksum(record)


def _checksum(record: np.void) -> int:
    return zlib.crc32(record.tobytes()[4:])


class Journal:
    """The records of an unfinished build on the disk. Written by one process, read by many."""

    def __init__(self, folder: Path, rows: int, dtype: np.dtype[Any]) -> None:
        self.folder, self.rows, self.dtype = folder, rows, dtype

    def create(self) -> None:
        """Make the file of records at its full size; what is there of it stays."""
        with (self.folder / "rows").open("ab") as file:
            file.truncate(self.rows * self.dtype.itemsize)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the records of some rows, a copy that can be written to."""
        with (self.folder / "rows").open("rb") as file:
            file.seek(start * self.dtype.itemsize)
            data = file.read((stop - start) * self.dtype.itemsize)
        return np.frombuffer(bytearray(data), self.dtype)

    def write(self, start: int, records: np.ndarray, rejects: list[tuple[int, str]]) -> None:
        """Keep the records of some rows and why some of them were rejected."""
        if rejects:  # the reason first: a rejected row without one would have to be looked at again
            with (self.folder / "rejects.jsonl").open("a", encoding="ascii") as file:
                # The end of a line stands before it, so that one which a crash cut short ends there.
                file.writelines("\n" + json.dumps([row, reason]) for row, reason in rejects)
        with (self.folder / "rows").open("r+b") as file:
            file.seek(start * self.dtype.itemsize)
            file.write(records.tobytes())

    def mapped(self) -> np.ndarray:
        """Return all records, mapped for reading."""
        return np.memmap(self.folder / "rows", self.dtype, "r", shape=(self.rows,))

    def reasons(self) -> dict[int, str]:
        """Return why rows were rejected; of several reasons for one, the last."""
        reasons = {}
        with contextlib.suppress(FileNotFoundError), (self.folder / "rejects.jsonl").open("rb") as file:
            for line in file:
                with contextlib.suppress(ValueError, TypeError):  # a line that a crash cut short
                    row, reason = json.loads(line)
                    reasons[row] = reason
        return reasons


def statistics(records: np.ndarray, used: np.ndarray, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return mean and standard deviation a channel, of pixels from 0 to 1, and the sizes of the sources."""
    pixels = used.size * shape[0] * shape[1]
    totals = [int(total) for total in records["total"][used].sum(axis=0)]
    squares = [int(square) for square in records["squares"][used].sum(axis=0)]
    # In whole numbers to the end, so that no order of summing shows in the result.
    variances = [
        (pixels * square - total * total) / (pixels * pixels) for total, square in zip(totals, squares, strict=True)
    ]
    sizes = records["size"][used]
    shorter = np.searchsorted(_SIDES, sizes.min(axis=1), side="right") - 1
    counts = np.bincount(shorter, minlength=len(_SIDES))
    return {
        "mean": [total / pixels / 255 for total in totals],
        "std": [variance**0.5 / 255 for variance in variances],
        "source_width": [int(sizes[:, 0].min()), int(sizes[:, 0].max())],
        "source_height": [int(sizes[:, 1].min()), int(sizes[:, 1].max())],
        "source_shorter_side": {str(side): int(count) for side, count in zip(_SIDES, counts, strict=True) if count},
    }


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of an unfinished build; the system lets go of it when the process ends, however it ends.

    Raises BuildError where another process holds it.
    """
    folder.mkdir(exist_ok=True)
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            _lock(descriptor)
        except BlockingIOError:
            owner = os.read(descriptor, 20).decode("ascii", "replace").strip()
            raise BuildError(
                f"{folder}: expected no other build of this output, found one running (process {owner}). "
                "Wait for it, or stop it",
                path=folder,
            ) from None
        if not _same_file(descriptor, folder / "lock"):  # it ended, and took its folder away, between the lines above
            raise BuildError(
                f"{folder}: expected no other build of this output, found that one has just ended. Look at what it "
                "made, then run the command again if it is still needed",
                path=folder,
            )
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
        yield
    finally:
        os.close(descriptor)


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _lock(descriptor: int) -> None:
    try:
        import fcntl
    except ImportError:  # Windows, which has its own
        import msvcrt

        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]  # of Windows alone
        except OSError as error:
            raise BlockingIOError from error
        return
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def write_json(path: Path, value: object) -> None:
    """Write a small file in one step, flushed to the disk."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=1, sort_keys=True), encoding="ascii")
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def read_json(path: Path) -> Any:
    """Return the object that `write_json` wrote; None where there is none, or what a crash left of it."""
    try:
        found = json.loads(path.read_text(encoding="ascii"))
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Say what differs between two plans."""

    def flat(plan: Mapping[str, Any]) -> dict[str, Any]:
        settings, libraries = plan.get("settings", {}), plan.get("libraries", {})
        return {**plan, **settings, **libraries, "settings": None, "libraries": None}

    old, new = flat(before), flat(now)
    return [
        f"{name}: was {_short(*pair)}, now {_short(*pair[::-1])}"
        for name in sorted(old.keys() | new.keys())
        if (pair := (old.get(name), new.get(name))) and pair[0] != pair[1]
    ]


def _short(value: Any, other: Any) -> str:
    if isinstance(value, list) and isinstance(other, list) and len(value) > 4:
        value = [entry for entry in value if entry not in other] or value  # what tells them apart
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"


def write_listing(folder: Path, listing: Mapping[str, np.ndarray]) -> None:
    """Keep what is known of the source."""
    path = folder / "source"
    safetensors.numpy.save_file({k: np.ascontiguousarray(v) for k, v in listing.items()}, path)
    sync(path)


def listing_changes(folder: Path, listing: Mapping[str, np.ndarray]) -> str:
    """Say how the source differs from when the build began; an empty text where it does not."""
    try:
        before = safetensors.numpy.load_file(folder / "source")
    except (OSError, safetensors.SafetensorError):
        return "what it was is not known any more"
    if before.keys() == listing.keys() and all(_same(before[name], listing[name]) for name in before):
        return ""
    if "stat" not in before or "stat" not in listing:
        return "it has another length"
    old, new = _stats(before), _stats(listing)
    parts = {
        "added": sorted(new.keys() - old.keys()),
        "removed": sorted(old.keys() - new.keys()),
        "changed": sorted(name for name in new.keys() & old.keys() if new[name] != old[name]),
    }
    told = [
        f"{len(names):,} {what} ({', '.join(repr(name)[1:-1] for name in names[:3])}{', …' if len(names) > 3 else ''})"
        for what, names in parts.items()
        if names
    ]
    return "; ".join(told) or "the same files have other labels or another order"


def _same(before: np.ndarray, now: np.ndarray) -> bool:
    return before.dtype == now.dtype and np.array_equal(before, now, equal_nan=before.dtype.kind == "f")


def _stats(listing: Mapping[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
    keys = Keys(listing["key/offsets"], listing["key/bytes"])
    return {key: tuple(stat) for key, stat in zip(keys, listing["stat"].tolist(), strict=True)}
