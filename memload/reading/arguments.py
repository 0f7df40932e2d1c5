"""Check what a Loader is given, before anything is opened."""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Subset

from memload import transforms
from memload.feeds.choice import FEEDS
from memload.reading.dataset import MemmapDataset

#: What a Loader does instead of what these arguments of torch's DataLoader are for.
_INSTEAD = {
    "num_workers": "it has no worker processes, since nothing is left to decode; num_threads=… "
    "sets how many threads read rows",
    "pin_memory": "its batches are on the device already, and it page-locks memory itself where "
    "that is faster",
    "collate_fn": "it reads each batch as whole tensors, so there is nothing to collate; "
    "transform=… changes whole batches",
    "persistent_workers": "it has no worker processes that could persist, and keeps its feed from "
    "epoch to epoch",
    "generator": "seed=… and the epoch alone determine the order and what transforms draw",
    "worker_init_fn": "it has no worker processes to initialise, and its random numbers follow "
    "from seed=…",
    "multiprocessing_context": "it has no worker processes; num_threads=… sets how many threads "
    "read rows",
    "timeout": "it has no worker processes that it would have to wait for",
    "pin_memory_device": "device=… says where its batches are made",
    "in_order": "its batches always come in order",
}


def refuse_unsupported(arguments: Mapping[str, Any]) -> None:
    """Raise TypeError for arguments that the Loader does not have, with what it does instead."""
    unknown = [name for name in arguments if name not in _INSTEAD]
    if unknown:
        raise TypeError(f"Loader has no argument {unknown[0]!r}. See help(memload.Loader).")
    if arguments:
        reasons = (f"The Loader takes no {name}: {_INSTEAD[name]}." for name in arguments)
        raise TypeError(" ".join(reasons))


def refuse_overfitting(order: Any) -> None:
    """Raise ValueError if it is Lightning's ``overfit_batches`` that asks for the sampler.

    Lightning replaces a sampler that shuffles, which works with torch's DataLoader only. Its own
    error does not say what to do. Nothing but the name of the calling function tells what it wants.
    """
    frame = sys._getframe(1).f_back
    for _ in range(2):
        if frame is not None and frame.f_code.co_name == "_resolve_overfit_batches":
            raise ValueError(
                "overfit_batches needs the same batches in every epoch, but the order of this "
                f"Loader is {type(order).__name__}. Make the Loader without shuffle and sampler: "
                "Loader(dataset, batch_size, shuffle=not overfit_batches)."
            )
        frame = None if frame is None else frame.f_back


def check_order(
    shuffle: bool, sampler: Any, batch_sampler: Any, batch_size: int, drop_last: bool
) -> None:
    """Raise ValueError for arguments that exclude each other, and TypeError for an iterator."""
    if sum((bool(shuffle), sampler is not None, batch_sampler is not None)) > 1:
        raise ValueError("shuffle, sampler and batch_sampler exclude each other. Give one of them.")
    if batch_sampler is not None and (batch_size != 1 or drop_last):
        raise ValueError("batch_sampler makes the batches itself. Remove batch_size and drop_last.")
    for name, iterable in (("sampler", sampler), ("batch_sampler", batch_sampler)):
        if isinstance(iterable, Iterator):
            raise TypeError(
                f"{name} is a {type(iterable).__name__}, which gives its numbers only once: every "
                "epoch after the first would be empty. Give a list, or an object whose __iter__ "
                "begins anew."
            )


def check_settings(seed: int, feed: str, transform: Any) -> None:
    """Raise TypeError or ValueError for a wrong seed, feed or transform."""
    check_transform(transform)
    if not isinstance(seed, int | np.integer):
        raise TypeError(f"seed must be an integer, not {seed!r}.")
    if feed not in FEEDS:
        raise ValueError(f"feed: there is no {feed!r}. Choose one of {', '.join(FEEDS)}.")


def check_transform(transform: Any) -> None:
    """Raise TypeError for what is no transform of batches."""
    is_recipe = getattr(transform, "__module__", "") == transforms.recipes.__name__
    if isinstance(transform, type) or is_recipe:
        name = transform.__name__
        raise TypeError(f"transform is {name} itself, which only makes one. Write {name}(…).")
    if transform is not None and not callable(transform):
        raise TypeError(
            f"transform must be a function of images, not {transform!r}. Write "
            "transforms.Compose([...]) for a list, or a recipe such as transforms.train(224)."
        )


def open_dataset(dataset: Any, columns: Any) -> MemmapDataset:
    """Return the data set that a Loader is given, opened if it is a path.

    A list, or torch's ConcatDataset, is the concatenation of its data sets, and torch's Subset a
    view. Raises TypeError for any other kind of data set, and ValueError if one has a transform.
    """
    if isinstance(dataset, Subset):
        return open_dataset(dataset.dataset, columns).subset(dataset.indices)
    if isinstance(dataset, ConcatDataset | list | tuple):
        parts = dataset.datasets if isinstance(dataset, ConcatDataset) else dataset
        if not parts:
            raise ValueError("dataset is an empty list. Give at least one data set.")
        return MemmapDataset([_opened(part) for part in parts], columns=columns)
    if isinstance(dataset, str | Path):
        return MemmapDataset(dataset, columns=columns)
    if not isinstance(dataset, MemmapDataset):
        kind = type(dataset).__name__
        raise TypeError(
            "dataset must be a MemmapDataset or its path, or a list of these, not a "
            f"{kind}. {_remedy(dataset)}"
        )
    if dataset.has_transform:
        raise ValueError(
            "dataset has a transform, which is for single samples. Give the Loader a transform of "
            "batches instead."
        )
    return dataset


def _opened(part: Any) -> Any:
    """Return a part of a list: a path as it is, which is opened for the columns asked for."""
    return part if isinstance(part, str | Path) else open_dataset(part, None)


def _remedy(dataset: Any) -> str:
    """Return what to do with a data set that a Loader does not take."""
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return "Build one of it first: memload.build(dataset, 'out.bin')."
    return "Build one first: memload.build('images/', 'out.bin')."
