"""Rows from the disk on CUDA: the feed "disk", and "dma" and "uva" while files are cold."""

import errno
import gc
import itertools
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import memload
from memload import FormatError, Index, Loader, MemmapDataset, ShuffledSampler, transforms
from memload.feeds import registered, row_reader

Make = Callable[..., Index]
Phases = Callable[..., Iterator[None]]
SetSize = Callable[[int], None]
Wait = Callable[[Any], None]

SIZE = 203
SHARDS = (100, 80, 23)
SHAPE = (31, 33, 3)  # rows of 3,069 bytes
ROW_BYTES = 31 * 33 * 3
#: The feeds, and how much of the files each may hold in RAM and on the device: bytes, or a share.
FEEDS: dict[str, tuple[str, float | int | None, float | None]] = {
    "dma": ("dma", None, None),
    "uva": ("uva", None, None),
    "disk, nothing held": ("disk", 0, None),
    "disk, one byte": ("disk", 1, None),
    "disk, one page": ("disk", 4096, None),
    "disk, half": ("disk", 0.5, None),
    "disk, some in RAM and some on the device": ("disk", 0.3, 0.3),
    "disk, half on the device": ("disk", 0, 0.5),
    "disk, all": ("disk", 1.0, None),
    "disk, by default": ("disk", None, None),
}

every_feed = pytest.mark.parametrize("feed", FEEDS)
#: Rows may have to be read in every epoch.
some_read = pytest.mark.parametrize(
    "feed", ["disk, nothing held", "disk, half", "disk, some in RAM and some on the device"]
)


def files_of(index: Index) -> list[Path]:
    return [index.path.with_name(shard.file) for array in index.arrays for shard in array.shards]


def options_of(feed: str, index: Index) -> dict[str, Any]:
    """Return the arguments of a Loader for one of FEEDS."""
    name, *limits = FEEDS[feed]
    size = sum(path.stat().st_size for path in files_of(index))
    cache_bytes, resident_bytes = (
        int(limit * size) if isinstance(limit, float) else limit for limit in limits
    )
    return {"feed": name, "cache_bytes": cache_bytes, "resident_bytes": resident_bytes}


def loader_of(index: Index, feed: str, batch_size: int = 8, **options: Any) -> Loader:
    """Return a Loader with one of FEEDS that shuffles, whose batches can be checked."""
    options = {"shuffle": True, "columns": ["index"], **options_of(feed, index), **options}
    return Loader(index.path, batch_size, **options)


def held_by(loader: Loader) -> Any:
    """Return the rows that the feed of a Loader holds."""
    return loader._get_pipeline().feed._held  # type: ignore[attr-defined]


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def chill(index: Index) -> Index:
    """Write the files of a data set to the disk, and remove them from the page cache."""
    for path in files_of(index):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return index


def stored(index: Index, name: str = "image") -> np.ndarray:
    """Return all rows of an array."""
    shards = index.array(name).shards
    return np.concatenate([np.load(index.path.with_name(shard.file)) for shard in shards])


def on_host(tensor: torch.Tensor) -> np.ndarray:
    assert tensor.is_cuda
    return tensor.cpu().numpy()


def counts_of(loader: Loader) -> Any:
    """Return the counts of rows that a Loader's feed reports."""
    assert loader.feed.counts is not None
    return loader.feed.counts


def check(batch: Any, expected: np.ndarray) -> list[int]:
    """Check that the images of a batch are those of its samples. Returns their numbers."""
    numbers = batch.index.tolist()
    np.testing.assert_array_equal(on_host(batch.images.permute(0, 2, 3, 1)), expected[numbers])
    return [int(number) for number in numbers]


def check_epoch(batches: Iterable[Any], expected: np.ndarray) -> list[int]:
    """Check batches, such as all those of a Loader. Returns the order of samples."""
    return list(itertools.chain(*(check(batch, expected) for batch in batches)))


def check_all(loader: Loader, expected: np.ndarray) -> None:
    """Check an epoch of a Loader, and that it has every sample once."""
    assert sorted(check_epoch(loader, expected)) == list(range(len(expected)))


@pytest.fixture
def index(make_dataset: Make, window_bytes: SetSize) -> Index:
    """A data set of three shards and 24 windows, and cold."""
    window_bytes(32768)
    return chill(make_dataset(rows=SHARDS, shape=SHAPE))


@pytest.fixture
def expected(index: Index) -> np.ndarray:
    """The images of `index`, which is cold."""
    images = stored(index)
    chill(index)
    return images


@pytest.fixture
def cold_then_held(wait_until_held: Wait) -> Phases:
    """Iterates twice: while the rows of Loaders are brought in, and once they are held."""

    def phases(*loaders: Loader) -> Iterator[None]:
        yield
        for loader in loaders:
            wait_until_held(loader)
        yield

    return phases


# Exactness.


@every_feed
@pytest.mark.parametrize(
    ("shape", "descr", "rows", "window"),
    [
        ((4, 6, 3), "|u1", (300, 200, 100), 8192),
        ((3, 5, 1), "<i2", (700,), 4096),
        ((7, 11, 3), "<i4", (57, 1, 90), 4096),
        ((16, 32, 2), "<f4", (64, 64), 4096),  # rows of 4,096 bytes
        ((37, 41, 3), "<f4", (9, 21), 65536),
        ((95, 100, 3), "|u1", (17, 13), 32768),  # just below 28 KiB
        ((96, 100, 3), "|u1", (17, 13), 32768),  # just above 28 KiB
        ((113, 127, 3), "|u1", (11, 8), 65536),
        ((419, 837, 3), "|u1", (3, 4), 1 << 21),  # above 1 MiB
    ],
    ids=str,
)
def test_every_row_is_as_it_is_stored(
    make_dataset: Make,
    window_bytes: SetSize,
    cold_then_held: Phases,
    feed: str,
    shape: Any,
    descr: str,
    rows: Any,
    window: int,
) -> None:
    window_bytes(window)
    index = make_dataset(rows=rows, shape=shape, descr=descr)
    expected = stored(index)
    options = options_of(feed, chill(index))
    loader = Loader(index.path, 13, shuffle=True, columns=["index"], **options)
    for _ in cold_then_held(loader):
        check_all(loader, expected)


def random_dataset(rng: np.random.Generator, make_dataset: Make) -> Index:
    shape = (*rng.integers(1, 120, 2).tolist(), int(rng.integers(1, 5)))
    descr = str(rng.choice(["|u1", "|u1", "<u2", "<i4", "<f2", "<f4"]))
    row_bytes = int(np.prod(shape)) * np.dtype(descr).itemsize
    total = int(np.clip(2_000_000 // row_bytes, 3, 300))
    cuts = np.unique(rng.integers(1, total, int(rng.integers(0, 5))))
    rows = np.diff(np.concatenate([[0], cuts, [total]])).tolist()
    return make_dataset(rows=rows, shape=shape, descr=descr, seed=int(rng.integers(99)))


@pytest.mark.parametrize("seed", range(40))
def test_random_data_sets_budgets_and_orders(
    make_dataset: Make, window_bytes: SetSize, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    index = random_dataset(rng, make_dataset)
    expected, row_bytes = stored(index), index.array("image").row_bytes
    window_bytes(4096 * int(-(-row_bytes // 4096) + rng.integers(0, 9)))
    total = len(expected)
    size = sum(path.stat().st_size for path in files_of(index))
    chosen = rng.integers(0, total, total) if rng.random() < 0.4 else np.arange(total)
    feed: Any = str(rng.choice(["disk", "disk", "disk", "auto", "dma", "uva"]))
    options: dict[str, Any] = {
        "shuffle": bool(rng.random() < 0.7),
        "prefetch_factor": int(rng.integers(1, 4)),
        "num_threads": int(rng.integers(0, 4)),
    }
    if feed in ("disk", "auto"):
        options["cache_bytes"] = int(rng.choice([0, 1, 4096, rng.integers(size), size, 10 * size]))
        options["resident_bytes"] = int(rng.choice([0, row_bytes, rng.integers(size), 10 * size]))
    if rng.random() < 0.7:
        chill(index)
    dataset = MemmapDataset(index.path, columns=["index"]).subset(chosen.tolist())
    loader = Loader(dataset, int(rng.choice([1, 7, 32, 64, 1000])), feed=feed, **options)
    for _ in range(2):
        check_all(loader, expected[chosen])
        if rng.random() < 0.5:
            chill(index)


@every_feed
def test_masks_and_features_beside_images(
    make_dataset: Make,
    add_array: Make,
    window_bytes: SetSize,
    cold_then_held: Phases,
    feed: str,
) -> None:
    """Masks, and features in an NPY file with a header of 128 bytes and in another order."""
    window_bytes(32768)
    rng = np.random.default_rng(4)
    masks = rng.integers(0, 60_000, (SIZE, 31, 33)).astype("<u2")
    features, row = rng.random((SIZE + 7, 401)), rng.integers(0, SIZE + 7, SIZE)
    index = add_array(make_dataset(rows=SHARDS, shape=SHAPE), "mask", masks, "mask")
    index = add_array(index, "features", features, "npy", other_rows={"features": row})
    images, options = stored(index), options_of(feed, index)
    chill(index)
    loader = Loader(index.path, 13, shuffle=True, columns=["mask", "features", "index"], **options)
    for _ in cold_then_held(loader):
        for batch in loader:
            numbers = check(batch, images)
            np.testing.assert_array_equal(on_host(batch.mask), masks[numbers])
            np.testing.assert_array_equal(on_host(batch.features), features[row[numbers]])


@every_feed
def test_a_view_of_scattered_and_repeated_samples(
    index: Index, expected: np.ndarray, cold_then_held: Phases, feed: str
) -> None:
    chosen = [199, 3, 3, 4, 5, 100, 99, 202, 0, 179, 180, 3]
    dataset = MemmapDataset(index.path, columns=["index"]).subset(chosen)
    loader = Loader(dataset, 8, **options_of(feed, index))
    for _ in cold_then_held(loader):
        assert check_epoch(loader, expected[chosen]) == list(range(12))


@every_feed
def test_batches_of_any_size_with_repeated_samples(
    index: Index, expected: np.ndarray, feed: str
) -> None:
    batches = [[0], [5, 5, 5], list(range(SIZE)), [7, 100, 99, 7], [202] * 40, [1, 0], [-1]] * 3
    loader = Loader(index.path, batch_sampler=batches, columns=["index"], **options_of(feed, index))
    for _ in range(2):
        seen = [check(batch, expected) for batch in loader]
        assert seen == [[number % SIZE for number in batch] for batch in batches]


@pytest.mark.parametrize("in_ram", [0.0, 0.3])
@pytest.mark.parametrize("on_device", [0.0, 0.4, 1.0])
def test_rows_are_held_in_ram_and_on_the_device(
    index: Index,
    expected: np.ndarray,
    wait_until_held: Wait,
    in_ram: float,
    on_device: float,
) -> None:
    limits = {
        "cache_bytes": int(in_ram * SIZE * ROW_BYTES),
        "resident_bytes": int(on_device * SIZE) * ROW_BYTES,
    }
    loader = Loader(index.path, 8, shuffle=True, columns=["index"], feed="disk", **limits)
    check_all(loader, expected)
    wait_until_held(loader)
    before = counts_of(loader)
    rows_in_ram = before.rows_held - before.rows_on_device
    assert abs(rows_in_ram - in_ram * SIZE) < 3
    assert before.rows_on_device == min(int(on_device * SIZE), SIZE - rows_in_ram)
    check_all(loader, expected)
    after = counts_of(loader)
    assert after.hits - before.hits == before.rows_held
    assert (after.bytes_read > before.bytes_read) == (before.rows_held < SIZE)


def test_loaders_of_the_same_rows_hold_them_on_the_device_once(
    index: Index, expected: np.ndarray, wait_until_held: Wait
) -> None:
    feed = "disk, half on the device"
    one = loader_of(index, feed, shuffle=False)
    wait_until_held(one)
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    other = loader_of(index, feed, shuffle=False)
    wait_until_held(other)
    assert counts_of(other).rows_on_device == counts_of(one).rows_on_device > 0
    assert torch.cuda.memory_allocated() == allocated
    del one
    gc.collect()
    assert check_epoch(other, expected) == list(range(SIZE))


# Order and resuming.


@every_feed
@pytest.mark.parametrize("num_threads", [0, 3])
def test_the_order_is_that_of_the_sampler(
    index: Index, expected: np.ndarray, feed: str, num_threads: int
) -> None:
    loader = loader_of(index, feed, 7, seed=3, num_threads=num_threads)
    for epoch in (0, 1, 5):
        loader.set_epoch(epoch)
        order = ShuffledSampler(SIZE, seed=3).take(epoch, np.arange(SIZE))
        assert check_epoch(loader, expected) == order.tolist()


@some_read
def test_an_epoch_is_resumed_with_other_batches(
    index: Index, expected: np.ndarray, feed: str
) -> None:
    loader = loader_of(index, feed, 9, seed=2)
    batches = iter(loader)
    seen = [*check(next(batches), expected), *check(next(batches), expected)]
    state = loader.state_dict()
    del batches
    resumed = loader_of(index, feed, 31, seed=2, prefetch_factor=1)
    resumed.load_state_dict(state)
    seen += check_epoch(resumed, expected)
    assert seen == ShuffledSampler(SIZE, seed=2).take(0, np.arange(SIZE)).tolist()


@some_read
def test_a_pickled_loader_reads_the_same_rows(
    index: Index, expected: np.ndarray, feed: str
) -> None:
    loader = loader_of(index, feed, 9)
    batches = iter(loader)
    seen = check(next(batches), expected)
    copy = pickle.loads(pickle.dumps(loader))
    assert seen + check_epoch(copy, expected) == seen + check_epoch(batches, expected)
    assert counts_of(copy).rows_to_hold == counts_of(loader).rows_to_hold


@some_read
def test_static_buffers_hold_each_batch_in_turn(
    index: Index, expected: np.ndarray, feed: str
) -> None:
    loader = loader_of(index, feed, 10, drop_last=True, static_buffers=True)
    addresses = set()
    for _ in range(2):
        for batch in loader:
            torch.cuda._sleep(1_000_000)
            check(batch, expected)
            addresses.add(batch.images.data_ptr())
    assert len(addresses) == 1


@some_read
def test_a_captured_graph_reads_static_buffers_while_rows_are_brought_in(
    index: Index, expected: np.ndarray, feed: str
) -> None:
    loader = loader_of(index, feed, 20, drop_last=True, static_buffers=True)
    first = next(iter(loader))
    images, numbers = torch.zeros_like(first.images), torch.zeros_like(first.index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        images.copy_(first.images)
        numbers.copy_(first.index)
    for _ in range(2):
        for _batch in loader:
            graph.replay()
            found = on_host(images.permute(0, 2, 3, 1))
            np.testing.assert_array_equal(found, expected[numbers.tolist()])


# Streams, and a consumer that is behind.


@every_feed
@pytest.mark.parametrize("batch_size", [2, 40])
def test_no_row_is_overwritten_while_the_consumer_is_behind(
    index: Index, expected: np.ndarray, feed: str, batch_size: int
) -> None:
    loader = loader_of(index, feed, batch_size, seed=1, prefetch_factor=1)
    sums = []
    for _ in range(3):
        for images, numbers in loader:
            torch.cuda._sleep(1_000_000)  # the next batches have long been asked for
            sums.append((images.double().sum((1, 2, 3)), numbers.clone()))
    torch.cuda.synchronize()
    found = torch.cat([total for total, _ in sums]).cpu().numpy()
    numbers = torch.cat([numbers for _, numbers in sums]).tolist()
    np.testing.assert_array_equal(found, expected.astype(float).sum((1, 2, 3))[numbers])


@some_read
def test_batches_that_are_held_stay_as_they_are(
    index: Index, expected: np.ndarray, feed: str
) -> None:
    loader = loader_of(index, feed, 4)
    batches = [*loader, *loader]
    del loader
    gc.collect()
    assert len(batches) == 2 * -(-SIZE // 4)
    for batch in batches:
        check(batch, expected)


@some_read
def test_a_transform_runs_on_the_loaders_stream(
    index: Index, expected: np.ndarray, feed: str
) -> None:
    streams = set()

    def halve(images: torch.Tensor) -> torch.Tensor:
        streams.add(torch.cuda.current_stream().cuda_stream)
        return images.float() / 2

    loader = Loader(index.path, 16, transform=halve, **options_of(feed, index))
    for _ in range(2):
        images = torch.cat([batch.images for batch in loader])
        np.testing.assert_array_equal(on_host(images), expected.transpose(0, 3, 1, 2) / 2)
    assert len(streams) == 1
    assert torch.cuda.current_stream().cuda_stream not in streams


@some_read
def test_transforms_of_memload_give_what_they_give_on_the_cpu(index: Index, feed: str) -> None:
    options: Any = {"shuffle": True, "seed": 5, "transform": transforms.train(16)}
    ours = Loader(index.path, 16, **options, **options_of(feed, index))
    theirs = Loader(index.path, 16, device="cpu", **options)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.images.cpu(), other.images, rtol=1e-4, atol=1e-4)
        assert one.labels.tolist() == other.labels.tolist()


# Several Loaders, iterators, ranks and processes.


@some_read
def test_ranks_hold_the_same_rows_and_see_every_sample(
    index: Index,
    expected: np.ndarray,
    wait_until_held: Wait,
    registered_addresses: set[int],
    feed: str,
) -> None:
    loaders = [loader_of(index, feed, rank=rank, num_replicas=2) for rank in range(2)]
    wait_until_held(loaders[0])
    held_by_one = set(registered_addresses)
    wait_until_held(loaders[1])
    assert registered_addresses == held_by_one
    seen = [check_epoch(loader, expected) for loader in loaders]
    assert len(seen[0]) == len(seen[1])
    assert set(seen[0] + seen[1]) == set(range(SIZE))
    counts = [counts_of(loader) for loader in loaders]
    assert counts[0].rows_held == counts[1].rows_held


#: Reads an epoch as rank 1 of 2; prints the samples, and which rows are held.
RANK = """
import json, sys
import numpy as np
from memload import Loader
from memload.feeds import windows

windows.WINDOW_BYTES = 32768
path, size, options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
loader = Loader(path, 8, rank=1, num_replicas=2, columns=["index"], **options)
loader._get_pipeline().feed._held._thread.join(30)
sums = [[int(x) for x in batch.images.double().sum((1, 2, 3)).tolist()] for batch in loader]
held = loader._get_pipeline().feed._held.find(np.arange(size)).are_held.tolist()
print(json.dumps([sum(sums, []), held]))
"""


@pytest.mark.slow
def test_two_processes_hold_the_same_rows(
    index: Index, expected: np.ndarray, wait_until_held: Wait
) -> None:
    options = options_of("disk, half", index)
    arguments = [str(index.path), str(SIZE), json.dumps(options)]
    paths = [str(Path(memload.__file__).parents[1]), *sys.path]
    ours = loader_of(index, "disk, half", shuffle=False, rank=0, num_replicas=2)
    wait_until_held(ours)
    ended = subprocess.run(
        [sys.executable, "-c", RANK, *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert ended.stderr == ""
    found, held = json.loads(ended.stdout)
    seen = check_epoch(ours, expected)
    others = sorted(set(range(SIZE)) - set(seen))
    assert sorted(found) == sorted(expected[others].sum((1, 2, 3), dtype=int).tolist())
    assert held == held_by(ours).find(np.arange(SIZE)).are_held.tolist()
    assert 0 < sum(held) < SIZE


@some_read
def test_iterators_on_two_threads(index: Index, expected: np.ndarray, feed: str) -> None:
    loader = loader_of(index, feed)

    def epoch(_: int) -> list[int]:
        with torch.cuda.stream(torch.cuda.Stream()):
            return check_epoch(loader, expected)

    with ThreadPoolExecutor(2) as threads:
        for seen in threads.map(epoch, range(4)):
            assert sorted(seen) == list(range(SIZE))


def test_training_and_validation_together_stay_within_the_budget(
    make_dataset: Make,
    window_bytes: SetSize,
    cold_then_held: Phases,
) -> None:
    window_bytes(32768)
    paths = [make_dataset(f"{name}.bin", rows=SHARDS, shape=SHAPE, seed=3) for name in "ab"]
    expected = stored(paths[0])
    size = sum(path.stat().st_size for path in files_of(paths[0]))
    budget = size * 3 // 2
    loaders = [
        Loader(chill(one).path, 8, shuffle=True, columns=["index"], feed="disk", cache_bytes=budget)
        for one in paths
    ]
    for _ in cold_then_held(*loaders):
        for one, other in zip(*loaders, strict=True):
            check(one, expected)
            check(other, expected)
    training, validation = (counts_of(loader) for loader in loaders)
    assert training.rows_held == SIZE
    assert SIZE // 3 < validation.rows_held < SIZE // 2 + 1
    assert size < registered.registered_bytes() <= budget


def test_a_loader_that_is_gone_leaves_its_budget_to_the_next(index: Index) -> None:
    first = loader_of(index, "disk, half")
    rows_to_hold = counts_of(first).rows_to_hold
    assert 0 < rows_to_hold < SIZE
    del first
    gc.collect()
    assert counts_of(loader_of(index, "disk, half")).rows_to_hold == rows_to_hold


@pytest.mark.parametrize(
    ("first", "second"),
    [("disk, one page", "dma"), ("disk, one page", "uva"), ("disk, half", "disk, all"),
     ("disk, all", "disk, half"), ("dma", "disk, nothing held")],
)  # fmt: skip
def test_loaders_that_hold_different_parts_of_one_file(
    index: Index,
    expected: np.ndarray,
    cold_then_held: Phases,
    first: str,
    second: str,
) -> None:
    one, other = (loader_of(index, feed) for feed in (first, second))
    for _ in cold_then_held(one, other):
        for both in zip(one, other, strict=True):
            for batch in both:
                check(batch, expected)
    del one, both
    gc.collect()
    check_all(other, expected)


@pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"  # of fork, from Python 3.12 on
)
@every_feed
def test_a_forked_child_reads_on_the_cpu_and_the_parent_goes_on(
    index: Index, expected: np.ndarray, feed: str
) -> None:
    """The child frees nothing that is on CUDA: torch ends a process that does so after a fork."""
    loader = loader_of(index, feed, 4)
    batches = iter(loader)
    seen = check(next(batches), expected)
    gc.collect()  # the child shall find no garbage
    child = os.fork()
    if not child:
        status = 1
        try:
            torch.set_num_threads(1)
            images = [batch.images for batch in Loader(index.path, 16, device="cpu")]
            found = torch.cat(images).permute(0, 2, 3, 1).numpy()
            status = 0 if np.array_equal(found, expected) else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    seen += check_epoch(batches, expected)
    assert sorted(seen) == list(range(SIZE))
    check_all(loader, expected)


# Ends, early or not.


@every_feed
def test_early_exits_leave_nothing(index: Index, expected: np.ndarray, feed: str) -> None:
    """Fixtures look for threads, descriptors, maps and memory that are left."""
    loader = loader_of(index, feed, 5)
    for _ in range(20):
        check(next(iter(loader)), expected)
    for exits in range(4):
        other = loader_of(index, feed, 5, shuffle=False)
        batches = iter(other)
        for _ in range(exits):
            check(next(batches), expected)
        del other, batches
    check_all(loader, expected)


@every_feed
@pytest.mark.parametrize("wait", [False, True])
def test_a_loader_is_dropped_while_the_device_copies_its_batches(
    index: Index,
    expected: np.ndarray,
    wait_until_held: Wait,
    feed: str,
    wait: bool,
) -> None:
    loader = loader_of(index, feed, 32)
    if wait:
        wait_until_held(loader)
    torch.cuda._sleep(50_000_000)  # the copies come after that
    batches = list(itertools.islice(loader, 3))
    del loader
    gc.collect()
    for batch in batches:
        check(batch, expected)


@some_read
def test_a_loader_may_be_dropped_while_it_is_iterated(
    index: Index, expected: np.ndarray, feed: str
) -> None:
    batches = iter(loader_of(index, feed, 4, shuffle=False))
    seen = check(next(batches), expected)
    gc.collect()
    assert seen + check_epoch(batches, expected) == list(range(SIZE))


# Errors, and what cannot be had.


@pytest.fixture
def bad_row(index: Index, failing_reads: Any) -> Iterator[tuple[int, Path]]:
    """A row that the disk cannot read, and the file that holds it: reading raises EIO."""
    row_in_shard, path = 50, files_of(index)[1]
    bad_byte, inode = 4096 + row_in_shard * ROW_BYTES + 5, path.stat().st_ino

    def fails(descriptor: int, offset: int, size: int) -> bool:
        return os.fstat(descriptor).st_ino == inode and offset <= bad_byte < offset + size

    with failing_reads(fails):
        yield SHARDS[0] + row_in_shard, path


@pytest.mark.parametrize("feed", ["dma", "uva", "disk, nothing held"])
def test_a_row_that_cannot_be_read_is_an_error_after_the_batches_before_it(
    index: Index,
    expected: np.ndarray,
    bad_row: tuple[int, Path],
    may_register: threading.Event,
    feed: str,
) -> None:
    row, path = bad_row
    # A sample alone in its batch, and not beside one that is read too.
    order = [*range(0, row - 8, 10), row, *range(row + 8, SIZE)]
    loader = loader_of(index, feed, 1, shuffle=False, sampler=order)
    seen = []

    def read() -> None:
        for batch in loader:
            seen.extend(check(batch, expected))

    with pytest.raises(FormatError, match="cannot be read") as caught:
        read()
    assert seen == order[: order.index(row)]
    assert f"row {row}" in str(caught.value)
    assert caught.value.path == str(path)
    assert os.strerror(errno.EIO) in str(caught.value)
    del caught
    may_register.set()
    others = [number for number in order if number != row]
    loader = loader_of(index, feed, shuffle=False, sampler=others)
    assert check_epoch(loader, expected) == others


@some_read
def test_after_a_read_error_the_loader_goes_on(
    index: Index, expected: np.ndarray, failing_reads: Any, feed: str
) -> None:
    loader = loader_of(index, feed, 4)
    for _ in range(2):
        with failing_reads(lambda *_: True), pytest.raises(FormatError, match=r"row \d+ is: Input"):
            list(loader)
        check_all(loader, expected)


@every_feed
def test_a_file_that_is_truncated_while_it_is_open_is_an_error(
    index: Index, expected: np.ndarray, feed: str
) -> None:
    path = files_of(index)[1]
    loader = loader_of(index, feed, 1)
    batches = iter(loader)
    for _ in range(5):
        check(next(batches), expected)
    os.truncate(path, 50_000)
    with pytest.raises(FormatError, match="truncated") as caught:
        list(batches)
    assert caught.value.path == str(path)
    del batches, caught
    with pytest.raises(FormatError, match="truncated"):
        list(loader)


@every_feed
def test_windows_that_cannot_be_registered_are_a_warning(
    index: Index,
    expected: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    feed: str,
) -> None:
    register, windows = registered.register, itertools.count()

    def refuse(address: int, size: int, flags: int) -> None:
        if next(windows) > 2:  # the first is the probe
            flags = 1 << 30  # CUDA refuses it
        register(address, size, flags)

    monkeypatch.setattr(registered, "register", refuse)
    loader = loader_of(index, feed)
    check_all(loader, expected)
    held_by(loader)._thread.join(30)
    check_all(loader, expected)
    warned = warnings_in(caplog)
    refused = next(windows) > 3
    assert len(warned) == refused
    assert not refused or "cannot be registered with CUDA" in warned[0]
    counts = counts_of(loader)
    assert counts.hits < counts.served if refused else counts.hits <= counts.served


def test_too_little_memory_on_the_device_is_a_warning(
    index: Index,
    expected: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("memload.feeds.device_rows._allocate", full)
    loader = loader_of(index, "disk, some in RAM and some on the device")
    for _ in range(2):
        check_all(loader, expected)
    counts = counts_of(loader)
    assert (counts.rows_on_device, counts.rows_to_hold > 0) == (0, True)
    assert "resident_bytes" in counts.problem
    assert counts.problem in caplog.text


def test_when_ram_runs_short_no_more_rows_are_held(
    index: Index,
    expected: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    available = 600_000  # of which a quarter stays free
    monkeypatch.setattr("memload.feeds.held.available_memory", lambda: available)
    loader = loader_of(index, "dma")
    check_all(loader, expected)
    held_by(loader)._thread.join(30)
    check_all(loader, expected)
    assert 0 < registered.registered_bytes() <= available * 3 // 4
    counts = counts_of(loader)
    assert 0 < counts.rows_held == counts.rows_to_hold < SIZE
    assert "RAM" in counts.problem
    assert counts.problem in caplog.text


@pytest.fixture
def without_direct_reads(tmp_path: Path, write_dataset: Make) -> Iterator[Index]:
    """A data set on tmpfs, whose files cannot be read past the page cache."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("needs /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield write_dataset(Path(folder), rows=SHARDS, shape=SHAPE)


def test_a_file_system_without_direct_reads_serves_and_says_so_once(
    without_direct_reads: Index,
    window_bytes: SetSize,
    caplog: pytest.LogCaptureFixture,
) -> None:
    window_bytes(32768)
    index, expected = without_direct_reads, stored(without_direct_reads)
    for feed in ("disk, nothing held", "disk, half"):
        loader = loader_of(index, feed)
        for _ in range(2):
            check_all(loader, expected)
    warned = warnings_in(caplog)
    assert len(warned) == 1
    assert "O_DIRECT" in warned[0]


def test_without_direct_reads_a_file_beyond_both_budgets_goes_through_threads(
    without_direct_reads: Index,
) -> None:
    index, expected = without_direct_reads, stored(without_direct_reads)
    loader = Loader(index.path, 8, columns=["index"], cache_bytes=65536, resident_bytes=0)
    assert loader.feed.name == "pinned"
    assert "page cache" in loader.feed.reason
    assert check_epoch(loader, expected) == list(range(SIZE))


@every_feed
def test_files_are_read_through_the_page_cache_where_direct_reads_fail(
    index: Index, expected: np.ndarray, monkeypatch: pytest.MonkeyPatch, feed: str
) -> None:
    monkeypatch.setattr(row_reader, "open_direct", lambda descriptor: None)
    loader = loader_of(index, feed)
    for _ in range(2):
        check_all(loader, expected)


# What is reported.


@every_feed
def test_the_counts_add_up(
    index: Index, expected: np.ndarray, wait_until_held: Wait, feed: str
) -> None:
    loader = loader_of(index, feed)
    wait_until_held(loader)
    before = counts_of(loader)
    share = {"disk, one byte": 0, "disk, one page": 0}
    limits = [limit for limit in FEEDS[feed][1:] if limit is not None] or [1]
    assert abs(before.rows_held - share.get(feed, sum(limits)) * SIZE) < 3
    for epoch in (1, 2):
        check_epoch(loader, expected)
        counts = counts_of(loader)
        assert (counts.rows, counts.rows_held) == (SIZE, before.rows_held)
        assert (counts.served, counts.hits) == (epoch * SIZE, epoch * before.rows_held)
        missing = epoch * (SIZE - before.rows_held)
        bytes_read = counts.bytes_read - before.bytes_read
        assert missing * ROW_BYTES <= bytes_read <= missing * (ROW_BYTES + 2 * 4096)
        assert (counts.seconds_reading > before.seconds_reading) == (missing > 0)
    assert f"{before.rows_held} of {SIZE} rows " in str(loader.feed)


def test_the_first_batches_of_a_cold_file_are_counted_as_read(
    index: Index, may_register: threading.Event, wait_until_held: Wait
) -> None:
    loader = loader_of(index, "dma")
    list(loader)
    counts = counts_of(loader)
    assert (counts.rows_to_hold, counts.served, counts.hits) == (SIZE, SIZE, 0)
    may_register.set()
    wait_until_held(loader)
    list(loader)
    counts = counts_of(loader)
    assert (counts.served, counts.hits) == (2 * SIZE, SIZE)


def test_a_file_beyond_both_budgets_is_read_from_the_disk(
    index: Index, expected: np.ndarray
) -> None:
    loader = Loader(
        index.path, 8, shuffle=True, columns=["index"], cache_bytes=65536, resident_bytes=0
    )
    assert loader.feed.name == "disk"
    assert "cache_bytes" in loader.feed.reason
    check_all(loader, expected)
