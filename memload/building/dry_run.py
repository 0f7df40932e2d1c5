"""What a build would store, and how long it would take: ``memload build --dry-run``."""

import inspect
import math
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from memload.building.build import build
from memload.building.conversion import AnySettings, Settings
from memload.building.options import Options
from memload.sources.samples import Samples, Source
from memload.storage.format import HEADER_BYTES
from memload.wording import counted, shape_text, size_text

#: Samples of the shorter and the longer of two builds, for each worker. What does not depend on
#: their number takes as long in both, so the difference is the time of single samples.
_FEW, _MANY = 20, 120


class DryRun(NamedTuple):
    """What a build would store, and how long it would take.

    >>> print(memload.dry_run("images/", "out.bin", size=224))  # doctest: +SKIP
    1,281,167 samples of 1,000 classes as 224×224×3 uint8
    193 GB are needed, and 1.2 TB are free
    about 18 minutes with 16 workers
    """

    samples: int
    #: How many classes the labels have; None if these are not named.
    classes: int | None
    #: Shape and element type of a stored image, ``(H, W, C)``.
    shape: tuple[int, ...]
    dtype: str
    #: The size of all pixels, masks and other arrays, and what is free on the disk.
    bytes: int
    free_bytes: int
    seconds: float
    num_workers: int
    #: What was left out or guessed.
    notes: Sequence[str]

    def as_dict(self) -> dict[str, Any]:
        """Return the same for JSON."""
        return {**self._asdict(), "shape": list(self.shape), "notes": list(self.notes)}

    def __str__(self) -> str:
        of_classes = (
            "" if self.classes is None else f" of {counted(self.classes, 'class', 'classes')}"
        )
        room = "are free" if self.bytes <= self.free_bytes else "are free: that is too little"
        stored = f"{shape_text(self.shape)} {self.dtype}"
        return (
            f"{counted(self.samples, 'sample')}{of_classes} as {stored}\n"
            f"{size_text(self.bytes)} are needed, and {size_text(self.free_bytes)} {room}\n"
            f"about {_duration_text(self.seconds)} with {counted(self.num_workers, 'worker')}"
        )


def dry_run(source: Any, output: str | Path, **options: Any) -> DryRun:
    """Open a source and build two random selections of it, which are removed again.

    Args:
        source: What `memload.build` would read.
        output: What it would write. Nothing is written there, and an existing file stays.
        options: Those of `memload.build`.

    The time is that of the listing, and of all samples at the rate of the selections: the second
    has some 100 samples per worker more than the first. Raises what `memload.build` raises.

    >>> memload.dry_run("images/", "out.bin", size=224).bytes  # doctest: +SKIP
    192851398656
    """
    bound = inspect.signature(build).bind(source, output, **options)
    bound.apply_defaults()
    start = time.perf_counter()
    checked = Options(**bound.arguments)
    opened = checked.open_source()
    settings = checked.settings(opened)
    listing = time.perf_counter() - start
    folder = checked.output.parent
    return DryRun(
        samples=len(opened),
        classes=None if opened.classes is None else len(opened.classes),
        shape=tuple(settings.shape),
        dtype=np.dtype(settings.descr).name,
        bytes=_bytes(settings, len(opened)),
        free_bytes=shutil.disk_usage(folder).free,
        seconds=listing + _seconds(opened, settings, checked),
        num_workers=checked.num_workers,
        notes=opened.notes,
    )


def _bytes(settings: AnySettings, rows: int) -> int:
    """Return the size of the images and of each other array, in one file each."""
    arrays: list[tuple[str, tuple[int, ...]]] = [(settings.descr, settings.shape)]
    arrays += [(extra.descr, extra.shape) for extra in settings.extra_arrays]
    return sum(
        HEADER_BYTES + rows * np.dtype(descr).itemsize * math.prod(shape) for descr, shape in arrays
    )


def _seconds(source: Source, settings: AnySettings, options: Options) -> float:
    """Return how long all samples take, from builds of few and of many of them."""
    workers: int = max(1, options.num_workers)
    few, many = min(_FEW * workers, len(source)), min(_MANY * workers, len(source))
    if many == len(source):
        return _seconds_for(source, many, settings, options)
    short = _seconds_for(source, few, settings, options)
    long = _seconds_for(source, many, settings, options)
    per_sample = max(0.0, long - short) / (many - few)
    return short + (len(source) - few) * per_sample


def _seconds_for(source: Source, count: int, settings: AnySettings, options: Options) -> float:
    rows = np.sort(np.random.default_rng(0).permutation(len(source))[:count])
    chosen = source.take(rows) if isinstance(source, Samples) else source
    given: dict[str, Any] = {"mode": "array"}
    if isinstance(settings, Settings):
        given = {"mode": settings.mode, "size": settings.size, **options.image_options}
    with tempfile.TemporaryDirectory(dir=options.output.parent, prefix=".memload-dry-run-") as path:
        start = time.perf_counter()
        build(
            chosen,
            Path(path) / "sample.bin",
            missing_masks=options.missing_masks,
            max_rejects="100%",
            num_workers=options.num_workers,
            timeout=options.timeout,
            progress=False,
            **given,
        )
        return time.perf_counter() - start


def _duration_text(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"
