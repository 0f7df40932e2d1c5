"""Transforms on a GPU against those on the CPU. Kernels have tests/transforms/test_kernels.py."""

import contextlib
import warnings

import numpy as np
import pytest
import torch

from memload import transforms

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
#: A level of uint8 after Normalize("imagenet"), whose smallest deviation is 0.224.
LEVEL = 1.01 / 255 / 0.224


def pixels(count, height, width):
    """Return smooth uint8 (N, 3, H, W), channels-last as a Loader gives them."""
    generator = torch.Generator().manual_seed(count)
    small = torch.rand((count, 3, 7, 8), generator=generator) * 255
    images = torch.nn.functional.interpolate(small, (height, width), mode="bilinear")
    return images.to(torch.uint8).contiguous(memory_format=torch.channels_last)


def assert_close(found, expected, level, share=1e-3):
    """Assert that all but a share of values differ by a level at most.

    A second operation works on other levels, and of two equally near pixels either is taken.
    """
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    difference = (found.cpu().double() - expected.double()).abs()
    assert (difference > level).double().mean() <= share, difference.max()


@pytest.fixture(scope="module", autouse=True)
def normal_noise():
    """Upload the tables that transforms keep on a device, before tests are checked for leaks."""
    steps = [
        transforms.RandomErasing(),
        transforms.RandomErasing(value=(3, 77.7, 200)),
        transforms.Cutout(9),
        transforms.Cutout(17, fill=9),
    ]
    for dtype in (torch.uint8, *FLOATS):
        images = pixels(2, 50, 60).to(dtype).cuda()
        for step in [*steps, *[transforms.RandomErasing(value="random")] * dtype.is_floating_point]:
            step(images, samples=np.arange(2))


EVERYTHING = [
    transforms.RandomResizedCrop(40),
    transforms.RandomHorizontalFlip(),
    transforms.ColorJitter(0.4, 0.4, 0.4, 0.1),
    transforms.RandomGrayscale(0.3),
    transforms.Cutout(9),
    transforms.RandomErasing(),
    transforms.Normalize("imagenet"),
    transforms.RandomErasing(value="random"),
    transforms.MixUp(alpha=0.2, num_classes=7),
    transforms.CutMix(num_classes=7),
]


@pytest.mark.parametrize("count", range(1, len(EVERYTHING) + 1))
def test_a_gpu_gives_what_the_cpu_gives(count):
    images = pixels(32, 50, 60)
    columns = {"label": torch.arange(32) % 7, "points": torch.rand(32, 5, 2) * 50}
    compose = transforms.Compose(EVERYTHING[:count], points=("points",), views=2)
    expected = compose(images, columns, samples=np.arange(32), seed=3, epoch=1)
    on_device = {name: column.cuda() for name, column in columns.items()}
    found = compose(images.cuda(), on_device, samples=np.arange(32), seed=3, epoch=1)
    for view in (0, 1):
        assert found[0][view].is_cuda
        assert found[0][view].is_contiguous(memory_format=torch.channels_last)
        level = 1 if expected[0][view].dtype == torch.uint8 else 2 * LEVEL
        assert_close(found[0][view], expected[0][view], level, 0.01)
        torch.testing.assert_close(found[1]["points"][view].cpu(), expected[1]["points"][view])
    torch.testing.assert_close(
        [part.cpu() for part in found[1]["label"]] if count > 8 else found[1]["label"].cpu(),
        list(expected[1]["label"]) if count > 8 else expected[1]["label"],
    )


@pytest.mark.parametrize("dtype", [torch.uint8, *FLOATS])
@pytest.mark.parametrize(
    "step",
    [
        transforms.GaussianBlur(9),
        transforms.GaussianBlur((23, 1), sigma=(1.0, 5.0)),
        transforms.GaussianBlur(23),
        transforms.GaussianBlur((45, 3)),  # too large for the kernel
        transforms.RandomAdjustSharpness(1.9, p=0.6),
        transforms.RandomErasing(value=(3, 77.7, 200)),
        transforms.RandomErasing(value="random"),
        transforms.Cutout(17, fill=9),
        transforms.ColorJitter(0.4, 0.4, 0.4, 0.1),
        transforms.RandomPosterize(3),
        transforms.RandomSolarize(0.5),
        transforms.RandomAutocontrast(),
        transforms.RandomInvert(),
        transforms.RandomGrayscale(0.5),
        transforms.MixUp(num_classes=7),
        transforms.MixUp(alpha=0.1, num_classes=7),
        transforms.CutMix(num_classes=7),
        transforms.RandomChoice(
            [transforms.MixUp(num_classes=7), transforms.CutMix(num_classes=7)]
        ),
    ],
    ids=repr,
)
def test_steps_on_a_gpu_give_what_they_give_on_the_cpu(step, dtype):
    if dtype == torch.uint8 and ("random" in repr(step) or "MixUp" in repr(step)):
        pytest.skip("for floats only")
    images = pixels(32, 50, 60)
    images = images if dtype == torch.uint8 else (images / 255).to(dtype)
    labels, samples = torch.arange(32) % 7, np.arange(32)
    on_device = {"label": labels.cuda()}
    tolerance = {torch.uint8: 1, torch.float16: 2e-3, torch.bfloat16: 1e-2}.get(dtype, 1.5e-5)
    for given in (images, images.contiguous(), images.transpose(2, 3)):
        expected, columns = step(given, {"label": labels}, samples=samples, seed=3)
        moved = given.cuda()
        step(moved, on_device, samples=samples, seed=3)
        with no_waiting():
            found, changed = step(moved, on_device, samples=samples, seed=3)
        assert found.stride() == expected.stride()
        assert_close(found, expected, tolerance)
        torch.testing.assert_close(changed["label"].cpu(), columns["label"])


@contextlib.contextmanager
def no_waiting():
    """Raise an error where the host would wait for the GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it calls itself a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


RECIPES = {
    "imagenet_v2": {"size": 40},
    "deit": {"size": 40},
    "deit3": {"size": 40},
    "simclr": {"size": 40},
    "byol": {"size": 40},
    "dino": {"size": 40, "small_size": 24, "num_small": 2},
    "cifar": {"size": 48, "mean": (0.5, 0.5, 0.5), "std": (0.2, 0.2, 0.2)},
    "airbench": {"size": 48, "mean": (0.5, 0.5, 0.5), "std": (0.2, 0.2, 0.2)},
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_on_a_gpu_give_what_they_give_on_the_cpu_and_wait_for_nothing(name):
    compose = getattr(transforms.recipes, name)(**RECIPES[name])
    compose = compose.bind(num_classes=7)
    images, labels = pixels(32, 50, 60), torch.arange(32) % 7
    expected = compose(images, {"label": labels}, samples=np.arange(32), seed=3)
    given, on_device = images.cuda(), {"label": labels.cuda()}
    compose(given, on_device, samples=np.arange(32), seed=3)
    with no_waiting():
        found = compose(given, on_device, samples=np.arange(32), seed=3)
    views, expected_views = (
        batch if isinstance(batch, tuple) else (batch,) for batch in (found[0], expected[0])
    )
    for one, other in zip(views, expected_views, strict=True):
        assert_close(one, other, 2 * LEVEL, 0.02)


def masks_and_boxes(count, height, width):
    """Return two masks of different types, and boxes of which some are none."""
    rng = np.random.default_rng(count)
    shape = (count, height, width)
    low = torch.from_numpy(rng.uniform(0, 40, (count, 6, 2)).astype(np.float32))
    boxes = torch.cat([low, low + 10], 2)
    boxes[:, 4:] = torch.nan
    return {
        "mask": torch.from_numpy(rng.integers(0, 200, shape, np.uint8)),
        "wide": torch.from_numpy(rng.integers(0, 60_000, shape, np.uint16)),
        "boxes": boxes,
        "label": torch.arange(count) % 7,
    }


@pytest.mark.parametrize("floats_first", [False, True])
def test_masks_and_boxes_on_a_gpu_are_those_on_the_cpu(floats_first):
    images, columns = pixels(32, 50, 60), masks_and_boxes(32, 50, 60)
    steps = [
        transforms.RandomHorizontalFlip(),
        transforms.RandomResizedCrop((70, 90)),
        transforms.RandomVerticalFlip(),
        transforms.ColorJitter(0.4),
        transforms.RandomCrop((75, 64), padding=9),
    ]
    if floats_first:
        steps.insert(0, transforms.ToDtype(torch.float32, scale=True))
    compose = transforms.Compose(steps, masks=["mask", "wide"], boxes=["boxes"], views=2)
    expected = compose(images, columns, samples=np.arange(32), seed=3)[1]
    on_device = {name: column.cuda() for name, column in columns.items()}
    found = compose(images.cuda(), on_device, samples=np.arange(32), seed=3)[1]
    for view in (0, 1):
        for name in ("mask", "wide", "boxes"):
            assert found[name][view].is_cuda
            on_cpu = found[name][view].cpu().numpy()
            assert np.array_equal(
                on_cpu, expected[name][view].numpy(), equal_nan=name == "boxes"
            ), name


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "step",
    [
        transforms.RandomAffine(180, (0.2, 0.3), (0.5, 2.0), (-20.0, 20.0, -9.0, 9.0)),
        transforms.RandomAffine(30, interpolation="bilinear", fill=1, center=[2.0, 7.0]),
        transforms.RandomRotation(180, interpolation="bilinear", fill=None),
        transforms.RandomPerspective(p=0.7, fill=1),
    ],
    ids=repr,
)
def test_warped_images_are_those_on_the_cpu(step, dtype):
    images, columns = pixels(32, 50, 60), masks_and_boxes(32, 50, 60)
    images = images if dtype == torch.uint8 else (images / 255).to(dtype)
    compose = transforms.Compose([step], masks=["mask", "wide"], boxes=["boxes"])
    expected, following = compose(images, columns, samples=np.arange(32), seed=3)
    on_device = {name: column.cuda() for name, column in columns.items()}
    found, followed = compose(images.cuda(), on_device, samples=np.arange(32), seed=3)
    tolerance = {torch.uint8: 1, torch.float16: 2e-3}.get(dtype, 5e-5)
    assert_close(found, expected, tolerance, 3e-3)
    for name in ("mask", "wide"):
        assert np.array_equal(followed[name].cpu().numpy(), following[name].numpy())
    torch.testing.assert_close(followed["boxes"].cpu(), following["boxes"], equal_nan=True)


def test_nothing_waits_for_the_gpu_where_masks_and_boxes_follow():
    images, columns = pixels(8, 50, 60).cuda(), masks_and_boxes(8, 50, 60)
    columns = {name: column.cuda() for name, column in columns.items()}
    columns["points"] = torch.rand(8, 5, 2, device="cuda")
    steps = [*EVERYTHING[:8], transforms.CenterCrop(50)]
    bound = {"masks": ["mask", "wide"], "points": ["points"]}
    compose = transforms.Compose(steps, **bound)
    warps = [
        transforms.RandomAffine(9),
        transforms.RandomRotation(9),
        transforms.RandomPerspective(),
    ]
    moving = transforms.Compose([*steps[:8], *warps], **bound, boxes=["boxes"])
    for one in (compose, moving):
        one(images, columns, samples=np.arange(8))
    with no_waiting():
        for one in (compose, moving):
            one(images, columns, samples=np.arange(8))


def test_masks_on_another_device_than_the_images_are_an_error():
    compose = transforms.Compose([transforms.CenterCrop(40)], masks=["mask"])
    with pytest.raises(ValueError, match="must be on cuda:0, as the images are, not on cpu"):
        compose(pixels(8, 50, 60).cuda(), masks_and_boxes(8, 50, 60))


def test_samples_on_the_gpu_are_understood():
    images = pixels(8, 50, 60).cuda()
    expected = transforms.train(32)(images, samples=np.arange(8))
    assert torch.equal(
        transforms.train(32)(images, samples=torch.arange(8, device="cuda")), expected
    )


@pytest.fixture(scope="module")
def compiler_started():
    """Start torch's compiler before a test is checked for leaks.

    Its first use starts a thread and maps a semaphore that stay, and gives warnings. Both belong to
    tqdm, for a progress bar that is never shown.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compile(lambda batch: batch + 1)(torch.zeros(1, device="cuda"))


@pytest.mark.parametrize("compiled", ["consumer", "caller"])
def test_torch_compile_works_over_the_result(compiled, compiler_started):
    images, transform = pixels(8, 50, 60).cuda(), transforms.train(32, dtype=torch.bfloat16)
    double = torch.compile(lambda batch: batch * 2 + 1)
    both = torch.compile(lambda batch: transform(batch, samples=np.arange(8)) * 2 + 1)
    made = transform(images, samples=np.arange(8))
    found = double(made) if compiled == "consumer" else both(images)
    torch.testing.assert_close(found, made * 2 + 1, rtol=0.02, atol=0.02)
