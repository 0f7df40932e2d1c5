"""Move the batches of any iterable to a CUDA device, ahead of the loop."""

import contextlib
import warnings
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Subset

from memload.profiling import profiled
from memload.reading.arguments import check_transform
from memload.reading.batches import bind_dataset
from memload.reading.dataset import MemmapDataset, open_dataset
from memload.reading.epochs import tell_epoch
from memload.reading.loop import Job, run_ahead
from memload.reading.samplers import ShuffledSampler, check_integer
from memload.reading.stats import Stats, Stopwatch
from memload.reading.streams import SideStream, find_device, map_tensors
from memload.transforms import Transform
from memload.transforms.foreign import draws_once_a_batch
from memload.transforms.transform import seed_offset


class CudaPrefetcher:
    """Move batches to a CUDA device ahead of the training loop, on a stream of its own.

    >>> batches = DataLoader(dataset, 256, collate_fn=memload.fast_collate, pin_memory=True)
    >>> for images, labels in CudaPrefetcher(batches, transform=memload.transforms.Normalize()):
    ...     ...

    A batch is ready for the stream that is current when you ask for it, and is never overwritten.
    Iterate, as often as you like, or call `next` as with Apex's data_prefetcher. Each iteration is
    an epoch. ``len()`` is that of the iterable. An exception is raised after the batches before it.

    Args:
        iterable: a DataLoader, or any other iterable of batches: tensors in nested tuples, lists
            and mappings. The tensors are moved; everything else stays as it is. Copies overlap with
            training if the batches are in page-locked memory (``pin_memory=True``). Or a dataset
            that makes its samples on the device: it has ``dataset[i]``, ``len()``, and no iterator.
        device: by default the current CUDA device. On the CPU, nothing is moved.
        transform: called on the stream with the images: the batch itself if it is a tensor, the
            first element of a tuple or list, otherwise the whole batch. One of
            `memload.transforms` also gets the column ``label`` of a batch of two; if that is a
            mask, name it so: ``Compose([…], masks=["label"])``. For a DataLoader over a
            `MemmapDataset` it gets all columns and the data set's mean and std, and moves masks,
            points and boxes. It draws at random for (``seed``, epoch, rank, position in the epoch).
        prefetch_factor: how many batches are on their way while one is used.
        shuffle: take the samples of a dataset in the order of `ShuffledSampler`.
        seed: of that order, and of what transforms draw.

    Raises ValueError and TypeError for wrong arguments, and ValueError for a batch with integers of
    the height and width of the images, such as masks, that one of `memload.transforms` moves but
    does not name. Warns if random transforms of torchvision are to transform batches, since they
    draw only once for a whole batch.
    """

    def __init__(
        self,
        iterable: Any,
        *,
        device: torch.device | str | None = None,
        transform: Callable[[Any], Any] | None = None,
        prefetch_factor: int = 2,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        check_integer("prefetch_factor", prefetch_factor, 1)
        check_transform(transform)
        self._by_number = not hasattr(iterable, "__iter__")
        if shuffle and not self._by_number:
            raise ValueError(
                "shuffle is for a dataset of samples, but an iterable has an order of its own. "
                "Shuffle there."
            )
        if not self._by_number and (warning := draws_once_a_batch(transform)):
            warnings.warn(warning, stacklevel=2)
        dataset = _stored_dataset(iterable)
        self.iterable, self.prefetch_factor = iterable, prefetch_factor
        #: What a DataLoader gives behind the images.
        self._columns: tuple[str, ...] = ()
        if isinstance(iterable, DataLoader) and dataset is not None:
            self._columns = dataset.sample_names
        self.transform = bind_dataset(transform, dataset, self._columns)
        self.shuffle, self.seed = shuffle, int(seed)
        self.device = find_device(device)
        is_cuda = self.device.type == "cuda"
        self._side = SideStream(self.device, prefetch_factor) if is_cuda else None
        self._epoch = 0
        self._batches: Iterator[Any] | None = None
        self._stopwatch: Stopwatch | None = None
        self._after_the_last: tuple[None, ...] = (None, None)

    def __len__(self) -> int:
        return len(self.iterable)

    @property
    def stats(self) -> Stats:
        """How many batches the newest iteration has handed out, and how long the loop has waited.

        >>> print(batches.stats)
        1,000 batches in 52.1 s: waited 0.4 s for data (0.8 %)

        See `Loader.stats`. Bytes are not counted.
        """
        return Stats() if self._stopwatch is None else self._stopwatch.stats

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, also for the iterable and its samplers."""
        self._epoch = epoch
        if hasattr(self.iterable, "set_epoch"):
            self.iterable.set_epoch(epoch)
        samplers = (getattr(self.iterable, name, None) for name in ("sampler", "batch_sampler"))
        tell_epoch(epoch, *samplers)

    def __iter__(self) -> Iterator[Any]:
        epoch, self._epoch, self._batches = self._epoch, self._epoch + 1, None
        items = self.iterable
        if self._by_number:
            items = range(len(self.iterable))
            if self.shuffle:
                order = ShuffledSampler(len(items), seed=self.seed)
                items = order.take(epoch, np.arange(len(items))).tolist()
        dataset = self.iterable if self._by_number else None
        mover = _Mover(dataset, self.device, self.transform, self._columns, self.seed, epoch)
        jobs = (Job(partial(mover, item)) for item in items)
        batches = run_ahead(jobs, side=self._side, in_flight=1 + self.prefetch_factor)
        self._stopwatch = Stopwatch(perf_counter(), epoch)
        # The generator must not refer to self: `next` stores it there, and such a cycle would keep
        # a DataLoader's workers alive.
        return _hand_over(batches, self._side, self._stopwatch)

    def next(self) -> Any:
        """Return the next batch or, after the last, a None for each element: ``(None, None)``.

        The first call begins an epoch. After the end, further calls return the same: use `iter` or
        a new prefetcher to begin anew.
        """
        if self._batches is None:
            self._batches = iter(self)
        for batch in self._batches:
            if isinstance(batch, tuple | list):
                self._after_the_last = (None,) * max(1, len(batch))
            return batch
        return self._after_the_last


def _hand_over(
    batches: Generator[Any, None, None], side: SideStream | None, stopwatch: Stopwatch
) -> Generator[Any, None, None]:
    stopwatch.asked_at = perf_counter()  # an epoch begins with its first batch
    with contextlib.closing(batches):
        for _, batch in batches:
            stopwatch.hand_over()
            if side is not None:
                side.wait_while_ahead()
            yield batch
            del batch, _  # their memory may be what the next one takes
            stopwatch.ask()


@dataclass
class _Mover:
    """Makes the batches of an epoch: moves and transforms those of an iterable.

    With a ``dataset``, it gets the numbers of samples instead. ``columns`` are the names of what is
    behind the images; empty if they are not known.
    """

    dataset: Any
    device: torch.device
    transform: Callable[..., Any] | None
    columns: tuple[str, ...]
    seed: int
    epoch: int
    samples_seen: int = 0

    def __call__(self, item: Any) -> Any:
        """Return a batch on the device."""
        source = item if self.dataset is None else self.dataset[item]
        with profiled("fetch"):
            batch = map_tensors(lambda tensor: tensor.to(self.device, non_blocking=True), source)
        if self.transform is None:
            return batch
        is_sequence = isinstance(batch, tuple | list) and len(batch) > 0
        images, *values = batch if is_sequence else [batch]
        with profiled("transform"):
            if isinstance(self.transform, Transform):
                images, values = self._transform_columns(self.transform, images, values)
            else:
                images = self.transform(images)
        if not is_sequence:
            return images
        is_named = hasattr(batch, "_fields")
        return type(batch)(images, *values) if is_named else type(batch)([images, *values])

    def _transform_columns(
        self, transform: Transform, images: Any, values: list[Any]
    ) -> tuple[Any, list[Any]]:
        """Call a transform of memload's with images and, if their names are known, columns."""
        names = self.columns
        if len(values) != len(names):
            names = ("label",)
            _refuse_unnamed_masks(transform, images, values)
        count = len(images) if isinstance(images, Tensor) and images.ndim else 0
        samples = np.arange(self.samples_seen, self.samples_seen + count)
        self.samples_seen += count
        draws = {"samples": samples, "seed": self.seed + seed_offset(), "epoch": self.epoch}
        are_columns = all(isinstance(one, Tensor) and one.shape[:1] == (count,) for one in values)
        if len(values) != len(names) or not are_columns:
            return transform(images, **draws), values
        columns = dict(zip(names, values, strict=True))
        images, columns = transform(images, columns, **draws)  # MixUp changes labels too
        return images, [columns[name] for name in names]


def _refuse_unnamed_masks(transform: Transform, images: Any, values: list[Any]) -> None:
    """Raise ValueError if the transform would move images, but not what looks like their masks.

    A `Compose` whose ``masks`` were given says what they are.
    """
    is_told = getattr(transform, "masks", None) is not None
    if is_told or not transform.moves_pixels or not isinstance(images, Tensor):
        return
    for value in values:
        is_mask = isinstance(value, Tensor) and not value.is_floating_point() and value.ndim >= 3
        if is_mask and value.shape[-2:] == images.shape[-2:]:
            move = "masks=['label'] to move it too, or " if len(values) == 1 else ""
            raise ValueError(
                f"transform moves the pixels of images, but the batch also has a {value.dtype} "
                f"tensor of shape {tuple(value.shape)}. If it is a mask, it would stay as it is. "
                f"Use Compose([…]) with {move}masks=[] to leave it alone."
            )


def _stored_dataset(iterable: Any) -> MemmapDataset | None:
    """Return the data set that a loader reads, also through torch's Subset and ConcatDataset."""
    dataset = getattr(iterable, "dataset", None)
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    if isinstance(dataset, ConcatDataset):
        with contextlib.suppress(TypeError, ValueError):  # of other kinds, or with transforms
            dataset = open_dataset(dataset)
    return dataset if isinstance(dataset, MemmapDataset) else None
