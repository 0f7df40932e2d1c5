"""How far the shards of a build in parts are, from what is in its folder.

No lock is taken, and nothing in the folder is changed. Times are those of files, since the clocks
of machines differ.
"""

import contextlib
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from memload.building.checked_json import parse_json, record
from memload.building.journal import REJECTED, STATUS_BYTE
from memload.building.lock import Holder, is_locked
from memload.building.parts.workspace import (
    DoneShard,
    done_file,
    part_of_work,
    rows_before,
    shard_folder,
    shards_in,
)
from memload.building.plans import Begun
from memload.errors import BuildError

#: Seconds without a change after which the holder of a lock may be stuck.
_STUCK_SECONDS = 120.0

#: Seconds over which the speed is measured, until now.
_SPEED_SECONDS = 60.0


class ShardStatus(NamedTuple):
    """A shard that is begun and not done, and who builds it, or has built it until now."""

    shard: int
    samples: int
    samples_done: int  #: converted or rejected
    rejected: int
    holder: Holder
    images_per_second: float | None  #: since the holder began; None if that is not known
    quiet_seconds: float  #: since anything has changed
    is_at_work: bool  #: whether the shard is locked

    @property
    def is_stuck(self) -> bool:
        """Whether it is locked, and nothing has changed for two minutes."""
        return self.is_at_work and self.quiet_seconds > _STUCK_SECONDS

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON has it."""
        rate, quiet = self.images_per_second, round(self.quiet_seconds, 1)
        facts = {**self._asdict(), **self.holder._asdict(), "quiet_seconds": quiet}
        facts["images_per_second"] = None if rate is None else round(rate, 1)
        del facts["holder"]
        return {**facts, "is_stuck": self.is_stuck}


class PartsStatus(NamedTuple):
    """How far the shards of all parts are."""

    samples: int
    samples_done: int  #: converted or rejected
    rejected: int
    shards: int
    shards_done: int
    begun: Sequence[ShardStatus]  #: the shards that are begun and not done
    images_per_second: float | None  #: of all machines in the last minute
    parts: int | None  #: how many parts there are, if any process names its part
    parts_done: Sequence[int]
    parts_left: Sequence[int]  #: those that are neither done nor at work
    shards_left: int  #: the shards of these


class _Span(NamedTuple):
    """Some rows that were converted from one time to another."""

    rows: int
    start: float
    stop: float

    def rows_since(self, time: float) -> float:
        """Return how many were converted since a time, if all took as long."""
        seconds = self.stop - self.start
        share = min(1.0, (self.stop - time) / seconds) if seconds > 0 else 1.0
        return self.rows * max(0.0, share)


def parts_status(folder: Path, plan: dict[str, Any]) -> PartsStatus:
    """Return how far the build in a folder is. ``plan`` is its plan."""
    begun_by, now = plan["begun"], time_of_server(folder.parent)
    samples = _checked_samples(folder, begun_by.rows)
    rows = plan["plan"]["rows per shard"] or samples
    shards = range(-(-samples // rows))
    done = shards_in(folder / "done") & set(shards)
    begun, spans, rejected = [], list[_Span](), 0
    for facts, stop in _done(folder, done):
        rejected += facts.rejected
        if stop > now - _SPEED_SECONDS:
            spans.append(_Span(facts.converted, stop - facts.seconds, stop))
    for shard in sorted(shards_in(folder / "shards") & set(shards) - done):
        status, span = _begun_shard(folder, shard, min(rows, samples - shard * rows), now)
        begun.append(status)
        spans += [] if span is None else [span]
    samples_done = sum(min(rows, samples - shard * rows) for shard in done)
    at_work = [status for status in begun if status.is_at_work]
    return PartsStatus(
        samples=samples,
        samples_done=samples_done + sum(status.samples_done for status in begun),
        rejected=rejected + sum(status.rejected for status in begun),
        shards=len(shards),
        shards_done=len(done),
        begun=begun,
        images_per_second=_speed(spans, now) if at_work else None,
        **_of_parts(_number_of_parts(begun_by, at_work), shards, done, at_work),
    )


def _checked_samples(folder: Path, samples: int) -> int:
    """Return how many samples a plan says. Raises BuildError if there are not as many names."""
    # Each name has an offset of eight bytes in that file.
    if not 0 < samples <= (folder / "keys").stat().st_size // 8:
        raise BuildError(
            f"{folder / 'plan.json'} is damaged: it says {samples:,} samples, and there are fewer "
            "names in the file keys beside it. Restore it, or delete that folder to begin anew.",
            path=folder,
        )
    return samples


def _of_parts(
    parts: int | None, shards: range, done: Set[int], at_work: Sequence[ShardStatus]
) -> dict[str, Any]:
    """Return which parts are done, and which are neither done nor at work, as in `PartsStatus`."""
    if parts is None:
        return {"parts": None, "parts_done": [], "parts_left": [], "shards_left": 0}
    unfinished = set(shards) - done
    waiting = unfinished - {status.shard for status in at_work}
    busy = {part_of_work(status.holder.work) for status in at_work}
    left = {shard % parts for shard in waiting}
    left = {part for part in left if (part, parts) not in busy}
    parts_unfinished = {shard % parts for shard in unfinished}
    # Of too many parts, some have no shards. These are left out.
    parts_done = set(range(min(parts, len(shards)))) - parts_unfinished
    return {
        "parts": parts,
        "parts_done": sorted(parts_done),
        "parts_left": sorted(left),
        "shards_left": sum(shard % parts in left for shard in waiting),
    }


def _begun_shard(
    folder: Path, shard: int, samples: int, now: float
) -> tuple[ShardStatus, _Span | None]:
    """Return how far a shard is, and what its holder has converted of it."""
    path = shard_folder(folder, shard)
    # Asked for first: a shard that is done now, or given back, is not taken for a stuck one.
    is_at_work, holder = is_locked(path), Holder.of(path / "lock")
    records, written = _read(path / "rows")
    begun = _read(path / "begun")[1]
    usable = records[: len(records) // samples * samples].reshape(samples, -1)
    statuses = usable[:, STATUS_BYTE] if usable.size else usable
    done = int(np.count_nonzero(statuses))
    span = None
    if is_at_work and begun and written > begun:
        span = _Span(max(0, done - rows_before(path)), begun, written)
    changed = max(begun, written, _read(path / "lock")[1])
    status = ShardStatus(
        shard,
        samples,
        done,
        int(np.count_nonzero(statuses == REJECTED)),
        holder,
        span.rows / (span.stop - span.start) if span else None,
        max(0.0, now - changed),
        is_at_work,
    )
    return status, span


def _read(path: Path) -> tuple[np.ndarray, float]:
    """Return the bytes of a file, and when it was last written; nothing and 0.0 if it is missing.

    NFS asks the server for the times of a file when it is opened.
    """
    with contextlib.suppress(OSError), path.open("rb") as file:
        changed = os.fstat(file.fileno()).st_mtime
        return np.frombuffer(file.read(), np.uint8), changed
    return np.zeros(0, np.uint8), 0.0


def _done(folder: Path, shards: Iterable[int]) -> Iterator[tuple[DoneShard, float]]:
    """Yield what the files of shards that are done say, and when they were written."""
    for shard in shards:
        content, written = _read(done_file(folder, shard))
        with contextlib.suppress(ValueError):  # it is damaged
            yield record(DoneShard, parse_json(content.tobytes())), written


def _speed(spans: Iterable[_Span], now: float) -> float | None:
    """Return how many rows a second all machines have converted in the last minute."""
    spans = list(spans)
    if not spans:
        return None
    start = max(now - _SPEED_SECONDS, min(span.start for span in spans))
    return sum(span.rows_since(start) for span in spans) / max(now - start, 0.001)


def _number_of_parts(begun_by: Begun, at_work: Iterable[ShardStatus]) -> int | None:
    """Return of how many parts most of those at work are, or else the one that began the build."""
    parts = [part_of_work(status.holder.work) for status in at_work]
    numbers = Counter(part[1] for part in parts if part is not None)
    if numbers:
        return numbers.most_common(1)[0][0]
    part = part_of_work(begun_by.work)
    return None if part is None else part[1]


def time_of_server(folder: Path) -> float:
    """Return the time by the clock that the files of a folder get their times from."""
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime
    return time.time()  # nothing may be written here
