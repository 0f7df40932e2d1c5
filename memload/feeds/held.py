"""Rows that are held in memory, so that the device reads them from there in every epoch.

    claim ─▶ a thread ─┬─ windows: into the page cache, and registered ─┬─▶ table of rows
                       └─ further rows: to the device ──────────────────┘

Until a row is there, it is read from the file like all others. While batches wait for rows from the
disk, the thread hardly reads, so it does not slow them down.
"""

import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch

from memload.errors import FeedError, MemloadError
from memload.feeds import windows
from memload.feeds.budget import Claim, DeviceClaim, least_left
from memload.feeds.device_rows import DeviceRows, shared_rows
from memload.feeds.registered import RegisteredFile, registered_bytes, shared_file
from memload.feeds.row_ranges import FoundRows, RowRanges, RowTable
from memload.feeds.row_reader import RowReader
from memload.feeds.windows import pieces_of
from memload.machine import available_memory, starting_threads
from memload.ranks import local_replicas
from memload.storage.mapping import disk_reads
from memload.storage.shards import Shards
from memload.wording import size_text

#: What the thread reads before it looks whether rows are waited for: 20 ms at 1.5 GB/s.
_STEP_BYTES = 32 << 20
_MAX_STEP_BYTES = 4 * _STEP_BYTES
#: While rows are waited for, the threads of all ranks of a host read for this share of the time.
_BUSY_SHARE = 0.05
#: How long `HeldRows.close` waits for the thread, which may be reading from a slow disk.
_CLOSE_SECONDS = 30.0

#: What reads rows that batches wait for, in this process.
_readers: weakref.WeakSet[RowReader] = weakref.WeakSet()

logger = logging.getLogger("memload")


class HeldRows:
    """The rows of an array that a claim names, held in memory that the device reads.

    A thread brings them in, in the order of the files. It ends early if pages cannot be registered,
    a file cannot be read, or RAM runs short. Then a warning says why, and ``problem`` as well. The
    rows that are missing are read from the files.

    ``reader`` reads the other rows of the array. The thread leaves the disk to it, and to the
    readers of other arrays and Loaders. If not a single page can be registered, this
    raises FeedError or, with ``may_hold_nothing``, holds nothing.
    """

    def __init__(
        self,
        shards: Shards,
        claim: Claim,
        device: torch.device,
        reader: RowReader,
        *,
        may_hold_nothing: bool = False,
    ) -> None:
        shards.check_sizes(range(len(shards.maps)))
        self._device, self._state = device, _State(shards, claim)
        self._files: dict[int, RegisteredFile] = {}
        self._on_device: DeviceRows | None = None
        try:
            self._files = _open_files(shards, claim.plan, device)
        except FeedError as error:
            if not may_hold_nothing:
                raise
            self._state.give_up(error)
        if claim.on_device is not None:
            self._on_device = self._state.allocate(claim.on_device)
            if self._on_device is None:
                claim.on_device = None
        _readers.add(reader)
        filler = _Filler(self._files, self._on_device, device, reader, self._state)
        self._thread = threading.Thread(target=filler.run, name="memload-fill", daemon=True)
        with starting_threads("use feed='pinned' with num_threads=0"):
            self._thread.start()
        self._stop_thread = weakref.finalize(self, _stop, self._state.stop, self._thread)

    @property
    def problem(self) -> str:
        """Why less is held than was claimed; empty if nothing is wrong."""
        return self._state.problem

    def is_complete(self) -> bool:
        """Return whether the thread has ended: no more rows will be held."""
        return self._state.complete.is_set()

    def find(self, rows: np.ndarray) -> FoundRows:
        """Return where rows (int64) are held by now. See `read_on_current_stream`."""
        return self._state.table.ranges.find(rows)

    def count(self, rows: np.ndarray | None) -> "HeldCounts":
        """Count how many of some rows, ascending, are held. None: of all rows of the array."""
        state, planned_on_device = self._state, self._state.planned_on_device
        is_complete = state.complete.is_set()  # first: what is held by then is counted
        now, on_device = state.table.ranges.count(rows), state.device_table.ranges.count(rows)
        if is_complete:
            return HeldCounts(now, now, on_device)
        planned = state.kept.count(rows)
        if planned_on_device is not None:
            planned += planned_on_device.count(rows)
        return HeldCounts(now, planned, on_device)

    def are_kept(self, rows: np.ndarray) -> np.ndarray:
        """Return which rows are to be held in the page cache: bool. They are read through it."""
        return self._state.kept.find(rows).are_held

    def read_on_current_stream(self) -> None:
        """Announce copies on the current stream. Memory is only freed when it is done."""
        stream = torch.cuda.current_stream(self._device)
        for file in self._files.values():
            file.readers.add(stream)
        if self._on_device is not None:
            self._on_device.readers.add(stream)

    def close(self) -> None:
        """Stop the thread and let go of the memory. The last Loader that shares it frees it."""
        self._stop_thread()
        self._state.stop_claiming()
        self._files, self._on_device = {}, None


class HeldCounts(NamedTuple):
    """Numbers of rows: held by now, to be held in the end, and held on the device by now."""

    now: int
    planned: int
    on_device: int


class _State:
    """What the thread has done: which rows are held by now, and what went wrong.

    The thread refers to this, and not to `HeldRows`, which would never be dropped otherwise.
    """

    def __init__(self, shards: Shards, claim: Claim) -> None:
        self.shards, self.plan = shards, claim.plan
        self._claim = weakref.ref(claim)  # it ends when its feed is closed
        self.table = RowTable(shards)
        #: The part of it that is on the device.
        self.device_table = RowTable(shards)
        #: What is to be held on the device.
        self.planned_on_device: RowRanges | None = None
        #: What is to be held in the page cache, and therefore read through it.
        self.kept = RowRanges(shards, pieces_of(claim.plan))
        #: The part of the plan that is held by now.
        self.held = np.zeros_like(claim.plan)
        self.problem = ""
        self.stop, self.complete = threading.Event(), threading.Event()

    def give_up(self, error: Exception) -> None:
        """Hold nothing more in RAM, and leave the rest of the claim to other Loaders."""
        self.plan, self.kept = self.held, RowRanges(self.shards, pieces_of(self.held))
        self.stop_claiming()
        # As text: a log record may be kept, and the traceback would keep the files.
        if isinstance(error, MemloadError):
            self.warn(str(error))
        else:
            self.warn(f"No more rows are held in memory: {error!r}. They are read from the files.")

    def stop_claiming(self) -> None:
        """Leave the part of the claim that is not held to other Loaders."""
        if (claim := self._claim()) is not None:
            claim.plan = self.held

    def warn(self, problem: str) -> None:
        """Say what went wrong."""
        self.problem = f"{self.problem} {problem}".strip()
        logger.warning("%s", problem)

    def allocate(self, claim: DeviceClaim) -> DeviceRows | None:
        """Return memory on the device for what is claimed there; None if there is too little."""
        try:
            rows = shared_rows(self.shards, claim)
        except torch.OutOfMemoryError:
            free, _ = torch.cuda.mem_get_info(claim.device)
            self.warn(
                f"No rows are held on {claim.device}: they need {size_text(claim.size)} of its "
                f"memory, of which {size_text(free)} are free. Use a smaller resident_bytes."
            )
            return None
        self.planned_on_device = rows.ranges
        return rows


class _Filler:
    """Reads windows from the disk, registers them, and adds them to a table. Then the device."""

    def __init__(
        self,
        files: Mapping[int, RegisteredFile],
        on_device: DeviceRows | None,
        device: torch.device,
        reader: RowReader,
        state: _State,
    ) -> None:
        self._files, self._device, self._reader, self._state = files, device, reader, state
        self._on_device = on_device
        self._step, self._busy_share = _STEP_BYTES, _BUSY_SHARE / local_replicas()
        # Pages that are registered already still count as available, and are not deducted here. So
        # a later Loader leaves as much as the first one.
        self._least_left = least_left(available_memory() or 0)
        #: How much may be registered, and until when, before the available RAM is looked at again.
        self._unchecked, self._next_check = 0, 0.0

    def run(self) -> None:
        """Bring in all that is claimed, unless stopped."""
        for bring_in in (self._register_windows, self._copy_to_device):
            try:
                bring_in()
            # Whatever it is, such as too little memory for a buffer: the rows are read from the
            # files, which raises an error for those that cannot be.
            except Exception as error:  # noqa: BLE001
                self._state.give_up(error)
        if not self._state.stop.is_set():
            self._state.complete.set()

    def _register_windows(self) -> None:
        state, plan = self._state, self._state.plan
        for number, window in np.argwhere(plan).tolist():
            file, size = self._files[number], int(plan[number, window])
            start = window * windows.WINDOW_BYTES
            if start not in file.registered:
                self._check_memory(size)
            self._read(file, start, start + size)
            if state.stop.is_set():
                return
            held = file.register(window, size, self._device)
            state.held[number, window] = held
            state.table.add(number, start, start + held, file.address + start)

    def _copy_to_device(self) -> None:
        state, rows = self._state, self._on_device
        if rows is None or state.stop.is_set():
            return
        buffer = rows.allocate_buffer(self._reader)
        for step in rows.steps():
            self._in_turn(rows.bring_in, step, self._reader, buffer)
            if state.stop.is_set():
                return
            for table in (state.device_table, state.table):
                table.add(*step)

    def _read(self, file: RegisteredFile, start: int, stop: int) -> None:
        """Bring a part of a file into RAM. Steps become larger while all of it is there already.

        Each step waits for the GIL, for milliseconds while another thread is busy in Python.
        """
        while start < stop and not self._state.stop.is_set():
            step = min(self._step, stop - start)
            from_disk = self._in_turn(file.fault_in, start, step)
            self._step = _STEP_BYTES if from_disk else min(2 * step, _MAX_STEP_BYTES)
            start += step

    def _in_turn(self, read: Callable[..., None], *arguments: object) -> bool:
        """Read a part. If it came from the disk, pause until no batch waits for rows.

        The pause takes at most 19 times as long as the read. Returns whether the part came from
        the disk.
        """
        reads_before, begun = disk_reads(), time.monotonic()
        read(*arguments)
        if disk_reads() == reads_before:
            return False
        took = time.monotonic() - begun
        end = time.monotonic() + took * (1 / self._busy_share - 1)
        while not self._state.stop.is_set() and time.monotonic() < end:
            if _wait_until_idle(min(0.1, took)):
                break
        return True

    def _check_memory(self, size: int) -> None:
        """Raise FeedError if the system would be left with too little RAM.

        This look takes 27 ms while another thread is busy in Python, since reading each file gives
        up the GIL. So it is taken once a second, or when half of what was left is used.
        """
        self._unchecked -= size
        if self._unchecked >= 0 and time.monotonic() < self._next_check:
            return
        available = available_memory()
        if available is None:  # the system does not report it
            return
        left = max(0, available - registered_bytes())
        if left - size < self._least_left:
            held = size_text(registered_bytes())
            raise FeedError(
                f"No more rows are held in RAM than {held}: {size_text(left)} are left, and the "
                f"next {size_text(size)} would leave less than {size_text(self._least_left)} to "
                "other uses. The other rows are read from the disk in every epoch. To avoid this "
                f"warning, free some RAM, or use feed='disk' and cache_bytes of at most {held}."
            )
        self._unchecked = (left - size - self._least_left) // 2
        self._next_check = time.monotonic() + 1


def _wait_until_idle(seconds: float) -> bool:
    """Wait until no batch waits for rows, at most so long for each reader; return whether so."""
    return all(reader.idle.wait(seconds) for reader in list(_readers))


def _open_files(
    shards: Shards, plan: np.ndarray, device: torch.device
) -> dict[int, RegisteredFile]:
    """Return the files of an array of which a plan holds parts, by number. Raises FeedError."""
    numbers = np.flatnonzero(plan.any(1)).tolist()
    if numbers and shards.array.row_bytes > windows.WINDOW_BYTES:
        raise FeedError(
            f"rows of {shards.array.row_bytes:,} bytes are too large to register: the limit is "
            f"{windows.WINDOW_BYTES:,} bytes. Use feed='pinned'."
        )
    files = {}
    for number in numbers:
        size = shards.array.shards[number].bytes
        files[number] = shared_file(shards.paths[number], shards.descriptors[number], size)
    if numbers:
        files[numbers[0]].probe(device)
    return files


def _stop(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    if thread is not threading.current_thread():
        thread.join(_CLOSE_SECONDS)
