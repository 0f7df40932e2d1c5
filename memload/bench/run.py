"""Measures all stages of a data set on this machine."""

import platform
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memload import inspection
from memload.bench import stages
from memload.bench.decoding import decoding_stage
from memload.bench.disk import cold_stages, larger_than_ram_stages
from memload.bench.memory import memory_stages
from memload.bench.report import Line, Report, line_of
from memload.bench.setting import Setting, file_bytes
from memload.bench.stages import Stage, measure_in_turn
from memload.feeds.choice import MIN_DMA_ROW_BYTES, RESIDENT_SHARE, Choice, free_memory
from memload.feeds.held import ram_budget
from memload.machine import available_cores
from memload.reading.dataset import MemmapDataset
from memload.reading.pipeline import samples_of
from memload.wording import size_text


def measure(path: str | Path, *, images: str | Path | None = None) -> Report:
    """Measure on at most 512 MiB of a data set, for less than a minute. On the disk, on 2 GiB.

    ``images`` is the folder that the data set was built from; its images are then decoded in a
    DataLoader, too. Other arrays, such as masks, are left out. Drops the pages that it measures on
    from the page cache. Raises FormatError, FeedError, ValueError and OSError.
    """
    start = time.perf_counter()
    dataset = MemmapDataset(path)
    dataset.sample_names = tuple(name for name in dataset.sample_names if name in dataset.columns)
    setting = Setting(dataset)
    # DataLoader's workers are forked before there are other threads. Pages are dropped from RAM
    # while no GPU has them registered.
    decoding = [] if images is None else [decoding_stage(setting, Path(images))]
    measure_in_turn(decoding, stages.SLOW_ROUNDS)
    choice = choose_feed(setting)
    disk = cold_stages(setting)
    measure_in_turn(disk, stages.SLOW_ROUNDS)
    larger = larger_than_ram_stages(setting) if choice.name == "disk" else []
    measure_in_turn(larger, stages.SLOW_ROUNDS)
    memory = memory_stages(setting, choice.name)
    measure_in_turn(memory, stages.ROUNDS)
    reported = [stage for stage in [*disk, *larger, *memory, *decoding] if stage.reported]
    lines = [line_of(stage, setting.row_bytes) for stage in reported]
    array = dataset.shards.array
    facts = {
        "path": str(path),
        "samples": len(dataset),
        "sampled": len(setting.sample),
        "sampled_on_disk": len(setting.cold_sample),
        "shape": list(array.shape),
        "dtype": np.dtype(array.descr).name,
        "bytes": len(dataset.shards) * array.row_bytes,
        "batch_size": setting.batch_size,
        "rounds": max(line.rounds for line in lines),
        "feed": str(choice),
        "threads": setting.threads,
        "seconds": time.perf_counter() - start,
        "machine": _machine(),
        "versions": inspection.environment(),
        "notes": list(_notes(reported, lines, choice)),
    }
    return Report(facts, lines)


def _notes(reported: Sequence[Stage], lines: Sequence[Line], choice: Choice) -> Iterator[str]:
    yield "Share: the median, over the rounds, of a rate divided by its limit in the same round."
    yield f'feed="auto" takes {choice}.'
    for stage in reported:
        if stage.subject.startswith("Loader") and stage.counts is not None:
            yield f"{stage.subject}: {stage.counts}."
    uneven = [
        line.subject
        for line in lines
        if line.upper_quartile - line.lower_quartile > 0.4 * (line.images_s or 0)
    ]
    if uneven:
        yield (
            f"The rounds of these differ by more than 40 %: {'; '.join(uneven)}. If other "
            "processes are running, end them and measure again."
        )


def choose_feed(setting: Setting, cache_bytes: int | None = None) -> Choice:
    """Choose as ``feed="auto"`` does for the whole data set, of which only a sample is loaded."""
    if setting.device.type == "cpu":
        return Choice("cpu", "the device is cpu")
    arrays = samples_of(setting.dataset, setting.dataset.sample_names)
    used = sum(len(samples.used_rows) * samples.row_bytes for samples in arrays)
    used += sum(column.nbytes for column in arrays[0].columns)
    size, free, budget = file_bytes(arrays), free_memory(setting.device), ram_budget(cache_bytes)
    if used <= RESIDENT_SHARE * free:
        fitting = f"{RESIDENT_SHARE:.0%} of the {size_text(free)} that are free on the GPU"
        return Choice("resident", f"{size_text(used)} fit in {fitting}")
    if setting.row_bytes < MIN_DMA_ROW_BYTES:
        reason = f"threads are faster for rows of {size_text(setting.row_bytes)}"
        return Choice("pinned", reason)
    name, held = ("dma", "all") if size <= budget else ("disk", f"{size_text(budget)} of")
    limit = f"{size_text(budget)} of RAM may hold rows"
    return Choice(name, f"{held} {size_text(size)} will be held, as {limit}")


def _machine() -> dict[str, Any]:
    """Return the processor, its cores, the system and the GPU, ready for JSON."""
    cpuinfo = Path("/proc/cpuinfo")
    model = re.search("model name\\s*: (.*)", cpuinfo.read_text() if cpuinfo.exists() else "")
    cpu = model[1] if model else platform.machine()
    facts = {"cpu": cpu, "cores": available_cores(), "system": platform.platform()}
    if torch.cuda.is_available():
        facts |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return facts
