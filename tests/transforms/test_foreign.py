"""Random transforms of torchvision, which would draw once for a whole batch, are warned of.

Names that only torchvision has lead to what takes their place.

torchvision is not needed: classes of the same names and modules stand for its own.
"""

import sys
import warnings

import pytest
import torch

import memload
from memload import Loader, transforms


def make(name, module="v2._geometry", base=torch.nn.Module, **settings):
    """Return a transform as torchvision has it: a class of this name, with these attributes."""
    made = type(
        name, (base,), {"__module__": f"torchvision.transforms.{module}", "__call__": abs}
    )()
    vars(made).update(settings)
    return made


FLIP, CROP = make("RandomHorizontalFlip", p=0.5), make("CenterCrop")
V1_FLIP = make("RandomHorizontalFlip", "transforms", object, p=0.5)
OWN = type("Own", (type(FLIP),), {"__module__": "__main__"})()


class Augment:
    """A class of the user's."""

    def __init__(self, *steps):
        self.steps = {"all": steps}

    def __call__(self, images):
        return images


@pytest.mark.parametrize(
    "transform",
    [
        FLIP, V1_FLIP, OWN, Augment(CROP, FLIP), torch.nn.Sequential(CROP, FLIP),
        make("Compose", "transforms", object, transforms=[CROP, V1_FLIP]),
        make("Compose", "v2._container", transforms=[make("RandomApply", p=1.0, transforms=[FLIP])]),
        transforms.Compose([transforms.CenterCrop(4), FLIP]),
        transforms.Compose([torch.nn.Sequential(FLIP, FLIP)]),
    ],
)  # fmt: skip
def test_one_warning_names_ours(transform, make_dataset):
    was_there = "torchvision" in sys.modules  # another test may need it
    advice = r"would draw once .* Use memload\.transforms\.RandomHorizontalFlip instead\.$"
    with pytest.warns(UserWarning, match=f"torchvision's RandomHorizontalFlip {advice}") as caught:
        Loader(make_dataset().path, 5, transform=transform)
    assert [warning.filename for warning in caught] == [__file__]
    assert ("torchvision" in sys.modules) == was_there
    with pytest.warns(UserWarning, match="RandomHorizontalFlip"):
        memload.CudaPrefetcher([], transform=transform, device="cpu")


@pytest.mark.parametrize("name", [name for name in transforms.__all__ if "Random" in name])
def test_no_transform_of_ours_is_said_to_be_missing(name, make_dataset):
    with pytest.warns(UserWarning, match=rf"Use memload\.transforms\.{name} instead\.$"):
        Loader(make_dataset().path, 5, transform=make(name))


@pytest.mark.parametrize(
    ("name", "settings"),
    [("RandomZoomOut", {}), ("AugMix", {}), ("ElasticTransform", {}), ("RandomIoUCrop", {"p": 1}),
     ("JPEG", {"quality": [50, 100]})],
)  # fmt: skip
def test_what_has_no_equivalent_is_told(name, settings, make_dataset):
    step = torch.nn.Sequential(make(name, **settings), make("ColorJitter"))
    with pytest.warns(
        UserWarning, match=f"Use memload.transforms.ColorJitter instead. .*has no {name}:"
    ):
        Loader(make_dataset().path, 5, transform=step)


@pytest.mark.parametrize(
    "step",
    [
        CROP, make("Normalize"), make("Resize"), make("ToDtype", "v2._misc"), make("Grayscale"),
        make("GaussianBlur", sigma=(1.0, 1.0)), make("RandomGrayscale", p=1.0), make("RandomErasing", p=0),
        transforms.RandomHorizontalFlip(), torch.nn.Identity(), abs, None,
    ],
)  # fmt: skip
def test_what_draws_nothing_or_for_each_sample_is_not_warned_of(step, make_dataset):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Loader(make_dataset().path, 5, transform=step)
        if step is not None:
            Loader(make_dataset().path, 5, transform=transforms.Compose([step]))


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("ToTensor", r"Leave it out.* arrive as uint8 tensors"),
        ("Grayscale", r"RandomGrayscale\(p=1\)"),
        ("Lambda", "Put the function itself into the list"),
        ("RandomOrder", "RandomChoice of lists"),
        ("ElasticTransform", r"MemmapDataset\(transform"),
        ("RandomPhotometricDistort", r"MemmapDataset\(transform"),
    ],
)
def test_names_of_torchvision_lead_to_what_takes_their_place(name, advice):
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'. .*{advice}"):
        getattr(transforms, name)


def test_other_names_are_just_not_there():
    assert not hasattr(transforms, "__wrapped__")
    with pytest.raises(AttributeError, match=r"has no attribute 'resize'$"):
        _ = transforms.resize
    with pytest.raises(AttributeError, match=r"has no attribute 'RandomResizeCrop'$"):
        _ = transforms.RandomResizeCrop
