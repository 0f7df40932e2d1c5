"""Train in a plain loop, on one process or several:

python plain.py DATA.bin --epochs 3 --checkpoint plain.pt
torchrun --nproc-per-node 2 plain.py DATA.bin --epochs 3 --checkpoint plain.pt

It trains on GPUs, with one process for each, or on the CPU if there are none. If the checkpoint exists, training
continues at the exact sample, even with another number of processes.
"""

import argparse
import gc
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # early: its default arguments would keep a later process group
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

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
    if dist.is_torchelastic_launched():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")

    dataset = MemmapDataset(args.data, columns=["label"])
    validation = dataset
    if args.validation:
        validation = MemmapDataset(args.validation, columns=["label"])
    evaluate = transforms.Normalize(dataset)  # the statistics of the training data
    train = Loader(dataset, args.batch_size, shuffle=True, transform=TRAIN)
    device = train.device  # the current GPU, or the CPU if there is none
    torch.manual_seed(0)
    classes = dataset.num_classes
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, classes)
    )
    net.to(device)
    model = DistributedDataParallel(net) if dist.is_initialized() else net
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    if args.checkpoint and args.checkpoint.exists():
        state = torch.load(args.checkpoint, map_location="cpu")
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        train.load_state_dict(
            state["train"]
        )  # the same on every rank, because it counts the samples of all ranks

    steps = 0
    while (epoch := train.state_dict()["epoch"]) < args.epochs and steps != args.stop_after:
        train.set_epoch(epoch)  # not needed, because epochs advance by themselves, but harmless
        for images, labels in train:
            loss = functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
            if steps == args.stop_after:
                break
        if args.checkpoint and train.rank == 0:
            state = {
                "net": net.state_dict(),
                "optimizer": optimizer.state_dict(),
                "train": train.state_dict(),
            }
            written = args.checkpoint.with_suffix(".tmp")
            torch.save(state, written)
            written.replace(args.checkpoint)  # atomic: nobody ever reads half a checkpoint

    # Each sample comes once over all ranks, so one rank may have a batch more. Communicate only after the loop,
    # and call the net itself: the forward of DistributedDataParallel may communicate, too.
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    with torch.no_grad():
        for images, labels in Loader(
            validation, args.batch_size, device=device, transform=evaluate
        ):
            output = net(images)
            totals[0] += functional.cross_entropy(output, labels, reduction="sum")
            totals[1] += (output.argmax(1) == labels).sum()
            totals[2] += len(labels)
    if dist.is_initialized():
        dist.all_reduce(totals)
        # Threads of gloo that still run at exit may abort or hang (torch 2.13, with any loader). The
        # process group waits for them once nothing refers to it, as the model does.
        del model
        gc.collect()
        dist.destroy_process_group()
    loss, right, count = totals.tolist()
    if train.rank == 0:
        print(f"loss {loss / count:.4f}, accuracy {right / count:.4f}, {count:.0f} samples")


if __name__ == "__main__":
    main()
