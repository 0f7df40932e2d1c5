"""What the doctor measures on a GPU."""

from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import memload
from memload import Index, transforms
from memload.bench import stages
from memload.cli import main
from memload.doctor import data_checks, disk

FEEDS = ("resident", "dma", "pinned")
SIZE = 203

every_feed = pytest.mark.parametrize("feed", [*FEEDS, "disk"])


@pytest.fixture(autouse=True)
def in_no_time(monkeypatch):
    """Measure as little as possible."""
    monkeypatch.setattr(stages, "SECONDS", 0)
    monkeypatch.setattr(disk, "_SECONDS", 0)


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
    expected = set() if feed == "resident" else {"bus"}
    expected |= set() if transform is None else {"transform"}
    expected |= {"gathering"} if feed == "pinned" else set()
    assert found.times.parts.keys() == expected
    assert all(ms > 0 for ms in found.times.parts.values())
    assert (found.times.is_on_gpu, found.times.has_gpu) == (True, True)
    assert (found.verdict.bound, found.verdict.wait_ms) == ("model", 0)
    assert found.times.trials[0].ms == found.times.batch > 0
    assert (found.times.trials[0].num_threads is not None) == (feed == "pinned")
    assert {trial.prefetch_factor for trial in found.times.trials} == {1, 2, 4}
    subjects = [line.subject for line in found.measured if line.ms]
    assert any(subject.startswith(f"Loader, feed {feed}") for subject in subjects)
    assert "copy of a batch to the GPU" in subjects
    assert ("transform on the GPU" in subjects) == (transform is not None)


def test_a_slow_transform_on_the_gpu_is_found(path):
    def slow(images):
        torch.cuda._sleep(20_000_000)  # some 10 ms
        return images

    found = memload.diagnose(memload.Loader(path, 16, feed="dma", transform=slow), step_ms=1)
    assert found.verdict.bound == "transform"
    assert found.verdict.data_ms > 2
    assert "a cheaper transform" in found.verdict.remedy
    assert "share the cores" not in found.verdict.sentence


def test_masks_and_columns_are_transformed_with_the_images(path, add_array):
    add_array(Index.open(path), "mask", np.zeros((SIZE, 16, 18), np.uint8), "mask")
    loader = memload.Loader(path, 16, transform=transforms.train(16))
    assert loader.dataset.sample_names == ("label", "mask")
    assert memload.diagnose(loader, step_ms=1e5).times.parts["transform"] > 0


def test_every_feed_is_usable(path):
    for dataset in (None, memload.MemmapDataset(path)):
        check = data_checks.feed_check(torch.device("cuda", 0), dataset, ["label"])
        assert check.finding == f"usable: {', '.join(FEEDS)}"


def test_a_feed_that_has_no_memory_is_not_usable(path, monkeypatch):
    monkeypatch.setattr(data_checks, "free_memory", lambda device: 20_000)
    found = data_checks.feed_check(torch.device("cuda", 0), memload.MemmapDataset(path)).finding
    assert found == "usable: dma, pinned; resident: 175 kB does not fit in the 20 kB free on cuda:0"


def test_the_command_diagnoses_on_the_gpu(path):
    done = CliRunner().invoke(main, ["doctor", str(path), "--step-ms", "1e5", "--batch-size", "16"])
    assert done.exit_code == 0, done.output
    assert torch.cuda.get_device_name() in done.stdout
    assert "The model: it takes 100,000 ms a batch" in done.stdout
