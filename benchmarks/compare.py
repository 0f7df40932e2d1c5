"""memload beside what one would pick instead, from the same pictures to shuffled batches.

    python benchmarks/compare.py [--images DIR] [--count N] [--rounds 5] [--seconds 0.5]
        [--only WORDS] [--python WORD=PATH] [--device cpu] [--workers N] [--dry-run]

Batches are (256, 3, 224, 224) uint8. `pip install '.[bench]'` in a new environment installs all but
two: FFCV compiles against OpenCV (`pip install . ffcv==1.0.2`, in an environment of its own:
`--python FFCV=PATH`), and DALI needs a GPU (`pip install nvidia-dali-cuda130==2.4.0`). torch and
torchvision have to be of one build, both for the CPU or both for CUDA.

Each way is built and read in processes of its own. One that is not installed, fails or hangs there
is a line in the table; once the rounds have begun, it ends the run. Each is set up as its own
documentation recommends (contenders.py). The JPEGs below DIR, or made ones, are copied until there
are N. Where there is a GPU, batches end there, through page-locked memory and without waiting;
`--device cpu` leaves them in memory.

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
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
from contenders import CONTENDERS, CORES, SIDE, Contender, Job
from harness import Child, ChildError
from pictures import find_jpegs, planes
from PIL import Image
from report import tables

USUAL = {"count": 4096, "batch": 256, "workers": CORES, "rounds": 5, "seconds": 0.5}
EQUAL = 99.0  #: dB, for pictures without any difference
COLUMNS = ("images/s", "memload / it", "cores")
CHECKED = 64  #: pictures of which the pixels are looked at

# What a child process does


def moved(batches: Iterable[Any], job: Job) -> Iterator[tuple[Any, Any]]:
    """Yield images and labels on the device. Raises ValueError for a wrong shape or type."""
    for images, labels in batches:
        if images.shape[1:] != (3, SIDE, SIDE) or images.dtype != torch.uint8:
            raise ValueError(f"a batch is {tuple(images.shape)}, {images.dtype}")
        yield images.to(job.device, non_blocking=True), labels.to(job.device, non_blocking=True)


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
    for images, labels in moved(loader, job):
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
    found = []
    for image, file in list(zip(images, files, strict=True))[:CHECKED]:
        error = np.mean((image.astype(float) - planes(file, SIDE).numpy()) ** 2)
        found.append(min(EQUAL, 10 * np.log10(255**2 / error)) if error else EQUAL)
    if min(found) == EQUAL:
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
        rate = harness.rate_behind(lambda: moved(opened[0], job), max(1, job.workers), seconds)()
        cores = (harness.cpu_seconds() - before) / (time.perf_counter() - start)
        return {"images/s": rate, "cores": cores}

    requests = {"build": lambda: build(contender, job), "open": open_it, "round": take_epochs}
    harness.serve(lambda: requests, {})


# What the parent does


class Way:
    """A process that builds or reads, in a session of its own with all processes that it starts."""

    def __init__(self, title: str, job: Job, options: argparse.Namespace) -> None:
        pythons = dict(entry.split("=", 1) for entry in options.python)
        python = next((path for word, path in pythons.items() if word in title), sys.executable)
        # Not below the job's folder: workers have sockets here, whose paths may have 107 characters.
        self.scratch = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        own = Path(self.scratch.name)
        caches = ("HF_HOME", "DATA_OPTIMIZER_CACHE_FOLDER", "DATA_OPTIMIZER_DATA_CACHE_FOLDER")
        environment = {name: str(own / name) for name in caches} | {"TMPDIR": str(own)}
        described = json.dumps(asdict(job), default=str)
        self.timeout, self.ready = options.timeout, None
        self.errors = (own / "errors").open("w+")
        try:
            self.child = Child(
                [python, __file__, "--serve", title, described, options.seconds],
                harness.HERE.parent,
                env=environment | {"HF_HUB_OFFLINE": "1"},
                stderr=self.errors,
                start_new_session=True,
            )
        except OSError as error:
            self.errors.close()
            raise ChildError(f"no interpreter: {error.strerror}") from error

    def __enter__(self) -> "Way":
        return self

    def ask(self, request: str) -> dict[str, Any]:
        """Return the figures of a request. Raises ChildError with the last line of stderr."""
        try:
            self.ready = self.ready or self.child.answer(self.timeout)
            answers = self.child.measure(request, self.timeout)
        except ChildError as error:
            self.errors.seek(0)
            raise ChildError((self.errors.read().splitlines() or [str(error)])[-1]) from None
        return {name.partition(" › ")[2]: value for name, value in answers.items()}

    def __exit__(self, *_: object) -> None:
        """Let the process clear away after itself, then end whatever is left."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.close(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.process.pid, signal.SIGKILL)
        self.child.process.wait()
        self.errors.close()
        self.scratch.cleanup()


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


def parse_options() -> argparse.Namespace:
    """Return the options, with ``part``: how many pictures ways have that decode in training."""
    parser = harness.argument_parser(__doc__)
    add = parser.add_argument
    add("--images", type=Path, help="folder of JPEGs; by default made ones")
    add("--count", type=int, help="pictures; by default 4096, or three batches a worker if more")
    for name in ("batch", "workers", "rounds", "seconds"):
        add(f"--{name}", type=type(USUAL[name]), default=USUAL[name], help="default: %(default)s")
    add("--only", nargs="+", default=[], help="words; a way's name has to contain one of them")
    add("--python", action="append", default=[], metavar="WORD=PATH", help="of ways so named")
    add("--device", choices=("cpu", "cuda"), help="by default cuda if there is one")
    add("--folder", type=Path, default=Path("/var/tmp"), help="where to write, on a disk")
    add("--timeout", type=float, default=120, help="seconds for a build or a round of one way")
    options = parser.parse_args()
    options.part = 3 * options.batch * max(1, options.workers)
    options.count = options.count or max(USUAL["count"], options.part)
    if options.count < options.part:
        parser.error(f"--count is {options.count}. Give {options.part} or more, three batches a "
                     "worker.")  # fmt: skip
    if options.device == "cuda":
        harness.need_cuda("--device cpu leaves batches in memory.")
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return options


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


def build_once(title: str, job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """Build what a way reads, unless another one has; return the figures. Raises ChildError."""
    kept = job.built / "built.json"
    if CONTENDERS[title].build is None:
        size = sum(Path(path).stat().st_size for path in job.files)
        return {"disk, kB/image": size / job.count / 1000}
    if not kept.exists():
        shutil.rmtree(job.built, ignore_errors=True)
        job.built.mkdir()
        with Way(title, job, options) as way:
            found = way.ask("build")
        kept.write_text(json.dumps(found))
    return json.loads(kept.read_text())


def measure(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """Build, open and check every way, and take the rounds; return the figures of each."""
    ways: dict[str, Callable[[], Any]] = {}
    with contextlib.ExitStack() as opened:
        results: dict[str, dict[str, Any]] = {}
        for name, (title, job) in chosen(options, folder).items():
            try:
                results[name] = build_once(title, job, options)
                way = opened.enter_context(Way(title, job, options))
                results[name] |= way.ask("open")
                ways[name] = functools.partial(way.ask, "round")
            except ChildError as error:
                # no paths of this machine: they say nothing to others
                results[name] = {"error": re.sub(r"(?:/[^\s/:'\"]+)+/", "", str(error))[:200]}
            print(f"{name}: {results[name]}", file=sys.stderr)
        rounds = harness.measure(ways, options.rounds)
    first, rate = next(iter(results)), "images/s"
    ratios = {f"{name} › memload / it": (f"{first} › {rate}", f"{name} › {rate}") for name in ways}
    if first not in ways or not first.startswith("memload"):
        ratios = {}
    ratios.pop(f"{first} › memload / it", None)
    found = harness.with_ratios(rounds, ratios)
    spreads = harness.nested({figure: harness.spread(values) for figure, values in found.items()})
    for name in ways:
        results[name] = {column: spreads[name].get(column) for column in COLUMNS} | results[name]
    return results


def main() -> None:
    """Run the benchmark."""
    options = parse_options()
    left_out = harness.partial(options, USUAL)
    left_out += [f"--only {shlex.join(options.only)}"] * bool(options.only)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="memload-benchmark-") as folder:
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
        with harness.errors_in_one_line():
            main()
