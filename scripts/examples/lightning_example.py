"""Train with Lightning, on one process or several:

python lightning_example.py DATA.bin --epochs 3 --devices 2 --checkpoint checkpoints/last.ckpt

It trains on GPUs, or on the CPU if there are none. Lightning uses the Loader unchanged, and the Loader finds its rank
itself. Lightning saves the Loader's state in its checkpoints, so training continues at the exact sample. Neither
`use_distributed_sampler` nor `set_epoch` is needed. With `overfit_batches`, leave out `shuffle=True`: Lightning cannot
replace the order of a Loader.
"""
# ruff: noqa: D101, D102 - Lightning prescribes these names

import argparse
from pathlib import Path

import lightning
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # early: its default arguments would keep a later process group
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional

from memload import Loader, MemmapDataset, transforms

#: This transforms whole batches on their device. `Normalize()` uses the statistics of the data set.
TRAIN = transforms.Compose([transforms.RandomHorizontalFlip(), transforms.Normalize()])


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
    ) -> None:  # reduced only here, because one rank may have a batch more
        self.totals = self.trainer.strategy.reduce(self.totals, reduce_op="sum")


def main() -> None:
    """Train, from the checkpoint if there is one, and evaluate."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("--validation", help="a data set to evaluate on; default: DATA.bin itself")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument(
        "--stop-after", type=int, default=-1, help="steps of all, as if the job's time were up then"
    )
    args = parser.parse_args()

    lightning.seed_everything(0, verbose=False)
    dataset = MemmapDataset(args.data, columns=["label"])
    validation = dataset
    if args.validation:
        validation = MemmapDataset(args.validation, columns=["label"])
    evaluate = transforms.Normalize(dataset)  # the statistics of the training data
    train = Loader(dataset, args.batch_size, shuffle=True, transform=TRAIN)
    test = Loader(validation, args.batch_size, transform=evaluate)
    model = Classifier(dataset.num_classes)
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
        else "cpu",  # the device of the Loader's batches
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

    # Lightning keeps gloo's process group until exit, where one of its threads may abort ("terminate called
    # without an active exception", torch 2.13, with any loader). Destroying it waits for its threads.
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
