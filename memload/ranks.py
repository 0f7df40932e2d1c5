"""Which of several processes this one is, as torch.distributed says or, where that is not initialised, torchrun."""

import os

import torch


def rank() -> int:
    """Return the number of this process among all of them; 0 if nothing says otherwise. Raises ValueError."""
    return torch.distributed.get_rank() if _in_group() else _from_environment("RANK", 0)


def num_replicas() -> int:
    """Return how many processes there are; 1 if nothing says otherwise. Raises ValueError."""
    if _in_group():
        return torch.distributed.get_world_size()
    return _from_environment("WORLD_SIZE", 1)


def local_replicas() -> int:
    """Return how many of them torchrun has started on this host. Raises ValueError."""
    return _from_environment("LOCAL_WORLD_SIZE", 1)


def resolve(rank_given: int | None, num_replicas_given: int | None) -> tuple[int, int]:
    """Return (rank, num_replicas): the arguments or, if both are None, those of this process.

    Raises ValueError if only one is given, or if the rank is out of range.
    """
    if (rank_given is None) != (num_replicas_given is None):
        raise ValueError(
            f"rank={rank_given} and num_replicas={num_replicas_given}: give both of them or neither."
        )
    if rank_given is None or num_replicas_given is None:
        rank_given, num_replicas_given = rank(), num_replicas()
    if not 0 <= rank_given < num_replicas_given:
        raise ValueError(
            f"rank must be at least 0 and less than num_replicas={num_replicas_given}, not {rank_given}."
        )
    return rank_given, num_replicas_given


def _in_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _from_environment(name: str, minimum: int) -> int:
    text = os.environ.get(name, str(minimum))
    if not (text.isascii() and text.isdecimal()) or int(text) < minimum:
        raise ValueError(
            f"The environment variable {name} is {text!r:.40}, but torchrun sets it to an integer of at "
            f"least {minimum}. Correct or unset it."
        )
    return int(text)
