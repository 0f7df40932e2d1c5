import ctypes
import math
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from memload import FeedError, FormatError, Index
from memload.feeds import budget, held, pinned, windows
from memload.feeds import registered as registered_files
from memload.feeds.choice import choose_feed
from memload.feeds.cpu import CpuFeed
from memload.feeds.dma import BatchedCopies
from memload.feeds.interface import Samples, widest_word
from memload.feeds.page_cache import PageCacheFeed
from memload.machine import available_memory
from memload.storage.shards import Shards

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(params=[(12,), (5, 4, 3)], ids=["one shard", "three shards"])
def open_shards(
    request: pytest.FixtureRequest, make_dataset: Callable[..., Index]
) -> Callable[[], Shards]:
    index = make_dataset(rows=request.param).path
    return lambda: Shards(Index.read(index))  # a fixture would keep them open for too long


def samples_of(shards: Shards, row: Any = None, columns: Any = ()) -> Samples:
    return Samples(shards, np.arange(len(shards)) if row is None else np.array(row), columns)


def stored(shards: Shards) -> np.ndarray:
    return np.concatenate(shards.maps)


def test_a_batch_on_the_cpu_has_the_rows_and_columns_of_its_samples(
    open_shards: Callable[[], Shards],
) -> None:
    shards, row, column = open_shards(), [3, 3, 11, 0], np.array([[5], [6], [7], [8]])
    begin = CpuFeed(samples_of(shards, row, [column]), CPU, keep=1).prepare(np.array([2, 0, 3]))
    pixels, values = begin(1, 3)()
    np.testing.assert_array_equal(pixels.numpy(), stored(shards)[[3, 0]])
    assert values.tolist() == [[5], [8]]
    values.fill_(0)
    assert column.tolist() == [[5], [6], [7], [8]]


def test_a_pinned_feed_may_be_closed_while_a_thread_gathers(
    open_shards: Callable[[], Shards], monkeypatch: pytest.MonkeyPatch
) -> None:
    class ClosingExecutor(ThreadPoolExecutor):
        def submit(self, *arguments: Any, **options: Any) -> Any:
            feed.close()
            return super().submit(*arguments, **options)

    monkeypatch.setattr(pinned, "ThreadPoolExecutor", ClosingExecutor)
    monkeypatch.setattr(pinned, "_BYTES_PER_THREAD", 1)
    shards = open_shards()
    feed = pinned.PinnedFeed(samples_of(shards), CUDA, num_threads=3, callers=1)
    out = np.zeros_like(stored(shards))
    feed._gather(np.arange(12), out)  # without the copy to the device
    np.testing.assert_array_equal(out, stored(shards))


def test_words_are_as_wide_as_rows_allow() -> None:
    words = [widest_word(size) for size in (24, 12, 6, 3)]
    assert words == [torch.int64, torch.int32, torch.int16, torch.int8]
    assert widest_word(24, 4096) == torch.int64
    assert widest_word(24, 100) == torch.int32  # rows begin at byte 100


# Which windows are registered. CUDA is replaced by functions that record.


class Stream:
    """A CUDA stream that has nothing to do."""

    cuda_stream = 0

    def synchronize(self) -> None:
        pass


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Registered memory, address and size, without CUDA. Windows have 8 KiB."""
    memory: dict[int, int] = {}

    def register(address: int, size: int, flags: int) -> None:
        memory[address] = size

    monkeypatch.setattr(registered_files, "register", register)
    monkeypatch.setattr(registered_files, "unregister", memory.pop)
    for module in (windows, held, registered_files):
        monkeypatch.setattr(module, "WINDOW_BYTES", 2 * 4096)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    return memory


@pytest.mark.parametrize(
    ("rows", "in_use"),
    [
        ([0], [(0, 0)]),
        ([1], [(0, 0), (0, 1)]),  # from byte 7,096 to 10,096
        ([9, 9, 2], [(0, 1), (0, 3), (0, 4)]),
        ([10], [(1, 0)]),
        ([0, 19], [(0, 0), (1, 3), (1, 4)]),
        ([], []),
        (range(20), [(shard, window) for shard in (0, 1) for window in range(5)]),
    ],
    ids=str,
)
def test_only_windows_that_hold_rows_in_use_are_registered(
    rows: Any, in_use: Any, make_dataset: Callable[..., Index], registered: dict[int, int]
) -> None:
    shards = Shards(make_dataset(rows=(10, 10), shape=(10, 100, 3)))
    rows = np.array(rows, np.int64)
    opened = hold(shards, rows)
    wait_for_pages(opened)
    starts = [file.address for file in opened._files]
    expected = {starts[shard] + 8192 * window for shard, window in in_use}
    assert set(registered) == expected
    assert sum(registered.values()) == windows.plan_for_rows(shards, np.unique(rows)).sum()
    offsets = [
        address - starts[row // 10]
        for row, address in zip(rows, opened.look_up(rows).addresses(), strict=True)
    ]
    assert offsets == [4096 + row % 10 * 3000 for row in rows.tolist()]
    opened.close()
    del opened
    assert not registered


def test_the_rows_of_an_npy_file_begin_behind_its_own_header(
    make_dataset: Callable[..., Index],
    add_array: Callable[..., Index],
    registered: dict[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, Driver(registered))
    values = np.random.default_rng(0).random((10, 375))  # 3,000 bytes
    index = add_array(make_dataset(rows=(10,)), "features", values, "npy")
    shards = Shards(index, "features")
    rows = np.array([2, 9, 0, 5])  # rows 2 and 5 lie in two windows: 2 from byte 6,128 to 9,128
    feed = feed_of(shards)
    wait_for_pages(feed._held)
    looked_up = feed._held.look_up(rows)
    assert looked_up.before_boundary.tolist() == [2064, 0, 0, 1256]
    assert sum(registered.values()) == 128 + 30_000
    out = torch.zeros((4, 375), dtype=torch.float64)
    copies = BatchedCopies(CUDA, 3000)
    copies.prepare(looked_up.addresses(), looked_up.before_boundary)(0, 4, out)
    np.testing.assert_array_equal(out.numpy(), values[rows])
    copied = torch.zeros(30_000, dtype=torch.uint8)
    feed._held.copy_all(copied)
    np.testing.assert_array_equal(copied.numpy().view(np.float64).reshape(10, 375), values)
    feed.close()


def test_feeds_share_registered_windows_and_the_last_one_gives_them_back(
    make_dataset: Callable[..., Index], registered: dict[int, int]
) -> None:
    path = make_dataset(rows=(10,), shape=(10, 100, 3)).path
    one = hold(Shards(Index.read(path)), np.array([0]))
    other = hold(Shards(Index.read(path)), np.array([0, 9]))
    wait_for_pages(one)
    wait_for_pages(other)
    assert len(registered) == 3
    one.close()
    assert len(registered) == 3
    other.close()
    assert not registered


class Driver(SimpleNamespace):
    """Stands in for NVIDIA's bindings; copies at once, and only within one registration."""

    def __init__(self, registered: dict[int, int], version: int = 12080) -> None:
        super().__init__(CUmemcpyAttributes=SimpleNamespace, CUdeviceptr=int, CUstream=int)
        self.CUmemcpySrcAccessOrder = SimpleNamespace(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM=1)
        self.cuDriverGetVersion = lambda: (0, version)
        self._registered = registered

    def cuMemcpyBatchAsync(self, targets: Any, sources: Any, sizes: Any, *_: Any) -> Any:  # noqa: N802
        for target, source, size in zip(targets, sources, sizes, strict=True):
            windows = [start for start in self._registered if start <= source]
            assert source + size <= max(windows) + self._registered[max(windows)]
            ctypes.memmove(target, source, size)
        return (0,)


def claim_of(shards: Shards, rows: np.ndarray, limit: float = math.inf) -> budget.Claim:
    """Claim the windows that hold some rows."""
    plan = windows.plan_for_rows(shards, np.unique(rows))
    return budget.claim_all([(shards, plan)], limit)[0]


def hold(shards: Shards, rows: np.ndarray) -> held.HeldRows:
    idle = threading.Event()
    idle.set()
    return held.HeldRows(shards, claim_of(shards, rows), CUDA, idle)


def feed_of(shards: Shards) -> PageCacheFeed:
    copies = BatchedCopies(CUDA, shards.array.row_bytes)
    claim = claim_of(shards, np.arange(len(shards)))
    return PageCacheFeed("dma", samples_of(shards), CUDA, copies, claim=claim, buffers=2)


def wait_for_pages(opened: held.HeldRows) -> None:
    opened._thread.join(30)
    assert opened.complete.is_set()


def install(monkeypatch: pytest.MonkeyPatch, driver: Any) -> None:
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cuda.bindings", driver and SimpleNamespace(driver=driver))


def test_dma_copies_rows_that_lie_in_two_windows_in_two_parts(
    make_dataset: Callable[..., Index],
    registered: dict[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, Driver(registered))
    shards = Shards(make_dataset(rows=(10, 10), shape=(10, 100, 3)))
    feed = feed_of(shards)
    wait_for_pages(feed._held)
    rows = np.array([9, 0, 11, 11, 1])
    out = torch.zeros((5, 10, 100, 3), dtype=torch.uint8)
    looked_up = feed._held.look_up(rows)
    copies = BatchedCopies(CUDA, 3000)
    copy_rows = copies.prepare(looked_up.addresses(), looked_up.before_boundary)
    copy_rows(0, 2, out[:2])
    copy_rows(2, 2, out[2:2])
    copy_rows(2, 5, out[2:])
    np.testing.assert_array_equal(out.numpy(), stored(shards)[rows])
    feed.close()


@pytest.mark.parametrize(
    ("name", "driver", "message"),
    [
        ("dma", None, "Run 'pip install cuda-bindings'"),
        ("dma", Driver({}, 12040), r"12\.8 or later, but the driver is of CUDA 12\.4"),
        ("uva", None, "Run 'pip install triton'"),
    ],
)
def test_feeds_say_which_library_they_lack(
    name: Any,
    driver: Any,
    message: str,
    open_shards: Callable[[], Shards],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, driver)
    monkeypatch.setitem(sys.modules, "memload.feeds.uva_kernel", None)
    with pytest.raises(FeedError, match=message):
        choose_feed(name, samples_of(open_shards()), CUDA, num_threads=1, prefetch_factor=2)


def test_a_file_that_was_truncated_or_replaced_before_it_is_registered(
    make_dataset: Callable[..., Index], registered: dict[int, int]
) -> None:
    shards = Shards(make_dataset(rows=(10,), shape=(10, 100, 3)))
    make_dataset("other.bin", rows=(10,), shape=(10, 100, 3), seed=9)
    path = shards.paths[0]
    os.link(path, path.with_name("old.bin"))
    path.with_name("other.bin").replace(path)
    opened = hold(shards, np.arange(10))
    wait_for_pages(opened)
    old = np.frombuffer(path.with_name("old.bin").read_bytes(), np.uint8)
    np.testing.assert_array_equal(opened._files[0].bytes, old)
    os.truncate(path.with_name("old.bin"), 20_000)
    with pytest.raises(FormatError, match=r"truncated .* 20,000 bytes instead of 34,096"):
        hold(shards, np.arange(10))
    opened.close()


# The memory that is available.


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(text)


def test_available_memory_is_the_kernels_estimate_within_the_limit_of_a_container(
    tmp_path: Path,
) -> None:
    assert available_memory(tmp_path) == 0
    write(tmp_path / "proc", meminfo="MemTotal: 2000 kB\nMemAvailable:    1000 kB\n")
    assert available_memory(tmp_path) == 1_024_000
    write(tmp_path / "proc/self", cgroup="1:name=systemd:/\n0::/outer/inner\n")
    assert available_memory(tmp_path) == 1_024_000
    stat = "anon 5\ninactive_file 100000\nactive_file 50000\n"  # page cache does not count
    outer = tmp_path / "sys/fs/cgroup/outer"
    write(outer / "inner", memory_max="max\n", memory_current="0\n", memory_stat=stat)
    write(outer, memory_max="500000\n", memory_current="250000\n", memory_stat=stat)
    assert available_memory(tmp_path) == 500_000 - (250_000 - 150_000)
