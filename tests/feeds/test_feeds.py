import ctypes
import math
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from memload import FeedError, FormatError, Index
from memload.feeds import budget, choice, held, pinned, windows
from memload.feeds import registered as registered_files
from memload.feeds.choice import FEEDS, choose_feed, pinned_callers
from memload.feeds.cpu import CpuFeed
from memload.feeds.dma import BatchedCopies
from memload.feeds.interface import Samples, widest_word
from memload.feeds.joined import feed_of_all
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


@pytest.mark.parametrize("name", FEEDS)
def test_every_feed_serves_the_cpu_or_says_why_not(
    name: Any, open_shards: Callable[[], Shards]
) -> None:
    samples = samples_of(open_shards())
    if name in ("auto", "cpu"):
        feed, chosen = choose_feed(name, samples, CPU, num_threads=1, prefetch_factor=2)
        assert feed.name == chosen.name == "cpu"
        np.testing.assert_array_equal(
            feed.prepare(np.arange(12))(0, 12)()[0].numpy(), stored(samples.shards)
        )
        feed.close()
    else:
        with pytest.raises(FeedError, match=f"feed='{name}' needs a CUDA device, .* is cpu"):
            choose_feed(name, samples, CPU, num_threads=1, prefetch_factor=2)
    with pytest.raises(FeedError, match=r"feed='cpu' needs device='cpu', .* is cuda:0"):
        choose_feed("cpu", samples, CUDA, num_threads=1, prefetch_factor=2)


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


# Which windows are registered, and which feed is chosen. CUDA is replaced by functions that record.


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


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, str]]:
    """A function that chooses a feed as on a CUDA device, with so much free memory and RAM."""

    def choose(
        samples: Samples, free: int, memory: int, refused: tuple[str, ...] = ()
    ) -> tuple[str, str]:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
        monkeypatch.setattr(choice, "available_memory", lambda: memory)

        def create(names: Sequence[str]) -> Any:
            for name in names:
                if name in refused:
                    raise FeedError(f"{name} does not work here")
            return SimpleNamespace(name=names[0])

        feed, chosen = choice.first_that_serves(create, samples, CUDA)
        assert feed.name == chosen.name
        return chosen.name, chosen.reason

    return choose


def test_the_choice_is_the_fastest_feed_that_has_enough_memory(
    choose: Callable[..., tuple[str, str]], make_dataset: Callable[..., Index]
) -> None:
    large = samples_of(Shards(make_dataset("large.bin", rows=(8,), shape=(28, 1024, 1))))
    small = samples_of(Shards(make_dataset("small.bin", rows=(8,), shape=(28, 1023, 1))))
    labelled = samples_of(large.shards, columns=[np.zeros(8, np.int8)])
    pixels, ram = 8 * (28 << 10), 2 * (4096 + 8 * (28 << 10))
    assert choose(large, 4 * pixels, 0) == (
        "resident",
        "229 kB fits in 25% of the 918 kB free on cuda:0",
    )
    assert choose(labelled, 4 * pixels, 0)[0] == "disk"
    name, reason = choose(large, 100_000, ram)
    assert name == "dma"
    assert "resident: 229 kB does not fit in 25%" in reason
    assert choose(large, 100_000, ram, refused=("dma",))[0] == "uva"
    assert choose(small, 100_000, ram)[0] == "uva"
    assert choose(small, 100_000, ram, refused=("uva",))[0] == "dma"
    name, reason = choose(large, 100_000, ram - 1)
    assert name == "disk"
    assert reason.count("does not fit") == 3
    name, reason = choose(large, 100_000, ram - 1, refused=("disk",))
    assert name == "pinned"
    assert reason.count("does not fit") == 3
    name, reason = choose(large, 10, 10**9, refused=("dma", "uva", "disk"))
    assert name == "pinned"
    assert "dma: dma does not work here" in reason


def test_the_choice_counts_only_what_a_subset_uses(
    choose: Callable[..., tuple[str, str]],
    make_dataset: Callable[..., Index],
    registered: dict[int, int],
) -> None:
    shards = Shards(make_dataset(rows=(50, 50), shape=(10, 100, 3)))
    whole, part = samples_of(shards), samples_of(shards, [60, 61, 61, 60] * 50)
    assert choose(whole, 4 * 300_000 - 1, 0)[0] == "disk"
    assert choose(part, 4 * 6000, 0)[0] == "resident"
    assert choose(part, 0, 2 * 8192)[0] == "uva"  # rows 60 and 61 lie in one window of 8 KiB
    assert choose(part, 0, 2 * 8192 - 1)[0] == "disk"


def large_and_small(make_dataset: Callable[..., Index], add_array: Callable[..., Index]) -> Samples:
    """Images of 28 KiB, masks of 28 KiB in another order, and features of 16 bytes."""
    index = make_dataset(rows=(8,), shape=(28, 1024, 1))
    rng = np.random.default_rng(0)
    index = add_array(index, "mask", rng.integers(0, 99, (8, 28, 1024), np.uint8), "mask")
    index = add_array(
        index, "features", rng.random((5, 2)), "npy", other_rows={"features": np.arange(8) % 5}
    )
    row = np.arange(8)
    others = [
        Samples(Shards(index, "mask"), row[::-1], ()),
        Samples(Shards(index, "features"), np.array([4, 1] * 4), ()),
    ]
    return Samples(Shards(index), row, [np.zeros(8, np.int64)], others)


def test_the_choice_counts_all_arrays_that_are_used(
    choose: Callable[..., tuple[str, str]],
    make_dataset: Callable[..., Index],
    add_array: Callable[..., Index],
) -> None:
    samples = large_and_small(make_dataset, add_array)
    size = 2 * 8 * (28 << 10) + 2 * 16 + 8 * 8  # both rows of the features in use, and the labels
    assert choose(samples, 4 * size, 0)[0] == "resident"
    assert choose(samples, 4 * size - 4, 0)[0] == "disk"
    ram = 2 * (2 * (4096 + 8 * (28 << 10)) + 128 + 5 * 16)
    name, reason = choose(samples, 0, ram)
    assert name == "dma"
    assert reason.startswith("467 kB fits in 50% of ")
    assert "of available RAM; uva for features; resident: " in reason
    name, reason = choose(samples, 0, ram - 2)
    assert name == "disk"
    assert reason.count("does not fit") == 4
    name, reason = choose(samples, 0, ram, refused=("uva",))
    assert (name, reason.startswith("467 kB fits")) == ("dma", True)
    assert "; dma with uva for features: uva does not work here" in reason
    name, reason = choose(samples, 0, ram, refused=("dma",))
    assert name == "uva"
    assert "of available RAM; resident: " in reason


def test_a_feed_that_cannot_serve_an_array_closes_those_of_the_others() -> None:
    closed = []

    def create(name: str, samples: Any) -> Any:
        if samples == "mask":
            raise FeedError("no")
        return SimpleNamespace(name=name, close=lambda: closed.append(samples))

    with pytest.raises(FeedError, match="no"):
        feed_of_all(["dma", "dma"], SimpleNamespace(arrays=("image", "mask")), create)  # type: ignore[arg-type]
    assert closed == ["image"]


def test_all_arrays_come_through_one_feed(
    make_dataset: Callable[..., Index], add_array: Callable[..., Index]
) -> None:
    samples = large_and_small(make_dataset, add_array)
    feed, chosen = choose_feed("auto", samples, CPU, num_threads=1, prefetch_factor=2)
    assert chosen == ("cpu", "the device is cpu", None)
    numbers = np.array([3, 3, 0, 7])
    batch = feed.prepare(numbers)(1, 4)()
    assert batch.pop().dtype == torch.int64  # the labels are behind all arrays
    for array, found in zip(samples.arrays, batch, strict=True):
        expected = array.shards.maps[0][array.row[numbers[1:]]]
        np.testing.assert_array_equal(found.numpy(), expected)
    feed.close()


def test_pinned_fetches_on_the_consumers_thread_if_there_are_no_others() -> None:
    assert pinned_callers(0, 2) == 0
    assert [pinned_callers(number, 2) for number in (1, 6, 12)] == [1, 6, 6]


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
