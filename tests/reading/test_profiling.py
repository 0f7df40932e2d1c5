"""Named ranges in the timelines of torch.profiler. tests/cuda looks for them with every feed."""

from collections import Counter

import pytest
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


@pytest.fixture
def make(make_dataset):
    """A function that makes a Loader or a prefetcher of three batches."""
    path = make_dataset(rows=(10,)).path

    def make(kind=Loader, **options):
        if kind is Loader:
            return Loader(path, 4, device="cpu", **{"num_threads": 0} | options)
        return CudaPrefetcher([torch.zeros(2, 3, 4, 4)] * 3, device="cpu", **options)

    return make


@pytest.mark.parametrize("kind", [Loader, CudaPrefetcher])
@pytest.mark.parametrize("transform", [transforms.Normalize("imagenet"), lambda images: images / 2])
def test_ranges_of_every_batch_are_in_the_timeline(make, kind, transform):
    assert ranges(make(kind)) == {"fetch": 3}
    assert ranges(make(kind, transform=transform)) == {"fetch": 3, "transform": 3}


def test_ranges_on_threads_are_in_a_timeline_of_all_threads(make):
    loader = make(num_threads=2, transform=lambda images: images)
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    assert ranges(loader, experimental_config=everywhere) == {"fetch": 3, "transform": 3}
    assert ranges(loader) == {}


def test_without_a_profiler_no_range_is_recorded(make, monkeypatch):
    recorded, record_function = [], profiler.record_function
    record = lambda name: recorded.append(name) or record_function(name)  # noqa: E731
    monkeypatch.setattr(profiler, "record_function", record)
    list(make())
    assert recorded == []
    ranges(make())
    assert recorded == ["memload: fetch"] * 3
