"""Which samples each batch of an epoch holds, for one rank of several, also when resumed.

Nothing here knows of pixels, tensors or threads. Batches come in chunks, so that work is done once
for many of them: a `Chunk` holds the samples of consecutive batches, and a `BatchPart` of it is one
batch. There are two kinds of epochs:

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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from memload.reading.samplers import Order

#: Samples in a chunk, unless one batch has more. One call of `Order.take` costs some 100 µs, and 12
#: ns for each position.
_MAX_SAMPLES = 8192


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
    where samples may repeat, their positions in the epoch. In the last step, a rank may have no
    share. Its chunk then lacks that part, and may have no parts at all.
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
    divided. So an epoch goes on at any number of seen samples, with any number of ranks.
    """

    order: Order
    batch_size: int
    drop_last: bool
    rank: int
    num_replicas: int
    #: of the data set
    num_samples: int

    def __len__(self) -> int:
        """Return the number of this rank's batches in a whole epoch."""
        steps = self._steps(0)
        return len(steps) - (len(steps) > 0 and not self._share(steps[-1]))

    def chunks(self, epoch: int, samples_seen: int) -> Iterator[Chunk]:
        """Yield this rank's batches, from where all ranks have seen ``samples_seen`` samples."""
        steps = self._steps(samples_seen)
        in_chunk = max(1, _MAX_SAMPLES // self.batch_size)
        for first in range(0, len(steps), in_chunk):
            positions, parts, stop = [], [], 0
            for step_start in steps[first : first + in_chunk]:
                share = self._share(step_start)
                start, stop = stop, stop + len(share)
                positions.append(np.arange(share.start, share.stop, share.step))
                seen = min(step_start + steps.step, len(self.order))
                if share:
                    parts.append(BatchPart(start, stop, seen))
            yield self._chunk(epoch, np.concatenate(positions), parts)

    def _steps(self, samples_seen: int) -> range:
        """Return the positions at which the steps begin that are left."""
        per_step = self.batch_size * self.num_replicas
        stop = len(self.order)
        if self.drop_last:
            stop -= (stop - samples_seen) % per_step
        return range(samples_seen, stop, per_step)

    def _share(self, step_start: int) -> range:
        """Return the positions of this rank in a step.

        With ``even_ranks`` all ranks get the same number, and the last of them may get positions
        beyond the end of the order: the padding.
        """
        size = min(self.batch_size * self.num_replicas, len(self.order) - step_start)
        if getattr(self.order, "even_ranks", False):
            size += -size % self.num_replicas
        if getattr(self.order, "strides_ranks", False):
            return range(step_start + self.rank, step_start + size, self.num_replicas)
        first = size * self.rank // self.num_replicas
        last = size * (self.rank + 1) // self.num_replicas
        return range(step_start + first, step_start + last)

    def _chunk(self, epoch: int, positions: np.ndarray, parts: list[BatchPart]) -> Chunk:
        # The padding is the beginning of the epoch again.
        samples = np.asarray(self.order.take(epoch, positions % len(self.order)))
        if samples.shape != positions.shape or samples.dtype.kind not in "iu":
            raise ValueError(
                f"sampler: take() returned {samples.dtype} of shape {samples.shape} for "
                f"{len(positions)} positions. It must return an integer for each."
            )
        _check_range(samples, 0, self.num_samples)
        samples = np.array(samples, np.int64, order="C")  # as torch takes it
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
        _check_range(samples, -self.num_samples, self.num_samples)
        return samples.astype(np.int64) % self.num_samples


def tell_epoch(epoch: int, order: Any, batch_sampler: Any) -> None:
    """Call ``set_epoch`` of a loader's samplers: also of ``batch_sampler.sampler``."""
    for sampler in (order, getattr(batch_sampler, "sampler", None), batch_sampler):
        set_epoch = getattr(sampler, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)


def _check_range(samples: np.ndarray, first: int, num_samples: int) -> None:
    """Raise IndexError for a number below ``first``, or one of at least ``num_samples``."""
    if not samples.size:
        return
    for sample in (samples.max(), samples.min()):
        if not first <= sample < num_samples:
            raise IndexError(
                f"sampler: there is no sample {sample}. The data set has {num_samples} samples, "
                f"with the numbers 0 to {num_samples - 1}."
            )
