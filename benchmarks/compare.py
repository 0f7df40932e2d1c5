"""memload beside what one would pick instead, from the same pictures to shuffled batches.

Batches are (256, 3, 224, 224) uint8. `pip install '.[bench]'` in a new environment installs all but
two: FFCV compiles against OpenCV (`pip install . ffcv==1.0.2`, in an environment of its own:
`--python FFCV=PATH`), and DALI needs a GPU (`pip install nvidia-dali-cuda130==2.4.0`). torch and
torchvision have to be of one build, both for the CPU or both for CUDA.

Each way is built and read in processes of its own. One that is not installed, fails or hangs there
for `--timeout` seconds is a line in the table; once the rounds have begun, it ends the run. Each is
set up as its own documentation recommends (contenders.py). The JPEGs below `--images`, or made ones,
are copied until there are `--count`, or three batches a worker. Where there is a GPU, batches end
there, through page-locked memory and without waiting; `--device cpu` leaves them in memory. `--only`
measures the ways whose name contains a word.

In each round every way takes whole epochs, for `--seconds` at least.

- images/s: behind the first batches of an epoch, one for each worker, to its end, as in a long one.
- cores: CPU time of all processes of a way over the time of its rounds.
- build: with decoding, on all cores, everything flushed to the disk. Files are warm ever after.
- first batch: from opening to the first batch in hand, without imports.
- memory: anonymous and shared pages of all processes of a way, each page once, the most in the first
  epoch. The page cache is not in it, so `--folder` has to be on a disk.
- pixels: PSNR of 64 pictures of the first batch against Pillow's decoder and torchvision's Resize and
  CenterCrop. A first epoch in which a picture does not come exactly once is an error.

Ways that decode in training have three batches a worker, as their rate does not depend on more.
JPEGs that are neither RGB nor grey, or have an orientation, are left out, so that all decoders give
the same. Linux only.
"""

import argparse
import contextlib
import functools
import importlib
import json
import multiprocessing
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
from contenders import CONTENDERS, CORES, SIDE, Contender, Job
from harness import Ask, ChildError, move
from pictures import EQUAL, find_jpegs, planes, psnr
from PIL import Image
from report import tables

USUAL = {"count": 4096, "batch": 256, "workers": CORES, "rounds": 5, "seconds": 0.5}
OPTIONS = {"images": None, **USUAL, "timeout": 120.0, "only": [], "python": [], "folder": None}
COLUMNS = ("images/s", "memload / it", "cores")
CHECKED = 64  #: pictures of which the pixels are looked at
# What a child process does


def build(contender: Contender, job: Job) -> dict[str, float]:
    """Build, flushed to the disk; return time and bytes."""
    start = time.perf_counter()
    contender.build(job)
    files = [path for path in job.built.rglob("*") if path.is_file()]
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    seconds, size = time.perf_counter() - start, sum(path.stat().st_size for path in files)
    return {
        "build, ms/image": 1000 * seconds / job.count,
        "disk, kB/image": size / job.count / 1000,
    }


def first_epoch(contender: Contender, job: Job) -> tuple[Iterable[Any], dict[str, Any]]:
    """Take an epoch in which every picture has to come once; return the loader and figures."""
    seen, memory, first, pixels = [], 0.0, 0.0, ""
    start = time.perf_counter()
    loader = contender.read(job)
    for images, labels in move(loader, job.device):
        if images.shape[1:] != (3, SIDE, SIDE) or images.dtype != torch.uint8:
            raise ValueError(f"a batch is {tuple(images.shape)}, {images.dtype}")
        numbers = labels.flatten().tolist()  # waits for the device
        if not seen:
            first = time.perf_counter() - start
            pixels = equality(images.cpu().numpy(), [job.files[number] for number in numbers])
        seen += numbers
        memory = max(memory, memory_in_use())
    if sorted(seen) != list(range(job.count)):
        raise ValueError(
            f"an epoch has {len(seen)} pictures, {len(set(seen))} different, not {job.count}"
        )
    return loader, {"first batch, s": first, "memory, MB": memory, "pixels": pixels}


def equality(images: np.ndarray, files: list[str]) -> str:
    """Tell how near some pictures of a batch are to Pillow's."""
    pairs = list(zip(images, files, strict=True))[:CHECKED]
    found = [psnr(planes(file, SIDE).numpy(), image) for image, file in pairs]
    if set(found) == {EQUAL}:
        return "equal"
    return f"{statistics.median(found):.0f} dB, {min(found):.0f} at the least"


def memory_in_use() -> float:
    """Return the megabytes of anonymous and shared pages of this process and its workers."""
    processes = ["self", *(worker.pid for worker in multiprocessing.active_children())]
    texts = [Path(f"/proc/{process}/smaps_rollup").read_text() for process in processes]
    kilobytes = re.findall(r"^Pss_(?:Anon|Shmem): +(\d+)", "\n".join(texts), re.MULTILINE)
    return sum(map(int, kilobytes)) / 1000


def child(title: str, job: Job, seconds: float) -> None:
    """Serve the requests "build", "open" and "round" of the parent."""
    warnings.simplefilter("ignore")
    contender, opened = CONTENDERS[title], []
    for module in contender.modules.split():
        importlib.import_module(module)

    def open_it() -> dict[str, Any]:
        loader, found = first_epoch(contender, job)
        opened.append(loader)
        return found

    def take_epochs() -> dict[str, float]:
        before, start = harness.cpu_seconds(), time.perf_counter()
        batches = functools.partial(move, opened[0], job.device)
        rate = harness.rate_behind(batches, max(1, job.workers), seconds)()
        cores = (harness.cpu_seconds() - before) / (time.perf_counter() - start)
        return {"images/s": rate, "cores": cores}

    requests = {"build": lambda: build(contender, job), "open": open_it, "round": take_epochs}
    harness.serve(lambda: requests)


# What the parent does


def started(
    title: str, job: Job, options: argparse.Namespace
) -> contextlib.AbstractContextManager[Ask]:
    """Start a process that builds or reads."""
    python = harness.interpreter(title, options.python)
    described = json.dumps(asdict(job), default=str)
    command = [python, __file__, "--serve", title, described, options.seconds]
    return harness.started(command, options.timeout)


def usable(path: Path) -> bool:
    """Tell whether all decoders give the same picture of a file."""
    with Image.open(path) as image:
        upright = image.getexif().get(0x0112, 1) == 1
        return image.format == "JPEG" and image.mode in ("RGB", "L") and upright


def copy_pictures(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Copy (or make) JPEGs until there are enough; return what they are."""
    found = find_jpegs(options.images, folder / "made", min(options.count, 256))
    kept = [path for path in found if usable(path)]
    if not kept:
        sys.exit(f"No JPEG in {options.images} is upright and RGB or grey. Give another folder.")
    (folder / "images").mkdir()
    for number in range(options.count):
        # copies, not links: each has pages of its own, as different pictures would
        shutil.copyfile(kept[number % len(kept)], folder / "images" / f"{number:08d}.jpg")
    kind, different = "given" if options.images else "made", min(options.count, len(kept))
    return {"pictures": kind, "different": different, "left out": len(found) - len(kept)}


def chosen(options: argparse.Namespace, folder: Path) -> dict[str, tuple[str, Job]]:
    """Return contender and job of each way that is asked for, by its name in the table."""
    found = {}
    for title, contender in CONTENDERS.items():
        if contender.device not in (None, options.device):
            continue
        for count in dict.fromkeys(options.workers if n is None else n for n in contender.counts):
            name = f"{title}, {count} {contender.unit}{'s' * (count != 1)}"
            if options.only and not any(word.lower() in name.lower() for word in options.only):
                continue
            built = folder / (contender.build.__name__ if contender.build else "nothing")
            pictures = options.part if contender.decodes else options.count
            job = Job(folder / "images", built, options.batch, count, options.device, pictures)
            found[name] = (title, job)
    if not found:
        sys.exit(f"No way's name contains one of {options.only}. Give other words to --only.")
    return found


def build_apart(title: str, job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """Build what a way reads in a process of its own; return the figures. Raises ChildError."""
    if CONTENDERS[title].build is None:
        size = sum(Path(path).stat().st_size for path in job.files)
        return {"disk, kB/image": size / job.count / 1000}
    shutil.rmtree(job.built, ignore_errors=True)
    job.built.mkdir()
    with started(title, job, options) as ask:
        return ask("build")


def measure(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """Build, open and check every way, and take the rounds; return the figures of each."""
    ways: dict[str, Callable[[], Any]] = {}
    with contextlib.ExitStack() as opened:
        results: dict[str, dict[str, Any]] = {}
        built: dict[Path, dict[str, Any]] = {}
        for name, (title, job) in chosen(options, folder).items():
            try:
                if job.built not in built:
                    built[job.built] = build_apart(title, job, options)
                results[name] = dict(built[job.built])
                ask = opened.enter_context(started(title, job, options))
                results[name] |= ask("open")
                ways[name] = functools.partial(ask, "round")
            except (ChildError, OSError) as error:
                results[name] = {"error": harness.without_folders(str(error))}
            print(f"{name}: {results[name]}", file=sys.stderr)
        rounds = harness.measure(ways, options.rounds)
    first = next(iter(results))
    ratios = {
        f"{name} › memload / it": (f"{first} › images/s", f"{name} › images/s")
        for name in ways
        if name != first and first.startswith("memload")
    }
    found = harness.with_ratios(rounds, ratios)
    spreads = harness.nested({figure: harness.spread(values) for figure, values in found.items()})
    for name in ways:
        results[name] = {column: spreads[name].get(column) for column in COLUMNS} | results[name]
    return results


def main() -> None:
    """Run the benchmark."""
    devices = ("cuda", "cpu") if torch.cuda.is_available() else ("cpu", "cuda")
    options = harness.parse_options({**OPTIONS, "device": devices}, {"rounds": 3, "seconds": 0.1})
    options.part = 3 * options.batch * max(1, options.workers)
    options.count = max(options.count, options.part)
    if options.device == "cuda":
        harness.need_cuda("--device cpu leaves batches in memory.")
    left_out = harness.partial(options, {**USUAL, "only": []})
    scratch = {"dir": options.folder or "/var/tmp", "prefix": "memload-benchmark-"}
    with tempfile.TemporaryDirectory(**scratch) as folder:
        parameters = copy_pictures(options, Path(folder))
        results = measure(options, Path(folder))
    parameters |= {"images": options.count, "images of ways that decode": options.part}
    shown = ("batch", "device", "rounds", "seconds")
    parameters |= {"side": SIDE} | {option: getattr(options, option) for option in shown}
    parameters |= {"files": "warm", "first epoch": "warm"}
    print(*(table.markdown() for table in tables(results)), sep="\n\n")
    if all("error" in figures for figures in results.values()):
        sys.exit("Nothing is recorded, as no way could be measured.")
    harness.record("compare", options, results, parameters, left_out)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        fields = json.loads(sys.argv[3])
        paths = {name: Path(fields[name]) for name in ("images", "built")}
        child(sys.argv[2], Job(**fields | paths), float(sys.argv[4]))
    else:
        main()
