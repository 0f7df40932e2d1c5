import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from memload import FeedError, FormatError, Index, Loader, MemmapDataset
from memload.feeds import page_locked, registered, row_reader
from memload.feeds.choice import choose_feed
from memload.feeds.interface import Samples
from memload.feeds.limits import MemoryLimits
from memload.storage.shards import Shards

DEVICE = torch.device("cuda", 0)
#: Feeds: the name of each, its threads, and how many bytes it may hold.
FEEDS: dict[str, tuple[Any, int, int | None]] = {
    "resident": ("resident", 2, None),
    "dma": ("dma", 2, None),
    "uva": ("uva", 2, None),
    "disk": ("disk", 2, None),
    "disk, some rows held": ("disk", 2, 8192),
    "disk, no row held": ("disk", 2, 0),
    "pinned": ("pinned", 0, None),
    "pinned on 3 threads": ("pinned", 3, None),
}

every_feed = pytest.mark.parametrize("feed_name", FEEDS)
page_cache_feeds = pytest.mark.parametrize("feed_name", ["dma", "uva", "disk"])
resident = pytest.mark.parametrize("feed_name", ["resident"])


@pytest.fixture
def make_feed(feed_name: str) -> Iterator[Callable[..., Any]]:
    """A function that creates the feed for some shards. It is closed at the end."""
    feeds = []

    def make(shards: Shards, row: Any = None, columns: Any = ()) -> Any:
        samples = Samples(shards, np.arange(len(shards)) if row is None else np.array(row), columns)
        name, num_threads, cache_bytes = FEEDS[feed_name]
        limits = MemoryLimits(cache_bytes)
        feed, _ = choose_feed(
            name, samples, DEVICE, num_threads=num_threads, prefetch_factor=2, limits=limits
        )
        feeds.append(feed)
        return feed

    with torch.cuda.stream(torch.cuda.Stream()):
        yield make
    while feeds:
        feeds.pop().close()


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let CUDA refuse to register the pages of files."""

    def refuse(*_: object) -> None:
        raise FeedError("CUDA refuses")

    monkeypatch.setattr(registered, "register", refuse)


def fetch(feed: Any, positions: np.ndarray) -> list[torch.Tensor]:
    """Fetch samples as a chunk of two batches, which are begun before the first is fetched."""
    begin, half = feed.prepare(positions), len(positions) // 2
    begun = [begin(0, half), begin(half, len(positions))]
    batches = zip(*(fetch_batch() for fetch_batch in begun), strict=True)
    return [torch.cat(tensors) for tensors in batches]


def on_host(tensor: torch.Tensor) -> np.ndarray:
    assert tensor.is_cuda
    return tensor.cpu().numpy()


def stored(shards: Shards) -> np.ndarray:
    return np.concatenate(shards.maps)


@every_feed
@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("rows", [(40,), (17, 13, 10)], ids=["one shard", "three shards"])
@pytest.mark.parametrize(
    ("shape", "descr"),
    [
        ((4, 6, 3), "|u1"),
        ((3, 5, 1), "|u1"),
        ((31, 33, 3), "|u1"),
        ((5, 7, 3), "<f4"),
        ((2, 3, 1), "<u2"),
        ((3, 5, 1), "<i2"),
        ((5, 7, 3), "<i4"),
    ],
    ids=str,
)
def test_samples_are_as_they_are_stored(
    make_feed: Callable[..., Any],
    make_dataset: Callable[..., Index],
    rows: Any,
    shape: Any,
    descr: str,
    wait: bool,
    wait_until_held: Callable[[Any], None],
) -> None:
    shards = Shards(make_dataset(rows=rows, shape=shape, descr=descr))
    row = np.random.default_rng(1).integers(0, 40, 100)
    columns = (
        np.arange(100) * 3,
        np.random.default_rng(2).random((100, 2, 3)).astype(np.float32),
        np.arange(100, dtype=np.uint16),
        np.arange(100) % 3 == 0,
    )
    feed = make_feed(shards, row, columns)
    if wait:
        wait_until_held(feed)
    rng = np.random.default_rng(3)
    for count in (1, 7, 100, 0, 300, 2):
        positions = rng.integers(0, 100, count)
        pixels, *values = fetch(feed, positions)
        assert pixels.is_contiguous()
        np.testing.assert_array_equal(on_host(pixels), stored(shards)[row[positions]])
        for value, column in zip(values, columns, strict=True):
            np.testing.assert_array_equal(on_host(value), column[positions])


@page_cache_feeds
def test_rows_come_from_the_files_if_a_window_cannot_be_registered(
    make_feed: Callable[..., Any],
    make_dataset: Callable[..., Index],
    monkeypatch: pytest.MonkeyPatch,
    window_bytes: Callable[[int], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    window_bytes(4096)
    register = registered.RegisteredFile.register

    def register_some(file: Any, window: int, size: int, device: torch.device) -> int:
        if window > 3:
            raise FeedError("CUDA refuses")
        return register(file, window, size, device)

    monkeypatch.setattr(registered.RegisteredFile, "register", register_some)
    shards = Shards(make_dataset(rows=(50, 30), shape=(20, 31, 3)))
    feed = make_feed(shards)
    feed._held._thread.join(30)
    assert "CUDA refuses" in caplog.text
    assert "CUDA refuses" in feed.counts().problem
    order = np.random.default_rng(0).permutation(80)
    np.testing.assert_array_equal(on_host(fetch(feed, order)[0]), stored(shards)[order])
    assert feed.counts().hits == 6  # windows 1 to 3 have 12,288 bytes of rows of 1,860


@page_cache_feeds
def test_page_locked_memory_is_freed_once_all_rows_are_held(
    make_feed: Callable[..., Any],
    make_dataset: Callable[..., Index],
    registered_addresses: set[int],
    may_register: threading.Event,
    wait_until_held: Callable[[Any], None],
) -> None:
    shards = Shards(make_dataset(rows=(50,), shape=(20, 31, 3)))
    feed = make_feed(shards)
    np.testing.assert_array_equal(on_host(fetch(feed, np.arange(50))[0]), stored(shards))
    assert registered_addresses  # buffers
    assert feed.counts().hits == 0
    may_register.set()
    wait_until_held(feed)
    np.testing.assert_array_equal(on_host(fetch(feed, np.arange(50))[0]), stored(shards))
    assert feed.counts().hits == 50
    assert len(registered_addresses) == 1  # the shard's only window


@page_cache_feeds
def test_a_thread_may_begin_to_read_when_another_one_finds_all_rows_held(
    make_feed: Callable[..., Any],
    make_dataset: Callable[..., Index],
    may_register: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    wait_until_held: Callable[[Any], None],
) -> None:
    submitting, may_submit = threading.Event(), threading.Event()

    class LateExecutor(ThreadPoolExecutor):
        def submit(self, *arguments: Any, **options: Any) -> Any:
            submitting.set()
            assert may_submit.wait(30)
            return super().submit(*arguments, **options)

    monkeypatch.setattr(row_reader, "ThreadPoolExecutor", LateExecutor)
    shards = Shards(make_dataset(rows=(50,), shape=(20, 31, 3)))
    feed = make_feed(shards)

    def fetch_on_thread() -> np.ndarray:
        with torch.cuda.stream(torch.cuda.Stream()):
            return on_host(feed.prepare(np.arange(50))(0, 50)()[0])

    with ThreadPoolExecutor(1) as thread:
        batch = thread.submit(fetch_on_thread)
        assert submitting.wait(30)
        may_register.set()
        wait_until_held(feed)
        np.testing.assert_array_equal(on_host(fetch(feed, np.arange(50))[0]), stored(shards))
        may_submit.set()
        np.testing.assert_array_equal(batch.result(), stored(shards))


@every_feed
def test_batches_belong_to_the_caller_and_outlive_the_feed(
    make_feed: Callable[..., Any], make_dataset: Callable[..., Index]
) -> None:
    shards = Shards(make_dataset(rows=(12,)))
    feed = make_feed(shards)
    batches = [fetch(feed, np.array([row]))[0] for row in range(12)]
    fetch(feed, np.array([3]))[0].fill_(0)
    feed.close()
    np.testing.assert_array_equal(np.concatenate([on_host(one) for one in batches]), stored(shards))


@every_feed
def test_a_subset_of_scattered_and_repeated_rows(
    make_feed: Callable[..., Any],
    make_dataset: Callable[..., Index],
    monkeypatch: pytest.MonkeyPatch,
    window_bytes: Callable[[int], None],
    wait_until_held: Callable[[Any], None],
) -> None:
    window_bytes(4096)
    monkeypatch.setattr("memload.feeds.resident._STAGING_BYTES", 5000)
    shards = Shards(make_dataset(rows=(50, 30), shape=(20, 31, 3)))
    for row in ([77, 3, 3, 51, 4], [79], [], np.arange(80)[::-1]):
        row = np.array(row, np.int64)
        feed = make_feed(shards, row, [np.arange(len(row)) * 2])
        wait_until_held(feed)
        pixels, values = fetch(feed, np.arange(len(row))[::-1].copy())
        np.testing.assert_array_equal(on_host(pixels), stored(shards)[row[::-1]])
        assert values.tolist() == (np.arange(len(row)) * 2)[::-1].tolist()


@resident
def test_only_the_rows_of_a_subset_are_copied_to_the_device(
    make_dataset: Callable[..., Index], feed_name: Any
) -> None:
    index = make_dataset(rows=(60, 60), shape=(128, 128, 3))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(DEVICE)
    loader = Loader(MemmapDataset(index.path).subset(range(0, 120, 40)), 3, feed=feed_name)
    (batch,) = list(loader)
    expected = torch.from_numpy(stored(Shards(index))[::40])
    assert torch.equal(batch.images.permute(0, 2, 3, 1).cpu(), expected)
    del batch
    torch.cuda.synchronize()
    taken = torch.cuda.memory_allocated(DEVICE) - before
    assert 3 * 128 * 128 * 3 <= taken < 6 * 128 * 128 * 3


@pytest.mark.parametrize("feed_name", ["dma", "uva"])
@pytest.mark.usefixtures("refused")
def test_pages_that_cannot_be_registered_are_a_reason(
    make_dataset: Callable[..., Index], feed_name: Any
) -> None:
    shards = Shards(make_dataset(rows=(12,), shape=(100, 100, 3)))
    samples = Samples(shards, np.arange(12), ())
    options: Any = {"num_threads": 1, "prefetch_factor": 2, "limits": MemoryLimits(resident=0)}
    with pytest.raises(FeedError, match=r"cannot be registered with CUDA.*feed='pinned'"):
        choose_feed(feed_name, samples, DEVICE, num_threads=1, prefetch_factor=2)
    feed, choice = choose_feed("auto", samples, DEVICE, **options)
    assert choice.name == "pinned"
    assert "dma: the pages of" in choice.reason
    np.testing.assert_array_equal(on_host(fetch(feed, np.arange(12))[0]), shards.maps[0])
    feed.close()


@resident
@pytest.mark.usefixtures("refused")
def test_a_data_set_is_loaded_even_if_its_pages_cannot_be_registered(
    make_feed: Callable[..., Any], make_dataset: Callable[..., Index]
) -> None:
    shards = Shards(make_dataset(rows=(5, 7)))
    pixels = fetch(make_feed(shards), np.arange(12))[0]
    np.testing.assert_array_equal(on_host(pixels), stored(shards))


@resident
def test_too_little_memory_on_the_device_is_a_reason(
    make_feed: Callable[..., Any],
    make_dataset: Callable[..., Index],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    shards = Shards(make_dataset(rows=(5, 7)))
    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(FeedError, match="feed='resident' needs 864 bytes of memory on cuda:0"):
        make_feed(shards)


def test_torch_works_on_after_a_refusal() -> None:
    with pytest.raises(FeedError, match="CUDA cannot page-lock 4,096 bytes"):
        page_locked.register(4096, 4096, 0)
    assert torch.ones(3, device=DEVICE).sum().item() == 3


@resident
@pytest.mark.parametrize("row", [range(40), [5, 39, 5]], ids=["all rows", "some rows"])
def test_feeds_of_the_same_rows_hold_them_on_the_device_once(
    make_feed: Callable[..., Any], make_dataset: Callable[..., Index], row: Any
) -> None:
    path = make_dataset(rows=(40,), shape=(256, 256, 3)).path
    one = make_feed(Shards(Index.read(path)), row)
    before = torch.cuda.memory_allocated(DEVICE)
    other = make_feed(Shards(Index.read(path)), row)
    assert torch.cuda.memory_allocated(DEVICE) == before
    one.close()
    other.close()
    gc.collect()
    assert torch.cuda.memory_allocated(DEVICE) <= before - len(set(row)) * 256 * 256 * 3


@every_feed
def test_a_file_that_is_replaced_later_is_read_on(
    make_feed: Callable[..., Any],
    make_dataset: Callable[..., Index],
    wait_until_held: Callable[[Any], None],
) -> None:
    shards = Shards(make_dataset(rows=(12,)))
    before = shards.maps[0].copy()
    feed = make_feed(shards)
    wait_until_held(feed)
    make_dataset(name="other.bin", rows=(12,), seed=9)
    shards.paths[0].with_name("other.bin").replace(shards.paths[0])
    np.testing.assert_array_equal(on_host(fetch(feed, np.arange(12))[0]), before)


@pytest.mark.parametrize("feed_name", [name for name in FEEDS if name != "resident"])
def test_a_file_that_is_truncated_later_is_an_error(
    make_feed: Callable[..., Any],
    make_dataset: Callable[..., Index],
    wait_until_held: Callable[[Any], None],
) -> None:
    shards = Shards(make_dataset(rows=(12, 12), shape=(50, 50, 3)))
    feed = make_feed(shards)
    wait_until_held(feed)
    fetch(feed, np.arange(24))
    with shards.paths[1].open("r+b") as file:
        file.truncate(10_000)
    with pytest.raises(FormatError, match="truncated"):
        fetch(feed, np.arange(24))


def test_a_buffer_is_not_used_again_before_the_copy_out_of_it_has_finished() -> None:
    staging = page_locked.Staging(DEVICE, soft_limit=2)
    targets = [torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE) for _ in range(20)]
    for number, target in enumerate(targets):
        buffer = staging.take(1 << 20)
        buffer.fill_(number)
        torch.cuda._sleep(20_000_000)
        target.copy_(buffer, non_blocking=True)
        staging.give_back(buffer)
        del buffer
    smallest = [int(target.min()) for target in targets]
    largest = [int(target.max()) for target in targets]
    assert smallest == largest == list(range(20))
