from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memload import FeedError, Index
from memload.feeds import choice, gathering, pages
from memload.feeds.choice import FEEDS, choose_feed
from memload.feeds.cpu import CpuFeed
from memload.feeds.interface import Samples
from memload.machine import available_memory
from memload.storage.mapping import identity
from memload.storage.shards import Shards

CPU = torch.device("cpu")


@pytest.fixture(params=[(12,), (5, 4, 3)], ids=["one shard", "three shards"])
def opened(
    request: pytest.FixtureRequest, make_dataset: Callable[..., Index]
) -> Callable[[], Shards]:
    index = make_dataset(
        rows=request.param
    ).path  # not the shards: a fixture would hold them too long
    return lambda: Shards(Index.read(index))


def samples_of(shards: Shards, row: Any = None, columns: Any = ()) -> Samples:
    return Samples(shards, np.arange(len(shards)) if row is None else np.array(row), columns)


def stored(shards: Shards) -> np.ndarray:
    return np.concatenate(shards.maps)


def test_pages_are_asked_for_only_after_some_had_to_be_read(
    opened: Callable[[], Shards], monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = opened()
    asked: list[list[int]] = []
    faults = [0]
    waited: list[list[int]] = []
    secure = shards.secure

    def wait(rows: np.ndarray, *, again: bool = False) -> None:
        if again:
            waited.append(rows.tolist())
        secure(rows, again=again)

    monkeypatch.setattr(shards, "ask_for", lambda rows: asked.append(rows.tolist()))
    monkeypatch.setattr(shards, "secure", wait)
    monkeypatch.setattr(gathering, "_major_faults", lambda: faults[0])
    monkeypatch.setattr(gathering, "_STAY_COLD", 2)
    feed = CpuFeed(samples_of(shards), CPU, keep=1)
    feed.prepare(np.array([0, 1]))(0, 2)
    assert asked == []
    monkeypatch.setattr(gathering, "_FIRST", 2)
    gather = shards.gather

    def cold(rows: np.ndarray, out: np.ndarray) -> np.ndarray:
        faults[0] += bool(len(rows))
        return gather(rows, out)

    monkeypatch.setattr(shards, "gather", cold)
    feed.prepare(np.array([2, 9, 8, 7]))(0, 4)
    assert asked == [[8, 7]]  # not those that tell
    monkeypatch.setattr(shards, "gather", gather)
    for row in range(3, 8):
        feed.prepare(np.array([row]))(0, 1)
    assert asked == [[8, 7], [3], [4]]
    assert (
        waited == asked
    )  # and then for all of them to be there, so that none is touched that cannot be read


def test_exactly_the_pages_of_the_rows_are_asked_for(
    opened: Callable[[], Shards], monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = opened()
    from memload.storage import shards as module

    asked: list[tuple[int, int, int]] = []

    def spy(mapped: np.ndarray, start: int, size: int) -> None:
        shard = next(number for number, own in enumerate(shards.maps) if own is mapped)
        asked.append((shard, start, size))

    monkeypatch.setattr(module, "will_need", spy)
    rows = [11, 0, 6]
    shards.ask_for(np.array(rows))
    expected = []
    for row in rows:
        shard, inside = shards.locate(row)
        expected.append((shard, 4096 + inside * 72, 72))
    assert asked == expected


def test_asking_for_pages_of_a_real_file_changes_nothing(opened: Callable[[], Shards]) -> None:
    shards = opened()
    before = stored(shards)
    shards.ask_for(np.arange(12))
    np.testing.assert_array_equal(stored(shards), before)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="Linux tells")
def test_major_faults_are_counted_by_the_thread() -> None:
    assert gathering._major_faults() >= 0


@pytest.mark.parametrize("name", FEEDS)
def test_every_feed_serves_the_cpu_or_says_that_it_cannot(
    name: Any, opened: Callable[[], Shards]
) -> None:
    samples = samples_of(opened())
    if name in ("auto", "cpu"):
        feed, chosen = choose_feed(name, samples, CPU, num_threads=1, prefetch_factor=2)
        assert feed.name == chosen.name == "cpu"
        np.testing.assert_array_equal(
            feed.prepare(np.arange(12))(0, 12)[0].numpy(), stored(samples.shards)
        )
    else:
        with pytest.raises(FeedError, match=f"feed '{name}': expected a CUDA device, found cpu"):
            choose_feed(name, samples, CPU, num_threads=1, prefetch_factor=2)


class Chosen:
    """A feed that is made or refused, and nothing else."""

    def __init__(self, name: str) -> None:
        self.name = name


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, str]]:
    """A function that chooses for rows of some size, as if on a CUDA device with so much free memory."""

    def choose(
        row_bytes: int, rows: int, free: int, ram: int, refused: tuple[str, ...] = ()
    ) -> tuple[str, str]:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
        monkeypatch.setattr(choice, "available_memory", lambda: ram)

        def make(which: str) -> Any:
            if which in refused:
                raise FeedError(f"feed '{which}': expected something else")
            return Chosen(which)

        class Rows:
            class array:  # noqa: N801  # an attribute of Shards
                pass

            def __len__(self) -> int:
                return rows

        Rows.array.row_bytes = row_bytes  # type: ignore[attr-defined]
        feed, found = choice.first_that_serves(
            make, Samples(Rows(), np.arange(0), []), torch.device("cuda", 0)
        )  # type: ignore[arg-type]
        assert feed.name == found.name
        return found

    return choose


def test_what_fits_in_a_quarter_of_the_device_is_resident(
    on_device: Callable[..., tuple[str, str]],
) -> None:
    assert on_device(1000, 25, 100_000, 0) == (
        "resident",
        "2.5e-05 GB fit in 25% of 0.0001 GB free on cuda:0",
    )


def test_what_fits_in_half_of_the_ram_comes_from_the_page_cache(
    on_device: Callable[..., tuple[str, str]],
) -> None:
    name, reason = on_device(28 << 10, 26, 100_000, 2 * 26 * (28 << 10))
    assert name == "dma"
    assert "resident: 0.000745 GB do not fit in 25%" in reason
    assert on_device((28 << 10) - 1, 26, 100_000, 2 * 26 * (28 << 10))[0] == "uva"
    assert on_device(28 << 10, 26, 100_000, 2 * 26 * (28 << 10), refused=("dma",))[0] == "uva"
    assert on_device(100, 9000, 100_000, 2_000_000, refused=("uva",))[0] == "dma"


def test_all_else_is_staged_and_the_reason_says_why(
    on_device: Callable[..., tuple[str, str]],
) -> None:
    name, reason = on_device(28 << 10, 26, 100_000, 26 * (28 << 10))
    assert name == "pinned"
    assert reason.count("do not fit") == 3
    name, reason = on_device(28 << 10, 26, 10, 10**9, refused=("dma", "uva"))
    assert name == "pinned"
    assert "dma: feed 'dma': expected something else" in reason


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


MEMINFO = "MemTotal: 2000 kB\nMemAvailable:    1000 kB\n"


def test_available_memory_is_what_the_kernel_estimates(tmp_path: Path) -> None:
    assert available_memory(tmp_path) == 0
    write(tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup="0::/a\n")
    assert available_memory(tmp_path) == 1_024_000


def test_a_containers_limit_counts_without_its_page_cache(tmp_path: Path) -> None:
    write(tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup="0::/outer/inner\n")
    group = "sys__fs__cgroup__outer__"
    stat = "anon 5\ninactive_file 100000\nactive_file 50000\n"
    write(
        tmp_path,
        **{f"{group}inner__memory_dot_max": "max\n", f"{group}inner__memory_dot_current": "0\n"},
    )
    write(tmp_path, **{f"{group}memory_dot_max": "500000", f"{group}memory_dot_current": "250000"})
    write(tmp_path, **{f"{group}memory_dot_stat": stat, f"{group}inner__memory_dot_stat": stat})
    assert available_memory(tmp_path) == 500_000 - (250_000 - 150_000)


def test_a_limit_of_version_1_counts_too(tmp_path: Path) -> None:
    write(tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup="3:cpu,memory:/x\n1:name=systemd:/\n")
    group = "sys__fs__cgroup__memory__"  # as seen from within, where its own path does not exist
    write(
        tmp_path,
        **{
            f"{group}memory_dot_limit_in_bytes": "300000",
            f"{group}memory_dot_usage_in_bytes": "100000",
        },
    )
    write(tmp_path, **{f"{group}memory_dot_stat": "inactive_file 1\ntotal_inactive_file 20000\n"})
    assert available_memory(tmp_path) == 220_000


def test_a_file_that_was_replaced_is_not_registered(opened: Callable[[], Shards]) -> None:
    shards = opened()
    path = shards.paths[0]
    again = path.with_name("again")
    again.write_bytes(path.read_bytes())
    again.replace(path)
    assert identity(path) != shards.identities[0]
    with pytest.raises(
        FeedError, match="expected the file that was opened with the data set, found another one"
    ):
        pages._open(path, shards.identities[0])
