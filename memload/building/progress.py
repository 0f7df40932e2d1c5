"""Shows how far a build, an export or a copy is.

That is a bar in terminals and notebooks, and elsewhere a line in the log.
"""

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator

logger = logging.getLogger("memload")

#: Seconds between two lines in the log.
_LINE_SECONDS = 30.0

#: Takes the number of rows just done, and that of all rejected ones; None if none can be.
Show = Callable[[int, int | None], None]


@contextlib.contextmanager
def progress(name: str, rows: int, is_shown: bool | None, unit: str = "images") -> Iterator[Show]:
    """Yield a function to call whenever rows are done. ``unit`` is what they are called.

    With None for ``is_shown``, there is a bar if stderr is a terminal or this is a notebook, and
    otherwise a line about every 30 seconds, by the logger ``memload``.
    """
    is_notebook = _is_notebook()
    is_terminal = sys.stderr is not None and sys.stderr.isatty()  # None if it was closed
    if is_shown or (is_shown is None and (is_terminal or is_notebook)):
        with _bar(rows, is_notebook, unit) as show:
            yield show
    elif is_shown is None:
        yield _Lines(name, rows, unit).show
    else:
        yield lambda done, rejected: None


@contextlib.contextmanager
def _bar(rows: int, is_notebook: bool, unit: str) -> Iterator[Show]:
    if is_notebook:
        from tqdm.auto import tqdm  # the bar of notebooks, if they have widgets
    else:
        from tqdm import tqdm  # 20 ms, a tenth of the time to start

    class Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
        monitor_interval = 0  # otherwise the first bar starts a thread that never ends
        _lock = threading.RLock()  # tqdm's own would fix the user's multiprocessing start method

    with Bar(total=rows, unit=f" {unit}", smoothing=0.1) as bar:

        def show(done: int, rejected: int | None) -> None:
            if rejected is not None:
                bar.set_postfix_str(f"{rejected} rejected", refresh=False)
            bar.update(done)

        yield show


def _is_notebook() -> bool:
    """Say whether this runs in a notebook's kernel, as tqdm finds out."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in getattr(shell, "config", ())


class _Lines:
    """Logs how much is done, how fast that goes now, and when it will end."""

    def __init__(self, name: str, rows: int, unit: str) -> None:
        self.name, self.rows, self.unit, self.done = name, rows, unit, 0
        self.done_at_line, self.time_of_line = 0, time.monotonic()

    def show(self, done: int, rejected: int | None) -> None:
        self.done += done
        elapsed = time.monotonic() - self.time_of_line
        if elapsed < _LINE_SECONDS:
            return
        rate = (self.done - self.done_at_line) / elapsed
        left = _duration((self.rows - self.done) / rate) if rate else "unknown time"
        logger.info(
            f"{self.name}: {self.done:,} of {self.rows:,} done ({self.done / self.rows:.0%}), "
            f"{rate:,.1f} {self.unit}/s, {left} left"
            f"{'' if rejected is None else f', {rejected:,} rejected'}"
        )
        self.done_at_line, self.time_of_line = self.done, time.monotonic()


def _duration(seconds: float) -> str:
    """Return e.g. ``1:02:03``, in hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
