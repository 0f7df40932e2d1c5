"""Transforms of a batch beside the plain torch operations they are made of, or beside a copy.

On the CPU each recipe stands beside the operations of torch that it takes at least, which are given
what was drawn; and operations beside torchvision v2, if it is installed, which is called for each
sample, both with one thread and at most 64 images. On CUDA the recipes stand beside a copy of as
many bytes, and beside torchvision v2 and Kornia where they are installed, each with a draw of its
own for every sample where it can. Images a second, of calls one after another, with the host's
part; or, "on the device", without it. Images are uint8 and channels-last, as a Loader has them; an
image counts once for all its views. As in a Loader, the calls are for parts of stretches of samples,
which memload plans at once, and as many calls are timed as a plan is for; "a call by itself" is
given its samples and cannot share work with the next. `--only` takes the
figures whose names contain one of its words.
"""

import functools
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import augmentations
import numpy as np
import torch
from augmentations import OPERATIONS, OTHERS
from harness import Way, need_cuda, rate, run_benchmark
from torch import Tensor
from torch.nn.functional import interpolate, pad

from memload import transforms

MEAN, STD = (
    torch.tensor(values).view(1, 3, 1, 1) for values in (augmentations.MEAN, augmentations.STD)
)
STEPS = [transforms.RandomHorizontalFlip(), transforms.Normalize("imagenet")]
FLIP = transforms.Compose(STEPS)
CROP = transforms.Compose([transforms.RandomCrop(32, padding=4), *STEPS])
#: The tables.
TRIVIAL = "TrivialAugmentWide, resized crop, flip, normalise"
DINO = "dino(224), ten views of pictures of 256×256"
RECIPES = "recipes, of pictures of 256×256 or 32×32"
ON_CUDA, ON_CPU = "operations, 224×224", "operations, 224×224, one thread"
#: Images of each call on the CPU, where torchvision takes 10 ms for some.
MOST_ON_CPU = 64
#: memload plans for so many samples at once. A measurement is of so many or a multiple, so that its
#: share of planning does not depend on when it begins.
SAMPLES_PER_PLAN = 8192


def normalise(images: Tensor) -> Tensor:
    """Return float32, as the two operations that it takes at least."""
    return images.mul(1 / (255 * STD)).add_(-MEAN / STD)


def random_boxes(count: int, side: int) -> list[tuple[int, int, int, int]]:
    """Return top, left, height and width of boxes as RandomResizedCrop draws them."""
    random = np.random.default_rng(0)
    area = random.uniform(0.08, 1, count) * side * side
    ratio = np.exp(random.uniform(np.log(3 / 4), np.log(4 / 3), count))
    heights, widths = (
        np.minimum(np.sqrt(area * shape).round(), side).astype(int) for shape in (1 / ratio, ratio)
    )
    tops, lefts = (random.integers(0, side - sizes + 1) for sizes in (heights, widths))
    return list(zip(*(a.tolist() for a in (tops, lefts, heights, widths)), strict=True))


def resized_crops(
    images: Tensor, side: int, boxes: list[tuple[int, int, int, int]], flipped: Tensor
) -> Tensor:
    """Crop, resize and flip one sample after another."""
    shape = (len(images), 3, side, side)
    out = torch.empty(shape, dtype=torch.uint8, memory_format=torch.channels_last)
    for number, (top, left, height, width) in enumerate(boxes):
        box = images[number : number + 1, :, top : top + height, left : left + width]
        piece = interpolate(box, (side, side), mode="bilinear", antialias=True)
        out[number : number + 1] = piece.flip(-1) if flipped[number] else piece
    return out


def flip_some(images: Tensor, flipped: Tensor) -> Tensor:
    """Flip the images that are to be flipped."""
    return torch.where(flipped, images.flip(-1), images)


def padded_crops(images: Tensor, starts: list[list[int]]) -> Tensor:
    """Pad by 4 and crop."""
    padded = pad(images, [4] * 4)
    pieces = [
        padded[number, :, top : top + 32, left : left + 32]
        for number, (top, left) in enumerate(starts)
    ]
    return torch.stack(pieces)


def on_cpu(batch: int) -> dict[str, Callable[[], Tensor]]:
    """Return each recipe, and what it takes at least under the same name with ``, plain``."""
    large, small = (random_images(batch, side, "cpu") for side in (256, 32))
    numbers, flipped = np.arange(batch), (torch.rand(batch) < 0.5)[:, None, None, None]
    train, evaluate = transforms.train(224), transforms.evaluate(224, resize=232)
    boxes = random_boxes(batch, 256)
    starts = np.random.default_rng(0).integers(0, 9, (batch, 2)).tolist()

    def centre(images: Tensor) -> Tensor:
        resized = interpolate(images, (232, 232), mode="bilinear", antialias=True)
        return resized[:, :, 4:228, 4:228]

    return {
        "resized crop, flip, normalise, 256": lambda: train(large, samples=numbers),
        "resized crop, flip, normalise, 256, plain": lambda: normalise(
            resized_crops(large, 224, boxes, flipped)
        ),
        "flip, normalise, 256": lambda: FLIP(large, samples=numbers),
        "flip, normalise, 256, plain": lambda: normalise(flip_some(large, flipped)),
        "flip, normalise, 32": lambda: FLIP(small, samples=numbers),
        "flip, normalise, 32, plain": lambda: normalise(flip_some(small, flipped)),
        "padded crop, flip, normalise, 32": lambda: CROP(small, samples=numbers),
        "padded crop, flip, normalise, 32, plain": lambda: normalise(
            flip_some(padded_crops(small, starts), flipped)
        ),
        "resize, centre crop, normalise, 256": lambda: evaluate(large),
        "resize, centre crop, normalise, 256, plain": lambda: normalise(centre(large)),
    }


def operations_on_cpu(batch: int) -> dict[str, Callable[[], Tensor]]:
    """Return each operation on one thread, and torchvision's, a sample after another."""
    images = random_images(batch, 224, "cpu")
    contiguous, trivial = images.contiguous(), f"{ON_CPU} › {TRIVIAL}"
    ours = in_stretches(augmentations.trivial_augment(), images)
    calls = {f"{trivial} › memload": on_one_thread(ours)}
    theirs = augmentations.trivial_augments_of_others(contiguous)
    if a_sample := theirs.get(augmentations.A_SAMPLE):
        calls[f"{trivial} › {augmentations.A_SAMPLE}"] = on_one_thread(a_sample)
    for name, make in OPERATIONS.items():
        operation = transforms.Compose([make(transforms)])
        calls[f"{ON_CPU} › {name} › memload"] = on_one_thread(in_stretches(operation, images))
        if v2 := augmentations.torchvision_v2():
            # its faster layout: channels-last takes 0.82 of the time for crops, up to 5 times for others
            stored = images if name.startswith("RandomResizedCrop") else contiguous
            theirs = functools.partial(augmentations.a_sample(make(v2)), stored)
            calls[f"{ON_CPU} › {name} › {augmentations.A_SAMPLE}"] = on_one_thread(theirs)
    return calls


def on_one_thread(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return a call for which torch has one thread."""

    def on_one() -> Tensor:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        result = call()
        torch.set_num_threads(threads)
        return result

    return on_one


def random_images(batch: int, side: int, device: str) -> Tensor:
    """Return channels-last images."""
    shape = batch, side, side, 3
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device).permute(0, 3, 1, 2)


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


def on_cuda(batch: int) -> dict[str, Callable[[], Any]]:
    """Return the basic recipes, a copy that moves as many bytes, and others' recipes."""
    images, large = (random_images(batch, side, "cuda") for side in (224, 256))
    numbers = np.arange(batch)
    flip = transforms.Compose([*STEPS, transforms.ToDtype(torch.bfloat16)])
    train = transforms.train(224, dtype=torch.bfloat16)
    # The recipe reads 1 byte and writes 2 a pixel; a copy reads and writes half of that each.
    source, target = (
        torch.empty((batch, images[0].numel() * 3 // 2), dtype=torch.uint8, device="cuda")
        for _ in range(2)
    )
    return {
        "copy": lambda: target.copy_(source),
        "flip, normalise": in_stretches(flip, images),
        "resized crop, flip, normalise": in_stretches(train, large),
        "flip, normalise, a call by itself": lambda: flip(images, samples=numbers),
        "resized crop, flip, normalise, a call by itself": lambda: train(large, samples=numbers),
        **augmentations.crops_of_others(large),
    }


def tables_on_cuda(batch: int) -> dict[str, Callable[[], Any]]:
    """Return recipes and operations; names are those of a table, a row in it, and a library."""
    images, large, small = (random_images(batch, side, "cuda") for side in (224, 256, 32))
    trivial = augmentations.trivial_augment()
    calls = {f"{TRIVIAL} › memload": in_stretches(trivial, images)}
    theirs = augmentations.trivial_augments_of_others(images)
    calls |= {f"{TRIVIAL} › {name}": call for name, call in theirs.items()}

    dino = transforms.recipes.dino(224, dtype=torch.bfloat16)
    calls[f"{DINO} › memload"] = in_stretches(dino, large)
    theirs = augmentations.dino_of_others(large)
    calls |= {f"{DINO} › {name}": call for name, call in theirs.items()}

    columns = {"label": torch.randint(0, 1000, (batch,), device="cuda")}
    for name, (recipe, side) in augmentations.named_recipes().items():
        stored = small if side == 32 else large
        calls[f"{RECIPES} › {name} › memload"] = in_stretches(recipe, stored, columns)

    for name, make in OPERATIONS.items():
        operation = transforms.Compose([make(transforms)])
        calls[f"{ON_CUDA} › {name} › memload"] = in_stretches(operation, images)
        if v2 := augmentations.torchvision_v2():
            of_batch = functools.partial(make(v2), images)
            calls[f"{ON_CUDA} › {name} › {augmentations.A_BATCH}"] = of_batch
    return calls


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


def ways(options: Any, folder: Path) -> dict[str, Way]:
    """Return what is called."""
    if options.device == "cpu":
        few = min(options.batch, MOST_ON_CPU)
        found = {name: (call, options.batch) for name, call in on_cpu(options.batch).items()}
        found |= {name: (call, few) for name, call in operations_on_cpu(few).items()}
        found = only(found, options.only)
        return {
            f"{name}, images/s": rate(counted(call, batch)) for name, (call, batch) in found.items()
        }
    need_cuda("Leave --device out to measure the CPU.")
    return ways_on_cuda(options)


def ways_on_cuda(options: Any) -> dict[str, Way]:
    """Return what is called on CUDA, with and without the host's part."""
    calls = only(on_cuda(options.batch) | tables_on_cuda(options.batch), options.only)
    others = {name for name in calls if name.rpartition(" › ")[2].startswith(OTHERS)}
    if options.quick:
        calls = {name: call for name, call in calls.items() if name not in others}
    found: dict[str, Way] = {}
    for name, call in calls.items():
        repeats = 1 if name in others else SAMPLES_PER_PLAN // options.batch
        run = counted(call, options.batch, repeats)
        # with one draw a batch, calls differ
        least_seconds = 0.05 if name in others else 0.02
        found[f"{name}, images/s"] = rate(run, torch.cuda.synchronize, least_seconds)
        if name not in others:
            found[f"{name}, on the device, images/s"] = functools.partial(
                rate_on_device, call, options.batch
            )
    # compiled, and with all memory that it takes, before the first round
    warm_until = time.perf_counter() + 2
    while time.perf_counter() < warm_until:
        for call in calls.values():
            call()
        torch.cuda.synchronize()
    return found


def counted(call: Callable[[], Any], batch: int, repeats: int = 1) -> Callable[[], int]:
    """Return some calls as one, which returns its number of images."""

    def run() -> int:
        for _ in range(repeats):
            call()
        return batch * repeats

    return run


def only(calls: dict[str, Any], words: list[str]) -> dict[str, Any]:
    """Return the calls whose name contains one of the words; without words, all."""
    found = {name: call for name, call in calls.items() if any(word in name for word in words)}
    if words and not found:
        sys.exit(f"No name contains one of {words}. Give other words to --only.")
    return found or calls


def time_ratios() -> dict[str, tuple[str, str]]:
    """Return the ratios of times, which are those of rates the other way round."""
    flip, crop = "flip, normalise", "resized crop, flip, normalise"
    sizes = (f"{crop}, 256", f"{flip}, 256", f"{flip}, 32", f"padded crop, {flip}, 32")
    pairs = [(name, f"{name}, plain") for name in (*sizes, "resize, centre crop, normalise, 256")]
    pairs += [(f"copy{kind}", f"{flip}{kind}") for kind in ("", ", on the device")]
    a_batch, a_sample = augmentations.A_BATCH, augmentations.A_SAMPLE
    pairs += [(name, crop) for name in (a_batch, a_sample, "kornia")]
    ratios = {
        f"time: {one} / {other}": (f"{other}, images/s", f"{one}, images/s") for one, other in pairs
    }
    rows = [(TRIVIAL, name) for name in (a_batch, a_sample, augmentations.KORNIA)]
    rows += [(DINO, a_batch), (f"{ON_CPU} › {TRIVIAL}", a_sample)]
    for name in OPERATIONS:
        rows += [(f"{ON_CUDA} › {name}", a_batch), (f"{ON_CPU} › {name}", a_sample)]
    return ratios | {
        f"{row} › time: {theirs} / memload": (
            f"{row} › memload, images/s",
            f"{row} › {theirs}, images/s",
        )
        for row, theirs in rows
    }


if __name__ == "__main__":
    devices = ("cuda", "cpu") if torch.cuda.is_available() else ("cpu", "cuda")
    run_benchmark(
        ways,
        options={"batch": 256, "rounds": 30, "device": devices, "only": []},
        quick={"rounds": 12},
        ratios=time_ratios(),
        facts={"images": "in memory"},
    )
