"""Many readers at once, ranks that open on a cold machine, and readers beside builds."""

import multiprocessing
import os
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

import memload
from memload import FormatError, Loader, MemmapDataset
from memload.storage.index import Index
from memload.storage.shards import Shards

ROWS = 61
forks = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
can_fork = pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="this system cannot fork"
)


pytestmark = pytest.mark.usefixtures("quick_collections")


@pytest.fixture
def path(make_dataset: Callable[..., Any]) -> Path:
    """Two shards, and labels that say which sample it is."""
    return Path(
        make_dataset(
            rows=(40, 21), shape=(31, 33, 3), columns={"label": np.arange(ROWS)}, classes=None
        ).path
    )


def checksums(path: Path) -> dict[int, int]:
    return dict(enumerate(Index.read(path).crc32["image"].tolist()))


def epoch_of(loader: Loader) -> dict[int, int]:
    """Return the checksum of the pixels of every sample by its label."""
    read: dict[int, int] = {}
    for images, labels in loader:
        for image, label in zip(images.permute(0, 2, 3, 1), labels.tolist(), strict=True):
            assert label not in read
            read[label] = zlib.crc32(image.contiguous().numpy())
    return read


def forget_pages(path: Path) -> None:
    """Have the system drop files from the page cache, where it can be asked to."""
    for file in path.parent.iterdir():
        if hasattr(os, "posix_fadvise"):
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def rank_of_four(path: Path, rank: int, together: Any, results: Any) -> None:
    together.wait(60)
    loader = Loader(path, 4, shuffle=True, rank=rank, num_replicas=4, num_threads=1)
    results.put((rank, len(loader), epoch_of(loader)))
    results.close()
    results.join_thread()
    os._exit(0)  # what pytest has set up for the end of its process is not this one's


@forks
@can_fork
def test_ranks_that_open_at_once_on_a_cold_machine_share_an_epoch(path: Path) -> None:
    forget_pages(path)
    context = multiprocessing.get_context("fork")
    together, results = context.Barrier(4), context.Queue()
    ranks = [
        context.Process(target=rank_of_four, args=(path, rank, together, results))
        for rank in range(4)
    ]
    for process in ranks:
        process.start()
    parts = [results.get(timeout=60) for _ in ranks]
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
        process.close()
    results.close()
    results.join_thread()
    assert sorted(rank for rank, _, _ in parts) == [0, 1, 2, 3]
    assert {count for _, count, _ in parts} == {4}
    assert (
        sum(len(read) for _, _, read in parts) == ROWS + 3
    )  # the three that make all even come twice
    assert {label: check for _, _, read in parts for label, check in read.items()} == checksums(
        path
    )


def test_many_readers_of_one_data_set_do_not_disturb_each_other(path: Path) -> None:
    expected, shared = checksums(path), MemmapDataset(path)

    def reader(number: int) -> bool:
        dataset = shared if number % 2 else MemmapDataset(path)
        for batch_size in (1, 7, 64):
            assert (
                epoch_of(
                    Loader(dataset, batch_size, shuffle=True, seed=number, num_threads=number % 3)
                )
                == expected
            )
        batches = DataLoader(dataset, 7, shuffle=True, collate_fn=memload.fast_collate)
        read = {
            int(label): image
            for images, labels in batches
            for image, label in zip(images, labels, strict=True)
        }
        assert {
            n: zlib.crc32(image.permute(1, 2, 0).contiguous().numpy()) for n, image in read.items()
        } == expected
        return True

    with ThreadPoolExecutor(8) as readers:
        assert all(readers.map(reader, range(16), timeout=100))


def test_iterators_of_one_loader_on_many_threads_each_get_a_whole_epoch(path: Path) -> None:
    loader, expected = Loader(path, 8, shuffle=True, num_threads=1), checksums(path)
    with ThreadPoolExecutor(8) as readers:
        assert all(
            read == expected
            for read in readers.map(lambda _: epoch_of(loader), range(16), timeout=100)
        )


def test_a_reader_beside_an_unrelated_build_reads_on(path: Path, folder: Path) -> None:
    before = {file.name: file.read_bytes() for file in path.parent.glob("made*")}
    command = [
        sys.executable,
        "-m",
        "memload",
        "build",
        str(folder),
        str(path.with_name("other.bin")),
    ]
    loader, expected = Loader(path, 8, shuffle=True, num_threads=2), checksums(path)
    with subprocess.Popen([*command, "--size", "16", "--num-workers", "2", "--quiet"]) as build:
        rounds = 0
        while build.poll() is None or not rounds:
            assert epoch_of(loader) == expected
            assert len(MemmapDataset(path)) == ROWS
            rounds += 1
    assert build.returncode == 0
    assert memload.verify(path.with_name("other.bin")).ok
    assert {file.name: file.read_bytes() for file in path.parent.glob("made*")} == before


# A build that replaces what is being opened. Its pixels differ in the middle alone, which no check of a shard's first
# and last row can see.


def versions(tmp_path: Path) -> list[Any]:
    """Two data sets with other pixels and labels in the middle."""

    class Version:
        def __init__(self, value: int) -> None:
            self.value = value

        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
            value = self.value if index == 1 else 0
            return np.full((4, 4, 3), value, np.uint8), value

    return [Version(1), Version(2)]


def test_labels_are_never_those_of_other_pixels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, both = tmp_path / "out.bin", versions(tmp_path)
    memload.build(both[0], path, size=4, num_workers=0)
    opened = Shards.__init__

    def open_late(self: Shards, *arguments: Any) -> None:
        monkeypatch.undo()
        # another build ends after the index was read
        memload.build(both[1], path, size=4, num_workers=0, overwrite=True)
        opened(self, *arguments)

    monkeypatch.setattr(Shards, "__init__", open_late)
    with pytest.raises(FormatError, match="does not belong to"):
        MemmapDataset(path)
    image, label = MemmapDataset(path)[1]
    assert (int(image.max()), label) == (2, 2)


@pytest.mark.slow
def test_a_data_set_that_is_rebuilt_over_and_over_is_whole_whenever_it_can_be_opened(
    tmp_path: Path,
) -> None:
    path, both = tmp_path / "out.bin", versions(tmp_path)
    memload.build(both[0], path, size=4, num_workers=0)
    ended = threading.Event()

    def read() -> tuple[int, int]:
        whole = refused = 0
        while not ended.is_set():
            try:
                image, label = MemmapDataset(path)[1]
            except FormatError:  # between the old data set and the new there is none
                refused += 1
                continue
            assert int(image.max()) == label
            whole += 1
        return whole, refused

    with ThreadPoolExecutor(2) as readers:
        counts = [readers.submit(read) for _ in range(2)]
        try:
            for number in range(25):
                memload.build(both[number % 2], path, size=4, num_workers=0, overwrite=True)
        finally:
            ended.set()
        assert all(count.result(60)[0] for count in counts)


def test_a_loader_reads_on_while_its_files_are_replaced(tmp_path: Path) -> None:
    path, both = tmp_path / "out.bin", versions(tmp_path)
    memload.build(both[0], path, size=4, num_workers=0)
    loader = Loader(path, 1, num_threads=1)
    batches = iter(loader)
    next(batches)
    memload.build(both[1], path, size=4, num_workers=0, overwrite=True)
    old = [(int(images.max()), int(labels)) for images, labels in [*batches, *loader]]
    assert old == [(1, 1), (0, 0), (0, 0), (1, 1), (0, 0)]
    assert [int(labels) for _, labels in Loader(path, 1)] == [0, 2, 0]
