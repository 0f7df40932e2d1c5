"""What a build would store, and how long it would take: ``memload build --dry-run``."""

import inspect
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from memload.building.build import build
from memload.building.options import READING_OPTIONS, Options
from memload.sources.samples import Source
from memload.storage.index import Index
from memload.wording import counted, shape_text, size_text

#: Samples of the shorter and the longer of two builds, for each worker. What does not depend on
#: their number takes as long in both, so the difference is the time of single samples.
_FEW, _MANY = 20, 120


class DryRun(NamedTuple):
    """What a build would store, and how long it would take.

    >>> print(memload.dry_run("images/", "out.bin", size=224))  # doctest: +SKIP
    1,281,167 samples of 1,000 classes as 224×224×3 uint8
    193 GB are needed, and 1.2 TB are free
    about 0:18:04 with 16 workers
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
        return self._asdict()

    def __str__(self) -> str:
        of_classes = (
            "" if self.classes is None else f" of {counted(self.classes, 'class', 'classes')}"
        )
        room = "are free" if self.bytes <= self.free_bytes else "are free: that is too little"
        stored = f"{shape_text(self.shape)} {self.dtype}"
        duration = timedelta(seconds=max(1, round(self.seconds)))
        return (
            f"{counted(self.samples, 'sample')}{of_classes} as {stored}\n"
            f"{size_text(self.bytes)} are needed, and {size_text(self.free_bytes)} {room}\n"
            f"about {duration} with {counted(self.num_workers, 'worker')}"
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
    arrays = checked.array_files(settings, len(opened))
    listing = time.perf_counter() - start
    sample_options = bound.arguments | dict(
        dict.fromkeys(READING_OPTIONS),  # it is open already
        classes=checked.classes,
        size=settings.size,
        mode=checked.mode or (checked.new_to and Index.open(checked.new_to).setting("mode")),
        max_rejects="100%",
        num_workers=checked.num_workers,
        shard_size=None,
        part=None,
        executor=None,
        progress=False,
    )
    return DryRun(
        samples=len(opened),
        classes=None if opened.classes is None else len(opened.classes),
        shape=arrays[0].shape,
        dtype=np.dtype(arrays[0].descr).name,
        bytes=sum(array.data_bytes for array in arrays),
        free_bytes=shutil.disk_usage(checked.output.parent).free,
        seconds=listing + _seconds(opened, sample_options),
        num_workers=checked.num_workers,
        notes=(*opened.notes, *checked.notes(settings)),
    )


def _seconds(source: Source, options: Mapping[str, Any]) -> float:
    """Return how long all samples take, from builds of few and of many of them."""
    workers: int = max(1, options["num_workers"])
    count = len(source)
    few, many = min(_FEW * workers, count), min(_MANY * workers, count)
    if many == count:
        return _seconds_for(source, many, options)
    short, long = (_seconds_for(source, rows, options) for rows in (few, many))
    return short + (count - few) * max(0.0, long - short) / (many - few)


def _seconds_for(source: Source, count: int, options: Mapping[str, Any]) -> float:
    rows = np.sort(np.random.default_rng(0).permutation(len(source))[:count])
    chosen = source.take(rows)
    folder = Path(options["output"]).parent
    with tempfile.TemporaryDirectory(dir=folder, prefix=".memload-dry-run-") as path:
        start = time.perf_counter()
        build(**{**options, "source": chosen, "output": Path(path) / "sample.bin"})
        return time.perf_counter() - start
