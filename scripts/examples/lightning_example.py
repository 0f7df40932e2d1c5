"""Train with Lightning, on one process or several, and evaluate on another file:

python lightning_example.py TRAIN.bin VAL.bin --epochs 3 --devices 2 --checkpoint checkpoints/last.ckpt

It trains on GPUs, or on the CPU if there are none. Lightning uses the Loader unchanged, and the Loader finds its rank
itself. Lightning saves the Loader's state in its checkpoints, so training continues at the exact sample. Neither
`use_distributed_sampler` nor `set_epoch` is needed. With `overfit_batches`, leave out `shuffle=True`: Lightning cannot
replace the order of a Loader. The classes of VAL.bin must have the numbers that they have in TRAIN.bin: build it with
`--classes TRAIN.bin`.
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

from memload import Loader, transforms

#: This transforms whole batches on their device. `Normalize()` uses the statistics of the data set.
TRAIN = transforms.Compose([transforms.RandomHorizontalFlip(), transforms.Normalize()])


class Classifier(lightning.LightningModule):
    def __init__(self, classes: int) -> None:
        super().__init__()
        layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.net = nn.Sequential(*layers, nn.Linear(32, classes))

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

    def on_validation_epoch_end(self) -> None:
        # Reduced only here, because one rank may have a batch more.
        self.totals = self.trainer.strategy.reduce(self.totals, reduce_op="sum")


def train(options: argparse.Namespace) -> None:
    """Train, from the checkpoint if there is one, and evaluate."""
    lightning.seed_everything(0, verbose=False)
    batches = Loader(
        options.train, options.batch_size, columns=["label"], shuffle=True, transform=TRAIN
    )
    statistics = transforms.Normalize(options.train)  # those of the training data
    test = Loader(options.validation, options.batch_size, columns=["label"], transform=statistics)
    model = Classifier(batches.dataset.num_classes)
    file = options.checkpoint
    trainer = lightning.Trainer(
        max_epochs=options.epochs,
        max_steps=options.stop_after,
        accelerator="cuda" if torch.cuda.is_available() else "cpu",  # where the batches are
        devices=options.devices,
        strategy="ddp" if options.devices > 1 else "auto",
        callbacks=[saving_every_step(file)] if file else [],
        enable_checkpointing=bool(file),
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(model, batches, ckpt_path=file if file and file.exists() else None)
    trainer.validate(model, test, verbose=False)
    loss, right, count = model.totals.tolist()
    if trainer.is_global_zero:
        print(batches.stats)  # of the last epoch: has it waited for data?
        print(f"loss {loss / count:.4f}, accuracy {right / count:.4f}, {count:.0f} samples")


def saving_every_step(file: Path) -> ModelCheckpoint:
    """Return what writes the same file after every step."""
    return ModelCheckpoint(
        file.parent, file.stem, every_n_train_steps=1, enable_version_counter=False
    )


def main() -> None:
    """Train, and end the process group."""
    parser = argparse.ArgumentParser(description="Train with Lightning.")
    parser.add_argument("train", help="the data set to train on")
    parser.add_argument("validation", help="the data set to evaluate on")
    parser.add_argument("--epochs", type=int, default=1, help="default 1")
    parser.add_argument("--batch-size", type=int, default=8, help="of each process, default 8")
    parser.add_argument("--devices", type=int, default=1, help="processes, default 1")
    parser.add_argument("--checkpoint", type=Path, help="a file, written after every step")
    parser.add_argument(
        "--stop-after", type=int, default=-1, help="steps of all, as if the job's time were up then"
    )
    train(parser.parse_args())
    # Lightning keeps gloo's process group until exit, where one of its threads may abort ("terminate called
    # without an active exception", torch 2.13, with any loader). Destroying it waits for its threads.
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
