"""Data sets that are damaged, replaced or truncated, also while they are read, and disks that do not give them."""

import contextlib
import json
import os
import select
import shutil
import signal
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import numpy as np
import torch

import memload
from tests.drills.failing_disk import mounted
from tests.drills.ground import (
    LIMIT,
    PICTURES,
    ROW,
    Failed,
    Ground,
    Skipped,
    build,
    command,
    expect,
    run,
)


def _told(path: Path) -> str:
    """Open a data set and verify it; return the kind of error that tells what is wrong, or nothing."""
    try:
        dataset = memload.MemmapDataset(path)
        dataset.gather(range(len(dataset)))
        list(dataset.keys)
        report = memload.verify(path)
    except memload.FormatError as error:
        return type(error).__name__
    return "" if report.ok else "verify"


def shards(ground: Ground) -> str:
    """Shards are truncated, grown, altered by a bit, exchanged and put in the place of another data set's."""
    output, other = ground.copy(), ground.shared.built_of_others
    files = sorted(ground.place.glob("out-*.bin"))
    expect(_told(output) == "" and len(files) == 6, "a whole data set is not taken as such")
    counts: dict[str, int] = {}

    def told(what: str, name: str, kinds: tuple[str, ...]) -> None:
        found = _told(output)
        expect(found in kinds, f"{name} {what}: expected it to be told by {kinds}, found {found!r}")
        counts[what] = counts.get(what, 0) + 1

    for _ in range(ground.times(25, 400)):
        file = ground.dice.choice(files)
        whole = file.read_bytes()
        file.write_bytes(whole[: ground.dice.randrange(len(whole))])
        told("truncated", file.name, ("FormatError",))
        file.write_bytes(whole + bytes(ground.dice.randrange(1, 5000)))
        told("grown", file.name, ("FormatError",))
        damaged = bytearray(whole)
        damaged[ground.dice.randrange(len(whole))] ^= 1 << ground.dice.randrange(8)
        file.write_bytes(damaged)
        told("a bit altered", file.name, ("FormatError", "ChecksumError", "verify"))
        file.write_bytes(whole)
    for file in files:
        whole = file.read_bytes()
        shutil.copyfile(other / file.name, file)
        told("of another data set", file.name, ("ChecksumError",))
        file.unlink()
        told("removed", file.name, ("MissingError",))
        file.write_bytes(whole)
    one, two = files[0].read_bytes(), files[1].read_bytes()
    files[0].write_bytes(two)
    files[1].write_bytes(one)
    told("exchanged", files[0].name, ("ChecksumError",))
    files[0].write_bytes(one)
    files[1].write_bytes(two)
    expect(_told(output) == "", "restored, it is not taken as whole")
    return f"{', '.join(f'{count} {what}' for what, count in counts.items())}: each told by opening or by verify"


def index(ground: Ground) -> str:
    """The index is truncated, altered by bits, and that of a newer version."""
    output = ground.copy()
    path = output.with_suffix(".idx")
    whole = path.read_bytes()
    cuts = [ground.dice.randrange(len(whole)) for _ in range(ground.times(60, 1500))]
    for size in cuts:
        path.write_bytes(whole[:size])
        expect(_told(output) == "FormatError", f"truncated to {size} bytes: {_told(output)!r}")
    flips = ground.times(150, 4000)
    for _ in range(flips):
        damaged = bytearray(whole)
        places = [
            ground.dice.randrange(len(whole)) for _ in range(ground.dice.choice((1, 1, 1, 2, 8)))
        ]
        for place in places:
            damaged[place] ^= 1 << ground.dice.randrange(8)
        path.write_bytes(damaged)
        if damaged != whole:
            expect(
                _told(output) in ("FormatError", "ChecksumError"),
                f"bits at {places}: {_told(output)!r}",
            )
    newer = _newer(whole)
    path.write_bytes(newer)
    try:
        memload.MemmapDataset(output)
    except memload.FormatError as error:
        expect("newer memload" in str(error), f"a newer version: {error}")
    else:
        raise Failed("an index of a newer version was opened")
    path.write_bytes(whole)
    expect(_told(output) == "", "restored, it is not taken as whole")
    return f"truncated {len(cuts)} times, bits altered {flips} times, of a newer version: FormatError and nothing else"


def _newer(whole: bytes) -> bytes:
    """Return an index as a later version may write it, with what no one knows today."""
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])
    metadata = json.loads(header["__metadata__"]["memload"])
    header["__metadata__"]["memload"] = json.dumps(
        {"format_version": metadata["format_version"] + 1, "new": [1]}
    )
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + whole[8 + size :]


class Reader:
    """A process that reads epochs of a data set and compares every row with what it was.

    ``how`` it reads: ``items`` are samples, one by one, ``step`` batches of a Loader, of both one at each `go_on`;
    ``run`` is a Loader at full speed. With ``blind`` it takes the files to be as long as ever, so that pages of the
    map are the first to show that they are not, as they are on a disk that fails.
    """

    def __init__(self, output: Path, how: str, threads: int = 0, *, blind: bool = False) -> None:
        if not hasattr(os, "fork"):
            raise Skipped("readers are forked, so that each costs no import of torch")
        commands, tell = os.pipe()
        hear, answers = os.pipe()
        sys.stdout.flush()
        self.process = os.fork()
        if not self.process:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(30 * int(LIMIT))
            os.close(tell)
            os.close(hear)
            with os.fdopen(commands) as words, os.fdopen(answers, "w") as lines:
                status = _read(output, how, threads, blind, words, lines)
            os._exit(status)
        os.close(commands)
        os.close(answers)
        self._tell, self._hear = os.fdopen(tell, "w"), os.fdopen(hear)
        self.status: int | None = None
        expect(self.line() == "ready", "a reader did not begin")

    def line(self) -> str:
        """Return the next line that it says; empty at its end."""
        ready, _, _ = select.select([self._hear], [], [], LIMIT)
        if not ready:
            raise Failed("a reader hung")
        return self._hear.readline().strip()

    def go_on(self, word: str = "go") -> str:
        """Have one that goes step by step read once more, and return what it says."""
        with contextlib.suppress(BrokenPipeError):
            self._tell.write(word + "\n")
            self._tell.flush()
        return self.line()

    def end(self) -> int:
        """Wait for its end and return its status, or the negative number of the signal that ended it."""
        if self.status is None:
            # It ends by itself, and if it does not, by its alarm.
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
            with contextlib.suppress(BrokenPipeError):
                self._tell.close()
            self._hear.close()
        return self.status

    def stop(self) -> None:
        """End it, come what may."""
        if self.status is None:
            os.kill(self.process, signal.SIGKILL)
            self.end()


def _read(output: Path, how: str, threads: int, blind: bool, words: IO[str], lines: IO[str]) -> int:
    """Do what a `Reader` does, in its process; return the exit status."""

    def say(what: object) -> None:
        print(what, file=lines, flush=True)

    def batches() -> Iterator[torch.Tensor]:
        if how == "items":
            yield from (dataset[sample][0][None] for sample in range(len(dataset)))
        else:
            loader = memload.Loader(
                dataset, 4, device="cpu", num_threads=threads, shuffle=True, prefetch_factor=1
            )
            yield from (images for images, _ in loader)

    try:
        dataset = memload.MemmapDataset(output)
        known = {
            zlib.crc32(row)
            for row in memload.MemmapDataset(output).gather(range(len(dataset))).numpy()
        }
        if blind:
            dataset.shards._files[:] = [None] * len(dataset.shards._files)
            dataset.shards._known[:] = [None] * len(dataset.shards._files)
            for (
                seen
            ) in dataset.shards._seen:  # opening has read the rows around the first and the last
                seen[:] = False
        say("ready")
        rows, stop = 0, False
        if how != "run":
            words.readline()
        while not stop:
            for images in batches():
                pixels = np.ascontiguousarray(images.permute(0, 2, 3, 1).numpy())
                if any(zlib.crc32(row) not in known for row in pixels):
                    say("other pixels")
                    return 3
                rows += len(images)
                if how != "run":
                    say(rows)
                    stop = words.readline().strip() != "go"
                elif select.select([words], [], [], 0)[0]:
                    say(rows)
                    stop = True
                if stop:
                    break
    except memload.FormatError as error:
        say(f"{type(error).__name__}: {error}")
        return 4
    except Exception as error:  # noqa: BLE001  # whatever it is, the drill has to know
        say(f"{type(error).__name__}: {error}")
        return 5
    return 0


def replaced(ground: Ground) -> str:
    """A data set is built anew over and over while Loaders and samples of it are read."""
    images, others, output = ground.shared.images, ground.shared.others, ground.copy()
    readers = [Reader(output, "run", 2), Reader(output, "run", 0), Reader(output, "items")]
    rounds = ground.times(2, 30)
    try:
        for number in range(rounds):
            # of other shards, too, so that some are replaced and some go
            more = ["--shard-size", str(4096 + (20, 7, 60)[number % 3] * ROW)]
            build((others, images)[number % 2], output, "--overwrite", *more)
            said = readers[2].go_on()
            expect(said.isdecimal(), f"a reader of samples: expected it to go on, found {said}")
        rows = []
        for reader in readers:
            said = reader.go_on("stop")
            expect(said.isdecimal() or reader is readers[2], f"expected it to go on, found {said}")
            status = reader.end()
            expect(status == 0, f"a reader ended with {status}: {said}")
            rows.append(said)
    finally:
        for reader in readers:
            reader.stop()
    expect(_told(output) == "", "what was built over it is not whole")
    return (
        f"built anew {rounds} times under two Loaders and a MemmapDataset: they read on ({int(rows[0]):,} and "
        f"{int(rows[1]):,} rows), the pixels of the old one"
    )


def _write_over(path: Path, data: bytes) -> None:
    """Write into a file in place, as ``cp`` does: it is emptied first."""
    with path.open("wb") as file:
        file.write(data)


def altered(ground: Ground) -> str:
    """Shards are truncated, emptied, removed, touched or written over in place between two batches."""
    output, other = ground.copy(), ground.shared.built_of_others
    whole = {path.name: path.read_bytes() for path in ground.place.glob("out-*.bin")}
    ways: dict[str, Callable[[Path], object]] = {
        "truncated": lambda file: os.truncate(file, ground.dice.randrange(4096 + 18 * ROW)),
        "emptied": lambda file: os.truncate(file, 0),
        "written over": lambda file: _write_over(file, (other / file.name).read_bytes()),
        "removed": Path.unlink,
        "touched": os.utime,
    }
    done = dict.fromkeys(ways, 0)
    for number in range(ground.times(20, 400)):
        way = list(ways)[number % 5]
        # Samples are looked at for their file's size alone: they are the map itself.
        how = "items" if number % 2 and way != "written over" else "step"
        reader = Reader(output, how)
        try:
            for _ in range(ground.dice.randrange(4)):
                reader.go_on()
            for name in whole:
                ways[way](ground.place / name)
            for _ in range(2 * PICTURES):
                said = reader.go_on()
                if not said.isdecimal():
                    break
            if way in ("removed", "touched"):  # the pixels are as they were
                expect(said.isdecimal(), f"{way}: expected it to go on, found {said}")
                reader.go_on("stop")
                expect(reader.end() == 0, f"{way}: a reader ended with {reader.end()}")
            else:
                expect(
                    reader.end() == 4,
                    f"{way}: expected FormatError, found status {reader.end()}: {said}",
                )
                expect("meanwhile" in said or "after it was opened" in said, f"{way}: {said}")
        finally:
            reader.stop()
        for name, data in whole.items():
            (ground.place / name).write_bytes(data)
        done[way] += 1
    counted = ", ".join(f"{count} {way}" for way, count in done.items())
    return f"between two reads {counted}: FormatError, or the old pixels where they are as they were; no SIGBUS"


def racing(ground: Ground) -> str:
    """Shards are emptied and written over in place in the midst of reading as fast as can be."""
    output = ground.copy()
    dataset = memload.MemmapDataset(output)
    dataset.gather([0])
    if not all(dataset.shards._leased):
        raise Skipped(
            "no leases on this filesystem: what is truncated in the midst of a copy ends the process"
        )
    del dataset
    whole = {path.name: path.read_bytes() for path in ground.place.glob("out-*.bin")}
    times = ground.times(12, 300)
    for number in range(times):
        reader = Reader(output, "run", (1, 2, 0)[number % 3])
        try:
            time.sleep(ground.dice.uniform(0.01, 0.1))
            for name in whole:
                if number % 2:
                    os.truncate(ground.place / name, 0)
                else:
                    _write_over(
                        ground.place / name, (ground.shared.built_of_others / name).read_bytes()
                    )
            expect(reader.end() == 4, f"expected FormatError, found status {reader.end()}")
        finally:
            reader.stop()
        for name, data in whole.items():
            (ground.place / name).write_bytes(data)
    return f"{times} times emptied or written over under a Loader at full speed: FormatError, no SIGBUS"


def unreadable(ground: Ground) -> str:
    """Pages of the map do not come; that they do not is simulated by a file that ends before them."""
    output = ground.copy()
    whole = {path.name: path.read_bytes() for path in ground.place.glob("out-*.bin")}
    times = ground.times(6, 60)
    for number in range(times):
        reader = Reader(output, "items" if number % 2 else "step", blind=True)
        try:
            for name in whole:
                os.truncate(ground.place / name, 0)
            said = reader.go_on()
            if reader.end() == -signal.SIGBUS and not _can_ask():
                raise Skipped(
                    "this kernel does not tell without a bus error that a page cannot be had (5.14 does)"
                )
            expect(reader.end() == 4, f"expected FormatError, found status {reader.end()}: {said}")
            expect(
                "cannot be read" in said,
                f"expected to be told that it cannot be read, found {said}",
            )
        finally:
            reader.stop()
        for name, data in whole.items():
            (ground.place / name).write_bytes(data)
    expect(_told(output) == "", "restored, it is not taken as whole")
    return f"{times} times pages of the map did not come (simulated by a truncated file): FormatError, no SIGBUS"


def failing(ground: Ground) -> str:
    """Shards, index and pictures lie on a disk that cannot read a part of one of them."""
    output = ground.copy()
    files = sorted(path for path in ground.place.iterdir() if path.suffix in (".bin", ".idx"))
    found: dict[str, int] = {}
    for number in range(ground.times(6, 60)):
        file = ground.dice.choice(files[:-1]) if number % 3 else files[-1]
        start = ground.dice.randrange(file.stat().st_size)
        at = ground.place / f"mounted {number}"
        with mounted(ground.place, at, {file.name: (start, start + 1)}):
            status, said = _in_child(lambda at=at: _told(at / output.name))
            if status == -signal.SIGBUS and not _can_ask():
                raise Skipped(
                    "this kernel does not tell without a bus error that a page cannot be had (5.14 does)"
                )
            expect(
                status == 0, f"{file.name} fails at {start}: the reader ended with {status}: {said}"
            )
            expect(
                said in ("FormatError", "verify"),
                f"{file.name} fails at {start}: expected to be told, found {said!r}",
            )
        kind = "the index" if file.suffix == ".idx" else "shards"
        found[kind] = found.get(kind, 0) + 1
    images = ground.shared.images / "class 1"
    one = ground.dice.choice(sorted(images.iterdir())).name
    with mounted(images, ground.place / "images", {one: (0, 1)}):
        listed = ground.place / "listed.csv"
        listed.write_text("\n".join(["path", *sorted(path.name for path in images.iterdir())]))
        manifest = ["--manifest", str(listed), "--root", str(ground.place / "images")]
        status, told = run(
            [
                part
                for part in command(images, ground.place / "fresh.bin", *manifest)
                if part != str(images)
            ]
        )
        expect(status == 0, f"a picture that cannot be read: {status}: {told[-300:]}")
    ledger = (ground.place / "fresh.rejects.csv").read_text()
    expect(
        f"{one},cannot be read: Input/output error" in ledger,
        f"expected it in the ledger, found {ledger}",
    )
    counted = " and ".join(f"{count} of {what}" for what, count in found.items())
    return f"read errors of a file system (FUSE) in {counted}: told, no SIGBUS; in a picture: it is in the ledger"


def _in_child(function: Callable[[], str]) -> tuple[int, str]:
    """Call a function in a forked process; return its status, or the negative number of a signal, and what it gave."""
    hear, tell = os.pipe()
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(LIMIT))
        try:
            os.write(tell, function().encode())
        except BaseException as error:  # noqa: BLE001  # nothing may go on in the child
            os.write(tell, repr(error).encode())
            os._exit(1)
        os._exit(0)
    os.close(tell)
    with os.fdopen(hear) as said:
        text = said.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text


def _can_ask() -> bool:
    release = os.uname().release.split(".")
    return sys.platform == "linux" and (int(release[0]), int(release[1].split("-")[0])) >= (5, 14)
