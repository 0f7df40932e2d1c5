"""Write the folder of JPEG files that `cifar10.py` reads: FOLDER/train/CLASS/00000.jpg and FOLDER/test/…

    python benchmarks/cifar10_files.py FOLDER --batches cifar-10-batches-bin
    python benchmarks/cifar10_files.py FOLDER --pictures 6000

``--batches`` is the unpacked binary version of CIFAR-10 (https://www.cs.toronto.edu/~kriz/cifar.html),
which has the label and 32×32 bytes of red, of green and of blue for each picture. Without it, pictures
are generated, a sixth of them for the test. JPEGs have Pillow's quality 75 and colours of half the size.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

SIDE, QUALITY = 32, 75
RECORD = 1 + 3 * SIDE**2  #: bytes: the label, then the planes
PARTS = {"train": "data_batch_*.bin", "test": "test_batch.bin"}
#: The generated pictures of a part depend on this.
SEEDS = {"train": 0, "test": 1}


def read_batches(folder: Path, pattern: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the class and the pixels, uint8 (32, 32, 3), of each picture."""
    classes = (folder / "batches.meta.txt").read_text().split()
    files = sorted(folder.glob(pattern))
    if not files:
        sys.exit(f"{folder} has no {pattern}. Give the folder of the binary version of CIFAR-10.")
    for file in files:
        records = np.fromfile(file, np.uint8).reshape(-1, RECORD)
        planes = records[:, 1:].reshape(-1, 3, SIDE, SIDE)
        for label, picture in zip(records[:, 0].tolist(), planes, strict=True):
            yield classes[label], picture.transpose(1, 2, 0)


def write_batches(batches: Path, folder: Path) -> None:
    """Write both parts of CIFAR-10."""
    for part, pattern in PARTS.items():
        for number, (name, pixels) in enumerate(read_batches(batches, pattern)):
            path = folder / part / name / f"{number:05d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.ascontiguousarray(pixels)).save(path, quality=QUALITY)


def write_generated(folder: Path, pictures: int) -> None:
    """Write pictures of ten classes, which differ in their colours; a sixth of them for the test."""
    sys.path.append(str(Path(__file__).parents[1] / "scripts"))
    from photographs import write_folder

    for part, count in (("train", pictures - pictures // 6), ("test", pictures // 6)):
        write_folder(folder / part, count, seed=SEEDS[part], size=(SIDE, SIDE))


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--batches", type=Path, help="the folder with data_batch_1.bin")
    parser.add_argument("--pictures", type=int, default=6000, help="to generate; default: 6000")
    given = parser.parse_args()
    if given.batches:
        write_batches(given.batches, given.folder)
    else:
        write_generated(given.folder, given.pictures)


if __name__ == "__main__":
    main()
