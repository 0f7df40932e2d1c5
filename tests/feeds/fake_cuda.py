"""CUDA without a device, arrays whose rows are fetched, and reads that fail."""

import ctypes
import fcntl
import gc
import itertools
import math
import mmap
import os
import re
import sys
import threading
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import memload.reading.loader  # noqa: F401  # before names of torch are replaced
from memload import Index
from memload.feeds import choice, held, pages
from memload.feeds.choice import choose_feed
from memload.feeds.feed import SampleArray
from memload.storage.shards import Shards

PAGE = mmap.PAGESIZE
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
DRIVERS = (None, "one by one", "batch", "batch v2")


class FakeCuda:
    """Stands in for CUDA: memory of the device ``cuda:0`` is ordinary memory. A context.

    Copies happen at once, or by `finish` if ``is_slow`` is set. They fail if a byte lies neither in
    registered pages nor in page-locked memory, or if a copy spans two registrations. Page-locked
    memory is overwritten when it is freed. At the end, nothing may be left.
    """

    def __init__(self, driver="batch v2", window_bytes=2 * PAGE):
        self.window_bytes = window_bytes
        #: Registered pages and page-locked memory: address and size.
        self.pages, self.locked = {}, {}
        #: Bytes that are free on the device and available in RAM, and that a tensor may have there.
        self.free, self.ram, self.device_bytes = 0, 1 << 40, math.inf
        self.available_memory = lambda: self.ram  # tests replace it
        #: Whether CUDA registers so many bytes more.
        self.may_register = lambda size: True
        #: Bytes that were copied out of registered pages, and out of page-locked memory.
        self.from_pages = self.from_locked = 0
        self.is_slow, self.status, self.faults = False, 0, []
        #: Set by a failed call, until a kernel reports it.
        self.has_error = False
        self._queue, self._finished, self._feeds = [], 0, weakref.WeakSet()
        self._is_over, self._copying = False, threading.RLock()
        functions = {
            "cuMemcpyHtoDAsync_v2": self._copy_one,
            "cuMemcpyBatchAsync": self._copy_all_and_say_what_failed,
            "cuMemcpyBatchAsync_v2": self._copy_all,
        }
        #: What the driver can do: an older one lacks the last of these functions.
        self._functions = dict([*functions.items()][: DRIVERS.index(driver)])

    def __enter__(self):
        if sys.platform != "linux":
            pytest.skip("reads /proc, and past the page cache")
        self._patches = pytest.MonkeyPatch()
        patch, load, to = self._patches.setattr, ctypes.CDLL, torch.Tensor.to

        def load_library(name, *arguments, **options):
            if name != "libcuda.so.1":
                return load(name, *arguments, **options)
            if not self._functions:
                raise OSError("libcuda.so.1: cannot open shared object file")
            return SimpleNamespace(**self._functions)

        def move(tensor, *arguments, **options):
            if arguments and getattr(arguments[0], "type", "") == "cuda":
                return tensor.clone()
            return to(tensor, *arguments, **options)

        patch(ctypes, "CDLL", load_library)
        patch(torch.Tensor, "to", move)
        for name in ("empty", "empty_like", "zeros"):
            patch(torch, name, self._allocating(getattr(torch, name)))
        for module in (choice, held, pages):
            patch(module, "WINDOW_BYTES", self.window_bytes)
        patch(held, "_START_SECONDS", 0)
        patch(held, "available_memory", lambda: self.available_memory())  # noqa: PLW0108
        # What a test that fails leaves behind, in its traceback, shall not disturb others.
        unregister = held._unregister
        patch(held, "_files", weakref.WeakValueDictionary())
        patch(held, "_unregister", lambda *arguments: self._is_over or unregister(*arguments))
        self.stream = Stream(self)
        runtime = SimpleNamespace(
            cudaHostRegister=self._register,
            cudaHostUnregister=self._unregister,
            cudaGetErrorString=lambda status: f"status {status}",
        )
        for name, value in {
            "is_available": lambda: True,
            "current_device": lambda: 0,
            "cudart": lambda: runtime,
            "mem_get_info": lambda device: (self.free, self.free),
            "memory_reserved": lambda device: 0,
            "memory_allocated": lambda device: 0,
            "device": lambda device: nullcontext(),
            "stream": lambda stream: nullcontext(),
            "synchronize": lambda device: self.finish(),
            "current_stream": lambda device=None: self.stream,
            "Stream": lambda *_, **options: self.stream,
            "Event": lambda **_: Event(self),
        }.items():
            patch(torch.cuda, name, value)
        return self

    def __exit__(self, error, *_):
        self.end(has_failed=error is not None)

    def end(self, has_failed):
        """Bring CUDA back. Unless a test has failed, check that nothing is left."""
        if has_failed:
            self._queue.clear()
        for feed in [*self._feeds]:
            feed.close()
        if self.pages or self.locked or len(held._files):
            gc.collect()  # the tracebacks of errors that were expected; takes 0.2 s
        self._is_over = has_failed
        self._patches.undo()
        if not has_failed:
            assert not self.pages
            assert not self.locked
            assert not self.faults
            assert not self.has_error, "no kernel has reported the error of a call that failed"

    def _allocating(self, function):
        def allocate(*arguments, device=None, pin_memory=False, **options):
            if pin_memory:
                return self._lock(function(*arguments, **options))
            if getattr(device, "type", device) == "cuda":
                if self.has_error:  # as a kernel does
                    self.has_error = False
                    raise RuntimeError("CUDA error: invalid argument")
                device = CPU
            memory = function(*arguments, device=device, **options)
            if memory.nbytes > self.device_bytes:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return memory

        return allocate

    def _lock(self, like):
        """Return page-locked memory of the shape and dtype of a tensor."""
        memory = np.full(max(1, like.nbytes), 0xA5, np.uint8)
        view = memory[:]
        self.locked[memory.ctypes.data] = memory.size
        # As in BufferPool: no tensor reaches the memory once the view dies.
        weakref.finalize(view, self._unlock, memory).atexit = False
        return torch.from_numpy(view)[: like.nbytes].view(like.dtype).view(like.shape)

    def _unlock(self, memory):
        del self.locked[memory.ctypes.data]
        memory[:] = 0x5A

    def _register(self, address, size, flags):
        pages, is_portable_and_read_only = self.pages.copy().items(), flags == 1 | 8
        overlaps = any(start < address + size and address < start + n for start, n in pages)
        is_wrong = address % PAGE or overlaps or not is_portable_and_read_only
        if is_wrong or not self.may_register(size):
            self.has_error = True
            return 712
        self.pages[address] = size
        return 0

    def _unregister(self, address):
        if self.pages.pop(address, None) is None:
            self.faults.append("what is not registered was unregistered")

    def _copy_one(self, target, source, size, stream):
        assert stream.value == Stream.cuda_stream
        return self._copy([target.value], [source.value], [size.value])

    def _copy_all(self, targets, sources, sizes, count, attributes, first, number, stream):
        assert stream.value == Stream.cuda_stream
        assert [*attributes._obj] == [1, 0, 0, 0, 0, 0]  # in the order of the stream
        assert (first._obj.value, number.value) == (0, 1)
        arrays = (targets, sources, sizes)
        lists = [list((ctypes.c_int64 * count.value).from_address(a.value)) for a in arrays]
        return self._copy(*lists)

    def _copy_all_and_say_what_failed(self, *arguments):
        *arguments, failed, stream = arguments
        assert isinstance(failed._obj, ctypes.c_size_t)
        return self._copy_all(*arguments, stream)

    def _copy(self, *lists):
        if self.status:
            return self.status
        with self._copying:
            self._queue += zip(*lists, strict=True)
            if not self.is_slow:
                self.finish()
        return 0

    def finish(self):
        """Copy what was asked for."""
        with self._copying:
            queue, self._queue = self._queue, []
            self._finished += len(queue)
            for target, source, size in queue:
                is_in_pages = _has(self.pages, source, size)
                if not is_in_pages and not _has(self.locked, source, size):
                    self.faults.append(f"{size} bytes were copied out of unreadable memory")
                    continue
                self.from_pages += size * is_in_pages
                self.from_locked += size * (not is_in_pages)
                ctypes.memmove(target, source, size)

    @property
    def registered_bytes(self):
        """How many bytes of files are registered."""
        return sum(self.pages.copy().values())

    def registered_bytes_of(self, path):
        """Return how many bytes from a file's beginning on are registered without a gap."""
        maps = Path("/proc/self/maps").read_text()
        start = re.search(rf"^([0-9a-f]+)-\S+ r--s .* {re.escape(str(path))}$", maps, re.MULTILINE)
        if start is None:
            return 0
        first = address = int(start[1], 16)
        while address in self.pages:
            address += self.pages[address]
        return address - first

    def feed(self, arrays, cache_bytes=None, *, name="dma"):
        """Return the feed with a name. It is closed at the end, at the latest."""
        arrays = [arrays] if isinstance(arrays, SampleArray) else arrays
        device = CPU if name == "cpu" else CUDA
        feed, _ = choose_feed(name, arrays, device, cache_bytes=cache_bytes)
        self._feeds.add(feed)
        return feed

    def wait(self):
        """Wait until no thread brings in rows any more."""
        for thread in threading.enumerate():
            if thread.name == "memload-fill":
                thread.join(30)
                assert not thread.is_alive()


class Stream:
    """A CUDA stream. There is only one."""

    cuda_stream = 77

    def __init__(self, cuda):
        self._cuda = cuda

    def synchronize(self):
        self._cuda.finish()

    def wait_event(self, event):
        pass

    def wait_stream(self, stream):
        pass


class Event:
    """A CUDA event: it has happened once the copies before it are over."""

    def __init__(self, cuda):
        self._cuda, self._copies = cuda, 0

    def record(self, stream=None):
        self._copies = self._cuda._finished + len(self._cuda._queue)

    def query(self):
        return self._cuda._finished >= self._copies

    def synchronize(self):
        if not self.query():
            self._cuda.finish()


def _has(memory, address, size):
    """Return whether a part of memory lies in one of several, by address and size."""
    parts = memory.copy().items()  # other threads change it
    return any(start <= address and address + size <= start + n for start, n in parts)


def open_array(index, name="image", row=None):
    """Open the rows of an array, by default all of them."""
    shards = Shards(Index.read(index.path), name)
    return SampleArray(shards, np.arange(len(shards)) if row is None else np.array(row, np.int64))


def fetch(feed, samples):
    """Fetch a batch of some samples."""
    samples = np.array(samples, np.int64)
    return feed.prepare(samples)(0, len(samples)).fetch()


class Reads:
    """What is read from files by `os.preadv`, past the page cache or through it. A context.

    ``direct`` says what becomes of reads past the page cache: "allowed" or "refused" as by tmpfs of
    old kernels; "failing" or "short" when rows are read.
    """

    def __init__(self, direct="allowed"):
        self.how, self.direct, self.through_cache = direct, [], []
        self._lengths = itertools.cycle([PAGE, 0, 3, PAGE + 1])

    def __enter__(self):
        self._patches = pytest.MonkeyPatch()
        self._open, self._preadv = os.open, os.preadv
        self._patches.setattr(os, "open", self.open)
        self._patches.setattr(os, "preadv", self.preadv)
        return self

    def __exit__(self, *_):
        self._patches.undo()

    def open(self, path, flags, *arguments, **options):
        if flags & os.O_DIRECT and self.how == "refused":
            raise OSError(22, "Invalid argument")
        return self._open(path, flags, *arguments, **options)

    def preadv(self, descriptor, buffers, offset):
        (buffer,) = buffers
        size, read = len(memoryview(buffer)), self._preadv
        if not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            self.through_cache.append((offset, size))
            return read(descriptor, buffers, offset)
        if isinstance(buffer, mmap.mmap):  # the trial when a file is opened
            return read(descriptor, buffers, offset)
        address = np.frombuffer(buffer, np.uint8).ctypes.data
        assert not any(number % PAGE for number in (address, offset, size))
        if self.how == "failing":
            raise OSError(5, "Input/output error")
        self.direct.append((offset, size))
        count = read(descriptor, buffers, offset)
        if self.how == "short":
            count = min(count, next(self._lengths))
            memoryview(buffer)[count:] = bytes(size - count)
        return count
