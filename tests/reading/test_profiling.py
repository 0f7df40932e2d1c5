"""Named ranges in the timelines of torch.profiler. tests/cuda looks for them with every feed."""

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile

from memload import CudaPrefetcher, Loader, transforms


def ranges(function: Callable[[], Any], **options: Any) -> Counter[str]:
    """Return how often each range of memload's is in the timeline of a call."""
    with profile(activities=[ProfilerActivity.CPU], **options) as profiled:
        function()
    names = (event.name for event in profiled.events())
    return Counter(name.removeprefix("memload: ") for name in names if name.startswith("memload: "))


def every_batch(batches: Iterable[Any]) -> Callable[[], Any]:
    return lambda: list(batches)


@pytest.fixture
def path(make_dataset: Callable[..., Any]) -> Path:
    """Ten samples."""
    index: Any = make_dataset(rows=(6, 4))
    return Path(index.path)


@pytest.mark.parametrize("transform", [transforms.Normalize("imagenet"), lambda images: images / 2])
def test_ranges_of_a_loader_are_in_the_timeline(path: Path, transform: Any) -> None:
    loader = Loader(path, 4, num_threads=0, device="cpu", transform=transform)
    assert ranges(every_batch(loader)) == {"read": 3, "transform": 3}
    untransformed = Loader(path, 4, num_threads=0, device="cpu")
    assert ranges(every_batch(untransformed)) == {"read": 3}


def test_ranges_on_threads_are_in_a_timeline_of_all_threads(path: Path) -> None:
    loader = Loader(path, 4, num_threads=2, device="cpu", transform=lambda images: images)
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    found = ranges(every_batch(loader), experimental_config=everywhere)
    assert found == {"read": 3, "transform": 3}
    assert ranges(every_batch(loader)) == {}


def test_ranges_of_a_prefetcher_are_in_the_timeline() -> None:
    batches = [torch.zeros(2, 3, 4, 4)] * 3
    prefetcher = CudaPrefetcher(batches, device="cpu", transform=lambda images: images + 1)
    assert ranges(every_batch(prefetcher)) == {"copy": 3, "transform": 3}
    untransformed = CudaPrefetcher(batches, device="cpu")
    assert ranges(every_batch(untransformed)) == {"copy": 3}


def test_without_a_profiler_no_range_is_recorded(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[str] = []
    real = profiler.record_function

    def record(name: str) -> Any:
        recorded.append(name)
        return real(name)

    monkeypatch.setattr(profiler, "record_function", record)
    loader = Loader(path, 4, num_threads=0, device="cpu", transform=lambda images: images)
    list(loader)
    assert recorded == []
    ranges(every_batch(loader))
    assert len(recorded) == 6
