"""Draw timelines of the same training, with a DataLoader without workers and with a Loader.

    python -m benchmarks.timeline --output docs/timeline.svg

Both are of one run under torch.profiler, and at one scale. The steps, the file and the transform are
the same; only what feeds the steps differs. On a GPU it is ResNet-50 with batches of 256 and the feed
`dma`, and the rows of the GPU's streams are below those of the threads. On a CPU it is one convolution
with batches of 32, on one thread; the Loader has one more. The profiler slows both down: see what
overlaps, and measure with training.py.
"""

import argparse
import itertools
import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import profile, record_function
from torch.utils.data import DataLoader

import memload
from benchmarks.data import noise_dataset
from benchmarks.harness import settle
from benchmarks.training import Training, make_model, now
from memload import transforms

WARM_UP, PROFILED = 10, 25
#: Steps of the DataLoader that the picture shows, and profiled steps before these.
SHOWN, BEFORE = 4, 10
COLORS = {"read": "#d9822b", "copy": "#8a63d2", "transform": "#3a9d5d", "train": "#2f6fde"}
IS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if IS_CUDA else torch.device("cpu")

Batches = Iterator[tuple[Tensor, Tensor]]


class Bar(NamedTuple):
    """Something that took from ``start`` to ``end``, in seconds, and where: a row of the picture."""

    row: str
    what: str
    start: float
    end: float


def in_data_loader(path: Path, batch: int, transform: transforms.Compose) -> Batches:
    """Yield batches of a DataLoader over the same file, copied and transformed in the loop."""
    dataset, options = memload.MemmapDataset(path), {"shuffle": True, "drop_last": True}
    batches = DataLoader(
        dataset, batch, collate_fn=memload.fast_collate, pin_memory=IS_CUDA, **options
    )
    while True:
        for images, labels in batches:  # torch names the range in which it makes one
            with record_function("copy"):
                moved = images.to(DEVICE), labels.to(DEVICE)
            with record_function("transform"):
                transformed = transform(moved[0])
            yield transformed, moved[1]


def in_loader(path: Path, batch: int, transform: transforms.Compose) -> Batches:
    """Yield batches of a Loader."""
    kind: dict[str, Any] = {"feed": "dma"} if IS_CUDA else {"num_threads": 1}
    options = {"shuffle": True, "drop_last": True, "transform": transform, "device": DEVICE}
    loader = memload.Loader(path, batch, **options, **kind)
    if IS_CUDA:
        settle(loader)
    while True:
        yield from loader


def timeline(batches: Batches, training: Training) -> list[Bar]:
    """Train for some steps, and return the timeline of the last of them."""
    for images, labels in itertools.islice(batches, WARM_UP):
        training.step(images, labels)
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    with profile(experimental_config=everywhere) as profiled:
        for images, labels in itertools.islice(batches, PROFILED):
            with record_function("train"):
                training.step(images, labels)
        now(DEVICE)
    with tempfile.TemporaryDirectory(prefix="memload-benchmark-") as folder:
        trace = Path(folder, "trace.json")
        profiled.export_chrome_trace(str(trace))
        return joined(bars(json.loads(trace.read_text())["traceEvents"]))


def bars(events: list[dict[str, Any]]) -> Iterator[Bar]:
    """Yield what a trace has of memload's and this script's ranges, and what the GPU did."""

    def bar(row: str, what: str, event: dict[str, Any]) -> Bar:
        return Bar(row, what, event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)

    ranges = [event for event in events if event.get("cat") == "user_annotation"]
    loop = next(event["tid"] for event in ranges if event["name"] == "train")
    for event in ranges:
        if what := kind_of(event["name"]):
            yield bar("the loop" if event["tid"] == loop else "a thread", what, event)
    of_gpu = [event for event in events if event.get("cat") == "gpu_user_annotation"]
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy"):
            inner = {
                kind_of(outer["name"])
                for outer in of_gpu
                if outer["tid"] == event["tid"]
                and outer["ts"] <= event["ts"] <= outer["ts"] + outer["dur"]
            }
            is_copy = "copy" in inner or event["name"].startswith("Memcpy HtoD")
            what = "copy" if is_copy else "transform" if "transform" in inner else "train"
            yield bar(f"GPU, stream {event['tid']}", what, event)


def kind_of(name: str) -> str | None:
    """Return what a range of this name is called in the picture; None if it is not there."""
    if name == "memload: fetch" or name.startswith("enumerate(DataLoader)"):
        return "read"
    name = name.removeprefix("memload: ")
    return name if name in COLORS else None


def joined(found: Iterable[Bar]) -> list[Bar]:
    """Return the bars, those of a kind on the GPU as one that follow within 50 microseconds."""
    done: list[Bar] = []
    last: dict[tuple[str, str], int] = {}  # where the last bar of a row and kind is
    for bar in sorted(found, key=lambda bar: bar.start):
        place = last.get(bar[:2])
        if place is not None and bar.row[:3] == "GPU" and bar.start - done[place].end < 5e-5:
            done[place] = done[place]._replace(end=max(done[place].end, bar.end))
        else:
            last[bar[:2]] = len(done)
            done.append(bar)
    return done


def steps(found: list[Bar]) -> list[float]:
    """Return when the steps of the loop began."""
    return [bar.start for bar in found if bar[:2] == ("the loop", "train")]


def picture(timelines: dict[str, list[Bar]]) -> str:
    """Return the timelines as SVG, one below the other, at one scale."""
    first, *_ = timelines.values()
    shown = steps(first)[BEFORE + SHOWN] - steps(first)[BEFORE]
    parts, top = [], 30
    for place, (what, color) in enumerate(COLORS.items()):
        parts.append(f'<rect x="{500 + 100 * place}" y="8" width="12" height="12" fill="{color}"/>')
        parts.append(f'<text x="{518 + 100 * place}" y="19">{what}</text>')
    for title, found in timelines.items():
        parts.append(f'<text x="8" y="{top + 14}" font-weight="bold">{title}</text>')
        begin, others = steps(found)[BEFORE], {bar.row for bar in found} - {"the loop"}
        rows = ["the loop", *sorted(others, key=lambda row: (row[:3] == "GPU", row))]
        tops = {row: top + 24 + 26 * number for number, row in enumerate(rows)}
        for row in rows:
            parts.append(f'<text x="112" y="{tops[row] + 16}" text-anchor="end">{row}</text>')
        for bar in found:
            left, right = (780 * (moment - begin) / shown for moment in (bar.start, bar.end))
            left, right = max(0.0, left), min(780.0, right)
            if right > left:
                place = f'x="{120 + left:.1f}" y="{tops[bar.row]}"'
                size = f'width="{right - left:.1f}" height="22"'
                parts.append(f'<rect {place} {size} fill="{COLORS[bar.what]}"/>')
        top += 36 + 26 * len(rows)
    end = f"{1000 * shown:.0f} milliseconds ({'GPU' if IS_CUDA else 'CPU'})"
    parts.append(f'<text x="900" y="{top + 8}" text-anchor="end">0 to {end}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 910 {top + 16}" font-family="sans-serif" font-size="13">'
    back = f'<rect width="910" height="{top + 16}" fill="white"/>'
    return "\n".join([head, back, *parts, "</svg>\n"])


def main() -> None:
    """Measure, and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("timeline.svg"))
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    if not IS_CUDA:
        torch.set_num_threads(1)
    batch, model, images = (256, "resnet50", 20_000) if IS_CUDA else (32, "stem", 1500)
    training = Training(make_model(model), DEVICE)
    crop = transforms.train(224, dtype=torch.bfloat16 if IS_CUDA else torch.float32)
    with tempfile.TemporaryDirectory(prefix="memload-benchmark-") as folder:
        path = noise_dataset(Path(folder), images, 256)
        ways = {
            "torch's DataLoader without workers": in_data_loader(path, batch, crop),
            "memload's Loader": in_loader(path, batch, crop),
        }
        found = {}
        for name, batches in ways.items():
            found[name] = timeline(batches, training)
            batches.close()
        options.output.write_text(picture(found))


if __name__ == "__main__":
    main()
