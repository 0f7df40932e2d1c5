"""Learn to segment: draw pictures of circles and striped squares, build them with their masks, train a small U-Net.

python segmentation.py shapes/ --epochs 8

Everything is written below the folder: PNG pictures, palette PNGs with the class of each pixel, and the data sets
`train.bin` and `val.bin`. It trains on the GPU, or on the CPU if there is none: there it takes half a minute. Replace
`draw_samples` by your own folders of images and masks.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torch.nn import functional

import memload
from memload import transforms

CLASSES = ("background", "circle", "square")
#: Pixels that do not count: the outlines of the shapes, and margins that a build or a crop adds.
IGNORED = 255
#: RGB for each of 256 numbers, or Pillow would write PNGs of 2 bits. The colors are for viewers only: the pixels of
#: a palette PNG are class numbers.
PALETTE = [0, 0, 0, 230, 80, 60, 60, 130, 230] + [255] * 3 * 253

#: Image and mask get the same crop and the same flip. `Normalize` leaves masks alone.
TRAIN = transforms.Compose(
    [
        transforms.RandomResizedCrop(64, scale=(0.5, 1)),
        transforms.RandomHorizontalFlip(),
        transforms.Normalize(),  # with the statistics of the data set
    ]
)


def draw_samples(folder: Path, count: int, seed: int) -> None:
    """Write `count` pictures to folder/images and their masks, of the same names, to folder/masks."""
    rng = np.random.default_rng(seed)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    (folder / "masks").mkdir(exist_ok=True)
    for number in range(count):
        width, height = rng.integers(64, 81, 2).tolist()
        coarse = rng.integers(70, 190, (height // 16, width // 16, 3), np.uint8)
        image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        mask = Image.new("P", (width, height))
        mask.putpalette(PALETTE)
        for kind in rng.integers(1, 3, rng.integers(2, 5)).tolist():
            radius = int(rng.integers(7, 14))
            x, y = (int(rng.integers(radius, side - radius)) for side in (width, height))
            box = (x - radius, y - radius, x + radius, y + radius)
            color = tuple(rng.choice([30, 225], 3).tolist())
            on_image, on_mask = ImageDraw.Draw(image), ImageDraw.Draw(mask)
            if CLASSES[kind] == "circle":
                on_image.ellipse(box, color)
                on_mask.ellipse(box, kind, IGNORED)
            else:
                stripe = tuple(255 - value for value in color)
                on_image.rectangle(box, color)
                for line in range(box[1] + 2, box[3], 4):
                    on_image.line((box[0], line, box[2], line), stripe, width=2)
                on_mask.rectangle(box, kind, IGNORED)
        noise = rng.normal(0, 12, (height, width, 3))
        noisy = (np.asarray(image) + noise).clip(0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(folder / "images" / f"{number:04d}.png")
        mask.save(folder / "masks" / f"{number:04d}.png")


class UNet(nn.Module):
    """Four levels, some 50,000 parameters: images (N, 3, H, W) to a score a class, (N, classes, H, W)."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.down = nn.ModuleList([block(3, 8), block(8, 16), block(16, 32), block(32, 32)])
        self.up = nn.ModuleList([block(32 + 32, 16), block(16 + 16, 8), block(8 + 8, 8)])
        self.head = nn.Conv2d(8, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores. H and W are multiples of 8."""
        levels = [self.down[0](images)]
        for block_down in self.down[1:]:
            levels.append(block_down(functional.max_pool2d(levels[-1], 2)))
        features = levels.pop()
        for block_up in self.up:
            larger = functional.interpolate(features, scale_factor=2)
            features = block_up(torch.cat([levels.pop(), larger], 1))
        return self.head(features)


def block(channels_in: int, channels_out: int) -> nn.Sequential:
    """Return two convolutions, each with a normalisation."""
    layers: list[nn.Module] = []
    for channels in (channels_in, channels_out):
        layers += [
            nn.Conv2d(channels, channels_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers)


@torch.no_grad()
def mean_iou(model: nn.Module, loader: memload.Loader) -> float:
    """Return the intersection over union over all pixels that count, averaged over the classes."""
    count = len(CLASSES)
    confusion = torch.zeros(count, count, device=loader.device)
    model.eval()
    for images, masks in loader:
        counted = masks != IGNORED
        pairs = masks[counted] * count + model(images).argmax(1)[counted]
        confusion += torch.bincount(pairs, minlength=count**2).view(count, count)
    both = confusion.diag()
    return (both / (confusion.sum(0) + confusion.sum(1) - both)).mean().item()


def build(folder: Path) -> None:
    """Draw and build `folder/train.bin` and `folder/val.bin`."""
    for seed, (name, count) in enumerate({"train": 300, "val": 100}.items()):
        draw_samples(folder / name, count, seed)
        memload.build(
            folder / name / "images",
            folder / f"{name}.bin",
            masks=folder / name / "masks",  # each of the name of its image
            size=64,
            overwrite=True,
        )


def main() -> None:
    """Draw, build, train, and print the loss and the IoU of every epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=12)
    args = parser.parse_args()
    build(args.folder)

    dataset = memload.MemmapDataset(args.folder / "train.bin")
    evaluate = transforms.Normalize(dataset)  # the statistics of the training data
    train = memload.Loader(dataset, args.batch_size, shuffle=True, transform=TRAIN)
    val = memload.Loader(args.folder / "val.bin", 50, transform=evaluate)
    torch.manual_seed(0)
    model = UNet(len(CLASSES)).to(train.device)
    optimizer = torch.optim.AdamW(model.parameters())
    steps = args.epochs * len(train)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    for epoch in range(1, args.epochs + 1):
        model.train()
        total = 0.0
        for images, masks in train:  # float32 (12, 3, 64, 64), uint8 (12, 64, 64)
            loss = functional.cross_entropy(model(images), masks.long(), ignore_index=IGNORED)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
        loss_of_epoch, iou = total / len(train), mean_iou(model, val)
        print(f"epoch {epoch}: loss {loss_of_epoch:.3f}, mean IoU {iou:.3f}", flush=True)


if __name__ == "__main__":
    main()
