"""Ways of getting rows to the device, one a file. A feed knows nothing of order, and a sampler nothing of pixels."""

from typing import Protocol

import numpy as np
from torch import Tensor


class Feed(Protocol):
    """Brings rows of a data set to where the model wants them."""

    name: str

    def fetch(self, rows: np.ndarray) -> Tensor:
        """Return the pixels of rows (int64, within the shards) as ``(N, H, W, C)``, a copy of the caller's own.

        Thread-safe. Blocks until they are there, or on their way on the device.
        """

    def close(self) -> None:
        """Let go of memory and threads; batches that were handed out stay as they are."""
