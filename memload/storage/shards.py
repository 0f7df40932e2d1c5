"""Open shards as arrays, gather rows from them, write them row by row."""

import contextlib
import errno
import itertools
import os
import re
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from memload.errors import ChecksumError, FormatError, MissingError
from memload.storage.format import HEADER_BYTES, npy_header, seal_of
from memload.storage.index import Array, Index, Shard
from memload.storage.leases import LEASES, end_lease, lease
from memload.storage.mapping import address_of, fault_in, find_map, identity, map_file, will_need

#: Small rows are brought into RAM by as many as make up what the kernel maps at a page fault.
_BLOCK_BYTES = 64 << 10


class Shards:
    """All rows of one array, mapped copy-on-write from its shards; ``maps[s]`` is ``(rows, H, W, C)``.

    Opening checks that every file is there, has its exact size and header, that the first and the last row of each
    match the index, and so does its seal, which tells the shards of another build. Raises FormatError.
    Reading is thread-safe.

    Touching a page of a map that its file does not have any more, or that the disk does not give, ends the process
    with SIGBUS. So rows are asked for before they are read, and while `gather` copies, a lease keeps others from
    truncating the file; where there are none (see `memload.storage.leases`), a file that is truncated in place at that very
    moment still ends the process. One that is replaced by another under its name is read on.
    """

    def __init__(self, index: Index, name: str = "image") -> None:
        self.array = next(array for array in index.arrays if array.name == name)
        self.folder = index.path.parent
        self.paths = [self.folder / shard.file for shard in self.array.shards]
        #: what each file was before it was mapped, so that one put in its place later is told from it
        self.identities = [identity(path) for path in self.paths]
        #: the first row of every shard, then the number of all rows
        self.starts: list[int] = [
            0,
            *np.cumsum([shard.rows for shard in self.array.shards]).tolist(),
        ]
        checks = np.split(index.crc32[name], self.starts[1:-1])
        self.maps = [
            open_shard(path, shard, self.array, checks[number], index.path)
            for number, (path, shard) in enumerate(zip(self.paths, self.array.shards, strict=True))
        ]
        self._files = [find_map(pixels) for pixels in self.maps]
        self._names = [
            str(path.absolute()) for path in self.paths
        ]  # the user may change to another folder
        self._addresses = [address_of(pixels) for pixels in self.maps]
        self._checks = index.crc32[name]
        self._known = self.identities.copy()  # and what they were when they were last looked at
        #: Of files that were written to meanwhile, which rows were found unaltered since.
        self._unaltered: list[np.ndarray | None] = [None] * len(self.maps)
        #: Rows that are brought into RAM together, and for each such block whether it was there once.
        self._block = max(1, _BLOCK_BYTES // self.array.row_bytes)
        self._seen = [np.zeros(-(-len(pixels) // self._block), bool) for pixels in self.maps]
        self._all_seen = [False] * len(self.maps)
        self._leased = [LEASES] * len(self.maps)  # until one is refused
        for number, pixels in enumerate(self.maps):
            for inside in {0, len(pixels) - 1}:
                row = self.starts[number] + inside
                self.secure_row(number, inside)
                expected, found = int(index.crc32[name][row]), zlib.crc32(pixels[inside])
                if expected != found:
                    path = self.folder / self.array.shards[number].file
                    raise ChecksumError(
                        f"{path}: expected checksum {expected:08x} of row {row}, as {index.path.name} says, found "
                        f"{found:08x}: the file is damaged or belongs to another data set. Run 'memload verify' "
                        "to see the extent, then restore the file or build again",
                        path=path,
                        rows=[row],
                    )

    def __len__(self) -> int:
        return self.starts[-1]

    def ask_for(self, rows: np.ndarray) -> None:
        """Have the pages of rows read from the disk, without waiting for them; about 2 µs a row."""
        for row in rows.tolist():
            shard, inside = self.locate(row)
            size = self.array.row_bytes
            will_need(self.maps[shard], HEADER_BYTES + inside * size, size)

    def locate(self, row: int) -> tuple[int, int]:
        """Return the shard that holds a row, and the row's number inside it."""
        shard = bisect_right(self.starts, row) - 1
        return shard, row - self.starts[shard]

    def secure_row(self, shard: int, inside: int, *, again: bool = False) -> None:
        """Have one row in RAM, if its file still holds it; see `secure`. About 1 µs."""
        error = None
        if again or not self._seen[shard][inside // self._block]:
            try:
                self._bring(shard, inside, alone=again)
            except OSError as found:
                error = found
        file, expected = self._files[shard], self.array.shards[shard].bytes
        length = expected if file is None else file.size()  # as it is now
        if length < expected:
            raise FormatError(
                f"{self.paths[shard]}: expected {expected:,} bytes as when it was opened, found {length:,}: it was "
                "truncated meanwhile. Restore the file or build again, and open the data set anew",
                path=self.paths[shard],
            ) from error
        if error is not None:
            raise FormatError(
                f"{self.paths[shard]}: row {self.starts[shard] + inside}: cannot be read: {error.strerror}. Look after "
                "the disk, then restore the file or build again",
                path=self.paths[shard],
            ) from error

    def _bring(self, shard: int, inside: int, *, alone: bool) -> None:
        """Wait until a row is in RAM, and those of its block with it unless ``alone``. Raises OSError."""
        start, size, block = self._addresses[shard], self.array.row_bytes, inside // self._block
        first, stop = block * self._block, min((block + 1) * self._block, len(self.maps[shard]))
        if not alone:
            with contextlib.suppress(OSError):  # because of a row beside it, perhaps
                fault_in(start + first * size, (stop - first) * size)
                self._seen[shard][block] = True
                return
        fault_in(start + inside * size, size)

    def secure(self, rows: np.ndarray, *, again: bool = False) -> None:
        """Have rows in RAM, if their files still hold them as they were. Raises FormatError, naming what is wrong.

        Files are looked at each time, 3 µs each; pages when they are asked for first, 2 µs a row, or with ``again``
        each time. Rows of a file that was written to meanwhile are compared with their checksums.
        """
        if not len(rows):
            return
        for shard, _, inside in self._by_shard(rows):
            self._secure(shard, inside, again)

    def _by_shard(self, rows: np.ndarray) -> Iterator[tuple[int, np.ndarray | slice, np.ndarray]]:
        """Yield each shard that holds some of the rows, which of them they are, and their numbers inside it."""
        if len(self.maps) == 1:
            yield 0, slice(None), rows
            return
        shards = np.searchsorted(self.starts, rows, side="right") - 1
        order = np.argsort(shards, kind="stable")
        shards = shards[order]
        inside = rows[order] - np.take(self.starts, shards)
        ends = [*(np.flatnonzero(np.diff(shards)) + 1).tolist(), len(rows)]
        for start, stop in itertools.pairwise([0, *ends]):
            yield int(shards[start]), order[start:stop], inside[start:stop]

    def _secure(
        self, shard: int, inside: np.ndarray, again: bool, now: tuple[int, ...] | None = None
    ) -> None:
        if again:
            for row in inside.tolist():
                self.secure_row(shard, row, again=True)
        elif not self._all_seen[shard]:
            seen, size, block = self._seen[shard], self.array.row_bytes, self._block
            start, end = (
                self._addresses[shard],
                self._addresses[shard] + len(self.maps[shard]) * size,
            )
            blocks = inside // block
            for number in np.unique(
                blocks[~seen[blocks]]
            ).tolist():  # half the time of `secure_row`
                first = start + number * block * size
                try:
                    fault_in(first, min(block * size, end - first))
                    seen[number] = True
                except OSError:  # because of a row beside those asked for, perhaps
                    for row in inside[blocks == number].tolist():
                        self.secure_row(shard, row)
            self._all_seen[shard] = bool(self._seen[shard].all())
        if now is None or now[2] < self.array.shards[shard].bytes:
            self.secure_row(
                shard, 0
            )  # in RAM since the data set was opened: this is for the file's size
            now = identity(self._names[shard])
        known = self._known[shard]
        # Where another file has taken the name, or none, the one that is mapped is out of reach, and as it was.
        if now != known and now is not None and known is not None and now[:2] == known[:2]:
            self._unaltered[shard] = np.zeros(len(self.maps[shard]), bool)
            self._known[shard] = now
        unaltered = self._unaltered[shard]
        if unaltered is not None:
            self._compare(shard, inside[~unaltered[inside]])
            unaltered[inside] = True

    def _compare(self, shard: int, inside: np.ndarray) -> None:
        """Raise ChecksumError if rows of a shard are not as they were written."""
        for place in inside.tolist():
            row = self.starts[shard] + place
            if zlib.crc32(self.maps[shard][place]) != int(self._checks[row]):
                raise ChecksumError(
                    f"{self.paths[shard]}: expected row {row} as it was written, found other bytes: the file was "
                    "written to after it was opened. Run 'memload verify' to see the extent, then restore the file or "
                    "build again, and open the data set anew",
                    path=self.paths[shard],
                    rows=[row],
                )

    def gather(self, rows: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Copy rows into ``out`` ``(len(rows), H, W, C)``, contiguous and of the array's type; return ``out``.

        ``rows`` are int64, at least 0 and below ``len(self)``; the caller has checked that. Blocks while pages are
        read from disk, with the GIL released while bytes are copied. Allocates nothing that grows with rows.
        Raises FormatError, as `secure` does.
        """
        if not len(rows):
            return out
        for shard, which, inside in self._by_shard(rows):
            hold = self._hold(shard)
            try:
                self._secure(shard, inside, False, None if hold is None else hold[2])
                if hold is not None and not hold[1]:
                    self._read(shard, hold[0], inside, out, which)
                elif isinstance(which, slice):
                    # mode="clip" writes straight into out, "raise" goes through a buffer and takes 6 times as long
                    np.take(self.maps[0], rows, axis=0, out=out, mode="clip")
                else:
                    for position, place in zip(which.tolist(), inside.tolist(), strict=True):
                        out[position] = self.maps[shard][place]
            finally:
                if hold is not None:
                    end_lease(hold[0])
        return out

    def _hold(self, shard: int) -> tuple[int, bool, tuple[int, ...]] | None:
        """Keep a shard's file from being truncated until `end_lease` of the descriptor that is returned.

        With it comes whether that is so, or somebody has the file open for writing, and what the file is now. None
        where there are no leases, or the file has another name by now, or none, and is out of reach.
        """
        if not self._leased[shard]:
            return None
        try:
            descriptor = os.open(
                self._names[shard], os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
            )  # a pipe by now?
        except OSError:
            return None
        held = lease(descriptor)
        now, known = identity(descriptor), self.identities[shard]
        if held is not None and now is not None and known is not None and now[:2] == known[:2]:
            return descriptor, held, now
        self._leased[shard] = held is not None
        end_lease(descriptor)
        return None

    def _read(
        self,
        shard: int,
        descriptor: int,
        inside: np.ndarray,
        out: np.ndarray,
        which: np.ndarray | slice,
    ) -> None:
        """Read rows of a shard into some of ``out``: a third slower than from the map, and never a bus error."""
        size, positions = self.array.row_bytes, np.arange(len(out))[which].tolist()
        bytes_of_out = out.reshape(-1).view(np.uint8).data
        for position, place in zip(positions, inside.tolist(), strict=True):
            try:
                data = _read(descriptor, size, HEADER_BYTES + place * size)
            except OSError as error:
                raise FormatError(
                    f"{self.paths[shard]}: row {self.starts[shard] + place}: cannot be read: {error}. It was opened "
                    "for writing meanwhile: restore the file or build again, and open the data set anew",
                    path=self.paths[shard],
                ) from error
            bytes_of_out[position * size : (position + 1) * size] = data


def open_shard(
    path: Path, shard: Shard, array: Array, checks: np.ndarray, index: Path
) -> np.ndarray:
    """Map one shard, whose rows have checksums, copy-on-write as ``(rows, H, W, C)``.

    Raises FormatError, naming what is wrong.
    """
    check_shard(path, shard, array, index)
    try:
        mapped = map_file(path)
        fault_in(address_of(mapped), HEADER_BYTES)
    except (OSError, ValueError) as error:
        advice = ""
        if isinstance(error, OSError) and error.errno == errno.EMFILE:
            advice = ". Each shard takes one: raise the limit (ulimit -n), or build fewer and larger ones (--shard-size)"
        raise FormatError(f"{path}: cannot be mapped: {error}{advice}", path=path) from error
    if mapped.size != shard.bytes:
        raise FormatError(
            f"{path}: expected {shard.bytes:,} bytes, found {mapped.size:,}", path=path
        )
    check_header(path, mapped[:HEADER_BYTES].tobytes(), shard, array, checks, index)
    return mapped[HEADER_BYTES:].view(array.descr).reshape((shard.rows, *array.shape))


def check_header(
    path: Path, header: bytes, shard: Shard, array: Array, checks: np.ndarray, index: Path
) -> None:
    """Check that a shard's header is the one for its size, and for rows with these checksums. Raises FormatError."""
    shape = (shard.rows, *array.shape)
    plain = npy_header(array.descr, shape)
    if header == plain:
        return
    seal = seal_of(checks)
    sealed = npy_header(array.descr, shape, seal)
    if header == sealed:
        return
    start, found = len(sealed) - len(seal) - 1, header[-len(seal) - 1 : -1]
    if (
        header[:start] == sealed[:start]
        and header[-1:] == b"\n"
        and re.fullmatch(b"[0-9a-f]+", found)
    ):
        raise ChecksumError(
            f"{path}: expected the rows that {index.name} has the checksums of (seal {seal}), found others (seal "
            f"{found.decode()}): one of the two files belongs to another data set. Restore it or build again",
            path=path,
        )
    raise FormatError(
        f"{path}: expected the NPY header of {describe(shape, array.descr)}, found {header[:80]!r}: "
        "the file is damaged or belongs to another data set. Restore the file or build again",
        path=path,
    )


def check_shard(path: Path, shard: Shard, array: Array, index: Path) -> None:
    """Check that a shard is a file of the right size, in the folder of the index at ``index``. Raises FormatError.

    Either may be a link, as they are in caches; but where it leads has to be that folder, or the one that the index
    itself is linked from, so that no data set reaches into a place that its user did not name.
    """
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        raise MissingError(
            f"{path}: expected a shard of {shard.bytes:,} bytes, found no such file. "
            "Copy it beside its index, or build again",
            path=path,
        ) from None
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error}", path=path) from error
    if path.is_symlink():
        target, folders = path.resolve(), (index.parent.resolve(), index.resolve().parent)
        if target.parent not in folders:
            raise FormatError(
                f"{path}: expected a file in the folder of {index.name}, found a link to {target}. Move it here, or "
                f"open the index that lies beside {target.name}",
                path=path,
            )
    if not path.is_file():
        raise FormatError(f"{path}: expected a file, found something else", path=path)
    if found != shard.bytes:
        what = describe((shard.rows, *array.shape), array.descr)
        state = "truncated" if found < shard.bytes else "too long"
        raise FormatError(
            f"{path}: expected {shard.bytes:,} bytes ({what}), found {found:,}: the shard is {state}. "
            "Restore the file or build again",
            path=path,
        )


def describe(shape: Sequence[int], descr: str) -> str:
    """Return e.g. ``10,000 rows of 224×224×3 uint8``."""
    return f"{shape[0]:,} rows of {'×'.join(map(str, shape[1:]))} {np.dtype(descr).name}"


def _pread(descriptor: int, size: int, offset: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(descriptor, size, offset)
    os.lseek(descriptor, offset, os.SEEK_SET)
    return os.read(descriptor, size)


def _read(descriptor: int, size: int, offset: int) -> bytes:
    data = _pread(descriptor, size, offset)
    while len(data) < size:
        more = _pread(descriptor, size - len(data), offset + len(data))
        if not more:
            raise OSError(f"expected {size} bytes at {offset}, found {len(data)}")
        data += more
    return data
