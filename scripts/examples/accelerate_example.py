"""Train with Accelerate, on one process or several:

python accelerate_example.py DATA.bin --epochs 3 --checkpoint checkpoint/
accelerate launch --num_processes 2 accelerate_example.py DATA.bin --epochs 3 --checkpoint checkpoint/

It trains on GPUs, with one process for each, or on the CPU if there are none: then launch it with --cpu. `prepare`
returns the Loader unchanged. The Loader finds its rank itself, and its batches are on the device that it was given.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed.nn.functional  # early: its default arguments would keep a later process group
from accelerate import Accelerator
from torch import nn
from torch.nn import functional

from memload import Loader, MemmapDataset, transforms

#: This transforms whole batches on their device. `Normalize()` uses the statistics of the data set.
TRAIN = transforms.Compose([transforms.RandomHorizontalFlip(), transforms.Normalize()])


def main() -> None:
    """Train, from the checkpoint if there is one, and evaluate."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("--validation", help="a data set to evaluate on; default: DATA.bin itself")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--stop-after", type=int, help="steps, as if the job's time were up then")
    args = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    dataset = MemmapDataset(args.data, columns=["label"])
    validation = dataset
    if args.validation:
        validation = MemmapDataset(args.validation, columns=["label"])
    evaluate = transforms.Normalize(dataset)  # the statistics of the training data
    train = Loader(
        dataset, args.batch_size, shuffle=True, device=accelerator.device, transform=TRAIN
    )
    torch.manual_seed(0)
    classes = dataset.num_classes
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, classes)
    )
    model, optimizer, train = accelerator.prepare(
        net, torch.optim.Adam(net.parameters(), lr=1e-2), train
    )
    accelerator.register_for_checkpointing(train)  # includes its state in save_state and load_state
    if args.checkpoint and args.checkpoint.exists():
        accelerator.load_state(
            args.checkpoint
        )  # without skip_first_batches, which would create a DataLoader

    steps = 0
    while train.state_dict()["epoch"] < args.epochs and steps != args.stop_after:
        for images, labels in train:
            loss = functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            steps += 1
            if steps == args.stop_after:
                break
        if args.checkpoint:
            accelerator.save_state(args.checkpoint)

    # Each sample comes once over all ranks, so one rank may have a batch more. Reduce after the loop:
    # gather_for_metrics in each batch would wait forever.
    totals = torch.zeros(3, dtype=torch.float64, device=accelerator.device)
    net = accelerator.unwrap_model(model)
    with torch.no_grad():
        for images, labels in Loader(
            validation, args.batch_size, device=accelerator.device, transform=evaluate
        ):
            output = net(images)
            totals[0] += functional.cross_entropy(output, labels, reduction="sum")
            totals[1] += (output.argmax(1) == labels).sum()
            totals[2] += len(labels)
    loss, right, count = accelerator.reduce(totals).tolist()
    accelerator.print(f"loss {loss / count:.4f}, accuracy {right / count:.4f}, {count:.0f} samples")

    # Threads of gloo that still run at exit may abort or hang (torch 2.13, with any loader). The process
    # group waits for them once nothing refers to it, as the model does.
    model, optimizer = accelerator.free_memory(model, optimizer)
    accelerator.end_training()


if __name__ == "__main__":
    main()
