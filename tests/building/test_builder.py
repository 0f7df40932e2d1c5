import csv
import errno
import logging
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
import tracemalloc
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import memload
from memload.building import pool

LINUX = pytest.mark.skipif(
    sys.platform != "linux", reason="forked workers and /proc are of Linux alone"
)
SIZE = 16


def files(place: Path, stem: str = "out") -> dict[str, bytes]:
    """The bytes of all that belongs to an output."""
    return {
        path.name: path.read_bytes() for path in sorted(place.glob(f"{stem}*")) if path.is_file()
    }


def refused(output: Path) -> None:
    """Nothing that looks finished is there."""
    with pytest.raises(memload.MissingError):
        memload.MemmapDataset(output)


@pytest.fixture
def spoiled(folder: Path) -> Path:
    """The folder of pictures, with three that cannot be used."""
    (folder / "ant" / "bad.jpg").write_bytes(b"no image")
    (folder / "bee" / "empty.png").write_bytes(b"")
    (folder / "cat" / "cut.jpg").write_bytes((folder / "cat" / "02.jpg").read_bytes()[:200])
    return folder


@pytest.fixture
def expected(spoiled: Path, tmp_path: Path) -> dict[str, bytes]:
    """The files of an uninterrupted build of the spoiled folder."""
    place = tmp_path / "expected"
    place.mkdir()
    memload.build(
        spoiled, place / "out.bin", size=SIZE, num_workers=0, shard_size=4096 + 6 * SIZE * SIZE * 3
    )
    return files(place)


def build(source: Any, output: Path, **options: Any) -> memload.BuildReport:
    """The build whose result is ``expected``."""
    options = {"num_workers": 0, "shard_size": 4096 + 6 * SIZE * SIZE * 3} | options
    return memload.build(source, output, size=SIZE, **options)


class Numbered:
    """A data set of small grey pictures, each with its number in it; ``act`` is called with the number first."""

    def __init__(self, count: int, act: Callable[[int], None] | None = None) -> None:
        self.count, self.act = count, act

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
        if self.act and multiprocessing_child():
            self.act(number)
        return np.full((4, 4), number % 256, np.uint8), number


MAIN = os.getpid()


def multiprocessing_child() -> bool:
    return os.getpid() != MAIN


def die(number: signal.Signals = signal.SIGSEGV) -> None:
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)  # not pytest's, which prints where
    os.kill(os.getpid(), number)


def reasons(report: memload.BuildReport) -> dict[str, str]:
    if report.ledger is None:
        return {}
    with report.ledger.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
        header, *lines = csv.reader(file)
    assert header == ["path", "reason"]
    return dict(lines)  # type: ignore[arg-type]


# What comes out


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
def test_files_are_the_same_for_any_number_of_workers(
    spoiled: Path, tmp_path: Path, expected: dict[str, bytes], num_workers: int
) -> None:
    report = build(spoiled, tmp_path / "out.bin", num_workers=num_workers)
    assert files(tmp_path) == expected
    assert sorted(expected) == [
        *(f"out-0000{number}-of-00003.bin" for number in range(3)),
        "out.idx",
        "out.rejects.csv",
    ]
    assert (report.num_workers, report.samples, report.rejected, report.converted) == (
        num_workers,
        12,
        3,
        15,
    )
    assert not (tmp_path / "out.building").exists()


def test_files_are_the_same_by_workers_that_are_spawned(
    spoiled: Path, tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_CONTEXT", pool.multiprocessing.get_context("spawn"))
    build(spoiled, tmp_path / "out.bin", num_workers=1)
    assert files(tmp_path) == expected


def test_samples_stand_in_the_order_of_the_source_with_their_own_pixels(
    folder: Path, tmp_path: Path
) -> None:
    source = memload.ImageFolder(folder)
    memload.build(folder, tmp_path / "out.bin", size=SIZE, fit="squash", num_workers=2)
    dataset = memload.MemmapDataset(tmp_path / "out.bin")
    assert list(dataset.keys) == list(source.keys)
    for (image, label), key in zip(dataset, dataset.keys, strict=True):
        with Image.open(folder / key) as picture:
            direct = np.asarray(picture.resize((SIZE, SIZE), Image.Resampling.BILINEAR))
        assert np.array_equal(image.permute(1, 2, 0).numpy(), direct)
        assert dataset.classes[label] == key.split("/")[0]


def test_statistics_are_those_of_numpy(spoiled: Path, tmp_path: Path) -> None:
    build(spoiled, tmp_path / "out.bin")
    dataset = memload.MemmapDataset(tmp_path / "out.bin")
    found = dataset.index.statistics
    pixels = dataset.gather(range(len(dataset))).numpy() / 255.0
    assert found["mean"] == pytest.approx(pixels.mean(axis=(0, 1, 2)), abs=1e-12)
    assert found["std"] == pytest.approx(pixels.std(axis=(0, 1, 2)), abs=1e-12)
    assert found["class_counts"] == [4, 4, 4]
    sizes = []
    for key in dataset.keys:
        with Image.open(spoiled / key) as picture:
            sizes.append(picture.size)
    shorter = [min(size) for size in sizes]
    assert found["source_shorter_side"] == {
        "0": sum(side < 32 for side in shorter),
        "32": sum(32 <= side < 64 for side in shorter),
    }
    assert found["source_width"] == [min(w for w, _ in sizes), max(w for w, _ in sizes)]
    assert found["source_height"] == [min(h for _, h in sizes), max(h for _, h in sizes)]


ROW = SIZE * SIZE * 3


@pytest.mark.parametrize(
    ("shard_size", "rows"),
    [
        (4096 + ROW, [1] * 12),
        (4096 + 3 * ROW, [3, 3, 3, 3]),
        (4096 + 6 * ROW - 1, [5, 5, 2]),
        (4096 + 12 * ROW, [12]),
        (10**9, [12]),
        (None, [12]),
    ],
)
def test_shards_hold_as_many_rows_as_fit(
    folder: Path, tmp_path: Path, shard_size: int | None, rows: list[int]
) -> None:
    report = memload.build(
        folder, tmp_path / "out.bin", size=SIZE, num_workers=0, shard_size=shard_size
    )
    dataset = memload.MemmapDataset(tmp_path / "out.bin")
    assert [shard.rows for shard in dataset.index.image.shards] == rows
    written = sorted(tmp_path.glob("*.bin"))
    assert len(written) == len(rows)
    assert (
        report.bytes == sum(path.stat().st_size for path in written) == 4096 * len(rows) + 12 * ROW
    )
    together = np.concatenate([np.load(path, mmap_mode="r") for path in written])
    assert np.array_equal(together, dataset.gather(range(12)).numpy())
    assert memload.verify(tmp_path / "out.bin").ok


def test_rejected_pictures_are_listed_and_counted(spoiled: Path, tmp_path: Path) -> None:
    report = build(spoiled, tmp_path / "out.bin")
    assert list(reasons(report)) == ["ant/bad.jpg", "bee/empty.png", "cat/cut.jpg"]
    assert all(reasons(report).values())
    assert "3 rejected" in str(report)
    assert "out.rejects.csv" in str(report)
    facts = memload.info(tmp_path / "out.bin")
    assert (facts["samples"], facts["rows"], facts["rejected"]) == (12, 15, 3)
    assert facts["build"]["records"] == 15
    assert memload.verify(tmp_path / "out.bin").ok


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_first_bad_picture_stops_a_build_that_shall_raise(
    spoiled: Path, tmp_path: Path, expected: dict[str, bytes], num_workers: int
) -> None:
    with pytest.raises(memload.DecodeError) as caught:
        build(spoiled, tmp_path / "out.bin", num_workers=num_workers, on_error="raise")
    assert caught.value.key in ("ant/bad.jpg", "bee/empty.png", "cat/cut.jpg")
    assert caught.value.reason
    refused(tmp_path / "out.bin")
    build(spoiled, tmp_path / "out.bin")  # goes on, and skips
    assert files(tmp_path) == expected


@pytest.mark.parametrize("num_workers", [0, 1])
def test_nothing_but_bad_pictures_is_an_error_and_leaves_nothing(
    tmp_path: Path, num_workers: int
) -> None:
    root = tmp_path / "images"
    root.mkdir()
    for number in range(5):
        (root / f"{number}.jpg").write_bytes(b"x")
    with pytest.raises(
        memload.BuildError, match=r"none of 5 pictures in .*images can be used: 0\.jpg: "
    ):
        memload.build(root, tmp_path / "out.bin", num_workers=num_workers)
    assert list(tmp_path.iterdir()) == [root]


def test_messages_call_what_is_in_a_data_set_samples(tmp_path: Path) -> None:
    floats = [np.zeros((2, 2, 3))] * 3
    with pytest.raises(memload.BuildError, match="none of 3 samples can be used: 0: "):
        memload.build(floats, tmp_path / "out.bin", size=2, num_workers=0)


# Before it begins


def test_it_tells_the_size_of_the_result_before_it_begins(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "memload"):
        memload.build(folder, tmp_path / "out.bin", size=SIZE, num_workers=0)
    assert "12 rows of 16×16×3 uint8, 13.3 kB" in caplog.messages[0]
    assert "free on the disk" in caplog.messages[0]


def test_a_disk_without_room_is_told_before_it_begins(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = 4096 + 12 * ROW
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed - 1))
    with pytest.raises(memload.BuildError, match=r"disk is too small: 12 rows of .* need 13\.3 kB"):
        memload.build(folder, tmp_path / "out.bin", size=SIZE, num_workers=0)
    assert list(tmp_path.iterdir()) == [folder]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed))
    memload.build(folder, tmp_path / "out.bin", size=SIZE, num_workers=0)


def test_an_output_that_exists_is_left_alone(folder: Path, output: Path) -> None:
    before = files(output.parent)
    with pytest.raises(memload.BuildError, match=r"exists already.*--overwrite"):
        memload.build(folder, output, size=8, num_workers=0)
    assert files(output.parent) == before
    assert not output.with_suffix(".building").exists()


def test_the_report_names_the_first_classes(tmp_path: Path) -> None:
    class Named(list[Any]):
        classes = ("a", "b", "c", "d")

    samples = [(np.zeros((8, 8, 3), np.uint8), number) for number in range(4)]
    for source, classes, told in [
        (Named(samples), ("a", "b", "c", "d"), " uint8, 4 classes (a, b, c, …), "),
        (samples, None, " uint8, 4.86 kB, "),
        ([image for image, _ in samples], None, " uint8, no labels, "),
    ]:
        report = memload.build(source, tmp_path / "out.bin", size=8, num_workers=0, overwrite=True)
        assert report.classes == classes
        assert told in str(report)


def test_a_place_that_cannot_be_written_to_is_told(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(memload.BuildError, match=r"cannot be written: .*Read-only"):
        memload.build(folder, tmp_path / "out.bin", num_workers=0)


def test_it_is_quiet_where_stderr_is_no_terminal(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    memload.build(folder, tmp_path / "out.bin", size=8, num_workers=2)
    assert capfd.readouterr() == ("", "")
    memload.build(
        folder, tmp_path / "out.bin", size=8, num_workers=2, overwrite=True, progress=True
    )
    assert "12/12" in capfd.readouterr().err


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch])
@pytest.mark.parametrize("name", ["out.bin", "out.idx", "out.rejects.csv"])
def test_what_has_the_name_of_the_output_is_left_alone(
    folder: Path, tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    make(tmp_path / name)
    with pytest.raises(memload.BuildError, match=rf"{name} exists already"):
        memload.build(folder, tmp_path / "out.bin", num_workers=0)
    assert [path.name for path in tmp_path.glob("out*")] == [name]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": True}, "is neither a side nor"),
        ({"size": (8, 8, 3)}, "is neither a side nor"),
        ({"size": 8.0}, "is neither a side nor"),
        ({"timeout": 0}, "timeout: 0 is not above 0"),
        ({"timeout": float("nan")}, "timeout: nan is not above 0"),
        ({"shard_size": 4096 + ROW - 1, "size": SIZE}, "a shard with one row has 4,864"),
        ({"shard_size": -1, "size": SIZE}, "a shard with one row has 4,864"),
        ({"max_pixels": 200_000_000, "num_workers": 0}, "is too large for num_workers=0"),
        ({"output": "out.npy"}, r"must end in '\.bin'"),
        ({"output": "out"}, r"must end in '\.bin'"),
        ({"source": "in.bin", "output": "images"}, "Are they swapped"),
    ],
)
def test_wrong_arguments_are_told(
    folder: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    arguments = {"source": folder, "output": "out.bin"} | options
    arguments["output"] = tmp_path / arguments["output"]
    with pytest.raises(ValueError, match=message):
        memload.build(**arguments)
    assert list(tmp_path.iterdir()) == [folder]


def test_a_missing_folder_of_the_output_is_told(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(memload.BuildError, match="no such folder for the output"):
        memload.build(folder, tmp_path / "none" / "out.bin")
    assert not (tmp_path / "none").exists()


def test_a_size_of_numpy_and_many_pixels_for_workers_are_taken(
    folder: Path, tmp_path: Path
) -> None:
    sides = (np.int64(8), np.int32(9))
    memload.build(folder, tmp_path / "o.bin", size=sides, max_pixels=200_000_000, num_workers=1)
    assert memload.MemmapDataset(tmp_path / "o.bin").shape == (3, 8, 9)


# One that goes wrong


@LINUX
def test_a_record_that_kills_its_worker_costs_itself_alone(tmp_path: Path) -> None:
    source = Numbered(40, lambda number: die() if number in (0, 17, 39) else None)
    report = memload.build(source, tmp_path / "out.bin", size=4, num_workers=2)
    assert list(reasons(report)) == ["0", "17", "39"]
    assert all("the process" in reason for reason in reasons(report).values())
    dataset = memload.MemmapDataset(tmp_path / "out.bin")
    assert dataset.columns["label"].tolist() == [n for n in range(40) if n not in (0, 17, 39)]
    assert [int(image[0, 0, 0]) for image, _ in dataset] == dataset.columns["label"].tolist()
    assert memload.verify(tmp_path / "out.bin").ok


@LINUX
def test_a_record_that_hangs_is_given_up(tmp_path: Path) -> None:
    source = Numbered(12, lambda number: time.sleep(600) if number == 5 else None)
    report = memload.build(source, tmp_path / "out.bin", size=4, num_workers=2, timeout=0.5)
    assert reasons(report) == {"5": "it took longer than 0.5 s"}
    assert report.samples == 11


@LINUX
def test_a_record_that_kills_its_worker_only_once_is_kept(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()

    def once(number: int) -> None:
        mark = tmp_path / f"mark {number}"
        if number in (3, 4, 20) and not mark.exists():
            mark.touch()
            die()

    report = memload.build(Numbered(40, once), tmp_path / "out.bin", size=4, num_workers=2)
    assert report.rejected == 0
    memload.build(Numbered(40), tmp_path / "other" / "out.bin", size=4, num_workers=0)
    assert files(tmp_path) == files(tmp_path / "other")


@LINUX
def test_a_row_that_is_rejected_after_it_was_written_holds_zeros(tmp_path: Path) -> None:
    def fickle(number: int) -> None:
        mark = tmp_path / "mark"
        if number == 1 and mark.exists():
            raise ValueError("not again")
        if number == 2 and not mark.exists():
            mark.touch()
            die()

    # tasks of one chunk: row 1 is written before row 2 kills the worker, and rejected afterwards
    report = memload.build(Numbered(12, fickle), tmp_path / "out.bin", size=4, num_workers=1)
    assert reasons(report) == {"1": "ValueError: not again"}
    assert not np.load(tmp_path / "out.bin")[1].any()
    assert memload.verify(tmp_path / "out.bin").ok


@pytest.mark.parametrize("count", [0, 1])
def test_the_ledger_tells_a_bomb_alike_for_any_number_of_workers(
    count: int, folder: Path, tmp_path: Path
) -> None:
    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0))
    (folder / "ant" / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IEND", b""))
    report = memload.build(folder, tmp_path / "out.bin", size=8, num_workers=count)
    assert "400,000,000 pixels, and at most" in reasons(report)["ant/bomb.png"]


# Interrupted and gone on with


class Stop(BaseException):
    """An interruption that nothing but a test raises."""


def begun(folder: Path, output: Path, rows: int = 9, **options: Any) -> Path:
    """Begin a build and stop it when some rows are done, a multiple of 3; return its folder."""

    class Interrupted(memload.ImageFolder):
        def __getitem__(self, index: int) -> memload.Record:
            if index == rows:
                raise Stop
            return super().__getitem__(index)

    with pytest.raises(Stop):
        build(Interrupted(folder), output, **options)
    return output.with_suffix(".building")


class Depths:
    """A data set of maps of float32, two of which cannot be used; from ``last`` on, the process is interrupted."""

    def __init__(self, last: int = 30) -> None:
        self.last = last

    def __len__(self) -> int:
        return 30

    def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
        if number >= self.last:
            raise Stop
        shape = (7, 9, 2) if number not in (4, 20) else (9, 7, 2)
        return np.random.default_rng(number).normal(3, 1e3, shape).astype(np.float32), number


def test_arrays_are_the_same_for_any_number_of_workers_and_after_an_interruption(
    tmp_path: Path,
) -> None:
    options: dict[str, Any] = {"mode": "array", "shard_size": 4096 + 11 * 7 * 9 * 2 * 4}
    made = []
    for name, count in (("none", 0), ("one", 1), ("three", 3), ("again", 0)):
        place = tmp_path / name
        place.mkdir()
        if name == "again":
            with pytest.raises(Stop):
                memload.build(Depths(17), place / "out.bin", num_workers=0, **options)
            refused(place / "out.bin")
        report = memload.build(Depths(), place / "out.bin", num_workers=count, **options)
        assert (report.samples, report.rejected) == (28, 2)
        assert memload.verify(place / "out.bin").ok
        made.append(files(place))
    assert report.converted < 30
    assert len(made[0]) == 5
    assert made[1:] == made[:1] * 3


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_full_disk_is_told_and_the_build_goes_on_when_there_is_room(
    spoiled: Path, tmp_path: Path, expected: dict[str, bytes], num_workers: int
) -> None:
    usual, calls = os.pwrite, []

    def full(descriptor: int, data: bytes, offset: int) -> int:
        calls.append(offset)
        if len(calls) > 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        return usual(descriptor, data, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(
            memload.BuildError,
            match=r"cannot be written: .*No space left on device.*goes on where it stopped",
        ):
            build(spoiled, tmp_path / "out.bin", num_workers=num_workers)
    refused(tmp_path / "out.bin")
    build(spoiled, tmp_path / "out.bin", num_workers=num_workers)
    assert files(tmp_path) == expected


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="nothing to drop pages with")
def test_what_could_not_be_flushed_is_read_from_the_disk_and_done_again(
    spoiled: Path, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    dropped: list[int] = []

    def fsync(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").resolve().name == "out-00001-of-00003.bin":
            raise OSError(errno.EIO, "Input/output error")

    def drop(descriptor: int, start: int, size: int, what: int) -> None:
        assert (start, size, what) == (0, 0, os.POSIX_FADV_DONTNEED)
        dropped.append(descriptor)
        # as after a disk that did not take them: the row is what it was before
        with Path(f"/proc/self/fd/{descriptor}").open("r+b") as shard:
            shard.seek(4096)
            shard.write(bytes(ROW))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        patch.setattr(os, "posix_fadvise", drop)
        with pytest.raises(
            memload.BuildError, match=r"Input/output error.*goes on where it stopped"
        ):
            build(spoiled, tmp_path / "out.bin")
    assert len(dropped) == 1
    refused(tmp_path / "out.bin")
    assert build(spoiled, tmp_path / "out.bin").converted == 1 + 3  # and the rejected ones
    assert files(tmp_path) == expected


@LINUX
@pytest.mark.parametrize("limit", [0, 500, 5000])
def test_no_room_for_a_file_of_the_builds_own_is_told_in_one_line(
    folder: Path, tmp_path: Path, limit: int
) -> None:
    command = [
        sys.executable,
        "-m",
        "memload",
        "build",
        str(folder),
        str(tmp_path / "out.bin"),
        "--num-workers",
        "0",
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        f"memload: {tmp_path}/out.bin: cannot be written"
    )
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_only_what_is_not_done_is_done_again_with_any_number_of_workers(
    spoiled: Path, tmp_path: Path, expected: dict[str, bytes], num_workers: int
) -> None:
    begun(spoiled, tmp_path / "out.bin")
    refused(tmp_path / "out.bin")
    report = build(spoiled, tmp_path / "out.bin", num_workers=num_workers)
    assert report.converted == 7  # the rejected one of the nine is tried again
    assert "8 done before" in str(report)
    assert files(tmp_path) == expected


@pytest.mark.parametrize("damage", ["zeroed", "torn", "flipped", "short", "gone"])
def test_rows_whose_records_are_damaged_are_done_again(
    spoiled: Path, tmp_path: Path, expected: dict[str, bytes], damage: str
) -> None:
    rows = begun(spoiled, tmp_path / "out.bin") / "rows"
    size = rows.stat().st_size // 15
    data = bytearray(rows.read_bytes())
    if damage == "zeroed":
        data[2 * size : 4 * size] = bytes(2 * size)
    elif damage == "torn":
        data[2 * size + 7 : 4 * size] = bytes(2 * size - 7)
    elif damage == "flipped":
        data[2 * size + 9] ^= 4
        data[3 * size - 1] ^= 4
        data[4 * size - 1] ^= 4
    elif damage == "short":
        data = data[: 7 * size + 3]
    rows.unlink()
    if damage != "gone":
        rows.write_bytes(data)
    report = build(spoiled, tmp_path / "out.bin")
    assert report.converted == (15 if damage == "gone" else 9)
    assert files(tmp_path) == expected


@pytest.mark.parametrize("damage", ["zeroed", "short", "gone", "header", "noise in a rejected row"])
def test_rows_whose_pixels_are_damaged_are_done_again(
    spoiled: Path, tmp_path: Path, expected: dict[str, bytes], damage: str
) -> None:
    shard = begun(spoiled, tmp_path / "out.bin") / "out-00000-of-00003.bin"
    data = bytearray(shard.read_bytes())
    if damage == "zeroed":
        data[4096 : 4096 + 2 * ROW] = bytes(2 * ROW)
    elif damage == "short":
        data = data[:5000]
    elif damage == "header":
        data[:4096] = bytes(4096)
    elif damage == "noise in a rejected row":
        assert not any(data[4096 + 4 * ROW : 4096 + 5 * ROW])
        data[4096 + 4 * ROW] = 1
    shard.unlink()
    if damage != "gone":
        shard.write_bytes(data)
    report = build(spoiled, tmp_path / "out.bin")
    assert report.converted > 7 or damage == "noise in a rejected row" or damage == "header"
    assert files(tmp_path) == expected


def test_shards_and_ledger_of_an_older_build_are_removed(
    spoiled: Path, folder: Path, tmp_path: Path
) -> None:
    memload.build(spoiled, tmp_path / "out.bin", size=SIZE, num_workers=0, shard_size=4096 + ROW)
    assert len(files(tmp_path)) == 15 + 2
    for name in ("ant/bad.jpg", "bee/empty.png", "cat/cut.jpg"):
        (folder / name).unlink()
    (tmp_path / "out-precious.bin").write_bytes(b"not of a build")
    memload.build(folder, tmp_path / "out.bin", size=SIZE, num_workers=0, overwrite=True)
    assert sorted(files(tmp_path)) == ["out-precious.bin", "out.bin", "out.idx"]


def test_everything_rejected_leaves_the_old_one(folder: Path, output: Path) -> None:
    before = files(output.parent)
    for path in folder.glob("*/*.jpg"):
        path.write_bytes(b"x")
    with pytest.raises(memload.BuildError, match="none of 12 pictures"):
        memload.build(folder, output, size=16, num_workers=0, overwrite=True)
    assert files(output.parent) == before
    assert not output.with_suffix(".building").exists()


# Killed


@pytest.fixture
def command(spoiled: Path, tmp_path: Path) -> list[str]:
    """The command line whose result is ``expected``; the pictures are large, so that it takes its time."""
    for number, path in enumerate(sorted(spoiled.glob("*/[0-9]*.jpg"))):
        Image.effect_noise((700 + number, 700), 60).convert("RGB").save(path, quality=80)
    arguments = [str(spoiled), str(tmp_path / "out.bin"), "--size", str(SIZE), "--num-workers", "2"]
    return [
        sys.executable,
        "-m",
        "memload",
        "build",
        *arguments,
        "--shard-size",
        str(4096 + 6 * ROW),
    ]


def wait_for(what: Callable[[], Any], process: "subprocess.Popen[Any] | None" = None) -> Any:
    """Wait until something is there, or the process has ended."""
    deadline = time.monotonic() + 30
    while (
        not (found := what())
        and time.monotonic() < deadline
        and (process is None or process.poll() is None)
    ):
        time.sleep(0.005)
    return found


def children(process: int) -> list[int]:
    try:
        return [
            int(child)
            for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()
        ]
    except OSError:
        return []


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


SLEEPER = """
import sys, time
import numpy as np
import memload

class Slow:
    def __len__(self):
        return 8
    def __getitem__(self, number):
        if number >= 2:
            time.sleep({seconds})
        return np.full((4, 4), number, np.uint8), number

memload.build(Slow(), {output!r}, size=4, num_workers=2)
"""


@LINUX
@pytest.mark.parametrize("seconds", [0.05, 600], ids=["busy", "hanging"])
def test_workers_whose_parent_was_killed_end_and_let_go_of_the_lock(
    tmp_path: Path, seconds: float
) -> None:
    output = str(tmp_path / "out.bin")
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPER.format(seconds=seconds, output=output)]
    )
    orphans = wait_for(lambda: found if len(found := children(process.pid)) == 2 else None, process)
    process.kill()
    process.wait()
    assert len(orphans) == 2
    wait_for(lambda: not any(alive(child) for child in orphans))
    assert not any(alive(child) for child in orphans)
    done = subprocess.run(
        [sys.executable, "-c", SLEEPER.format(seconds=0, output=output)], check=False
    )
    assert done.returncode == 0
    assert memload.MemmapDataset(output).columns["label"].tolist() == list(range(8))


@LINUX
def test_ctrl_c_ends_it_with_130_and_says_how_to_go_on(command: list[str], tmp_path: Path) -> None:
    # pictures that take long enough to stop the workers over them, so that Ctrl-C comes before the end
    large = Image.new("RGB", (8000, 8000))
    for name in ("ant/00.jpg", "bee/01.jpg", "cat/02.jpg"):
        large.save(tmp_path / "images" / name)
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_for(lambda: len(children(process.pid)) == 2, process)
    for worker in children(process.pid):
        os.kill(worker, signal.SIGSTOP)
    os.killpg(process.pid, signal.SIGINT)
    said, told = process.communicate(timeout=60)
    assert process.returncode == 130, told
    assert (
        told.splitlines()[-1]
        == "memload: interrupted. Run the same command again to continue where it stopped"
    )
    assert "Traceback" not in told
    assert said == ""
    refused(tmp_path / "out.bin")


# What it takes


def peak(count: int, output: Path) -> int:
    source = Numbered(count)
    tracemalloc.start()
    try:
        memload.build(source, output, size=1, num_workers=1, mode="L")
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    peak(100, tmp_path / "first.bin")  # what is imported and cached on the way
    few, many = peak(1_000, tmp_path / "few.bin"), peak(8_000, tmp_path / "many.bin")
    # names, records and columns do, by some hundred bytes a row; pixels and tasks do not
    assert (many - few) / 7_000 < 1_000


def test_it_changes_nothing_in_the_process_that_calls_it(folder: Path, tmp_path: Path) -> None:
    before = (
        Image.MAX_IMAGE_PIXELS,
        list(warnings.filters),
        signal.getsignal(signal.SIGINT),
        Path.cwd(),
    )
    for number in (0, 1):
        memload.build(folder, tmp_path / f"{number}.bin", size=8, num_workers=number)
    assert before == (
        Image.MAX_IMAGE_PIXELS,
        list(warnings.filters),
        signal.getsignal(signal.SIGINT),
        Path.cwd(),
    )


def test_overwriting_a_saved_subset_leaves_the_pixels_of_the_whole(
    folder: Path, tmp_path: Path
) -> None:
    memload.build(folder, tmp_path / "out.bin", size=8)
    memload.MemmapDataset(tmp_path / "out.bin").subset([1, 2]).save(tmp_path / "train.idx")
    memload.build(folder, tmp_path / "train.bin", size=8, overwrite=True)
    assert memload.verify(tmp_path / "out.bin").ok
    assert len(memload.MemmapDataset(tmp_path / "train.bin")) == 12


def test_shards_that_another_index_stands_over_are_kept(folder: Path, tmp_path: Path) -> None:
    memload.build(folder, tmp_path / "out.bin", size=8, shard_size=4096 + 4 * 192)
    (tmp_path / "copy.idx").write_bytes((tmp_path / "out.idx").read_bytes())
    memload.build(folder, tmp_path / "out.bin", size=8, overwrite=True)
    assert memload.verify(tmp_path / "copy.idx").ok


def test_a_shard_does_not_take_the_place_of_another_data_set(folder: Path, tmp_path: Path) -> None:
    memload.build(folder, tmp_path / "x-00000-of-00002.bin", size=8)
    with pytest.raises(memload.BuildError, match="is the data set of x-00000-of-00002"):
        memload.build(folder, tmp_path / "x.bin", size=8, shard_size=4096 + 6 * 192, overwrite=True)
    assert memload.verify(tmp_path / "x-00000-of-00002.bin").ok


def test_more_shards_than_descriptors_can_be_written(folder: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 20
    images = tmp_path / "many"
    images.mkdir()
    for number in range(60):
        Image.new("RGB", (4, 4), (number, 0, 0)).save(images / f"{number:02d}.png")
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 30, before[1]))
    try:
        report = memload.build(
            images, tmp_path / "out.bin", size=4, shard_size=4096 + 48, num_workers=0
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert report.samples == 60


@pytest.mark.slow
@LINUX
def test_a_data_set_that_uses_torch_is_read_by_forked_workers(tmp_path: Path) -> None:
    code = f"""
import torch, memload
torch.exp(torch.rand(4_000_000)).sum()  # starts its threads

class Random:
    def __len__(self): return 4
    def __getitem__(self, i): return (torch.exp(torch.rand(3, 600, 600)) / 3 * 255).to(torch.uint8), i

print(memload.build(Random(), {str(tmp_path / "out.bin")!r}, size=8, num_workers=2, timeout=30).rejected)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout == "0\n", done.stderr


@pytest.mark.parametrize(
    "text",
    ["{}", "[1]", "5", '{"size": 5, "columns": ["/etc/passwd", 3]}', "\0"],
)
def test_an_unfinished_build_whose_plan_is_damaged_is_begun_anew(
    text: str, folder: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.bin"
    (tmp_path / "out.building").mkdir()
    (tmp_path / "out.building" / "plan.json").write_text(text)
    memload.build(folder, output, size=16, num_workers=0, overwrite=True)
    assert len(memload.MemmapDataset(output))
