"""Train with Lightning, on one process or several:

python lightning_example.py DATA.bin --epochs 3 --devices 2 --checkpoint checkpoints/last.ckpt

It trains on GPUs, and on the CPU where there are none. Lightning takes the Loader as it is, which finds its rank
itself, and keeps its state in its own checkpoints: from one that is there, training goes on at the very sample.
Neither `use_distributed_sampler` nor `set_epoch` is needed.
"""
# ruff: noqa: D101, D102 - the names are those that Lightning asks for

import argparse
from pathlib import Path

import lightning
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # its defaults would keep a process group that was there; see the end
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional

from memload import Loader, MemmapDataset, transforms

#: whole batches, on their device; `Normalize` takes the data set's own mean and standard deviation
TRAIN = transforms.Compose([transforms.RandomHorizontalFlip(), transforms.Normalize()])
EVALUATE = transforms.Normalize()


class Classifier(lightning.LightningModule):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(32, classes),
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(self.net(batch.images), batch.labels)

    def on_validation_epoch_start(self) -> None:
        self.totals = torch.zeros(3, dtype=torch.float64, device=self.device)

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        output = self.net(batch.images)
        self.totals[0] += functional.cross_entropy(output, batch.labels, reduction="sum")
        self.totals[1] += (output.argmax(1) == batch.labels).sum()
        self.totals[2] += len(batch.labels)

    def on_validation_epoch_end(
        self,
    ) -> None:  # reduced here: one rank may have had a batch more than another
        self.totals = self.trainer.strategy.reduce(self.totals, reduce_op="sum")


def main() -> None:
    """Train, go on where a checkpoint is, evaluate."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument(
        "--stop-after", type=int, default=-1, help="steps of all, as if the job's time were up then"
    )
    args = parser.parse_args()

    lightning.seed_everything(0, verbose=False)
    dataset = MemmapDataset(args.data)
    train = Loader(dataset, args.batch_size, shuffle=True, transform=TRAIN)
    test = Loader(dataset, args.batch_size, transform=EVALUATE)
    model = Classifier(len(dataset.classes))
    saving = args.checkpoint and ModelCheckpoint(
        args.checkpoint.parent,
        args.checkpoint.stem,
        every_n_train_steps=1,
        enable_version_counter=False,
    )
    trainer = lightning.Trainer(
        max_epochs=args.epochs,
        max_steps=args.stop_after,
        accelerator="cuda"
        if torch.cuda.is_available()
        else "cpu",  # where the Loader makes its batches
        devices=args.devices,
        strategy="ddp" if args.devices > 1 else "auto",
        callbacks=[saving] if saving else [],
        enable_checkpointing=bool(saving),
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(
        model, train, ckpt_path=args.checkpoint if saving and args.checkpoint.exists() else None
    )
    trainer.validate(model, test, verbose=False)
    loss, right, count = model.totals.tolist()
    if trainer.is_global_zero:
        print(f"loss {loss / count:.4f}, accuracy {right / count:.4f}, {count:.0f} samples")

    # Lightning leaves gloo's process group to the exit, where a thread of it that has a tensor to free now and then
    # aborts ("terminate called without an active exception", torch 2.13, with any loader). Its end awaits its threads.
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
