"""How batches are made with each feed. Nothing here needs a CUDA device."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from memload import MemmapDataset, transforms
from memload.feeds.choice import Choice
from memload.reading import pipeline


@pytest.fixture
def make(make_dataset, add_array, monkeypatch):
    """A function that makes the pipeline of a feed that does nothing."""
    index = make_dataset(shape=(4, 6, 3))  # 72 bytes, and 28 more of each mask
    path = add_array(index, "mask", np.zeros((5, 4, 7), np.uint8), "mask").path

    def choose_feed(name, *_, buffers, **__):
        return SimpleNamespace(name=name, buffers=buffers), Choice(name, "")

    monkeypatch.setattr(pipeline, "choose_feed", choose_feed)
    monkeypatch.setattr(pipeline, "SideStream", lambda *_, waits: f"side, {waits=}")

    def make(feed_name, **options):
        arguments = {"num_threads": 3, "prefetch_factor": 2, "batch_size": 100, "transform": None}
        dataset = MemmapDataset(path)
        samples = pipeline.samples_of(dataset, dataset.sample_names)
        device = torch.device("cpu" if feed_name == "cpu" else "cuda")
        arguments |= {"cache_bytes": None, **options}
        return pipeline.make_pipeline(samples, device, feed_name, **arguments)

    return make


SIDE = "side, waits=False"


@pytest.mark.parametrize(
    ("feed", "options", "expected"),
    [
        ("cpu", {}, (None, 3, 6, 0)),
        ("cpu", {"num_threads": 0}, (None, 0, 1, 0)),
        ("resident", {}, (None, 0, 1, 0)),
        ("resident", {"transform": str}, ("side, waits=True", 0, 3, 0)),
        ("pinned", {}, (SIDE, 3, 6, 0)),
        ("pinned", {"num_threads": 0}, (SIDE, 0, 1, 0)),
        ("dma", {}, (SIDE, 0, 3, 32)),
        ("disk", {"num_threads": 0, "prefetch_factor": 5}, (SIDE, 0, 6, 32)),
    ],
)
def test_what_is_in_flight_depends_on_the_feed(make, feed, options, expected):
    made = make(feed, **options)
    found = made.side, made.num_threads, made.in_flight, made.reads_ahead
    assert (found, made.row_bytes) == (expected, 100)
    assert made.feed.buffers >= made.in_flight or made.side


@pytest.mark.parametrize(
    ("batch_size", "expected"), [(1, 32), (10, 10), (25, 4), (1000, 2), (None, 2)]
)
def test_so_many_batches_are_read_ahead_that_their_bytes_are_bounded(
    make, batch_size, expected, monkeypatch
):
    monkeypatch.setattr(pipeline, "_READ_AHEAD_BYTES", 100 * 100)
    assert make("dma", batch_size=batch_size).reads_ahead == expected


class OwnTransform(transforms.Transform):
    """A user's."""


@pytest.mark.parametrize(
    ("transform", "waits"),
    [
        (None, False),
        (transforms.train(8), False),
        (torch.nn.Identity(), True),
        (transforms.Compose([transforms.Normalize("imagenet"), OwnTransform()]), True),
    ],
    ids=["none", "train", "module", "own in a list"],
)
def test_only_transforms_of_memload_need_not_wait_for_the_consumer(make, transform, waits):
    assert make("dma", transform=transform).side == f"side, {waits=}"
