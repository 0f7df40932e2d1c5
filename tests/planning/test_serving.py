"""Which feed serves in a given memory, and what training waits for; and that a Loader agrees."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from memload import Index
from memload.feeds import choice, held
from memload.feeds.feed import SampleArray
from memload.planning.disk import DiskRates
from memload.planning.serving import Memory, Serving, serve
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
        (199 * MB, 399 * MB, None, "disk", "disk"),
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


def test_threads_gather_small_images_however_large_their_masks_are() -> None:
    assert serving(200 * MB, 0, image_bytes=8 << 10).feed == "dma"
    small = serving(124 * MB, 0, image_bytes=(8 << 10) - 1)
    assert (small.feed, small.later_epochs.bound) == ("pinned", "disk")
    assert small.reason == "threads are faster for rows of 8.19 kB"
    assert serving(125 * MB, 0, image_bytes=1).later_epochs.bound == "gathering"


def test_the_reason_names_the_memory() -> None:
    memory = [(1, None), (200 * MB, 1), (100 * MB, 1), (None, 1), (1, 400 * MB)]
    assert [serving(ram, gpu).reason for ram, gpu in memory] == [
        "there is no GPU. Transforms take time of the CPU, which is not counted below",
        "all 100 MB will be held, as 100 MB of RAM may hold rows",
        "50 MB of 100 MB will be held, as 50 MB of RAM may hold rows",
        "0 bytes of 100 MB will be held, as 0 bytes of RAM may hold rows",
        "100 MB fit in 25% of the 400 MB that are free on the GPU",
    ]


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


@pytest.mark.parametrize("height", [4, 40])  # rows of 4 and 40 KiB
def test_a_loader_chooses_the_same(
    make_dataset: Callable[..., Index], monkeypatch: pytest.MonkeyPatch, height: int
) -> None:
    shards = Shards(make_dataset(rows=(20,), shape=(height, 1024, 1)))
    array, row_bytes = SampleArray(shards, np.arange(20)), height << 10
    needed = 20 * row_bytes

    class Made:
        def __init__(self, array: Any, device: Any, *others: Any, **options: Any) -> None:
            of_pages = others[0] if others else []
            is_all = all(file.planned == file.size for file in of_pages)
            self.name = self.kind or ("dma" if is_all else "disk")

        kind = ""

        def close(self) -> None:
            pass

    class Row:
        is_batched = True

        def __init__(self, *arguments: object) -> None:
            pass

    for name, kind in (("ResidentFeed", "resident"), ("GatherFeed", "pinned"), ("PagesFeed", "")):
        monkeypatch.setattr(choice, name, type(name, (Made,), {"kind": kind}))
    monkeypatch.setattr(choice, "RowCopies", Row)
    monkeypatch.setattr(held.HeldFile, "probe", lambda *_: None)
    seen = set()
    file_bytes = shards.array.data_bytes
    amounts = [0, *(int(factor * needed) for factor in (1, 1.9, 2.5, 3.9, 4.3))]
    for gpu, ram in itertools.product(amounts, [None, *amounts]):
        monkeypatch.setattr(choice, "free_memory", lambda device, gpu=gpu: gpu)
        monkeypatch.setattr(held, "available_memory", lambda ram=ram: ram)
        _, chosen = choice.choose_feed("auto", [array], torch.device("cuda", 0))
        planned = serve(
            file_bytes,
            image_bytes=row_bytes,
            sample_bytes=row_bytes,
            memory=Memory(ram, gpu),
            disk=DiskRates(1, None, True),
            gathering=1,
        )
        assert planned.feed == chosen.name, (gpu, ram)
        seen.add(chosen.name)
    assert seen == ({"resident", "pinned"} if height == 4 else {"resident", "disk", "dma"})
