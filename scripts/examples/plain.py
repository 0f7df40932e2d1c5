"""Train in a plain loop, on one process or several, and evaluate on another file:

python plain.py TRAIN.bin VAL.bin --epochs 3 --checkpoint plain.pt
torchrun --nproc-per-node 2 plain.py TRAIN.bin VAL.bin --epochs 3 --checkpoint plain.pt

It trains on GPUs, with one process for each, or on the CPU if there are none. If the checkpoint exists, training
continues at the exact sample, even with another number of processes. The classes of VAL.bin must have the numbers that
they have in TRAIN.bin: build it with `--classes TRAIN.bin`.
"""

import argparse
import gc
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # early: its default arguments would keep a later process group
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from memload import Loader, transforms

#: This transforms whole batches on their device. `Normalize()` uses the statistics of the data set.
TRAIN = transforms.Compose([transforms.RandomHorizontalFlip(), transforms.Normalize()])


def train(options: argparse.Namespace) -> None:
    """Train, from the checkpoint if there is one, and evaluate."""
    batches = Loader(
        options.train, options.batch_size, columns=["label"], shuffle=True, transform=TRAIN
    )
    device = batches.device  # the current GPU, or the CPU if there is none
    torch.manual_seed(0)
    net = make_net(batches.dataset.num_classes).to(device)
    model = DistributedDataParallel(net) if dist.is_initialized() else net
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    parts = {"net": net, "optimizer": optimizer, "batches": batches}
    if options.checkpoint and options.checkpoint.exists():
        for name, state in torch.load(options.checkpoint, map_location="cpu").items():
            parts[name].load_state_dict(state)  # that of the Loader is the same on every rank

    steps = 0
    while batches.state_dict()["epoch"] < options.epochs and steps != options.stop_after:
        for images, labels in batches:
            loss = functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
            if steps == options.stop_after:
                break
        if batches.rank == 0:
            print(f"epoch {batches.stats.epoch}: {batches.stats}")  # has it waited for data?
            if options.checkpoint:
                save(options.checkpoint, {name: part.state_dict() for name, part in parts.items()})

    statistics = transforms.Normalize(options.train)  # those of the training data
    test = Loader(options.validation, options.batch_size, columns=["label"], transform=statistics)
    loss, right, count = evaluate(net, test).tolist()
    if test.rank == 0:
        print(f"loss {loss / count:.4f}, accuracy {right / count:.4f}, {count:.0f} samples")


def make_net(classes: int) -> nn.Sequential:
    """Return a small network."""
    layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(32, classes))


@torch.no_grad()
def evaluate(net: nn.Module, test: Loader) -> Tensor:
    """Return the sum of losses, how many samples are right, and how many there are, on all ranks.

    Each sample comes once over all ranks, so one rank may have a batch more. Communicate only after the loop, and
    give the net itself: the forward of DistributedDataParallel may communicate, too.
    """
    totals = torch.zeros(3, dtype=torch.float64, device=test.device)
    for images, labels in test:
        output = net(images)
        totals[0] += functional.cross_entropy(output, labels, reduction="sum")
        totals[1] += (output.argmax(1) == labels).sum()
        totals[2] += len(labels)
    if dist.is_initialized():
        dist.all_reduce(totals)
    return totals


def save(checkpoint: Path, state: dict[str, object]) -> None:
    """Write a checkpoint. Nobody ever reads half of one."""
    written = checkpoint.with_suffix(".tmp")
    torch.save(state, written)
    written.replace(checkpoint)


def main() -> None:
    """Train in the process group of torchrun, if it has started this process."""
    parser = argparse.ArgumentParser(description="Train in a plain loop.")
    parser.add_argument("train", help="the data set to train on")
    parser.add_argument("validation", help="the data set to evaluate on")
    parser.add_argument("--epochs", type=int, default=1, help="default 1")
    parser.add_argument("--batch-size", type=int, default=8, help="of each process, default 8")
    parser.add_argument("--checkpoint", type=Path, help="a file, written after every epoch")
    parser.add_argument("--stop-after", type=int, help="steps, as if the job's time were up then")
    options = parser.parse_args()
    if dist.is_torchelastic_launched():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train(options)
    if dist.is_initialized():
        # Threads of gloo that still run at exit may abort or hang (torch 2.13, with any loader). The process
        # group waits for them once nothing refers to it, as the model did.
        gc.collect()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
