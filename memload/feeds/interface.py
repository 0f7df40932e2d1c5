"""What all ways of getting samples to the device have in common."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from memload.storage.shards import Shards


@dataclass(frozen=True)
class Samples:
    """What a feed serves: pixels, the row of them that each sample has, int64 ``(n,)``, and its columns ``(n, …)``."""

    shards: Shards
    row: np.ndarray
    columns: Sequence[np.ndarray]

    @property
    def dtype(self) -> torch.dtype:
        """The pixels' type."""
        return torch.from_numpy(np.empty(0, self.shards.array.descr)).dtype

    def shape(self, count: int) -> tuple[int, ...]:
        """Return ``(count, H, W, C)``."""
        return (count, *self.shards.array.shape)


class Feed(Protocol):
    """Brings samples to where the model wants them. It knows nothing of order, as a sampler knows nothing of pixels.

    Making one raises FeedError where it cannot serve these samples on this device, and says why.
    """

    name: ClassVar[str]
    device: torch.device

    def prepare(self, samples: np.ndarray) -> "Fetch":
        """Return a function that fetches parts of these samples: int64 ``(M,)``, in range, those of many batches.

        ``fetch(start, stop)`` returns pixels ``(N, H, W, C)`` and columns ``(N, …)`` of ``samples[start:stop]``: the
        caller's own, never to be written to by another. It is thread-safe. On the CPU it blocks until they are there;
        on CUDA they are there for what follows on torch's current stream, on which `prepare` was called too. That is
        not to be the default one, on which CUDA takes no batched copies, except for `ResidentFeed`.
        """

    def close(self) -> None:
        """Let go of memory and threads, once copies under way have ended; what was handed out stays as it is."""


Fetch = Callable[[int, int], list[Tensor]]


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """Return a small array on the device, for what follows on the current stream, without waiting.

    By way of page-locked memory: a copy from ordinary memory may wait for all that is on the stream.
    """
    return torch.from_numpy(array).pin_memory().to(device, non_blocking=True)


def widest_word(row_bytes: int) -> torch.dtype:
    """Return the widest type that rows are whole numbers of; where a page begins with one, all begin at multiples."""
    return next(
        word
        for word in (torch.int64, torch.int32, torch.int16, torch.int8)
        if not row_bytes % word.itemsize
    )
