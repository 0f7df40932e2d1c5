"""`memload.copy` from a server, beside bare ranged reads with as many threads. MB/s.

    python -m benchmarks.copying --threads 16

All read the same ranges of 8 MiB through fsspec over HTTP from a server of this machine, which is
another process. One throws the bytes away, and one writes them into a file and flushes it.
`memload.copy` also compares each row with its checksum. The server and the readers share the cores.
With ``--data /dev/shm/copying`` the disk does not bound them. ``--stream`` is how many MB/s a
connection gives, as those of stores do; with 0, the cores are the limit.
"""

import argparse
import atexit
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import memload
from benchmarks.data import noise_dataset
from benchmarks.harness import Benchmark, Way, run

RANGE = 8 << 20
READS, WRITES, COPY = "ranged reads", "ranged reads and writes", "memload.copy"
SERVER = r"""
import os, re, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def do_HEAD(self):
        self.answer(lambda file, start, size: None)

    def do_GET(self):
        self.answer(self.send)

    def answer(self, send):
        with open(sys.argv[1] + self.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            given = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            start, stop = (int(given[1]), int(given[2]) + 1) if given else (0, size)
            self.send_response(206 if given else 200)
            self.send_header("Content-Length", str(min(stop, size) - start))
            self.end_headers()
            send(file, start, min(stop, size) - start)

    def send(self, file, start, size):
        self.wfile.flush()
        begin, first, rate = time.perf_counter(), start, float(sys.argv[2]) * 1e6
        while size:
            sent = os.sendfile(self.connection.fileno(), file.fileno(), start, min(size, 1 << 18))
            start, size = start + sent, size - sent
            if rate:
                time.sleep(max(0, (start - first) / rate - (time.perf_counter() - begin)))

server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


def _bare(url: str, size: int, threads: int, copied: Path | None) -> None:
    """Read a file in ranges, and write it if there is a path for it."""
    from fsspec.core import url_to_fs

    system, path = url_to_fs(url)
    descriptor = None if copied is None else os.open(copied, os.O_WRONLY | os.O_CREAT)

    def read(start: int) -> int:
        content = system.cat_file(path, start=start, end=min(start + RANGE, size))
        return len(content) if descriptor is None else os.pwrite(descriptor, content, start)

    with ThreadPoolExecutor(threads) as pool:
        if sum(pool.map(read, range(0, size, RANGE))) != size:
            raise RuntimeError("the server has sent fewer bytes")
    if descriptor is not None:
        os.fsync(descriptor)
        os.close(descriptor)


def ways(options: argparse.Namespace, folder: Path) -> dict[str, Way]:
    """Return the two ways to read."""
    path = folder / "served" / "noise.bin"
    path.parent.mkdir(exist_ok=True)
    if not path.exists():
        noise_dataset(path.parent, options.images, options.side)
    (path,) = path.parent.glob("*.bin")
    command = [sys.executable, "-c", SERVER, str(path.parent), str(options.stream)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    atexit.register(server.kill)
    assert server.stdout is not None
    url = f"http://127.0.0.1:{server.stdout.readline().strip()}/{path.name}"
    size, copied = path.stat().st_size, folder / "copied"

    def rate(call: Callable[[], object]) -> float:
        shutil.rmtree(copied, ignore_errors=True)
        copied.mkdir()
        os.sync()
        start = time.perf_counter()
        call()
        return size / (time.perf_counter() - start) / 1e6

    threads = options.threads
    return {
        READS: lambda: rate(lambda: _bare(url, size, threads, None)),
        WRITES: lambda: rate(lambda: _bare(url, size, threads, copied / "bare.bin")),
        COPY: lambda: rate(lambda: memload.copy(url, copied, num_threads=threads, progress=False)),
    }


BENCHMARKS = {
    "copying": Benchmark(
        ways,
        {"images": 10_000, "side": 224, "threads": 16, "stream": 20.0, "rounds": 5},
        quick={"images": 1000, "rounds": 1},
        ratios={"copy / reads": (COPY, READS), "copy / reads and writes": (COPY, WRITES)},
    )
}

if __name__ == "__main__":
    run(BENCHMARKS)
