"""A function to call later, together with a way to ask whether it would have to wait."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


def _always() -> bool:
    return True


@dataclass(slots=True)
class Job(Generic[T]):
    """A function to call later: ``job()`` calls it.

    ``is_ready()`` returns whether the call would not wait for the disk. It never blocks. By default
    a job is always ready.

    >>> Job(lambda: 3)()
    3
    """

    function: Callable[[], T]
    is_ready: Callable[[], bool] = _always

    def __call__(self) -> T:
        """Do the work. Blocks until what it needs is there."""
        return self.function()
