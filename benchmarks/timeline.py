"""Draw timelines of the same training, with a DataLoader without workers and with a Loader.

    python benchmarks/timeline.py --output docs/timeline.svg

Both are of one run under torch.profiler, and at one scale. The steps, the file and the transform
are the same; only what feeds the steps differs. On a GPU it is ResNet-50 with batches of 256 and
the feed `dma`, and the rows of the GPU's streams are below those of the threads. On a CPU it is a
small network with batches of 32, on one thread; the Loader has one more. The profiler slows both
down: see what overlaps, and measure with train_step.py. Needs matplotlib.
"""

import argparse
import contextlib
import itertools
import json
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from data import noise_dataset
from harness import settle
from torch import Tensor, nn
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import profile, record_function
from torch.utils.data import DataLoader
from train_step import Training, make_model

import memload
from memload import transforms

WARM_UP, PROFILED = 10, 25
#: Steps of the DataLoader that the picture shows, and profiled steps before these.
SHOWN, BEFORE = 4, 10
COLORS = {"read": "#d9822b", "copy": "#8a63d2", "transform": "#3a9d5d", "train": "#2f6fde"}


@dataclass(frozen=True)
class Bar:
    """Something that took from ``start`` to ``end``, in seconds, and where: a row of the picture."""

    row: str
    what: str
    start: float
    end: float


def main() -> None:
    """Measure, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--output", type=Path, default=Path("timeline.svg"))
    parser.add_argument("--data", type=Path, help="a folder to keep the data in")
    parser.add_argument("--images", type=int, help="default: 20,000 on a GPU, 1,500 on a CPU")
    options = parser.parse_args()
    is_cuda = torch.cuda.is_available()
    with tempfile.TemporaryDirectory(prefix="memload-benchmark-") as temporary:
        folder = options.data or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        path = noise_dataset(folder, options.images or (20_000 if is_cuda else 1500), 256)
        timelines = on_gpu(path) if is_cuda else on_cpu(path)
    draw(timelines, "GPU" if is_cuda else "CPU", options.output)


def on_gpu(path: Path) -> dict[str, list[Bar]]:
    """Return both timelines, with ResNet-50 on the current GPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.backends.cudnn.benchmark = True
    training = Training(make_model("resnet50"), device)
    crop = transforms.train(224, dtype=torch.bfloat16)
    return timelines_of(training.step, path, 256, crop, device)


def on_cpu(path: Path) -> dict[str, list[Bar]]:
    """Return both timelines, with a small network on one thread."""
    torch.set_num_threads(1)
    model = nn.Sequential(
        *(nn.Conv2d(3, 32, 7, 4), nn.ReLU(), nn.Conv2d(32, 32, 3, 2), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 1000)),
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(images: Tensor, labels: Tensor) -> None:
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return timelines_of(step, path, 32, transforms.train(224), torch.device("cpu"))


def timelines_of(
    step: Callable[[Tensor, Tensor], None],
    path: Path,
    batch: int,
    transform: transforms.Compose,
    device: torch.device,
) -> dict[str, list[Bar]]:
    """Return a timeline for each way of feeding, by its name."""
    kind: dict[str, Any] = {"num_threads": 1} if device.type == "cpu" else {"feed": "dma"}
    loader = memload.Loader(
        path, batch, shuffle=True, drop_last=True, transform=transform, device=device, **kind
    )
    if device.type == "cuda":
        settle(loader, 2.0)
    ways = {
        "torch's DataLoader without workers": in_data_loader(path, batch, transform, device),
        "memload's Loader": itertools.chain.from_iterable(itertools.repeat(loader)),
    }
    found = {}
    for name, batches in ways.items():
        with contextlib.closing(endless(batches)) as fed:
            found[name] = timeline(fed, step)
    return found


def endless(batches: Iterable[Any]) -> Generator[Any, None, None]:
    """Yield the batches; what it iterates ends when it is closed."""
    yield from batches


def in_data_loader(
    path: Path, batch: int, transform: transforms.Compose, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of a DataLoader over the same file, copied and transformed in the loop."""
    batches = DataLoader(
        memload.MemmapDataset(path),
        batch,
        shuffle=True,
        drop_last=True,
        collate_fn=memload.fast_collate,
        pin_memory=device.type == "cuda",
    )
    while True:
        for images, labels in batches:  # torch names the range in which it makes one
            with record_function("copy"):
                moved = images.to(device), labels.to(device)
            with record_function("transform"):
                transformed = transform(moved[0])
            yield transformed, moved[1]


def timeline(
    batches: Iterator[tuple[Tensor, Tensor]], step: Callable[[Tensor, Tensor], None]
) -> list[Bar]:
    """Train for some steps, and return the timeline of the last of them."""
    for images, labels in itertools.islice(batches, WARM_UP):
        step(images, labels)
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    with profile(experimental_config=everywhere) as profiled:
        for images, labels in itertools.islice(batches, PROFILED):
            with record_function("train"):
                step(images, labels)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix="memload-benchmark-") as folder:
        trace = Path(folder, "trace.json")
        profiled.export_chrome_trace(str(trace))
        return bars(json.loads(trace.read_text())["traceEvents"])


def bars(events: list[dict[str, Any]]) -> list[Bar]:
    """Return what a trace has of memload's and this script's ranges, and what the GPU did."""
    ranges = [event for event in events if event.get("cat") == "user_annotation"]
    loop = next(event["tid"] for event in ranges if event["name"] == "train")
    found = []
    for event in ranges:
        if what := kind_of(event["name"]):
            row = "the loop" if event["tid"] == loop else "a thread"
            found.append(bar(row, what, event))
    of_gpu = [event for event in events if event.get("cat") == "gpu_user_annotation"]
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy"):
            around = (kind_of(other["name"]) for other in of_gpu if contains(other, event))
            inner = {what for what in around if what in ("copy", "transform")}
            is_copy = "copy" in inner or event["name"].startswith("Memcpy HtoD")
            what = "copy" if is_copy else "transform" if inner else "train"
            found.append(bar(f"GPU, stream {event['tid']}", what, event))
    return found


def kind_of(name: str) -> str | None:
    """Return what a range of this name is called in the picture; None if it is not there."""
    if name.startswith("enumerate(DataLoader)"):
        return "read"
    if name == "memload: fetch":
        return "read"
    name = name.removeprefix("memload: ")
    return name if name in COLORS else None


def bar(row: str, what: str, event: dict[str, Any]) -> Bar:
    """Return the bar of an event, whose times are in microseconds."""
    return Bar(row, what, event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)


def contains(outer: dict[str, Any], inner: dict[str, Any]) -> bool:
    """Return whether an event lies within another one of the same stream."""
    begins = outer["ts"] <= inner["ts"] <= outer["ts"] + outer["dur"]
    return bool(outer["tid"] == inner["tid"] and begins)


def draw(timelines: dict[str, list[Bar]], machine: str, output: Path) -> None:
    """Draw the timelines, one below the other, at one scale."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    first, *_ = timelines.values()
    shown = steps(first)[BEFORE + SHOWN].start - steps(first)[BEFORE].start
    rows = [sorted({one.row for one in found}, key=order_of) for found in timelines.values()]
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "memload"}):
        figure = Figure(figsize=(9.6, 1.2 + 0.45 * sum(map(len, rows))), layout="constrained")
        panels = figure.subplots(
            len(timelines), sharex=True, squeeze=False, height_ratios=list(map(len, rows))
        )[:, 0]
        for axes, names, (title, found) in zip(panels, rows, timelines.items(), strict=True):
            begin = steps(found)[BEFORE].start
            visible = [one for one in found if one.end > begin and one.start < begin + shown]
            for one in joined(visible, gap=shown / 2000):
                span = (1000 * (one.start - begin), 1000 * (one.end - one.start))
                place = (names.index(one.row) - 0.4, 0.8)
                color = COLORS[one.what]
                axes.broken_barh([span], place, facecolor=color, edgecolor="white", linewidth=0.5)
            axes.set_title(title, fontsize="medium", loc="left")
            axes.set_yticks(range(len(names)), names)
            axes.set(xlim=(0, 1000 * shown), ylim=(len(names) - 0.5, -0.5), frame_on=False)
            axes.tick_params(axis="y", length=0)
        panels[-1].set_xlabel(f"milliseconds ({machine})")
        patches = [Patch(color=color, label=what) for what, color in COLORS.items()]
        figure.legend(handles=patches, loc="outside upper right", ncols=len(COLORS), frameon=False)
        figure.savefig(output, metadata={"Date": None} if output.suffix == ".svg" else None)


def joined(found: list[Bar], gap: float) -> list[Bar]:
    """Return the bars, those of a kind on the GPU as one that follow within ``gap`` seconds."""
    last: dict[tuple[str, str], Bar] = {}
    done = []
    for one in sorted(found, key=lambda one: one.start):
        key = one.row, one.what
        before = last.get(key)
        if before and one.row.startswith("GPU") and one.start - before.end < gap:
            one = Bar(*key, before.start, max(before.end, one.end))
        elif before:
            done.append(before)
        last[key] = one
    return [*done, *last.values()]


def order_of(row: str) -> tuple[bool, bool, str]:
    """Return what sorts rows: the loop, then threads, then the GPU."""
    return row.startswith("GPU"), row != "the loop", row


def steps(found: list[Bar]) -> list[Bar]:
    """Return the steps of the loop, in their order."""
    trained = [one for one in found if (one.row, one.what) == ("the loop", "train")]
    return sorted(trained, key=lambda one: one.start)


if __name__ == "__main__":
    main()
