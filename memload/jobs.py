"""Work that is done later, and of which it is known whether it has to wait."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


def _at_once() -> bool:
    return True


@dataclass(slots=True)
class Job(Generic[T]):
    """A function to call later: ``job()`` calls it.

    ``is_ready()`` returns whether that would do without waiting, as for a disk.

    >>> Job(lambda: 3)()
    3
    """

    function: Callable[[], T]
    is_ready: Callable[[], bool] = _at_once

    def __call__(self) -> T:
        """Do the work, and wait for what it needs."""
        return self.function()
