"""The list of the source: made once, by one part, and read safely by the others."""

import hashlib
import io
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import memload
from memload.building.parts import listing
from memload.building.parts.listing import read_source, write_source
from memload.building.sources.beside import FilesBeside
from memload.building.sources.classes import PinnedClasses
from memload.building.sources.new_samples import NewSamples

OPTIONS: dict[str, Any] = {"size": 8, "num_workers": 0, "progress": False}


def masks(containers: Any) -> Path:
    """Write a mask for each picture, and return their folder."""
    folder: Path = containers.folder / "masks"
    for name, content in containers.pictures.items():
        with Image.open(io.BytesIO(content)) as picture:
            width, height = picture.size
        path = (folder / name).with_suffix(".png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((height, width), 3, np.uint8)).save(path)
    return folder


def numpy_file(containers: Any) -> Path:
    path: Path = containers.folder / "images.npy"
    np.save(path, np.random.default_rng(0).integers(0, 256, (30, 8, 8, 3), np.uint8))
    return path


def tars(containers: Any) -> list[Path]:
    return [containers.tar(f"{half}.tar", range(15 * half, 15 * half + 15)) for half in (0, 1)]


def pattern(containers: Any) -> str:
    tars(containers)
    return f"{containers.folder}/[01].tar"


def existing(containers: Any) -> Path:
    output: Path = containers.folder / "existing.bin"
    images = containers.directory()
    memload.build(images, output, masks=masks(containers), **OPTIONS)
    return output


#: What opens each kind of source, and the options it is built with.
KINDS: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "folder": (lambda c: c.directory(), {}),
    "table": (lambda c: (c.directory(), c.table())[1], {}),
    "tar": (lambda c: c.tar(), {}),
    "tars": (tars, {}),
    "pattern": (pattern, {}),
    "zip": (lambda c: c.zip(), {}),
    "parquet": (lambda c: c.parquet(), {}),
    "npy": (numpy_file, {"mode": "array"}),
    "existing": (existing, {}),
}


def assert_same(one: Any, other: Any) -> None:
    """Compare the records of two sources, and what describes them."""
    assert list(one.keys) == list(other.keys)
    for name in ("classes", "schema", "notes"):
        assert getattr(one, name) == getattr(other, name)
    for index in (0, len(one) - 1):
        first, second = one[index], other[index]
        assert (first.key, first.state) == (second.key, second.state)
        assert str(first.columns) == str(second.columns)
        assert np.array_equal(first.image, second.image)
        assert str(first.arrays) == str(second.arrays)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_source_is_read_as_it_was_written(
    containers: Any, tmp_path: Path, kind: str
) -> None:
    paths = KINDS[kind][0](containers)
    source = memload.open_source(paths if isinstance(paths, list) else str(paths))
    source[3]  # what reading has opened is not written
    digest = write_source(source, tmp_path / "source")
    assert (tmp_path / "source").stat().st_size < 10_000  # no pixels
    assert_same(read_source(tmp_path / "source", digest), source)


@pytest.mark.parametrize("kind", ["masks", "pinned", "new"])
def test_sources_around_others_are_read_as_they_were_written(
    containers: Any, tmp_path: Path, kind: str
) -> None:
    images = memload.ImageFolder(containers.directory())
    if kind == "masks":
        source: Any = FilesBeside(images, masks={"mask": masks(containers)})
    elif kind == "pinned":
        source = PinnedClasses(images, ["cat", "ant", "bee"])
    else:
        few = containers.tar("few.tar", range(3), labels=False)
        memload.build(few, tmp_path / "few.bin", **OPTIONS)
        source = NewSamples(images, tmp_path / "few.bin")
    digest = write_source(source, tmp_path / "source")
    assert_same(read_source(tmp_path / "source", digest), source)


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_first_part_lists_the_source(
    containers: Any,
    tmp_path: Path,
    digests: Callable[[Path], dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    make, options = KINDS[kind]
    source, options = make(containers), OPTIONS | options
    alone, shared = tmp_path / "alone" / "out.bin", tmp_path / "shared" / "out.bin"
    for output in (alone, shared):
        output.parent.mkdir()
    memload.build(source, alone, shard_size=4096 + 4 * 192, **options)
    build = partial(memload.build, source, shared, shard_size=4096 + 4 * 192, **options)
    build(part=(1, 3))

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("the source is opened again")

    monkeypatch.setattr("memload.building.preparation.open_source", fail)
    build(part=(0, 3))
    assert build(part=(2, 3)).is_published
    assert digests(shared) == digests(alone)


def test_other_parts_list_no_folder_of_the_source(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[str] = []

    def noting(function: Any) -> Any:
        def note(path: Any = ".") -> Any:
            listed.append(str(path))
            return function(path)

        return note

    for name in ("scandir", "listdir"):
        monkeypatch.setattr(os, name, noting(getattr(os, name)))
    counts = []
    for i in range(3):
        memload.build(pictures, tmp_path / "out.bin", part=(i, 3), **OPTIONS)
        counts.append(sum(path.startswith(str(pictures)) for path in listed))
        listed.clear()
    assert counts[0] >= 4  # three folders of classes
    assert counts[1:] == [0, 0]


def test_what_changes_in_the_source_is_not_taken_in(pictures: Path, tmp_path: Path) -> None:
    build = partial(memload.build, pictures, tmp_path / "out.bin", **OPTIONS)
    build(part=(0, 2))
    first = sorted((pictures / "class0").iterdir())[0]
    (pictures / "class0" / "99999.jpg").write_bytes(first.read_bytes())
    assert build(part=(1, 2)).samples == 40


@pytest.mark.slow
@pytest.mark.parametrize("form", ["folder", "archive"])
def test_a_folder_at_a_url_is_listed_once_and_an_archive_is_copied_by_each_part(
    containers: Any,
    tmp_path: Path,
    start: Callable[..., "subprocess.Popen[str]"],
    form: str,
) -> None:
    pytest.importorskip("aiohttp")
    root, archive = containers.directory(), containers.tar()
    asked: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(containers.folder))

        def do_GET(self) -> None:
            asked.append(self.path)
            super().do_GET()

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        name = root.name if form == "folder" else archive.name
        url = f"http://127.0.0.1:{server.server_port}/{name}"
        command = ("build", url, tmp_path / "out.bin", "-s", "8", "-j", "0", "--part")
        lists = []
        for i in range(2):
            process = start(*command, f"{i}/2")
            _, error = process.communicate(timeout=60)
            assert process.returncode == 0, error
            lists.append(sum(path.endswith(("/", "images", ".tar")) for path in asked))
            asked.clear()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert (lists[0] > 0, lists[1] > 0) == (True, form == "archive")
    assert memload.verify(tmp_path / "out.bin").ok


class Payload:
    """Is pickled as the call of a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def naming(module: str, name: str) -> bytes:
    """Return a pickle that names something, as protocol 4 does: also attributes, with dots."""
    texts = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name))
    return b"\x80\x04" + texts + b"\x93."


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("posix", "system"),
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("operator", "attrgetter"),
        ("functools", "partial"),
        ("subprocess", "Popen"),
        ("pathlib", "Path"),
        ("pathlib", "PosixPath.unlink"),
        ("numpy", "load"),
        ("numpy", "dtype"),
        ("numpy", "ndarray"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy", "fromfile"),
        ("memload", "build"),
        ("memload.building.workspace", "remove"),
        ("memload.building.sources.opening", "os.system"),
        ("memload.building.sources.opening", "shutil.rmtree"),
        ("memload.building.sources.remote", "download"),
        ("memload.building.sources.folder", "ImageFolder.__init__"),
        ("memload.building.sources.dataset", "DatasetSource"),
        ("memload.storage.keys", "Keys.__init__.__globals__"),
    ],
)
def test_a_source_that_names_other_code_is_refused(tmp_path: Path, module: str, name: str) -> None:
    content = naming(module, name)
    (tmp_path / "source").write_bytes(content)
    message = rf"source cannot be read: it names {module}\.{name}, which no source consists of"
    with pytest.raises(memload.BuildError, match=message):
        read_source(tmp_path / "source", hashlib.sha256(content).hexdigest())


@pytest.mark.parametrize("protocol", range(6))
def test_no_function_is_called_by_a_source(tmp_path: Path, protocol: int) -> None:
    victim = tmp_path / "victim"
    victim.touch()
    payload = pickle.dumps(Payload(os.unlink, str(victim)), protocol)
    (tmp_path / "source").write_bytes(payload)
    with pytest.raises(memload.BuildError, match="which no source consists of"):
        read_source(tmp_path / "source", hashlib.sha256(payload).hexdigest())
    assert victim.exists()


@pytest.mark.parametrize("descr", ["|O", "|V8", "<M8[s]", "i4,O", "|O8", "<U9999999"])
def test_arrays_of_other_things_than_numbers_and_text_are_refused(
    tmp_path: Path, descr: str
) -> None:
    """Bytes that are taken for pointers to objects could run any code."""
    payload = pickle.dumps(Payload(listing._array, descr, (1,), b"A" * 8))
    (tmp_path / "source").write_bytes(payload)
    with pytest.raises(memload.BuildError, match="cannot be read: it has an array of"):
        read_source(tmp_path / "source", hashlib.sha256(payload).hexdigest())


@pytest.mark.parametrize("damage", ["removed", "empty", "half", "other bytes", "another object"])
@pytest.mark.parametrize("by_executor", [False, True], ids=["part", "executor"])
def test_a_source_whose_list_is_damaged_is_listed_again(
    pictures: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: str,
    by_executor: bool,
) -> None:
    build = partial(memload.build, pictures, tmp_path / "out.bin", **OPTIONS)
    build(part=(0, 2))
    path = tmp_path / "out.building" / "source"
    content = path.read_bytes()
    if damage == "removed":
        path.unlink()
    else:
        path.write_bytes(
            {
                "empty": b"",
                "half": content[: len(content) // 2],
                "other bytes": b"\xff" * 100,
                "another object": pickle.dumps({"a": 1}),
            }[damage]
        )
    with ThreadPoolExecutor(1) as executor:
        how = {"executor": executor} if by_executor else {"part": (1, 2)}
        report = build(shard_size=4096 + 5 * 192, **how)
    assert report.is_published
    assert report.converted == 20  # what part 0 had done is kept
    line = f"{path} cannot be read: it is damaged. So the source is listed again"
    assert (line in caplog.text) == (damage != "removed")


#: Lists slowly, and says so. The second argument is how many seconds it takes.
SLOW = """
import sys, time
import memload
from memload.building.sources import folder

images, output, seconds, part, timeout = sys.argv[1:]
original = folder.ImageFolder.__init__

def slow(self, *arguments, **options):
    print("listing", flush=True)
    time.sleep(float(seconds))
    original(self, *arguments, **options)

folder.ImageFolder.__init__ = slow
report = memload.build(images, output, size=8, shard_size=4096 + 5 * 192, num_workers=1,
                       part=(int(part), 2), lock_timeout=float(timeout), progress=False)
print("published" if report.is_published else "not published", flush=True)
"""


def slow_part(
    pictures: Path, output: Path, seconds: float, part: int, timeout: float
) -> "subprocess.Popen[str]":
    arguments = [str(pictures), str(output), str(seconds), str(part), str(timeout)]
    return subprocess.Popen(
        [sys.executable, "-c", SLOW, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_part_that_is_killed_while_it_lists_leaves_nothing(
    pictures: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.bin"
    with slow_part(pictures, output, 100, 0, 150) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == "listing\n"
        with slow_part(pictures, output, 0, 1, 150) as waiting:
            assert waiting.stdout is not None
            killed.send_signal(signal.SIGKILL)
            assert waiting.stdout.read() == "listing\nnot published\n"
    assert memload.build(
        pictures, output, shard_size=4096 + 5 * 192, part=(0, 2), **OPTIONS
    ).is_published


@pytest.mark.slow
def test_parts_that_begin_at_once_wait_for_the_one_that_lists_however_long_it_takes(
    pictures: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.bin"
    # A busy machine may leave a sign of life 4 s late.
    processes = [slow_part(pictures, output, 24, part, 8) for part in (0, 1)]
    said = [process.communicate(timeout=90) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert sum("listing" in text for text, _ in said) == 1
    assert "published" in [text.splitlines()[-1] for text, _ in said]
    assert memload.verify(output).ok


@pytest.mark.slow
def test_the_plain_command_joins_a_build_in_parts_that_is_being_begun(
    pictures: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.bin"
    with slow_part(pictures, output, 3, 0, 150) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "listing\n"
        options = {**OPTIONS, "shard_size": 4096 + 5 * 192, "num_workers": 1}
        assert memload.build(pictures, output, **options).is_published
        errors = first.communicate(timeout=60)[1]
    assert first.returncode == 0, errors
