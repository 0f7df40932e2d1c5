"""What the command examines: the machine, then the data set, then a Loader over it.

It runs without torch until the machine is checked, since torch itself may be what is broken.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from memload.building.status import build_status
from memload.doctor.checks import Check
from memload.doctor.machine_checks import machine_checks
from memload.doctor.report import Diagnosis
from memload.errors import FormatError, MemloadError, MissingError


def examine(
    path: str | None,
    *,
    step_ms: float | None = None,
    batch_size: int = 256,
    before_measuring: Callable[[], object] = lambda: None,
) -> Diagnosis:
    """Check the machine and, if there is a path, diagnose a Loader over that data set.

    ``before_measuring`` is called if there is something to measure.
    """
    checks = machine_checks()
    if any(check.subject == "torch" and check.mark == "bad" for check in checks):
        return Diagnosis(checks)
    from memload.doctor.data_checks import data_checks, feed_check
    from memload.doctor.diagnosis import diagnose_loader
    from memload.reading.dataset import MemmapDataset
    from memload.reading.streams import find_device

    if path is None:
        return Diagnosis([*checks, feed_check(find_device(None))])
    try:
        dataset = MemmapDataset(path)
    except (FormatError, OSError) as error:
        return Diagnosis([*checks, _unusable(path, error)])
    if not len(dataset):
        finding = f"{path} has no samples"
        return Diagnosis([*checks, Check("data set", "bad", finding, "Build it from images")])
    if batch_size > len(dataset):
        checks.append(_small_batches(batch_size, len(dataset)))
    before_measuring()
    try:
        return diagnose_loader(_training_loader(dataset, batch_size), step_ms, checks)
    except (MemloadError, RuntimeError, MemoryError, OSError) as error:
        failed = _failed(path, error)
        feeds = feed_check(find_device(None), dataset, dataset.sample_names)
        return Diagnosis([*checks, *data_checks(dataset), feeds, failed])


def _training_loader(dataset: Any, batch_size: int) -> Any:
    """Return a Loader that shuffles, with ``transforms.train`` for 224 pixels.

    Smaller images are cropped to the largest size that fits. Integers other than uint8 have no
    transform, since that one refuses them.
    """
    from memload.bench.setting import Setting
    from memload.reading.loader import Loader

    dtype = np.dtype(dataset.shards.array.descr)
    is_image = dtype == np.uint8 or dtype.kind == "f"
    transform = Setting(dataset).transform() if is_image else None
    return Loader(dataset, batch_size, shuffle=True, rank=0, num_replicas=1, transform=transform)


def _small_batches(batch_size: int, samples: int) -> Check:
    finding = f"a batch has {samples} samples, since there are no more, and not {batch_size}"
    remedy = f"Say --batch-size {samples}, and --step-ms for that"
    return Check("batch size", "note", finding, remedy)


def _failed(path: str, error: Exception) -> Check:
    """Return the check of a measurement that failed, such as for want of memory on the GPU."""
    if isinstance(error, OSError) and not isinstance(error, MemloadError):
        finding = f"{path} cannot be read: {error.strerror or error}"
        return Check("measuring", "bad", finding, "Look for errors of the disk with dmesg")
    return Check("measuring", "bad", (str(error) or type(error).__name__).splitlines()[0])


def _unusable(path: str, error: Exception) -> Check:
    """Return the check of a data set that cannot be opened, perhaps because it is being built."""
    status = build_status(path) if isinstance(error, MissingError) and Path(path).name else None
    return Check("data set", "bad", str(status or error))
