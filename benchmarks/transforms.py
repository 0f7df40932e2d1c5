"""Transforms of a batch, beside other libraries.

    python -m benchmarks.transforms --only recipes

Images a second, of calls one after another, with the host's part. Images are uint8 and channels-last,
as a Loader has them; an image counts once for all its views.

The basic recipe stands beside torchvision v2 and Kornia, if they are installed, with a draw for every
sample where they can, and operations beside torchvision v2 with one draw for the batch. As in a
Loader, memload's calls are for parts of stretches of samples, which it plans at once; "a call by
itself" is given its samples and cannot share work with the next. ``--only`` takes the figures whose
names contain one of its words.
"""

import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import Way, rate, run_benchmark
from memload import transforms
from memload.transforms import recipes

IS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if IS_CUDA else "cpu"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
#: Pillow's numbers, which all libraries take.
BILINEAR, BICUBIC = 2, 3
A_BATCH, A_SAMPLE = "torchvision v2, one draw a batch", "torchvision v2, one draw a sample"
#: The tables.
RECIPES = "recipes, of pictures of 256×256 or 32×32"
OPERATIONS = "operations, 224×224"
TRIVIAL = "TrivialAugmentWide, resized crop, flip, normalise"
CROP, PADDED = "resized crop, flip, normalise", "padded crop, flip, normalise, 32"
#: memload plans for so many samples at once. A measurement is of so many or a multiple, so that its
#: share of planning does not depend on when it begins.
SAMPLES_PER_PLAN = 8192
#: What is called, and for how many images, by the name of its figure.
Calls = dict[str, tuple[Callable[[], Any], int]]


def operations(of: Any) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return operations of `memload.transforms` or torchvision's v2; all change every image."""
    return {
        "RandomResizedCrop(224), bicubic": of.RandomResizedCrop(224, interpolation=BICUBIC),
        "TrivialAugmentWide()": of.TrivialAugmentWide(),
        "RandAugment()": of.RandAugment(),
        "ColorJitter(0.4, 0.4, 0.4, 0.1)": of.ColorJitter(0.4, 0.4, 0.4, 0.1),
        "GaussianBlur(9)": of.GaussianBlur(9),
        "GaussianBlur(23)": of.GaussianBlur(23),
        "RandomAffine(30, (0.1, 0.1), (0.8, 1.2), 10), bilinear": of.RandomAffine(
            30, (0.1, 0.1), (0.8, 1.2), 10, interpolation=BILINEAR
        ),
        "RandomPerspective(0.5), bilinear": of.RandomPerspective(0.5, p=1.0),
        "RandomAdjustSharpness(2)": of.RandomAdjustSharpness(2, p=1.0),
        "RandomSolarize(128)": of.RandomSolarize(128, p=1.0),
        "RandomPosterize(4)": of.RandomPosterize(4, p=1.0),
        "RandomAutocontrast()": of.RandomAutocontrast(p=1.0),
        "RandomEqualize()": of.RandomEqualize(p=1.0),
    }


def named_recipes() -> dict[str, tuple[transforms.Compose, int]]:
    """Return each recipe, bound as in a Loader, and the side of the pictures that it is given."""
    sizes = {"imagenet_v1": 224, "imagenet_v2": 176, "deit": 224, "deit3": 224, "convnext": 224}
    sizes |= {"simclr": 224, "byol": 224, "dino": 224, "mae": 224, "cifar": 32, "airbench": 32}
    found = {}
    for name, size in sizes.items():
        # the mean of the data set is a fact that a Loader would fill in
        own = {"mean": "imagenet"} if size == 32 else {}
        recipe = getattr(recipes, name)(size, dtype=torch.bfloat16, **own)
        found[f"{name}({size})"] = recipe.bind(num_classes=1000), 32 if size == 32 else 256
    return found


# Other libraries


def torchvision_v2() -> Any:
    """Return ``torchvision.transforms.v2``, or None where it is not installed."""
    if not find_spec("torchvision"):
        return None
    from torchvision.transforms import v2

    return v2


def crops_of_others(images: Tensor) -> Calls:
    """Return the resized crop, flip, normalise and cast of other libraries, where installed."""
    calls: dict[str, Callable[[], Any]] = {}
    if v2 := torchvision_v2():
        steps = [v2.RandomResizedCrop(224), v2.RandomHorizontalFlip()]
        ends = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
        trivial = v2.Compose([*steps, v2.TrivialAugmentWide(interpolation=BILINEAR), *ends])
        calls[f"{TRIVIAL} › {A_BATCH}"] = lambda: trivial(images).bfloat16()
        theirs = v2.Compose([*steps, *ends])
        calls[A_BATCH] = lambda: theirs(images).bfloat16()
        calls[A_SAMPLE] = lambda: torch.stack([theirs(image) for image in images]).bfloat16()
    if find_spec("kornia"):
        import kornia.augmentation as kornia

        kornias = torch.nn.Sequential(
            kornia.RandomResizedCrop((224, 224)),
            kornia.RandomHorizontalFlip(),
            kornia.Normalize(torch.tensor(MEAN), torch.tensor(STD)),
        )
        calls["kornia"] = lambda: kornias(images / 255).bfloat16()
    return {name: (call, len(images)) for name, call in calls.items()}


# What is called


def random_images(batch: int, side: int) -> Tensor:
    """Return channels-last images."""
    shape = batch, side, side, 3
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE).permute(0, 3, 1, 2)


def in_stretches(
    steps: Any, images: Tensor, columns: dict[str, Tensor] | None = None
) -> tuple[Callable[[], Any], int]:
    """Return what transforms the next batch of 2^15 samples, then of as many others."""
    transform = transforms.Compose(steps) if isinstance(steps, list) else steps

    def batches() -> Iterator[Any]:
        for epoch in itertools.count():
            prepared = transform.prepare(np.arange(1 << 15), epoch=epoch)
            for start in range(0, (1 << 15) - len(images) + 1, len(images)):
                yield prepared(images, columns, start, start + len(images))

    return batches().__next__, len(images)


def recipes_alone(batch: int) -> Calls:
    """Return memload's recipes."""
    large, small = random_images(batch, 256), random_images(batch, 32)
    train, numbers = transforms.train(224, dtype=torch.bfloat16), np.arange(batch)
    trivial = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip()]
    trivial += [transforms.TrivialAugmentWide(interpolation=BILINEAR)]
    trivial += [transforms.Normalize("imagenet"), transforms.ToDtype(torch.bfloat16)]
    labels = {"label": torch.randint(0, 1000, (batch,), device=DEVICE)}
    return {
        CROP: in_stretches(train, large),
        f"{CROP}, a call by itself": (lambda: train(large, samples=numbers), batch),
        f"{TRIVIAL} › memload": in_stretches(trivial, large),
        **{
            f"{RECIPES} › {name} › memload": in_stretches(
                recipe, small if side == 32 else large, labels
            )
            for name, (recipe, side) in named_recipes().items()
        },
    }


def all_calls(batch: int) -> Calls:
    """Return everything: on the CPU, recipes only as a Loader without a GPU would use them."""
    large = random_images(batch, 256)
    if IS_CUDA:
        calls = recipes_alone(batch)
    else:
        padded = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
        padded.append(transforms.Normalize("imagenet"))
        calls = {
            f"{CROP}, 256": in_stretches(transforms.train(224), large),
            PADDED: in_stretches(padded, random_images(batch, 32)),
        }
    calls |= crops_of_others(large)
    v2, images = torchvision_v2(), random_images(batch if IS_CUDA else min(64, batch), 224)
    theirs = operations(v2) if v2 else {}
    for name, operation in operations(transforms).items():
        calls[f"{OPERATIONS} › {name} › memload"] = in_stretches([operation], images)
        if v2:
            their = functools.partial(theirs[name], images)
            calls[f"{OPERATIONS} › {name} › {A_BATCH}"] = their, len(images)
    return calls


# How it is measured


def repeated(call: Callable[[], Any], batch: int, repeats: int) -> int:
    """Call so many times; return the number of images."""
    for _ in range(repeats):
        call()
    return repeats * batch


def ways(options: Any, folder: Path) -> dict[str, Way]:
    """Return what is called, again and again."""
    calls = {
        name: call
        for name, call in all_calls(options.batch).items()
        if not options.only or any(word in name for word in options.only)
    }
    if not calls:
        sys.exit(f"No name contains one of {options.only}. Give other words to --only.")
    found: dict[str, Way] = {}
    for name, (call, batch) in calls.items():
        is_ours = "torchvision" not in name and "kornia" not in name
        repeats = SAMPLES_PER_PLAN // batch if IS_CUDA and is_ours else 1
        run = functools.partial(repeated, call, batch, repeats)
        found[f"{name}, images/s"] = rate(run, 0.05)
    # compiled, and with all memory that it takes, before the first round
    warm_until = time.perf_counter() + 2
    while IS_CUDA and time.perf_counter() < warm_until:
        for call, _ in calls.values():
            call()
        torch.cuda.synchronize()
    return found


def times() -> dict[str, tuple[str, str]]:
    """Return the ratios of times, which are those of rates the other way round."""
    crop = CROP if IS_CUDA else f"{CROP}, 256"
    ratios = {
        f"time: {other} / {crop}": (f"{crop}, images/s", f"{other}, images/s")
        for other in (A_BATCH, A_SAMPLE, "kornia")
    }
    for name in operations(transforms):
        row = f"{OPERATIONS} › {name}"
        rates = (f"{row} › memload, images/s", f"{row} › {A_BATCH}, images/s")
        ratios[f"{row} › time: {A_BATCH} / memload"] = rates
    return ratios


if __name__ == "__main__":
    run_benchmark(
        ways,
        options={"batch": 256, "rounds": 30, "only": []},
        quick={"rounds": 3},
        ratios=times(),
        facts={"device": DEVICE, "images": "in memory"},
    )
