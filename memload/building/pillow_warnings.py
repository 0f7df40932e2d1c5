"""Pillow's warnings during a build, which as errors (``python -W error``) would reject pictures."""

import contextlib
import re
import warnings
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def quiet_pillow() -> Iterator[None]:
    """Ignore Pillow's warnings, in the whole process, until the last block has ended.

    Builds may run in several threads at once, as tasks of an executor. ``warnings.catch_warnings``
    is not made for that: the block that ends last may bring back filters of another one.
    """
    filters: Any = warnings.filters  # a list, which typeshed has as a sequence
    quiet = ("ignore", None, Warning, re.compile(r"PIL\."), 0)
    filters.insert(0, quiet)
    try:
        yield
    finally:
        # A catch_warnings() of other code that has ended meanwhile has put back another list.
        with contextlib.suppress(ValueError):
            filters.remove(quiet)
