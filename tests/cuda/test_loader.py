import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from memload import Index, Loader, MemmapDataset, ShuffledSampler, transforms

SIZE = 203
FEEDS = ("resident", "dma", "uva", "disk", "pinned")

every_feed = pytest.mark.parametrize("feed", FEEDS)


@pytest.fixture
def path(make_dataset: Callable[..., Index]) -> Path:
    columns = {"label": np.arange(SIZE) % 3, "number": np.arange(SIZE)}
    return Path(make_dataset(rows=(100, 80, 23), shape=(16, 18, 3), columns=columns).path)


@every_feed
@pytest.mark.parametrize("batch_size", [1, 7, 64, SIZE, 1000])
def test_batches_are_those_of_the_cpu(path: Path, feed: Any, batch_size: int) -> None:
    ours = Loader(path, batch_size, shuffle=True, seed=5, feed=feed)
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
def test_no_batch_is_overwritten_while_the_consumer_is_behind(
    path: Path, feed: Any, own_stream: bool
) -> None:
    stream = torch.cuda.Stream() if own_stream else torch.cuda.default_stream()
    sums = []
    with torch.cuda.stream(stream):
        loader = Loader(path, 16, shuffle=True, seed=1, feed=feed, columns=["number"])
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


@every_feed
def test_held_batches_stay(path: Path, feed: Any) -> None:
    batches = list(Loader(path, 8, feed=feed, columns=["index"]))
    index = torch.cat([batch.index for batch in batches])
    assert (index.is_cuda, index.tolist()) == (True, list(range(SIZE)))
    images = torch.cat([batch.images for batch in batches]).cpu()
    assert torch.equal(images, MemmapDataset(path).gather(np.arange(SIZE)).permute(0, 3, 1, 2))


@every_feed
def test_memory_is_bounded_however_far_the_host_is_ahead(
    make_dataset: Callable[..., Index], feed: Any
) -> None:
    path = make_dataset(rows=(500,), shape=(128, 128, 3)).path
    loader = Loader(path, 50, shuffle=True, feed=feed, prefetch_factor=2)
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
def test_a_transform_runs_ahead_on_the_loaders_stream(path: Path, feed: Any) -> None:
    streams = set()

    def halve(images: torch.Tensor) -> torch.Tensor:
        streams.add(torch.cuda.current_stream().cuda_stream)
        return images.float() / 2

    loader = Loader(path, 50, transform=halve, feed=feed)
    images = torch.cat([batch.images for batch in loader])
    assert torch.equal(
        images.cpu(), MemmapDataset(path).gather(np.arange(SIZE)).permute(0, 3, 1, 2) / 2
    )
    list(loader)
    assert len(streams) == 1
    assert torch.cuda.current_stream().cuda_stream not in streams


@every_feed
def test_an_exception_of_the_transform_arrives_and_the_next_epoch_works(
    path: Path, feed: Any
) -> None:
    wrong = [True]

    def fail(images: torch.Tensor) -> torch.Tensor:
        if wrong[0]:
            raise KeyError("mine")
        return images

    loader = Loader(path, 50, transform=fail, feed=feed)
    for _ in range(3):
        with pytest.raises(KeyError, match="mine"):
            list(loader)
    wrong[0] = False
    assert sum(len(batch.images) for batch in loader) == SIZE


@every_feed
def test_a_hundred_early_exits_leave_no_memory(path: Path, feed: Any) -> None:
    loader = Loader(path, 20, shuffle=True, feed=feed)
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
def test_two_loaders_at_once(path: Path, feed: Any) -> None:
    dataset = MemmapDataset(path, columns=["number"])
    training = Loader(dataset.subset(range(150)), 16, shuffle=True, feed=feed)
    validation = Loader(dataset.subset(range(150, SIZE)), 16, feed=feed)
    seen = []
    for one, other in zip(training, validation, strict=False):
        seen.append(other.number)
        assert one.number.max() < 150
    assert torch.cat(seen).tolist() == list(range(150, SIZE))


def test_small_data_sets_are_resident_and_the_log_says_so(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="memload"):
        loader = Loader(path, 10)
        assert loader.feed.name == "resident"
    assert len(caplog.records) == 1
    assert "resident: " in caplog.text
    assert "free on cuda:0" in loader.feed.reason


@every_feed
def test_static_buffers_feed_a_captured_graph_in_all_epochs(path: Path, feed: Any) -> None:
    options: Any = {"drop_last": True, "shuffle": True, "columns": ["number"]}
    loader = Loader(path, 50, static_buffers=True, feed=feed, **options)
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


def _epoch(path: Path, epoch: int, options: Any) -> Loader:
    """Return what an epoch has on the CPU."""
    loader = Loader(path, 50, device="cpu", **options)
    loader.set_epoch(epoch)
    return loader


@pytest.mark.parametrize("num_threads", [0, 2])
def test_pinned_gathers_ahead_only_with_threads(path: Path, num_threads: int) -> None:
    made: list[str] = []

    def note(images: torch.Tensor) -> torch.Tensor:
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
def test_the_device_can_be_named(path: Path, feed: Any) -> None:
    last = torch.cuda.device_count() - 1
    batch = next(iter(Loader(path, 4, device=f"cuda:{last}", feed=feed)))
    assert batch.images.device == torch.device("cuda", last)
    assert torch.equal(
        batch.images.cpu(), MemmapDataset(path).gather(np.arange(4)).permute(0, 3, 1, 2)
    )


@every_feed
@pytest.mark.parametrize("user", [0, 65534], ids=["root", "an ordinary user"])
@pytest.mark.parametrize("ending", ["", "os.kill(os.getpid(), 15)", "raise SystemExit(3)"], ids=str)
def test_a_process_ends_cleanly_with_a_live_iterator(
    path: Path, feed: str, user: int, ending: str
) -> None:
    if user and os.getuid():
        pytest.skip("needs root to become somebody else")
    for part in (path, *path.parents):
        if part.owner() == "root" and str(part).startswith("/tmp/"):
            part.chmod(part.stat().st_mode | 0o755)
    code = f"""
        import os, signal, sys
        import torch, memload
        loader = memload.Loader({str(path)!r}, 16, shuffle=True, feed={feed!r})
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
def test_stats_tell_where_rows_were_found(path: Path, feed: Any) -> None:
    loader = Loader(path, 16, feed=feed)
    assert len(list(loader)) == 13
    counts_hits = feed in ("dma", "uva", "disk")
    while counts_hits and loader.feed.counts.rows_held < SIZE:
        time.sleep(0.01)  # a thread brings them in
    assert len(list(loader)) == 13
    stats = loader.stats
    assert (stats.epoch, stats.batches, stats.samples, stats.feed) == (1, 13, SIZE, feed)
    assert stats.bytes == SIZE * 16 * 18 * 3
    assert 0 < stats.seconds_to_first <= stats.seconds_waited
    assert stats.hits == (SIZE if counts_hits else None)


@every_feed
@pytest.mark.parametrize("transform", [transforms.Normalize("imagenet"), torch.nn.Identity()])
def test_the_time_while_the_model_is_slow_is_not_that_of_waiting(
    path: Path, feed: Any, transform: Any
) -> None:
    loader = Loader(path, 8, feed=feed, transform=transform)
    for _ in range(3):
        for _ in loader:
            torch.cuda._sleep(20_000_000)  # 10 ms; the host runs ahead until it is kept back
    stats = loader.stats
    assert stats.seconds > 0.1
    assert stats.seconds_waited - stats.seconds_to_first < stats.seconds / 3


@every_feed
def test_ranges_are_in_the_timeline(path: Path, feed: Any) -> None:
    loader = Loader(path, 16, feed=feed, transform=transforms.Normalize("imagenet"))
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, experimental_config=everywhere) as profiled:
        for _ in loader:
            pass
    names = {event.name for event in profiled.events()}
    assert {"memload: copy", "memload: transform"} <= names
    if feed == "pinned":  # with others, all rows may be held before the first batch
        assert "memload: read" in names
    with torch.autograd.profiler.emit_nvtx():
        for _ in loader:
            pass
