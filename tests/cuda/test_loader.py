import gc
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from memload import (
    CudaPrefetcher,
    Loader,
    MemmapDataset,
    ShuffledSampler,
    fast_collate,
    transforms,
)

SIZE = 203
#: Arguments of a Loader. The budget of "disk" holds half of the files of `path`.
FEEDS = {
    "resident": {"feed": "resident"},
    "dma": {"feed": "dma"},
    "disk": {"feed": "disk", "cache_bytes": 90_000},
    "pinned": {"feed": "pinned"},
}

every_feed = pytest.mark.parametrize("feed", FEEDS)


@pytest.fixture
def path(make_dataset):
    columns = {"label": np.arange(SIZE) % 3, "number": np.arange(SIZE)}
    return Path(make_dataset(rows=(100, 80, 23), shape=(16, 18, 3), columns=columns).path)


@every_feed
@pytest.mark.parametrize("batch_size", [1, 7, 64, SIZE, 1000])
def test_batches_are_those_of_the_cpu(path, feed, batch_size):
    ours = Loader(path, batch_size, shuffle=True, seed=5, **FEEDS[feed])
    theirs = Loader(path, batch_size, shuffle=True, seed=5, device="cpu")
    assert ours.device == torch.device("cuda", 0)
    assert ours.feed.name == feed
    for _ in range(2):
        for one, other in zip(ours, theirs, strict=True):
            assert one.images.is_cuda
            assert one.labels.is_cuda
            assert one.images.permute(0, 2, 3, 1).is_contiguous()
            assert torch.equal(one.images.cpu(), other.images)
            assert torch.equal(one.labels.cpu(), other.labels)


@every_feed
@pytest.mark.parametrize("own_stream", [False, True])
def test_no_batch_is_overwritten_while_the_consumer_is_behind(path, feed, own_stream):
    stream = torch.cuda.Stream() if own_stream else torch.cuda.default_stream()
    sums = []
    with torch.cuda.stream(stream):
        loader = Loader(path, 16, shuffle=True, seed=1, **FEEDS[feed], columns=["number"])
        for _ in range(4):
            for images, numbers in loader:
                torch.cuda._sleep(3_000_000)  # the next batches have long been asked for
                sums.append((images.double().sum((1, 2, 3)), numbers.clone()))
    torch.cuda.synchronize()
    dataset = MemmapDataset(path)
    expected = torch.stack([dataset[sample][0].double().sum() for sample in range(SIZE)])
    order = np.concatenate(
        [ShuffledSampler(SIZE, seed=1).take(epoch, np.arange(SIZE)) for epoch in range(4)]
    )
    assert torch.cat([numbers for _, numbers in sums]).tolist() == order.tolist()
    assert torch.equal(
        torch.cat([total for total, _ in sums]).cpu(), expected[torch.from_numpy(order)]
    )


def test_resident_batches_are_exact_while_the_current_stream_changes(path):
    """Numbers of samples go up on one stream; batches are gathered on others."""
    loader = Loader(path, 16, shuffle=True, feed="resident", columns=["index"])
    expected = MemmapDataset(path).gather(np.arange(SIZE)).double().sum((1, 2, 3))
    streams = [torch.cuda.Stream() for _ in range(3)]
    found = []
    for epoch in range(6):
        batches, count = iter(loader), len(loader) if epoch % 2 else 5  # an early break, too
        for step in range(count):
            stream = streams[(epoch + step) % 3]
            with torch.cuda.stream(stream):
                if step % 3 == 0:
                    torch.cuda._sleep(20_000_000)  # the others get ahead of it
                batch = next(batches)
                found.append((batch.images.double().sum((1, 2, 3)), batch.index.clone()))
            del batch  # while its stream sleeps
        del batches
        for stream in streams:  # memory that is free again is overwritten
            with torch.cuda.stream(stream):
                for _ in range(3):
                    torch.zeros(SIZE, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    assert len(found) == 3 * (5 + len(loader))
    for total, numbers in found:
        assert torch.equal(total.cpu(), expected[numbers.cpu()])


@every_feed
def test_tensors_that_are_dropped_are_not_overwritten_before_they_were_read(path, feed):
    """The consumer's stream is told to the allocator, so its memory is not used too early."""
    stream = torch.cuda.Stream()
    loader = Loader(path, 16, columns=["index"], **FEEDS[feed])
    expected = MemmapDataset(path).gather(np.arange(SIZE)).double().sum((1, 2, 3))
    totals = []
    for _ in range(3):
        with torch.cuda.stream(stream):
            batches = iter(loader)
            for _ in range(len(loader)):
                images = next(batches).images
                torch.cuda._sleep(3_000_000)
                totals.append(images.double().sum((1, 2, 3)))
                del images  # not read yet
    torch.cuda.synchronize()
    assert torch.equal(torch.cat(totals).cpu(), expected.repeat(3))


DEFAULTS = [
    (torch.set_default_device, "cuda", None),
    (torch.set_default_dtype, torch.float64, torch.float32),
    (torch.set_default_dtype, torch.bfloat16, torch.float32),
]
every_default = pytest.mark.parametrize(("set_default", "value", "before"), DEFAULTS)


def under_default(function, set_default, value, before):
    """Return what a function returns with torch's default device and dtype, and with others."""
    expected = function()
    set_default(value)
    try:
        found = function()
    finally:
        set_default(before)
    return found, expected


def check_equal(found, expected):
    """Check that lists of batches are the same, also in dtypes and devices."""
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        for tensor, like in zip(one, other, strict=True):
            assert (tensor.dtype, tensor.device) == (like.dtype, like.device)
            assert torch.equal(tensor, like)


@every_default
@every_feed
@pytest.mark.parametrize("num_threads", [0, 2])
def test_batches_do_not_depend_on_torchs_defaults(
    path, feed, num_threads, set_default, value, before
):
    def batches():
        options = {"shuffle": True, "columns": ["number", "label", "index"], **FEEDS[feed]}
        return list(Loader(path, 50, num_threads=num_threads, **options))

    check_equal(*under_default(batches, set_default, value, before))


@every_default
def test_gathering_collating_and_moving_do_not_depend_on_torchs_defaults(
    path, set_default, value, before
):
    dataset = MemmapDataset(path)

    def tensors():
        collated = fast_collate([dataset[number] for number in range(9)])
        moved = list(CudaPrefetcher(DataLoader(dataset, 50, collate_fn=fast_collate)))
        return [[dataset.gather([3, 100, 202])], collated, *moved]

    check_equal(*under_default(tensors, set_default, value, before))


@every_feed
def test_held_batches_stay(path, feed):
    batches = list(Loader(path, 8, **FEEDS[feed], columns=["index"]))
    index = torch.cat([batch.index for batch in batches])
    assert (index.is_cuda, index.tolist()) == (True, list(range(SIZE)))
    images = torch.cat([batch.images for batch in batches]).cpu()
    assert torch.equal(images, MemmapDataset(path).gather(np.arange(SIZE)).permute(0, 3, 1, 2))


@every_feed
def test_memory_is_bounded_however_far_the_host_is_ahead(make_dataset, feed):
    path = make_dataset(rows=(500,), shape=(128, 128, 3)).path
    loader = Loader(path, 50, shuffle=True, **FEEDS[feed], prefetch_factor=2)
    batch_bytes = 50 * 128 * 128 * 3
    next(iter(loader))
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(10):
        for images, _labels in loader:
            torch.cuda._sleep(2_000_000)
            del images
    assert torch.cuda.max_memory_allocated() - before < 16 * batch_bytes
    torch.cuda.synchronize()
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + batch_bytes


@every_feed
def test_a_transform_runs_ahead_on_the_loaders_stream(path, feed):
    streams = set()

    def halve(images):
        streams.add(torch.cuda.current_stream().cuda_stream)
        return images.float() / 2

    loader = Loader(path, 50, transform=halve, **FEEDS[feed])
    images = torch.cat([batch.images for batch in loader])
    assert torch.equal(
        images.cpu(), MemmapDataset(path).gather(np.arange(SIZE)).permute(0, 3, 1, 2) / 2
    )
    list(loader)
    assert len(streams) == 1
    assert torch.cuda.current_stream().cuda_stream not in streams


@every_feed
def test_an_exception_of_the_transform_arrives_and_the_next_epoch_works(path, feed):
    wrong = [True]

    def fail(images):
        if wrong[0]:
            raise KeyError("mine")
        return images

    loader = Loader(path, 50, transform=fail, **FEEDS[feed])
    for _ in range(3):
        with pytest.raises(KeyError, match="mine"):
            list(loader)
    wrong[0] = False
    assert sum(len(batch.images) for batch in loader) == SIZE


@every_feed
def test_a_hundred_early_exits_leave_no_memory(path, feed):
    loader = Loader(path, 20, shuffle=True, **FEEDS[feed])
    next(iter(loader))
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(100):
        next(iter(loader))
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before


@every_feed
def test_two_loaders_at_once(path, feed):
    dataset = MemmapDataset(path, columns=["number"])
    training = Loader(dataset.subset(range(150)), 16, shuffle=True, **FEEDS[feed])
    validation = Loader(dataset.subset(range(150, SIZE)), 16, **FEEDS[feed])
    seen = []
    for one, other in zip(training, validation, strict=False):
        seen.append(other.number)
        assert one.number.max() < 150
    assert torch.cat(seen).tolist() == list(range(150, SIZE))


def test_small_data_sets_are_resident_and_the_log_says_so(path, caplog):
    with caplog.at_level("INFO", logger="memload"):
        loader = Loader(path, 10)
        assert loader.feed.name == "resident"
    assert len(caplog.records) == 1
    assert "resident: " in caplog.text
    assert "free on cuda:0" in loader.feed.reason


@every_feed
def test_static_buffers_feed_a_captured_graph_in_all_epochs(path, feed):
    options = {"drop_last": True, "shuffle": True, "columns": ["number"]}
    loader = Loader(path, 50, static_buffers=True, **FEEDS[feed], **options)
    first = next(iter(loader))
    images_read = torch.zeros_like(first.images)
    numbers_read = torch.zeros_like(first.number)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        images_read.copy_(first.images)
        numbers_read.copy_(first.number)
    for epoch in range(3):
        loader.set_epoch(epoch)
        for batch, expected in zip(loader, _epoch(path, epoch, options), strict=True):
            assert batch.images.data_ptr() == first.images.data_ptr()
            graph.replay()
            assert torch.equal(images_read.cpu(), expected.images)
            assert torch.equal(numbers_read.cpu(), expected.number)
        next(iter(loader))  # an early exit, which changes nothing


def _epoch(path, epoch, options):
    """Return what an epoch has on the CPU."""
    loader = Loader(path, 50, device="cpu", **options)
    loader.set_epoch(epoch)
    return loader


@pytest.mark.parametrize("num_threads", [0, 2])
def test_pinned_gathers_ahead_only_with_threads(path, num_threads):
    made = []

    def note(images):
        made.append(threading.current_thread().name)
        return images

    loader = Loader(path, 20, transform=note, feed="pinned", num_threads=num_threads)
    batches = iter(loader)
    next(batches)
    if num_threads:
        assert threading.current_thread().name not in made
    else:
        assert made == [threading.current_thread().name]
        next(batches)
        assert len(made) == 2
    del batches


@every_feed
def test_the_device_can_be_named(path, feed):
    last = torch.cuda.device_count() - 1
    batch = next(iter(Loader(path, 4, device=f"cuda:{last}", **FEEDS[feed])))
    assert batch.images.device == torch.device("cuda", last)
    assert torch.equal(
        batch.images.cpu(), MemmapDataset(path).gather(np.arange(4)).permute(0, 3, 1, 2)
    )


@pytest.mark.parametrize(
    ("feed", "user", "ending"),
    [
        *((feed, 0, "") for feed in FEEDS),
        ("dma", 65534, ""),  # an ordinary user
        ("disk", 0, "os.kill(os.getpid(), 15)"),
        ("pinned", 0, "os.kill(os.getpid(), 15)"),
        ("disk", 0, "raise SystemExit(3)"),
    ],
)
def test_a_process_ends_cleanly_with_a_live_iterator(path, feed, user, ending):
    if user and os.getuid():
        pytest.skip("needs root to become somebody else")
    for part in (path, *path.parents):
        if part.owner() == "root" and str(part).startswith("/tmp/"):
            part.chmod(part.stat().st_mode | 0o755)
    code = f"""
        import os, signal, sys
        import torch, memload
        loader = memload.Loader({str(path)!r}, 16, shuffle=True, **{FEEDS[feed]!r})
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))
        print("fed by", loader.feed.name)
        {ending}
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        user=user or None,
        cwd="/",
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]),
            "HOME": "/tmp",
            "TRITON_CACHE_DIR": f"/tmp/triton-{user}",
        },
    )
    assert ended.stderr == ""
    assert ended.stdout == f"fed by {feed}\n"
    assert ended.returncode == (4 if "kill" in ending else 3 if ending else 0)


@every_feed
def test_stats_and_counts(path, feed, wait_until_held):
    loader = Loader(path, 16, **FEEDS[feed])
    wait_until_held(loader)
    for _ in range(2):
        assert len(list(loader)) == 13
    stats, counts = loader.stats, loader.feed.counts
    assert (stats.epoch, stats.batches, stats.samples, stats.feed) == (1, 13, SIZE, feed)
    assert stats.bytes == SIZE * 16 * 18 * 3
    assert 0 < stats.seconds_to_first <= stats.seconds_waited
    if feed in ("dma", "disk"):
        assert (counts.rows, counts.served, counts.hits) == (SIZE, 2 * SIZE, 2 * counts.rows_held)
        assert (counts.rows_held == SIZE) == (feed == "dma")
    else:
        assert counts is None


@every_feed
@pytest.mark.parametrize("transform", [transforms.Normalize("imagenet"), torch.nn.Identity()])
def test_the_time_while_the_model_is_slow_is_not_that_of_waiting(path, feed, transform):
    loader = Loader(path, 8, **FEEDS[feed], transform=transform)
    for _ in range(3):
        for _ in loader:
            torch.cuda._sleep(20_000_000)  # 10 ms; the host runs ahead until it is kept back
    stats = loader.stats
    assert stats.seconds > 0.1
    assert stats.seconds_waited - stats.seconds_to_first < stats.seconds / 3


@every_feed
def test_ranges_are_in_the_timeline(path, feed):
    loader = Loader(path, 16, **FEEDS[feed], transform=transforms.Normalize("imagenet"))
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, experimental_config=everywhere) as profiled:
        for _ in loader:
            pass
    names = {event.name for event in profiled.events()}
    assert {"memload: fetch", "memload: transform"} <= names
    with torch.autograd.profiler.emit_nvtx():
        for _ in loader:
            pass
