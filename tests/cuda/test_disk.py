"""Files that are held in RAM as a whole, in part or not at all, on CUDA: the feeds dma and disk."""

import gc
import itertools
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from memload import FeedError, FormatError, Loader, MemmapDataset
from memload.feeds import choice, held, reader

SIZE = 203
SHARDS = (100, 80, 23)
SHAPE = (31, 33, 3)  # rows of 3,069 bytes
ROW_BYTES = 31 * 33 * 3
#: How much of the files may be held: bytes, or a share.
LIMITS = {
    "nothing": 0,
    "one byte": 1,
    "some pages": 40_000,
    "half": 0.5,
    "all": 1.0,
    "default": None,
}

every_limit = pytest.mark.parametrize("limit", LIMITS)
some_read = pytest.mark.parametrize("limit", ["nothing", "half"])


def files_of(index):
    return [index.path.with_name(shard.file) for array in index.arrays for shard in array.shards]


def size_of(index):
    return sum(path.stat().st_size for path in files_of(index))


def loader_of(index, limit, batch_size=8, **options):
    """Return a Loader that shuffles, whose batches can be checked."""
    share = LIMITS[limit]
    cache_bytes = int(share * size_of(index)) if isinstance(share, float) else share
    options = {"shuffle": True, "columns": ["index"], "feed": "dma", **options}
    return Loader(index.path, batch_size, cache_bytes=cache_bytes, **options)


def chill(index):
    """Write the files of a data set to the disk, and remove them from the page cache."""
    for path in files_of(index):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return index


def stored(index, name="image"):
    """Return all rows of an array."""
    shards = index.array(name).shards
    return np.concatenate([np.load(index.path.with_name(shard.file)) for shard in shards])


def registered_bytes():
    return sum(file.held for file in held._held_files())


def on_host(tensor):
    assert tensor.is_cuda
    return tensor.cpu().numpy()


def check(batch, expected):
    """Check that the images of a batch are those of its samples. Returns their numbers."""
    numbers = batch.index.tolist()
    np.testing.assert_array_equal(on_host(batch.images.permute(0, 2, 3, 1)), expected[numbers])
    return numbers


def check_epoch(batches, expected):
    """Check batches, such as all those of a Loader. Returns the order of samples."""
    return list(itertools.chain(*(check(batch, expected) for batch in batches)))


def check_all(loader, expected):
    """Check an epoch of a Loader, and that it has every sample once."""
    assert sorted(check_epoch(loader, expected)) == list(range(len(expected)))


@pytest.fixture
def index(make_dataset, window_bytes):
    """A data set of three shards and 21 windows, and cold."""
    window_bytes(32768)
    return chill(make_dataset(rows=SHARDS, shape=SHAPE))


@pytest.fixture
def expected(index):
    """The images of `index`, which is cold."""
    images = stored(index)
    chill(index)
    return images


# Exactness.


@every_limit
@pytest.mark.parametrize(
    ("shape", "descr", "rows", "window"),
    [
        ((4, 6, 3), "|u1", (300, 200, 100), 8192),
        ((3, 5, 1), "<i2", (700,), 4096),
        ((16, 32, 2), "<f4", (64, 64), 4096),  # rows of 4,096 bytes, and windows of one row
        ((95, 100, 3), "|u1", (17, 13), 32768),
        ((419, 837, 3), "|u1", (3, 4), 1 << 21),  # above 1 MiB
    ],
    ids=str,
)
def test_every_row_is_as_it_is_stored(
    make_dataset, window_bytes, wait_until_held, limit, shape, descr, rows, window
):
    window_bytes(window)
    index = make_dataset(rows=rows, shape=shape, descr=descr)
    expected = stored(index)
    loader = loader_of(chill(index), limit, 13)
    fits = limit in ("all", "default") or LIMITS[limit] >= size_of(index)
    assert loader.feed.name == ("dma" if fits else "disk")
    check_all(loader, expected)
    wait_until_held(loader)
    check_all(loader, expected)


def random_dataset(rng, make_dataset):
    shape = (*rng.integers(1, 120, 2).tolist(), int(rng.integers(1, 5)))
    descr = str(rng.choice(["|u1", "|u1", "<u2", "<i4", "<f2", "<f4"]))
    row_bytes = int(np.prod(shape)) * np.dtype(descr).itemsize
    total = int(np.clip(2_000_000 // row_bytes, 3, 300))
    cuts = np.unique(rng.integers(1, total, int(rng.integers(0, 5))))
    rows = np.diff(np.concatenate([[0], cuts, [total]])).tolist()
    return make_dataset(rows=rows, shape=shape, descr=descr, seed=int(rng.integers(99)))


def random_order(rng, total):
    """Return arguments for an order with every sample once."""
    kind, batch_size = rng.integers(4), int(rng.choice([1, 7, 32, 64, 1000]))
    if kind == 0:
        return {"batch_size": batch_size}
    if kind == 1:
        return {"batch_size": batch_size, "sampler": rng.permutation(total).tolist()}
    if kind == 2:
        parts = np.array_split(rng.permutation(total), int(rng.integers(1, min(total, 20) + 1)))
        return {"batch_sampler": [part.tolist() for part in parts]}
    return {"batch_size": batch_size, "shuffle": True, "seed": int(rng.integers(99))}


@pytest.mark.parametrize("seed", range(40))
def test_random_data_sets_budgets_and_orders(
    make_dataset, add_array, window_bytes, wait_until_held, seed
):
    rng = np.random.default_rng(seed)
    index = random_dataset(rng, make_dataset)
    expected, total = stored(index), index.array("image").rows
    columns = ["index"]
    masks = rng.integers(0, 256, (total, *rng.integers(1, 70, 2))).astype(np.uint8)
    if rng.random() < 0.4:
        index, columns = add_array(index, "mask", masks, "mask"), ["mask", "index"]
    largest = max(array.row_bytes for array in index.arrays)
    window_bytes(4096 * int(-(-largest // 4096) + rng.integers(0, 9)))
    size = size_of(index)
    chosen = rng.integers(0, total, total) if rng.random() < 0.4 else np.arange(total)
    options = random_order(rng, total)
    options["prefetch_factor"] = int(rng.integers(1, 4))
    options["feed"] = str(rng.choice(["dma", "disk", "auto"]))
    if rng.random() < 0.8:
        options["cache_bytes"] = int(rng.choice([0, 1, 4096, rng.integers(size), size, 10 * size]))
    if rng.random() < 0.7:
        chill(index)
    dataset = MemmapDataset(index.path, columns=columns).subset(chosen.tolist())
    loader = Loader(dataset, **options)
    for _ in range(3):
        seen = []
        for batch in loader:
            numbers = check(batch, expected[chosen])
            if len(columns) > 1:
                np.testing.assert_array_equal(on_host(batch.mask), masks[chosen][numbers])
            seen += numbers
        assert sorted(seen) == list(range(total))
        if rng.random() < 0.5:
            chill(index)
        if rng.random() < 0.5:
            wait_until_held(loader)


@some_read
def test_batches_of_any_size_with_repeated_samples(index, expected, limit):
    batches = [[0], [5, 5, 5], list(range(SIZE)), [7, 100, 99, 7], [202] * 40, [1, 0], [-1]] * 3
    cache_bytes = size_of(index) // 2 if limit == "half" else 0
    loader = Loader(
        index.path, batch_sampler=batches, columns=["index"], feed="disk", cache_bytes=cache_bytes
    )
    for _ in range(2):
        seen = [check(batch, expected) for batch in loader]
        assert seen == [[number % SIZE for number in batch] for batch in batches]


@some_read
def test_files_are_read_through_the_page_cache_where_direct_reads_fail(
    index, expected, monkeypatch, caplog, limit
):
    monkeypatch.setattr(reader, "open_direct", lambda descriptor: None)
    loader = loader_of(index, limit)
    for _ in range(2):
        check_all(loader, expected)
    assert caplog.text.count("O_DIRECT") == 1


# Streams, threads and processes.


@every_limit
@pytest.mark.parametrize("batch_size", [2, 40])
def test_no_row_is_overwritten_while_the_consumer_is_behind(index, expected, limit, batch_size):
    loader = loader_of(index, limit, batch_size, prefetch_factor=1)
    sums = []
    for _ in range(3):
        for images, numbers in loader:
            torch.cuda._sleep(1_000_000)  # the next batches have long been asked for
            sums.append((images.double().sum((1, 2, 3)), numbers.clone()))
    found = on_host(torch.cat([total for total, _ in sums]))
    numbers = torch.cat([numbers for _, numbers in sums]).tolist()
    np.testing.assert_array_equal(found, expected.astype(float).sum((1, 2, 3))[numbers])


@some_read
def test_iterators_on_two_threads(index, expected, limit):
    loader = loader_of(index, limit)

    def epoch(_):
        with torch.cuda.stream(torch.cuda.Stream()):
            return check_epoch(loader, expected)

    with ThreadPoolExecutor(2) as threads:
        for seen in threads.map(epoch, range(4)):
            assert sorted(seen) == list(range(SIZE))


@pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"  # of fork, from Python 3.12 on
)
@some_read
def test_a_forked_child_reads_on_the_cpu_and_the_parent_goes_on(index, expected, limit):
    """The child frees nothing that is on CUDA: torch ends a process that does so after a fork."""
    loader = loader_of(index, limit, 4)
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


# The budget, and letting go.


def test_two_loaders_share_the_budget(make_dataset, window_bytes, wait_until_held):
    window_bytes(32768)
    indexes = [make_dataset(f"{name}.bin", rows=SHARDS, shape=SHAPE, seed=3) for name in "ab"]
    expected, size = stored(indexes[0]), size_of(indexes[0])
    budget = size * 3 // 2
    options = {"shuffle": True, "columns": ["index"], "feed": "dma", "cache_bytes": budget}
    loaders = [Loader(chill(index).path, 8, **options) for index in indexes]
    assert [loader.feed.name for loader in loaders] == ["dma", "disk"]
    for _ in range(2):
        for batches in zip(*loaders, strict=True):
            for batch in batches:
                check(batch, expected)
        for loader in loaders:
            wait_until_held(loader)
    training, validation = (loader.feed.counts for loader in loaders)
    assert training.rows_held == SIZE
    assert SIZE // 3 < validation.rows_held < SIZE // 2 + 1
    assert size < registered_bytes() <= budget


def test_loaders_of_one_file_hold_it_once(index, expected, wait_until_held, registered_addresses):
    one = loader_of(index, "all")
    wait_until_held(one)
    addresses = set(registered_addresses)
    other = loader_of(index, "nothing")
    assert (other.feed.name, registered_addresses) == ("dma", addresses)
    del one
    gc.collect()
    assert registered_bytes() == size_of(index)
    check_all(other, expected)
    assert other.feed.counts.hits == SIZE


def test_loaders_that_are_dropped_let_go_of_their_memory_and_budget(
    index, expected, wait_until_held, registered_addresses
):
    for _ in range(2):
        loader = loader_of(index, "half")
        wait_until_held(loader)
        check_all(loader, expected)
        assert 0 < loader.feed.counts.rows_held < SIZE
        assert 0 < registered_bytes() <= size_of(index) // 2
        assert registered_addresses
        del loader
        gc.collect()
        assert not registered_bytes()
        assert not registered_addresses


# Ends, early or not.


@every_limit
def test_early_exits_leave_nothing(index, expected, limit):
    """Fixtures look for threads, descriptors, maps and memory that are left."""
    loader = loader_of(index, limit, 5)
    for _ in range(20):
        for batch in loader:
            check(batch, expected)
            break
    for exits in range(4):
        other = loader_of(index, limit, 5)
        batches = iter(other)
        for _ in range(exits):
            check(next(batches), expected)
        del other, batches
    check_all(loader, expected)


@every_limit
@pytest.mark.parametrize("wait", [False, True])
def test_a_loader_is_dropped_while_the_device_copies_its_batches(
    index, expected, wait_until_held, limit, wait
):
    loader = loader_of(index, limit, 32)
    if wait:
        wait_until_held(loader)
    torch.cuda._sleep(50_000_000)  # the copies come after that
    batches = list(itertools.islice(loader, 3))
    del loader
    gc.collect()
    for batch in batches:
        check(batch, expected)


@some_read
def test_a_loader_may_be_dropped_while_it_is_iterated(index, expected, limit):
    batches = iter(loader_of(index, limit, 4, shuffle=False))
    seen = check(next(batches), expected)
    gc.collect()
    assert seen + check_epoch(batches, expected) == list(range(SIZE))


# Errors, and what cannot be had.


@every_limit
def test_a_file_that_is_truncated_while_it_is_open_is_an_error(
    index, expected, wait_until_held, limit
):
    path = files_of(index)[1]
    loader = loader_of(index, limit, 1, shuffle=False)
    wait_until_held(loader)
    batches = iter(loader)
    for _ in range(5):
        check(next(batches), expected)
    os.truncate(path, 50_000)
    for rest in (batches, loader):
        with pytest.raises(FormatError, match="truncated") as caught:
            list(rest)
        assert caught.value.path == str(path)
        del caught


def test_rows_that_cannot_be_read_are_an_error_after_the_batches_before_them(
    index, expected, failing_reads
):
    inode = files_of(index)[1].stat().st_ino
    loader = loader_of(index, "nothing", 1, shuffle=False)
    seen = []

    def read():
        for batch in loader:
            seen.extend(check(batch, expected))

    failing = failing_reads(lambda descriptor, *_: os.fstat(descriptor).st_ino == inode)
    with failing, pytest.raises(FormatError, match="cannot be read: Input/output error"):
        read()
    assert seen == list(range(SHARDS[0]))
    check_all(loader, expected)


def refuse_after(monkeypatch, count):
    """Let CUDA refuse all pages after the first ones, by giving it an address that it refuses."""
    register, calls = held.register, itertools.count()
    monkeypatch.setattr(
        held,
        "register",
        lambda address, size: register(address if next(calls) < count else 4096, size),
    )


def test_pages_that_cannot_be_registered_are_a_reason_for_another_feed(make_dataset, monkeypatch):
    monkeypatch.setattr(choice, "RESIDENT_SHARE", 0)
    refuse_after(monkeypatch, 0)
    index = make_dataset(rows=(12,), shape=(100, 100, 3))
    loader = Loader(index.path, 5, columns=["index"])
    assert loader.feed.name == "pinned"
    assert "dma: the pages of" in loader.feed.reason
    assert "cannot be registered with CUDA" in loader.feed.reason
    check_all(loader, stored(index))
    with pytest.raises(FeedError, match=r"cannot be registered with CUDA.*feed='pinned'"):
        Loader(index.path, 5, feed="dma")


def test_rows_are_read_from_where_pages_cannot_be_registered(index, expected, monkeypatch, caplog):
    refuse_after(monkeypatch, 3 + 4)  # each file is tried once
    loader = loader_of(index, "all")
    check_all(loader, expected)
    loader._get_pipeline().feed._filler._thread.join(30)
    before = loader.feed.counts
    assert 0 < before.rows_held == before.rows_to_hold < SIZE
    assert "cannot be registered with CUDA" in before.problem
    assert before.problem in caplog.text
    assert loader.feed.name == "disk"
    check_all(loader, expected)
    assert loader.feed.counts.hits - before.hits == before.rows_held


# What is reported.


@every_limit
def test_the_counts_add_up(index, expected, wait_until_held, limit):
    loader = loader_of(index, limit)
    wait_until_held(loader)
    before = loader.feed.counts
    share = {"one byte": 0, "some pages": 40_000 / size_of(index), "default": 1, "nothing": 0}
    missing = share.get(limit, LIMITS[limit]) * SIZE - before.rows_held
    assert -1 <= missing <= 3 * (4096 // ROW_BYTES + 3)  # headers, pages and rows that are cut
    for epoch in (1, 2):
        check_all(loader, expected)
        counts = loader.feed.counts
        assert (counts.rows, counts.rows_held) == (SIZE, before.rows_held)
        assert (counts.served, counts.hits) == (epoch * SIZE, epoch * before.rows_held)
    assert f"{before.rows_held:,} of {SIZE} rows are held" in str(loader.feed)


def test_the_first_batches_of_a_cold_file_are_counted_as_read(
    index, expected, may_hold, wait_until_held
):
    loader = loader_of(index, "all")
    check_all(loader, expected)
    counts = loader.feed.counts
    assert (counts.rows_to_hold, counts.served, counts.hits) == (SIZE, SIZE, 0)
    may_hold.set()
    wait_until_held(loader)
    check_all(loader, expected)
    assert loader.feed.counts[3:5] == (2 * SIZE, SIZE)
