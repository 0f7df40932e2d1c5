"""Which samples each batch of an epoch holds, for one rank of several, also when resumed.

Nothing here knows of pixels, tensors or threads. Batches come in chunks, since one call of
`Order.take` costs some 100 µs beside 12 ns a position: a `Chunk` holds the samples of many
consecutive batches, and a `BatchPart` of it is one batch. Two kinds of epochs exist:

- `OrderBatches`: an `Order` of `memload.reading.samplers`, which the ranks share.
- `IterableBatches`: any iterable of sample numbers, or of lists of them, which is this rank's own.

10 samples in batches of 2, on the second of 2 ranks:

    >>> from memload import SequentialSampler
    >>> order = SequentialSampler(10)
    >>> batches = OrderBatches(
    ...     order, batch_size=2, drop_last=False, rank=1, num_replicas=2, num_samples=10
    ... )
    >>> len(batches)
    3
    >>> [
    ...     (chunk.samples[part.start : part.stop].tolist(), part.samples_seen)
    ...     for chunk in batches.chunks(epoch=0, samples_seen=0)
    ...     for part in chunk.parts
    ... ]
    [([2, 3], 4), ([6, 7], 8), ([9], 10)]
"""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from memload.reading.samplers import Order

#: Positions in a chunk, at most.
MAX_CHUNK = 1 << 15
#: Positions in the first chunk, so that the first batch need not wait long. Each later chunk has
#: four times as many as the one before.
_FIRST_CHUNK = 1 << 10


class Progress(NamedTuple):
    """Where an iteration is: its epoch, and how many of its samples all ranks have seen.

    If a state was saved behind the last batch of an epoch, the next epoch begins. If the user chose
    the finished epoch with `set_epoch` (``set_by_user``), it is iterated, and has no batches.
    """

    epoch: int
    samples_seen: int
    set_by_user: bool = False


class BatchPart(NamedTuple):
    """One batch of a chunk: its ``samples[start:stop]``.

    ``samples_seen`` counts the samples of the epoch that all ranks have seen after this batch.
    """

    start: int
    stop: int
    samples_seen: int


class Chunk(NamedTuple):
    """The samples of several consecutive batches, int64 ``(n,)``, and the batches as parts of them.

    ``draw_numbers``, int64 ``(n,)``, are what random transforms are drawn for: the samples, or
    where samples may repeat, their positions in the epoch.
    """

    samples: np.ndarray
    draw_numbers: np.ndarray
    parts: list[BatchPart]


@dataclass(frozen=True)
class OrderBatches:
    """The batches of one rank, where all ranks share the epochs of an order.

    A step is one batch on every rank: the next ``batch_size × num_replicas`` positions. Rank 0
    takes the first ``batch_size`` of them, rank 1 the next, and so on; or, if the order has
    ``strides_ranks``, they take turns. Only the last step may have fewer; `_share` says how it is
    divided. So an epoch goes on at any number of seen samples, with
    any number of ranks.
    """

    order: Order
    batch_size: int
    drop_last: bool
    rank: int
    num_replicas: int
    #: of the data set
    num_samples: int
    max_chunk: int = MAX_CHUNK

    def __len__(self) -> int:
        """Return the number of this rank's batches in a whole epoch."""
        full_steps, samples_left = divmod(len(self.order), self.batch_size * self.num_replicas)
        return full_steps + (len(self._share(0, samples_left)) > 0 and not self.drop_last)

    def is_over(self, samples_seen: int) -> bool:
        """Return whether an epoch has no more batches for any rank."""
        per_step = self.batch_size * self.num_replicas
        return len(self.order) - samples_seen < (per_step if self.drop_last else 1)

    def chunks(self, epoch: int, samples_seen: int) -> Iterator[Chunk]:
        """Yield this rank's batches, from where all ranks have seen ``samples_seen`` samples."""
        per_step = self.batch_size * self.num_replicas
        end = len(self.order)
        if self.drop_last:
            end -= (end - samples_seen) % per_step
        step_starts = range(samples_seen, end, per_step)
        max_steps = max(1, self.max_chunk // self.batch_size)
        num_steps = min(max_steps, max(1, _FIRST_CHUNK // self.batch_size))
        while step_starts:
            positions, parts, stop = [], [], 0
            for step_start in step_starts[:num_steps]:
                step_stop = min(step_start + per_step, end)
                share = self._share(step_start, step_stop - step_start)
                if share:  # in the last step, this rank may have none
                    start, stop = stop, stop + len(share)
                    positions.append(np.arange(share.start, share.stop, share.step))
                    parts.append(BatchPart(start, stop, step_stop))
            if parts:
                yield self._chunk(epoch, np.concatenate(positions), parts)
            step_starts, num_steps = step_starts[num_steps:], min(max_steps, 4 * num_steps)

    def _share(self, step_start: int, step_size: int) -> range:
        """Return the positions of this rank in a step.

        With ``even_ranks`` all ranks get the same number, and the last of them may get positions
        beyond the end of the order: the padding.
        """
        if self.drop_last or getattr(self.order, "even_ranks", False):
            step_size += -step_size % self.num_replicas
        if getattr(self.order, "strides_ranks", False):
            return range(step_start + self.rank, step_start + step_size, self.num_replicas)
        first = step_size * self.rank // self.num_replicas
        last = step_size * (self.rank + 1) // self.num_replicas
        return range(step_start + first, step_start + last)

    def _chunk(self, epoch: int, positions: np.ndarray, parts: list[BatchPart]) -> Chunk:
        inside = positions
        if positions[-1] >= len(self.order):  # the padding is the beginning of the epoch again
            inside = positions % len(self.order)
        samples = np.asarray(self.order.take(epoch, inside))
        if samples.shape != positions.shape or samples.dtype.kind not in "iu":
            raise ValueError(
                f"sampler: take() returned {samples.dtype} of shape {samples.shape} for "
                f"{len(positions)} positions. It must return an integer for each."
            )
        _check_range(samples, 0, self.num_samples)
        repeats = getattr(self.order, "repeats", False)
        return Chunk(samples, positions if repeats else samples, parts)


@dataclass(frozen=True)
class IterableBatches:
    """The batches of an iterable of the user's.

    It gives sample numbers or, if ``batch_size`` is None, lists of them, which are the batches. It
    is not shared among ranks. To resume, what was seen is taken from it again and dropped. Samples
    may repeat, and negative numbers count from the end. Random transforms are drawn for positions.
    """

    iterable: Iterable[Any]
    batch_size: int | None
    drop_last: bool
    #: of the data set
    num_samples: int

    def __len__(self) -> int:
        """Return the number of batches. Raises TypeError if the iterable has no length."""
        length = len(self.iterable)  # type: ignore[arg-type]  # raises the TypeError
        if self.batch_size is None:
            return length
        return length // self.batch_size if self.drop_last else -(-length // self.batch_size)

    def is_over(self, samples_seen: int) -> bool:
        """Return whether an epoch has no more batches; False if the iterable cannot tell."""
        if self.batch_size is None or not isinstance(self.iterable, Sized):
            return False
        return len(self.iterable) - samples_seen < (self.batch_size if self.drop_last else 1)

    def chunks(self, epoch: int, samples_seen: int) -> Iterator[Chunk]:
        """Yield the batches from where ``samples_seen`` samples were seen, each as a chunk."""
        position = 0
        numbers = batches = iter(self.iterable)
        if self.batch_size is not None:
            position = samples_seen
            deque(itertools.islice(numbers, samples_seen), maxlen=0)  # taken and dropped
            batches = iter(lambda: list(itertools.islice(numbers, self.batch_size)), [])
        for batch in batches:
            samples = self._checked(batch)
            if self.drop_last and len(samples) != self.batch_size:
                break
            first, position = position, position + len(samples)
            seen_of_batch = max(0, samples_seen - first)
            if seen_of_batch < len(samples):
                samples = samples[seen_of_batch:]
                positions = np.arange(first + seen_of_batch, position)
                yield Chunk(samples, positions, [BatchPart(0, len(samples), position)])

    def _checked(self, batch: Iterable[Any]) -> np.ndarray:
        samples = np.asarray(list(batch))
        if not samples.size:
            return samples.astype(np.int64)
        if samples.ndim != 1 or samples.dtype.kind not in "iu":
            raise TypeError(
                "sampler: sample numbers must be integers, but a batch of them is "
                f"{samples.dtype} of shape {samples.shape}."
            )
        samples = samples.astype(np.int64)
        _check_range(samples, -self.num_samples, self.num_samples)
        return samples % self.num_samples


def tell_epoch(epoch: int, loader: Any) -> None:
    """Call ``set_epoch`` of a loader's samplers: also of ``batch_sampler.sampler``."""
    batches = getattr(loader, "batch_sampler", None)
    numbers = getattr(loader, "sampler", None), getattr(batches, "sampler", None)
    for sampler in (*numbers, batches):
        set_epoch = getattr(sampler, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)


def _check_range(samples: np.ndarray, first: int, num_samples: int) -> None:
    """Raise IndexError for a number below ``first``, or one of at least ``num_samples``."""
    for sample in (samples.max(), samples.min()):
        if not first <= sample < num_samples:
            raise IndexError(
                f"sampler: there is no sample {sample}. The data set has {num_samples} samples, "
                f"with the numbers 0 to {num_samples - 1}."
            )
