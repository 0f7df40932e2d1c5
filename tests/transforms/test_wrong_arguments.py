"""A mistake is an error of one line: which transform, which argument, and what was given."""

import re

import pytest
import torch

from memload import transforms

T = transforms
#: Transforms, arguments that they need, and wrong values of each of their arguments.
ARGUMENTS = [
    (T.AutoAugment, {}, {"policy": ["mnist"]}),
    (T.CenterCrop, {}, {"size": [(1, 2, 3), 0, None]}),
    (T.ColorJitter, {}, {"brightness": [-1], "hue": [(0, 0.6)]}),
    (T.Compose, {}, {"points": ["at"], "masks": ["m"], "boxes": ["b"], "mask_fill": [0.5]}),
    (T.Compose, {}, {"memory_format": ["a"], "views": [[], 0]}),
    (T.Cutout, {"size": 2}, {"fill": ["red"], "p": [2]}),
    (T.GaussianBlur, {"kernel_size": 3}, {"kernel_size": [4], "sigma": [-1]}),
    (T.MixUp, {}, {"alpha": [0], "labels_getter": [len]}),
    (T.CutMix, {}, {"num_classes": [2.5]}),
    (T.Normalize, {}, {"mean": ["cifar"]}),
    (T.Normalize, {"mean": 0.5, "std": 0.5}, {"inplace": [True]}),
    (T.RandAugment, {}, {"num_ops": [-1], "magnitude": [31]}),
    (T.RandomAffine, {"degrees": 0}, {"degrees": [-1], "translate": [(0, 2)], "scale": [(0, 1)]}),
    (T.RandomAffine, {"degrees": 0}, {"shear": [(1, 2, 3)], "center": [(1,)]}),
    (T.RandomApply, {"transforms": [abs]}, {"transforms": [None, [], T.RandomInvert()], "p": [2]}),
    (T.RandomChoice, {"transforms": [abs]}, {"transforms": [[]], "p": [[1, 2], [0], 0.5, [-1]]}),
    (T.RandomCrop, {"size": 4}, {"padding": [-1], "padding_mode": ["wrap"], "fill": ["red"]}),
    (T.RandomErasing, {}, {"ratio": [2], "value": ["red"]}),
    (T.RandomHorizontalFlip, {}, {"p": [1.5, "often"]}),
    (T.RandomPerspective, {}, {"distortion_scale": [2], "interpolation": ["bicubic"]}),
    (T.RandomResizedCrop, {"size": 4}, {"scale": [(1, 0)], "ratio": [(0, 1)]}),
    (T.RandomRotation, {"degrees": 5}, {"expand": [True]}),
    (T.Resize, {"size": 8}, {"max_size": [8], "interpolation": ["box"], "antialias": ["no", None]}),
    (T.TimmRandAugment, {}, {"magnitude": [-1], "p": [2]}),
    (T.ToDtype, {}, {"dtype": [torch.int32]}),
    (T.TrivialAugmentWide, {}, {"num_magnitude_bins": [1], "fill": ["red"]}),
    (T.evaluate, {}, {"size": [(8, 8)]}),
    (T.recipes.dino, {}, {"num_small": [-1]}),
]


@pytest.mark.parametrize(("make", "needed", "wrong"), ARGUMENTS)
def test_a_wrong_argument_is_named_with_its_value(make, needed, wrong):
    for argument, values in wrong.items():
        for value in values:
            found = re.escape(f"not {value!r}")
            with pytest.raises(ValueError, match=f"^{make.__name__}: {argument} must .*{found}"):
                make(**needed | {argument: value})


IMAGES = torch.zeros((2, 3, 8, 9), dtype=torch.uint8)
FLOATS = IMAGES / 255
LABELS = {"label": torch.arange(2)}
MASKS = {"m": IMAGES[:, 0]}


CROP = T.RandomCrop(4)


class Own(T.Transform):
    """A transform that returns what a function makes of the batch."""

    def __init__(self, made):
        self.made = made

    def apply(self, batch, drawn):
        return self.made(batch)


def moving(images=IMAGES, columns=None, steps=(CROP,), **names):
    return T.Compose(steps, **names)(images, columns)


MISTAKES = [
    # lists
    (lambda: T.Compose(T.CenterCrop(4), T.Normalize()), r"one list, not 2 arg.* Compose\(\[...\]\)"),
    (lambda: T.Compose(T.Resize(8)), r"Compose takes a list.*not Resize\(.*Write \[...\]"),
    (lambda: T.Compose([3]), "Compose got 3, which is neither a transform"),
    (lambda: T.Compose([T.Resize]), r"Compose got Resize itself. Write Resize\(...\)"),
    (lambda: T.Compose([T.train]), r"Compose got train itself. Write train\(...\)"),
    (lambda: T.Compose([T.Compose([], views=2)]), "Give them to the outer one"),
    (lambda: T.Compose([T.Compose([], mask_fill=0)]), "mask_fill.*to the outer one"),
    # arguments that do not go together, or are of other libraries
    (lambda: T.CutMix(p=0.5), r"^CutMix.__init__\(\) got an unexpected .* 'p'"),
    (lambda: T.Resize(None), "Resize: neither size nor max_size was given"),
    (lambda: T.RandomCrop(4, padding_mode="edge", fill=[1, 2, 3]), "fill .*one number with padd"),
    (lambda: T.Normalize("imagenet", 0.5), "Normalize: std must be left out, since mean is"),
    (lambda: T.Normalize([0.5]), "Normalize: mean is .*Give both or neither"),
    (lambda: T.Normalize([0.5] * 2, [0.5] * 3), "mean and std must be of equal length"),
    (lambda: T.TimmRandAugment("rand-m9-mstd0.5-inc1"), "rand-m9.* is magnitude=9, mstd=0.5,"),
    (lambda: T.MixUp().bind(masks=["m"]), "MixUp cannot mix masks.*Leave MixUp out.*columns=…"),
    (lambda: T.CutMix().bind(boxes=["b"]), "CutMix cannot mix boxes, such as .*columns=…"),
    # images
    (lambda: T.RandomCrop(5)(IMAGES[0]), r"^RandomCrop: images .* of shape \(3, 8, 9\).*Loader"),
    (lambda: T.train(8)(IMAGES.numpy()), "Compose: images .*a value of type ndarray"),
    (lambda: T.train(8)(IMAGES.int()), "images must be uint8 or .*, not torch.int32. Begin"),
    (lambda: T.train(8)(IMAGES[:, :, :0]), r"images must be .*not .*\(2, 3, 0, 9\)"),
    (lambda: T.Resize(4)(torch.zeros(2, 20, 24, 3)), "Write images.permute"),
    (lambda: T.RandomCrop(9)(IMAGES), "size must be at most the 8 .*Give padding"),
    (lambda: T.RandomCrop(9, 8, padding_mode="reflect")(IMAGES), "padding .*at most 7 for 8 pix"),
    (
        lambda: T.RandomCrop(25, 1, pad_if_needed=True, padding_mode="reflect")(IMAGES),
        "padding .* at most 7 for 8 pixels with padding_mode='reflect', not 16",
    ),
    (lambda: T.RandomCrop(4, 1, fill=(1, 2))(IMAGES), "RandomCrop: fill .*3 channels, not 2 num"),
    (lambda: T.RandomCrop(4, fill=0.5)(IMAGES), "fill .*not 0.5. Multiply it by 255"),
    (lambda: T.Cutout(2, fill=-1)(IMAGES), "fill must be from 0 to 255 .*not -1.$"),
    (lambda: T.TrivialAugmentWide(fill=(1, 2))(IMAGES), "fill .*3 channels, not 2 numbers"),
    (lambda: T.TrivialAugmentWide()(IMAGES[:, :2]), "images must be of 1 or 3 .*not of 2"),
    (lambda: T.TrivialAugmentWide()(FLOATS), "uint8, as some .*float32. Put it before"),
    (lambda: T.Normalize([0.5] * 4, [1.0] * 4)(IMAGES), "4 channels, but .* have 3"),
    (lambda: T.Normalize([124] * 3, [58] * 3)(IMAGES), r"0 to 1, not \(124.*by 255"),
    # what else a call is given
    (lambda: T.train(8)(IMAGES, samples=[1]), "number of images must be 1, one for each .*not 2"),
    (lambda: T.train(8)(IMAGES, samples=[0.5, 1]), "samples must be .*, not float64"),
    (lambda: T.train(8)(IMAGES, seed="a"), "seed must be an integer, not 'a'"),
    (lambda: T.train(8)(IMAGES, torch.zeros(2)), "columns must be tensors by name"),
    (lambda: T.train(8)(IMAGES, {"a": [1, 2]}), r"columns\['a'\] .*a value of type list"),
    # labels
    (lambda: T.MixUp()(FLOATS, LABELS), r"Write MixUp\(num_classes=…\)"),
    (lambda: T.CutMix(num_classes=1)(IMAGES, LABELS), "from 0 to 0, .*not 0 to 1"),
    (lambda: T.CutMix(num_classes=2)(IMAGES, {"label": torch.zeros(2, 3)}), "of 2 classes, not of"),
    (lambda: T.CutMix(num_classes=2)(IMAGES, {"label": torch.zeros(2)}), r"integers \(2,\) or sha"),
    (lambda: T.CutMix(num_classes=2)(IMAGES), "no column 'label' .* columns given are: none"),
    (
        lambda: T.MixUp(num_classes=2)(FLOATS, {"labels": LABELS["label"]}),
        "^MixUp: there is no column 'label' .* are: labels. Give labels by this name.*mix=False",
    ),
    # masks, points and boxes
    (lambda: moving(points=["at"]), r"columns\['at'\] must be .*, since points names it, not None"),
    (lambda: moving(IMAGES, {"b": FLOATS[:, 0, 0]}, boxes=["b"]), r"'b'\].*K, 4\), since boxes"),
    (lambda: moving(masks=["m"]), r"Compose: columns\['m'\] .* \(2, H, W\), since masks .*not None"),
    (
        lambda: moving(IMAGES, {"m": FLOATS[:, 0]}, masks=["m"]),
        r"integers \(2, H, W\).*not a torch.float32 tensor of shape \(2, 8, 9\)",
    ),
    (
        lambda: moving(IMAGES[:, :, :, 1:], MASKS, masks=["m"]),
        r"columns\['m'\] must be as large as the images, 8×8 pixels, not 8×9. Resize one",
    ),
    (
        lambda: moving(IMAGES, MASKS, masks=["m"], mask_fill=256),
        "mask_fill must be from 0 to 255 for the torch.uint8 of 'm', not 256",
    ),
    # what steps of the user's return
    (lambda: T.Compose([torch.sum])(IMAGES), r"sum: what it returns must be .* of shape \(\)"),
    (lambda: T.Compose([torch.Tensor.int])(IMAGES), "must be uint8 .*torch.int32"),
    (
        lambda: moving(IMAGES, MASKS, [lambda images: images[..., 1:]], masks=["m"]),
        r"^<lambda>: .*as large as the images, 8×8 pixels, not 8×9.*write a Transform .*masks=\[\]",
    ),
    (
        lambda: moving(IMAGES, MASKS, [Own(lambda b: b._replace(columns={}))], masks=["m"]),
        r"^Own: columns\['m'\] must be .*, since masks names it, not None",
    ),
    (lambda: Own(lambda batch: batch.images)(IMAGES), "Own: what apply returns must be a"),
    (lambda: T.Transform()(IMAGES), r"Transform has no method apply\(batch, drawn\)"),
]  # fmt: skip


@pytest.mark.parametrize(("act", "message"), MISTAKES)
def test_a_mistake_names_what_is_wrong_and_what_to_do(act, message):
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        act()
