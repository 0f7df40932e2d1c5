"""Which feed is chosen, and why. CUDA is replaced by functions that say how much memory it has."""

import os
from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from memload import FeedError, Index
from memload.feeds import choice, factory, limits, windows
from memload.feeds.budget import Claim
from memload.feeds.choice import FEEDS, choose_feed
from memload.feeds.factory import pinned_callers
from memload.feeds.interface import Samples
from memload.feeds.limits import NO_LIMITS, MemoryLimits
from memload.storage.file_reads import DirectFile
from memload.storage.shards import Shards

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def samples_of(shards: Shards, row: Any = None, columns: Any = ()) -> Samples:
    return Samples(shards, np.arange(len(shards)) if row is None else np.array(row), columns)


@pytest.mark.parametrize("name", FEEDS)
def test_every_feed_serves_the_cpu_or_says_why_not(
    name: Any, make_dataset: Callable[..., Index]
) -> None:
    shards = Shards(make_dataset(rows=(5, 4, 3)))
    samples = samples_of(shards)
    if name in ("auto", "cpu"):
        feed, chosen = choose_feed(name, samples, CPU, num_threads=1, prefetch_factor=2)
        assert feed.name == chosen.name == "cpu"
        pixels, *_ = feed.prepare(np.arange(12))(0, 12)()
        np.testing.assert_array_equal(pixels.numpy(), np.concatenate(shards.maps))
        feed.close()
    else:
        with pytest.raises(FeedError, match=f"feed='{name}' needs a CUDA device, .* is cpu"):
            choose_feed(name, samples, CPU, num_threads=1, prefetch_factor=2)
    with pytest.raises(FeedError, match=r"feed='cpu' needs device='cpu', .* is cuda:0"):
        choose_feed("cpu", samples, CUDA, num_threads=1, prefetch_factor=2)


class Machine(NamedTuple):
    """A machine with a CUDA device, which has so much free memory, and so much available RAM."""

    monkeypatch: pytest.MonkeyPatch

    def set_up(
        self, free: int, ram: int, *, direct: Callable[[int], bool] = lambda descriptor: True
    ) -> None:
        """Set bytes of free device memory and of RAM, and whether a file has direct reads."""

        def open_direct(descriptor: int) -> DirectFile | None:
            return DirectFile(os.dup(descriptor), 4096) if direct(descriptor) else None

        for name, value in (
            ("mem_get_info", (free, free)),
            ("memory_reserved", 0),
            ("memory_allocated", 0),
        ):
            self.monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
        self.monkeypatch.setattr(limits, "available_memory", lambda: ram)
        self.monkeypatch.setattr(choice, "open_direct", open_direct)

    def choose(
        self,
        samples: Samples,
        free: int,
        ram: int,
        *,
        refused: Collection[str] = (),
        given: MemoryLimits = NO_LIMITS,
        direct: Callable[[int], bool] = lambda descriptor: True,
    ) -> tuple[str, str]:
        """Choose a feed, of which some cannot be created. Return its name and the reason."""
        self.set_up(free, ram, direct=direct)

        def create(names: Sequence[str]) -> Any:
            for name in names:
                if name in refused:
                    raise FeedError(f"{name} does not work here.")
            return SimpleNamespace(name=names[0])

        feed, chosen = choice.first_that_serves(create, samples, CUDA, given)
        assert feed.name == chosen.name
        return chosen.name, chosen.reason


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_the_choice_is_the_fastest_feed_that_has_enough_memory(
    machine: Machine, make_dataset: Callable[..., Index]
) -> None:
    large = samples_of(Shards(make_dataset("large.bin", rows=(8,), shape=(28, 1024, 1))))
    small = samples_of(Shards(make_dataset("small.bin", rows=(8,), shape=(28, 1023, 1))))
    labelled = samples_of(large.shards, columns=[np.zeros(8, np.int8)])
    pixels, ram = 8 * (28 << 10), 2 * (4096 + 8 * (28 << 10))
    not_resident = "resident: 229 kB does not fit in 25% of the 100 kB free on cuda:0"
    assert machine.choose(large, 4 * pixels, 0) == (
        "resident",
        "229 kB fits in 25% of the 918 kB free on cuda:0",
    )
    assert machine.choose(labelled, 4 * pixels, 0)[0] == "disk"
    assert machine.choose(large, 100_000, ram) == (
        "dma",
        f"233 kB fits in 50% of the 467 kB of available RAM; {not_resident}",
    )
    assert machine.choose(large, 100_000, ram, refused=["dma"])[0] == "uva"
    assert machine.choose(small, 100_000, ram)[0] == "uva"
    assert machine.choose(small, 100_000, ram, refused=["uva"])[0] == "dma"
    assert machine.choose(large, 100_000, ram // 2) == (
        "disk",
        "233 kB does not fit in 50% of the 233 kB of available RAM, so 115 kB of it are held there, "
        f"and the rest is read from the disk; {not_resident}",
    )
    assert machine.choose(large, 100_000, 0)[1].startswith(
        "233 kB does not fit in 50% of the 0 bytes of available RAM, so all of it is read from the "
        "disk; resident: "
    )
    assert machine.choose(large, 100_000, ram, refused=["dma", "uva"]) == (
        "pinned",
        f"{not_resident}; dma: dma does not work here; uva: uva does not work here",
    )
    assert machine.choose(large, 100_000, ram - 2, refused=["disk"]) == (
        "pinned",
        f"{not_resident}; disk: disk does not work here",
    )


def test_disk_is_chosen_only_if_every_shard_in_use_can_be_read_past_the_page_cache(
    machine: Machine, make_dataset: Callable[..., Index]
) -> None:
    shards = Shards(make_dataset(rows=(4, 4, 4)))
    in_ram = shards.descriptors[1]

    def direct(descriptor: int) -> bool:
        return descriptor != in_ram

    assert machine.choose(samples_of(shards, [0, 3, 8, 11]), 0, 0, direct=direct)[0] == "disk"
    name, reason = machine.choose(samples_of(shards, [0, 3, 4]), 0, 0, direct=direct)
    assert name == "pinned"
    assert "; uva: 8.77 kB does not fit in 50% of the 0 bytes of available RAM; disk: " in reason
    assert reason.endswith(f"disk: {shards.paths[1]} cannot be read past the page cache (O_DIRECT)")


def test_limits_that_were_given_replace_shares_of_what_is_available(
    machine: Machine, make_dataset: Callable[..., Index]
) -> None:
    samples = samples_of(Shards(make_dataset(rows=(100,), shape=(10, 100, 3))))  # 304,096 bytes

    def choose(cache: Any, resident: Any = 0) -> tuple[str, str]:
        given = MemoryLimits.of(cache, resident)
        return machine.choose(samples, 10**9, 10**9, given=given)

    assert choose(0, "300kB") == ("resident", "300 kB fits in the 300 kB of resident_bytes")
    not_resident = "resident: 300 kB does not fit in the 0 bytes of resident_bytes"
    assert choose(304_096) == ("uva", f"304 kB fits in the 304 kB of cache_bytes; {not_resident}")
    assert choose("200 kB") == (
        "disk",
        "304 kB does not fit in the 200 kB of cache_bytes, so 197 kB of it are held there, and the "
        f"rest is read from the disk; {not_resident}",
    )


def test_rows_on_the_device_are_part_of_the_reason(
    machine: Machine, make_dataset: Callable[..., Index]
) -> None:
    samples = samples_of(Shards(make_dataset(rows=(100,), shape=(10, 100, 3))))
    for cache, held in (
        ("200kB", "197 kB of it are held there, up to 100 kB on cuda:0, and the "),
        (0, "up to 100 kB on cuda:0 are held, and the rest is read from the disk"),
    ):
        given = MemoryLimits.of(cache, "100kB")
        name, reason = machine.choose(samples, 10**9, 10**9, given=given)
        assert name == "disk"
        assert f"of cache_bytes, so {held}" in reason


def test_more_ram_than_can_be_spared_is_not_held(
    machine: Machine, make_dataset: Callable[..., Index]
) -> None:
    samples = samples_of(Shards(make_dataset(rows=(100,), shape=(10, 100, 3))))
    given = MemoryLimits.of("5GB", 0)
    name, reason = machine.choose(samples, 0, 400_000, given=given)
    assert name == "disk"
    assert reason.startswith(
        "304 kB does not fit in the 200 kB to which cache_bytes was cut down, so 197 kB of it are held"
    )


def test_what_other_loaders_hold_of_other_files_is_not_available(
    machine: Machine, make_dataset: Callable[..., Index]
) -> None:
    train = samples_of(Shards(make_dataset("train.bin", rows=(100,), shape=(10, 100, 3))))
    part = samples_of(train.shards, range(50))
    val = samples_of(Shards(make_dataset("val.bin", rows=(100,), shape=(10, 100, 3))))
    given = MemoryLimits.of(500_000, 0)
    held = limits.claim_ram(train, given.in_ram("disk"))
    name, reason = machine.choose(val, 0, 10**9, given=given)
    assert name == "disk"
    assert reason.startswith(
        "304 kB does not fit in the 500 kB of cache_bytes beside the 304 kB of other Loaders, so "
        "193 kB of it are held there"
    )
    name, reason = machine.choose(part, 0, 10**9, given=given)  # the same pages
    assert (name, reason[:23]) == ("uva", "304 kB fits in the 500 ")
    del held
    assert machine.choose(val, 0, 10**9, given=given)[0] == "uva"


def test_the_choice_counts_only_what_a_subset_uses(
    machine: Machine,
    make_dataset: Callable[..., Index],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(windows, "WINDOW_BYTES", 2 * 4096)
    shards = Shards(make_dataset(rows=(50, 50), shape=(10, 100, 3)))
    whole, part = samples_of(shards), samples_of(shards, [60, 61, 61, 60] * 50)
    assert machine.choose(whole, 4 * 300_000 - 1, 0)[0] == "disk"
    assert machine.choose(part, 4 * 6000, 0)[0] == "resident"
    # Rows 60 and 61 lie in one window of 8 KiB.
    assert machine.choose(part, 0, 2 * 8192)[0] == "uva"
    assert machine.choose(part, 0, 2 * 8192 - 1)[0] == "disk"


def test_the_choice_counts_all_arrays_that_are_used(
    machine: Machine, large_and_small: Callable[[], Samples]
) -> None:
    samples = large_and_small()
    size = 2 * 8 * (28 << 10) + 2 * 16 + 8 * 8  # both rows of the features in use, and the labels
    assert machine.choose(samples, 4 * size, 0)[0] == "resident"
    assert machine.choose(samples, 4 * size - 4, 0)[0] == "disk"
    ram = 2 * (2 * (4096 + 8 * (28 << 10)) + 128 + 5 * 16)
    name, reason = machine.choose(samples, 0, ram)
    assert name == "dma"
    assert reason.startswith("467 kB fits in 50% of ")
    assert "of available RAM; uva for features; resident: " in reason
    assert machine.choose(samples, 0, ram - 2)[0] == "disk"
    name, reason = machine.choose(samples, 0, ram, refused=["uva"])
    assert (name, reason.startswith("467 kB fits")) == ("dma", True)
    assert "; dma with uva for features: uva does not work here" in reason
    name, reason = machine.choose(samples, 0, ram, refused=["dma"])
    assert name == "uva"
    assert "of available RAM; resident: " in reason


# The feeds that are created, with other objects in their place.


class Created(NamedTuple):
    """What a feed was created with that reads the page cache."""

    name: str
    array: str
    held: int
    wanted: int
    buffers: int


@pytest.fixture
def created(monkeypatch: pytest.MonkeyPatch) -> list[Created]:
    """All feeds that read the page cache. They need no CUDA device, and hold nothing."""
    found: list[Created] = []

    def create(
        name: str,
        samples: Samples,
        device: Any,
        copier: Any,
        *,
        claim: Claim,
        buffers: int,
        may_hold_nothing: bool,
    ) -> Any:
        array = samples.shards.array.name
        found.append(Created(name, array, claim.size, claim.wanted, buffers))
        return SimpleNamespace(name=name, device=device, close=lambda: None)

    monkeypatch.setattr(factory, "PageCacheFeed", create)
    monkeypatch.setattr(factory, "_copier", lambda *arguments: None)
    return found


def choose_named(name: Any, samples: Samples, given: MemoryLimits = NO_LIMITS) -> Any:
    feed, chosen = choose_feed(
        name, samples, CUDA, num_threads=1, prefetch_factor=2, buffers=5, limits=given
    )
    assert feed.name == chosen.name
    return feed


def test_the_same_share_of_each_array_is_held(
    machine: Machine, large_and_small: Callable[[], Samples], created: list[Created]
) -> None:
    machine.set_up(0, 10**9)
    samples = large_and_small()
    choose_named("auto", samples, MemoryLimits.of(234_000, 0))
    assert [one[:2] for one in created] == [
        ("disk", "image"),
        ("disk", "mask"),
        ("disk", "features"),
    ]
    assert [one.held / one.wanted for one in created[:2]] == pytest.approx([0.5] * 2, abs=0.02)
    assert sum(one.held for one in created) <= 234_000
    assert [one.buffers for one in created] == [5] * 3


def test_a_feed_asked_for_by_name_keeps_to_the_limits_that_are_given(
    machine: Machine, make_dataset: Callable[..., Index], created: list[Created]
) -> None:
    machine.set_up(0, 10**9)
    samples = samples_of(Shards(make_dataset(rows=(100,), shape=(10, 100, 3))))
    choose_named("dma", samples)  # also if there is too little RAM: it was asked for
    choose_named("uva", samples, MemoryLimits.of(304_096, None))
    choose_named("disk", samples, MemoryLimits.of(4096, None))
    assert [one.held for one in created] == [304_096, 304_096, 4096]
    too_large = r"^feed='dma' holds all rows in RAM, but 304 kB does not fit in the 4.1 kB of cache"
    with pytest.raises(FeedError, match=too_large):
        choose_named("dma", samples, MemoryLimits.of(4096, None))
    too_large = r"^feed='resident': 300 kB does not fit in the 4.1 kB of resident_bytes"
    with pytest.raises(FeedError, match=too_large):
        choose_named("resident", samples, MemoryLimits.of(None, 4096))


def test_a_limit_of_device_memory_is_refused_where_there_is_no_such_memory(
    make_dataset: Callable[..., Index],
) -> None:
    samples = samples_of(Shards(make_dataset()))
    with pytest.raises(ValueError, match=r"^resident_bytes has no effect on feed='cpu'\. Leave"):
        choose_feed(
            "auto",
            samples,
            CPU,
            num_threads=1,
            prefetch_factor=2,
            limits=MemoryLimits.of(None, "1GB"),
        )


def test_rows_that_are_too_large_to_register_are_gathered_by_threads(
    machine: Machine, make_dataset: Callable[..., Index], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "WINDOW_BYTES", 4096)
    monkeypatch.setattr(factory, "_copier", lambda *arguments: None)
    samples = samples_of(Shards(make_dataset(shape=(40, 40, 3))))
    machine.set_up(0, 40_000)
    feed, chosen = choose_feed("auto", samples, CUDA, num_threads=1, prefetch_factor=2)
    feed.close()
    assert chosen.name == "pinned"
    assert "; disk: rows of 4,800 bytes are too large to register" in chosen.reason


def test_pinned_fetches_on_the_consumers_thread_if_there_are_no_others() -> None:
    assert pinned_callers(0, 2) == 0
    assert [pinned_callers(number, 2) for number in (1, 6, 12)] == [1, 6, 6]


@pytest.mark.parametrize(
    ("name", "device", "asked"), [("auto", CPU, "the device is cpu"), ("pinned", CUDA, "asked for")]
)
def test_rows_that_are_dropped_behind_the_read_have_a_reason(
    name: Any,
    device: torch.device,
    asked: str,
    make_dataset: Callable[..., Index],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And so have rows that stay although the limit is smaller."""
    monkeypatch.setattr("memload.feeds.pinned.require_cuda", lambda *arguments: None)
    monkeypatch.setattr(factory, "require_cuda", lambda *arguments: None)

    def chosen(samples: Samples, cache_bytes: int) -> tuple[Any, str]:
        given = MemoryLimits.of(cache_bytes, None)
        feed, choice = choose_feed(
            name, samples, device, num_threads=1, prefetch_factor=2, limits=given
        )
        return feed, choice.reason.removeprefix(asked)

    shards = Shards(make_dataset(rows=(100,), shape=(10, 100, 3)))
    all_rows, others = samples_of(shards), samples_of(shards, range(0, 100, 2))
    others_have = "beside the 164 kB of other Loaders"
    feed, reason = chosen(all_rows, 100 << 12)
    assert reason == ""
    del feed
    feed, reason = chosen(all_rows, 40 << 12)
    assert reason == "; 303 kB does not fit in the 164 kB of cache_bytes"
    same, reason = chosen(all_rows, 0)
    assert reason == (
        "; other Loaders hold 164 kB of the 303 kB already, beyond the 0 bytes of cache_bytes"
    )
    assert feed.counts().rows_held == same.counts().rows_held > 0
    _, reason = chosen(others, 0)
    assert reason == f"; 299 kB does not fit in the 0 bytes of cache_bytes {others_have}"
    _, reason = chosen(others, 50 << 12)
    assert reason == f"; 299 kB does not fit in the 205 kB of cache_bytes {others_have}"
