"""The arms of the CIFAR-10 benchmark train on the same views, and its network does what it says."""

import importlib.util
import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import cifar10
import cifar10_files
import cifar10_network
import cifar10_run

CLASSES = ("cat", "dog", "ship")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Return a folder of pictures of noise: 8 of each class to train on, and 4 for the test."""
    generator = np.random.default_rng(0)
    for part, count in (("train", 8), ("test", 4)):
        for name in CLASSES:
            folder = tmp_path / "images" / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 256, (32, 32, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.jpg", quality=75)
    return tmp_path / "images"


@pytest.mark.parametrize("arm", ["ImageFolder", "by hand", "memload, build"])
def test_arms_crop_reflected_pictures_and_flip_them_in_every_other_epoch(
    arm: str, images: Path, tmp_path: Path
) -> None:
    if arm == "ImageFolder" and importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    built = tmp_path / "built"
    built.mkdir()
    setting = cifar10_run.Setting(images, built, batch=5, workers=0, seed=1)
    pixels, labels = cifar10_run.decode_part(setting, "train")
    originals = cifar10_run.Normalise(setting)(pixels.permute(0, 3, 1, 2))
    padded = functional.pad(originals, (2, 2, 2, 2), "reflect")
    crops = [padded[:, :, y : y + 32, x : x + 32] for y in range(5) for x in range(5)]
    views = torch.stack([view for crop in crops for view in (crop, crop.flip(3))], 1)

    chosen = cifar10_run.ARMS[arm]
    loaders = chosen.open(setting, chosen.prepare(setting))
    assert (loaders.steps, loaders.classes) == (4, 3)
    flips: list[dict[int, bool]] = []
    positions = set()
    for _ in range(4):
        flips.append({})
        for batch, batch_labels in loaders.train:
            assert batch.shape == (5, 3, 32, 32)
            apart = (batch[:, None, None] - views[None]).abs().amax((3, 4, 5))
            nearest = apart.flatten(1).argmin(1)
            sample, view = nearest // 50, nearest % 50
            assert apart.flatten(1).amin(1).max() < 1e-5
            assert batch_labels.tolist() == labels[sample].tolist()
            flips[-1].update(zip(sample.tolist(), (view % 2 == 1).tolist(), strict=True))
            positions.update((view // 2).tolist())
        assert len(flips[-1]) == 20  # each sample once, without the last batch of 4
    assert len(positions) > 20
    for even, odd in itertools.pairwise(flips):
        assert all(even[sample] != odd[sample] for sample in even.keys() & odd.keys())
    assert 0 < sum(flips[0].values()) < 20
    same = (loaders.raw(10)[:, None] - originals[None]).abs().amax((2, 3, 4)) < 1e-5
    assert same.sum(1).tolist() == [1] * 10  # pictures as they are in the files
    assert same.any(0).sum() == 10
    assert loaders.raw(5000).shape == originals.shape  # all, where there are fewer
    tested = list(loaders.test)
    assert sum(len(batch) for batch, _ in tested) == 12
    assert torch.cat([found for _, found in tested]).tolist() == [0] * 4 + [1] * 4 + [2] * 4


def test_batches_of_the_binary_version_become_files(tmp_path: Path) -> None:
    pixels = np.zeros((4, 3, 32, 32), np.uint8)
    pixels[:, 0] = 200  # red
    records = np.concatenate([np.array([[1], [0], [1], [1]], np.uint8), pixels.reshape(4, -1)], 1)
    (tmp_path / "batches.meta.txt").write_text("airplane\nautomobile\n\n")
    for number in (1, 2):
        records[2 * number - 2 : 2 * number].tofile(tmp_path / f"data_batch_{number}.bin")
    records[:1].tofile(tmp_path / "test_batch.bin")
    cifar10_files.write_batches(tmp_path, tmp_path / "written")
    found = sorted((tmp_path / "written").rglob("*.jpg"))
    assert [str(path.relative_to(tmp_path / "written")) for path in found] == [
        "test/automobile/00000.jpg",
        "train/airplane/00001.jpg",
        *(f"train/automobile/{number:05d}.jpg" for number in (0, 2, 3)),
    ]
    with Image.open(found[0]) as image:
        red, green, blue = np.asarray(image).mean((0, 1))
    assert red > 190
    assert max(green, blue) < 10


def test_whitening_filters_make_patches_white() -> None:
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(64, 3, 32, 32, generator=generator)
    smooth = functional.avg_pool2d(mixed, 3, 1, 1) * torch.tensor([1.0, 2, 3]).view(3, 1, 1)
    network = cifar10_network.make_network(smooth, 10, 0.125)
    answers = network.whiten(smooth)
    components = answers[:, :12].permute(1, 0, 2, 3).flatten(1)
    covariance = components @ components.T / components.shape[1]
    assert (covariance - torch.diag(covariance.diag())).abs().max() < 0.01
    assert covariance.diag().max() <= 1.001
    assert torch.equal(answers[:, 12:], -answers[:, :12])


def test_an_update_of_filters_is_about_orthogonal() -> None:
    matrix = torch.randn(16, 40, generator=torch.Generator().manual_seed(0))
    for found in (cifar10_network.orthogonal(matrix), cifar10_network.orthogonal(matrix.T).T):
        values = torch.linalg.svdvals(found.float())
        assert values.min() > 0.5
        assert values.max() < 1.4


def test_scores_are_an_average_over_views() -> None:
    torch.manual_seed(0)
    network = cifar10_network.make_network(torch.randn(4, 3, 32, 32), 10, 0.125).eval()
    plain = torch.randn(4, 3, 1, 1).expand(4, 3, 32, 32)  # its views are all alike
    assert torch.allclose(cifar10_network.scores_of(network, plain), network(plain), atol=1e-6)
    edge = torch.zeros(1, 3, 32, 32)
    edge[..., :16] = 1
    averaged = cifar10_network.scores_of(network, edge)
    assert not torch.allclose(averaged, network(edge), atol=1e-6)
    columns = edge.expand(2, 3, 32, 32).clone()
    columns[1] = columns[1].flip(2)  # rows are alike, so this changes nothing
    assert torch.allclose(*cifar10_network.scores_of(network, columns), atol=1e-6)


def test_training_learns_a_batch_and_ends_at_a_rate_of_zero() -> None:
    torch.manual_seed(0)
    labels = torch.arange(100) % 10
    images = torch.randn(10, 3, 32, 32)[labels] + 0.5 * torch.randn(100, 3, 32, 32)
    network = cifar10_network.make_network(images, 10, 0.125)
    training = cifar10_network.Training(network, 20, 10)
    losses = [training.step(images, labels).item() for _ in range(20)]
    assert losses[0] == pytest.approx(2.303, abs=0.1)  # log(10)
    assert losses[-1] < 1.9  # 0.91 is the least with this smoothing
    rates = [
        group["lr"] / rate for group, rate in zip(training.groups, training.rates, strict=True)
    ]
    assert rates == pytest.approx([0, 1 / 20, 1 / 20, 1 / 20])
    assert (network.eval()(images).argmax(1) == labels).float().mean() > 0.9


@pytest.mark.parametrize(
    ("values", "expected"),
    [(range(5), 1.9633), (range(10), 2.1659), (range(30), 3.2872)],
)
def test_an_interval_is_students(values: Any, expected: float) -> None:
    """Expected are Student's quantiles 2.7764, 2.2622 and 2.0452 times the standard error."""
    assert cifar10.half_interval([float(value) for value in values]) == pytest.approx(
        expected, rel=0.004
    )
