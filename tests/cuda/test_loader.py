"""A Loader with each feed on CUDA, beside one on the CPU."""

import gc
import os
import subprocess
import sys
import textwrap
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
#: Arguments of a Loader. The first budget holds a part of each file of `path`.
FEEDS = {
    "resident": {"feed": "resident"},
    "dma": {"feed": "dma"},
    "disk": {"feed": "disk", "cache_bytes": 90_000},
    "nothing held": {"feed": "disk", "cache_bytes": 0},
    "pinned": {"feed": "pinned"},
}

every_feed = pytest.mark.parametrize("feed", FEEDS)


@pytest.fixture
def path(make_dataset, add_array):
    """Images in three shards, two masks, features in an NPY file in another order, and columns."""
    rng = np.random.default_rng(7)
    columns = {
        "label": np.arange(SIZE) % 3,
        "number": np.arange(SIZE),
        "eyes": rng.uniform(0, 16, (SIZE, 2, 2)).astype(np.float32),
    }
    shape = (16, 18, 3)
    index = make_dataset(rows=(100, 80, 23), shape=shape, columns=columns, points=("eyes",))
    index = add_array(index, "mask", rng.integers(0, 256, (SIZE, 16, 18)).astype(np.uint8), "mask")
    index = add_array(index, "ids", rng.integers(0, 2**16, (SIZE, 16, 18)).astype("<u2"), "mask")
    rows = {"features": rng.integers(0, SIZE + 9, SIZE)}
    return Path(
        add_array(index, "features", rng.random((SIZE + 9, 37)), "npy", other_rows=rows).path
    )


def check_same(one, other):
    """Check that a batch on CUDA is one on the CPU: images within a level, points nearly."""
    assert one._fields == other._fields
    for name, found, expected in zip(one._fields, one, other, strict=True):
        assert (found.is_cuda, found.dtype) == (True, expected.dtype)
        if name in ("images", "eyes") and expected.is_floating_point():
            level = 1.01 / 255 / 0.224 if name == "images" else 1e-4  # after Normalize("imagenet")
            torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=level)
        else:
            np.testing.assert_array_equal(found.cpu().numpy(), expected.numpy())


@every_feed
@pytest.mark.parametrize("batch_size", [1, 7, 1000])
@pytest.mark.parametrize("transform", [None, transforms.train(16)], ids=["bare", "train"])
def test_batches_are_those_of_the_cpu_and_stay(path, feed, batch_size, transform, wait_until_held):
    options = {"shuffle": True, "seed": 5, "transform": transform}
    ours = Loader(path, batch_size, **FEEDS[feed], **options)
    theirs = Loader(path, batch_size, device="cpu", **options)
    assert (ours.device, ours.feed.name) == (torch.device("cuda", 0), FEEDS[feed]["feed"])
    for epoch in range(2):
        if epoch == 1:  # of the first, rows may have come from the files
            wait_until_held(ours)
        for one, other in zip(list(ours), theirs, strict=True):
            check_same(one, other)
            assert transform or one.images.permute(0, 2, 3, 1).is_contiguous()


@every_feed
def test_columns_of_any_type_are_those_of_the_samples(make_dataset, feed):
    rng = np.random.default_rng(0)
    columns = {
        "number": np.arange(SIZE, dtype="<u2"),
        "grid": rng.random((SIZE, 3, 5)),
        "flags": rng.random((SIZE, 3)) > 0.5,
    }
    path = make_dataset(rows=(SIZE,), columns=columns, classes=None).path
    options = {"shuffle": True, "columns": [*columns, "index"], **FEEDS[feed]}
    for batch in list(Loader(path, 16, **options)):
        for name, stored in columns.items():
            found = getattr(batch, name).cpu().numpy()
            np.testing.assert_array_equal(found, stored[batch.index.cpu()], strict=True)


@every_feed
def test_a_subset_on_any_rank_also_resumed(path, feed):
    """The samples are scattered, and some are there twice."""
    chosen = np.random.default_rng(0).integers(0, SIZE, 100)
    dataset = MemmapDataset(path, columns=["mask", "features", "index"]).subset(chosen.tolist())
    for rank, num_replicas, before, after in ((0, 1, 7, 4), (1, 3, 5, 2), (2, 3, 1, 9)):
        options = {"shuffle": True, "rank": rank, "num_replicas": num_replicas, "seed": rank}
        loader = Loader(dataset, before, **FEEDS[feed], **options)
        batches = iter(loader)
        seen = [next(batches), next(batches)]
        resumed = Loader(dataset, after, **FEEDS[feed], **options)
        resumed.load_state_dict(loader.state_dict())
        for batch in (*seen, *resumed):
            numbers = batch.index.tolist()
            for name in ("mask", "features"):
                expected = dataset.gather(numbers, name=name)
                assert torch.equal(getattr(batch, name).cpu(), expected)
        del batches


@every_feed
def test_a_concatenation_is_a_and_then_b(make_dataset, add_array, feed):
    parts = []
    for name, size in (("a", 30), ("b", 17)):
        index = make_dataset(f"{name}.bin", rows=(size - 5, 5), seed=size)
        masks = np.random.default_rng(size).integers(0, 256, (size, 4, 6)).astype(np.uint8)
        rows = {"mask": np.arange(size)[::-1].copy()} if name == "b" else {}
        parts.append(add_array(index, "mask", masks, "mask", other_rows=rows).path)
    options = {"columns": ["mask"], "shuffle": True}
    loader = Loader(parts, 7, **FEEDS[feed], **options)
    for one, other in zip(loader, Loader(parts, 7, device="cpu", **options), strict=True):
        check_same(one, other)


@every_feed
@pytest.mark.parametrize("own_stream", [False, True])
def test_no_batch_is_overwritten_before_the_consumers_stream_has_read_it(path, feed, own_stream):
    """Also if the host has dropped it: the stream is told to the allocator."""
    stream = torch.cuda.Stream() if own_stream else torch.cuda.default_stream()
    columns = ["mask", "number"]
    loader = Loader(path, 16, shuffle=True, seed=1, **FEEDS[feed], columns=columns)
    sums, order = [], []
    with torch.cuda.stream(stream):
        for _ in range(4):
            batches = iter(loader)
            for _ in range(len(loader)):
                images, masks, numbers = next(batches)
                torch.cuda._sleep(3_000_000)  # the next batches have long been asked for
                sums.append((images.double().sum((1, 2, 3)), masks.double().sum((1, 2))))
                order.append(numbers.clone())
                if own_stream:
                    del images, masks, numbers
    torch.cuda.synchronize()
    dataset, positions = MemmapDataset(path), np.arange(SIZE)
    expected = [
        dataset.gather(positions, name=name).double().flatten(1).sum(1)
        for name in ("image", "mask")
    ]
    sampler = ShuffledSampler(SIZE, seed=1)
    samples = np.concatenate([sampler.take(epoch, positions) for epoch in range(4)])
    assert torch.cat(order).tolist() == samples.tolist()
    for found, stored in zip(zip(*sums, strict=True), expected, strict=True):
        assert torch.equal(torch.cat(found).cpu(), stored[torch.from_numpy(samples)])


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
@pytest.mark.parametrize(
    ("set_default", "value", "before"),
    [
        (torch.set_default_device, "cuda", None),
        (torch.set_default_dtype, torch.float64, torch.float32),
        (torch.set_default_dtype, torch.bfloat16, torch.float32),
    ],
)
def test_torchs_defaults_change_nothing(path, feed, set_default, value, before):
    dataset = MemmapDataset(path, columns=["number", "label"])

    def tensors():
        batches = list(Loader(dataset, 50, shuffle=True, **FEEDS[feed]))
        collated = fast_collate([dataset[number] for number in range(9)])
        moved = list(CudaPrefetcher(DataLoader(dataset, 50, collate_fn=fast_collate)))
        return [*batches, [dataset.gather([3, 100, 202])], collated, *moved]

    expected = tensors()
    set_default(value)
    try:
        found = tensors()
    finally:
        set_default(before)
    for one, other in zip(found, expected, strict=True):
        for tensor, like in zip(one, other, strict=True):
            assert (tensor.dtype, tensor.device) == (like.dtype, like.device)
            assert torch.equal(tensor, like)


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
def test_early_exits_leave_nothing(path, feed):
    """Fixtures look for threads, descriptors, maps and memory that are left."""
    for exits in range(4):
        loader = Loader(path, 5, **FEEDS[feed])
        batches = iter(loader)
        for _ in range(exits):
            next(batches)
        del loader, batches
    loader = Loader(path, 20, shuffle=True, columns=["number"], **FEEDS[feed])
    next(iter(loader))
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(100):
        next(iter(loader))
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before
    batches = iter(loader)
    del loader  # the iterator goes on
    assert sorted(torch.cat([batch.number for batch in batches]).tolist()) == list(range(SIZE))


def test_small_data_sets_are_resident_and_the_log_says_so(path, caplog):
    with caplog.at_level("INFO", logger="memload"):
        loader = Loader(path, 10)
        assert loader.feed.name == "resident"
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "free on cuda:0" in loader.feed.reason


@every_feed
def test_static_buffers_feed_a_captured_graph_in_all_epochs(path, feed):
    options = {"drop_last": True, "shuffle": True, "columns": ["mask"]}
    loader = Loader(path, 50, static_buffers=True, **FEEDS[feed], **options)
    first = next(iter(loader))
    images_read = torch.zeros_like(first.images)
    masks_read = torch.zeros_like(first.mask)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        images_read.copy_(first.images)
        masks_read.copy_(first.mask)
    for epoch in range(3):
        loader.set_epoch(epoch)
        on_cpu = Loader(path, 50, device="cpu", **options)
        on_cpu.set_epoch(epoch)
        for batch, expected in zip(loader, on_cpu, strict=True):
            assert batch.images.data_ptr() == first.images.data_ptr()
            graph.replay()
            assert torch.equal(images_read.cpu(), expected.images)
            assert torch.equal(masks_read.cpu(), expected.mask)
        next(iter(loader))  # an early exit, which changes nothing


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
    assert ended.stdout == f"fed by {FEEDS[feed]['feed']}\n"
    assert ended.returncode == (4 if "kill" in ending else 3 if ending else 0)


@every_feed
def test_stats_and_counts(path, feed, wait_until_held):
    loader = Loader(path, 16, columns=["label"], **FEEDS[feed])
    wait_until_held(loader)
    for _ in range(2):
        assert len(list(loader)) == 13
    stats, counts = loader.stats, loader.feed.counts
    assert (stats.epoch, stats.batches, stats.samples) == (1, 13, SIZE)
    assert (stats.feed, stats.bytes) == (FEEDS[feed]["feed"], SIZE * 16 * 18 * 3)
    assert 0 < stats.seconds_to_first <= stats.seconds_waited
    if feed in ("resident", "pinned"):
        assert counts is None
    else:
        assert (counts.rows, counts.served, counts.hits) == (SIZE, 2 * SIZE, 2 * counts.rows_held)
        held = {"dma": SIZE, "disk": SIZE // 2, "nothing held": 0}[feed]
        assert abs(counts.rows_held - held) < 40  # headers and pages
        assert f"{counts.rows_held:,} of {SIZE} rows are held" in str(loader.feed)


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


def test_a_prefetcher_moves_masks_with_their_images(path):
    dataset = MemmapDataset(path, columns=["label", "mask", "ids", "features", "eyes"])
    flip = transforms.RandomHorizontalFlip(1)
    batches = DataLoader(dataset, 8, collate_fn=fast_collate, pin_memory=True)
    for found, expected in zip(CudaPrefetcher(batches, transform=flip), batches, strict=True):
        images, _, mask, ids, features, eyes = (tensor.cpu().numpy() for tensor in found)
        for one, other in zip((images, mask, ids), (expected[0], *expected[2:4]), strict=True):
            np.testing.assert_array_equal(one, other.numpy()[..., ::-1])
        np.testing.assert_array_equal(features, expected[4].numpy())
        np.testing.assert_allclose(eyes[..., 0], 17 - expected[5].numpy()[..., 0])
