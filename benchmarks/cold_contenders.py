"""FFCV and LitData, as `cold.py` measures them: the same rows, in files of their own, not in RAM.

Each is set up as its documentation recommends for data larger than RAM: FFCV with
``os_cache=False`` in its quasi-random order, which reads pages of 8 MB; LitData with uncompressed
chunks of 64 MB in a local folder and its own shuffle. Each runs in a process of its own, with the
Python that ``--python`` names.
"""

import gc
import importlib
import json
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import contenders
import harness
import numpy as np
import torch
from contenders import Job
from disk import drop_from_page_cache
from pictures import Numbered


class Contender(NamedTuple):
    """How rows are stored, given the memory map of them, and how they are read."""

    store: Callable[[Job, np.ndarray], None]
    read: Callable[[Job], Iterable[Any]]
    modules: str  #: imported before anything is timed
    package: str  #: whose version is told
    opened_once: bool  #: as it compiles when it is first used; else anew each time


def store_ffcv(job: Job, rows: np.ndarray) -> None:
    """Write raw pixels."""
    contenders.write_ffcv(job, Numbered(range(len(rows)), partial(row_of, rows)))


def row_of(rows: np.ndarray, number: int) -> np.ndarray:
    """Return a row, in memory of its own."""
    return np.array(rows[number])


def store_litdata(job: Job, rows: np.ndarray) -> None:
    """Write chunks of tensors."""
    from litdata import optimize

    options = {"chunk_bytes": "64MB", "num_workers": contenders.CORES, "start_method": "fork"}
    sample, numbers = partial(lit_sample, rows), list(range(len(rows)))
    optimize(sample, numbers, str(job.built / "lit"), verbose=False, **options)


def lit_sample(rows: np.ndarray, number: int) -> dict[str, Any]:
    """Return what LitData stores of a row."""
    planes = torch.from_numpy(row_of(rows, number)).permute(2, 0, 1).contiguous()
    return {"image": planes, "label": number}


CONTENDERS = {
    "FFCV, os_cache=False": Contender(
        store_ffcv,
        partial(contenders.read_ffcv, fits_in_memory=False),
        "ffcv.loader ffcv.writer ffcv.transforms",
        "ffcv",
        opened_once=True,
    ),
    "LitData, tensors": Contender(
        store_litdata,
        contenders.read_litdata,
        "litdata litdata.streaming",
        "litdata",
        opened_once=False,  # its workers map chunks until they end
    ),
}


def serve(title: str, path: Path, job: Job, count: int) -> None:
    """Serve the requests "store" and "read" of `cold.py`."""
    warnings.simplefilter("ignore")
    contender, opened = CONTENDERS[title], []
    for module in contender.modules.split():
        importlib.import_module(module)

    def store() -> dict[str, Any]:
        rows = np.load(path, mmap_mode="r")  # not open any longer when it is to be cold
        if not (job.built / "stored").exists():
            job.built.mkdir(parents=True, exist_ok=True)
            contender.store(job, rows)
            (job.built / "stored").touch()
        opened.append(contender.read(job))
        images, labels = next(iter(opened[0]))
        stored = rows[labels.flatten().numpy()]
        if not np.array_equal(images.permute(0, 2, 3, 1).numpy(), stored):
            raise ValueError("the first batch has other pixels than the rows it names")
        return {contender.package: metadata.version(contender.package)}

    def read() -> dict[str, float]:
        if not contender.opened_once:
            opened.clear()
            gc.collect()
        for file in job.built.rglob("*"):
            if file.is_file() and file.stat().st_size:
                drop_from_page_cache(file)
        if not opened:
            opened.append(contender.read(job))
        return harness.take(opened[0], count)

    harness.serve(lambda: {"store": store, "read": read})


def command(title: str, path: Path, job: Job, count: int, pythons: list[str]) -> list[Any]:
    """Return the command of the process that serves a contender."""
    described = json.dumps(asdict(job), default=str)
    return [harness.interpreter(title, pythons), __file__, title, path, described, count]


if __name__ == "__main__":
    _, title, path, described, count = sys.argv
    fields = json.loads(described)
    paths = {name: Path(fields[name]) for name in ("images", "built")}
    serve(title, Path(path), Job(**fields | paths), int(count))
