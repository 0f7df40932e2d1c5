"""A server for pictures, tars, and the records of a source as plain values."""

import contextlib
import io
import tarfile
import threading
import zipfile
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


def content(image):
    """The bytes or the values of an image of a record."""
    if isinstance(image, Path):
        return image.read_bytes()
    return image if isinstance(image, bytes) else np.asarray(image).tolist()


def picture(number=0, size=(8, 6), kind="PNG"):
    """The bytes of a picture of one color."""
    buffer = io.BytesIO()
    Image.new("RGB", size, (number % 256, 100, 50)).save(buffer, kind)
    return buffer.getvalue()


def write_tar(path, files, **options):
    with tarfile.open(path, "w", **options) as tar:
        for name, data in files:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def write_zip(path, files, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in files:
            archive.writestr(name, data)
    return path


def touch(root, *names):
    """Write pictures with these names below a folder."""
    for number, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(number))
    return root


@pytest.fixture
def write(tmp_path):
    """A function that writes a table of lines. Its images are there."""

    def write_lines(*lines, name="table.csv", images=("a.jpg",)):
        touch(tmp_path, *images)
        path = tmp_path / name
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return write_lines


class Server:
    """Serves a folder by HTTP. ``fault`` says what is wrong with a path: None, "error" or "cut"."""

    def __init__(self, root):
        self.fault = lambda path: None
        self.asked = []
        server = self

        class Handler(SimpleHTTPRequestHandler):
            def __init__(self, *arguments):
                super().__init__(*arguments, directory=str(root))

            def log_message(self, *arguments):
                pass

            def do_GET(self):
                server.asked.append(self.path)
                fault = server.fault(self.path)
                if fault == "error":
                    self.send_error(500)
                elif fault == "cut":
                    data = Path(self.translate_path(self.path)).read_bytes()
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data[: len(data) // 2])
                else:
                    with contextlib.suppress(ConnectionError):
                        super().do_GET()

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture(scope="session")
def fsspec_thread():
    """Let fsspec start its thread before `nothing_left_behind` looks."""
    pytest.importorskip("fsspec.asyn").get_loop()


@pytest.fixture
def serve(fsspec_thread):
    """A function that serves a folder by HTTP."""
    pytest.importorskip("aiohttp")
    servers = []

    def start(root):
        servers.append(Server(root))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
