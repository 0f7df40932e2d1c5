"""What the doctor measures on a GPU."""

from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import memload
from memload import FeedError, Index, transforms
from memload.cli import main
from memload.measure import stages

FEEDS = ("resident", "dma", "pinned")
SIZE = 203

every_feed = pytest.mark.parametrize("feed", [*FEEDS, "disk"])


@pytest.fixture(autouse=True)
def in_no_time(monkeypatch):
    """Measure as little as possible."""
    monkeypatch.setattr(stages, "SECONDS", 0)
    monkeypatch.setattr(stages, "ROUNDS", 1)


@pytest.fixture
def path(make_dataset):
    columns = {"label": np.arange(SIZE) % 3}
    return Path(make_dataset(rows=(SIZE,), shape=(16, 18, 3), columns=columns).path)


def halved(images):
    """Return images as a function of the user's does, which gets them on the GPU."""
    assert images.is_cuda
    return images.float() / 2


@every_feed
@pytest.mark.parametrize("kind", ["none", "memload's", "the user's"])
def test_a_loader_is_measured_with_its_parts(path, feed, kind):
    transform = {"none": None, "memload's": transforms.train(16), "the user's": halved}[kind]
    loader = memload.Loader(path, 16, shuffle=True, feed=feed, transform=transform)
    found = memload.diagnose(loader, step_ms=1e5)
    assert (found.verdict.bound, found.verdict.wait_ms) == ("model", 0)
    assert "A model on the CPU" not in found.verdict.remedy
    measured = {stage.name for stage in found.stages if stage.ms}
    assert measured >= {"copy to the GPU", *(f"feed {name}, no transform" for name in FEEDS)}
    assert ("the same without its transform" in measured) == (transform is not None)
    own = next(name for name in measured if name.startswith("your Loader"))
    assert (" thread" in own) == (feed == "pinned")


def test_a_feed_that_cannot_serve_has_a_reason(path, monkeypatch):
    def refuse(*arguments):
        raise FeedError("pages cannot be registered here")

    monkeypatch.setattr("memload.feeds.held.register", refuse)
    found = memload.diagnose(memload.Loader(path, 16, feed="resident"))
    (dma,) = (stage for stage in found.stages if stage.name.startswith("feed dma"))
    assert (dma.ms, dma.reason) == (None, "pages cannot be registered here")


def test_the_feed_is_the_one_that_the_loader_falls_back_to(path, monkeypatch):
    def refuse(*arguments):
        raise FeedError("pages cannot be registered here")

    monkeypatch.setattr("memload.feeds.held.register", refuse)
    monkeypatch.setattr("memload.feeds.choice.RESIDENT_SHARE", 0.0)
    monkeypatch.setattr("memload.feeds.choice.MIN_DMA_ROW_BYTES", 0)
    loader = memload.Loader(path, 16, num_threads=1)
    found = memload.diagnose(loader)
    assert any(stage.name == "your Loader, pinned, 1 thread" for stage in found.stages)
    assert loader.feed.name == "pinned"


def test_the_feed_that_auto_takes_is_measured_without_creating_it(path):
    loader = memload.Loader(path, 16)
    found = memload.diagnose(loader)
    assert any(stage.name == "your Loader, resident" for stage in found.stages)
    assert loader._pipeline is None
    assert loader.feed.name == "resident"


def test_a_slow_transform_on_the_gpu_is_found(path):
    def slow(images):
        torch.cuda._sleep(20_000_000)  # some 10 ms
        return images

    found = memload.diagnose(memload.Loader(path, 16, feed="dma", transform=slow), step_ms=1)
    assert found.verdict.bound == "transform"
    assert found.verdict.data_ms > 2
    assert "a cheaper transform" in found.verdict.remedy


def test_masks_and_columns_are_transformed_with_the_images(path, add_array):
    add_array(Index.open(path), "mask", np.zeros((SIZE, 16, 18), np.uint8), "mask")
    loader = memload.Loader(path, 16, transform=transforms.train(16))
    assert loader.dataset.sample_names == ("label", "mask")
    found = memload.diagnose(loader, step_ms=1e5)
    assert "the same without its transform" in {stage.name for stage in found.stages if stage.ms}


def test_the_command_diagnoses_on_the_gpu(path):
    done = CliRunner().invoke(main, ["doctor", str(path), "--step-ms", "1e5", "--batch-size", "16"])
    assert done.exit_code == 0, done.output
    assert torch.cuda.get_device_name() in done.stdout
    assert done.stdout.startswith("The model bounds training: it takes 100,000 ms per batch")
