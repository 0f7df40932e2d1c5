"""Transforms of a batch, beside other libraries.

    python -m benchmarks.transforms --only recipes

Images a second, of calls one after another, with the host's part; or, "on the device", without it.
Images are uint8 and channels-last, as a Loader has them; an image counts once for all its views.

On the CPU operations stand beside torchvision v2, if it is installed, which is called for each sample,
both with one thread and 64 images. On CUDA the basic recipe stands beside torchvision v2 and Kornia,
with a draw for every sample where they can, and operations beside torchvision v2 with one draw for the
batch. As in a Loader, memload's calls are for parts of stretches of samples, which it plans at once;
"a call by itself" is given its samples and cannot share work with the next. ``--only`` takes the
figures whose names contain one of its words.
"""

import functools
import itertools
import math
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
OPERATIONS = "operations, 224×224" + ", one thread" * (not IS_CUDA)
TRIVIAL = "TrivialAugmentWide, resized crop, flip, normalise"
CROP, PADDED = "resized crop, flip, normalise", "padded crop, flip, normalise, 32"
#: memload plans for so many samples at once. A measurement is of so many or a multiple, so that its
#: share of planning does not depend on when it begins.
SAMPLES_PER_PLAN = 8192
#: Images of each call of an operation on the CPU, where torchvision takes 10 ms for some.
FEW = 64

Calls = dict[str, Callable[[], Any]]


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


def each(transform: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """Call a transform of torchvision for each image, as it draws once a call."""
    return torch.stack([transform(image) for image in images])


def crops_of_others(images: Tensor) -> Calls:
    """Return the resized crop, flip, normalise and cast of other libraries, where installed."""
    calls: Calls = {}
    if v2 := torchvision_v2():
        steps = [v2.RandomResizedCrop(224), v2.RandomHorizontalFlip()]
        trivial = v2.TrivialAugmentWide(interpolation=BILINEAR)
        ends = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
        with_trivial = v2.Compose([*steps, trivial, *ends])
        calls[f"{TRIVIAL} › {A_BATCH}"] = lambda: with_trivial(images).bfloat16()
        theirs = v2.Compose([*steps, *ends])
        calls[A_BATCH] = lambda: theirs(images).bfloat16()
        calls[A_SAMPLE] = lambda: each(theirs, images).bfloat16()
    if find_spec("kornia"):
        import kornia.augmentation as kornia

        kornias = torch.nn.Sequential(
            kornia.RandomResizedCrop((224, 224)),
            kornia.RandomHorizontalFlip(),
            kornia.Normalize(torch.tensor(MEAN), torch.tensor(STD)),
        )
        calls["kornia"] = lambda: kornias(images / 255).bfloat16()
    return calls


# What is called


def random_images(batch: int, side: int) -> Tensor:
    """Return channels-last images."""
    shape = batch, side, side, 3
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE).permute(0, 3, 1, 2)


def in_stretches(
    transform: transforms.Compose, images: Tensor, columns: dict[str, Tensor] | None = None
) -> Callable[[], Any]:
    """Return what transforms the next batch of 2^15 samples, then of as many others."""

    def batches() -> Iterator[Any]:
        for epoch in itertools.count():
            prepared = transform.prepare(np.arange(1 << 15), epoch=epoch)
            for start in range(0, (1 << 15) - len(images) + 1, len(images)):
                yield prepared(images, columns, start, start + len(images))

    return batches().__next__


def on_one_thread(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return a call for which torch has one thread."""

    def on_one() -> Any:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        result = call()
        torch.set_num_threads(threads)
        return result

    return on_one


def on_cpu(batch: int) -> Calls:
    """Return recipes, and operations on one thread beside torchvision's."""
    large, small, few = random_images(batch, 256), random_images(batch, 32), random_images(FEW, 224)
    padded = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
    padded.append(transforms.Normalize("imagenet"))
    calls: Calls = {
        f"{CROP}, 256": in_stretches(transforms.train(224), large),
        PADDED: in_stretches(transforms.Compose(padded), small),
    }
    v2, contiguous = torchvision_v2(), few.contiguous()
    theirs = operations(v2) if v2 else {}
    for name, operation in operations(transforms).items():
        ours = in_stretches(transforms.Compose([operation]), few)
        calls[f"{OPERATIONS} › {name} › memload"] = on_one_thread(ours)
        if (
            v2
        ):  # its faster layout: channels-last takes 0.82 of the time for crops, up to 5 times else
            images = few if name.startswith("RandomResizedCrop") else contiguous
            their = functools.partial(each, theirs[name], images)
            calls[f"{OPERATIONS} › {name} › {A_SAMPLE}"] = on_one_thread(their)
    return calls


def on_cuda(batch: int) -> Calls:
    """Return recipes and operations, beside a copy of as many bytes and other libraries."""
    images, large, small = (random_images(batch, side) for side in (224, 256, 32))
    train, numbers = transforms.train(224, dtype=torch.bfloat16), np.arange(batch)
    # The recipe reads 1 byte and writes 2 a pixel; a copy reads and writes half of that each.
    shape = batch, images[0].numel() * 3 // 2
    bytes_read, written = (torch.empty(shape, dtype=torch.uint8, device="cuda") for _ in range(2))
    calls: Calls = {
        "copy": lambda: written.copy_(bytes_read),
        CROP: in_stretches(train, large),
        f"{CROP}, a call by itself": lambda: train(large, samples=numbers),
        **crops_of_others(large),
    }
    trivial = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip()]
    trivial += [transforms.TrivialAugmentWide(interpolation=BILINEAR)]
    trivial += [transforms.Normalize("imagenet"), transforms.ToDtype(torch.bfloat16)]
    calls[f"{TRIVIAL} › memload"] = in_stretches(transforms.Compose(trivial), large)
    labels = {"label": torch.randint(0, 1000, (batch,), device="cuda")}
    for name, (recipe, side) in named_recipes().items():
        stored = small if side == 32 else large
        calls[f"{RECIPES} › {name} › memload"] = in_stretches(recipe, stored, labels)
    v2 = torchvision_v2()
    theirs = operations(v2) if v2 else {}
    for name, operation in operations(transforms).items():
        calls[f"{OPERATIONS} › {name} › memload"] = in_stretches(
            transforms.Compose([operation]), images
        )
        if v2:
            calls[f"{OPERATIONS} › {name} › {A_BATCH}"] = functools.partial(theirs[name], images)
    return calls


# How it is measured


def rate_on_device(call: Callable[[], Any], batch: int) -> float:
    """Return images a second of calls that are all queued before the GPU begins the first.

    There are ten, or as many as the host queues in 4 ms: the GPU's queue has room for some 1,000
    kernels, and the host takes 4 µs for each. A copy keeps the GPU busy meanwhile. Calls that are
    slower than that, or wait for the GPU, wait for the host.
    """
    source, target = torch.empty((2, 1 << 29), dtype=torch.uint8, device="cuda")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    seconds = time.perf_counter() - began
    count = min(10, max(1, int(0.004 / seconds)))
    # A copy takes 0.25 ms. In up to 10 of 32 measurements the next samples are planned, which may
    # take longer than the copies. Medians leave these out.
    for _ in range(math.ceil((2 * count * seconds + 0.003) / 0.00025)):
        target.copy_(source)
    start.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return count * batch / (start.elapsed_time(end) / 1000)


def repeated(call: Callable[[], Any], batch: int, repeats: int) -> int:
    """Call so many times; return the number of images."""
    for _ in range(repeats):
        call()
    return repeats * batch


def ways(options: Any, folder: Path) -> dict[str, Way]:
    """Return what is called, on CUDA with and without the host's part."""
    calls = on_cuda(options.batch) if IS_CUDA else on_cpu(options.batch)
    if options.only:
        calls = {
            name: call for name, call in calls.items() if any(word in name for word in options.only)
        }
        if not calls:
            sys.exit(f"No name contains one of {options.only}. Give other words to --only.")
    found: dict[str, Way] = {}
    for name, call in calls.items():
        batch = FEW if name.startswith(OPERATIONS) and not IS_CUDA else options.batch
        is_ours = IS_CUDA and "torchvision" not in name and "kornia" not in name
        run = functools.partial(repeated, call, batch, SAMPLES_PER_PLAN // batch if is_ours else 1)
        found[f"{name}, images/s"] = rate(run, 0.02 if is_ours else 0.05)
        if is_ours:
            found[f"{name}, on the device, images/s"] = functools.partial(
                rate_on_device, call, batch
            )
    # compiled, and with all memory that it takes, before the first round
    warm_until = time.perf_counter() + 2
    while IS_CUDA and time.perf_counter() < warm_until:
        for call in calls.values():
            call()
        torch.cuda.synchronize()
    return found


def times() -> dict[str, tuple[str, str]]:
    """Return the ratios of times, which are those of rates the other way round."""
    pairs = [(name, CROP) for name in (A_BATCH, A_SAMPLE, "kornia")]
    ratios = {
        f"time: {one} / {other}": (f"{other}, images/s", f"{one}, images/s") for one, other in pairs
    }
    for name, theirs in itertools.product(operations(transforms), (A_BATCH, A_SAMPLE)):
        row = f"{OPERATIONS} › {name}"
        rates = (f"{row} › memload, images/s", f"{row} › {theirs}, images/s")
        ratios[f"{row} › time: {theirs} / memload"] = rates
    return ratios


if __name__ == "__main__":
    run_benchmark(
        ways,
        options={"batch": 256, "rounds": 30, "only": []},
        quick={"rounds": 12},
        ratios=times(),
        facts={"device": DEVICE, "images": "in memory"},
    )
