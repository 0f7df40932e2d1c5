"""Small data sets to test on, and a check on every test that it leaves nothing behind."""

import contextlib
import gc
import hashlib
import json
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from PIL import Image

import memload
from memload.storage.format import npy_header, shard_names
from memload.storage.index import Array, Index, Shard
from memload.storage.keys import Keys

CLASSES = ("ant", "bee", "cat")
#: Threads that torch.compile starts and keeps; none of memload's is named so.
TORCHS_OWN = ("InductorSubproc", "subproc_worker_timer", "ThreadPoolExecutor-")
#: What multiprocessing keeps the memory in that it shares, for the next that is shared.
ARENA = "/pym-"
FAILED = pytest.StashKey[bool]()
#: Where files may stay mapped: libraries, and what they read.
INSTALLED = (sys.prefix, sys.base_prefix, "/usr/", "/lib", "/opt/")
#: A driver opens and maps more of its device as it is used, and memory that is no file's.
DEVICES = ("/dev/nvidia", "/dev/zero")


def picture(seed: int, width: int = 40, height: int = 30) -> Image.Image:
    """A smooth random RGB picture: what JPEG keeps well, and each seed another."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (4, 5, 3), np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve JPEGs of different sizes in three class folders."""
    root = tmp_path / "images"
    for number in range(12):
        path = root / CLASSES[number % 3] / f"{number:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(number, 40 + 3 * number, 30 + 5 * (number % 4)).save(path, quality=90)
    return root


@pytest.fixture
def output(folder: Path, tmp_path: Path) -> Path:
    """The folder's pictures, built at 16×16."""
    path = tmp_path / "out.bin"
    memload.build(folder, path, size=16, num_workers=0)
    return path


@pytest.fixture
def make_dataset(tmp_path: Path) -> Callable[..., Index]:
    """A function that writes a data set without a build: random pixels by NumPy alone, and their index.

    ``facts`` replace what the index says; keys, labels and rows are those of one sample a row.
    """

    def make(
        name: str = "made.bin",
        *,
        rows: Sequence[int] = (5,),
        shape: tuple[int, int, int] = (4, 6, 3),
        descr: str = "|u1",
        seed: int = 0,
        **facts: Any,
    ) -> Index:
        total = sum(rows)
        values = np.random.default_rng(seed).integers(0, 256, (total, *shape))
        pixels = values.astype(np.uint8 if descr == "|u1" else descr)
        shards = []
        for file, part in zip(
            shard_names(name, len(rows)), np.split(pixels, np.cumsum(rows)[:-1]), strict=True
        ):
            with (tmp_path / file).open("wb") as shard:
                shard.write(npy_header(descr, part.shape) + part.tobytes())
            shards.append(Shard(file, len(part), 4096 + part.nbytes))
        index = Index(
            path=tmp_path / name,
            arrays=(Array("image", descr, shape, tuple(shards)),),
            row=np.arange(total),
            flags=np.zeros(total, np.uint8),
            keys=Keys.of([f"{CLASSES[row % 3]}/{row}.jpg" for row in range(total)]),
            columns={"label": np.arange(total) % 3},
            crc32={"image": np.array([zlib.crc32(row.tobytes()) for row in pixels], np.uint32)},
            classes=CLASSES,
        )
        return replace(index, **facts).write((tmp_path / name).with_suffix(".idx"))

    return make


@pytest.fixture
def tamper() -> Callable[..., Path]:
    """A function that rewrites an index with other metadata and tensors, whose fingerprint is right again.

    ``change(metadata, tensors)`` works on both in place; ``relist`` says whether the metadata's lists of columns,
    tensors and checksums follow.
    """

    def rewrite(
        path: Path, change: Callable[[Any, dict[str, np.ndarray]], object], relist: bool = True
    ) -> Path:
        with safetensors.safe_open(path, framework="np") as file:
            metadata = json.loads(file.metadata()["memload"])
        tensors = safetensors.numpy.load_file(path)
        order = list(metadata["columns"])
        change(metadata, tensors)
        if relist and metadata.get("columns") == order:
            ours = {"row", "flags", "key/offsets", "key/bytes", "crc32/image"}
            kept = [name for name in order if name in tensors]
            metadata["columns"] = kept + sorted(tensors.keys() - ours - set(order))
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
    """What this process holds that a test is to give back.

    Where the system does not list descriptors, children or maps, those are empty: see `pytest_report_header`.
    """

    threads: frozenset[threading.Thread]
    children: frozenset[
        int
    ]  #: process numbers, also of those that have ended and that nobody has waited for
    descriptors: frozenset[
        tuple[str, str]
    ]  #: number, and what it is: the path of a file, or a pipe's or socket's name
    maps: frozenset[str]  #: address ranges of mapped files

    @classmethod
    def now(cls) -> "Held":
        """Look, which takes 0.3 ms."""
        children = {
            child.pid for child in multiprocessing.active_children() if child.pid is not None
        }
        for task in _listed("/proc/self/task"):
            with contextlib.suppress(
                FileNotFoundError
            ):  # it ended meanwhile, or the kernel does not tell
                children.update(
                    map(int, Path(f"/proc/self/task/{task}/children").read_text().split())
                )
        descriptors = {(number, _target(number)) for number in _listed("/proc/self/fd")}
        kept_children, kept_descriptors = _pythons_own()
        return cls(
            frozenset(
                t
                for t in threading.enumerate()
                if t.is_alive() and not t.name.startswith(TORCHS_OWN)
            ),
            frozenset(children - kept_children),
            frozenset(
                (number, what)
                for number, what in descriptors
                if what
                and int(number) not in kept_descriptors
                and ARENA not in what
                and not what.startswith(DEVICES)
            ),
            frozenset(_listed("/proc/self/map_files")),
        )

    def left(self, patience: float = 0) -> list[str]:
        """Say what is held now and was not then, though nothing refers to it any more: nothing, as it should be."""
        if not self._grown():
            return []
        gc.collect()  # only then, since with torch loaded it takes longer than most tests
        deadline = time.monotonic() + patience  # for processes that have been told to end
        while (grown := self._grown()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return grown

    def _grown(self) -> list[str]:
        now = Held.now()
        return [
            *(f"thread {thread.name}" for thread in now.threads - self.threads),
            *(f"process {child}" for child in now.children - self.children),
            *(
                f"descriptor {number} of {what}"
                for number, what in now.descriptors - self.descriptors
            ),
            *(f"map of {path}" for path in _data_files(now.maps - self.maps)),
        ]


def pytest_configure() -> None:
    """Have Ctrl-C end what tests start, also where these were begun in the background, by a shell that ignores it."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> list[str]:
    """Say what is not looked for here."""
    unseen = {"descriptors": "fd", "child processes": "task", "maps": "map_files"}
    missing = [what for what, name in unseen.items() if not _listed(f"/proc/self/{name}")]
    return (
        [f"leaks of {', '.join(missing)} are not looked for: this system does not list them"]
        if missing
        else []
    )


@pytest.fixture
def held() -> type[Held]:
    """What finds leaks: ``before = held.now()``, then ``before.left()``."""
    return Held


@pytest.fixture(scope="module")
def quick_collections() -> Iterator[None]:
    """Keep torch's objects out of the collections that look for leaks, which take 0.2 s a test with them."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a thread, a child process, a descriptor or a mapped file."""
    before = Held.now()
    yield
    if not request.node.stash.get(
        FAILED, False
    ):  # one that failed: its traceback holds what it was at
        left = before.left(patience=5)
        assert not left, f"left behind: {', '.join(left)}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note that a test has failed, for `nothing_left_behind`."""
    report = yield
    item.stash[FAILED] = report.failed
    return report


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208  # before and after every test: 0.2 ms less than with Path
    except OSError:
        return []


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115  # as above
    except OSError:  # that of the listing itself
        return ""


def _pythons_own() -> tuple[set[int], set[int]]:
    """Return children and descriptors that multiprocessing keeps until the end, once a worker was spawned."""
    tracker, server = (
        multiprocessing.resource_tracker._resource_tracker,
        multiprocessing.forkserver._forkserver,
    )
    return {tracker._pid, server._forkserver_pid} - {None}, {
        tracker._fd,
        server._forkserver_alive_fd,
    } - {None}


def _data_files(ranges: Set[str]) -> list[str]:
    """Return the files mapped there that are neither a library nor another part of what is installed."""
    files = []
    for line in Path("/proc/self/maps").read_bytes().splitlines() if ranges else ():
        place, *_, path = line.split(None, 5)
        text = os.fsdecode(path)
        start, stop = (int(end, 16) for end in place.split(b"-"))
        if f"{start:x}-{stop:x}" not in ranges:
            continue
        if not text.startswith(INSTALLED + DEVICES) and ".so" not in text and ARENA not in text:
            files.append(text)
    return files
