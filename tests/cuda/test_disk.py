"""Files that are held in RAM as a whole, in part or not at all, on CUDA: the feeds dma and disk."""

import gc
import itertools
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from memload import FeedError, Loader, MemmapDataset
from memload.feeds import choice, held, reader

SIZE = 203
SHARDS = (100, 80, 23)
SHAPE = (31, 33, 3)  # rows of 3,069 bytes
#: Which share of the files may be held.
SHARES = {"nothing": 0, "half": 0.5, "all": 1}

every_share = pytest.mark.parametrize("share", SHARES.values(), ids=list(SHARES))


def files_of(index):
    return [index.path.with_name(shard.file) for array in index.arrays for shard in array.shards]


def size_of(index):
    return sum(path.stat().st_size for path in files_of(index))


def loader_of(index, share, batch_size=8, **options):
    """Return a Loader that shuffles, whose batches can be checked."""
    options = {"shuffle": True, "columns": ["index"], "feed": "dma", **options}
    return Loader(index.path, batch_size, cache_bytes=int(share * size_of(index)), **options)


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


def check_all(batches, expected):
    """Check batches, such as a Loader, and that they have every sample once."""
    seen = itertools.chain(*(check(batch, expected) for batch in batches))
    assert sorted(seen) == list(range(len(expected)))


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


def random_dataset(rng, make_dataset):
    shape = (*rng.integers(1, 120, 2).tolist(), int(rng.integers(1, 5)))
    descr = str(rng.choice(["|u1", "|u1", "<u2", "<i4", "<f2", "<f4"]))
    if rng.random() < 0.2:  # rows of whole pages, and rows above 1 MiB
        shape, descr = [((16, 32, 2), "<f4"), ((419, 837, 3), "|u1")][int(rng.integers(2))]
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


@pytest.mark.parametrize("seed", range(50))
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


def test_files_are_read_through_the_page_cache_where_direct_reads_fail(
    index, expected, monkeypatch, caplog
):
    monkeypatch.setattr(reader, "open_direct", lambda descriptor: None)
    loader = loader_of(index, 0.5)
    for _ in range(2):
        check_all(loader, expected)
    assert caplog.text.count("O_DIRECT") == 1


@every_share
def test_iterators_on_two_threads(index, expected, share):
    loader = loader_of(index, share)

    def epoch(_):
        with torch.cuda.stream(torch.cuda.Stream()):
            check_all(loader, expected)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(epoch, range(4)))


@pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"  # of fork, from Python 3.12 on
)
@every_share
def test_a_forked_child_reads_on_the_cpu_and_the_parent_goes_on(index, expected, share):
    """The child frees nothing that is on CUDA: torch ends a process that does so after a fork."""
    batches = iter(loader_of(index, share, 4))
    first = next(batches)
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
    check_all([first, *batches], expected)


# The budget, and letting go.


def test_two_loaders_share_the_budget(make_dataset, window_bytes, wait_until_held):
    window_bytes(32768)
    indexes = [make_dataset(f"{name}.bin", rows=SHARDS, shape=SHAPE, seed=3) for name in "ab"]
    expected, size = stored(indexes[0]), size_of(indexes[0])
    loaders = [loader_of(chill(index), 1.5) for index in indexes]
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
    assert size < registered_bytes() <= size * 3 // 2


def test_loaders_of_one_file_hold_it_once(index, expected, wait_until_held, registered_addresses):
    one = loader_of(index, 1)
    wait_until_held(one)
    addresses = set(registered_addresses)
    other = loader_of(index, 0)
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
        loader = loader_of(index, 0.5)
        wait_until_held(loader)
        check_all(loader, expected)
        assert 0 < loader.feed.counts.rows_held < SIZE
        assert 0 < registered_bytes() <= size_of(index) // 2
        assert registered_addresses
        del loader
        gc.collect()
        assert not registered_bytes()
        assert not registered_addresses


@every_share
@pytest.mark.parametrize("wait", [False, True])
def test_a_loader_is_dropped_while_the_device_copies_its_batches(
    index, expected, wait_until_held, share, wait
):
    loader = loader_of(index, share, 32)
    if wait:
        wait_until_held(loader)
    torch.cuda._sleep(50_000_000)  # the copies come after that
    batches = list(itertools.islice(loader, 3))
    del loader
    gc.collect()
    for batch in batches:
        check(batch, expected)


# What cannot be had, and what is reported.


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
    assert "dma: 4,096 bytes of page cache cannot be registered" in loader.feed.reason
    check_all(loader, stored(index))
    with pytest.raises(FeedError, match=r"cannot be registered with CUDA.*feed='pinned'"):
        Loader(index.path, 5, feed="dma")


def test_rows_are_read_from_where_pages_cannot_be_registered(index, expected, monkeypatch, caplog):
    refuse_after(monkeypatch, 3 + 4)  # each file is tried once
    loader = loader_of(index, 1)
    check_all(loader, expected)
    loader._get_pipeline().feed._filler._thread.join(30)
    before = loader.feed.counts
    assert 0 < before.rows_held == before.rows_to_hold < SIZE
    assert "cannot be registered with CUDA" in before.problem
    assert before.problem in caplog.text
    assert loader.feed.name == "disk"
    check_all(loader, expected)
    assert loader.feed.counts.hits - before.hits == before.rows_held


def test_the_first_batches_of_a_cold_file_are_counted_as_read(
    index, expected, may_hold, wait_until_held, registered_addresses
):
    loader = loader_of(index, 1)
    check_all(loader, expected)
    counts = loader.feed.counts
    assert (counts.rows_to_hold, counts.served, counts.hits) == (SIZE, SIZE, 0)
    assert not registered_addresses
    may_hold.set()
    wait_until_held(loader)
    check_all(loader, expected)
    assert loader.feed.counts[3:5] == (2 * SIZE, SIZE)
