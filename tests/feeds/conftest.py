"""Samples in several arrays, and CUDA without a device."""

import ctypes
import gc
import math
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from memload import FeedError, Index
from memload.feeds import device_rows, page_locked, registered, windows
from memload.feeds.budget import claim_all, hold_on_device
from memload.feeds.dma import BatchedCopies
from memload.feeds.interface import Samples
from memload.feeds.page_cache import PageCacheFeed
from memload.feeds.windows import plan_for_rows
from memload.storage.shards import Shards
from tests.feeds.page_cache import PAGE, drop_pages, look_for_pages


@pytest.fixture
def large_and_small(
    make_dataset: Callable[..., Index], add_array: Callable[..., Index]
) -> Callable[[], Samples]:
    """Images of 28 KiB, masks of 28 KiB in another order, and features of 16 bytes."""

    def open_samples() -> Samples:  # a fixture would keep them open for too long
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

    return open_samples


class Stream:
    """A CUDA stream that has nothing to do."""

    cuda_stream = 0

    def synchronize(self) -> None:
        pass

    def wait_stream(self, stream: "Stream") -> None:
        pass


class FakeCuda:
    """Stands in for CUDA: the device is the CPU, and windows have 8 KiB.

    Copies happen at once. They fail if a row is not in memory that the device may read.
    """

    device = torch.device("cpu")

    def __init__(self) -> None:
        #: The registered pages of files, and the page-locked memory: address and size.
        self.pages: dict[int, int] = {}
        self.page_locked: dict[int, int] = {}
        #: How many bytes of files may be registered.
        self.limit = math.inf
        #: How many copies came from pages, from page-locked memory, and from the device's own.
        self.copied_from_pages = self.copied_from_page_locked = self.copied_on_device = 0
        #: The tensors of rows on the device, and how many bytes it has for them.
        self.on_device: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        self.device_bytes = math.inf
        #: What stands in for NVIDIA's bindings.
        self.driver = SimpleNamespace(
            CUmemcpyAttributes=SimpleNamespace,
            CUdeviceptr=int,
            CUstream=int,
            CUmemcpySrcAccessOrder=SimpleNamespace(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM=1),
            cuDriverGetVersion=lambda: (0, 12080),
            cuMemcpyBatchAsync=self._copy,
        )

    def register(self, address: int, size: int, flags: int) -> None:
        if not flags:
            self.page_locked[address] = size
        elif sum(self.pages.values()) + size > self.limit:
            raise FeedError("CUDA refuses")
        else:
            self.pages[address] = size

    def unregister(self, address: int) -> None:
        (self.pages if address in self.pages else self.page_locked).pop(address)

    def allocate(self, size: int, device: torch.device) -> torch.Tensor:
        if size > self.device_bytes:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        memory = torch.empty(size, dtype=torch.uint8)
        self.on_device.add(memory)
        return memory

    def _copy(self, targets: Any, sources: Any, sizes: Any, *_: Any) -> tuple[int]:
        on_device = {memory.data_ptr(): len(memory) for memory in self.on_device}
        for target, source, size in zip(targets, sources, sizes, strict=True):
            self.copied_from_pages += _holds(self.pages, source, size)
            self.copied_from_page_locked += _holds(self.page_locked, source, size)
            self.copied_on_device += _holds(on_device, source, size)
            assert _holds(self.pages | self.page_locked | on_device, source, size)
            ctypes.memmove(target, source, size)
        return (0,)

    def feed(
        self,
        shards: Shards,
        name: str = "disk",
        *,
        limit: float = math.inf,
        resident: int = 0,
        rows: Any = None,
    ) -> PageCacheFeed:
        """Return a feed of some rows of an array, by default of all, with limits of memory."""
        row = np.arange(len(shards)) if rows is None else np.array(rows, np.int64)
        (claim,) = claim_all([(shards, plan_for_rows(shards, np.unique(row)))], limit)
        hold_on_device([claim], resident, self.device)
        copies = BatchedCopies(self.device, shards.array.row_bytes)
        samples = Samples(shards, row, ())
        return PageCacheFeed(
            name,
            samples,
            self.device,
            copies,
            claim=claim,
            buffers=2,
            may_hold_nothing=name == "disk",
        )

    def fetch(self, feed: PageCacheFeed, samples: Any) -> np.ndarray:
        """Return the pixels of a batch."""
        (pixels,) = feed.prepare(np.array(samples))(0, len(samples))()
        return pixels.numpy()

    def wait(self, feed: PageCacheFeed) -> None:
        """Wait until no more rows will be held."""
        feed._held._thread.join(30)
        assert feed._held.is_complete()


def _holds(memory: dict[int, int], address: int, size: int) -> bool:
    """Return whether a part of memory lies in one of several, by address and size."""
    return any(start <= address <= start + held - size for start, held in memory.items())


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """CUDA without a device. Fails a test that leaves memory behind."""
    fake = FakeCuda()
    for module in (page_locked, registered):
        monkeypatch.setattr(module, "register", fake.register)
        monkeypatch.setattr(module, "unregister", fake.unregister)
    monkeypatch.setattr(device_rows, "_allocate", fake.allocate)
    monkeypatch.setattr(windows, "WINDOW_BYTES", 2 * 4096)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=fake.driver))
    yield fake
    if fake.pages or fake.page_locked or fake.on_device:
        gc.collect()  # takes 0.2 s
    assert not [*fake.pages, *fake.page_locked, *fake.on_device]


class _Event:
    """A CUDA event that has happened."""

    def __init__(self, **_: Any) -> None:
        pass

    def record(self, stream: Stream) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, int]]:
    """Page-locked memory, address and size, without CUDA."""
    memory: dict[int, int] = {}

    def register(address: int, size: int, flags: int) -> None:
        memory[address] = size

    monkeypatch.setattr(page_locked, "register", register)
    monkeypatch.setattr(page_locked, "unregister", memory.pop)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    yield memory
    gc.collect()  # the tracebacks of errors that were expected
    assert not memory


@pytest.fixture
def open_shards(make_dataset: Callable[..., Index]) -> Callable[[], Shards]:
    """A function that opens twenty rows of 3,000 bytes in each of two shards of 8 windows."""
    path = make_dataset(rows=(20, 20), shape=(10, 100, 3)).path
    return lambda: Shards(Index.read(path))


@pytest.fixture
def cached_pages(tmp_path: Path) -> Callable[[Path], list[bool]]:
    """Returns which pages of a file are in the page cache. Skips where there is no telling."""
    probe = tmp_path / "probe"
    probe.write_bytes(bytes(4 * PAGE))
    drop_pages(probe)
    if any(look_for_pages(probe)):
        pytest.skip("the file system does not drop pages")
    return look_for_pages
