"""Images of any strides give what contiguous ones do."""

import numpy as np
import pytest
import torch

from memload import transforms

T = transforms
STEPS = [
    T.ColorJitter(0.4),
    T.ColorJitter(0.4, 0.4, 0.4, 0.1),
    T.RandomEqualize(1),
    T.RandomAutocontrast(1),
    T.RandomSolarize(100, 1),
    T.RandomAdjustSharpness(2, 1),
    T.GaussianBlur(3),
    T.RandomAffine(30, interpolation="bilinear"),
    T.RandomErasing(1),
    T.RandomCrop(9, padding=2),
    T.Resize(9),
    T.TrivialAugmentWide(),
]
VIEWS = {
    "turned": lambda images: images.mT,
    "channels first": lambda images: images.transpose(0, 1).contiguous().transpose(0, 1),
    "samples last": lambda images: images.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1),
    "part": lambda images: images.contiguous(memory_format=torch.channels_last)[..., 2:-2, 2:-2],
    "repeated": lambda images: images[:1].expand(6, -1, -1, -1),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("step", STEPS, ids=lambda step: type(step).__name__)
def test_strides_change_no_pixel(step, view):
    images = torch.randint(0, 256, (6, 3, 17, 21), dtype=torch.uint8)
    images, samples = VIEWS[view](images), np.arange(6)
    expected = step(images.contiguous(), samples=samples)
    assert torch.equal(step(images, samples=samples), expected)
    alone = [step(images[i : i + 1], samples=[i]) for i in samples]
    assert torch.equal(torch.cat(alone), expected)
