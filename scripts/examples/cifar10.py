"""Train on small pictures from a folder of files, such as CIFAR-10's, and print the accuracy on the test files:

python cifar10.py IMAGES --epochs 8

IMAGES has `train/CLASS/*.jpg` and `test/CLASS/*.jpg`. The first run builds `IMAGES/train.bin` and `IMAGES/test.bin`,
later ones take them as they are. It trains on the GPU, or on the CPU if there is none, where `--width 16` saves time.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import memload
from memload import transforms

SIDE = 32


def build(images: Path) -> tuple[Path, Path]:
    """Build both data sets, unless they are there, and return their paths."""
    train, test = images / "train.bin", images / "test.bin"
    for part in (train, test):
        folder = part.with_suffix("")
        if not part.exists() and not folder.is_dir():
            sys.exit(
                f"{folder}: there is no such folder. Give IMAGES with train/CLASS and test/CLASS."
            )
    if not train.exists():
        memload.build(images / "train", train, size=SIDE)
    if not test.exists():
        memload.build(images / "test", test, size=SIDE, classes=train)  # the same numbers
    return train, test


class Residual(nn.Module):
    """Images plus what two convolutions make of them: (N, channels, H, W) to the same."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(block(channels, channels), block(channels, channels))

    def forward(self, images: Tensor) -> Tensor:
        """Return the sum."""
        return images + self.convolutions(images)


def block(channels: int, filters: int) -> nn.Sequential:
    """Return a convolution with a normalisation."""
    return nn.Sequential(
        nn.Conv2d(channels, filters, 3, padding=1, bias=False), nn.BatchNorm2d(filters), nn.GELU()
    )


def make_network(classes: int, width: int) -> nn.Sequential:
    """Return a network for images (N, 3, 32, 32)."""
    return nn.Sequential(
        block(3, width),
        block(width, 2 * width),
        nn.MaxPool2d(2),
        Residual(2 * width),
        block(2 * width, 4 * width),
        nn.MaxPool2d(2),
        block(4 * width, 8 * width),
        nn.MaxPool2d(2),
        Residual(8 * width),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(8 * width, classes),
    )


def choose_batch_size(count: int) -> int:
    """Return 500 for CIFAR-10's 50,000 pictures, and less for fewer: an epoch needs many steps."""
    return min(500, max(16, count // 100))


@torch.no_grad()
def accuracy(network: nn.Module, test: memload.Loader) -> float:
    """Return the share of the samples whose class has the highest score."""
    network.eval()
    right = torch.zeros((), dtype=torch.int64, device=test.device)
    for images, labels in test:
        right += (network(images).argmax(1) == labels).sum()
    return right.item() / len(test.dataset)


def main() -> None:
    """Build, train, and print loss and accuracy of every epoch."""
    parser = argparse.ArgumentParser(description="Train on small pictures from a folder of files.")
    parser.add_argument("images", type=Path, help="has train/CLASS/*.jpg and test/CLASS/*.jpg")
    parser.add_argument("--epochs", type=int, default=8, help="default 8")
    parser.add_argument("--batch-size", type=int, help="default: 500 or fewer")
    parser.add_argument("--width", type=int, default=64, help="of the first layer, default 64")
    args = parser.parse_args()
    train_path, test_path = build(args.images)
    count = len(memload.MemmapDataset(train_path))
    batch_size = min(args.batch_size or choose_batch_size(count), count)

    # Crops with a reflected padding, alternating flips, and the statistics of the training data
    recipe = transforms.recipes.airbench(SIDE)
    train = memload.Loader(train_path, batch_size, shuffle=True, drop_last=True, transform=recipe)
    test = memload.Loader(test_path, 1000, transform=transforms.Normalize(train_path))
    torch.manual_seed(0)
    network = make_network(train.dataset.num_classes, args.width)
    network.to(train.device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(
        network.parameters(), momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    steps = args.epochs * len(train)
    rate = 0.2 * batch_size / 500
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, total_steps=steps, pct_start=0.2, cycle_momentum=False
    )
    print(
        f"{count:,} pictures to train on and {len(test.dataset):,} to test, on {train.device}: "
        f"{args.epochs} × {len(train)} steps of {batch_size} pictures",
        flush=True,
    )
    half = torch.autocast(train.device.type, torch.bfloat16, enabled=train.device.type == "cuda")
    for epoch in range(1, args.epochs + 1):
        network.train()
        total = torch.zeros((), device=train.device)  # read once an epoch, which waits for the GPU
        for images, labels in train:  # float32 (N, 3, 32, 32), int64 (N,)
            with half:
                scores = network(images)
            loss = functional.cross_entropy(scores.float(), labels, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.detach()
        found = accuracy(network, test)
        print(
            f"epoch {epoch}: loss {total.item() / len(train):.3f}, accuracy {found:.4f}", flush=True
        )
    print(train.stats)  # of the last epoch: has it waited for data?


if __name__ == "__main__":
    main()
