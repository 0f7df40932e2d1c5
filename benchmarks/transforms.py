"""Transforms of a batch, beside other libraries.

    python -m benchmarks.transforms --only recipes

Images a second, of calls one after another, with the host's part. Images are uint8 and channels-last,
as a Loader has them; an image counts once for all its views.

The basic recipe stands beside torchvision v2 and Kornia, if they are installed, with a draw for every
sample where they can. As in a Loader, memload's calls are for parts of stretches of samples, which it
plans at once. On the CPU, recipes are only those that a Loader without a GPU would use. ``--only``
takes the figures whose names contain one of its words.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import Benchmark, Way, named_ways, rate, run
from memload import transforms
from memload.transforms import recipes

IS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if IS_CUDA else "cpu"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
RECIPES = "recipes, of pictures of 256×256 or 32×32"
#: memload plans for so many samples at once. A measurement is of so many or a multiple, so that its
#: share of planning does not depend on when it begins.
SAMPLES_PER_PLAN = 8192
#: The recipes on the GPU, and what each makes of pictures of 256×256, or of 32×32 if it is 32.
SIZES = {"imagenet_v1": 224, "imagenet_v2": 176, "deit": 224, "deit3": 224, "convnext": 224}
SIZES |= {"simclr": 224, "byol": 224, "dino": 224, "mae": 224, "cifar": 32, "airbench": 32}
#: What is called, by the name of its figure. All calls are for the same number of images.
Calls = dict[str, Callable[[], Any]]


def random_images(batch: int, side: int) -> Tensor:
    """Return channels-last images."""
    shape = batch, side, side, 3
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE).permute(0, 3, 1, 2)


def in_stretches(transform: Any, images: Tensor, columns: Any = None) -> Callable[[], Any]:
    """Return what transforms the next batch of 2^15 samples, then of as many others."""

    def batches() -> Iterator[Any]:
        for epoch in itertools.count():
            prepared = transform.prepare(np.arange(1 << 15), epoch=epoch)
            for start in range(0, (1 << 15) - len(images) + 1, len(images)):
                yield prepared(images, columns, start, start + len(images))

    return batches().__next__


def of_memload(batch: int) -> Calls:
    """Return memload's recipes."""
    large, small = random_images(batch, 256), random_images(batch, 32)
    if not IS_CUDA:
        padded = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
        padded.append(transforms.Normalize("imagenet"))
        return {
            "resized crop, flip, normalise, 256": in_stretches(transforms.train(224), large),
            "padded crop, flip, normalise, 32": in_stretches(transforms.Compose(padded), small),
        }
    train = transforms.train(224, dtype=torch.bfloat16)
    calls = {"resized crop, flip, normalise": in_stretches(train, large)}
    labels = {"label": torch.randint(0, 1000, (batch,), device=DEVICE)}
    for name, size in SIZES.items():
        # the mean of the data set is a fact that a Loader would fill in
        own = {"mean": "imagenet"} if size == 32 else {}
        recipe = getattr(recipes, name)(size, dtype=torch.bfloat16, **own).bind(num_classes=1000)
        images = small if size == 32 else large
        calls[f"{RECIPES} › {name}({size}) › memload"] = in_stretches(recipe, images, labels)
    return calls


def of_others(batch: int) -> Calls:
    """Return the resized crop, flip, normalise and cast of other libraries, where installed."""
    images, calls = random_images(batch, 256), {}
    if find_spec("torchvision"):
        from torchvision.transforms import v2

        steps = [v2.RandomResizedCrop(224), v2.RandomHorizontalFlip()]
        steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
        theirs = v2.Compose(steps)
        calls["torchvision v2, one draw a batch"] = lambda: theirs(images).bfloat16()
        calls["torchvision v2, one draw a sample"] = lambda: torch.stack(
            [theirs(image) for image in images]
        ).bfloat16()
    if find_spec("kornia"):
        import kornia.augmentation as kornia

        kornias = torch.nn.Sequential(
            kornia.RandomResizedCrop((224, 224)),
            kornia.RandomHorizontalFlip(),
            kornia.Normalize(torch.tensor(MEAN), torch.tensor(STD)),
        )
        calls["kornia"] = lambda: kornias(images / 255).bfloat16()
    return calls


def repeated(call: Callable[[], Any], batch: int, repeats: int) -> int:
    """Call so many times; return the number of images."""
    for _ in range(repeats):
        call()
    return repeats * batch


def ways(options: Any, folder: Path) -> dict[str, Way]:
    """Return what is called, again and again."""
    batch, ours = options.batch, of_memload(options.batch)
    calls = named_ways(ours | of_others(batch), options.only)
    found: dict[str, Way] = {}
    for name, call in calls.items():
        repeats = SAMPLES_PER_PLAN // batch if IS_CUDA and name in ours else 1
        found[f"{name}, images/s"] = rate(partial(repeated, call, batch, repeats), 0.05)
    # compiled, and with all memory that it takes, before the first round
    warm_until = time.perf_counter() + 2
    while IS_CUDA and time.perf_counter() < warm_until:
        for call in calls.values():
            call()
        torch.cuda.synchronize()
    return found


BENCHMARKS = {
    "transforms": Benchmark(
        ways,
        {"batch": 256, "rounds": 30, "only": []},
        quick={"rounds": 3},
        facts={"device": DEVICE, "images": "in memory"},
    )
}

if __name__ == "__main__":
    run(BENCHMARKS)
