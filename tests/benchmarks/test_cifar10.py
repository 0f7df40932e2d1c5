"""All arms of the CIFAR-10 benchmark train on the same pictures."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional

sys.path.append(str(Path(__file__).parents[2]))
from benchmarks import cifar10

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
    return cifar10.Setting(tmp_path / "images", tmp_path / "built", 5, 0, 1, 0.125)


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
    loaders = open_loaders(setting, prepare(setting))
    assert loaders.steps == 4
    seen = []
    for _ in range(4):
        samples = []
        for batch, batch_labels in loaders.train:
            apart = (batch[:, None, None] - views[None]).abs().amax((3, 4, 5)).flatten(1)
            assert apart.amin(1).max() < 1e-5
            nearest = apart.argmin(1)
            assert batch_labels.tolist() == labels[nearest // 50].tolist()
            samples += (nearest // 50).tolist()
            seen += (nearest % 50).tolist()
        assert len(set(samples)) == len(samples) == 20  # without the last batch of 4
    assert len({view // 2 for view in seen}) > 15
    assert 20 < sum(view % 2 for view in seen) < 60
    assert torch.cat([found for _, found in loaders.test]).tolist() == [0] * 4 + [1] * 4 + [2] * 4


def test_batches_of_the_binary_version_become_files(tmp_path):
    pixels = np.zeros((4, 3, 32, 32), np.uint8)
    pixels[:, 0] = 200  # red
    records = np.concatenate([np.array([[1], [0], [1], [1]], np.uint8), pixels.reshape(4, -1)], 1)
    (tmp_path / "batches.meta.txt").write_text("airplane\nautomobile\n\n")
    for number in (1, 2):
        records[2 * number - 2 : 2 * number].tofile(tmp_path / f"data_batch_{number}.bin")
    records[:1].tofile(tmp_path / "test_batch.bin")
    written = cifar10.write_batches(tmp_path, tmp_path / "written")
    found = sorted(written.rglob("*.jpg"))
    assert [str(path.relative_to(written)) for path in found] == [
        "test/automobile/00000.jpg",
        "train/airplane/00001.jpg",
        *(f"train/automobile/{number:05d}.jpg" for number in (0, 2, 3)),
    ]
    with Image.open(found[0]) as image:
        red, green, blue = np.asarray(image).mean((0, 1))
    assert red > 190
    assert max(green, blue) < 10
