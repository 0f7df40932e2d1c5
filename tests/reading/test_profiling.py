"""Named ranges in the timelines of torch.profiler. tests/cuda looks for them with every feed."""

from collections import Counter

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile

from memload import CudaPrefetcher, Loader, transforms


def ranges(batches, **options):
    """Return how often each range of memload's is in the timeline of an epoch."""
    with profile(activities=[ProfilerActivity.CPU], **options) as profiled:
        list(batches)
    names = (event.name for event in profiled.events())
    return Counter(name.removeprefix("memload: ") for name in names if name.startswith("memload: "))


def test_ranges_of_every_batch_are_in_the_timeline(make_dataset, monkeypatch):
    path, batches = make_dataset(rows=(10,)).path, [torch.zeros(2, 3, 4, 4)] * 3
    for transform in (None, transforms.Normalize("imagenet"), lambda images: images / 2):
        expected = {"fetch": 3} if transform is None else {"fetch": 3, "transform": 3}
        options = {"transform": transform, "device": "cpu"}
        assert ranges(Loader(path, 4, num_threads=0, **options)) == expected
        assert ranges(CudaPrefetcher(batches, **options)) == expected
        loader = Loader(path, 4, num_threads=2, **options)
        assert ranges(loader) == {}  # as threads are not in it
        all_threads = _ExperimentalConfig(profile_all_threads=True)
        assert ranges(loader, experimental_config=all_threads) == expected
    monkeypatch.delattr(profiler, "record_function")  # without a profiler, nothing is recorded
    list(CudaPrefetcher(batches, device="cpu"))
