"""RAM that is taken away for a while, so that a file is larger than what is left.

Run as a program, it holds so many bytes until its standard input ends.
"""

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from memload.machine import available_memory

#: The process that holds RAM ends by itself when less than this is left.
RESERVE_BYTES = 2_000_000_000
_CHUNK_BYTES = 256 << 20


@contextlib.contextmanager
def limited_ram(left: int) -> Iterator[Callable[[], None]]:
    """Leave so many bytes of RAM: a child process holds the others, and is always ended.

    Should RAM run short all the same, it is that process which ends, by itself or by the kernel.
    Then what was measured is void, and the function that is yielded raises RuntimeError.
    """
    command = [sys.executable, __file__, str(max(0, available_memory() - left))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as child:
        try:
            if not child.stdout.readline():  # it has ended before all was held
                child.wait()
            check(child)
            yield partial(check, child)
        finally:
            child.kill()


def check(child: "subprocess.Popen[bytes]") -> None:
    """Raise RuntimeError if the process that holds RAM has ended."""
    if child.poll() is not None:
        raise RuntimeError(
            f"RAM ran short: less than {RESERVE_BYTES / 1e9:.0f} GB were left, so it was given "
            "back. Measure when nothing else runs, or with fewer --images."
        )


def hold(size: int) -> None:
    """Hold so many bytes until stdin ends, or until too little RAM is left."""
    Path("/proc/self/oom_score_adj").write_text("1000")  # nothing else is to be killed first
    chunks: list[np.ndarray] = []

    def fill(size: int) -> None:
        if available_memory() > RESERVE_BYTES:
            chunks.append(np.full(size, 1, np.uint8))

    sizes = [_CHUNK_BYTES] * (size // _CHUNK_BYTES)
    with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
        list(pool.map(fill, sizes))
    if len(chunks) == len(sizes):
        print("held", flush=True)
        while not select.select([sys.stdin], [], [], 0.1)[0]:  # its parent may be killed
            if available_memory() < RESERVE_BYTES:
                return


if __name__ == "__main__":
    hold(int(sys.argv[1]))
