"""How far stored pixels are from Pillow's and torchvision's, and what a network learns from them.

IMAGES is a folder of JPEGs, one folder a class; by default 240 photograph-like ones are made.

"pixels": what `memload build` stores for each decoder and fit, and with `--fast`, against pictures
made without memload: decoded by Pillow, torchvision's arithmetic of Resize and CenterCrop for crop,
of Resize for squash, Pillow's `ImageOps.pad` for pad. PSNR in dB over all pixels of a picture; equal
pictures count as 99.

"training": one convolution from one seed, with `transforms.train`: from the files, each decoded anew
for every batch by the reference above; by the `Loader` from a memory map; and from one built with
`--fast`. Orders and draws depend on seed, epoch and sample alone, so all are the same. The difference
is the largest one of the losses of all steps; 0 means equal to the bit.
"""

import itertools
import statistics
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import parse_options, partial, record
from pictures import find_jpegs, psnr, resized
from PIL import Image, ImageOps
from train_step import make_model

import memload
from memload import transforms

BATCH, STORED, SEED = 32, 64, 1
RECIPE = transforms.train(STORED - 8)
USUAL = {"side": 256, "epochs": 6}


def reference(path: Path, side: int, fit: str = "crop") -> np.ndarray:
    """Return a picture of side × side, made without memload."""
    image = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
    if fit == "pad":
        return np.array(ImageOps.pad(image, (side, side), Image.Resampling.BILINEAR))
    if fit == "squash":
        return np.array(image.resize((side, side), Image.Resampling.BILINEAR))
    return resized(image, side)


def compare_pixels(images: Path, files: list[Path], side: int, folder: Path) -> dict[str, Any]:
    """Return how far what each kind of build stores is from the reference."""
    results: dict[str, Any] = {}
    kinds = itertools.product(("crop", "squash", "pad"), ("pillow", "jpeg4py"), (False, True))
    for fit, decoder, fast in kinds:
        title = f"{decoder}, {fit}, {'fast' if fast else 'default'}"
        settings: Any = {"fit": fit, "decoder": decoder, "fast": fast, "progress": False}
        try:
            memload.build(images, folder / "pixels.bin", size=side, overwrite=True, **settings)
        except memload.DependencyError as error:
            results[title] = {"error": str(error)}
            continue
        stored = np.load(folder / "pixels.bin", mmap_mode="r")
        wanted = [reference(file, side, fit) for file in files]
        levels = [
            np.abs(one.astype(int) - other) for one, other in zip(wanted, stored, strict=True)
        ]
        decibels = [psnr(one, other) for one, other in zip(wanted, stored, strict=True)]
        results[title] = {
            "equal_images": sum(not level.any() for level in levels),
            "psnr_median": statistics.median(decibels),
            "psnr_lowest": min(decibels),
            "largest_difference": max(int(level.max()) for level in levels),
        }
    return results


def from_files(files: list[Path], labels: np.ndarray, epoch: int) -> Iterator[Any]:
    """Yield the batches of an epoch, decoded by the reference, with the Loader's order and draws."""
    order = memload.ShuffledSampler(len(files), seed=SEED).take(epoch, np.arange(len(files)))
    for start in range(0, len(order), BATCH):
        chosen = order[start : start + BATCH]
        pixels = np.stack([reference(files[number], STORED) for number in chosen.tolist()])
        images = torch.from_numpy(pixels).permute(0, 3, 1, 2)
        drawn = RECIPE(images, samples=chosen, seed=SEED, epoch=epoch)
        yield drawn, torch.as_tensor(labels[chosen])


def train(batches: Iterable[Any]) -> list[float]:
    """Train a network from the seed; return the loss of every step."""
    torch.manual_seed(SEED)
    model, losses = make_model("stem"), []
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for images, labels in batches:
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def compare_training(images: Path, files: list[Path], epochs: int, folder: Path) -> dict[str, Any]:
    """Return the losses of every way, and how far they are from those of the files."""
    settings: Any = {"shuffle": True, "seed": SEED, "device": "cpu", "transform": RECIPE}
    losses = {}
    for name, fast in (("memory map, Loader", False), ("memory map of --fast, Loader", True)):
        path = folder / f"fast-{fast}.bin"
        memload.build(images, path, size=STORED, fast=fast, progress=False, max_rejects=0)
        loader = memload.Loader(path, BATCH, **settings)
        losses[name] = train(batch for _ in range(epochs) for batch in loader)
    labels = np.asarray(memload.MemmapDataset(path).labels)
    decoded = (from_files(files, labels, epoch) for epoch in range(epochs))
    losses = {"files": train(itertools.chain.from_iterable(decoded)), **losses}
    return {
        name: {
            "loss": [round(loss, 5) for loss in curve],
            "largest difference": max(np.abs(np.subtract(losses["files"], curve)).tolist()),
        }
        for name, curve in losses.items()
    }


def main() -> None:
    """Run the benchmark."""
    options = parse_options({"images": Path, **USUAL}, {"epochs": 1})
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="memload-benchmark-") as temporary:
        folder = Path(temporary)
        images = options.images or folder / "made"
        find_jpegs(options.images, images, 240)
        files = [images / key for key in memload.open_source(images).keys]
        results = {
            "pixels": compare_pixels(images, files, options.side, folder),
            "training": compare_training(images, files, options.epochs, folder),
        }
    parameters = {"images": len(files), "pictures": "given" if options.images else "made"}
    parameters |= {name: getattr(options, name) for name in USUAL}
    record("fidelity", options, results, parameters, partial(options, USUAL))
    for table in results["pixels"].items():
        print(*table)
    for name, found in results["training"].items():
        print(f"{name}: largest difference of a loss {found['largest difference']:.3g}")


if __name__ == "__main__":
    main()
