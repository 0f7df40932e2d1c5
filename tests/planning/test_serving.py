"""Which feed serves in a given memory, and what training waits for; and that a Loader agrees."""

import itertools
import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from memload import Index
from memload.feeds import choice, limits
from memload.feeds.interface import Samples
from memload.planning.disk import DiskRates
from memload.planning.serving import Memory, Serving, serve
from memload.storage.file_reads import DirectFile
from memload.storage.shards import Shards

MB = 1_000_000


def serving(
    ram: int | None,
    gpu: int | None,
    *,
    read: float | None = 4 * MB,
    image_bytes: int = 40_000,
    gathering: float = 600 * MB,
) -> Serving:
    """Return how 100 MB are served, of images that have masks of 10,000 bytes."""
    return serve(
        100 * MB,
        image_bytes=image_bytes,
        sample_bytes=image_bytes + 10_000,
        memory=Memory(ram, gpu),
        disk=DiskRates(MB, read, read is not None),
        gathering=gathering,
    )


@pytest.mark.parametrize(
    ("ram", "gpu", "read", "feed", "bound"),
    [
        (None, 400 * MB, 4 * MB, "resident", "model"),
        (200 * MB, 399 * MB, 4 * MB, "dma", "bus"),
        (199 * MB, 399 * MB, 4 * MB, "disk", "disk"),
        (None, 399 * MB, 4 * MB, "disk", "disk"),
        (199 * MB, 399 * MB, None, "pinned", "gathering"),
        (124 * MB, 399 * MB, None, "pinned", "disk"),
        (None, 399 * MB, None, "pinned", "gathering"),
        (None, None, 4 * MB, "cpu", "gathering"),
        (125 * MB, None, 4 * MB, "cpu", "gathering"),
        (124 * MB, None, 4 * MB, "cpu", "disk"),
    ],
)
def test_the_feed_is_the_one_that_the_memory_allows(
    ram: int | None, gpu: int | None, read: float | None, feed: str, bound: str
) -> None:
    found = serving(ram, gpu, read=read)
    assert (found.feed, found.later_epochs.bound) == (feed, bound)
    assert (found.share_in_memory == 1) == (bound != "disk")


def test_small_images_are_served_by_uva_however_large_their_masks_are() -> None:
    assert serving(200 * MB, 0, image_bytes=28 << 10).feed == "dma"
    assert serving(200 * MB, 0, image_bytes=(28 << 10) - 1).feed == "uva"


def test_the_reason_names_the_memory() -> None:
    reasons = {serving(ram, gpu).reason for ram, gpu in [(1, None), (1, 1), (None, 1)]}
    assert reasons == {
        "there is no GPU. Transforms take time of the CPU, which is not counted below",
        "100 MB do not fit in 50% of the 1 byte of available RAM",
        "100 MB do not fit in the available RAM, whose size is not known",
    }


def test_the_disk_reads_the_masks_too() -> None:
    held = serving(200 * MB, 1)
    assert held.first_epoch.images_per_second == 80
    assert str(held.first_epoch) == (
        "the disk, up to about 80 images/s here, unless the file is still in RAM from the build"
    )
    half = serving(100 * MB, 1)
    assert str(half.first_epoch) == "the disk, up to about 80 images/s here"
    assert str(half.later_epochs) == (
        "the disk, up to about 160 images/s here, since only 50% of the rows stay in RAM"
    )
    assert str(serving(62_500_000, None, read=None).later_epochs) == (
        "the disk, since only 50% of the rows stay in RAM"
    )


def test_rows_in_memory_are_gathered_or_sent_or_there() -> None:
    gathered, sent, there = (
        serving(ram, gpu) for ram, gpu in [(None, None), (200 * MB, 1), (1, 400 * MB)]
    )
    assert gathered.later_epochs.images_per_second == 12_000
    assert str(gathered.later_epochs) == (
        "gathering rows on the CPU, up to about 12,000 images/s here, since all rows are in RAM"
    )
    assert str(sent.later_epochs) == "the bus to the GPU, since all rows are in RAM"
    assert str(there.later_epochs) == "the model, since the GPU holds all rows"


def test_an_epoch_waits_for_the_disk_only_if_that_is_slower_than_what_comes_after_it() -> None:
    fast, slow = (serving(100 * MB, None, gathering=gathering) for gathering in (21 * MB, 19 * MB))
    assert (fast.later_epochs.bound, slow.later_epochs.bound) == ("disk", "gathering")
    assert str(slow.later_epochs) == (
        "gathering rows on the CPU, up to about 380 images/s here, since 80% of the rows stay in RAM"
    )
    assert str(serving(None, None, gathering=3 * MB).first_epoch) == (
        "gathering rows on the CPU, up to about 60 images/s here"
    )
    ends = [serving(199 * MB, 1, read=rate).later_epochs for rate in (200 * MB, 400 * MB)]
    assert [end.bound for end in ends] == ["disk", "bus"]
    assert ends[1].images_per_second is None


@pytest.mark.parametrize("height", [8, 40])  # rows of 8 and 40 KiB
def test_a_loader_chooses_the_same(
    make_dataset: Callable[..., Index], monkeypatch: pytest.MonkeyPatch, height: int
) -> None:
    shards = Shards(make_dataset(rows=(20,), shape=(height, 1024, 1)))
    samples, row_bytes = Samples(shards, np.arange(20), ()), height << 10
    needed = 20 * row_bytes

    def create(names: Sequence[str]) -> Any:
        return SimpleNamespace(name=names[0])

    seen = set()
    amounts = [factor * needed for factor in (0, 1, 1.9, 2.1, 3.9, 4.1)]
    for gpu, ram, is_direct in itertools.product(amounts, [None, *amounts], (True, False)):
        for name, value in (
            ("mem_get_info", (gpu, gpu)),
            ("memory_reserved", 0),
            ("memory_allocated", 0),
        ):
            monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
        monkeypatch.setattr(limits, "available_memory", lambda ram=ram: ram)
        direct = (lambda file: DirectFile(os.dup(file), 4096)) if is_direct else lambda file: None
        monkeypatch.setattr(choice, "open_direct", direct)
        _, chosen = choice.first_that_serves(create, samples, torch.device("cuda", 0))
        planned = serve(
            needed,
            image_bytes=row_bytes,
            sample_bytes=row_bytes,
            memory=Memory(None if ram is None else int(ram), int(gpu)),
            disk=DiskRates(1, None, is_direct),
            gathering=1,
        )
        assert planned.feed == chosen.name, (gpu, ram, is_direct)
        seen.add(chosen.name)
    assert seen == {"resident", "disk", "pinned", "uva" if height == 8 else "dma"}
