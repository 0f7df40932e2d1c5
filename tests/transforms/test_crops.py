import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import interpolate, pad

from memload import transforms
from memload.transforms.draws import Draws
from memload.transforms.passes import group

IMAGENET = (
    torch.tensor([0.485, 0.456, 0.406])[:, None, None],
    torch.tensor([0.229, 0.224, 0.225])[:, None, None],
)


def plan_of(images, *steps, seed=0):
    """Return what these steps, in one pass, come to for samples 0 to N - 1."""
    ((_, together),) = group(steps)
    return together.plan(Draws(np.arange(len(images)), seed, 0), images)


def padded(image, fill=0, margin=200):
    return pad(image, [margin] * 4, value=fill)


def pillow(image, size):
    """Resize (C, H, W) as Pillow does."""
    picture = Image.fromarray(image.permute(1, 2, 0).numpy())
    resized = picture.resize(size[::-1], Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1)


def test_flips_turn_those_samples_that_are_drawn(make_images):
    images = make_images(400, 4, 5)
    flips = [transforms.RandomHorizontalFlip(), transforms.RandomVerticalFlip(0.25)]
    found = transforms.Compose(flips)(images)
    for dims, expected in (((), 150), ((-1,), 150), ((-2,), 50), ((-2, -1), 50)):
        assert abs((found == images.flip(dims)).flatten(1).all(1).sum() - expected) < 40


@pytest.mark.parametrize("kind", ["RandomHorizontalFlip", "RandomVerticalFlip"])
def test_an_alternating_flip_shows_both_versions_in_any_two_epochs(kind, make_images):
    images, samples = make_images(400, 4, 5), np.arange(400)
    flip = getattr(transforms, kind)(p=0.3, alternate=True)

    def flipped(epoch, **options):
        return (flip(images, samples=samples, epoch=epoch, **options) != images).flatten(1).any(1)

    first = flipped(0)
    assert abs(int(first.sum()) - 120) < 40
    for epoch in range(6):
        assert torch.equal(flipped(epoch), first ^ (epoch % 2 == 1))
    assert abs(int((flipped(0, seed=1) & first).sum()) - 36) < 25
    other = getattr(transforms, kind)(p=0.3)
    epochs = [other(images, samples=samples, epoch=epoch) for epoch in (0, 2)]
    assert not torch.equal(*epochs)
    assert repr(flip) == f"{kind}(p=0.3, alternate=True)"
    assert repr(other) == f"{kind}(p=0.3)"


@pytest.mark.parametrize(
    ("make", "of_epoch_2"),
    [
        (transforms.CenterCrop, (9, 9)),
        (transforms.RandomResizedCrop, (9, 9)),
        (transforms.Resize, (9, 10)),
        (lambda size: transforms.Resize(size, max_size=12), (9, 10)),
    ],
)
def test_a_size_may_be_a_function_of_the_epoch(make, of_epoch_2, make_images):
    images, samples = make_images(), np.arange(8)
    step = make(lambda epoch: 5 + 2 * epoch)
    found = step(images, samples=samples, epoch=2)
    assert found.shape[2:] == of_epoch_2
    assert torch.equal(found, make(9)(images, samples=samples, epoch=2))
    prepared = transforms.Compose([step]).prepare(samples, epoch=2)
    assert torch.equal(prepared(images[3:5], None, 3, 5), found[3:5])
    assert step(images, samples=samples).shape[2] == 5
    with pytest.raises(ValueError, match=r"size in epoch 3 must be an integer of .*, not 'x'"):
        make(lambda epoch: "x")(images, epoch=3)


@pytest.mark.parametrize(
    ("height", "width", "size", "top", "left"),
    [
        (20, 24, 8, 6, 8),
        (21, 23, 8, 6, 8),
        (23, 25, (8, 9), 8, 8),
        (20, 24, 25, -2, 0),
        (20, 24, (9, 33), 6, -4),
    ],
)
def test_center_crop_rounds_as_torchvision(height, width, size, top, left, make_images):
    images = make_images(3, height, width)
    h, w = (size, size) if isinstance(size, int) else size
    expected = padded(images)[:, :, 200 + top : 200 + top + h, 200 + left : 200 + left + w]
    assert torch.equal(transforms.CenterCrop(size)(images), expected)


@pytest.mark.parametrize("fill", [0, (123.675, 116.28, 103.53)])
@pytest.mark.parametrize(
    ("padding", "sides"),
    [(None, (0,) * 4), (4, (4,) * 4), ((1, 2), (1, 2, 1, 2)), ((1, 2, 3, 4),) * 2],
)
def test_random_crop_is_a_window_of_the_padded_image(padding, sides, fill, make_images, functional):
    images = make_images(300, 6, 7)
    found = transforms.RandomCrop((5, 6), padding, fill=fill)(images)
    # Fractions are cut off, as torchvision's pad has it.
    hits = windows_like(found, functional.pad(images, sides, fill))
    assert hits.any((1, 2)).all()
    once = hits[hits.sum((1, 2)) == 1].sum(0)
    for places in (once.sum(0), once.sum(1)):  # each comes up
        assert places.min() > 0.3 * places.sum() / len(places)


def windows_like(found, images):
    """Return which windows of images, at (top, left), show what was found."""
    windows = images.unfold(2, found.shape[2], 1).unfold(3, found.shape[3], 1).movedim(1, 3)
    return (windows == found[:, None, None]).flatten(3).all(3)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float16])
@pytest.mark.parametrize("padding_mode", ["edge", "reflect", "symmetric"])
def test_flipped_images_and_masks_are_padded_like_torchvisions(
    padding_mode, dtype, make_images, functional
):
    images, flip = make_images(20, 6, 7).to(dtype), transforms.RandomHorizontalFlip(1)
    masks, sides = images[:, 0].to(torch.int16), [1, 2, 3, 5]
    for size, flips in (((13, 11), []), ((13, 11), [flip]), ((4, 6), []), ((4, 6), [flip])):
        crop = transforms.RandomCrop(size, sides, padding_mode=padding_mode)
        compose = transforms.Compose([*flips, crop], masks=["mask"])
        found, columns = compose(images, {"mask": masks})
        together = torch.cat([found, columns["mask"][:, None]], 1)
        whole = images.flip(3) if flips else images
        whole = functional.pad(whole, sides, padding_mode=padding_mode)
        assert windows_like(together, torch.cat([whole, whole[:, :1]], 1)).any((1, 2)).all()


@pytest.mark.parametrize("padding_mode", ["edge", "reflect", "symmetric"])
@pytest.mark.parametrize("resize_first", [True, False])
def test_padding_is_that_of_what_is_cropped(padding_mode, resize_first, functional, make_images):
    resize = transforms.Resize((11, 13))
    crop = transforms.RandomCrop((19, 21), 4, padding_mode=padding_mode)  # all of it
    images = make_images(5, 20, 24)[:, :, :11, :13] if not resize_first else make_images(5)
    found = transforms.Compose([resize, crop] if resize_first else [crop, resize])(images)
    expected = resize(images) if resize_first else images
    expected = functional.pad(expected, [4] * 4, padding_mode=padding_mode)
    assert torch.equal(found, expected if resize_first else resize(expected))


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("size", [(7, 9), (30, 50), (11, 60), (20, 24), (1, 2)])
def test_resize_is_torchs_and_pillows_within_a_level(size, antialias, make_images):
    images = make_images()
    found = transforms.Resize(size, antialias=antialias)(images)
    assert torch.equal(found, interpolate(images, size, mode="bilinear", antialias=antialias))
    exact = interpolate(images.double(), size, mode="bilinear", antialias=antialias)
    assert (found - exact).abs().max() <= 1.01  # the rows are rounded, then the columns
    if antialias:
        expected = torch.stack([pillow(image, size) for image in images])
        assert (found.int() - expected.int()).abs().max() <= 1


@pytest.mark.parametrize(
    ("height", "width", "size", "max_size", "expected"),
    [
        (20, 30, 10, None, (10, 15)),
        (30, 20, 11, None, (16, 11)),
        (20, 60, 10, 20, (6, 20)),
        (20, 60, [10], None, (10, 30)),
        (20, 41, None, 10, (4, 10)),
        (41, 20, None, 82, (82, 40)),
    ],
)
def test_one_number_is_for_the_shorter_side_and_max_size_for_the_longer(
    height, width, size, max_size, expected
):
    images = torch.zeros((2, 3, height, width), dtype=torch.uint8)
    assert transforms.Resize(size, max_size=max_size)(images).shape[2:] == expected


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("size", [(9, 9), (30, 17)])
def test_a_resized_crop_is_the_resized_box(size, antialias, make_images):
    images = make_images(30, 40, 50)
    step = transforms.RandomResizedCrop(size, antialias=antialias)
    found = step(images, samples=np.arange(30))
    boxes = plan_of(images, step).boxes()[:, [0, 1, 4, 5]].tolist()
    assert len(set(map(tuple, boxes))) == 30
    for image, result, (top, h, left, w) in zip(images, found, boxes, strict=True):
        box = image[None, :, top : top + h, left : left + w]
        assert box.shape[-2:] == (h, w)
        expected = interpolate(box, size, mode="bilinear", antialias=antialias)[0]
        assert torch.equal(result, expected)


def test_a_crop_that_never_fits_is_the_middle_as_wide_as_the_ratio_allows(make_images):
    for height, width, h, w in ((10, 100, 10, 20), (100, 10, 20, 10)):
        step = transforms.RandomResizedCrop(8, scale=(1, 1), ratio=(0.5, 2))
        table = plan_of(make_images(5, height, width), step).boxes()
        assert table[:, [1, 5]].tolist() == [[h, w]] * 5
        assert table[:, [0, 4]].tolist() == [[(height - h) // 2, (width - w) // 2]] * 5


def test_normalize_and_to_dtype_are_torchvisions_formulas(make_images):
    images, (mean, std), normalize = make_images(), IMAGENET, transforms.Normalize("imagenet")
    scaled = images / 255
    expected = (scaled - mean) / std
    scale = transforms.ToDtype(torch.float32, scale=True)
    for found in (
        normalize(images), normalize(scaled), transforms.Compose([scale, normalize])(images)
    ):  # fmt: skip
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(transforms.ToDtype(torch.float16)(images), images.half())
    assert torch.equal(transforms.ToDtype(torch.bfloat16, scale=True)(images), scaled.bfloat16())
    unscaled = [transforms.ToDtype(torch.float32), transforms.Normalize([9.0], [3.0])]
    found = transforms.Compose(unscaled)(images)
    torch.testing.assert_close(found, (images.float() - 9) / 3)


def test_a_large_mean_over_a_small_deviation_does_not_cancel():
    images = 288 + torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 0.01
    found = transforms.Normalize(288.0, 0.001)(images)
    assert torch.allclose(found.double(), (images.double() - 288) / 0.001, rtol=1e-6, atol=0)


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize(
    "last",
    [
        transforms.Normalize("imagenet"),
        transforms.ToDtype(torch.bfloat16, scale=True),
        torch.nn.Identity(),
    ],
)
def test_either_layout_in_and_out_gives_the_same(last, layout, make_images):
    images, moves = make_images(), [transforms.RandomHorizontalFlip(), transforms.RandomCrop(12, 2)]
    for steps in ([last], moves, [*moves, last]):
        expected = transforms.Compose(steps)(images)
        for source in (images, images.contiguous()):
            found = transforms.Compose(steps, memory_format=layout)(source)
            assert found.is_contiguous(memory_format=layout)
            assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_floating_images_can_be_moved_and_resized(dtype, make_images):
    images = (make_images() / 255).to(dtype)
    assert torch.equal(
        transforms.CenterCrop(9)(images), transforms.CenterCrop(9)(make_images()).div(255).to(dtype)
    )
    expected = interpolate(images.float(), (9, 9), mode="bilinear", antialias=True)
    torch.testing.assert_close(transforms.Resize((9, 9))(images), expected.to(dtype))


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 10, 31])
def test_a_width_of_one_pixel_is_what_a_height_of_one_is(length, antialias, make_images):
    images = make_images(2, length, 7)
    for pixels, most in ((images, 1), (images.float(), 1e-3), (images.double(), 1e-9)):
        lying = transforms.Resize((1, 5), antialias=antialias)(pixels)
        standing = transforms.Resize((5, 1), antialias=antialias)(pixels.transpose(2, 3))
        assert standing.dtype == pixels.dtype
        assert (standing.double() - lying.transpose(2, 3).double()).abs().max() <= most


@pytest.mark.parametrize(
    "step",
    [transforms.CenterCrop((20, 24)), transforms.RandomHorizontalFlip(0), transforms.RandomCrop(9)],
)
def test_results_are_new_memory_and_the_images_given_stay_as_they_are(step, make_images):
    images = make_images(2)
    made = step(images)
    assert torch.equal(images, make_images(2))
    assert made.untyped_storage().data_ptr() != images.untyped_storage().data_ptr()
