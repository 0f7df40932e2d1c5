"""Which of several processes this one is: from torch.distributed or, without it, torchrun."""

import os

import torch


def this_process() -> tuple[int, int]:
    """Return (rank, num_replicas); (0, 1) if nothing says otherwise. Raises ValueError.

    They come from ``torch.distributed`` if it is initialised, else from the environment variables
    RANK and WORLD_SIZE. One of these without the other is an error: a job that sets only
    WORLD_SIZE would otherwise give every process the same part of the samples.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    found = [name for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    if len(found) == 1:
        (missing,) = {"RANK", "WORLD_SIZE"} - {*found}
        raise ValueError(
            f"The environment variable {found[0]} is {os.environ[found[0]]!r:.40}, but {missing} "
            "is not set, so this process does not know which samples are its own. Set both, unset "
            "both, call torch.distributed.init_process_group() before, or give rank=… and "
            "num_replicas=…."
        )
    return _from_environment("RANK", 0), _from_environment("WORLD_SIZE", 1)


def rank_or_zero() -> int:
    """Return the rank, for random numbers that differ between processes; 0 if nothing says it."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return _from_environment("RANK", 0)


def local_replicas() -> int:
    """Return how many of them torchrun has started on this host. Raises ValueError."""
    return _from_environment("LOCAL_WORLD_SIZE", 1)


def check(rank: int | None, num_replicas: int | None) -> None:
    """Raise ValueError for arguments of which only one is given, or a rank out of range."""
    if (rank is None) != (num_replicas is None):
        raise ValueError(
            f"rank={rank} and num_replicas={num_replicas}: give both of them or neither."
        )
    if rank is not None and num_replicas is not None and not 0 <= rank < num_replicas:
        raise ValueError(
            f"rank must be at least 0 and less than num_replicas={num_replicas}, not {rank}."
        )


def resolve(rank: int | None, num_replicas: int | None) -> tuple[int, int]:
    """Return (rank, num_replicas): the arguments or, if both are None, those of `this_process`.

    Raises ValueError.
    """
    if rank is None or num_replicas is None:
        rank, num_replicas = this_process()
        check(rank, num_replicas)
    return rank, num_replicas


def _from_environment(name: str, minimum: int) -> int:
    text = os.environ.get(name, str(minimum))
    if not (text.isascii() and text.isdecimal()) or int(text) < minimum:
        raise ValueError(
            f"The environment variable {name} is {text!r:.40}, but torchrun sets it to an integer "
            f"of at least {minimum}. Correct or unset it."
        )
    return int(text)
