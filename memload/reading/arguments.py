"""Check what a Loader is given, before anything is opened."""

from collections.abc import Iterator, Mapping
from typing import Any

from memload.feeds.choice import FEEDS
from memload.reading.dataset import open_dataset
from memload.reading.samplers import MixtureSampler
from memload.wording import listed


def refuse_unsupported(arguments: Mapping[str, Any]) -> None:
    """Raise TypeError for arguments that the Loader does not have, such as torch's DataLoader's."""
    for name in arguments:
        raise TypeError(
            f"Loader has no argument {name!r}. It has no worker processes, and its batches come in "
            "order and on the device: num_threads=… sets the threads that read rows, transform=… "
            "changes whole batches, and seed=… the order and all random numbers. See "
            "help(memload.Loader)."
        )


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


def check_mixture(dataset: Any, sampler: Any) -> None:
    """Raise ValueError if a mixture is one of data sets with other sizes than these."""
    if not isinstance(sampler, MixtureSampler):
        return
    parts = dataset if isinstance(dataset, list | tuple) else [dataset]
    sizes = tuple(len(open_dataset(part)) for part in parts)
    if sizes != (sampler.sizes if len(sizes) > 1 else (sum(sampler.sizes),)):
        raise ValueError(
            f"sampler: its data sets have {listed(sampler.sizes)} samples, but those of the Loader "
            f"have {listed(sizes)}. Give the sizes in the order of the data sets."
        )


def check_settings(feed: str, transform: Any) -> None:
    """Raise ValueError for an unknown feed, and TypeError for a wrong transform."""
    check_transform(transform)
    if feed not in FEEDS:
        raise ValueError(f"feed: there is no {feed!r}. Choose one of {', '.join(FEEDS)}.")


def check_transform(transform: Any) -> None:
    """Raise TypeError for what is no transform of batches."""
    if transform is not None and not callable(transform):
        raise TypeError(
            f"transform must be a function of images, not {transform!r}. Write "
            "transforms.Compose([...]) for a list, or a recipe such as transforms.train(224)."
        )
