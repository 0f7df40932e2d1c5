"""Decoding the source files, as a DataLoader does."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch
from PIL import Image, ImageOps
from torch.utils.data import DataLoader, Dataset

from memload.bench import stages
from memload.bench.setting import Setting
from memload.bench.stages import Measurement, Stage, rate
from memload.wording import counted


def decoding_stage(setting: Setting, folder: Path) -> Stage:
    """Return the stage that decodes the source files of some random samples."""
    keys = setting.dataset.keys
    chosen = np.random.default_rng(0).permutation(len(keys))[:300].tolist()
    names = [keys[sample] for sample in chosen]
    files = [folder / name for name in names if (folder / name).is_file()]
    if not files:
        raise ValueError(
            f"images: {str(folder)!r} has none of the {len(names):,} files looked for, such as "
            f"{names[0]!r}. Give the folder that {setting.dataset.path.name} was built from."
        )
    subject = f"JPEGs in a DataLoader, {counted(setting.threads, 'worker')}"
    return Stage(subject, partial(_decode, setting, files))


def _decode(setting: Setting, files: list[Path]) -> Measurement:
    decode = partial(_decode_batch, setting.dataset.shards.array.shape)
    for file in files:
        file.read_bytes()  # the CPU is measured, not the disk
    decode(files[:1])  # if it cannot be decoded, the message is plainer here than in a worker
    repeated = files * (1 + 1_000_000 // len(files))  # more than can be decoded meanwhile
    dataset = cast("Dataset[Path]", repeated)
    batches = iter(DataLoader(dataset, 8, num_workers=setting.threads, collate_fn=decode))
    for _ in range(4 * setting.threads):  # until all workers are busy
        next(batches)
    return lambda: rate(map(len, batches), stages.SLOW_SECONDS)


def _decode_batch(shape: tuple[int, ...], files: Sequence[Path]) -> torch.Tensor:
    height, width, channels = shape
    pictures = []
    for file in files:
        with Image.open(file) as image:
            picture = image.convert("L" if channels == 1 else "RGB")
        resized = ImageOps.fit(picture, (width, height), Image.Resampling.BILINEAR)
        pictures.append(np.array(resized))
    return torch.from_numpy(np.stack(pictures))
