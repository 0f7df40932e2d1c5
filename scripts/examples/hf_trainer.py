"""Train with the Trainer of Hugging Face transformers, on one process or several:

python hf_trainer.py DATA.bin --epochs 3 --checkpoint checkpoints/
torchrun --nproc-per-node 2 hf_trainer.py DATA.bin --epochs 3 --checkpoint checkpoints/

It trains on GPUs, with one process for each, or on the CPU if there are none. Use torchrun: if one process sees several
GPUs, the Trainer splits each batch between them. Several processes on the CPU need transformers 5.23 to continue from a
checkpoint; 5.17 loads the optimizer's state to "cpu:0".
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
from torch import Tensor, nn
from torch.nn import functional
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from memload import Loader, MemmapDataset, transforms

#: This transforms whole batches on their device. `Normalize()` uses the statistics of the data set.
TRAIN = transforms.Compose([transforms.RandomHorizontalFlip(), transforms.Normalize()])


class Net(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(32, classes),
        )

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

    def get_train_dataloader(
        self,
    ) -> Dicts:  # without accelerator.prepare, which has nothing to do here
        return Dicts(self.loader)


class SaveLoader(TrainerCallback):
    """Saves the state of the Loader beside that of the Trainer."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:  # the same on every rank
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            (folder / "loader.json").write_text(json.dumps(self.loader.state_dict()))


def main() -> None:
    """Train, from the checkpoint if there is one, and evaluate."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("--validation", help="a data set to evaluate on; default: DATA.bin itself")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument(
        "--stop-after", type=int, default=-1, help="steps of all, as if the job's time were up then"
    )
    args = parser.parse_args()

    arguments = TrainingArguments(
        output_dir=str(args.checkpoint or "."),
        num_train_epochs=args.epochs,
        max_steps=args.stop_after,
        per_device_train_batch_size=args.batch_size,
        ignore_data_skip=True,  # the Loader resumes by itself; skipping would create a DataLoader
        save_strategy="steps" if args.checkpoint else "no",
        save_steps=1,
        learning_rate=1e-2,
        ddp_find_unused_parameters=False,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
    )
    set_seed(0)
    dataset = MemmapDataset(args.data, columns=["label"])
    validation = dataset
    if args.validation:
        validation = MemmapDataset(args.validation, columns=["label"])
    evaluate = transforms.Normalize(dataset)  # the statistics of the training data
    train = Loader(dataset, args.batch_size, shuffle=True, device=arguments.device, transform=TRAIN)
    last = (
        args.checkpoint and args.checkpoint.is_dir() and get_last_checkpoint(str(args.checkpoint))
    )
    if last:
        train.load_state_dict(json.loads(Path(last, "loader.json").read_text()))
    trainer = LoaderTrainer(
        train, model=Net(dataset.num_classes), args=arguments, callbacks=[SaveLoader(train)]
    )
    trainer.train(resume_from_checkpoint=last or None)

    # Each sample comes once over all ranks, so one rank may have a batch more. trainer.evaluate() would
    # gather in each batch and wait forever.
    totals = torch.zeros(3, dtype=torch.float64, device=arguments.device)
    net = trainer.accelerator.unwrap_model(trainer.model).net.eval()
    with torch.no_grad():
        for images, labels in Loader(
            validation, args.batch_size, device=arguments.device, transform=evaluate
        ):
            output = net(images)
            totals[0] += functional.cross_entropy(output, labels, reduction="sum")
            totals[1] += (output.argmax(1) == labels).sum()
            totals[2] += len(labels)
    loss, right, count = trainer.accelerator.reduce(totals).tolist()
    trainer.accelerator.print(
        f"loss {loss / count:.4f}, accuracy {right / count:.4f}, {count:.0f} samples"
    )

    # Threads of gloo that still run at exit may abort or hang (torch 2.13, with any loader). The process
    # group waits for them once nothing refers to it, as the model does.
    trainer.accelerator.free_memory()
    trainer.model_wrapped = trainer.callback_handler.model = None
    gc.collect()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
