"""Leaks are found, and hundreds of epochs, early exits and new Loaders leave none."""

import contextlib
import gc
import logging
import mmap
import os
import pickle
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import DataLoader

import memload
from memload import CudaPrefetcher, Loader, MemmapDataset, ThreadPrefetcher

listed = pytest.mark.skipif(
    not Path("/proc/self/map_files").exists(), reason="needs Linux's list of mapped files"
)
forks = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

ROWS, BATCH = 64, 16
#: A batch takes 1 MB, so one that is leaked in each of 60 rounds takes 60 MB.
SHAPE = (128, 171, 3)
#: Bytes that memory may grow by in 60 rounds.
ROOM = 40 << 20


@pytest.fixture
def path(make_dataset):
    """A data set of two shards."""
    return Path(make_dataset(rows=(40, 24), shape=SHAPE).path)


# ---------------------------------------------------------------------- the check for leaks itself


@listed
@pytest.mark.slow
def test_a_test_that_leaves_something_behind_fails(tmp_path):
    conftest = Path(__file__).with_name("conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(conftest.replace("patience=5", "patience=0"))
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
            def test_garbage():
                cycle = [os.fdopen(end) for end in os.pipe()]
                cycle.append(cycle)
            def test_failed_already():
                kept.append(os.pipe())
                assert not kept
            def test_last():
                stop.set()
                kept[1].wait()
        """)
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull]
    done = subprocess.run(
        [*command, str(tmp_path)], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    results = [line.split()[:2] for line in done.stdout.splitlines() if "::" in line]
    failed = {(kind, name.rpartition("::")[2]) for kind, name in results}
    assert failed == {
        *(("ERROR", f"test_{kind}") for kind in ("descriptor", "thread", "process", "map")),
        ("FAILED", "test_failed_already"),
    }
    assert "1 failed, 7 passed, 4 errors" in done.stdout


# ------------------------------------------------------------------------ what is done many times


class Broken(Exception):  # noqa: N818  # what a transform raises
    pass


def fail(images):
    raise Broken


def fail_at_the_third():
    calls = iter(range(2))

    def transform(images):
        if next(calls, None) is None:
            raise Broken
        return images + 1

    return transform


Round = Callable[[], object]


def loaders(path, num_threads):
    transform = memload.transforms.Compose([memload.transforms.RandomHorizontalFlip()])
    options = {"shuffle": True, "num_threads": num_threads}
    loader = Loader(path, BATCH, transform=transform, **options)

    def run():
        assert sum(len(images) for images, _ in loader) == ROWS
        next(iter(loader))  # an epoch that is not finished
        next(iter(pickle.loads(pickle.dumps(loader))))
        list(Loader(path, BATCH, **options))
        for wrong in ({"transform": fail_at_the_third()}, {"sampler": [*range(BATCH), ROWS]}):
            with contextlib.suppress(Broken, IndexError):
                list(Loader(path, BATCH, num_threads=num_threads, **wrong))

    return run


def dataloaders(path, num_threads):
    def batches(**options):
        return DataLoader(MemmapDataset(path, **options), BATCH, collate_fn=memload.fast_collate)

    def run():
        list(batches())
        next(iter(batches()))
        with contextlib.suppress(Broken):
            list(batches(transform=fail))

    return run


def prefetchers(path, num_threads):
    batches = DataLoader(MemmapDataset(path), BATCH, collate_fn=memload.fast_collate)
    options = {"device": "cpu"}

    def run():
        next(iter(ThreadPrefetcher(batches)))
        next(iter(CudaPrefetcher(batches, **options)))
        CudaPrefetcher(batches, **options).next()
        with contextlib.suppress(Broken):
            next(iter(CudaPrefetcher(batches, transform=fail, **options)))

    return run


def data_sets(path, num_threads):
    damaged, shard = (
        path.with_name("damaged.idx"),
        path.with_name(memload.info(path)["arrays"]["image"]["files"][0]),
    )
    damaged.write_bytes(path.read_bytes()[:-1])
    whole, dataset = shard.read_bytes(), MemmapDataset(path)

    def run():
        part = dataset.subset(np.arange(0, ROWS, 2))[4:]
        part.gather(range(len(part)))
        pickle.loads(pickle.dumps(part))[0]
        with contextlib.suppress(IndexError):
            part[ROWS]
        assert memload.verify(path, num_threads=num_threads).ok
        shard.write_bytes(bytes(4096) + whole[4096:])
        for wrong in (path, damaged, path.with_name("none.idx")):
            with contextlib.suppress(memload.FormatError, memload.MissingError):
                Loader(wrong)
        shard.write_bytes(whole)

    return run


def memory():
    """Return the bytes of RAM that this process takes, without mapped files."""
    pages = Path("/proc/self/statm").read_text().split()
    return (int(pages[1]) - int(pages[2])) * mmap.PAGESIZE


def objects():
    """Return the number of objects that are not Python's own: coverage keeps some for each thread."""
    libraries = ("memload", "numpy", "torch")
    return sum(str(type(item).__module__).startswith(libraries) for item in gc.get_objects())


def finalizers():
    return len(weakref.finalize._registry)  # type: ignore[attr-defined]  # one for each live batch


@listed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("prepare", "num_threads"),
    [
        (loaders, 0),
        (loaders, 2),
        (dataloaders, 1),
        (prefetchers, 0),
        (data_sets, 2),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_many_rounds_take_no_more_than_few(prepare, num_threads, path, held, caplog):
    caplog.set_level(logging.WARNING, "memload")  # pytest would keep the records of every Loader
    run = prepare(path, num_threads)
    for _ in range(10):
        run()
    gc.collect()
    before, kept, batches, taken = held.now(), objects(), finalizers(), memory()
    for _ in range(60):
        run()
    assert memory() - taken < ROOM  # without help from a collection of garbage
    assert before.left(patience=5) == []
    gc.collect()
    assert finalizers() - batches < 10
    assert objects() - kept < 10


@pytest.mark.slow
@forks
@listed
def test_workers_leave_nothing(path, held):
    def early(transform=None):
        dataset = MemmapDataset(path, transform=transform)
        collate = memload.fast_collate
        return iter(DataLoader(dataset, 8, num_workers=1, collate_fn=collate))

    before, taken = held.now(), memory()
    for _ in range(4):
        with pytest.raises(Broken):
            next(early(fail))
        assert len(next(early())[0]) == 8
    assert before.left(patience=30) == []  # workers that have been told to end may take a moment
    assert memory() - taken < ROOM
