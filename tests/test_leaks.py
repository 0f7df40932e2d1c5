"""Nothing grows: what finds leaks finds them, and hundreds of epochs, early ends and new Loaders leave none."""

import contextlib
import gc
import logging
import mmap
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import memload
from memload import CudaPrefetcher, Loader, MemmapDataset, ThreadPrefetcher

listed = pytest.mark.skipif(
    not Path("/proc/self/map_files").exists(), reason="this system does not list what is held"
)
forks = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

ROWS, BATCH = 64, 16
#: Pixels of an image: a batch is 1 MB, so that one that is kept in each round shows in memory.
SHAPE = (128, 171, 3)
#: Bytes that memory may grow by in 60 rounds: the closest peer keeps 35 MB each time.
ROOM = 24 << 20


pytestmark = pytest.mark.usefixtures("quick_collections")


@pytest.fixture
def path(make_dataset: Callable[..., Any]) -> Path:
    """1 MB a batch, over two shards."""
    return Path(make_dataset(rows=(40, 24), shape=SHAPE).path)


# What finds leaks.


@contextlib.contextmanager
def thread(path: Path) -> Iterator[None]:
    stop = threading.Event()
    left = threading.Thread(target=stop.wait, name="left")
    left.start()
    yield
    stop.set()
    left.join()


@contextlib.contextmanager
def child(path: Path) -> Iterator[None]:
    left = multiprocessing.get_context("spawn").Process(target=print)
    left.start()
    yield
    left.kill()
    left.join()
    left.close()


@contextlib.contextmanager
def ended_program_that_nobody_waited_for(path: Path) -> Iterator[None]:
    left = subprocess.Popen([sys.executable, "-c", ""])
    yield
    left.wait()


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[None]:
    with path.open("rb"):
        yield


@contextlib.contextmanager
def pipe(path: Path) -> Iterator[None]:
    ends = os.pipe()
    yield
    for end in ends:
        os.close(end)


@contextlib.contextmanager
def map_without_a_descriptor(path: Path) -> Iterator[None]:
    name = memload.info(path)["shards"][0]
    left = torch.UntypedStorage.from_file(
        str(path.with_name(name)), False, mmap.PAGESIZE
    )  # as safetensors does it
    yield
    del left


@contextlib.contextmanager
def data_set(path: Path) -> Iterator[None]:
    left = [MemmapDataset(path)]
    yield
    left.clear()


@listed
@pytest.mark.parametrize(
    ("leak", "told"),
    [
        (thread, "thread left"),
        (child, "process "),
        (ended_program_that_nobody_waited_for, "process "),
        (open_file, "made.idx"),
        (pipe, "pipe:"),
        (map_without_a_descriptor, "map of "),
        (data_set, "made-00000-of-00002.bin"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_is_left_is_told(leak: Any, told: str, path: Path, held: Any) -> None:
    before = held.now()
    with leak(path):
        assert any(told in left for left in before.left())
    assert before.left() == []


def test_what_only_the_garbage_collector_can_free_is_no_leak(path: Path, held: Any) -> None:
    before = held.now()
    around: list[Any] = [MemmapDataset(path)]
    around.append(around)
    del around
    assert before.left() == []


@listed
def test_a_test_that_leaves_something_behind_fails(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_it.py").write_text(
        textwrap.dedent("""
            import mmap, os, subprocess, sys, threading
            kept, stop = [], threading.Event()
            def test_clean(tmp_path): (tmp_path / "file").write_text("closed")
            def test_descriptor(): kept.append(os.pipe())
            def test_thread(): threading.Thread(target=stop.wait).start()
            def test_process(): kept.append(subprocess.Popen([sys.executable, "-c", ""]))
            def test_map(tmp_path):
                (tmp_path / "file").write_bytes(bytes(mmap.PAGESIZE))
                with open(tmp_path / "file", "rb") as file:
                    kept.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            def test_failed_already():
                kept.append(os.pipe())
                assert not kept
            def test_last():
                stop.set()
                kept[1].wait()
        """)
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    failed = [
        line.split()[:2]
        for line in done.stdout.splitlines()
        if line.startswith(("ERROR ", "FAILED "))
    ]
    assert {(what, name.rpartition("::")[2]) for what, name in failed} == {
        *(("ERROR", f"test_{kind}") for kind in ("descriptor", "thread", "process", "map")),
        ("FAILED", "test_failed_already"),
    }
    assert "1 failed, 6 passed, 4 errors" in done.stdout


# What is done over and over.


class Broken(Exception):  # noqa: N818  # what a transform raises
    pass


def fail(images: Any) -> Any:
    raise Broken


def fail_at_the_third() -> Callable[[Any], Any]:
    calls = iter(range(2))

    def transform(images: torch.Tensor) -> torch.Tensor:
        if next(calls, None) is None:
            raise Broken
        return images + 1

    return transform


def epochs(path: Path, num_threads: int) -> Callable[[], object]:
    loader = Loader(path, BATCH, shuffle=True, num_threads=num_threads)
    return lambda: sum(len(images) for images, _ in loader)


def early_breaks(path: Path, num_threads: int) -> Callable[[], object]:
    loader = Loader(path, BATCH, shuffle=True, num_threads=num_threads)
    return lambda: next(iter(loader))


def iterators_that_are_kept_to_the_next_round(path: Path, num_threads: int) -> Callable[[], object]:
    loader, kept = Loader(path, BATCH, num_threads=num_threads), []

    def once() -> None:
        iterator = iter(loader)
        next(iterator)
        kept[:] = [iterator]

    return once


def failing_transforms(path: Path, num_threads: int) -> Callable[[], object]:
    def once() -> None:
        with contextlib.suppress(Broken):
            for _ in Loader(path, BATCH, transform=fail_at_the_third(), num_threads=num_threads):
                pass

    return once


def failing_samplers(path: Path, num_threads: int) -> Callable[[], object]:
    def once() -> None:
        with contextlib.suppress(IndexError):
            list(Loader(path, BATCH, sampler=[*range(BATCH), ROWS], num_threads=num_threads))

    return once


def new_loaders(path: Path, num_threads: int) -> Callable[[], object]:
    return lambda: len(list(Loader(path, BATCH, shuffle=True, num_threads=num_threads)))


def unpickled_loaders(path: Path, num_threads: int) -> Callable[[], object]:
    loader = Loader(path, BATCH, num_threads=num_threads)
    return lambda: next(iter(pickle.loads(pickle.dumps(loader))))


def transforms_of_batches(path: Path, num_threads: int) -> Callable[[], object]:
    transform = memload.transforms.Compose([memload.transforms.RandomHorizontalFlip()])
    loader = Loader(path, BATCH, transform=transform, num_threads=num_threads)
    return lambda: len(list(loader))


def dataloaders(path: Path, num_threads: int) -> Callable[[], object]:
    batches = DataLoader(MemmapDataset(path), BATCH, shuffle=True, collate_fn=memload.fast_collate)
    return lambda: len(list(batches))


def dataloaders_left_early_with_failing_transforms(
    path: Path, num_threads: int
) -> Callable[[], object]:
    def once() -> None:
        next(iter(DataLoader(MemmapDataset(path), BATCH, collate_fn=memload.fast_collate)))
        with contextlib.suppress(Broken):
            list(
                DataLoader(
                    MemmapDataset(path, transform=fail), BATCH, collate_fn=memload.fast_collate
                )
            )

    return once


def prefetchers(path: Path, num_threads: int) -> Callable[[], object]:
    batches = DataLoader(MemmapDataset(path), BATCH, collate_fn=memload.fast_collate)

    def once() -> None:
        for made in (
            ThreadPrefetcher(batches),
            CudaPrefetcher(batches, device="cpu", own_thread=num_threads > 0),
            CudaPrefetcher(batches, device="cpu", own_thread=num_threads > 0, transform=fail),
        ):
            with contextlib.suppress(Broken):
                next(iter(made))
        CudaPrefetcher(batches, device="cpu", own_thread=num_threads > 0).next()

    return once


def subsets_and_gathers(path: Path, num_threads: int) -> Callable[[], object]:
    dataset = MemmapDataset(path)

    def once() -> None:
        part = dataset.subset(np.arange(0, ROWS, 2))[4:]
        part.gather(range(len(part)))
        with contextlib.suppress(IndexError):
            part[ROWS]
        pickle.loads(pickle.dumps(part))[0]

    return once


def opening_what_is_damaged(path: Path, num_threads: int) -> Callable[[], object]:
    damaged, shard = path.with_name("damaged.idx"), path.with_name(memload.info(path)["shards"][0])
    damaged.write_bytes(path.read_bytes()[:-1])
    whole = shard.read_bytes()

    def once() -> None:
        with contextlib.suppress(memload.FormatError):
            MemmapDataset(damaged)
        shard.write_bytes(bytes(4096) + whole[4096:])
        with contextlib.suppress(memload.FormatError):
            Loader(path)
        shard.write_bytes(whole)
        with contextlib.suppress(memload.MissingError):
            Loader(path.with_name("none.idx"))

    return once


def looking_at_it(path: Path, num_threads: int) -> Callable[[], object]:
    def once() -> None:
        memload.info(path)
        assert memload.verify(path, num_threads=1 + num_threads).ok

    return once


WITH_THREADS = (
    epochs,
    early_breaks,
    iterators_that_are_kept_to_the_next_round,
    failing_transforms,
    failing_samplers,
    new_loaders,
    prefetchers,
)
WITHOUT = (
    unpickled_loaders,
    transforms_of_batches,
    dataloaders,
    dataloaders_left_early_with_failing_transforms,
    subsets_and_gathers,
    opening_what_is_damaged,
    looking_at_it,
)


def memory() -> int:
    """Return the bytes of RAM that this process alone takes: without mapped files."""
    pages = Path("/proc/self/statm").read_text().split()
    return (int(pages[1]) - int(pages[2])) * mmap.PAGESIZE


def counts(now: Any) -> tuple[int, int, Counter[str], int]:
    """Return how many there are of each kind, of descriptors by what they are."""
    return (
        len(now.threads),
        len(now.children),
        Counter(what for _, what in now.descriptors),
        len(now.maps),
    )


def at_rest(held: Any, wanted: tuple[Any, ...] | None = None) -> tuple[int, int, Counter[str], int]:
    """Return what `counts` does once it is as wanted, or stays the same for a while: threads of an iterator that is
    kept are still copying, which takes descriptors."""
    found, since, deadline = counts(held.now()), time.monotonic(), time.monotonic() + 20
    while found != wanted and (now := time.monotonic()) < deadline:
        if wanted is None and now - since > 0.2:
            break
        time.sleep(0.01)
        later = counts(held.now())
        found, since = later, since if later == found else time.monotonic()
    return found


def finalizers() -> int:
    return len(weakref.finalize._registry)  # type: ignore[attr-defined]  # what a leak of batches leaves first


@listed
@pytest.mark.parametrize(
    ("prepare", "num_threads"),
    [
        *((prepare, num_threads) for prepare in WITH_THREADS for num_threads in (0, 2)),
        *((prepare, 1) for prepare in WITHOUT),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_many_rounds_take_no_more_than_few(
    prepare: Callable[[Path, int], Callable[[], object]],
    num_threads: int,
    path: Path,
    held: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(
        logging.WARNING, "memload"
    )  # or pytest would keep what is told of every Loader
    once = prepare(path, num_threads)
    for _ in range(10):
        once()
    gc.collect()
    before, objects, waiting, taken = at_rest(held), len(gc.get_objects()), finalizers(), memory()
    for _ in range(60):
        once()
    assert memory() - taken < ROOM  # without a collection, which nothing is to need
    gc.collect()
    assert at_rest(held, before) == before
    assert finalizers() - waiting < 10
    assert len(gc.get_objects()) - objects < 60


@forks
@listed
@pytest.mark.parametrize(("method", "rounds"), [("fork", 4), ("spawn", 1)])
def test_workers_leave_nothing(method: str, rounds: int, path: Path, held: Any) -> None:
    def early(transform: Any = None) -> Iterator[Any]:
        dataset = MemmapDataset(path, transform=transform)
        collate: Any = memload.fast_collate
        return iter(
            DataLoader(
                dataset, 8, num_workers=1, collate_fn=collate, multiprocessing_context=method
            )
        )

    before, taken = held.now(), memory()
    for _ in range(rounds):
        with pytest.raises(Broken):
            next(early(fail))
        assert len(next(early())[0]) == 8
    assert before.left(patience=5) == []  # workers that have been told to end may take a moment
    assert memory() - taken < ROOM
