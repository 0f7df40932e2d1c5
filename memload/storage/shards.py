"""Open the shards of an array, check them, and gather rows from them."""

import errno
import os
import re
import time
import weakref
import zlib
from bisect import bisect_right
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from memload.errors import ChecksumError, FormatError, MissingError
from memload.storage.format import HEADER_BYTES, npy_header, seal_of
from memload.storage.index import Array, Index, Shard
from memload.storage.mapping import address_of, fault_in, map_side_by_side, will_need

#: A gather that touches more shards than this relies on a check of all sizes in the last 10 ms. Looking at the
#: size of a shard takes up to 0.7 µs, as long as copying 8 KiB.
_SHARDS_CHECKED_EACH_TIME = 16
_SECONDS_BETWEEN_CHECKS = 0.01


class Shards:
    """All rows of one array, mapped from its shards. ``maps[s]`` is ``(rows, H, W, C)`` of shard ``s``.

    The maps are copy-on-write: writing to them changes neither the files nor what other processes see. ``paths`` are
    the files, ``descriptors`` the open files, and ``starts`` the first row of every shard, followed by the number of
    all rows.

    Opening checks that each file exists, has the size and the header that the index requires, and holds the index's
    first and last row. Reading is thread-safe.

    Shards must not change while they are open. Do not truncate or rewrite them in place; replace them by renaming
    another file. A shard that was truncated raises FormatError at the next `gather`, but one that is truncated
    during a `gather` ends the process with SIGBUS. ``memload verify`` finds rows that were rewritten.
    """

    def __init__(self, index: Index, name: str = "image") -> None:
        self.array = next(array for array in index.arrays if array.name == name)
        self.folder = index.path.parent
        self.paths = [self.folder / shard.file for shard in self.array.shards]
        self.starts: list[int] = [
            0,
            *np.cumsum([shard.rows for shard in self.array.shards]).tolist(),
        ]
        self.descriptors: list[int] = []
        weakref.finalize(self, _close, self.descriptors)
        for path, shard in zip(self.paths, self.array.shards, strict=True):
            check_shard(path, shard, self.array, index.path)
            self.descriptors.append(_open(path))
        self._next_size_check = 0.0
        headers = self._map()
        checks = np.split(index.crc32[name], self.starts[1:-1])
        for number, header in enumerate(headers):
            self._check_content(number, header, checks[number], index.path)

    def _map(self) -> list[np.ndarray]:
        """Map all shards and return their headers, as bytes.

        The shards are mapped so that ``self._table`` is one array with the rows of all of them, and gaps in between.
        So one call to NumPy gathers rows from any number of shards.
        """
        row_bytes = self.array.row_bytes
        sizes = [shard.bytes for shard in self.array.shards]
        try:
            mapped, offsets = map_side_by_side(self.descriptors, sizes, row_bytes)
        except (OSError, OverflowError) as error:
            path = self.paths[0]
            raise FormatError(f"{path} cannot be mapped: {error}.", path=path) from error
        pixels = mapped[HEADER_BYTES:]
        pixels = pixels[: len(pixels) // row_bytes * row_bytes]
        self._table = pixels.view(self.array.descr).reshape((-1, *self.array.shape))
        first_rows = np.array(offsets) // row_bytes
        self._starts = np.array(self.starts)
        self._gaps = first_rows - self._starts[:-1]
        self.maps = [
            self._table[first : first + shard.rows]
            for first, shard in zip(first_rows.tolist(), self.array.shards, strict=True)
        ]
        return [mapped[offset : offset + HEADER_BYTES] for offset in offsets]

    def _check_content(
        self, number: int, header: np.ndarray, checks: np.ndarray, index: Path
    ) -> None:
        """Check a shard's header, and its first and last row against their checksums. Raises FormatError."""
        path, pixels = self.paths[number], self.maps[number]
        try:
            fault_in(address_of(header), HEADER_BYTES)
            for row in (0, -1):
                fault_in(address_of(pixels[row]), self.array.row_bytes)
        except OSError as error:
            raise FormatError(
                f"{path} cannot be read: {error.strerror}. Check the disk. Then restore the file, or run "
                "'memload build' again.",
                path=path,
            ) from error
        check_header(path, header.tobytes(), self.array.shards[number], self.array, checks, index)
        for row in (0, len(pixels) - 1):
            found = zlib.crc32(pixels[row])
            if found != checks[row]:
                raise ChecksumError(
                    f"{path} is damaged or belongs to another data set: row {self.starts[number] + row} has checksum "
                    f"{found:08x} instead of {checks[row]:08x}, as {index.name} says. Run 'memload verify' to see "
                    "the extent. Then restore the file, or run 'memload build' again.",
                    path=path,
                    rows=[self.starts[number] + row],
                )

    def __len__(self) -> int:
        return self.starts[-1]

    def locate(self, row: int) -> tuple[int, int]:
        """Return the shard that holds a row, and the row's number inside it."""
        shard = bisect_right(self.starts, row) - 1
        return shard, row - self.starts[shard]

    def gather(self, rows: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Copy rows into ``out`` and return it.

        ``rows`` is int64 ``(n,)``, each at least 0 and below ``len(self)``, which the caller checks. ``out`` is
        ``(n, H, W, C)``, contiguous and of the array's dtype. Blocks while pages are read from the disk; the GIL is
        released meanwhile. Raises FormatError if a shard has been truncated.
        """
        shards = np.searchsorted(self._starts, rows, side="right") - 1
        self.check_sizes(set(shards.tolist()))
        # mode="clip" copies straight into out. "raise" copies by way of a buffer and takes 6 times as long.
        np.take(self._table, rows + self._gaps[shards], axis=0, out=out, mode="clip")
        return out

    def check_sizes(self, shards: Collection[int]) -> None:
        """Raise FormatError if a shard is shorter than when it was opened: touching its map could end the process."""
        many = len(shards) > _SHARDS_CHECKED_EACH_TIME
        if many and time.monotonic() < self._next_size_check:
            return
        for shard in range(len(self.maps)) if many else shards:
            size = os.lseek(self.descriptors[shard], 0, os.SEEK_END)
            expected = self.array.shards[shard].bytes
            if size < expected:
                path = self.paths[shard]
                raise FormatError(
                    f"{path} was truncated while it was open: it has {size:,} bytes instead of {expected:,}. "
                    "Restore it, or run 'memload build' again. Then open the data set anew.",
                    path=path,
                )
        if many:
            self._next_size_check = time.monotonic() + _SECONDS_BETWEEN_CHECKS

    def will_need(self, rows: np.ndarray) -> None:
        """Ask the kernel to read rows from the disk, without waiting for them. Takes about 2 µs a row."""
        first, row_bytes = address_of(self._table), self.array.row_bytes
        shards = np.searchsorted(self._starts, rows, side="right") - 1
        for row in (rows + self._gaps[shards]).tolist():
            will_need(first + row * row_bytes, row_bytes)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        advice = "Check its permissions."
        if error.errno == errno.EMFILE:
            advice = (
                "Each shard needs one open file: raise the limit (ulimit -n), or build fewer and larger shards "
                "(--shard-size)."
            )
        raise FormatError(
            f"{path} cannot be opened: {error.strerror}. {advice}", path=path
        ) from error


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def check_shard(path: Path, shard: Shard, array: Array, index: Path) -> None:
    """Check that a shard is a file of the right size in the folder of the index. Raises FormatError.

    The shard and the index may be links, as they are in caches. But a shard must lie in the index's folder, or in the
    one that the index itself is linked from, so that no data set reaches into a folder that its user did not name.
    """
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        raise MissingError(
            f"{path} is missing: a shard of {shard.bytes:,} bytes. Copy it beside its index, or run 'memload build' "
            "again.",
            path=path,
        ) from None
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error}.", path=path) from error
    if path.is_symlink():
        target, folders = path.resolve(), (index.parent.resolve(), index.resolve().parent)
        if target.parent not in folders:
            raise FormatError(
                f"{path} is a link to {target}, outside the folder of {index.name}. Move the shard here, or open the "
                f"index beside {target.name}.",
                path=path,
            )
    if not path.is_file():
        raise FormatError(
            f"{path} is not a file. Restore the shard, or run 'memload build' again.", path=path
        )
    if found != shard.bytes:
        state = "truncated" if found < shard.bytes else "too long"
        raise FormatError(
            f"{path} is {state}: it has {found:,} bytes instead of {shard.bytes:,} "
            f"({describe((shard.rows, *array.shape), array.descr)}). Restore it, or run 'memload build' again.",
            path=path,
        )


def check_header(
    path: Path, header: bytes, shard: Shard, array: Array, checks: np.ndarray, index: Path
) -> None:
    """Check that a shard's header fits its size, and its seal the checksums of its rows. Raises FormatError."""
    shape = (shard.rows, *array.shape)
    expected_seal = seal_of(checks)
    sealed = npy_header(array.descr, shape, expected_seal)
    if header in (sealed, npy_header(array.descr, shape)):
        return
    body, seal = header[: -len(expected_seal) - 1], header[-len(expected_seal) - 1 : -1]
    if sealed.startswith(body) and header.endswith(b"\n") and re.fullmatch(b"[0-9a-f]+", seal):
        raise ChecksumError(
            f"{path} does not belong to {index.name}: its rows have seal {seal.decode()} instead of {expected_seal}. "
            "Restore the file that belongs there, or run 'memload build' again.",
            path=path,
        )
    raise FormatError(
        f"{path} is damaged or belongs to another data set: its header is not that of "
        f"{describe(shape, array.descr)}; it starts with {header[:80]!r}. Restore the file, or run 'memload build' "
        "again.",
        path=path,
    )


def describe(shape: Sequence[int], descr: str) -> str:
    """Return, for example, ``10,000 rows of 224×224×3 uint8``."""
    return f"{shape[0]:,} rows of {'×'.join(map(str, shape[1:]))} {np.dtype(descr).name}"
