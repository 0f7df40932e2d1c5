"""The memory in which the Loaders of a process hold rows: they share a budget of RAM.

    plans: windows that hold used rows ─▶ claim_all ─▶ claims: those of them that fit the budget
                                          ▲       │      │
           what other Loaders have claimed└───────┘      ▼
                                             hold_on_device: further rows, on a GPU

What a Loader claims is no longer free for Loaders that are made later. If several Loaders claim the
same part of a file, it counts once.
"""

import os
import threading
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from memload.feeds import windows
from memload.feeds.row_ranges import RowRanges
from memload.feeds.windows import pieces_of, plan_within
from memload.storage.shards import Shards

#: RAM that is left to everything else. With 3 GB left beside what was held, a host kept running;
#: with less, its OOM killer struck.
RESERVE_BYTES = 3 << 30


def reserve_bytes(available: int) -> int:
    """Return how much of the available RAM a budget leaves to other uses: 3 GiB, at most half."""
    return max(0, min(RESERVE_BYTES, available // 2))


def least_left(available: int) -> int:
    """Return how much of it must be left while rows are brought in: 3 GiB, at most a quarter.

    That is less than `reserve_bytes` where little is available. What batches take comes out of the
    reserve. If all of that had to stay free, a budget of half could never be used up.
    """
    return max(0, min(RESERVE_BYTES, available // 4))


class FilesClaim:
    """The parts of some files that are held in RAM, or are about to be.

    ``files`` identifies the files, see `identity_of`. ``plan`` is what is held of them; see
    windows.py for plans. The claim lasts as long as somebody refers to it.
    """

    #: What is held on a device besides.
    on_device: "DeviceClaim | None" = None

    def __init__(self, files: Sequence[tuple[int, ...]], plan: np.ndarray) -> None:
        self.files, self.plan = files, plan


class Claim(FilesClaim):
    """The parts of an array's files that a Loader holds in RAM, or is about to hold.

    ``wanted_plan`` is what would be held with a larger budget.
    """

    def __init__(
        self,
        shards: Shards,
        files: Sequence[tuple[int, ...]],
        wanted_plan: np.ndarray,
        plan: np.ndarray,
    ) -> None:
        super().__init__(files, plan)
        self.shards, self.wanted_plan = shards, wanted_plan

    @property
    def wanted(self) -> int:
        """How many bytes would be held with a larger budget."""
        return int(self.wanted_plan.sum())

    @property
    def size(self) -> int:
        """How many bytes are held."""
        return int(self.plan.sum())


class DeviceClaim(NamedTuple):
    """Rows of an array that are held in the memory of a device.

    ``ranges`` are int64 ``(n, 2)``: the first row of each range, and the row behind the last.
    Claims with the same ``key`` share the memory.
    """

    device: torch.device
    key: tuple[object, ...]
    ranges: np.ndarray
    row_bytes: int

    @property
    def size(self) -> int:
        """How many bytes it takes."""
        return int((self.ranges[:, 1] - self.ranges[:, 0]).sum()) * self.row_bytes

    def first_rows(self, number: int) -> "DeviceClaim | None":
        """Return a claim for this many of the rows; None for none."""
        length = self.ranges[:, 1] - self.ranges[:, 0]
        before = np.cumsum(length) - length
        stop = np.minimum(self.ranges[:, 1], self.ranges[:, 0] + number - before)
        some = np.stack([self.ranges[:, 0], stop], 1)[before < number]
        return self._replace(ranges=some) if len(some) else None


_claims: weakref.WeakSet[FilesClaim] = weakref.WeakSet()
_lock = threading.Lock()


def _begin_in_child() -> None:
    """Forget the claims of the parent process, and a lock that one of its threads may hold."""
    global _lock  # noqa: PLW0603  # there is no other way to renew it
    _lock = threading.Lock()
    _claims.clear()


os.register_at_fork(after_in_child=_begin_in_child)


def identity_of(descriptor: int) -> tuple[int, ...]:
    """Return what identifies an open file in this process: process, device, inode and time."""
    status = os.fstat(descriptor)
    return os.getpid(), status.st_dev, status.st_ino, status.st_mtime_ns


def claimed_bytes() -> int:
    """Return how many bytes the Loaders of this process hold, or are about to hold."""
    with _lock:
        return int(sum(plan.sum() for plan in _claimed_by_file().values()))


def claim_registered(file: tuple[int, ...], size: int) -> FilesClaim:
    """Return a claim on a file of so many bytes, whose plan says what is registered of it."""
    with _lock:
        claim = FilesClaim([file], np.zeros((1, -(-size // windows.WINDOW_BYTES)), np.int64))
        _claims.add(claim)
    return claim


def claim_all(
    arrays: Sequence[tuple[Shards, np.ndarray]],
    budget: float,
    contents: Sequence[tuple[int, ...]] | None = None,
) -> list[Claim]:
    """Claim parts of the files of some arrays, as far as a budget in bytes allows.

    ``arrays`` are the arrays of a Loader, each with the plan of what is wanted of it. If they do
    not all fit, the same share of each is claimed.

    The budget is for all claims of the process together. What others have claimed of the same files
    is claimed as well, and costs nothing. A plan usually counts bytes from the beginning of each
    window. If it counts others, ``contents`` identifies them, one entry for each array. Then only
    claims with the same contents are shared.
    """
    contents = contents or [() for _ in arrays]
    with _lock:
        claimed_by_file = _claimed_by_file()
        left = max(0, budget - sum(int(plan.sum()) for plan in claimed_by_file.values()))
        found = [
            _find_plan(shards, plan, content, claimed_by_file)
            for (shards, plan), content in zip(arrays, contents, strict=True)
        ]
        costs = [
            int((plan - np.minimum(plan, claimed)).sum())
            for (_, plan), (_, claimed) in zip(arrays, found, strict=True)
        ]
        total = sum(costs)
        to_spend = int(min(left, total))
        claims = [
            Claim(shards, files, plan, plan_within(plan, claimed, to_spend * cost // max(1, total)))
            for (shards, plan), (files, claimed), cost in zip(arrays, found, costs, strict=True)
        ]
        _claims.update(claims)
    return claims


def hold_on_device(claims: Sequence[Claim], limit: int, device: torch.device) -> None:
    """Claim the memory of a device for rows that are not held in RAM, up to a limit in bytes.

    ``claims`` are those of all arrays of a Loader. If not all rows fit, the first ones are taken,
    the same share of each array. The limit is for all Loaders of the process together. Rows of the
    same array that another Loader holds there already cost nothing.
    """
    with _lock:
        on_device = [one.on_device for one in list(_claims) if one.on_device is not None]
        claimed = {one.key: one for one in on_device if one.device == device}
        wanted = [_wanted_on_device(claim, device) for claim in claims]
        costs = [0 if one.key in claimed else one.size for one in wanted]
        left = max(0, limit - sum(one.size for one in claimed.values()))
        to_spend = min(left, sum(costs))
        for claim, one, cost in zip(claims, wanted, costs, strict=True):
            number = to_spend * cost // max(1, sum(costs)) // one.row_bytes
            claim.on_device = claimed.get(one.key) or one.first_rows(number)


def _wanted_on_device(claim: Claim, device: torch.device) -> DeviceClaim:
    """Return a claim for all rows of wanted windows that are not held in RAM."""
    wanted = RowRanges(claim.shards, pieces_of(claim.wanted_plan))
    ranges = wanted.without(RowRanges(claim.shards, pieces_of(claim.plan)))
    key = (device, *claim.files, ranges.tobytes())
    return DeviceClaim(device, key, ranges, claim.shards.array.row_bytes)


def _find_plan(
    shards: Shards,
    plan: np.ndarray,
    content: tuple[int, ...],
    claimed_by_file: dict[tuple[int, ...], np.ndarray],
) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """Return the identities of an array's files, and what is claimed of them: a plan."""
    files = [(*identity_of(descriptor), *content) for descriptor in shards.descriptors]
    claimed = np.zeros_like(plan)
    for number, file in enumerate(files):
        of_file = claimed_by_file.get(file, claimed[number])[: plan.shape[1]]
        claimed[number, : len(of_file)] = of_file
    return files, claimed


def _claimed_by_file() -> dict[tuple[int, ...], np.ndarray]:
    """Return the bytes of each window of each file that are claimed by anyone."""
    claimed: dict[tuple[int, ...], np.ndarray] = {}
    for claim in list(_claims):
        for file, plan in zip(claim.files, claim.plan, strict=True):
            both = [plan, claimed.get(file, plan)]
            width = max(map(len, both))
            claimed[file] = np.maximum(*(np.pad(one, (0, width - len(one))) for one in both))
    return claimed
