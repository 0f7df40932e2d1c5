"""memload beside what one would pick instead, from the same pictures to shuffled batches.

    python benchmarks/compare.py [--images DIR] [--count N] [--rounds 5] [--seconds 0.5]
        [--only WORDS] [--python KIND=PATH] [--device cpu] [--workers N] [--dry-run]

Batches are (256, 3, 224, 224) uint8. `pip install '.[bench]'` in a new environment installs all but
two: FFCV compiles against OpenCV (`pip install ffcv==1.0.2`, in an environment of its own:
`--python ffcv=PATH`), and DALI needs a GPU (`pip install nvidia-dali-cuda130==2.4.0`). torch and
torchvision have to be of one build, both for the CPU or both for CUDA.

Each way is built and read in processes of its own, so one that is not installed, fails or hangs is a
line in the table. Each is set up as its own documentation recommends (contenders.py); where the
number of workers is a choice, there is a line without any and one with as many as cores. The JPEGs
below DIR, or made ones, are copied until there are N. Where there is a GPU, batches end there,
through page-locked memory and without waiting; `--device cpu` leaves them in memory.

In each round every way takes whole epochs, for `--seconds` at least.

- images/s: behind the first batches of an epoch, one for each worker, to its end, as in a long epoch.
  Start: of an epoch, until its first batch is there.
- cores: CPU time of all processes of a way over the time of its rounds. Others: what all other
  processes of the machine used meanwhile; above 10 % of its cores the figures are marked.
- memory: anonymous and shared pages of all processes of a way, each page once, at the highest, and
  what importing took of it. The page cache is not in it, so `--folder` has to be on a disk.
- first batch: from opening to the first batch in hand, without imports.
- build: with decoding, on all cores, everything flushed to the disk. Files are warm ever after.
- pixels: PSNR of 64 pictures of a batch against Pillow's decoder and torchvision's Resize and
  CenterCrop. An epoch in which a picture does not come exactly once is an error.

Memory, first batch and building are measured once, all else in every round. Ways that decode in
training have three batches a worker, as their rate does not depend on more. JPEGs that are neither
RGB nor grey, or have an orientation, are left out, so that all decoders give the same. Linux only.
"""

import argparse
import contextlib
import importlib
import json
import os
import re
import select
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from contenders import KINDS, Job, Kind, resized, ways

CORES = len(os.sched_getaffinity(0))
STARTED = time.perf_counter()
EQUAL = 99.0  #: dB, for pictures without any difference
CHECKED = 64  #: pictures of which the pixels are looked at
USUAL = {"count": 4096, "side": 224, "batch": 256, "workers": CORES, "rounds": 5}


# What a child process does.


def pair(batch: Any, job: Job) -> tuple[Any, Any]:
    """Return images and labels of a batch of any kind, checked, on the device."""
    if isinstance(batch, list | tuple) and len(batch) == 1:  # DALI: one batch for each pipeline
        batch = batch[0]
    images, labels = (
        (batch[0], batch[1])
        if isinstance(batch, list | tuple)
        else (batch["image"], batch["label"])
    )
    if (
        images.shape[1:] != (3, job.side, job.side)
        or str(images.dtype) != "torch.uint8"
        or len(images) > job.batch
    ):
        raise ValueError(f"batch of {tuple(images.shape)}, {images.dtype}")
    if str(labels.dtype) == "torch.uint8":  # Hugging Face's, as bytes
        import torch

        labels = labels.contiguous().view(torch.int32)
    return images.to(job.device, non_blocking=True), labels.to(job.device, non_blocking=True)


def synchronise(job: Job, ended: bool = False) -> float:
    """Wait for the batch in hand, and where an epoch has ended for the whole device; return the time.

    Within an epoch that would be to wait for batches ahead, on streams of their own, before the clock starts: 2 of 48
    would come for nothing.
    """
    if job.device != "cpu":
        import torch

        (torch.cuda if ended else torch.cuda.current_stream()).synchronize()
    return time.perf_counter()


def epoch(
    loader: Iterable[Any], job: Job, start: float, seen: list[Any] | None = None
) -> dict[str, float]:
    """Take an epoch, and tell how long its first batch took, and behind the first of each worker how many came when.

    `seen` takes the labels.
    """
    first = since = end = 0.0
    count = late = 0
    for number, batch in enumerate(loader, 1):
        images, labels = pair(batch, job)
        if seen is not None:
            seen.append(labels.clone())  # FFCV fills its own memory again
        count += len(images)
        late += len(images) if since else 0
        if number == 1:
            first = synchronise(job) - start
        if number == max(1, job.workers):
            since = synchronise(job)
    end = synchronise(job, ended=True)
    if not late:
        raise ValueError(f"an epoch of {count} pictures is too short for {job.workers} workers")
    return {"first": first, "count": count, "all": end - start, "late": late, "steady": end - since}


def whole_epoch(loader: Iterable[Any], job: Job, start: float) -> dict[str, float]:
    """Take the first epoch, in which every picture has to come once."""
    seen: list[Any] = []
    taken = epoch(loader, job, start, seen)
    labels = [label for part in seen for label in part.flatten().tolist()]
    expected = len(job.files())
    if sorted(labels) != list(range(expected)):
        raise ValueError(
            f"an epoch of {len(labels)} pictures, {len(set(labels))} of them different, not {expected}"
        )
    return taken


def epochs(loader: Iterable[Any], job: Job, seconds: float) -> dict[str, float]:
    """Take whole epochs for at least some time."""
    begun, taken = time.perf_counter(), []
    while not taken or time.perf_counter() - begun < seconds:
        taken.append(epoch(loader, job, time.perf_counter()))
    steady, late = (sum(one[name] for one in taken) for name in ("steady", "late"))
    return {"seconds": time.perf_counter() - begun, "start": 1000 * statistics.median(one["first"] for one in taken),
            "rate": late / steady}  # fmt: skip


def psnr(loader: Iterable[Any], job: Job) -> list[float]:
    """Return how near pictures of a batch are to Pillow's, in dB, the lowest first."""
    import numpy as np

    batches = iter(loader)
    images, labels = (part.clone().cpu().numpy() for part in pair(next(batches), job))
    for _ in batches:  # DALI begins no epoch within one, and FFCV fills its own memory again
        pass
    files, found = job.files(), []
    for picture, number in list(zip(images, labels.flatten(), strict=True))[:CHECKED]:
        error = np.mean(
            (picture.astype(np.float64) - resized(files[number], job.side).transpose(2, 0, 1)) ** 2
        )
        found.append(EQUAL if error == 0 else min(EQUAL, float(10 * np.log10(255**2 / error))))
    return sorted(found)


def build(kind: Kind, job: Job, start: float) -> dict[str, float]:
    """Build, flushed to the disk; return time and bytes."""
    assert kind.build is not None
    job.built.mkdir()
    kind.build(job)
    files = [path for path in job.built.rglob("*") if path.is_file()]
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return {
        "seconds": time.perf_counter() - start,
        "bytes": sum(path.stat().st_size for path in files),
    }


def versions(kind: Kind) -> dict[str, str]:
    """Return versions of a way's own package and of what it stands on."""
    found = {"python": sys.version.split()[0]}
    for name in (kind.package, "torch", "numpy", "pillow"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    if kind.package == "memload":  # a checkout need not be installed
        found["memload"] = importlib.import_module("memload").__version__
    return found


def reason(error: BaseException) -> str:
    """Return an error in a line; of one that a worker passes on with its traceback, the error at its end."""
    lines = [line.strip("\r") for line in str(error).splitlines() if line.strip()] or [""]
    traced = [place for place, line in enumerate(lines) if line.startswith('  File "')]
    if traced:
        cause = next(
            (line for line in lines[traced[-1] + 1 :] if not line.startswith(" ")), lines[-1]
        )
        return f"in a worker: {cause.strip()}"
    return f"{type(error).__name__}: {lines[0].strip()}"


def child(name: str, text: str) -> None:
    """Answer each request on what was standard output with a line of JSON, until there are no more."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes where the errors go
    warnings.simplefilter("ignore")
    kind, fields = KINDS[name], json.loads(text)
    job = Job(**fields | {"folder": Path(fields["folder"]), "built": Path(fields["built"])})
    loader: Any = None
    try:
        for module in ("torch", *kind.modules):
            importlib.import_module(module)
        print(json.dumps(versions(kind)), file=answers)
        for line in sys.stdin:
            request, *arguments = json.loads(line)
            start = time.perf_counter()
            answer: Any
            if request == "build":
                answer = build(kind, job, start)
            elif request == "open":
                loader = kind.read(job)
                answer = whole_epoch(loader, job, start)
            elif request == "epochs":
                answer = epochs(loader, job, *arguments)
            else:
                answer = psnr(loader, job)
            print(json.dumps(answer), file=answers)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is this way's line in the table
        traceback.print_exc()
        print(json.dumps({"error": reason(error)}), file=answers)


# What the parent does.


class WayError(Exception):
    """A way that cannot go on, and why."""


def busy_seconds() -> float:
    """Return what all cores have spent working so far, or for other guests of the host."""
    user, nice, system, _idle, _waiting, irq, soft, steal, *_ = map(
        int, Path("/proc/stat").read_text().split()[1:11]
    )
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


class Child:
    """A process that builds or reads one way, in a session of its own with all processes that it starts."""

    def __init__(self, python: str, kind: str, job: Job) -> None:
        # Temporary files and caches of whatever library. Not below the job's folder: workers have sockets here, whose
        # paths may have 107 characters, and wait for ever if they have more.
        self.scratch = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        own = Path(self.scratch.name)
        self.log = (own / "log").open("w")
        names = (
            "TMPDIR",
            "HF_HOME",
            "DATA_OPTIMIZER_CACHE_FOLDER",
            "DATA_OPTIMIZER_DATA_CACHE_FOLDER",
        )
        scratch = {name: str(own) if name == "TMPDIR" else str(own / name) for name in names} | {
            "HF_HUB_OFFLINE": "1"
        }
        command = [python, __file__, "--child", kind, json.dumps(asdict(job), default=str)]
        try:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, bufsize=1,
                start_new_session=True, env=os.environ | scratch,
            )  # fmt: skip
        except OSError as error:
            self.log.close()
            self.scratch.cleanup()
            raise WayError(f"no interpreter: {error}") from error

    def ask(self, *request: Any, timeout: float, watch: Callable[[], None] | None = None) -> Any:
        """Send a request, if any, and return the answer; `watch` is called while it is waited for. Raises WayError."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if request:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write(json.dumps(request) + "\n")
        end = time.monotonic() + timeout
        while not select.select([self.process.stdout], [], [], 0.05 if watch else 0.5)[0]:
            if watch:
                watch()
            if time.monotonic() > end:
                raise WayError(f"no answer in {timeout:.0f} s")
        line = self.process.stdout.readline()
        answer = (
            json.loads(line) if line else {"error": f"ended, status {self.process.wait(timeout)}"}
        )
        if isinstance(answer, dict) and "error" in answer:
            raise WayError(answer["error"])
        return answer

    def processes(self) -> Iterator[tuple[Path, list[str]]]:
        """Yield folder and fields after the name in `stat` of each process of the session."""
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == self.process.pid:
                    yield path, fields

    def cpu_seconds(self) -> float:
        """Return CPU time of all its processes, with those that have ended."""
        ticks = sum(sum(map(int, fields[11:15])) for _, fields in self.processes())
        return ticks / os.sysconf("SC_CLK_TCK")

    def memory(self) -> float:
        """Return the megabytes of anonymous and shared pages of all its processes, each page once."""
        total = 0
        for path, _ in self.processes():
            with contextlib.suppress(OSError):
                pages = re.findall(
                    r"^Pss_(?:Anon|Shmem): +(\d+)",
                    (path / "smaps_rollup").read_text(),
                    re.MULTILINE,
                )
                total += 1024 * sum(map(int, pages))
        return total / 1e6

    def end(self, patience: float = 10) -> None:
        """End all its processes: it is let go, so that it clears away after itself, and then whatever is left."""
        if self.log.closed:
            return  # the id may be another's by now
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        for path, _ in list(self.processes()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(path.name), signal.SIGKILL)
        self.process.wait()
        self.log.close()
        self.scratch.cleanup()


@dataclass
class Way:
    """A line of the table, while it is measured."""

    name: str
    kind: str
    job: Job
    python: str
    timeout: float
    child: Child | None = None
    error: str | None = None
    result: dict[str, Any] = field(default_factory=dict)
    rounds: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.builder = KINDS[self.kind].built_by or self.kind

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Have a failure end this way only."""
        try:
            yield
        except WayError as error:
            # no paths of this machine: they say nothing to others
            self.error = re.sub(r"(?:/[^\s/:'\"]+)+/", "", str(error))[:200]
            progress(f"{self.name}: {self.error}")
            self.end()

    def start(self) -> None:
        """Start the process that reads."""
        self.child = Child(self.python, self.kind, self.job)

    def ask(self, *request: Any, watch: Callable[[], None] | None = None) -> Any:
        """Ask the process that reads. Raises WayError."""
        assert self.child is not None
        return self.child.ask(*request, timeout=self.timeout, watch=watch)

    def open(self) -> None:
        """Take the first epoch, look at the memory in some more."""
        assert self.child is not None
        memory, imported = self.child.memory, self.child.memory()
        peak = imported

        def watch() -> None:
            nonlocal peak
            peak = max(peak, memory())

        first = self.ask("open", watch=watch)
        self.ask("epochs", 0.3, watch=watch)
        watch()
        self.result |= {
            "first batch, s": first["first"],
            "memory, MB": peak,
            "imports, MB": imported,
        }

    def round(self, seconds: float) -> None:
        """Take some whole epochs."""
        assert self.child is not None
        before, busy = self.child.cpu_seconds(), busy_seconds()
        taken = self.ask("epochs", seconds)
        own = self.child.cpu_seconds() - before
        taken["cores"] = own / taken["seconds"]
        taken["others"] = 100 * max(0.0, busy_seconds() - busy - own) / taken["seconds"] / CORES
        self.rounds.append(taken)

    def check(self) -> None:
        """Look at the pixels."""
        found = self.ask("check")
        middle = statistics.median(found)
        self.result["pixels"] = (
            "equal" if found[0] == EQUAL else f"{middle:.0f} dB, {found[0]:.0f} at the least"
        )

    def end(self) -> None:
        """End all its processes, if there are any."""
        if self.child is not None:
            self.child.end()


def usable(path: Path) -> bool:
    """Tell whether all decoders give the same picture of a file."""
    from PIL import Image

    with Image.open(path) as image:
        return (
            image.format == "JPEG"
            and image.mode in ("RGB", "L")
            and image.getexif().get(0x0112, 1) == 1
        )


def copy_pictures(source: Path | None, count: int, folder: Path) -> dict[str, Any]:
    """Copy (or make) JPEGs until there are enough; return what they are."""
    if source is None:
        sys.path.append(str(Path(__file__).parents[1] / "scripts"))
        from photographs import write_folder

        found = write_folder(folder / "made", min(count, 256))
    else:
        found = sorted(
            path for path in source.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg")
        )
    kept = [path for path in found if usable(path)]
    if not kept:
        sys.exit(
            f"images: expected a folder with JPEGs, found none that are RGB or grey and upright below {source}"
        )
    (folder / "images").mkdir()
    for number in range(
        count
    ):  # copies, not links: each has pages of its own, as different pictures would
        shutil.copyfile(kept[number % len(kept)], folder / "images" / f"{number:08d}.jpg")
    kind = "made" if source is None else "given"
    return {
        "pictures": kind,
        "different": min(count, len(kept)),
        "left out": len(found) - len(kept),
    }


def progress(what: str) -> None:
    """Say what is done, and after how long."""
    print(f"{time.perf_counter() - STARTED:4.0f} s: {what}", file=sys.stderr)


def built_by(way: Way) -> dict[str, Any]:
    """Build what a way reads in a process of its own; return time and bytes, or an error."""
    builder = None
    try:
        builder = Child(way.python, way.builder, way.job)
        builder.ask(timeout=way.timeout)
        return builder.ask("build", timeout=way.timeout)
    except WayError as error:
        return {"error": str(error)}
    finally:
        if builder is not None:
            builder.end()


def build_all(compared: list[Way]) -> None:
    """Build what the ways read, each once."""
    built: dict[str, dict[str, Any]] = {}
    for way in compared:
        if KINDS[way.builder].build and way.builder not in built:
            built[way.builder] = built_by(way)
        files = way.job.files()
        found = built.get(way.builder, {"bytes": sum(Path(path).stat().st_size for path in files)})
        with way.attempt():
            if "error" in found:
                raise WayError(found["error"])
            if "seconds" in found:
                way.result["build, ms/image"] = 1000 * found["seconds"] / len(files)
            way.result["disk, kB/image"] = found["bytes"] / len(files) / 1000


def measure(compared: list[Way], options: argparse.Namespace) -> None:
    """Build, open and check every way, and take the rounds."""
    build_all(compared)
    progress("built")

    def each(do: Callable[[Way], Any], backwards: bool = False) -> None:
        for way in reversed(compared) if backwards else compared:
            with way.attempt():
                if way.error is None:
                    do(way)

    each(Way.start)  # all at once: importing is not measured
    each(lambda way: way.result.update(versions=way.ask()))
    each(Way.open)
    progress("opened")
    each(Way.check)
    for number in range(options.rounds):
        each(lambda way: way.round(options.seconds), backwards=number % 2 == 1)
        progress(f"round {number + 1} of {options.rounds}")
    each(Way.end)


def results_of(compared: list[Way]) -> dict[str, Any]:
    """Return each way's figures, with what memload's first is to it, round by round."""
    from harness import spread

    ours = (
        compared[0]
        if compared[0].name.startswith("memload") and compared[0].error is None
        else None
    )
    results: dict[str, Any] = {}
    for way in compared:
        if way.error is not None:
            results[way.name] = {"error": way.error}
            continue
        columns = ("rate", "cores", "start", "others")
        rate, cores, start, others = (spread([one[name] for one in way.rounds]) for name in columns)
        ratio = None
        if ours is not None and way is not ours:
            pairs = zip(ours.rounds, way.rounds, strict=True)
            ratio = spread([one["rate"] / other["rate"] for one, other in pairs])
        results[way.name] = {
            "images/s": rate, "memload / it": ratio, "cores": cores, "start, ms": start, **way.result,
            "others, %": others,
        }  # fmt: skip
    return results


def parse_options() -> argparse.Namespace:
    """Return the options, with ``part``: how many pictures ways have that decode in training."""
    from harness import argument_parser, need_cuda

    parser = argument_parser(__doc__)
    add = parser.add_argument
    add("--images", type=Path, help="folder of JPEGs; by default made ones")
    add("--count", type=int, help="pictures; by default 4096, or three batches a worker if more")
    add("--side", type=int, default=USUAL["side"])
    add("--batch", type=int, default=USUAL["batch"])
    add("--workers", type=int, default=USUAL["workers"], help="by default as many as cores")
    add("--rounds", type=int, default=USUAL["rounds"])
    add("--seconds", type=float, default=0.5, help="of a round of one way, at least")
    add("--only", nargs="+", default=[], help="words; a way's name has to contain one of them")
    add("--python", action="append", default=[], metavar="KIND=PATH", help=", ".join(KINDS))
    add(
        "--device",
        choices=("cpu", "cuda"),
        help="where batches end; by default cuda if there is one",
    )
    add("--folder", type=Path, default=Path("/var/tmp"), help="where to write, on a disk")
    add("--timeout", type=float, default=120, help="seconds for a build or a round of one way")
    options = parser.parse_args()
    options.part = 3 * options.batch * max(1, options.workers)
    options.count = options.count or max(USUAL["count"], options.part)
    if options.count < options.part:
        parser.error(
            f"--count is {options.count}. Give {options.part}, three batches a worker, or more."
        )
    if options.device == "cuda":
        need_cuda("--device cpu leaves batches in memory.")
    if options.device is None:
        import torch

        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    return options


def make_ways(options: argparse.Namespace, folder: Path) -> list[Way]:
    """Return the ways that are asked for. Ends the process where there is none."""
    pythons = dict(entry.split("=", 1) for entry in options.python)
    compared = []
    for title, kind, workers in ways(options.workers, options.device):
        if options.only and not any(word.lower() in title.lower() for word in options.only):
            continue
        job = Job(
            folder,
            built=folder / (KINDS[kind].built_by or kind),
            side=options.side,
            batch=options.batch,
            workers=workers,
            cores=CORES,
            device=options.device,
            count=options.part if KINDS[kind].decodes else None,
        )
        python = pythons.get(kind, sys.executable)
        compared.append(Way(title, kind, job, python=python, timeout=options.timeout))
    if not compared:
        sys.exit(f"No way's name contains one of {options.only}. Give other words to --only.")
    return compared


def main() -> None:
    """Run the benchmark."""
    from harness import partial, record
    from report import tables

    options = parse_options()
    left_out = partial(options, USUAL) + [f"--only {shlex.join(options.only)}"] * bool(options.only)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="compare-") as name:
        parameters = copy_pictures(options.images, options.count, Path(name))
        compared = make_ways(options, Path(name))
        try:
            measure(compared, options)
        finally:
            for way in compared:
                way.end()
    shown = ("side", "batch", "device", "rounds", "seconds")
    parameters |= {"images": options.count, "images of ways that decode": options.part}
    parameters |= {option: getattr(options, option) for option in shown}
    parameters |= {"files": "warm", "first epoch": "warm"}
    parameters |= {"only": ", ".join(options.only)} if options.only else {}
    results = results_of(compared)
    print(*(table.markdown() for table in tables(results)), sep="\n\n")
    if all(way.error is not None for way in compared):
        sys.exit("Nothing is recorded, as no way could be measured.")
    record("compare", options, results, parameters, left_out)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3])
    else:
        from harness import errors_in_one_line

        with errors_in_one_line():
            main()
