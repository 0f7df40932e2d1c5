"""Batches are computed in parts, so that memory is saved and results stay the same."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from memload import transforms
from memload.transforms import color, sub_batches
from memload.transforms.transform import Transform
from tests.transforms.processors import FUSES

Make = Callable[..., torch.Tensor]
STEPS = [
    transforms.GaussianBlur(3),
    transforms.GaussianBlur(41),
    *(transforms.RandomAdjustSharpness(2, p) for p in (0.9, 1)),
    *(transforms.RandomSolarize(0.5, p) for p in (0.9, 1)),
    *(transforms.RandomInvert(p) for p in (0.9, 1)),
    *(transforms.RandomAutocontrast(p) for p in (0.9, 1)),
    *(transforms.RandomEqualize(p) for p in (0.9, 1)),
    transforms.RandomAffine(20, (0.1, 0.1)),
    transforms.RandomAffine(20, (0.1, 0.1), interpolation="bilinear"),
    transforms.RandomRotation(20, interpolation="bilinear", fill=None),
    *(transforms.RandomPerspective(p=p) for p in (0.8, 1)),
    transforms.ColorJitter(brightness=0.4),
    transforms.ColorJitter(contrast=0.4),
    transforms.ColorJitter(saturation=0.4),
    transforms.ColorJitter(hue=0.1),
    transforms.ColorJitter(0.4, 0.4, 0.4, 0.1),
    *(transforms.RandomGrayscale(p) for p in (0.2, 1)),
    transforms.RandomHorizontalFlip(),
]
FACTORS = np.linspace(0, 2, 20)
#: Bytes that a bilinear warp of one image of 64×64 may need beyond this, see docs/transforms.md.
MORE_FOR_ONE_IMAGE = 0 if FUSES else 70 * 3 * 64 * 64


class PeakOfBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operations return, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        result = function(*arguments, **(options or {}))
        if isinstance(result, torch.Tensor):
            reference = StorageWeakRef(result.untyped_storage())
            self._storages[reference.cdata] = reference, result.untyped_storage().nbytes()
        alive = [size for storage, size in self._storages.values() if not storage.expired()]
        self.peak = max(self.peak, sum(alive))
        return result


@pytest.fixture(params=[torch.uint8, torch.float32], ids=str)
def images(request: Any, make_images: Make) -> torch.Tensor:
    """20 images of 64×64, channels-last."""
    images = make_images(20, 64, 64)
    return images if request.param == torch.uint8 else images / 255


@pytest.mark.parametrize("step", STEPS, ids=repr)
def test_memory_beyond_input_and_output_is_at_most_twice_the_batch(
    step: Transform, images: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sub_batches, "_CACHED_BYTES", images.nbytes)
    step(images, samples=np.arange(20))  # what is computed only once
    with PeakOfBytes() as mode:
        result = step(images, samples=np.arange(20))
    assert result.dtype == images.dtype
    # Views of the input count as well.
    assert mode.peak <= 4 * images.nbytes + MORE_FOR_ONE_IMAGE


MIX, CUT = transforms.MixUp(num_classes=2), transforms.CutMix(num_classes=2)
MIXING = [
    transforms.RandomChoice([MIX, CUT]),
    transforms.RandomChoice([MIX, CUT], [1, 9]),
    transforms.RandomApply([MIX], 1.0),
    transforms.RandomApply([transforms.RandomChoice([MIX, CUT])], 0.5),
]


@pytest.mark.parametrize("step", MIXING, ids=repr)
def test_choosing_what_mixes_needs_at_most_twice_the_batch(
    step: Transform, make_images: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, columns = make_images(20, 64, 64) / 255, {"label": torch.arange(20) % 2}
    expected = step(images, columns, samples=np.arange(20))
    for available in (1, images.nbytes, 3 * images.nbytes):
        monkeypatch.setattr(sub_batches, "_CACHED_BYTES", available)
        with PeakOfBytes() as mode:
            found, labels = step(images, columns, samples=np.arange(20))
        assert torch.equal(found, expected[0])
        assert torch.equal(labels["label"], expected[1]["label"])
        if available <= images.nbytes:
            assert mode.peak <= 4 * images.nbytes


@pytest.mark.parametrize("change", [color.adjust_contrast, color.adjust_saturation])
def test_colours_need_at_most_twice_the_batch(
    change: Any, images: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sub_batches, "_CACHED_BYTES", images.nbytes)
    with PeakOfBytes() as mode:
        change(images, FACTORS)
    assert mode.peak <= 4 * images.nbytes


@pytest.mark.parametrize("step", STEPS, ids=repr)
def test_results_are_the_same_whatever_the_parts(
    step: Transform, images: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = step(images, samples=np.arange(20))
    for available in (1, images.nbytes, 3 * images.nbytes):
        monkeypatch.setattr(sub_batches, "_CACHED_BYTES", available)
        assert torch.equal(step(images, samples=np.arange(20)), expected)
