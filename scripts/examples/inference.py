"""Let a trained network predict the classes of a whole data set, and write them to a table with the keys of the samples:

python plain.py TRAIN.bin VAL.bin --epochs 3 --checkpoint plain.pt
python inference.py NEW.bin predictions.csv --train TRAIN.bin --checkpoint plain.pt

On a GPU, the compiled network is captured as a CUDA graph. With `static_buffers`, every batch lies in the same tensors, so
that the graph finds it. The CPU takes the same way, without a graph; `--no-compile` saves it the time of compiling. For
your own network, change `load_network`.
"""

import argparse
import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from plain import make_net
from torch import Tensor, nn

from memload import Loader, MemmapDataset, transforms


@torch.inference_mode()
def predict(network: nn.Module, batches: Loader, is_compiled: bool) -> tuple[Tensor, Tensor]:
    """Return a probability and the number of a class for each sample, float32 and int64 (n,)."""
    model = torch.compile(network) if is_compiled else network
    run, found = None, []
    for (images,) in batches:
        run = run or predictor(model, images)
        found.append(run().float().softmax(1).max(1))  # new tensors: those of a graph are reused
    # Only here the host waits for the GPU.
    probability, label = (torch.cat(parts).cpu() for parts in zip(*found, strict=True))
    return probability, label


def predictor(model: Callable[[Tensor], Tensor], images: Tensor) -> Callable[[], Tensor]:
    """Return a function that runs the model on whatever is in ``images``, on CUDA as a graph."""
    if not images.is_cuda:
        return lambda: model(images)
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # before a capture, all must have been compiled and allocated
        for _ in range(3):
            model(images)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    # The threads of the Loader use CUDA meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        scores = model(images)

    def replay() -> Tensor:
        graph.replay()
        return scores

    return replay


def load_network(checkpoint: Path, classes: int) -> nn.Module:
    """Return the network that plain.py has trained."""
    network = make_net(classes)
    network.load_state_dict(torch.load(checkpoint, map_location="cpu")["net"])
    return network.eval()


def all_in_full_batches(count: int, batch_size: int) -> np.ndarray:
    """Return every sample, and the last one again until the last batch is full."""
    return np.minimum(np.arange(-(-count // batch_size) * batch_size), count - 1)


def main() -> None:
    """Predict, and write the table."""
    parser = argparse.ArgumentParser(description="Predict the classes of a data set.")
    parser.add_argument("data", help="the data set")
    parser.add_argument("output", type=Path, help="a CSV with key, class and probability")
    parser.add_argument("--train", required=True, help="the data set that was trained on")
    parser.add_argument("--checkpoint", type=Path, required=True, help="what plain.py has written")
    parser.add_argument("--batch-size", type=int, default=256, help="default 256")
    parser.add_argument("--no-compile", action="store_true", help="do without torch.compile")
    options = parser.parse_args()

    data, trained = MemmapDataset(options.data), MemmapDataset(options.train)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    network = load_network(options.checkpoint, trained.num_classes)
    network.to(device, dtype, memory_format=torch.channels_last)
    normalise = [transforms.Normalize(options.train), transforms.ToDtype(dtype)]
    batches = Loader(
        data,
        options.batch_size,
        sampler=all_in_full_batches(len(data), options.batch_size),
        drop_last=True,  # no batch is smaller
        columns=[],
        device=device,
        transform=transforms.Compose(normalise),
        static_buffers=True,
    )
    probability, label = predict(network, batches, not options.no_compile)
    print(batches.stats)
    names = trained.classes or range(trained.num_classes)
    with options.output.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["key", "class", "probability"])
        found = probability[: len(data)].tolist(), label[: len(data)].tolist()
        for key, share, number in zip(data.keys, *found, strict=True):
            table.writerow([key, names[number], f"{share:.4f}"])
    print(f"{options.output}: {len(data):,} predictions")


if __name__ == "__main__":
    main()
