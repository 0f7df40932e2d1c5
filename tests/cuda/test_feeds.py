import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from memload import FeedError, Index
from memload.feeds import pages, staging
from memload.feeds.choice import choose_feed
from memload.feeds.interface import Samples
from memload.storage.shards import Shards

DEVICE = torch.device("cuda", 0)
WAYS = {"resident": 2, "dma": 2, "uva": 2, "pinned": 0, "pinned on 3 threads": 3}

every_feed = pytest.mark.parametrize("way", WAYS)


@pytest.fixture
def make(way: str) -> Iterator[Callable[..., Any]]:
    """A function that makes the feed, for some shards; it is closed at the end."""
    made = []

    def make(shards: Shards, row: Any = None, columns: Any = ()) -> Any:
        samples = Samples(shards, np.arange(len(shards)) if row is None else np.array(row), columns)
        feed, _ = choose_feed(
            way.split()[0], samples, DEVICE, num_threads=WAYS[way], prefetch_factor=2
        )  # type: ignore[arg-type]
        made.append(feed)
        return feed

    with torch.cuda.stream(torch.cuda.Stream()):
        yield make
    while made:
        made.pop().close()


def settle(feed: Any) -> None:
    """Wait until a feed's pages are registered, if it is one that registers."""
    if hasattr(feed, "_pages"):
        assert feed._pages.wait(30)


def fetch(feed: Any, samples: np.ndarray) -> list[torch.Tensor]:
    """Fetch samples, some of them first: parts are what a Loader fetches."""
    part = feed.prepare(samples)
    half = len(samples) // 2
    return [torch.cat(both) for both in zip(part(0, half), part(half, len(samples)), strict=True)]


def numpy(tensor: torch.Tensor) -> np.ndarray:
    assert tensor.is_cuda
    return tensor.cpu().numpy()


@every_feed
@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("rows", [(40,), (17, 13, 10)], ids=["one shard", "three shards"])
@pytest.mark.parametrize(
    ("shape", "descr"),
    [
        ((4, 6, 3), "|u1"),
        ((3, 5, 1), "|u1"),
        ((31, 33, 3), "|u1"),
        ((5, 7, 3), "<f4"),
        ((2, 3, 1), "<u2"),
    ],
    ids=str,
)
def test_samples_come_as_they_are_stored(
    make: Callable[..., Any],
    make_dataset: Callable[..., Index],
    rows: Any,
    shape: Any,
    descr: str,
    settled: bool,
) -> None:
    index = make_dataset(rows=rows, shape=shape, descr=descr)
    shards = Shards(index)
    row = np.random.default_rng(1).integers(0, 40, 100)
    columns = (
        np.arange(100) * 3,
        np.random.default_rng(2).random((100, 2, 3)).astype(np.float32),
        np.arange(100, dtype=np.uint16),
        np.arange(100) % 3 == 0,
    )
    feed = make(shards, row, columns)
    if settled:
        settle(feed)
    stored = np.concatenate(shards.maps)
    rng = np.random.default_rng(3)
    for count in (1, 7, 100, 0, 300, 2):
        samples = rng.integers(0, 100, count)
        pixels, *values = fetch(feed, samples)
        assert pixels.is_contiguous()
        np.testing.assert_array_equal(numpy(pixels), stored[row[samples]])
        for value, column in zip(values, columns, strict=True):
            np.testing.assert_array_equal(numpy(value), column[samples])


@every_feed
def test_rows_that_span_windows_come_whole(
    make: Callable[..., Any], make_dataset: Callable[..., Index], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "WINDOW_BYTES", 2 * 4096)
    shards = Shards(make_dataset(rows=(50, 30), shape=(20, 31, 3)))
    feed = make(shards)
    stored = np.concatenate(shards.maps)
    for _ in range(2):
        np.testing.assert_array_equal(numpy(fetch(feed, np.arange(80))[0]), stored)
        settle(feed)


@pytest.mark.parametrize("way", ["dma", "uva"])
def test_rows_whose_pages_are_not_registered_come_by_way_of_the_cpu(
    make: Callable[..., Any], make_dataset: Callable[..., Index], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "WINDOW_BYTES", 4096)
    monkeypatch.setattr("memload.feeds.dma._PIECE_BYTES", 5000)
    real = pages._File.register

    def every_other(file: Any, window: int, device: torch.device) -> None:
        if window % 2:
            real(file, window, device)

    monkeypatch.setattr(pages._File, "register", every_other)
    shards = Shards(make_dataset(rows=(50, 30), shape=(20, 31, 3)))
    feed = make(shards)
    feed._pages.wait(30)
    order = np.random.default_rng(0).permutation(80)
    np.testing.assert_array_equal(numpy(fetch(feed, order)[0]), np.concatenate(shards.maps)[order])
    places = feed._pages.locate(np.arange(80))
    assert 0 < places.ready.sum() < 80


@pytest.mark.parametrize("way", ["dma", "uva"])
def test_staging_memory_is_given_back_once_all_is_registered(
    make: Callable[..., Any], make_dataset: Callable[..., Index], nothing_registered: set[int]
) -> None:
    shards = Shards(make_dataset(rows=(50,), shape=(20, 31, 3)))
    feed = make(shards)
    settle(feed)
    fetch(feed, np.arange(50))
    assert len(nothing_registered) == 1  # the shard's one window


@every_feed
def test_batches_are_the_callers_own_and_outlive_a_closed_feed(
    make: Callable[..., Any], make_dataset: Callable[..., Index]
) -> None:
    shards = Shards(make_dataset(rows=(12,)))
    feed = make(shards)
    held = [fetch(feed, np.array([row]))[0] for row in range(12)]
    fetch(feed, np.array([3]))[0].fill_(0)
    feed.close()
    np.testing.assert_array_equal(np.concatenate([numpy(one) for one in held]), shards.maps[0])


@pytest.mark.parametrize("way", ["dma", "uva"])
def test_pages_that_cannot_be_registered_are_a_reason(
    make_dataset: Callable[..., Index], way: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(address: int, size: int, flags: int) -> None:
        raise FeedError("CUDA: expected to register memory, found a refusal")

    monkeypatch.setattr(pages, "register", refuse)
    shards = Shards(make_dataset(rows=(12,), shape=(100, 100, 3)))
    samples = Samples(shards, np.arange(12), ())
    with pytest.raises(
        FeedError, match="its pages cannot be registered, as its filesystem or CUDA refuses"
    ):
        choose_feed(way, samples, DEVICE, num_threads=1, prefetch_factor=2)
    monkeypatch.setattr("memload.feeds.choice.RESIDENT_SHARE", 0.0)
    feed, choice = choose_feed("auto", samples, DEVICE, num_threads=1, prefetch_factor=2)
    assert choice.name == "pinned"
    assert "dma: " in choice.reason
    assert "cannot be registered" in choice.reason
    np.testing.assert_array_equal(numpy(fetch(feed, np.arange(12))[0]), shards.maps[0])
    feed.close()


@pytest.mark.parametrize("way", ["resident"])
def test_a_data_set_is_loaded_also_where_pages_cannot_be_registered(
    make: Callable[..., Any], make_dataset: Callable[..., Index], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(address: int, size: int, flags: int) -> None:
        raise FeedError("CUDA: expected to register memory, found a refusal")

    monkeypatch.setattr(pages, "register", refuse)
    shards = Shards(make_dataset(rows=(5, 7)))
    np.testing.assert_array_equal(
        numpy(fetch(make(shards), np.arange(12))[0]), np.concatenate(shards.maps)
    )


@pytest.mark.parametrize("way", ["resident"])
def test_too_little_memory_on_the_device_is_a_reason(
    make: Callable[..., Any], make_dataset: Callable[..., Index], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    shards = Shards(make_dataset(rows=(5, 7)))
    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(
        FeedError, match="feed 'resident': expected 864 bytes of free memory on cuda:0"
    ):
        make(shards)


def test_a_refusal_leaves_torch_in_order() -> None:
    with pytest.raises(FeedError, match="expected to register 4,096 bytes of memory"):
        staging.register(4096, 4096, 0)
    assert torch.ones(3, device=DEVICE).sum().item() == 3


@pytest.mark.parametrize("way", ["dma"])
def test_feeds_of_one_file_register_it_once(
    make: Callable[..., Any], make_dataset: Callable[..., Index], nothing_registered: set[int]
) -> None:
    path = make_dataset(rows=(12, 9)).path
    one, other = make(Shards(Index.read(path))), make(Shards(Index.read(path)))
    settle(one)
    settle(other)
    assert len(nothing_registered) == 2  # one window a shard
    one.close()
    gc.collect()
    assert len(nothing_registered) == 2
    np.testing.assert_array_equal(
        numpy(fetch(other, np.array([3]))[0]), Shards(Index.read(path)).maps[0][[3]]
    )


@pytest.mark.parametrize("way", ["resident"])
def test_feeds_of_one_file_hold_it_on_the_device_once(
    make: Callable[..., Any], make_dataset: Callable[..., Index]
) -> None:
    path = make_dataset(rows=(40,), shape=(256, 256, 3)).path
    one = make(Shards(Index.read(path)))
    before = torch.cuda.memory_allocated(DEVICE)
    other = make(Shards(Index.read(path)))
    assert torch.cuda.memory_allocated(DEVICE) == before
    one.close()
    other.close()
    gc.collect()
    assert torch.cuda.memory_allocated(DEVICE) <= before - 40 * 256 * 256 * 3


@every_feed
def test_a_file_replaced_by_a_rebuild_goes_on_with_the_old_pixels(
    make: Callable[..., Any], make_dataset: Callable[..., Index]
) -> None:
    shards = Shards(make_dataset(rows=(12,)))
    before = shards.maps[0].copy()
    feed = make(shards)
    settle(feed)
    make_dataset(name="other.bin", rows=(12,), seed=9)
    shards.paths[0].with_name("other.bin").replace(shards.paths[0])
    np.testing.assert_array_equal(numpy(fetch(feed, np.arange(12))[0]), before)


@pytest.mark.parametrize("way", ["dma", "uva"])
def test_a_file_replaced_before_it_is_registered_is_a_reason(
    make: Callable[..., Any], make_dataset: Callable[..., Index]
) -> None:
    shards = Shards(make_dataset(rows=(12,)))
    make_dataset(name="other.bin", rows=(12,), seed=9)
    shards.paths[0].with_name("other.bin").replace(shards.paths[0])
    with pytest.raises(FeedError, match="expected the file that was opened with the data set"):
        make(shards)


def test_a_staging_buffer_is_not_used_again_before_its_copy_has_ended() -> None:
    pool = staging.Staging(1 << 20, DEVICE, most=2)
    targets = [torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE) for _ in range(20)]
    for number, target in enumerate(targets):
        buffer = pool.take()
        buffer.fill_(number)
        torch.cuda._sleep(20_000_000)
        target.copy_(buffer, non_blocking=True)
        pool.give(buffer)
        del buffer
    assert (
        [int(target.min()) for target in targets]
        == [int(target.max()) for target in targets]
        == list(range(20))
    )
    pool.close()
