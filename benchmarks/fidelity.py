"""How far stored pixels are from Pillow's and torchvision's, and whether a network trained on them learns the same.

    python benchmarks/fidelity.py [IMAGES] [--side 256] [--rounds 3] [--epochs 6] [--dry-run]

IMAGES is a folder of JPEGs, one folder a class; without it 240 photograph-like ones are made. Files are in memory,
torch has one thread.

"pixels": for each decoder and fit, as it is by default and with `--fast`, against pictures
that were made without memload: decoded by Pillow, `Resize` and `CenterCrop` of torchvision for crop, `Resize` for
squash, Pillow's `ImageOps.pad` for pad. Where torchvision is not installed, its arithmetic on PIL images stands in,
written out here. PSNR in dB over all pixels of a picture; equal pictures count as 99.

"time", left out with `--rounds 0`: CPU time of whole passes over the pictures in one process, interleaved, the first
round left out, and the distance from the default. "12MP" are some of the pictures scaled up to 4000×3000 and encoded
again at quality 90, as a stand-in for photographs from a camera.

"training": a network of four convolutions, from the same seed, with `transforms.train`, on IMAGES, or on made ones if
there are fewer than 8 a class. From the files, each decoded anew for every batch by the reference above; from the
memory map in torch's DataLoader; from the memory map by the `Loader`; and from one that was built with `--fast`. Orders
and draws are functions of (seed, epoch, sample), so they are the same for all. The difference is the largest one of the
losses of all steps; 0 is equality to the bit.
"""

import io
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from record import arguments, numbers_of, record, run_main, spread
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import memload
from memload import transforms
from memload.building.conversion import Converter, Settings
from memload.building.decoders import DECODERS
from memload.building.resizing import FITS
from memload.building.sources import Record
from memload.errors import DependencyError
from memload.reading.samplers import ShuffledSampler

try:
    import torchvision
    from torchvision.transforms import functional
except (ImportError, RuntimeError):  # the latter where it is of another build of torch
    torchvision = functional = None

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "fast": {"fast": True},
}
BATCH, STORED, SEED = 32, 64, 1
#: Pictures a class below which nothing would be learned.
FEWEST = 8


def reference(data: bytes, side: int, fit: str = "crop") -> Image.Image:
    """Return a picture of side × side without memload."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    bilinear = Image.Resampling.BILINEAR
    if fit == "pad":
        return ImageOps.pad(image, (side, side), bilinear)
    if fit == "squash":
        return (
            functional.resize(image, [side, side])
            if functional
            else image.resize((side, side), bilinear)
        )
    if functional:
        return functional.center_crop(functional.resize(image, [side]), [side])
    short = min(image.size)
    width, height = (
        side if length == short else int(side * length / short) for length in image.size
    )
    left, top = round((width - side) / 2), round((height - side) / 2)
    return image.resize((width, height), bilinear).crop((left, top, left + side, top + side))


def converted(convert: Converter, files: list[bytes]) -> list[np.ndarray]:
    """Return the pixels that a build would store, flat."""
    return [np.frombuffer(convert(Record("", data, {})).pixels, np.uint8) for data in files]


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """Return the peak signal to noise ratio in dB; 99 for equal pictures."""
    error = np.mean((a.astype(np.float64) - b) ** 2)
    return 99.0 if error == 0 else float(10 * np.log10(255**2 / error))


def distance(wanted: list[np.ndarray], found: list[np.ndarray]) -> dict[str, float]:
    """Return how far pictures are from others."""
    pairs = list(zip(wanted, found, strict=True))
    ratios = [psnr(a, b) for a, b in pairs]
    levels = [np.abs(a.astype(np.int16) - b) for a, b in pairs]
    return {
        "equal_images": sum(not level.any() for level in levels),
        "psnr_median": statistics.median(ratios),
        "psnr_lowest": min(ratios),
        "largest_difference": max(int(level.max()) for level in levels),
        "mean_difference": statistics.mean(float(level.mean()) for level in levels),
    }


def pixels(files: list[bytes], side: int) -> dict[str, Any]:
    """Return the distance of each decoder, fit and option from the reference; a reason for what is not installed."""
    results: dict[str, Any] = {}
    for fit in FITS:
        wanted = [np.asarray(reference(data, side, fit)).ravel() for data in files]
        for decoder in DECODERS:
            for name, option in OPTIONS.items():
                try:
                    convert = Converter(
                        Settings((side, side), fit=fit, decoder=decoder, **option), {}
                    )
                except DependencyError as error:
                    results[f"{decoder}, {fit}"] = str(error)
                    break
                results[f"{decoder}, {fit}, {name}"] = distance(wanted, converted(convert, files))
    return results


def timed(files: list[bytes], side: int, rounds: int) -> dict[str, Any]:
    """Return the speed of every option, and its distance from the default."""
    ways = {
        name: Converter(Settings((side, side), **option), {}) for name, option in OPTIONS.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    rows: dict[str, list[np.ndarray]] = {}
    for number in range(rounds + 1):
        for name, convert in ways.items():
            start = time.process_time()
            rows[name] = converted(convert, files)
            if number:
                seconds[name].append((time.process_time() - start) / len(files))
    return {
        name: {
            "images": len(files),
            "images_per_second": spread([1 / value for value in seconds[name]]),
            "speed_up": spread(
                [a / b for a, b in zip(seconds["default"], seconds[name], strict=True)]
            ),
            **distance(rows["default"], rows[name]),
        }
        for name in ways
    }


def camera(data: bytes) -> bytes:
    """Return a picture as a 12 megapixel JPEG."""
    image = (
        Image.open(io.BytesIO(data)).convert("RGB").resize((4000, 3000), Image.Resampling.BICUBIC)
    )
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


class Files(Dataset[tuple[Image.Image, int]]):
    """The reference's picture of each file, made when it is asked for, and its label."""

    def __init__(self, files: list[bytes], labels: list[int]) -> None:
        self.files, self.labels = files, labels

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> tuple[Image.Image, int]:
        return reference(self.files[number], STORED), self.labels[number]


def data_loader(
    dataset: Any, transform: transforms.Transform
) -> Callable[[int], Iterator[tuple[Tensor, Tensor]]]:
    """Return a function that iterates over an epoch in torch's DataLoader, with the Loader's order and draws."""

    def epoch_of(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        order = (
            ShuffledSampler(len(dataset), seed=SEED).take(epoch, np.arange(len(dataset))).tolist()
        )
        batches = DataLoader(dataset, BATCH, sampler=order, collate_fn=memload.fast_collate)
        for number, (images, labels) in enumerate(batches):
            samples = order[number * BATCH : (number + 1) * BATCH]
            yield transform(images, samples=np.array(samples), seed=SEED, epoch=epoch), labels

    return epoch_of


def losses(epoch_of: Callable[[int], Iterable[Any]], epochs: int, classes: int) -> list[float]:
    """Train a network from the seed; return the loss of every step."""
    torch.manual_seed(SEED)
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, 2, 1), nn.BatchNorm2d(after), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    found: list[float] = []
    for epoch in range(epochs):
        for images, labels in epoch_of(epoch):
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    return found


def training(images: Path, epochs: int) -> dict[str, Any]:
    """Return the loss of every step, and the largest difference of one from the first way's."""
    recipe, files = transforms.train(STORED - 8), read(images)
    with tempfile.TemporaryDirectory() as folder:
        sets = {}
        for name, fast in (("exact", False), ("fast", True)):
            memload.build(images, f"{folder}/{name}.bin", size=STORED, fast=fast, progress=False)
            sets[name] = memload.MemmapDataset(f"{folder}/{name}.bin")
        if {len(made) for made in sets.values()} != {len(files)}:
            raise RuntimeError(
                f"{images}: expected all {len(files)} pictures to be stored, found some rejected"
            )
        labels = sets["exact"].columns["label"].tolist()
        loader = memload.Loader(
            sets["exact"], BATCH, shuffle=True, seed=SEED, device="cpu", transform=recipe
        )

        def by_loader(epoch: int) -> Iterable[Any]:
            loader.set_epoch(epoch)
            return loader

        ways = {
            "files": data_loader(Files(files, labels), recipe),
            "memory map, DataLoader": data_loader(sets["exact"], recipe),
            "memory map, Loader": by_loader,
            "memory map of --fast, DataLoader": data_loader(sets["fast"], recipe),
        }
        curves = {
            name: losses(epoch_of, epochs, max(labels) + 1) for name, epoch_of in ways.items()
        }
    own = curves["files"]
    return {"images": len(files), "epochs": epochs} | {
        name: {
            "loss": [round(loss, 5) for loss in curve],
            "largest difference": max(abs(a - b) for a, b in zip(own, curve, strict=True)),
        }
        for name, curve in curves.items()
    }


def make_pictures(folder: Path) -> None:
    """Fill a folder with photograph-like pictures."""
    sys.path.append(str(Path(__file__).parents[1] / "scripts"))
    from photographs import write_folder

    write_folder(folder, 240)


def read(images: Path) -> list[bytes]:
    """Return the files of a folder with a folder for each class, in memload's order."""
    try:
        keys = list(memload.ImageFolder(images).keys)
    except memload.MemloadError as error:
        sys.exit(f"images: {error}")
    if all("/" not in key for key in keys):
        sys.exit(f"images: expected a folder for each class in {images}, found none")
    return [(images / key).read_bytes() for key in keys]


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__)
    parser.add_argument("images", nargs="?", type=Path)
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder)
        images = options.images or made
        if images == made:
            make_pictures(made)
        files = read(images)
        results: dict[str, Any] = {"pixels": pixels(files, options.side)}
        if options.rounds:
            large = [camera(data) for data in files[::32]]
            results["time"] = {"all": timed(files, options.side, options.rounds)}
            results["time"]["12MP"] = timed(large, options.side, options.rounds)
        few = len(files) < FEWEST * sum(path.is_dir() for path in images.iterdir())
        if few and images != made:
            make_pictures(made)
        results["training"] = training(made if few else images, options.epochs)
    parameters = {
        "images": len(files), "pictures": "made" if images == made else "given",
        "pictures of training": "made" if few or images == made else "given", "side": options.side,
        "reference": f"torchvision {torchvision.__version__}" if torchvision else "torchvision's arithmetic",
        "files": "in memory",
    }  # fmt: skip
    record("fidelity", options, numbers_of(parser), parameters, results)


if __name__ == "__main__":
    run_main(main)
