"""How fast a whole data set goes through a trained network, compiled and not, from pixels and from JPEGs.

ResNet-50 in bfloat16, channels-last, without gradients; batches of 256, 224×224, in order, pages
warm. Each way is measured with three networks: eager, compiled by torch, and compiled and captured
as a CUDA graph. The graph reads static buffers, so its DataLoader copies each batch into them, as a
Loader with `static_buffers` does.

- synthetic: the same normalised batch, again and again, that stays on the device: the limit.
- `Loader`, with the feed `dma`, which normalises on the device.
- JPEGs, decoded, resized and cropped by Pillow in a DataLoader of as many workers as cores, and
  normalised on the device; those below `--jpegs`, or 64 made ones of ImageNet's sizes, again and
  again.

Turns, warming up and cores are as in train_step.py. `--toy` shows on a CPU that all of it runs: few
small pictures, and one convolution. There, captured is the same as compiled.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
from data import noise_dataset
from harness import move, need_cuda, run_benchmark, settle
from pictures import Numbered, find_jpegs, planes
from torch import Tensor, nn
from train_step import (
    MODELS,
    NORMALISE,
    WORKERS,
    Begin,
    Feeding,
    Training,
    in_data_loader,
    make_model,
)

import memload

KINDS = ("eager", "compiled", "captured")


class Inference(Training):
    """A network that predicts, in place of one that trains."""

    def __init__(self, network: nn.Module, kind: str, device: torch.device, shape: Any) -> None:
        self.device, self.shape, self.kind = device, shape, kind
        network = network.to(device, torch.bfloat16, memory_format=torch.channels_last).eval()
        self.network = network if kind == "eager" else torch.compile(network)
        #: of the captured graph: what it reads, and what runs it
        self.images: Tensor | None = None
        self.run: Callable[[], Tensor] | None = None
        self.labels: Tensor | None = None

    @torch.inference_mode()
    def step(self, images: Tensor, labels: Tensor) -> None:
        """Predict the labels of a batch; the host does not wait for them."""
        if self.kind != "captured" or self.device.type == "cpu":
            self.labels = self.network(images).argmax(1)
            return
        if self.run is None or self.images is None:
            self.images = images  # of a Loader, its static buffer
            self.run = captured(partial(self.network, self.images))
        if images.data_ptr() != self.images.data_ptr():
            self.images.copy_(images)
        self.labels = self.run().argmax(1)


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


def ways(options: Any, folder: Path) -> dict[str, harness.Way]:
    """Return a turn of each way of feeding, with each network."""
    toy = options.toy
    if toy:
        torch.set_num_threads(1)  # the others would be taken for feeding
        options.model, options.images, options.seconds = "stem", min(400, options.images), 0.05
    else:
        need_cuda("--toy shows on a CPU that all of it runs.")
    torch.backends.cudnn.benchmark = True
    batch, side = (16, 64) if toy else (256, 224)
    device = torch.device("cpu") if toy else torch.device("cuda", torch.cuda.current_device())
    shape = (batch, 3, side, side)
    path = noise_dataset(folder, options.images, side)
    jpegs = find_jpegs(options.jpegs, folder / "jpegs", 8 if toy else 64)
    network = make_model(options.model)
    options.model = MODELS[options.model]  # as the results name it

    found: dict[str, harness.Way] = {}
    for kind in KINDS:
        fed = {
            "synthetic": (synthetic(shape, device), 1),
            "Loader": (in_loader(path, batch, device, kind == "captured"), 1),
            "JPEGs": from_jpegs(jpegs, batch, side, device, options.workers),
        }
        for name, (begin, workers) in fed.items():
            predicting = Inference(network, kind, device, shape)
            found[f"{name}, {kind}"] = Feeding(predicting, begin, workers, options.seconds)
    return found


def synthetic(shape: tuple[int, ...], device: torch.device) -> Begin:
    """Return the same batch, again and again."""
    images = torch.randn(shape, device=device, dtype=torch.bfloat16)
    made = images.to(memory_format=torch.channels_last), torch.zeros(shape[0], device=device)
    return lambda _: itertools.repeat(made)


def in_loader(path: Path, batch: int, device: torch.device, static_buffers: bool) -> Begin:
    """Return the batches of a Loader."""
    feed: Any = "cpu" if device.type == "cpu" else "dma"
    loader = memload.Loader(
        *(path, batch), device=device, feed=feed, transform=NORMALISE,
        drop_last=True, static_buffers=static_buffers,
    )  # fmt: skip
    if feed == "dma":
        settle(loader, 2.0)
    return lambda _: itertools.chain.from_iterable(itertools.repeat(loader))


def from_jpegs(
    jpegs: list[Path], batch: int, side: int, device: torch.device, workers: int
) -> tuple[Begin, int]:
    """Return the batches of a DataLoader that decodes, and its workers."""

    def in_loop(batches: Iterable[Any]) -> Iterator[Any]:
        for images, labels in move(batches, device):
            yield NORMALISE(images), labels

    return in_data_loader(
        Numbered(jpegs[:1000], partial(planes, side=side)), batch, workers, in_loop
    )


if __name__ == "__main__":
    fed = ("Loader", "JPEGs")
    run_benchmark(
        ways,
        options={
            "model": tuple(MODELS),
            "rounds": 5,
            "seconds": 0.6,
            "images": 20_000,
            "workers": WORKERS,
            "jpegs": None,
            "toy": False,
        },
        quick={"images": 10_000, "rounds": 4},
        ratios={
            f"{name}, {kind} › share of synthetic": (
                f"{name}, {kind} › images/s",
                f"synthetic, {kind} › images/s",
            )
            for name, kind in itertools.product(fed, KINDS)
        }
        | {
            "Loader, captured › times JPEGs, eager": (
                "Loader, captured › images/s",
                "JPEGs, eager › images/s",
            )
        },
        facts={"pages": "warm", "batch": 256},
    )
