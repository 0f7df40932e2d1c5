"""Small data sets to test on, and a check after each test that it leaves nothing behind."""

import contextlib
import csv
import errno
import functools
import gc
import hashlib
import io
import json
import logging
import math
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import re
import signal
import sys
import tarfile
import threading
import time
import zipfile
import zlib
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import tqdm
from PIL import Image

import memload
from memload.storage.format import HEADER_BYTES, npy_header, shard_names
from memload.storage.index import Array, Index, Shard
from memload.storage.keys import Keys

#: torch, which is imported later, starts no threads of its own: processes of tests share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

CLASSES = ("ant", "bee", "cat")
FAILED = pytest.StashKey[bool]()

#: Threads that torch.compile starts and keeps.
TORCH_THREADS = ("InductorSubproc", "subproc_worker_timer", "ThreadPoolExecutor-")
#: Files that may stay open or mapped: libraries, their data, devices, multiprocessing's arenas.
KEPT = (sys.prefix, sys.base_prefix, "/usr/", "/lib", "/opt/", "/dev/nvidia", "/dev/zero")
ARENA = "/pym-"


def picture(seed, width=40, height=30):
    """Return a smooth random RGB picture, which JPEG preserves well, another one for each seed."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (4, 5, 3), np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture
def folder(tmp_path):
    """Twelve JPEGs of different sizes in three class folders."""
    root = tmp_path / "images"
    for number in range(12):
        path = root / CLASSES[number % 3] / f"{number:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(number, 40 + 3 * number, 30 + 5 * (number % 4)).save(path, quality=90)
    return root


def _jpeg(seed):
    file = io.BytesIO()
    picture(seed, 40 + seed, 36).save(file, "JPEG", quality=90)
    return file.getvalue()


class Containers:
    """Thirty pictures, ``ant/00.jpg`` to ``cat/29.jpg``, and functions that write them to files.

    ``label`` has the number of the class, ``age`` a number, and ``split`` one of two texts.
    """

    def __init__(self, folder):
        self.folder = folder
        self.pictures = {
            f"{CLASSES[number // 10]}/{number:02d}.jpg": _jpeg(number) for number in range(30)
        }
        self.labels = [number // 10 for number in range(30)]
        self.ages = [number / 4 for number in range(30)]
        self.splits = ["val" if number % 5 == 0 else "train" for number in range(30)]

    def directory(self):
        root = self.folder / "images"
        for name, content in self.pictures.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return root

    def table(self, name="images.csv", delimiter=","):
        path = self.folder / name
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, delimiter=delimiter)
            writer.writerow(["image", "label", "age", "split"])
            for name, age, split in zip(self.pictures, self.ages, self.splits, strict=True):
                writer.writerow([f"images/{name}", name[:3], age, split])
        return path

    def tar(self, name="images.tar", numbers=range(30), *, labels=True):
        path = self.folder / name
        items = list(self.pictures.items())
        with tarfile.open(path, "w") as file:
            for number in numbers:
                key, content = items[number]
                facts = {"age": self.ages[number], "split": self.splits[number]}
                parts = {"jpg": content}
                if labels:
                    parts |= {"cls": key[:3].encode(), "json": json.dumps(facts).encode()}
                stem = f"{number:06d}" if labels else key.removesuffix(".jpg")
                for extension, data in parts.items():
                    member = tarfile.TarInfo(f"{stem}.{extension}")
                    member.size = len(data)
                    file.addfile(member, io.BytesIO(data))
        return path

    def zip(self, name="images.zip", compression=zipfile.ZIP_STORED):
        path = self.folder / name
        with zipfile.ZipFile(path, "w", compression) as file:
            for key, content in self.pictures.items():
                file.writestr(f"images/{key}", content)
        return path

    def parquet(self, name="images.parquet", **options):
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        path = self.folder / name
        table = pyarrow.table(
            {
                "image": [{"bytes": data, "path": key} for key, data in self.pictures.items()],
                "label": [key[:3] for key in self.pictures],
                "age": self.ages,
                "split": self.splits,
            }
        )
        parquet.write_table(table, path, **{"row_group_size": 7, **options})
        return path


@pytest.fixture(scope="session")
def containers_in():
    """A function that makes the same pictures in every kind of container, in a folder."""
    return Containers


@pytest.fixture
def containers(tmp_path):
    """The same pictures in every kind of container."""
    return Containers(tmp_path)


@pytest.fixture
def output(folder, tmp_path):
    """The pictures of ``folder``, built at 16×16."""
    path = tmp_path / "out.bin"
    memload.build(folder, path, size=16, num_workers=0)
    return path


@pytest.fixture(scope="session")
def tqdm_monitor():
    """Let tqdm start its thread and make its lock before `nothing_left_behind` looks."""
    tqdm.tqdm(range(1), file=io.StringIO()).close()


def _write_dataset(
    folder, name="made.bin", *, rows=(5,), shape=(4, 6, 3), descr="|u1", seed=0, **facts
):
    total = sum(rows)
    values = np.random.default_rng(seed).integers(0, 256, (total, *shape))
    pixels = values.astype(np.uint8 if descr == "|u1" else descr)
    shards = []
    for file, part in zip(
        shard_names(name, len(rows)), np.split(pixels, np.cumsum(rows)[:-1]), strict=True
    ):
        with (folder / file).open("wb") as shard:
            shard.write(npy_header(descr, part.shape) + part.tobytes())
        shards.append(Shard(file, len(part), 4096 + part.nbytes))
    index = Index(
        path=folder / name,
        arrays=(Array("image", descr, shape, tuple(shards)),),
        row=np.arange(total),
        flags=np.zeros(total, np.uint8),
        keys=Keys.of([f"{CLASSES[row % 3]}/{row}.jpg" for row in range(total)]),
        columns={"label": np.arange(total) % 3},
        crc32={"image": np.array([zlib.crc32(row.tobytes()) for row in pixels], np.uint32)},
        classes=CLASSES,
    )
    return replace(index, **facts).write((folder / name).with_suffix(".idx"))


@pytest.fixture(scope="session")
def write_dataset():
    """A function that writes a data set with random pixels into a folder, and returns its index.

    There is one sample for each row. ``facts`` replace fields of the index.
    """
    return _write_dataset


@pytest.fixture
def make_dataset(tmp_path):
    """The function of `write_dataset` for the temporary folder of the test."""
    return functools.partial(_write_dataset, tmp_path)


def _write_sparse(path, rows, shape, beginnings):
    row_bytes = math.prod(shape)
    shard = Shard(path.name, rows, HEADER_BYTES + rows * row_bytes)
    crc32 = np.full(rows, zlib.crc32(bytes(row_bytes)), np.uint32)
    with path.open("wb") as file:
        file.write(npy_header("|u1", (rows, *shape)))
        file.truncate(shard.bytes)
        for row, beginning in beginnings.items():
            file.seek(HEADER_BYTES + row * row_bytes)
            file.write(beginning)
            crc32[row] = zlib.crc32(beginning.ljust(row_bytes, b"\0"))
    return Index(
        path=path,
        arrays=(Array("image", "|u1", shape, (shard,)),),
        row=np.arange(rows),
        flags=np.zeros(rows, np.uint8),
        keys=Keys.of([""] * rows),
        columns={"label": np.arange(rows)},
        crc32={"image": crc32},
    ).write(path.with_suffix(".idx"))


@pytest.fixture(scope="session")
def write_sparse():
    """A function that writes a large data set of bytes, mostly zeros, which take no room on a disk.

    The beginnings of some rows are given. The labels are the numbers of the rows.
    """
    return _write_sparse


def _add_array(index, name, values, kind="array", **facts):
    """Write an array into a shard of memload's, or for the kind "npy" into a file of NumPy's."""
    path = index.path.with_name(f"{index.path.stem}.{name}.bin")
    if kind == "npy":
        with path.open("wb") as file:
            np.save(file, values)
    else:
        path.write_bytes(npy_header(values.dtype.str, values.shape) + values.tobytes())
    shard = Shard(path.name, len(values), path.stat().st_size)
    kind = "mask" if kind == "mask" else "array"
    array = Array(name, values.dtype.str, values.shape[1:], (shard,), kind)
    checksums = np.array([zlib.crc32(row.tobytes()) for row in values], np.uint32)
    changed = replace(index, arrays=(*index.arrays, array), crc32={**index.crc32, name: checksums})
    return replace(changed, **facts).write(index.path)


@pytest.fixture(scope="session")
def add_array():
    """A function that adds an array (rows, …) of a kind to a data set, and returns its index.

    The kind "npy" is an array in a file as NumPy writes it, whose header has 128 bytes. ``facts``
    replace fields of the index.
    """
    return _add_array


@pytest.fixture
def tamper():
    """A function that rewrites an index with changed metadata and tensors, and a correct fingerprint.

    ``change(metadata, tensors)`` changes both in place. With ``relist``, the lists of columns, tensors
    and checksums in the metadata follow the tensors.
    """

    def rewrite(path, change, relist=True):
        with safetensors.safe_open(path, framework="np") as file:
            metadata = json.loads(file.metadata()["memload"])
        tensors = safetensors.numpy.load_file(path)
        order = list(metadata["columns"])
        change(metadata, tensors)
        if relist and metadata.get("columns") == order:
            kept = [name for name in order if name in tensors]
            new = tensors.keys() - {"row", "flags", *order}
            metadata["columns"] = kept + sorted(name for name in new if "/" not in name)
        if relist:
            metadata["tensors"] = {
                name: {
                    "dtype": tensor.dtype.str,
                    "shape": list(tensor.shape),
                    "crc32": zlib.crc32(tensor.tobytes()),
                }
                for name, tensor in tensors.items()
            }
        metadata.pop("fingerprint", None)
        text = json.dumps(metadata, sort_keys=True, separators=(",", ":"))
        metadata["fingerprint"] = hashlib.sha256(text.encode()).hexdigest()
        path.write_bytes(safetensors.numpy.save(tensors, {"memload": json.dumps(metadata)}))
        return path

    return rewrite


class Held(NamedTuple):
    """What this process holds and a test has to give back. Empty where the system does not tell."""

    threads: frozenset[threading.Thread]
    children: frozenset[int]  #: process numbers, including ended ones that nobody waited for
    descriptors: frozenset[tuple[str, str]]  #: number, and path or name of a pipe or socket
    maps: frozenset[str]  #: address ranges of mapped files

    @classmethod
    def now(cls):
        """Take stock, within 0.3 ms."""
        children = {child.pid for child in multiprocessing.active_children()}
        for task in _names("/proc/self/task"):
            with contextlib.suppress(OSError):  # the thread has ended meanwhile
                numbers = Path(f"/proc/self/task/{task}/children").read_text().split()
                children.update(map(int, numbers))
        descriptors = set()
        for number in _names("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the descriptor of this listing itself
                descriptors.add((number, os.readlink(f"/proc/self/fd/{number}")))  # noqa: PTH115
        # multiprocessing keeps these until the process ends.
        tracker = multiprocessing.resource_tracker._resource_tracker
        server = multiprocessing.forkserver._forkserver
        kept = {str(tracker._fd), str(server._forkserver_alive_fd)}
        return cls(
            frozenset(t for t in threading.enumerate() if not t.name.startswith(TORCH_THREADS)),
            frozenset(children - {None, tracker._pid, server._forkserver_pid}),
            frozenset(d for d in descriptors if d[0] not in kept and not _is_kept(d[1])),
            frozenset(_names("/proc/self/map_files")),
        )

    def left(self, patience=0):
        """Describe what is held now but was not held then, after a collection of garbage."""
        if not self._more():
            return []
        deadline = time.monotonic() + patience  # for processes that have been told to end
        while True:
            gc.collect()  # only now: with torch loaded it takes longer than most tests
            more = self._more()
            if not more or time.monotonic() > deadline:
                return more
            time.sleep(0.05)

    def _more(self):
        now = Held.now()
        return [
            *(f"thread {thread.name}" for thread in now.threads - self.threads),
            *(f"process {child}" for child in now.children - self.children),
            *(
                f"descriptor {number} of {what}"
                for number, what in now.descriptors - self.descriptors
            ),
            *(f"map of {path}" for path in _mapped(now.maps - self.maps)),
        ]


def _names(folder):
    try:
        return os.listdir(folder)  # noqa: PTH208  # 0.2 ms less than with Path, twice in each test
    except OSError:
        return []


def _is_kept(path):
    return path.startswith(KEPT) or ".so" in path or ARENA in path


def _mapped(ranges):
    """Return the files mapped at these addresses, except libraries and the like."""
    files = []
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines() if ranges else ():
        addresses, *_, path = line.split(None, 5)
        start, stop = (int(end, 16) for end in addresses.split("-"))
        if f"{start:x}-{stop:x}" in ranges and not _is_kept(path):
            files.append(path)
    return files


@pytest.fixture(scope="session")
def failing_reads():
    """A context in which ``fails(descriptor, offset, size)`` says which `os.preadv` fail: EIO."""
    return _failing_reads


@contextlib.contextmanager
def _failing_reads(fails):
    preadv = os.preadv

    def fail(descriptor, buffers, offset):
        if fails(descriptor, offset, sum(memoryview(buffer).nbytes for buffer in buffers)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(descriptor, buffers, offset)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "preadv", fail)
        yield


@pytest.fixture
def held():
    """What finds leaks: ``before = held.now()``, later ``before.left()``."""
    return Held


@pytest.fixture(autouse=True)
def nothing_left_behind(request):
    """Fail a test that leaves a thread, a child process, a descriptor or a mapped file."""
    before = Held.now()
    yield
    if not request.node.stash.get(FAILED, False):  # the traceback of a failed test holds objects
        left = before.left(patience=5)
        assert not left, f"left behind: {', '.join(left)}"


@pytest.fixture(autouse=True)
def logging_as_before():
    """Undo what a command has set: later tests would log names that pytest-xdist cannot send."""
    logger = logging.getLogger("memload")
    handlers, level = logger.handlers[:], logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Note that a test has failed, for `nothing_left_behind`."""
    report = yield
    item.stash[FAILED] = report.failed
    return report


@pytest.fixture(scope="module", autouse=True)
def quick_collections():
    """Exclude what there is from collections of garbage: with torch's objects, each takes 0.4 s."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    """Let libraries find what they want to free."""
    gc.unfreeze()


def pytest_configure():
    """Let Ctrl-C end processes that tests start, even if a background shell ignores it."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Server:
    """Serves a folder by HTTP. ``fault`` says of a path and its first byte what goes wrong."""

    def __init__(self, folder):
        self.fault = lambda path, start: None
        self.has_ranges, self.status = True, None
        self.asked = []
        server = self

        class Handler(SimpleHTTPRequestHandler):
            def __init__(self, *arguments):
                super().__init__(*arguments, directory=str(folder))

            def log_message(self, *arguments):
                pass

            def do_HEAD(self):
                if server.status and self.path.endswith(".bin"):
                    self.send_error(server.status)
                else:
                    super().do_HEAD()

            def do_GET(self):
                given = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
                start = int(given[1]) if given else 0
                path = Path(self.translate_path(self.path))
                server.asked.append((path.name, start))
                fault = server.fault(path.name, start)
                if fault == "busy":
                    self.send_error(503)
                elif not path.exists():
                    self.send_error(404)
                elif server.status and path.suffix == ".bin":
                    self.send_error(server.status)
                else:
                    content = path.read_bytes()
                    if given and server.has_ranges:
                        content = content[start : int(given[2]) + 1]
                    self.send_response(206 if given and server.has_ranges else 200)
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    with contextlib.suppress(ConnectionError):
                        self.wfile.write(content[: len(content) // (2 if fault == "cut" else 1)])

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def rows_asked(self):
        """Return the ranges of rows that were asked for, without headers and indexes."""
        return [(name, start) for name, start in self.asked if start > 0]


@pytest.fixture(scope="session")
def fsspec_thread():
    """Let fsspec start its thread before `nothing_left_behind` looks."""
    pytest.importorskip("fsspec.asyn").get_loop()


@pytest.fixture
def serve(fsspec_thread):
    """A function that serves a folder by HTTP."""
    pytest.importorskip("aiohttp")
    servers = []

    def start(folder):
        servers.append(Server(folder))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
