"""Which of several processes this one is: by torch.distributed where that is initialised, else as torchrun tells it."""

import os

import torch


def rank() -> int:
    """Return the number of this process among all; 0 where nobody says otherwise. Raises ValueError."""
    return torch.distributed.get_rank() if _in_group() else _told("RANK", 0)


def num_replicas() -> int:
    """Return how many processes there are. Raises ValueError."""
    return torch.distributed.get_world_size() if _in_group() else _told("WORLD_SIZE", 1)


def local_replicas() -> int:
    """Return how many of them torchrun has started on this host. Raises ValueError."""
    return _told("LOCAL_WORLD_SIZE", 1)


def _in_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _told(name: str, least: int) -> int:
    told = os.environ.get(name, str(least))
    if not (told.isascii() and told.isdecimal()) or int(told) < least:
        raise ValueError(
            f"{name}: expected an integer of at least {least}, as torchrun sets it, found {told!r:.40}. "
            "Unset it, or mend it"
        )
    return int(told)
