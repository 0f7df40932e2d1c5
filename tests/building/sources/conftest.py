"""A server for pictures, and the command in a process of its own."""

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest


class Server:
    """Serves a folder by HTTP. ``fault`` says what to do with a path: None, or a fault of these.

    ``"error"`` is a status of 500, ``"cut"`` half of the file, ``"hang"`` nothing for 30 seconds.
    """

    def __init__(self, root: Path) -> None:
        self.fault: Callable[[str], str | None] = lambda path: None
        self.asked: list[str] = []
        self.ended = threading.Event()
        server = self

        class Handler(SimpleHTTPRequestHandler):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments, directory=str(root))

            def log_message(self, *arguments: Any) -> None:
                pass

            def do_GET(self) -> None:
                server.asked.append(self.path)
                fault = server.fault(self.path)
                if fault == "hang":
                    server.ended.wait(30)
                elif fault == "error":
                    self.send_error(500)
                elif fault == "cut":
                    content = Path(self.translate_path(self.path)).read_bytes()
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content[: len(content) // 2])
                else:
                    with contextlib.suppress(ConnectionError):
                        super().do_GET()

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        self.ended.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def serve() -> Iterator[Callable[[Path], Server]]:
    """A function that serves a folder by HTTP."""
    pytest.importorskip("aiohttp")
    servers: list[Server] = []

    def start(root: Path) -> Server:
        servers.append(Server(root))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


class Done:
    """What a command has printed, and its exit status."""

    def __init__(self, status: int, output: str, error: str, seconds: float) -> None:
        self.status, self.output, self.error, self.seconds = status, output, error, seconds


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., Done]:
    """A function that runs memload in a process of its own, in the temporary folder of the test."""

    def run(*arguments: str | Path) -> Done:
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "memload", *map(str, arguments)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr, time.monotonic() - started)

    return run
