"""Stages that iterate over a Loader."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from memload.bench import stages
from memload.bench.setting import Setting
from memload.bench.stages import Measurement, Stage, rate, steady
from memload.reading.dataset import MemmapDataset
from memload.reading.loader import Loader

#: Seconds to wait, at most, until a Loader holds what it is to hold.
_FILL_SECONDS = 10.0
#: Batches of a Loader that come before the clock starts: those that are read ahead, and more.
_BATCHES_BEFORE = 8
#: Batches of an epoch of the feed "disk": more than are read while it is measured.
_BATCHES_IN_EPOCH = 1024


def make_loader(sample: MemmapDataset, batch_size: int, **options: Any) -> Loader:
    """Return a Loader in random order, not divided among ranks."""
    return Loader(sample, batch_size, shuffle=True, rank=0, num_replicas=1, **options)


def warm_loader(
    subject: str, setting: Setting, feed: str, limits: Sequence[Stage], transform: Any = None
) -> Stage:
    """Return a stage that loads samples which are in RAM. They come again if there are too few."""

    def prepare() -> Measurement:
        num_batches = 256 if setting.device.type == "cuda" else 8 * setting.threads
        positions = np.arange(num_batches * setting.batch_size) % len(setting.sample)
        sample = setting.sample.subset(positions)
        device = "cpu" if feed == "cpu" else setting.device
        options = {"device": device, "feed": feed, "transform": transform}
        if feed == "dma":  # no more than the samples, though it could hold all of the files
            options["cache_bytes"] = setting.cache_bytes(setting.sample)
        loader = make_loader(sample, setting.batch_size, **options)
        wait_until_filled(loader)

        def epoch() -> int:
            images = sum(len(batch[0]) for batch in loader)
            setting.synchronize()
            stage.counts = loader.feed.counts
            return images

        return steady(epoch)

    stage = Stage(subject, prepare, limits)
    return stage


def disk_loader(
    subject: str, setting: Setting, cache_bytes: int, limits: Sequence[Stage], transform: Any = None
) -> Stage:
    """Return a stage that loads samples with the feed "disk", once it holds what it is to hold."""

    def prepare() -> Measurement:
        # Samples come again, so that no epoch ends while it is measured.
        positions = np.arange(_BATCHES_IN_EPOCH * setting.batch_size) % len(setting.cold_sample)
        loader = make_loader(
            setting.cold_sample.subset(positions),
            setting.batch_size,
            device=setting.device,
            feed="disk",
            cache_bytes=cache_bytes,
            transform=transform,
        )
        wait_until_filled(loader)

        def measurement() -> float:
            batches = iter(loader)
            for _ in range(_BATCHES_BEFORE):
                next(batches)
            found = rate((len(batch[0]) for batch in batches), stages.SLOW_SECONDS)
            stage.counts = loader.feed.counts
            return found

        measurement()  # compiles kernels and page-locks memory
        return measurement

    stage = Stage(subject, prepare, limits)
    return stage


def wait_until_filled(loader: Loader) -> None:
    """Wait until a Loader holds what it is to hold, for at most 10 s."""
    end = time.monotonic() + _FILL_SECONDS
    while not _is_filled(loader) and time.monotonic() < end:
        time.sleep(0.05)


def _is_filled(loader: Loader) -> bool:
    counts = loader.feed.counts
    return counts is None or counts.rows_held == counts.rows_to_hold
