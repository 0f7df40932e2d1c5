import numpy as np
import pytest
import torch

from memload import transforms
from memload.transforms.draws import Drawn
from memload.transforms.mixing import _beta, mix


def painted(found, images):
    """Return top, left, height and width of what was changed in each image, which must be a box."""
    boxes = []
    for changed in (found != images).all(1):
        y, x = (torch.nonzero(changed.any(axis)).flatten() for axis in (1, 0))
        if len(y):
            box = int(y[0]), int(x[0]), int(y[-1] - y[0]) + 1, int(x[-1] - x[0]) + 1
            assert changed.sum() == box[2] * box[3]
            boxes.append(box)
    return boxes


def test_erasing_paints_boxes_of_the_area_and_ratio_asked_for():
    images = torch.full((250, 3, 100, 150), 0.5)
    step = transforms.RandomErasing(scale=(0.02, 0.2), ratio=(0.4, 0.8), value=(1, 2, 3))
    found = step(images)
    boxes = np.array(painted(found, images))
    assert abs(len(boxes) - 125) < 40
    area, ratio = boxes[:, 2] * boxes[:, 3] / 15_000, boxes[:, 2] / boxes[:, 3]
    assert 0.018 < area.min() < 0.03 < 0.18 < area.max() < 0.21
    assert 0.38 < ratio.min() < 0.45 < 0.75 < ratio.max() < 0.85
    for channel, value in enumerate((1, 2, 3)):
        assert ((found[:, channel] == 0.5) | (found[:, channel] == value)).all()


def test_a_box_that_fits_nowhere_is_not_erased(make_images):
    images = make_images()
    step = transforms.RandomErasing(1, scale=(1, 1), ratio=(1, 1), value=9)
    assert torch.equal(step(images), images)


def test_random_erasing_draws_normal_noise_of_each_sample_alone():
    images = torch.zeros(200, 3, 40, 50)
    step = transforms.RandomErasing(p=0.5, scale=(0.2, 0.3), value="random")
    found = step(images, samples=np.arange(200))
    boxes = np.array(painted(found, images))
    assert abs(len(boxes) - 100) < 35
    assert 0.18 < (boxes[:, 2] * boxes[:, 3] / 2000).min() < 0.22
    noise = found[found != 0]
    assert abs(float(noise.mean())) < 0.02
    assert abs(float(noise.std()) - 1) < 0.02
    assert len(noise.unique()) > 0.6 * min(len(noise), 1 << 16)
    assert torch.equal(step(images[50:60], samples=np.arange(50, 60)), found[50:60])


@pytest.mark.parametrize(
    "paint",
    [
        transforms.RandomErasing(p=1, value=[123.675, 116.28, 103.53]),
        transforms.Cutout(6, fill=[123.675, 116.28, 103.53]),
    ],
)
def test_fractions_are_cut_off_in_uint8_images(paint):
    found = paint(torch.zeros(20, 3, 20, 30, dtype=torch.uint8))
    for channel, level in enumerate((123, 116, 103)):
        assert found[:, channel].unique().tolist() == [0, level]


def test_cutout_is_a_square_whose_middle_is_anywhere():
    images = torch.ones(1000, 3, 30, 40)
    boxes = np.array(painted(transforms.Cutout(10, fill=2)(images), images))
    assert len(boxes) == 1000
    assert boxes[:, 2:].max(0).tolist() == [10, 10]
    assert boxes[:, 2:].min(0).tolist() == [5, 5]  # cut off at the borders
    assert abs((boxes[:, 2] == 10).mean() - 21 / 30) < 0.04
    assert len(painted(transforms.Cutout((3, 4), fill=2, p=0.25)(images), images)) == pytest.approx(
        250, abs=60
    )


def mixed(step, count=400):
    """Return pixels and labels mixed of images that are their own number everywhere."""
    images = torch.arange(count).float()[:, None, None, None].expand(-1, 1, 20, 30)
    found, columns = step(images, {"label": torch.arange(count)}, samples=np.arange(count))
    return found, columns["label"]


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_mixup_mixes_with_the_sample_before_and_so_the_labels(alpha):
    found, labels = mixed(transforms.MixUp(alpha=alpha, num_classes=400))
    assert labels.shape == (400, 400)
    assert labels.dtype == torch.float32
    share = labels.diagonal()
    torch.testing.assert_close(labels.sum(1), torch.ones(400))
    torch.testing.assert_close(labels[1:].diagonal(), 1 - share[1:])
    torch.testing.assert_close(found[1:, 0, 3, 4], torch.arange(1, 400) - (1 - share[1:]))
    assert float(share.std()) == pytest.approx((1 / (4 * (2 * alpha + 1))) ** 0.5, rel=0.15)


def test_cutmix_takes_a_box_of_the_sample_before():
    found, labels = mixed(transforms.CutMix(num_classes=400))
    images = torch.arange(400).float()[:, None, None, None].expand_as(found)
    assert torch.equal(torch.unique((images - found)[1:]), torch.tensor([0.0, 1.0]))
    painted(found, images)  # boxes
    torch.testing.assert_close(labels.diagonal()[1:], (images == found).float().mean((1, 2, 3))[1:])
    assert len(labels.diagonal().unique()) > 100
    # 1 − E[(2r − r²)²] with r = √u / 2, for a centre that is uniform over the image; boxes are cut
    # to whole pixels
    assert float(labels.diagonal().mean()) == pytest.approx(0.679 + 0.03, abs=0.04)


def test_each_image_is_mixed_by_its_factor_and_shows_its_box_of_the_one_before():
    images = torch.rand(4, 3, 9, 8, generator=torch.Generator().manual_seed(0)) - 0.5
    images[1:3, :, 0] = -0.0
    images[3, 0, 8] = torch.inf
    factor, boxes = np.array([1, 1, 0.25, 1], np.float32), np.zeros((4, 4), np.int32)
    boxes[2], boxes[3] = (0, 2, 3, 8), (4, 7, 2, 7)
    expected = images.clone()
    expected[2] = images[2] * 0.25 + images[1] * 0.75
    expected[2, :, :2, 3:] = images[1, :, :2, 3:]
    expected[3, :, 4:7, 2:7] = images[2, :, 4:7, 2:7]
    for layout in (torch.contiguous_format, torch.channels_last):
        drawn = Drawn({"factor": factor, "boxes": boxes}, images.device)
        found = mix(images.contiguous(memory_format=layout), drawn, "factor", "boxes")
        assert found.is_contiguous(memory_format=layout)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        assert torch.equal(
            found[[0, 1, 3]].view(torch.int32), expected[[0, 1, 3]].view(torch.int32)
        )


@pytest.mark.parametrize("alpha", [0.05, 0.2, 1.0, 3.0, 10.0, 32.0, 1000.0])
def test_beta_has_the_moments_of_the_distribution(alpha):
    drawn = _beta((np.arange(100_000) + 0.5) / 100_000, alpha)
    assert (np.diff(drawn) >= 0).all()
    assert drawn.mean() == pytest.approx(0.5)
    for power in (2, 4, 6):
        places = np.arange(power)
        assert (drawn**power).mean() == pytest.approx(
            np.prod((alpha + places) / (2 * alpha + places)), rel=1e-3
        )
