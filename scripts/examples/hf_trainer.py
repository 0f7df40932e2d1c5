"""Train with the Trainer of Hugging Face transformers, on one process or several, and evaluate on another file:

python hf_trainer.py TRAIN.bin VAL.bin --epochs 3 --checkpoint checkpoints/
torchrun --nproc-per-node 2 hf_trainer.py TRAIN.bin VAL.bin --epochs 3 --checkpoint checkpoints/

Unlike Lightning and Accelerate, the Trainer does not take a Loader as it is. This is what it needs, and what is here:

- a subclass of the Trainer whose `get_train_dataloader` returns the batches (`LoaderTrainer`), as dicts whose keys are the
  arguments of the model's `forward` (`Dicts`);
- a callback that saves the Loader's state beside each checkpoint (`SaveLoader`), and `ignore_data_skip=True`, so that
  training continues at the exact sample;
- a loop of its own for the evaluation (`evaluate`), because `trainer.evaluate()` gathers in each batch, and one process
  may have a batch more than another.

It trains on GPUs, with one process for each, or on the CPU if there are none. Use torchrun: if one process sees several
GPUs, the Trainer splits each batch between them. Several processes on the CPU need transformers 5.23 to continue from a
checkpoint; 5.17 loads the optimizer's state to "cpu:0". The classes of VAL.bin must have the numbers that they have in
TRAIN.bin: build it with `--classes TRAIN.bin`.
"""
# ruff: noqa: D101, D102 - the Trainer prescribes these names

import argparse
import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.nn.functional  # early: its default arguments would keep a later process group
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from memload import Loader, transforms

#: This transforms whole batches on their device. `Normalize()` uses the statistics of the data set.
TRAIN = transforms.Compose([transforms.RandomHorizontalFlip(), transforms.Normalize()])


class Net(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.net = nn.Sequential(*layers, nn.Linear(32, classes))

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        output = self.net(images)
        return {"loss": functional.cross_entropy(output, labels), "logits": output}


class Dicts:
    """The batches of the Loader as the Trainer needs them: keyword arguments of the model."""

    def __init__(self, loader: Loader) -> None:
        self.loader, self.dataset, self.set_epoch = loader, loader.dataset, loader.set_epoch

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (batch._asdict() for batch in self.loader)


class LoaderTrainer(Trainer):
    def __init__(self, loader: Loader, **kwargs: Any) -> None:
        super().__init__(train_dataset=loader.dataset, **kwargs)
        self.loader = loader

    def get_train_dataloader(self) -> Dicts:
        return Dicts(self.loader)  # without accelerator.prepare, which has nothing to do here


class SaveLoader(TrainerCallback):
    """Saves the state of the Loader beside that of the Trainer."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:  # the same on every rank
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            (folder / "loader.json").write_text(json.dumps(self.loader.state_dict()))


def train(options: argparse.Namespace) -> Accelerator:
    """Train, from the checkpoint if there is one, evaluate, and return what has the processes."""
    arguments = TrainingArguments(
        output_dir=str(options.checkpoint or "."),
        num_train_epochs=options.epochs,
        max_steps=options.stop_after,
        per_device_train_batch_size=options.batch_size,
        ignore_data_skip=True,  # the Loader resumes by itself; skipping would create a DataLoader
        save_strategy="steps" if options.checkpoint else "no",
        save_steps=1,
        learning_rate=1e-2,
        ddp_find_unused_parameters=False,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
    )
    set_seed(0)
    kind = {"columns": ["label"], "device": arguments.device}
    batches = Loader(options.train, options.batch_size, shuffle=True, transform=TRAIN, **kind)
    folder = options.checkpoint
    last = get_last_checkpoint(str(folder)) if folder and folder.is_dir() else None
    if last:
        batches.load_state_dict(json.loads(Path(last, "loader.json").read_text()))
    model = Net(batches.dataset.num_classes)
    trainer = LoaderTrainer(batches, model=model, args=arguments, callbacks=[SaveLoader(batches)])
    trainer.train(resume_from_checkpoint=last)

    accelerator = trainer.accelerator
    statistics = transforms.Normalize(options.train)  # those of the training data
    test = Loader(options.validation, options.batch_size, transform=statistics, **kind)
    totals = evaluate(accelerator.unwrap_model(trainer.model).net.eval(), test)
    loss, right, count = accelerator.reduce(totals).tolist()
    accelerator.print(batches.stats)  # of the last epoch: has it waited for data?
    accelerator.print(f"loss {loss / count:.4f}, accuracy {right / count:.4f}, {count:.0f} samples")
    return accelerator


@torch.no_grad()
def evaluate(net: nn.Module, test: Loader) -> Tensor:
    """Return the sum of losses, how many samples are right, and how many there are, of this rank.

    Each sample comes once over all ranks, so one rank may have a batch more. Reduce after the loop.
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
    parser = argparse.ArgumentParser(description="Train with the Trainer of transformers.")
    parser.add_argument("train", help="the data set to train on")
    parser.add_argument("validation", help="the data set to evaluate on")
    parser.add_argument("--epochs", type=int, default=1, help="default 1")
    parser.add_argument("--batch-size", type=int, default=8, help="of each process, default 8")
    parser.add_argument("--checkpoint", type=Path, help="a folder, written after every step")
    parser.add_argument(
        "--stop-after", type=int, default=-1, help="steps of all, as if the job's time were up then"
    )
    accelerator = train(parser.parse_args())
    # Threads of gloo that still run at exit may abort or hang (torch 2.13, with any loader). The process
    # group waits for them once nothing refers to it, as the model and the trainer did.
    accelerator.free_memory()
    gc.collect()
    accelerator.end_training()


if __name__ == "__main__":
    main()
