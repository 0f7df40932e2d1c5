"""The folder of an unfinished build: what was asked for, which rows are done, what is known of them.

::

    out.building/
        lock           held while a build runs
        owner          the process that builds, on a filesystem without locks
        plan.json      the settings, by which the same command is known again
        source         the names, sizes and times of the source's files, likewise
        rows           one record a row, all zeros while the row is not done
        rejects.jsonl  row and reason of every rejected picture
        out*.bin       the shards
        out.idx, out.rejects.csv, publish.json    complete: only the renaming is left to do

Nothing in it is trusted after a crash: a record carries its own checksum, and that of its row's pixels.
"""

import contextlib
import errno
import json
import logging
import os
import platform
import sys
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from memload.building.sources import Column
from memload.errors import BuildError, DecodeError
from memload.storage.index import sync
from memload.storage.keys import Keys
from memload.storage.mapping import address_of, fault_in

logger = logging.getLogger("memload")

#: Descriptors of the locks that this process holds, and the files that take their part.
_locks: set[int] = set()
_owned: set[str] = set()


def _close_in_child() -> None:
    """Close a forked child's copies, which would hold a lock for as long as it lives, whatever becomes of the build."""
    while _locks:
        os.close(_locks.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)

DONE, REJECTED = 1, 2

#: The file that takes the lock's part where a filesystem has none.
OWNER = "owner"


def record_type(channels: int, schema: Mapping[str, Column], descr: str = "|u1") -> np.dtype[Any]:
    """Return what is kept of a row: ``total`` and ``squares`` are sums over its pixels, a channel each.

    Of integers they are exact; of floats ``squares`` are those of the differences from the row's own mean.
    """
    sums = "<f8" if np.dtype(descr).kind == "f" else "<u8"
    fields: list[tuple[Any, ...]] = [
        ("check", "<u4"),
        ("status", "|u1"),
        ("flags", "|u1"),
        ("crc32", "<u4"),
        ("size", "<u4", (2,)),
        ("total", sums, (channels,)),
        ("squares", sums, (channels,)),
    ]
    return np.dtype(
        fields + [(f"column/{name}", column.dtype, column.shape) for name, column in schema.items()]
    )


def set_columns(record: np.void, schema: Mapping[str, Column], columns: Mapping[str, Any]) -> None:
    """Put the values of a record's columns into it. Raises DecodeError where one would become another value.

    Floats are rounded to a float column; into one of integers goes only what is an integer that it can hold.
    """
    for name, column in schema.items():
        value = columns[name]
        if np.ma.is_masked(value):
            raise DecodeError(
                f"column {name!r}: expected values, found some that are masked. Fill them"
            )
        found = np.asarray(value)
        if found.shape != column.shape:  # NumPy would repeat a single number
            raise DecodeError(
                f"column {name!r}: expected shape {column.shape}, found {found.shape}"
            )
        if found.dtype.kind not in "biuf":
            raise DecodeError(f"column {name!r}: expected numbers, found {found.dtype}")
        field = f"column/{name}"
        if found.dtype.str == column.dtype:
            record[field] = found
            continue
        with np.errstate(invalid="ignore", over="ignore"):  # told below, where it matters
            record[field] = found.astype(column.dtype)
        if np.dtype(column.dtype).kind == "f":
            same = np.array_equal(np.isfinite(record[field]), np.isfinite(found))
        else:
            same = np.array_equal(record[field], found)
        if not same:
            raise DecodeError(
                f"column {name!r}: expected values of {np.dtype(column.dtype).name}, found {found.tolist()!r:.60}"
            )


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
        self._check_size(len(data), stop - start)
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
        """Return all records, mapped for reading. Raises OSError where the disk does not give them."""
        self._check_size((self.folder / "rows").stat().st_size, self.rows)
        records = np.memmap(self.folder / "rows", self.dtype, "r", shape=(self.rows,))
        fault_in(address_of(records), records.nbytes)
        return records

    def _check_size(self, found: int, rows: int) -> None:
        expected = rows * self.dtype.itemsize
        if found < expected:
            raise OSError(
                f"{self.folder / 'rows'}: expected {expected:,} bytes of {rows:,} records, found {found:,}: it was "
                "truncated by somebody else"
            )

    def reasons(self) -> dict[int, str]:
        """Return why rows were rejected; of several reasons for one, the last."""
        reasons = {}
        with (
            contextlib.suppress(FileNotFoundError),
            (self.folder / "rejects.jsonl").open("rb") as file,
        ):
            for line in file:
                with contextlib.suppress(ValueError, TypeError):  # a line that a crash cut short
                    row, reason = json.loads(line)
                    reasons[row] = reason
        return reasons


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of an unfinished build; the system lets go of it when the process ends, however it ends.

    On a filesystem without locks, as some of clusters are, a file names the process that builds. One that was killed
    leaves it behind: it is recognised on the same machine, and has to be removed by hand on another.

    Raises BuildError where another process holds it.
    """
    made = not folder.exists()
    descriptor = _open_lock(folder)
    _locks.add(descriptor)
    owner: Path | None = None
    try:
        try:
            _lock(descriptor)
        except BlockingIOError:
            process = "unknown yet"
            with contextlib.suppress(OSError):  # Windows lets nobody read what another has locked
                process = os.read(descriptor, 20).decode("ascii", "replace").strip() or process
            raise BuildError(
                f"{folder}: expected no other build of this output, found one running (process {process}). "
                "Wait for it, or stop it",
                path=folder,
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            logger.warning(
                f"{folder}: this filesystem has no locks ({error.strerror}): another build of this output is told by "
                f"the file {OWNER} alone"
            )
            owner = _own(folder)
        if not _same_file(
            descriptor, folder / "lock"
        ):  # it ended, and took its folder away, between the lines above
            raise BuildError(
                f"{folder}: expected no other build of this output, found that one has just ended. Look at what it "
                "made, then run the command again if it is still needed",
                path=folder,
            )
        try:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())
        except OSError:  # not even that fits on the disk
            if made:
                remove(folder)
            raise
        yield
    finally:
        _locks.discard(descriptor)
        _unlock(descriptor)
        if owner is not None:
            _owned.discard(os.path.realpath(owner))
            if _read(owner) == _here():  # with the folder gone, another build may own a new one
                owner.unlink(missing_ok=True)
        if sys.platform == "win32":
            with contextlib.suppress(OSError):  # it is not empty, or another build holds it by now
                if [path.name for path in folder.iterdir()] == ["lock"]:
                    (folder / "lock").unlink()
                    folder.rmdir()


def _open_lock(folder: Path) -> int:
    """Open the lock's file, making it and its folder, which a build that ends may remove at the same time."""
    for last in (False, False, True):
        try:
            folder.mkdir(exist_ok=True)
            return os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        except (FileNotFoundError, FileExistsError):
            if last:
                raise
    raise AssertionError


def remove(folder: Path) -> None:
    """Remove the folder of a build whose lock is held, the lock last: until then no other build can begin in it.

    Folders in it are none of memload's (a file server puts its own there, such as ``@eaDir``): they are left, and it
    with them, which is told as a warning.
    """
    kept = [folder / "lock", folder / OWNER]
    left = []
    for path in folder.iterdir():
        if path in kept:
            continue
        if is_folder(path):
            left.append(path.name)
        else:
            path.unlink()
    if left:
        logger.warning(
            f"{folder}: expected files of memload's alone, found folders ({', '.join(left[:3]):.200}), which are "
            "left. Remove it if nobody needs them"
        )
    if (
        sys.platform == "win32"
    ):  # which removes no file that is open: `locked` does when it has closed it
        return
    for path in kept:
        path.unlink(missing_ok=True)
    try:
        folder.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # it is another build's by now
            raise


def is_folder(path: Path) -> bool:
    """Say whether there is a folder, not a link to one."""
    return path.is_dir() and not path.is_symlink()


#: What `flock` says where there are no locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def _own(folder: Path) -> Path:
    """Put this process's name into the folder, as a lock does where there is one. Raises BuildError."""
    path = folder / OWNER
    for _ in range(2):
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            found = _read(path)
            process, _, machine = found.partition(" ")
            if machine != platform.node() or not process.isdecimal() or _alive(int(process), path):
                break
            path.unlink(missing_ok=True)  # it was killed
        else:
            try:
                os.write(descriptor, _here().encode())
            except OSError:  # the disk is full: a file without a name would keep all others off
                path.unlink()
                raise
            finally:
                os.close(descriptor)
            _owned.add(os.path.realpath(path))
            return path
    raise BuildError(
        f"{folder}: expected no other build of this output, found one by process {found or 'unknown'}. "
        f"Wait for it, or stop it; if it was killed, remove {path}",
        path=folder,
    )


def _here() -> str:
    return f"{os.getpid()} {platform.node()}"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def _alive(process: int, owner: Path) -> bool:
    """Say whether the process that an owner's file names may still be at work there."""
    if (
        process == os.getpid()
    ):  # or one before it with the same number: in a container each is the first
        return os.path.realpath(owner) in _owned
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it belongs to somebody else
        return True
    return True


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


def _unlock(descriptor: int) -> None:
    """Let go of the lock, if it is held, and of its file; a copy that a child got of it would hold it on."""
    try:
        import fcntl
    except ImportError:  # Windows, where nothing forks
        pass
    else:
        with contextlib.suppress(OSError):  # there are none here
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


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
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Say what differs between two plans."""

    def flat(plan: Mapping[str, Any]) -> dict[str, Any]:
        settings, libraries = (
            found if isinstance(found := plan.get(name), dict) else {}
            for name in ("settings", "libraries")
        )
        return {**plan, **settings, **libraries, "settings": None, "libraries": None}

    old, new = flat(before), flat(now)
    return [
        f"{name}: was {_short(*pair)}, now {_short(*pair[::-1])}"
        for name in sorted(old.keys() | new.keys())
        if (pair := (old.get(name), new.get(name))) and pair[0] != pair[1]
    ]


def _short(value: Any, other: Any) -> str:
    if isinstance(value, list) and isinstance(other, list) and len(value) > 4:
        known = set(
            map(repr, other)
        )  # of a million classes, each is not looked for among a million
        value = [
            entry for entry in value if repr(entry) not in known
        ] or value  # what tells them apart
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"


def write_listing(folder: Path, listing: Mapping[str, np.ndarray]) -> None:
    """Keep what is known of the source."""
    path = folder / "source"
    # not save_file, which raises no OSError where the disk is full
    path.write_bytes(
        safetensors.numpy.save({k: np.ascontiguousarray(v) for k, v in listing.items()})
    )
    sync(path)


def listing_changes(folder: Path, listing: Mapping[str, np.ndarray]) -> str:
    """Say how the source differs from when the build began; an empty text where it does not."""
    try:
        before = safetensors.numpy.load_file(folder / "source")
    except (OSError, safetensors.SafetensorError):
        return "what it was is not known any more"
    if before.keys() == listing.keys() and all(
        _same(before[name], listing[name]) for name in before
    ):
        return ""
    if "key/offsets" not in before or "key/offsets" not in listing:
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
    return before.dtype == now.dtype and np.array_equal(
        before, now, equal_nan=before.dtype.kind == "f"
    )


def _stats(listing: Mapping[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
    keys = Keys(listing["key/offsets"], listing["key/bytes"])
    stats = listing["stat"].tolist() if "stat" in listing else [()] * len(keys)
    return {key: tuple(stat) for key, stat in zip(keys, stats, strict=True)}
