"""How far an unfinished build is: what `memload info` says of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from memload.building.journal import STATUS_BYTE
from memload.building.lock import Holder, is_locked
from memload.building.parts.status import PartsStatus, ShardStatus, parts_status, time_of_server
from memload.building.workspace import read_keys, read_plan
from memload.storage.format import output_paths
from memload.wording import counted, listed

#: The most lines of shards at work. Those that may be stuck are shown in any case.
_MAX_LINES = 24
#: The most parts, and the most interrupted shards, that are named.
_MAX_PARTS = 10


@dataclass(frozen=True)
class BuildStatus:
    """How far an unfinished build is. ``str()`` of it is a line, and `lines` are all there is."""

    path: Path  #: the output
    folder: Path  #: the folder of the unfinished build
    state: Literal["listing", "building", "publishing", "interrupted"]
    holder: Holder  #: who lists or publishes, or builds alone; empty for all others
    samples: int | None  #: those of the source; None while it is listed
    samples_done: int  #: samples that are converted or rejected
    parts: PartsStatus | None = None  #: of a build in parts
    seconds_listing: float | None = None  #: for how long the source has been listed by now

    @property
    def replaces(self) -> bool:
        """Whether there is a data set now that the build replaces in the end."""
        return output_paths(self.path)[0].exists()

    @property
    def images_per_second(self) -> float | None:
        """How fast all machines of a build in parts were in the last minute."""
        return None if self.parts is None else self.parts.images_per_second

    @property
    def seconds_left(self) -> float | None:
        """How long the build will take at that speed."""
        if self.samples is None or not self.images_per_second:
            return None
        return (self.samples - self.samples_done) / self.images_per_second

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON has it."""
        facts: dict[str, Any] = {
            "path": str(self.path),
            "state": self.state,
            "holder": self.holder._asdict() if self.holder.machine else None,
            "samples": self.samples,
            "samples_done": self.samples_done,
            "images_per_second": _rounded(self.images_per_second),
            "seconds_left": _rounded(self.seconds_left),
            "seconds_listing": _rounded(self.seconds_listing),
        }
        if self.parts is None:
            return facts
        begun = [status.as_dict() for status in self.parts.begun]
        return {**self.parts._asdict(), **facts, "begun": begun}

    def __str__(self) -> str:
        name, who = self.path.name, _who(self.holder)
        in_parts = "right now" if self.parts is None else "in parts"
        return {
            "listing": f"{name} is being begun by {who}, which has listed its source for "
            f"{_duration(self.seconds_listing or 0)}",
            "building": f"{name} is being built {in_parts}: {self._progress()}",
            "publishing": f"{name} is being published by {who}: {self._progress()}",
            "interrupted": f"{self.path}: its build is not complete ({self.folder}), and nothing "
            f"is at work: {self._progress()}. {self._what_to_do()}",
        }[self.state]

    def lines(self) -> Iterator[str]:
        """Yield the lines for a terminal."""
        yield str(self)
        if self.parts is None:
            return
        at_work = [status for status in self.parts.begun if status.is_at_work]
        stuck = [status for status in at_work if status.is_stuck]
        shown = [status for status in at_work if not status.is_stuck][: _MAX_LINES - len(stuck)]
        names = [_who(status.holder) for status in shown + stuck]
        width = max(map(len, names), default=0)
        for name, status in zip(names, shown + stuck, strict=True):
            yield f"  {name:{width}}  {_shard_line(status)}"
        if hidden := len(at_work) - len(names):
            yield f"  … and {counted(hidden, 'more shard')} at work"
        if stuck:
            yield (
                "Stop a process that hangs, and run its part again. The lock of a machine that "
                "died goes once the file server notices."
            )
        yield from _part_lines(self.parts)

    def _what_to_do(self) -> str:
        if self.parts is None or self.samples_done < (self.samples or 0):
            command = "the same 'memload build' again; it goes on where it stopped."
            if self.parts is None:
                return f"Run {command}"
            return f"Unless tasks of an executor are still to come, run {command}"
        return (
            "Run the same 'memload build' without --part: it publishes the data set, or says what "
            "is in the way, such as more rejected images than --max-rejects allows."
        )

    def _progress(self) -> str:
        if not self.samples:
            return "its source is not listed yet"
        share = f"({self.samples_done / self.samples:.0%})"
        texts = [f"{self.samples_done:,} of {self.samples:,} samples are done {share}"]
        if self.parts is not None:
            done = f"{self.parts.shards_done:,} of {counted(self.parts.shards, 'shard')} are done"
            texts = [done, f"{self.samples_done:,} of {self.samples:,} samples {share}"]
            texts += [f"{self.parts.rejected:,} rejected"] * bool(self.parts.rejected)
        if self.images_per_second:
            texts.append(f"{self.images_per_second:,.0f} images/s")
        if self.seconds_left:
            texts.append(f"about {_duration(self.seconds_left)} left")
        return ", ".join(texts)


def build_status(path: str | Path) -> BuildStatus | None:
    """Return how far the unfinished build of ``out.bin`` (or ``out.idx``) is; None without one.

    The build is not disturbed: no lock is taken, and none of its files is changed. It may run on
    other machines. A file without a name is made beside the output for a moment, to ask the file
    server for its time. Raises BuildError if the plan of the build is damaged.

    >>> memload.build_status("out.bin").samples_done
    490112
    """
    if not Path(path).name:
        return None
    output = Path(path).with_suffix(".bin")
    folder = output_paths(output)[1]
    plan = read_plan(folder) if folder.is_dir() else None
    is_held = is_locked(folder)
    holder = Holder.of(folder / "lock") if is_held else Holder()
    if plan is not None and "begun" not in plan:
        samples, done = _rows_done(folder)
        return BuildStatus(
            output, folder, "building" if is_held else "interrupted", holder, samples, done
        )
    parts = None if plan is None else parts_status(folder, plan)
    # A part holds the lock alone only to begin and to publish.
    if is_held and (parts is None or parts.shards_done < parts.shards):
        seconds = max(0.0, time_of_server(folder.parent) - folder.stat().st_mtime)
        return BuildStatus(output, folder, "listing", holder, None, 0, seconds_listing=seconds)
    if parts is None:
        return None
    is_building = any(status.is_at_work for status in parts.begun)
    state: Any = "publishing" if is_held else "building" if is_building else "interrupted"
    return BuildStatus(output, folder, state, holder, parts.samples, parts.samples_done, parts)


def _rows_done(folder: Path) -> tuple[int, int]:
    """Return how many samples a build by itself has, and how many are done."""
    samples = len(read_keys(folder / "keys") or ())
    try:
        records = np.fromfile(folder / "rows", np.uint8).reshape(samples, -1)
        return samples, int(np.count_nonzero(records[:, STATUS_BYTE]))
    except (OSError, ValueError, IndexError):  # it has only just begun
        return samples, 0


def _part_lines(parts: PartsStatus) -> Iterator[str]:
    """Yield which parts are done, and which shards nobody builds."""
    idle = [status for status in parts.begun if not status.is_at_work and status.samples_done]
    if idle:
        shown = [f"{_shard_line(status)}{_last(status.holder)}" for status in idle[:_MAX_PARTS]]
        more = f"; and {len(idle) - len(shown):,} more" if len(idle) > len(shown) else ""
        yield f"begun, but not being built now: {'; '.join(shown)}{more}"
    if not parts.parts:
        return
    if parts.parts_done:
        yield f"{_parts_are(parts.parts_done, parts.parts)} done"
    is_for_all = any(status.is_at_work and not status.holder.work for status in parts.begun)
    if parts.parts_left and not is_for_all:
        yield (
            f"{_parts_are(parts.parts_left, parts.parts)} not at work, with "
            f"{counted(parts.shards_left, 'shard')} to be built. Run "
            f"{'it' if len(parts.parts_left) == 1 else 'them'}, or the same command without --part."
        )


def _parts_are(numbers: Sequence[int], parts: int) -> str:
    """Return, for example, ``parts 3 and 5 of 8 are``."""
    if len(numbers) == 1:
        return f"part {numbers[0]} of {parts} is"
    names = listed(numbers, _MAX_PARTS)
    if len(numbers) <= _MAX_PARTS:
        names = " and ".join(names.rsplit(", ", 1))
    return f"parts {names} of {parts} are"


def _shard_line(status: ShardStatus) -> str:
    text = f"shard {status.shard}: {status.samples_done:,} of {counted(status.samples, 'sample')}"
    if status.is_stuck:
        return f"{text}, nothing new for {_duration(status.quiet_seconds)}: is it stuck?"
    rate = status.images_per_second
    return f"{text}, {rate:,.0f} images/s" if rate is not None else text


def _last(holder: Holder) -> str:
    """Say who was at a shard, if its process was stopped and could not give back the lock."""
    return f", last by {_who(holder)}" if holder.machine else ""


def _who(holder: Holder) -> str:
    """Return ``node1 (process 812), part 0 of 8``."""
    if not holder.machine:
        return "another process"
    is_part = holder.work.startswith("part ")
    return f"{holder.machine} (process {holder.process}){f', {holder.work}' if is_part else ''}"


def _duration(seconds: float) -> str:
    """Return ``40 s``, ``3 min`` or ``5.2 h``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 1)
