import colorsys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance

from memload import transforms
from memload.transforms import prepared
from memload.transforms.draws import Draws
from memload.transforms.mixing import _beta, mix
from memload.transforms.transform import Transform
from memload.upload import Parameters

Make = Callable[..., torch.Tensor]
#: Top, left, height and width of the boxes of four samples.
ONE_BOX = [[9, 34, 9, 21], [49, 16, 25, 17], [17, 43, 36, 14], [11, 25, 78, 24]]


def jitter(images: torch.Tensor, **factors: float) -> torch.Tensor:
    """Change all images by one factor of each kind."""
    return transforms.ColorJitter(**{name: (factor, factor) for name, factor in factors.items()})(
        images
    )


@pytest.mark.parametrize("factor", [0.0, 0.3, 1.0, 1.6])
@pytest.mark.parametrize(
    ("name", "enhance"),
    [
        ("brightness", ImageEnhance.Brightness),
        ("contrast", ImageEnhance.Contrast),
        ("saturation", ImageEnhance.Color),
    ],
)
def test_changes_of_colour_are_pillows_within_a_level(
    name: str, enhance: type, factor: float, make_images: Make
) -> None:
    images = make_images()
    found = jitter(images, **{name: factor})
    for image, result in zip(images.movedim(1, 3), found.movedim(1, 3), strict=True):
        expected = np.array(enhance(Image.fromarray(image.numpy())).enhance(factor))
        # Pillow rounds where torchvision rounds down, also grey
        assert (result.int() - torch.from_numpy(expected).int()).abs().max() <= 2
    assert (jitter(images / 255, **{name: factor}) * 255 - found).abs().max() < 2


@pytest.mark.parametrize("factor", [-0.5, -0.2, 0.0, 0.1, 0.5])
def test_hue_turns_as_colorsys_has_it(factor: float, make_images: Make) -> None:
    images = make_images(2, 5, 6)
    found = jitter(images / 255, hue=factor)
    pixels = (images / 255).movedim(1, 3).reshape(-1, 3).tolist()
    for pixel, result in zip(pixels, found.movedim(1, 3).reshape(-1, 3).tolist(), strict=True):
        h, s, v = colorsys.rgb_to_hsv(*pixel)
        assert result == pytest.approx(colorsys.hsv_to_rgb((h + factor) % 1, s, v), abs=1e-5)
    assert (jitter(images, hue=factor) - found * 255).abs().max() <= 1.01


def test_each_sample_gets_factors_and_an_order_of_its_own(make_images: Make) -> None:
    images = make_images(1).expand(64, -1, -1, -1)
    found = transforms.ColorJitter(0.5, 0.5, 0.5, 0.2)(images)
    assert len({image.numpy().tobytes() for image in found}) == 64
    ends = transforms.ColorJitter(brightness=(0.5, 0.5), contrast=(1.7, 1.7))(images)
    assert len({image.numpy().tobytes() for image in ends}) == 2  # the two orders
    assert torch.equal(transforms.ColorJitter()(images), images)
    grey = make_images(channels=1)
    assert torch.equal(jitter(grey, saturation=0.3, hue=0.2), grey)
    assert torch.equal(transforms.RandomGrayscale(1)(grey), grey)


def test_factors_are_drawn_evenly_from_their_range() -> None:
    images = torch.full((4000, 1, 1, 1), 0.5)
    factors = transforms.ColorJitter(brightness=0.4)(images).flatten() / 0.5
    assert torch.histc(factors, 10, 0.6, 1.4).min() > 330
    assert transforms.ColorJitter(brightness=1.5).brightness == (0, 2.5)
    assert transforms.ColorJitter(hue=0.1).hue == (-0.1, 0.1)


def test_grayscale_is_bt601_rounded_down(make_images: Make) -> None:
    images = make_images(400, 3, 4)
    found = transforms.RandomGrayscale(0.3)(images)
    weights = torch.tensor([0.2989, 0.587, 0.114])[:, None, None]
    grey = (images * weights).sum(1, keepdim=True)
    assert (transforms.RandomGrayscale(1)(images) - grey).abs().max() < 1.001
    turned = (found != images).flatten(1).any(1)
    assert abs(int(turned.sum()) - 120) < 40
    assert torch.equal(found[turned], transforms.RandomGrayscale(1)(images)[turned])


def painted(found: torch.Tensor, images: torch.Tensor) -> list[tuple[int, int, int, int]]:
    """Return top, left, height and width of what was changed in each image, which must be a box."""
    boxes = []
    for changed in (found != images).all(1):
        y, x = (torch.nonzero(changed.any(axis)).flatten() for axis in (1, 0))
        if len(y):
            box = int(y[0]), int(x[0]), int(y[-1] - y[0]) + 1, int(x[-1] - x[0]) + 1
            assert changed.sum() == box[2] * box[3]
            boxes.append(box)
    return boxes


def test_erasing_paints_boxes_of_the_area_and_ratio_asked_for() -> None:
    images = torch.full((1000, 3, 100, 150), 0.5)
    step = transforms.RandomErasing(scale=(0.02, 0.2), ratio=(0.4, 0.8), value=(1, 2, 3))
    found = step(images)
    boxes = np.array(painted(found, images))
    assert abs(len(boxes) - 500) < 80
    area, ratio = boxes[:, 2] * boxes[:, 3] / 15_000, boxes[:, 2] / boxes[:, 3]
    assert 0.018 < area.min() < 0.03 < 0.18 < area.max() < 0.21
    assert 0.38 < ratio.min() < 0.45 < 0.75 < ratio.max() < 0.85
    for channel, value in enumerate((1, 2, 3)):
        assert found[:, channel].unique().tolist() == [0.5, value]


def test_a_box_that_fits_nowhere_is_not_erased(make_images: Make) -> None:
    images = make_images()
    step = transforms.RandomErasing(1, scale=(1, 1), ratio=(1, 1), value=9)
    assert torch.equal(step(images), images)


def boxes_of(
    step: transforms.RandomErasing, samples: np.ndarray, height: int, width: int
) -> np.ndarray:
    """Return top, left, height and width ``(4, number, N)``, as drawn for the first epoch."""
    edges = step.boxes(Draws(samples, 0, 0, position=0, view=0), height, width)
    top, bottom, left, right = edges.transpose(2, 1, 0)
    return np.array([top, left, bottom - top, right - left])


def test_random_erasing_with_one_box_is_that_of_earlier_versions() -> None:
    """Golden values: training that is resumed must go on with the same boxes."""
    found = boxes_of(transforms.RandomErasing(1), np.arange(4), 100, 80)[:, 0]
    assert found.T.tolist() == ONE_BOX
    for recount in ((1, 1), (1, 3), 1):
        step = transforms.RandomErasing(1, recount=recount)
        boxes = boxes_of(step, np.arange(300), 100, 80)
        single = (boxes[2] > 0).sum(0) == 1
        expected = boxes_of(transforms.RandomErasing(1), np.arange(300), 100, 80)
        assert single.sum() > 60
        assert np.array_equal(boxes[:, 0, single], expected[:, 0, single])


def test_several_boxes_of_random_erasing_divide_the_area_as_timm_does_it() -> None:
    samples = np.arange(6000)
    step = transforms.RandomErasing(0.5, (0.1, 0.3), (0.5, 2), recount=(2, 4))
    _, _, height, width = boxes_of(step, samples, 200, 200)
    counts = (height > 0).sum(0)
    assert abs((counts == 0).mean() - 0.5) < 0.03
    for count in (2, 3, 4):
        assert abs((counts == count).mean() - 1 / 6) < 0.02
        area = (height * width)[:count, counts == count] / 40_000
        assert np.abs(area.mean(1) * count - 0.2).max() < 0.01  # each box is drawn on its own
        assert 0.095 < area.min() * count < 0.11
        assert 0.29 < area.max() * count < 0.31
        assert abs(np.corrcoef(area)[0, 1]) < 0.12
        ratio = (height / np.maximum(width, 1))[:count, counts == count]
        assert abs(np.log(ratio).mean()) < 0.05


@pytest.mark.parametrize("value", [(1, 2, 3), "random"])
def test_all_boxes_of_an_image_are_erased(value: Any) -> None:
    samples, images = np.arange(50), torch.full((50, 3, 40, 50), 0.5)
    step = transforms.RandomErasing(0.7, (0.1, 0.3), value=value, recount=(1, 5))
    found = step(images, samples=samples)
    expected = np.zeros((50, 40, 50), bool)
    for boxes in boxes_of(step, samples, 40, 50).transpose(1, 2, 0).tolist():
        for changed, (top, left, height, width) in zip(expected, boxes, strict=True):
            changed[top : top + height, left : left + width] = True
    assert np.array_equal((found != images).all(1).numpy(), expected)
    assert torch.equal(step(images[20:30], samples=samples[20:30]), found[20:30])
    assert step(images[:0], samples=samples[:0]).shape == (0, 3, 40, 50)


def test_random_erasing_draws_normal_noise_of_each_sample_alone() -> None:
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
def test_fractions_are_cut_off_in_uint8_images(paint: Transform) -> None:
    found = paint(torch.zeros(20, 3, 20, 30, dtype=torch.uint8))
    for channel, level in enumerate((123, 116, 103)):
        assert found[:, channel].unique().tolist() == [0, level]


def test_cutout_is_a_square_whose_middle_is_anywhere() -> None:
    images = torch.ones(3000, 3, 30, 40)
    boxes = np.array(painted(transforms.Cutout(10, fill=2)(images), images))
    assert len(boxes) == 3000
    assert boxes[:, 2:].max(0).tolist() == [10, 10]
    assert boxes[:, 2:].min(0).tolist() == [5, 5]  # cut off at the borders
    assert abs((boxes[:, 2] == 10).mean() - 21 / 30) < 0.04
    assert len(painted(transforms.Cutout((3, 4), fill=2, p=0.25)(images), images)) == pytest.approx(
        750, abs=120
    )


def mixed(step: Transform, count: int = 400) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pixels and labels mixed of images that are their own number everywhere."""
    images = torch.arange(count).float()[:, None, None, None].expand(-1, 1, 20, 30)
    found, columns = step(images, {"label": torch.arange(count)}, samples=np.arange(count))
    return found, columns["label"]


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_mixup_mixes_with_the_sample_before_and_so_the_labels(alpha: float) -> None:
    found, labels = mixed(transforms.MixUp(alpha=alpha, num_classes=400))
    assert labels.shape == (400, 400)
    assert labels.dtype == torch.float32
    share = labels.diagonal()
    torch.testing.assert_close(labels.sum(1), torch.ones(400))
    torch.testing.assert_close(labels[1:].diagonal(), 1 - share[1:])
    torch.testing.assert_close(found[1:, 0, 3, 4], torch.arange(1, 400) - (1 - share[1:]))
    assert float(share.std()) == pytest.approx((1 / (4 * (2 * alpha + 1))) ** 0.5, rel=0.15)


def test_cutmix_takes_a_box_of_the_sample_before() -> None:
    found, labels = mixed(transforms.CutMix(num_classes=400))
    images = torch.arange(400).float()[:, None, None, None].expand_as(found)
    assert torch.equal(torch.unique((images - found)[1:]), torch.tensor([0.0, 1.0]))
    painted(found, images)  # boxes
    torch.testing.assert_close(labels.diagonal()[1:], (images == found).float().mean((1, 2, 3))[1:])
    assert len(labels.diagonal().unique()) > 100
    # 1 − E[(2r − r²)²] with r = √u / 2, for a centre that is uniform over the image; boxes are cut
    # to whole pixels
    assert float(labels.diagonal().mean()) == pytest.approx(0.679 + 0.03, abs=0.04)


def test_each_image_is_mixed_by_its_factor_and_shows_its_box_of_the_one_before() -> None:
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
        found = mix(images.contiguous(memory_format=layout), Parameters(factor), Parameters(boxes))
        assert found.is_contiguous(memory_format=layout)
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


MIXUP, CUTMIX = transforms.MixUp(num_classes=7), transforms.CutMix(num_classes=7)
PLANNED = [
    transforms.RandomErasing(0.6, recount=(1, 3)),
    transforms.RandomErasing(0.6, value="random"),
    transforms.Cutout(5, fill=0.5, p=0.7),
    MIXUP,
    CUTMIX,
    transforms.RandomChoice([MIXUP, CUTMIX]),
    transforms.RandomApply([transforms.RandomChoice([CUTMIX, transforms.Compose()])]),
]


@pytest.mark.parametrize("step", PLANNED, ids=repr)
def test_parts_of_many_samples_get_what_they_get_alone(
    step: Transform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared, "_SAMPLES_PER_PLAN", 50)
    images = torch.rand(120, 3, 16, 12, generator=torch.Generator().manual_seed(0))
    samples, labels = np.random.default_rng(0).permutation(1000)[:120], torch.arange(120) % 7
    run = step.prepare(samples, seed=3, epoch=2)
    for start, stop in ((0, 20), (20, 40), (40, 60), (60, 61), (61, 120), (30, 45)):
        part = slice(start, stop)
        found, columns = run(images[part], {"label": labels[part]}, start, stop)
        expected, expected_columns = step(
            images[part], {"label": labels[part]}, samples=samples[part], seed=3, epoch=2
        )
        assert torch.equal(found, expected)
        assert torch.equal(columns["label"], expected_columns["label"])


@pytest.mark.parametrize("step", PLANNED, ids=repr)
def test_random_numbers_are_drawn_for_many_batches_at_once(
    step: Transform, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, columns = torch.rand(4, 3, 16, 12), {"label": torch.arange(4)}
    run, drawn_for = step.prepare(np.arange(100)), []
    uniform = Draws.uniform

    def noting(draws: Draws, *arguments: Any) -> np.ndarray:
        drawn_for.append(len(draws.samples))
        return uniform(draws, *arguments)

    monkeypatch.setattr(Draws, "uniform", noting)
    run(images, columns, 0, 4)
    assert max(drawn_for) == 100
    drawn_for.clear()
    for start in range(4, 100, 4):
        run(images, columns, start, start + 4)
    assert not drawn_for


def test_shares_of_classes_can_be_mixed_again() -> None:
    shares = torch.softmax(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), 1)
    both = transforms.Compose([transforms.MixUp(), transforms.CutMix(num_classes=4)])
    _, columns = both(torch.rand(6, 3, 8, 8), {"label": shares, "other": shares})
    torch.testing.assert_close(columns["label"].sum(1), torch.ones(6))
    assert not torch.equal(columns["label"], shares)
    assert columns["other"] is shares


@pytest.mark.parametrize("alpha", [0.05, 0.2, 1.0, 3.0, 10.0, 32.0, 1000.0])
def test_beta_has_the_moments_of_the_distribution(alpha: float) -> None:
    drawn = _beta((np.arange(100_000) + 0.5) / 100_000, alpha)
    assert (np.diff(drawn) >= 0).all()
    assert drawn.mean() == pytest.approx(0.5)
    for power in (2, 4, 6):
        places = np.arange(power)
        assert (drawn**power).mean() == pytest.approx(
            np.prod((alpha + places) / (2 * alpha + places)), rel=1e-3
        )


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_contrast_is_that_of_each_alone_in_any_layout(
    channels: int, dtype: torch.dtype, make_images: Make
) -> None:
    images = make_images(6, 300, 300, channels)
    images = images if dtype == torch.uint8 else (images / 255).to(dtype)
    found = jitter(images, contrast=0.37)
    assert torch.equal(jitter(images.contiguous(), contrast=0.37), found)
    assert torch.equal(torch.cat([jitter(image[None], contrast=0.37) for image in images]), found)


def test_contrast_of_floats_has_its_gradient() -> None:
    images = torch.rand(6, 3, 30, 40).requires_grad_()
    jitter(images, contrast=0.5)[:, :, 0, 0].sum().backward()  # type: ignore[no-untyped-call]  # torch's
    assert images.grad is not None
    assert (images.grad[:, :, 5, 5] > 0).all()  # by way of the mean


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation"])
def test_one_change_and_that_change_among_others_that_change_nothing_are_the_same(
    name: str, make_images: Make
) -> None:
    neutral = dict.fromkeys(("brightness", "contrast", "saturation"), (1.0, 1.0))
    one = transforms.ColorJitter(**{name: 0.5})(make_images(), seed=3).int()
    several = transforms.ColorJitter(**neutral | {name: (0.5, 1.5)})(make_images(), seed=3).int()
    assert (one - several).abs().max() <= 1  # what is changed by 1.0 may be rounded down
