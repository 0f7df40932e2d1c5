"""The Loader under Lightning's Trainer."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from memload import Loader

lightning = pytest.importorskip("lightning")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("shuffle", [False, True])
def test_overfit_batches_needs_a_loader_that_does_not_shuffle(
    make_dataset: Callable[..., Any], shuffle: bool
) -> None:
    seen = []

    class Model(lightning.LightningModule):  # type: ignore[misc]  # Lightning has no types here
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 3)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def training_step(self, batch: Any) -> Any:
            seen.append(batch.index.tolist())
            return self.layer(batch.images.float().mean((2, 3))).sum()

    columns = {"label": np.arange(20) % 3}
    path = make_dataset(rows=(20,), columns=columns).path
    loader = Loader(path, 4, shuffle=shuffle, columns=["index"], device="cpu")
    trainer = lightning.Trainer(
        overfit_batches=2,
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if shuffle:
        with pytest.raises(ValueError, match=r"ShuffledSampler\. .*shuffle=not overfit_batches"):
            trainer.fit(Model(), loader)
    else:
        trainer.fit(Model(), loader)
        assert seen == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2
