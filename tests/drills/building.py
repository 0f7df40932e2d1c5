"""Builds that are killed, run out of room, lose workers or pictures, or meet another build."""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import memload
from tests.drills.ground import (
    LIMIT,
    PICTURES,
    Failed,
    Ground,
    Skipped,
    at_work,
    build,
    bytes_of,
    clear,
    command,
    draw,
    end,
    expect,
    group,
    kill_group,
    refused,
    run,
    start,
    told_well,
    wait_for,
)


def _linux() -> None:
    if sys.platform != "linux":
        raise Skipped("process groups and /proc are needed to see that nobody is left")


def killed(ground: Ground) -> str:
    """A build is killed with SIGKILL again and again, and now and then by Ctrl-C."""
    _linux()
    images, expected = ground.shared.images, ground.shared.expected
    output = ground.place / "out.bin"
    ways = ("the parent alone", "the whole group", "the parent alone", "the whole group", "Ctrl-C")
    hits, times, ended, complete, rounds = dict.fromkeys(ways, 0), ground.times(6, 100), 0, 0, 0
    while hits["the parent alone"] + hits["the whole group"] < times:
        expect(rounds < 10 * times, "no build lived long enough to be killed")
        way, rounds = ways[rounds % 5], rounds + 1
        process = start(command(images, output))
        ground.wait(process)
        workers = group(process.pid)
        if process.poll() is None:
            hits[way] += 1
            if way == "the parent alone":
                process.kill()
            else:
                os.killpg(process.pid, signal.SIGINT if way == "Ctrl-C" else signal.SIGKILL)
        status, told = end(process)
        allowed = (0, 1, 130, -signal.SIGINT) if way == "Ctrl-C" else (0, -signal.SIGKILL)
        expect(status in allowed, f"a build ended with {status}: {told[-300:]}")
        expect(
            wait_for(lambda pid=process.pid: not group(pid), limit=20),
            f"workers outlive their parent: {workers}",
        )
        if output.with_suffix(".idx").exists():
            expect(
                bytes_of(ground.place) == expected,
                "complete, and not what an undisturbed build makes",
            )
            ended += 1
            clear(ground.place)
        else:
            refused(output)
        if rounds % 5 == 4:  # the end, from wherever it stands
            build(images, output)
            expect(
                bytes_of(ground.place) == expected,
                "gone on with, and not what an undisturbed build makes",
            )
            complete += 1
            clear(ground.place)
    build(images, output)
    expect(
        bytes_of(ground.place) == expected, "gone on with, and not what an undisturbed build makes"
    )
    expect(
        not output.with_suffix(".building").exists(), "the folder of the unfinished build is left"
    )
    return (
        f"SIGKILL {hits['the parent alone']} of the parent alone and {hits['the whole group']} of the whole group, "
        f"{hits['Ctrl-C']} Ctrl-C; {complete + 1} builds gone on with to the end, {ended} ended before: "
        "all byte-identical, no worker left"
    )


def limited(ground: Ground) -> str:
    """Files may not grow beyond a limit that is another each time."""
    _linux()
    images, expected = ground.shared.images, ground.shared.expected
    output = ground.place / "out.bin"
    largest = max(path.stat().st_size for path in ground.shared.built.iterdir())
    failed = 0
    for _ in range(ground.times(3, 25)):
        limit = ground.dice.randrange(largest)

        def lower(limit: int = limit) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        status, told = run(command(images, output), preexec_fn=lower)
        told_well(status, told, "File too large", "Mend that")
        failed += 1
        refused(output)
    build(images, output)
    expect(
        bytes_of(ground.place) == expected, "gone on with, and not what an undisturbed build makes"
    )
    return f"{failed} builds stopped by a limit on the size of files, all told; gone on with: byte-identical"


@contextlib.contextmanager
def _small_disk(ground: Ground, size: int) -> Iterator[Path]:
    disk = ground.place / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if mount is None or sys.platform != "linux":
        raise Skipped("no way to mount a small file system here")
    arguments = [mount, "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=LIMIT)
    if done.returncode:
        raise Skipped(f"a small tmpfs cannot be mounted here: {done.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False, timeout=LIMIT, capture_output=True)


def full(ground: Ground) -> str:
    """A disk becomes full while a build runs, as another process fills it."""
    images, expected = ground.shared.images, ground.shared.expected
    with _small_disk(ground, 4 << 20) as disk:
        output, told_full, ended, times = disk / "out.bin", 0, 0, ground.times(3, 40)
        while told_full < times:
            expect(ended <= 10 * times, "no build lived long enough to meet a full disk")
            process = start(command(images, output))
            ground.wait(process, 0.8)
            with (
                contextlib.suppress(OSError),
                (disk / "balloon").open("wb", buffering=0) as balloon,
            ):
                while True:
                    balloon.write(bytes(4096))
            status, told = end(process)
            if status:
                told_well(
                    status,
                    told,
                    "room" if "of room on the disk" in told else "No space left on device",
                )
                told_full += 1
            (disk / "balloon").unlink()
            if status == 0:
                expect(
                    bytes_of(disk) == expected, "complete, and not what an undisturbed build makes"
                )
                ended += 1
                clear(disk)
            elif output.with_suffix(".idx").exists():
                raise Failed("a build that failed has left an index")
        build(images, output)
        expect(bytes_of(disk) == expected, "gone on with, and not what an undisturbed build makes")
    return f"{told_full} builds met a full tmpfs, all told, {ended} ended before; gone on with: byte-identical"


def worker_killed(ground: Ground) -> str:
    """One worker after another is killed, then all of them at once."""
    _linux()
    images, expected = ground.shared.images, ground.shared.expected
    output = ground.place / "out.bin"
    hit, attempts, times = 0, 0, ground.times(2, 30)
    while hit < times:
        attempts += 1
        expect(attempts <= 10 * times, "no build lived long enough to lose a worker")
        process = start(command(images, output))
        at_work(process)
        time.sleep(ground.dice.uniform(0, 0.6) * ground.shared.seconds)
        workers = group(process.pid)
        if workers:
            hit += _kill(ground.dice.choice(workers))
        status, told = end(process)
        expect(status == 0, f"a build that lost one worker ended with {status}: {told[-300:]}")
        expect(
            bytes_of(ground.place) == expected,
            "a build that lost one worker is not what it would have been",
        )
        clear(ground.place)
    lost, gone_on, stopped = 0, 0, 0
    for _ in range(
        ground.times(1, 10)
    ):  # and now without mercy: a picture may be blamed, or the build give up
        process = start(command(images, output))
        deadline = time.monotonic() + 2
        while process.poll() is None and time.monotonic() < deadline:
            lost += sum(map(_kill, group(process.pid)))
            time.sleep(ground.dice.uniform(0, 0.03))
        status, told = end(process)
        if status:
            told_well(status, told)
            refused(output)
            stopped += 1
        else:
            expect(
                memload.verify(output).ok,
                "a build that lost many workers does not fit its checksums",
            )
            gone_on += 1
        clear(ground.place)
    return (
        f"{hit} builds lost one of their workers: byte-identical; {lost} workers killed one after the other: "
        f"{gone_on} builds came to their end, {stopped} stopped with an error"
    )


def stopped(ground: Ground) -> str:
    """A worker is stopped, at whatever it is at; then all with their parent, as by Ctrl-Z, beyond the timeout."""
    _linux()
    images, expected = ground.shared.images, ground.shared.expected
    output, hit, attempts, times = ground.place / "out.bin", 0, 0, ground.times(1, 30)
    while hit < times:
        attempts += 1
        expect(attempts <= 10 * times, "no build lived long enough to have a worker stopped")
        process = start(command(images, output, "--timeout", "1"))
        at_work(process)
        time.sleep(ground.dice.uniform(0, 0.6) * ground.shared.seconds)
        if workers := group(process.pid):
            hit += _kill(ground.dice.choice(workers), signal.SIGSTOP)
        status, told = end(
            process, 2 * LIMIT
        )  # one that is stopped at its start is waited for for a minute
        expect(status == 0, f"a build with a worker stopped ended with {status}: {told[-300:]}")
        expect(
            bytes_of(ground.place) == expected,
            "a build with a worker stopped is not what it would have been",
        )
        clear(ground.place)
    suspended = ground.times(1, 10)
    for _ in range(suspended):
        process = start(command(images, output, "--timeout", "1"))
        at_work(process)
        time.sleep(ground.dice.uniform(0, 0.6) * ground.shared.seconds)
        for stop, seconds in (
            (signal.SIGSTOP, 2.5),
            (signal.SIGCONT, 0.1),
            (signal.SIGSTOP, 2.5),
            (signal.SIGCONT, 0),
        ):
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.killpg(process.pid, stop)
            time.sleep(seconds)
        status, told = end(process)
        expect(status == 0, f"a build that was suspended ended with {status}: {told[-300:]}")
        expect(
            bytes_of(ground.place) == expected,
            "a build that was suspended is not what it would have been",
        )
        clear(ground.place)
    return f"{hit} builds had a worker stopped, {suspended} were suspended beyond their timeout: byte-identical"


def _kill(process: int, number: signal.Signals = signal.SIGKILL) -> int:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)
        return 1
    return 0


def sources(ground: Ground) -> str:
    """Pictures are changed, removed, replaced and made unreadable while a build reads them."""
    _linux()
    output, rejected, rounds = ground.place / "out.bin", 0, ground.times(2, 25)
    for number in range(rounds):
        images, other = ground.place / f"images {number}", ground.shared.others
        shutil.copytree(ground.shared.images, images)
        process = start(command(images, output))
        at_work(process)
        time.sleep(ground.dice.uniform(0, 0.5) * ground.shared.seconds)
        files = sorted(path.relative_to(images) for path in images.rglob("*.jpg"))
        chosen = ground.dice.sample(files, 40)
        for file in chosen[:10]:
            (images / file).unlink()
        for file in chosen[10:20]:  # while it may be half read
            shutil.copyfile(other / file, images / file)
        for file in chosen[20:30]:  # what root cannot read either
            (images / file).unlink()
            (images / file).symlink_to(images / file)
        for file in chosen[30:]:
            (images / file).unlink()
            ground.dice.choice([Path.mkdir, os.mkfifo])(images / file)  # type: ignore[operator]
        if number % 2:
            shutil.rmtree(images / "class 2")
        status, told = end(process)
        expect(status == 0, f"a build whose pictures changed ended with {status}: {told[-300:]}")
        expect(
            memload.verify(output).ok, "a build whose pictures changed does not fit its checksums"
        )
        dataset = memload.MemmapDataset(output)
        ledger = (ground.place / "out.rejects.csv").read_text().splitlines()[1:]
        expect(
            len(dataset) + len(ledger) == PICTURES,
            "pictures are neither in the data set nor in the ledger",
        )
        rejected += len(ledger) - 2
        allowed = [
            dict(_pixels(folder)) for folder in (ground.shared.built, ground.shared.built_of_others)
        ]
        for sample, key in enumerate(dataset.keys):
            pixels = dataset[sample][0].numpy().tobytes()
            fine = any(pixels == known.get(key) for known in allowed)
            expect(
                fine or Path(key) in chosen[10:20],
                f"{key}: neither its pixels before nor those after",
            )
        clear(ground.place)
    return f"{rounds} builds lost or got other pictures: {rejected} in the ledger, the others whole, old or new"


def _pixels(place: Path) -> Iterator[tuple[str, bytes]]:
    dataset = memload.MemmapDataset(place / "out.bin")
    for sample, key in enumerate(dataset.keys):
        yield key, dataset[sample][0].numpy().tobytes()


def together(ground: Ground) -> str:
    """A second build of an output is begun while the first one runs; then the first is killed."""
    _linux()
    images, expected = ground.shared.images, ground.shared.expected
    output, refusals = ground.place / "out.bin", 0
    for _ in range(ground.times(1, 10)):
        first = start(command(images, output))
        expect(
            wait_for((ground.place / "out.building" / "plan.json").exists, first),
            "the first one did not begin",
        )
        # held where it is, as a build of hours would be
        os.killpg(first.pid, signal.SIGSTOP)
        for more in ((), ("--overwrite",)):
            status, told = run(command(images, output, *more))
            told_well(status, told, f"found one running (process {first.pid})")
            refusals += 1
        os.killpg(first.pid, signal.SIGCONT)
        status, told = end(first)
        expect(status == 0, f"the first build ended with {status}: {told[-300:]}")
        expect(
            bytes_of(ground.place) == expected,
            "the first build is not what it would have been alone",
        )
        clear(ground.place)
    first = start(command(images, output))
    expect(
        wait_for((ground.place / "out.building" / "plan.json").exists, first),
        "the first one did not begin",
    )
    first.kill()
    end(first)
    expect((ground.place / "out.building" / "lock").exists(), "no lock was left to be recognised")
    build(images, output)
    expect(
        bytes_of(ground.place) == expected,
        "after a stale lock, not what an undisturbed build makes",
    )
    return f"{refusals} second builds refused, the first ones byte-identical; the lock of a killed one recognised"


#: One of several that build the same output over and over, at moments of their own.
CROWD = """
import random, sys, time
import memload
images, output, times, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
dice = random.Random(seed)
for _ in range(times):
    time.sleep(dice.uniform(0, 0.02))
    try:
        memload.build(images, output, size=16, num_workers=0, overwrite=True)
        print("built")
    except memload.BuildError as error:
        print("refused" if "expected no other build of this output" in str(error) else f"failed: {error}")
"""


def crowd(ground: Ground) -> str:
    """Several processes build one output over and over, all at once."""
    _linux()
    images = draw(ground.place / "images", 9, side=64)
    output, times = ground.place / "out.bin", ground.times(40, 400)
    arguments = [sys.executable, "-c", CROWD, str(images), str(output), str(times)]
    processes = [start([*arguments, f"{ground.dice.random()}"]) for _ in range(4)]
    found: list[str] = []
    for process in processes:
        status, said = end(process)
        expect(status == 0, f"one of several builders ended with {status}: {said[-300:]}")
        found += said.splitlines()
    other = [line for line in found if line not in ("built", "refused")]
    expect(
        not other and len(found) == 4 * times, f"expected builds and refusals, found {other[:3]}"
    )
    expect(memload.verify(output).ok, "what several builders made does not fit its checksums")
    left = sorted(path.name for path in ground.place.glob("out*"))
    expect(left == ["out.bin", "out.idx", "out.rejects.csv"], f"left behind: {left}")
    return f"four processes, {4 * times} builds of one output: {found.count('built')} built, the others refused, whole"


#: Builds in a process in which `flock` says that there are no locks, as on some of clusters' file systems.
LOCKLESS = """
import errno, fcntl, os, sys
kind = sys.argv.pop(1)
def flock(*_):
    raise OSError(getattr(errno, kind), "no locks")
fcntl.flock = flock
from memload.cli import main
main()
"""


def lockless(ground: Ground) -> str:
    """The same where `flock` fails; that it does is simulated."""
    _linux()
    images, expected = ground.shared.images, ground.shared.expected
    output = ground.place / "out.bin"
    kinds = ("ENOLCK", "ENOTSUP", "ENOSYS")[: ground.times(2, 3)]
    for kind in kinds:

        def lockless_command(kind: str = kind) -> list[str]:
            usual = command(images, output)
            return [usual[0], "-c", LOCKLESS, kind, *usual[3:]]

        first = start(lockless_command())
        expect(
            wait_for((ground.place / "out.building" / "plan.json").exists, first),
            "the first one did not begin",
        )
        os.killpg(first.pid, signal.SIGSTOP)
        status, told = run(lockless_command())
        told_well(status, told, f"found one by process {first.pid}")
        os.killpg(first.pid, signal.SIGCONT)
        if kind == kinds[0]:
            kill_group(first)
            end(first)
            status, told = run(lockless_command())
            expect(status == 0, f"after one that was killed: {status}: {told[-300:]}")
        else:
            status, told = end(first)
            expect(status == 0, f"the first build ended with {status}: {told[-300:]}")
        expect("no locks" in told, "that there are no locks is not told")
        expect(
            bytes_of(ground.place) == expected, "without locks, not what an undisturbed build makes"
        )
        clear(ground.place)
    return f"{', '.join(kinds)} by flock (simulated): second builds refused, a killed one recognised, byte-identical"


def beside(ground: Ground) -> str:
    """A data set is read while unrelated builds run, are killed and end in its folder."""
    images, expected = ground.shared.images, ground.shared.expected
    dataset = memload.MemmapDataset(ground.copy())
    before = dataset.gather(range(len(dataset))).numpy().copy()
    reads = 0
    for number in range(ground.times(1, 20)):
        process = start(command(images, ground.place / f"other{number}.bin"))
        deadline = time.monotonic() + ground.dice.uniform(0.5, 3) * ground.shared.seconds
        while process.poll() is None:
            if time.monotonic() > deadline:
                kill_group(process)
            again = memload.MemmapDataset(ground.place / "out.bin")
            expect(
                np.array_equal(again.gather(range(len(again))).numpy(), before),
                "what is opened anew has changed",
            )
            expect(
                np.array_equal(dataset.gather(range(len(dataset))).numpy(), before),
                "what is read has changed",
            )
            reads += 2
        end(process)
    expect(
        {**bytes_of(ground.place), **expected} == bytes_of(ground.place), "the files have changed"
    )
    return f"{reads} times read while builds came and went beside it: unchanged"
