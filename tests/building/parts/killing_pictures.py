"""A data set for workers of Dask and Ray, which find this file on their path."""

import os
import signal
from pathlib import Path

import numpy as np
from PIL import Image


class KillingPictures:
    """300 pictures. Sample 170 kills its process if a folder has fewer than ``times`` files."""

    def __init__(self, folder: Path, times: int) -> None:
        self.folder, self.times = folder, times

    def __len__(self) -> int:
        return 300

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        if index == 170 and len(list(self.folder.iterdir())) < self.times:
            (self.folder / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        pixels = np.random.default_rng(index).integers(0, 256, (9, 11, 3), np.uint8)
        return Image.fromarray(pixels), index % 3
