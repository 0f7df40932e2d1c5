"""Named ranges in the timelines of torch.profiler and Nsight."""

import contextlib
from contextlib import AbstractContextManager
from typing import Any, Literal

from torch.autograd import profiler

_NOT_PROFILED = contextlib.nullcontext()


def profiled(what: Literal["fetch", "transform"]) -> AbstractContextManager[Any]:
    """Return a context that is a range named ``memload: what`` while a profiler runs.

    The profilers are ``torch.profiler.profile`` and, for Nsight, ``torch.autograd.profiler``'s
    ``emit_nvtx``. Without one this takes 0.2 µs (Python 3.11, AMD EPYC); torch's
    ``record_function`` takes 6 µs.
    """
    if not profiler._is_profiler_enabled:
        return _NOT_PROFILED
    return profiler.record_function(f"memload: {what}")
