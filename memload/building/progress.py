"""Shows how far a build, an export or a copy is: as a bar, or as a line in the log."""

import contextlib
import io
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

logger = logging.getLogger("memload")

#: Seconds between two lines in the log.
_LINE_SECONDS = 30.0

#: Takes the number of rows just done, and that of all rejected ones; None if none can be.
Show = Callable[[int, int | None], None]


@contextlib.contextmanager
def progress(name: str, rows: int, is_shown: bool | None, unit: str = "images") -> Iterator[Show]:
    """Yield a function to call whenever rows are done.

    Args:
        name: What is made, for the lines of the log.
        rows: How many rows there are.
        is_shown: Whether there is a bar. None: if stderr is a terminal or this is a notebook.
            Otherwise the logger ``memload`` gets a line every 30 seconds.
        unit: What the rows are called.
    """
    is_notebook = _is_notebook()
    is_terminal = sys.stderr is not None and sys.stderr.isatty()  # None if it was closed
    if is_shown is False:
        yield lambda done, rejected: None
        return
    options: dict[str, Any] = {"smoothing": 0.1}
    if not (is_shown or is_terminal or is_notebook):
        options = {
            "file": _Log(),
            "mininterval": _LINE_SECONDS,
            "delay": _LINE_SECONDS,
            "miniters": 1,
            "bar_format": f"{name}: {{n:,}} of {{total:,}} done ({{percentage:.0f}}%), "
            "{rate_fmt}, {remaining} left{postfix}",
        }
    if is_notebook:
        from tqdm.auto import tqdm  # the bar of notebooks, if they have widgets
    else:
        from tqdm import tqdm  # 20 ms, a tenth of the time to start

    class Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
        monitor_interval = 0  # otherwise the first bar starts a thread that never ends
        _lock = threading.RLock()  # tqdm's own would fix the user's multiprocessing start method

    with Bar(total=rows, unit=f" {unit}", **options) as bar:

        def show(done: int, rejected: int | None) -> None:
            if rejected is not None:
                bar.set_postfix_str(f"{rejected} rejected", refresh=False)
            bar.update(done)

        yield show


class _Log(io.StringIO):
    """A file whose lines go to the log."""

    def write(self, text: str) -> int:
        if text.strip():
            logger.info(text.strip())
        return len(text)


def _is_notebook() -> bool:
    """Say whether this runs in a notebook's kernel, as tqdm finds out."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in getattr(shell, "config", ())
