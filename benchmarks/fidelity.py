"""How far stored pixels are from Pillow's and torchvision's, and what a network learns from them.

    python benchmarks/fidelity.py [IMAGES] [--side 256] [--epochs 6] [--dry-run]

IMAGES is a folder of JPEGs, one folder a class; by default 240 photograph-like ones are made.

"pixels": what `memload build` stores for each decoder and fit, and with `--fast`, against pictures
made without memload: decoded by Pillow, torchvision's arithmetic of Resize and CenterCrop for crop,
of Resize for squash, Pillow's `ImageOps.pad` for pad. PSNR in dB over all pixels of a picture; equal
pictures count as 99.

"training": a network of four convolutions from one seed, with `transforms.train`: from the files,
each decoded anew for every batch by the reference above; by the `Loader` from a memory map; and from
one built with `--fast`. Orders and draws depend on seed, epoch and sample alone, so all are the same.
The difference is the largest one of the losses of all steps; 0 means equal to the bit.
"""

import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import argument_parser, data_folder, errors_in_one_line, partial, record
from pictures import find_jpegs, resized
from PIL import Image, ImageOps
from torch import nn

import memload
from memload import transforms

BATCH, STORED, SEED = 32, 64, 1
USUAL = {"side": 256, "epochs": 6}


def reference(path: Path, side: int, fit: str = "crop") -> np.ndarray:
    """Return a picture of side × side, made without memload."""
    image = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
    if fit == "pad":
        return np.array(ImageOps.pad(image, (side, side), Image.Resampling.BILINEAR))
    if fit == "squash":
        return np.array(image.resize((side, side), Image.Resampling.BILINEAR))
    return resized(image, side)


def distance(wanted: list[np.ndarray], found: np.ndarray) -> dict[str, float]:
    """Return how far pictures are from others."""
    levels = [np.abs(one.astype(int) - other) for one, other in zip(wanted, found, strict=True)]
    errors = [float(np.mean(level**2)) for level in levels]
    psnr = [10 * np.log10(255**2 / error) if error else 99.0 for error in errors]
    return {
        "equal_images": sum(error == 0 for error in errors),
        "psnr_median": float(statistics.median(psnr)),
        "psnr_lowest": float(min(psnr)),
        "largest_difference": max(int(level.max()) for level in levels),
        "mean_difference": statistics.mean(float(level.mean()) for level in levels),
    }


def compare_pixels(images: Path, files: list[Path], side: int, folder: Path) -> dict[str, Any]:
    """Return the distance of what each kind of build stores from the reference."""
    results: dict[str, Any] = {}
    for fit in ("crop", "squash", "pad"):
        wanted = [reference(file, side, fit) for file in files]
        for decoder in ("pillow", "jpeg4py"):
            for name, fast in (("default", False), ("fast", True)):
                path, title = folder / f"{fit}-{decoder}-{name}.bin", f"{decoder}, {fit}, {name}"
                settings: Any = {"fit": fit, "decoder": decoder, "fast": fast, "progress": False}
                try:
                    memload.build(images, path, size=side, **settings)
                except memload.DependencyError as error:
                    results[title] = {"error": str(error)}
                    continue
                results[title] = distance(wanted, np.load(path, mmap_mode="r"))
    return results


def from_files(files: list[Path], labels: np.ndarray, transform: Any, epoch: int) -> Iterator[Any]:
    """Yield the batches of an epoch, decoded by the reference, with the Loader's order and draws."""
    sampler = memload.ShuffledSampler(len(files), seed=SEED)
    order = sampler.take(epoch, np.arange(len(files)))
    for start in range(0, len(order), BATCH):
        chosen = order[start : start + BATCH]
        pixels = np.stack([reference(files[number], STORED) for number in chosen.tolist()])
        images = torch.from_numpy(pixels).permute(0, 3, 1, 2)
        targets = torch.as_tensor(labels[chosen])
        yield transform(images, samples=chosen, seed=SEED, epoch=epoch), targets


def train(batches: Iterable[Any], classes: int) -> list[float]:
    """Train a network from the seed; return the loss of every step."""
    torch.manual_seed(SEED)
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, 2, 1), nn.BatchNorm2d(after), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    losses: list[float] = []
    for images, labels in batches:
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def compare_training(images: Path, files: list[Path], epochs: int, folder: Path) -> dict[str, Any]:
    """Return the losses of every way, and how far they are from those of the files."""
    recipe = transforms.train(STORED - 8)
    loaders = {}
    for name, fast in (("memory map, Loader", False), ("memory map of --fast, Loader", True)):
        path = folder / f"fast-{fast}.bin"
        memload.build(images, path, size=STORED, fast=fast, progress=False, on_error="raise")
        settings: Any = {"shuffle": True, "seed": SEED, "device": "cpu", "transform": recipe}
        loaders[name] = memload.Loader(path, BATCH, **settings)
    labels = np.asarray(memload.MemmapDataset(path).labels)
    classes = int(labels.max()) + 1
    decoded = (
        batch for epoch in range(epochs) for batch in from_files(files, labels, recipe, epoch)
    )
    losses = {"files": train(decoded, classes)}
    for name, loader in loaders.items():
        losses[name] = train((batch for _ in range(epochs) for batch in loader), classes)
    return {
        name: {
            "loss": [round(loss, 5) for loss in curve],
            "largest difference": max(np.abs(np.subtract(losses["files"], curve)).tolist()),
        }
        for name, curve in losses.items()
    }


def main() -> None:
    """Run the benchmark."""
    parser = argument_parser(__doc__)
    parser.add_argument("images", nargs="?", type=Path)
    for name, default in USUAL.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with errors_in_one_line(), data_folder(None) as folder:
        images = options.images or folder / "made"
        find_jpegs(options.images, images, 240)
        files = [images / key for key in memload.ImageFolder(images).keys]
        results = {
            "pixels": compare_pixels(images, files, options.side, folder),
            "training": compare_training(images, files, options.epochs, folder),
        }
        kind = "given" if options.images else "made"
        parameters = {"images": len(files), "pictures": kind, "side": options.side}
        parameters["epochs"] = options.epochs
        record("fidelity", options, results, parameters, partial(options, USUAL))
        for table in results["pixels"].items():
            print(*table)
        for name, found in results["training"].items():
            print(f"{name}: largest difference of a loss {found['largest difference']:.3g}")


if __name__ == "__main__":
    main()
