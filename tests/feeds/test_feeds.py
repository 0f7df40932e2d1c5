import errno
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from memload import FeedError, Index
from memload.feeds import pinned
from memload.feeds.choice import choose_feed
from memload.feeds.cpu import CpuFeed
from memload.feeds.gathered import claim_pages
from memload.feeds.interface import Samples, widest_word
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
    samples = samples_of(shards, row, [column])
    (claim,) = claim_pages(samples, 1 << 30)
    begin = CpuFeed(samples, CPU, keep=1, claim=claim).prepare(np.array([2, 0, 3]))
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


@pytest.mark.parametrize(
    ("name", "driver", "message"),
    [
        ("dma", None, "^feed='dma': batched copies need .* Run 'pip install cuda-bindings'"),
        (
            "dma",
            SimpleNamespace(cuDriverGetVersion=lambda: (0, 12040)),
            r"12\.8 or later, but the driver is of CUDA 12\.4",
        ),
        ("uva", None, "^feed='uva': the kernel needs Triton, .* Run 'pip install triton'"),
        (
            "disk",
            None,
            r"^feed='disk': the kernel needs Triton, .*\. Or: batched copies need NVIDIA",
        ),
    ],
)
def test_feeds_say_which_library_they_lack(
    name: Any,
    driver: Any,
    message: str,
    open_shards: Callable[[], Shards],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cuda.bindings", driver and SimpleNamespace(driver=driver))
    monkeypatch.setitem(sys.modules, "memload.feeds.uva_kernel", None)
    with pytest.raises(FeedError, match=message):
        choose_feed(name, samples_of(open_shards()), CUDA, num_threads=1, prefetch_factor=2)


# The memory that is available.


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(text)


def test_available_memory_is_the_kernels_estimate_within_the_limit_of_a_container(
    tmp_path: Path,
) -> None:
    assert available_memory(tmp_path) is None
    write(tmp_path / "proc", meminfo="MemTotal: 2000 kB\nMemAvailable:    1000 kB\n")
    assert available_memory(tmp_path) == 1_024_000
    write(tmp_path / "proc/self", cgroup="1:name=systemd:/\n0::/outer/inner\n")
    assert available_memory(tmp_path) == 1_024_000
    stat = "anon 5\ninactive_file 100000\nactive_file 50000\n"  # page cache does not count
    outer = tmp_path / "sys/fs/cgroup/outer"
    write(outer / "inner", memory_max="max\n", memory_current="0\n", memory_stat=stat)
    write(outer, memory_max="500000\n", memory_current="250000\n", memory_stat=stat)
    assert available_memory(tmp_path) == 500_000 - (250_000 - 150_000)
    write(outer, memory_current="900000\n")
    assert available_memory(tmp_path) == 0


def test_available_memory_counts_limits_of_version_1_on_a_system_with_both(tmp_path: Path) -> None:
    write(tmp_path / "proc", meminfo="MemAvailable:    1000 kB\n")
    write(tmp_path / "proc/self", cgroup="9:cpu,memory:/outer/a:b\n1:name=systemd:/x\n0::/outer\n")
    mount = tmp_path / "sys/fs/cgroup/memory"
    unlimited = f"{(1 << 63) - 4096}\n"
    stat = "active_file 7\ntotal_inactive_file 100000\ntotal_active_file 50000\n"
    used = {"memory_usage_in_bytes": "250000\n", "memory_stat": stat}
    write(mount, memory_limit_in_bytes=unlimited, **used)
    write(mount / "outer", memory_limit_in_bytes="500000\n", **used)
    write(mount / "outer/a:b", memory_limit_in_bytes=unlimited, **used)
    assert available_memory(tmp_path) == 500_000 - (250_000 - 150_000)
    write(mount / "outer/a:b", memory_limit_in_bytes="300000\n")
    assert available_memory(tmp_path) == 300_000 - (250_000 - 150_000)
    unified = tmp_path / "sys/fs/cgroup/outer"
    write(unified, memory_max="260000\n", memory_current="200000\n", memory_stat="anon 1\n")
    assert available_memory(tmp_path) == 60_000


def test_available_memory_of_a_container_whose_group_is_the_mount(tmp_path: Path) -> None:
    write(tmp_path / "proc", meminfo="MemAvailable:    1000 kB\n")
    write(tmp_path / "proc/self", cgroup="4:memory:/docker/0123\n0::/docker/0123\n")
    mount = tmp_path / "sys/fs/cgroup/memory"
    stat = "total_inactive_file 100\n"
    write(mount, memory_limit_in_bytes="5000", memory_usage_in_bytes="300", memory_stat=stat)
    assert available_memory(tmp_path) == 5_000 - (300 - 100)


@pytest.mark.parametrize("name", ["meminfo", "memory.max"])
def test_too_many_open_files_are_not_taken_for_unlimited_memory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "proc", meminfo="MemAvailable:    1000 kB\n")
    write(tmp_path / "proc/self", cgroup="0::/\n")
    read_text = Path.read_text

    def refuse(path: Path) -> str:
        if path.name == name:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return read_text(path)

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        available_memory(tmp_path)
