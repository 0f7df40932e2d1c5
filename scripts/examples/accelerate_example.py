"""Train with Accelerate, on one process or several, and evaluate on another file:

python accelerate_example.py TRAIN.bin VAL.bin --epochs 3 --checkpoint checkpoint/
accelerate launch --num_processes 2 accelerate_example.py TRAIN.bin VAL.bin --epochs 3 --checkpoint checkpoint/

It trains on GPUs, with one process for each, or on the CPU if there are none: then launch it with --cpu. `prepare`
returns the Loader unchanged. The Loader finds its rank itself, and its batches are on the device that it was given. The
classes of VAL.bin must have the numbers that they have in TRAIN.bin: build it with `--classes TRAIN.bin`.
"""

import argparse
import gc
from pathlib import Path

import torch
import torch.distributed.nn.functional  # early: its default arguments would keep a later process group
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional

from memload import Loader, transforms

#: This transforms whole batches on their device. `Normalize()` uses the statistics of the data set.
TRAIN = transforms.Compose([transforms.RandomHorizontalFlip(), transforms.Normalize()])


def train(options: argparse.Namespace, accelerator: Accelerator) -> None:
    """Train, from the checkpoint if there is one, and evaluate."""
    kind = {"columns": ["label"], "device": accelerator.device}
    batches = Loader(options.train, options.batch_size, shuffle=True, transform=TRAIN, **kind)
    torch.manual_seed(0)
    net = make_net(batches.dataset.num_classes)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    model, optimizer, batches = accelerator.prepare(net, optimizer, batches)
    accelerator.register_for_checkpointing(batches)  # saves its state with all other states
    if options.checkpoint and options.checkpoint.exists():
        # without skip_first_batches, which would create a DataLoader
        accelerator.load_state(options.checkpoint)

    steps = 0
    while batches.state_dict()["epoch"] < options.epochs and steps != options.stop_after:
        for images, labels in batches:
            loss = functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            steps += 1
            if steps == options.stop_after:
                break
        accelerator.print(f"epoch {batches.stats.epoch}: {batches.stats}")  # has it waited?
        if options.checkpoint:
            accelerator.save_state(options.checkpoint)

    statistics = transforms.Normalize(options.train)  # those of the training data
    test = Loader(options.validation, options.batch_size, transform=statistics, **kind)
    totals = evaluate(accelerator.unwrap_model(model), test)
    loss, right, count = accelerator.reduce(totals).tolist()
    accelerator.print(f"loss {loss / count:.4f}, accuracy {right / count:.4f}, {count:.0f} samples")


def make_net(classes: int) -> nn.Sequential:
    """Return a small network."""
    layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(32, classes))


@torch.no_grad()
def evaluate(net: nn.Module, test: Loader) -> Tensor:
    """Return the sum of losses, how many samples are right, and how many there are, of this rank.

    Each sample comes once over all ranks, so one rank may have a batch more. Reduce after the loop:
    gather_for_metrics in each batch would wait forever.
    """
    totals = torch.zeros(3, dtype=torch.float64, device=test.device)
    for images, labels in test:
        output = net(images)
        totals[0] += functional.cross_entropy(output, labels, reduction="sum")
        totals[1] += (output.argmax(1) == labels).sum()
        totals[2] += len(labels)
    return totals


def main() -> None:
    """Train, and end the process group."""
    parser = argparse.ArgumentParser(description="Train with Accelerate.")
    parser.add_argument("train", help="the data set to train on")
    parser.add_argument("validation", help="the data set to evaluate on")
    parser.add_argument("--epochs", type=int, default=1, help="default 1")
    parser.add_argument("--batch-size", type=int, default=8, help="of each process, default 8")
    parser.add_argument("--checkpoint", type=Path, help="a folder, written after every epoch")
    parser.add_argument("--stop-after", type=int, help="steps, as if the job's time were up then")
    options = parser.parse_args()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    train(options, accelerator)
    # Threads of gloo that still run at exit may abort or hang (torch 2.13, with any loader). The process
    # group waits for them once nothing refers to it, as the model did.
    accelerator.free_memory()
    gc.collect()
    accelerator.end_training()


if __name__ == "__main__":
    main()
