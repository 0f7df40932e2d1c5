"""What drills stand on: pictures, builds in processes of their own, and a look at what they leave."""

import contextlib
import functools
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

import memload

PICTURES = 120
SIDE = 16
ROW = SIDE * SIDE * 3
#: No build here takes longer than some seconds: what has not ended by then hangs.
LIMIT = 60.0


class Failed(Exception):  # noqa: N818  # as pytest says it
    """A drill found what must not be."""


class Skipped(Exception):  # noqa: N818
    """A drill cannot be held on this system; the text says why."""


class Shared:
    """What all drills start from, made when it is first asked for. Nobody writes into it."""

    def __init__(self, place: Path) -> None:
        self.place = place

    @functools.cached_property
    def images(self) -> Path:
        """The folder of pictures."""
        return draw(self.place / "images", PICTURES)

    @functools.cached_property
    def others(self) -> Path:
        """As many pictures of the same names, of something else."""
        return draw(self.place / "others", PICTURES, seed=1)

    @functools.cached_property
    def built(self) -> Path:
        """The folder in which ``out.bin`` is what an undisturbed build makes of `images`."""
        return self._build(self.images, "built")

    @functools.cached_property
    def built_of_others(self) -> Path:
        """The same of `others`."""
        return self._build(self.others, "built of others")

    @functools.cached_property
    def expected(self) -> dict[str, str]:
        """Digests of the files of `built`."""
        return bytes_of(self.built)

    @functools.cached_property
    def seconds(self) -> float:
        """How long workers work at a build."""
        (self.place / "timed").mkdir()
        process = start(command(self.images, self.place / "timed" / "out.bin"))
        at_work(process)
        started = time.monotonic()
        end(process)
        return time.monotonic() - started

    def _build(self, images: Path, name: str) -> Path:
        (self.place / name).mkdir()
        build(images, self.place / name / "out.bin")
        return self.place / name


@dataclass(frozen=True)
class Ground:
    """A folder of a drill's own, what it starts from, its dice, and whether it takes its time."""

    place: Path
    shared: Shared
    dice: random.Random
    long: bool

    def times(self, short: int, long: int) -> int:
        """Return how often something is done."""
        return long if self.long else short

    def copy(self) -> Path:
        """Return ``out.bin`` of this drill's own, built of the pictures."""
        for path in self.shared.built.iterdir():
            shutil.copy(path, self.place)
        return self.place / "out.bin"

    def wait(self, process: "subprocess.Popen[str]", most: float = 1.0) -> None:
        """Wait for a random moment of a build: one time in five while it begins, else while it works."""
        if self.dice.random() < 0.8:
            at_work(process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(self.dice.uniform(0, most) * self.shared.seconds)


def expect(fine: bool, what: str) -> None:
    """Fail the drill unless something is as it must be."""
    if not fine:
        raise Failed(what)


def draw(root: Path, count: int, *, seed: int = 0, side: int = 480) -> Path:
    """Make pictures of noise in three class folders, large enough that decoding them takes its time; return ``root``.

    Two more are no pictures, so that there is a ledger to be written.
    """
    rng = np.random.default_rng(seed)
    for number in range(count):
        path = root / f"class {number % 3}" / f"{number:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        if number in (5, 6):
            path.write_bytes(b"no picture")
        else:
            small = Image.fromarray(rng.integers(0, 256, (side // 8, side // 8, 3), np.uint8))
            small.resize((side, side), Image.Resampling.NEAREST).save(path, quality=90)
    return root


def command(images: Path, output: Path, *more: str, rows_a_shard: int = 20) -> list[str]:
    """Return the command line of a build by two workers, into shards."""
    shard = str(4096 + rows_a_shard * ROW)
    options = ["--size", str(SIDE), "--num-workers", "2", "--shard-size", shard, *more]
    return [sys.executable, "-m", "memload", "build", str(images), str(output), *options]


def start(arguments: Sequence[str], **options: object) -> "subprocess.Popen[str]":
    """Start a process in a group of its own, so that killing the group hits nobody else."""
    return subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        **options,  # type: ignore[call-overload]
    )


def end(process: "subprocess.Popen[str]", limit: float = LIMIT) -> tuple[int, str]:
    """Wait for a process; return its status and what it said on stderr."""
    try:
        said, told = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        kill_group(process)
        process.communicate(timeout=LIMIT)
        raise Failed(f"it hung: not at its end after {limit:g} s") from None
    return process.returncode, told + said


def run(arguments: Sequence[str], **options: object) -> tuple[int, str]:
    """Run a process to its end."""
    return end(start(arguments, **options))


def kill_group(process: "subprocess.Popen[str]") -> None:
    """Kill a process and all that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()


def build(images: Path, output: Path, *more: str) -> None:
    """Build to the end, or fail the drill."""
    status, told = run(command(images, output, *more))
    expect(status == 0, f"a build ended with {status}: {told[-300:]}")


def bytes_of(place: Path, stem: str = "out") -> dict[str, str]:
    """Return a digest of every file that belongs to an output, by name."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(place.glob(f"{stem}*"))
        if path.is_file()
    }


def clear(place: Path, stem: str = "out") -> None:
    """Remove all that belongs to an output."""
    for path in place.glob(f"{stem}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def refused(output: Path) -> None:
    """Fail the drill unless an unfinished build is told as such."""
    try:
        memload.MemmapDataset(output)
    except memload.MissingError:
        return
    except memload.MemloadError as error:
        raise Failed(
            f"an unfinished build: expected MissingError, found {type(error).__name__}: {error}"
        ) from error
    raise Failed("an unfinished build was opened")


def told_well(status: int, told: str, *wanted: str) -> None:
    """Fail the drill unless a command ended with status 1, one line of an error, and these words in it."""
    last = told.strip().splitlines()[-1] if told.strip() else ""
    expect(status == 1, f"expected exit status 1, found {status}: {told[-300:]}")
    expect("Traceback" not in told, f"expected one line, found a traceback: {told[-500:]}")
    expect(last.startswith("memload: "), f"expected a line of memload's, found {last!r}")
    for word in wanted:
        expect(word in last, f"expected {word!r} in the error, found {last!r}")


def wait_for(
    what: Callable[[], object], process: "subprocess.Popen[str] | None" = None, limit: float = LIMIT
) -> bool:
    """Wait until something is so; return False where that comes too late, or the process has ended."""
    deadline = time.monotonic() + limit
    while not what():
        if time.monotonic() > deadline or (process is not None and process.poll() is not None):
            return bool(what())
        time.sleep(0.002)
    return True


def at_work(process: "subprocess.Popen[str]") -> None:
    """Wait until a build has its two workers, or has ended."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")

    def two() -> bool:
        with contextlib.suppress(OSError):
            return len(children.read_text().split()) >= 2
        return True

    wait_for(two, process)


def group(process: int) -> list[int]:
    """Return the living processes of a group, but for its leader."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            number, rest = int(stat.parent.name), stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if number != process and rest[0] not in "ZX" and int(rest[2]) == process:
            found.append(number)
    return sorted(found)
