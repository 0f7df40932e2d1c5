"""Which feed is chosen, and why. CUDA is replaced by functions that say how much memory it has."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from memload import FeedError, Index
from memload.feeds import choice, limits, windows
from memload.feeds.choice import FEEDS, choose_feed, pinned_callers
from memload.feeds.interface import Samples
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


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, str]]:
    """A function that chooses a feed as on a CUDA device, with so much free memory and RAM."""

    def choose(
        samples: Samples, free: int, memory: int, refused: tuple[str, ...] = ()
    ) -> tuple[str, str]:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
        monkeypatch.setattr(limits, "available_memory", lambda: memory)

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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(windows, "WINDOW_BYTES", 2 * 4096)
    shards = Shards(make_dataset(rows=(50, 50), shape=(10, 100, 3)))
    whole, part = samples_of(shards), samples_of(shards, [60, 61, 61, 60] * 50)
    assert choose(whole, 4 * 300_000 - 1, 0)[0] == "disk"
    assert choose(part, 4 * 6000, 0)[0] == "resident"
    assert choose(part, 0, 2 * 8192)[0] == "uva"  # rows 60 and 61 lie in one window of 8 KiB
    assert choose(part, 0, 2 * 8192 - 1)[0] == "disk"


def test_the_choice_counts_all_arrays_that_are_used(
    choose: Callable[..., tuple[str, str]],
    large_and_small: Callable[[], Samples],
) -> None:
    samples = large_and_small()
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


def test_pinned_fetches_on_the_consumers_thread_if_there_are_no_others() -> None:
    assert pinned_callers(0, 2) == 0
    assert [pinned_callers(number, 2) for number in (1, 6, 12)] == [1, 6, 6]
