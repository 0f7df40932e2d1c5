"""The Loader under Lightning's Trainer."""

import pytest
import torch

from memload import Loader

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_overfit_batches_takes_the_same_batches_of_a_loader_that_does_not_shuffle(make_dataset):
    lightning = pytest.importorskip("lightning")
    seen = []

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 3)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def training_step(self, batch):
            seen.append(batch.index.tolist())
            return self.layer(batch.images.float().mean((2, 3))).sum()

    loader = Loader(make_dataset(rows=(20,)).path, 4, columns=["index"], device="cpu")
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options = {"max_epochs": 2, "accelerator": "cpu", **dict.fromkeys(quiet, False)}
    lightning.Trainer(overfit_batches=2, **options).fit(Model(), loader)
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2
