"""All arms of the CIFAR-10 benchmark train on the same pictures."""

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional

sys.path.append(str(Path(__file__).parents[2]))
from benchmarks import cifar10
from benchmarks.harness import ChildError

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def one_thread():
    """Several threads wait for each other where other tests run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def setting(tmp_path):
    """Batches of 5 of 24 pictures of noise in three classes, and 12 for the test."""
    generator = np.random.default_rng(0)
    for part, count in (("train", 8), ("test", 4)):
        for name in ("cat", "dog", "ship"):
            folder = tmp_path / "images" / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 256, (32, 32, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.jpg", quality=75)
    (tmp_path / "built").mkdir()
    return argparse.Namespace(
        images=tmp_path / "images",
        built=tmp_path / "built",
        batch=5,
        workers=0,
        epochs=1,
        width=0.125,
    )


@pytest.mark.parametrize("arm", ["ImageFolder", "by hand", "memload, build"])
def test_arms_crop_reflected_pictures_and_flip_half_of_them(arm, setting):
    if arm == "ImageFolder":
        pytest.importorskip("torchvision")
    pixels, labels = cifar10.decode_part(setting, "train")
    originals = cifar10.Normalise()(pixels.permute(0, 3, 1, 2))
    padded = functional.pad(originals, (2, 2, 2, 2), "reflect")
    crops = [padded[:, :, y : y + 32, x : x + 32] for y in range(5) for x in range(5)]
    views = torch.stack([view for crop in crops for view in (crop, crop.flip(3))], 1)
    prepare, open_loaders = cifar10.ARMS[arm]
    train, test = open_loaders(setting, prepare(setting))
    assert len(train) == 4
    seen = []
    for _ in range(4):
        samples = []
        for batch, batch_labels in train:
            apart = (batch[:, None, None] - views[None]).abs().amax((3, 4, 5)).flatten(1)
            assert apart.amin(1).max() < 1e-5
            nearest = apart.argmin(1)
            assert batch_labels.tolist() == labels[nearest // 50].tolist()
            samples += (nearest // 50).tolist()
            seen += (nearest % 50).tolist()
        assert len(set(samples)) == len(samples) == 20  # without the last batch of 4
    assert len({view // 2 for view in seen}) > 15
    assert 20 < sum(view % 2 for view in seen) < 60
    assert torch.cat([found for _, found in test]).tolist() == [0] * 4 + [1] * 4 + [2] * 4


def test_a_run_trains_tests_and_has_the_time_of_each_part(setting):
    found = cifar10.run_arm(setting, "memload, build", time.perf_counter())
    parts = {name: value for name, value in found.items() if name.endswith(" (s)")}
    assert list(parts) == ["start (s)", "build (s)", "first batch (s)", "steps (s)", "test (s)"]
    assert sum(parts.values()) == pytest.approx(found["seconds"])
    assert 0 <= found["accuracy (%)"] <= 100


def test_arms_run_in_processes_of_their_own_whose_errors_are_told(setting):
    cifar10.in_process(setting, "leave_files")
    assert {path.name for path in setting.built.iterdir()} >= {"tensors.pt", "train.bin"}
    setting.images = setting.built / "missing"
    with pytest.raises(ChildError, match=r"^SourceError: .*missing/train' does not exist"):
        cifar10.in_process(setting, "build")
