"""What share of its speed with synthetic data a model reaches, for each way of feeding it.

    python -m benchmarks.training train_step --model resnet18
    python -m benchmarks.training inference

Batches of 256 images of 224×224, bfloat16, channels-last, pages warm. All ways normalise on the
device and end in bfloat16. Without a GPU, it shows that all of it runs: few small pictures, and one
convolution.

- train_step: SGD, not compiled, random order. Synthetic is the same step on one normalised batch that
  stays on the device, at the beginning of each round and at its end; a share is of the first. Beside
  the `Loader` with each feed are torch's DataLoader over `MemmapDataset` with `fast_collate` and
  page-locked memory, with as many workers as cores and without any, also in `CudaPrefetcher`;
  and one that decodes, resizes and crops JPEGs by Pillow: those below ``--jpegs``, or 64 made ones of
  ImageNet's sizes.
- inference: without gradients, in order, with a network that is eager, and one that is compiled and
  captured as a CUDA graph. The graph reads static buffers, which the Loader has, too.

In a round each way has a turn of as many steps as take ``--seconds``; with workers, it is at least
two batches of each. The first steps of a turn are not timed: a quarter of the others, or with
workers one batch of each, so that batches made before the clock starts do not count. When the clock
stops, workers have two more batches each to make, as within an epoch. Cores: CPU time of feeding over
the time of the timed steps. Feeding is what the training thread does to ask for a batch, all other
threads but autograd's, and workers.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import memload
from benchmarks.data import Numbered, find_jpegs, noise_dataset, planes
from benchmarks.harness import CORES, Benchmark, Way, cpu_seconds, move, run, settle
from memload import transforms

MODELS = {"resnet50": "ResNet-50", "resnet18": "ResNet-18", "stem": "stem"}
FEEDS = ("dma", "pinned", "resident")
KINDS = ("eager", "captured")
NORMALISE = transforms.Compose(
    [transforms.Normalize("imagenet"), transforms.ToDtype(torch.bfloat16)]
)
#: Begins a new iteration of at least so many batches.
Begin = Callable[[int], Iterator[Any]]


@dataclass(frozen=True)
class Setting:
    """What all ways have in common."""

    device: torch.device
    batch: int
    side: int
    feeds: tuple[str, ...]
    seconds: float  #: that a turn takes


# Models


def make_model(name: str) -> nn.Module:
    """Return a new model; all but the stem are torchvision's."""
    if name == "stem":
        pooled = (nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return nn.Sequential(nn.Conv2d(3, 16, 7, 8), *pooled, nn.Linear(16, 1000))
    from torchvision import models

    return getattr(models, name)()


class Training:
    """A model and its step."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.device = device
        self.model = model.to(device, memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01, momentum=0.9, fused=True)

    def step(self, images: Tensor, labels: Tensor) -> None:
        """Train on a batch."""
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()


class Predicting:
    """A network that predicts, eager, or compiled and captured."""

    def __init__(self, network: nn.Module, kind: str, device: torch.device) -> None:
        self.is_captured = kind == "captured" and device.type == "cuda"
        network = network.to(device, torch.bfloat16, memory_format=torch.channels_last).eval()
        self.network = network if kind == "eager" else torch.compile(network)
        #: Of the captured graph: what it reads, and what runs it.
        self.images: Tensor | None = None
        self.replay: Callable[[], Tensor] | None = None
        self.labels: Tensor | None = None

    @torch.inference_mode()
    def step(self, images: Tensor, labels: Tensor) -> None:
        """Predict the labels of a batch; the host does not wait for them."""
        if not self.is_captured:
            self.labels = self.network(images).argmax(1)
            return
        if self.replay is None or self.images is None:
            self.images = images  # of a Loader, its static buffer
            self.replay = captured(partial(self.network, self.images))
        if images.data_ptr() != self.images.data_ptr():
            self.images.copy_(images)
        self.labels = self.replay().argmax(1)


def captured(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return a function that replays a call as a CUDA graph."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        scores = function()

    def replay() -> Tensor:
        graph.replay()
        return scores

    return replay


# Turns


@dataclass
class Feeding:
    """A way of feeding steps."""

    setting: Setting
    step: Callable[[Tensor, Tensor], None]
    begin: Begin
    workers: int = 1  #: timed steps are a multiple of these, as their batches come together
    steps: int = 0  #: that are timed in each turn, once it is known how long one takes

    def __call__(self) -> dict[str, float]:
        """Take a turn; return images a second and the cores that feeding took."""
        if not self.steps:
            self._warm_up()
        rate, cores, _ = self._run(self.steps)
        return {"images/s": rate, "cores": cores}

    def _warm_up(self) -> None:
        steps, seconds = self.workers, 0.0
        while seconds < self.setting.seconds / 4:
            steps *= 2
            rate, _, seconds = self._run(steps)
        batches_each = round(self.setting.seconds * rate / self.setting.batch / self.workers)
        self.steps = self.workers * max(2, batches_each)

    def _run(self, steps: int) -> tuple[float, float, float]:
        """Train for some steps; return images a second, cores and seconds."""
        untimed, ahead = max(4, steps // 4), 0
        if self.workers > 1:
            untimed, ahead = self.workers, 2 * self.workers
        batches, device = self.begin(untimed + steps + ahead), self.setting.device
        for _ in range(untimed):
            self._step(batches)
        now(device)
        before = feeding_time()
        start = now(device)
        asking = sum(self._step(batches) for _ in range(steps))
        end = now(device)
        cores = (feeding_time() - before + asking) / (end - start)
        for _ in itertools.islice(batches, ahead + 1):
            pass  # the iteration of a DataLoader ends, and its workers are idle
        return steps * self.setting.batch / (end - start), cores, end - start

    def _step(self, batches: Iterator[Any]) -> float:
        """Step with the next batch; return the CPU seconds that asking for it took."""
        asked = time.thread_time()
        images, labels, *_ = next(batches)
        asking = time.thread_time() - asked
        self.step(images, labels)
        return asking


def now(device: torch.device) -> float:
    """Return the time when the device has done what it was asked for."""
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()
    return time.perf_counter()


def feeding_time() -> float:
    """Return CPU seconds so far of all threads but the caller and autograd's, and of workers."""
    total = cpu_seconds() - time.thread_time()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread has ended
            if (task / "comm").read_text().startswith("pt_autograd"):
                total -= int((task / "schedstat").read_text().split()[0]) / 1e9
    return total


# Ways of feeding


def synthetic(setting: Setting) -> Begin:
    """Return the same batch, again and again."""
    shape = setting.batch, 3, setting.side, setting.side
    images = torch.randn(shape, device=setting.device, dtype=torch.bfloat16)
    labels = torch.randint(0, 1000, shape[:1], device=setting.device)
    batch = images.to(memory_format=torch.channels_last), labels
    return lambda _: itertools.repeat(batch)


def in_loader(setting: Setting, path: Path, feed: Any, **options: Any) -> Begin:
    """Return the batches of a Loader, epoch after epoch."""
    options |= {"device": setting.device, "feed": feed, "transform": NORMALISE, "drop_last": True}
    loader = memload.Loader(path, setting.batch, **options)
    if feed == "dma":
        settle(loader, 2.0)
    return lambda _: itertools.chain.from_iterable(itertools.repeat(loader))


def in_data_loader(
    setting: Setting, dataset: Any, workers: int, *, prefetched: bool = False
) -> tuple[Begin, int]:
    """Return the batches of torch's DataLoader, and its number of workers or 1.

    They are moved to the device and normalised in the loop, or in `memload.CudaPrefetcher`.
    """
    random = np.random.default_rng(0)
    chosen: list[int] = []  # exactly the samples of a turn, so that workers are idle in others'
    device = setting.device
    loader: DataLoader[Any] = DataLoader(
        dataset,
        setting.batch,
        sampler=chosen,
        num_workers=workers,
        persistent_workers=workers > 0,
        collate_fn=memload.fast_collate,
        pin_memory=device.type == "cuda",
    )

    def begin(batches: int) -> Iterator[Any]:
        chosen[:] = random.integers(0, len(dataset), batches * setting.batch).tolist()
        if prefetched:
            return iter(memload.CudaPrefetcher(loader, device=device, transform=NORMALISE))
        return ((NORMALISE(images), labels) for images, labels in move(loader, device))

    return begin, max(1, workers)


# Benchmarks


def prepare(options: Any, folder: Path) -> tuple[Setting, nn.Module, Path, Numbered]:
    """Return the setting, the model, a data set of noise, and JPEGs that are decoded."""
    torch.backends.cudnn.benchmark = True
    if torch.cuda.is_available():
        setting = Setting(
            torch.device("cuda", torch.cuda.current_device()), 256, 224, FEEDS, options.seconds
        )
    else:
        torch.set_num_threads(1)  # the others would be taken for feeding
        options.model, options.images, options.seconds = "stem", min(400, options.images), 0.05
        setting = Setting(torch.device("cpu"), 8, 32, ("cpu",), options.seconds)
    model = make_model(options.model)
    options.model = MODELS[options.model]  # as the results name it
    jpegs = find_jpegs(options.jpegs, folder / "jpegs", 64 if torch.cuda.is_available() else 8)
    decoded = Numbered(jpegs[:1000], partial(planes, side=setting.side))
    return setting, model, noise_dataset(folder, options.images, setting.side), decoded


def train_step(options: Any, folder: Path) -> dict[str, Way]:
    """Return a turn of each way of feeding."""
    setting, model, path, decoded = prepare(options, folder)
    training, mapped = Training(model, setting.device), memload.MemmapDataset(path)
    found: dict[str, tuple[Begin, int]] = {"synthetic": (synthetic(setting), 1)}
    for feed in setting.feeds:
        found[f"Loader, {feed}"] = in_loader(setting, path, feed, shuffle=True), 1
    found |= {
        "DataLoader": in_data_loader(setting, mapped, options.workers),
        "DataLoader, no workers": in_data_loader(setting, mapped, 0),
        "the same in CudaPrefetcher": in_data_loader(setting, mapped, 0, prefetched=True),
        "JPEGs in a DataLoader": in_data_loader(setting, decoded, options.workers),
        "synthetic, again": found["synthetic"],
    }
    return {name: Feeding(setting, training.step, *way) for name, way in found.items()}


def inference(options: Any, folder: Path) -> dict[str, Way]:
    """Return a turn of each way of feeding, with each network."""
    setting, model, path, decoded = prepare(options, folder)
    found: dict[str, Way] = {}
    for kind in KINDS:
        loader = in_loader(setting, path, setting.feeds[0], static_buffers=kind == "captured")
        fed = {
            "synthetic": (synthetic(setting), 1),
            "Loader": (loader, 1),
            "JPEGs": in_data_loader(setting, decoded, options.workers),
        }
        for name, way in fed.items():
            step = Predicting(model, kind, setting.device).step
            found[f"{name}, {kind}"] = Feeding(setting, step, *way)
    return found


def shares(limits: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Return the ratios of ways and of no loading."""
    return {
        f"{name} › share of synthetic": (f"{name} › images/s", f"{limit} › images/s")
        for name, limit in limits.items()
    }


FED = [f"Loader, {feed}" for feed in ("cpu", *FEEDS)]
FED += ["DataLoader", "DataLoader, no workers", "JPEGs in a DataLoader", "synthetic, again"]
FED += ["the same in CudaPrefetcher"]
SAME: dict[str, Any] = {
    "options": {
        "model": "resnet50",
        "rounds": 5,
        "seconds": 0.6,
        "images": 20_000,
        "workers": CORES,
        "jpegs": None,
    },
    "quick": {"images": 10_000, "rounds": 3},
    "facts": {"pages": "warm", "batch": 256},
}
PREDICTED = {
    f"{name}, {kind}": f"synthetic, {kind}" for name in ("Loader", "JPEGs") for kind in KINDS
}
BENCHMARKS = {
    "train_step": Benchmark(train_step, **SAME, ratios=shares(dict.fromkeys(FED, "synthetic"))),
    "inference": Benchmark(inference, **SAME, ratios=shares(PREDICTED)),
}

if __name__ == "__main__":
    run(BENCHMARKS)
