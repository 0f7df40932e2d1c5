"""Sources on a server: fsspec's memory, and a local HTTP server."""

import functools
import hashlib
import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memload.building.sources import remote
from memload.building.sources.opening import open_source
from memload.errors import DecodeError, DependencyError, SourceError

fsspec = pytest.importorskip("fsspec")
from fsspec.registry import known_implementations  # noqa: E402  # only if it is installed


@pytest.fixture
def memory(containers: Any) -> Iterator[Any]:
    """fsspec's memory with the pictures below ``/bucket/train``."""
    file_system = fsspec.filesystem("memory")
    for name, content in containers.pictures.items():
        file_system.pipe(f"/bucket/train/{name}", content)
    yield file_system
    file_system.rm("/bucket", recursive=True)


def contents(source: Any) -> list[Any]:
    return [record.image for record in source]


def test_a_remote_folder_is_read_like_a_folder(memory: Any, containers: Any) -> None:
    memory.pipe("/bucket/train/notes.txt", b"")
    source = open_source("memory://bucket/train")
    assert source.classes == ["ant", "bee", "cat"]
    assert list(source.keys) == list(containers.pictures)
    assert contents(source) == list(containers.pictures.values())
    assert any("skipped 1 other files" in note for note in source.notes)


def test_several_files_are_fetched_at_once(memory: Any, containers: Any) -> None:
    source = open_source("memory://bucket/train/")
    records = source.__getitems__([4, 0, 29])
    expected = list(containers.pictures.values())
    assert [record.image for record in records] == [expected[4], expected[0], expected[29]]
    assert [record.columns["label"] for record in records] == [0, 0, 2]


def test_masks_lie_on_this_machine(memory: Any, containers: Any, tmp_path: Path) -> None:
    names = [name.replace(".jpg", ".png") for name in containers.pictures]
    for name in names[2:]:
        (tmp_path / "masks" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "masks" / name).touch()
    source = open_source("memory://bucket/train", masks=tmp_path / "masks")
    records = source.__getitems__([29, 0, 2])
    assert [record.arrays.get("mask") for record in records] == [
        tmp_path / "masks" / names[29],
        None,
        tmp_path / "masks" / names[2],
    ]
    assert [record.image for record in records] == [
        list(containers.pictures.values())[number] for number in (29, 0, 2)
    ]


def test_a_missing_file_costs_itself(
    memory: Any, containers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_WAITS", (0.0, 0.0, 0.0))
    source = open_source("memory://bucket/train")
    memory.rm("/bucket/train/ant/01.jpg")
    first, second, third = source.__getitems__([0, 1, 2])
    assert isinstance(second, FileNotFoundError)
    assert [first.image, third.image] == [containers.pictures[f"ant/0{n}.jpg"] for n in (0, 2)]
    with pytest.raises(FileNotFoundError):
        source[1]


def test_a_file_that_fails_twice_is_fetched_in_the_end(
    memory: Any, containers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_WAITS", (0.0, 0.0, 0.0))
    source = open_source("memory://bucket/train")
    asked: list[str] = []
    read = type(memory).cat_file

    def failing(self: Any, path: str, **options: Any) -> Any:
        asked.append(path)
        if len(asked) < 3:
            raise ConnectionError("lost")
        return read(self, path, **options)

    monkeypatch.setattr(type(memory), "cat_file", failing)
    assert source[1].image == containers.pictures["ant/01.jpg"]
    assert len(asked) == 3


@pytest.mark.parametrize("kind", ["table", "tar", "zip", "parquet"])
def test_remote_files_are_copied_and_removed(memory: Any, containers: Any, kind: str) -> None:
    path = getattr(containers, kind)()
    memory.pipe(f"/bucket/{path.name}", path.read_bytes())
    for name, content in containers.pictures.items():
        memory.pipe(f"/bucket/images/{name}", content)
    source = open_source(f"memory://bucket/{path.name}")
    assert source.classes == ["ant", "bee", "cat"]
    assert contents(source) == list(containers.pictures.values())


def test_copies_are_removed_with_the_source(
    memory: Any, containers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = containers.tar()
    memory.pipe("/bucket/x.tar", path.read_bytes())
    source = open_source("memory://bucket/x.tar")
    assert list(tmp_path.glob("memload-*/x.tar"))
    del source
    assert not list(tmp_path.glob("memload-*"))


@pytest.mark.parametrize("name", ["bad.tar", "bad.zip", "bad.npy", "bad.parquet", "bad.csv"])
def test_an_error_of_a_copy_names_the_url_and_leaves_nothing(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    memory.pipe(f"/bucket/{name}", b"\xffbad")
    with pytest.raises(SourceError, match=rf"^memory://bucket/{name}") as error:
        open_source(f"memory://bucket/{name}")
    assert str(tmp_path) not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_damaged_copy_is_named_without_its_temporary_folder(
    memory: Any, containers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    memory.pipe("/bucket/x.zip", containers.zip().read_bytes().replace(b"JFIF", b"JFIX"))
    source = open_source("memory://bucket/x.zip")
    with pytest.raises(DecodeError, match=r"^x\.zip is damaged"):
        source[0]


def test_a_remote_parquet_file_of_paths_is_refused(memory: Any, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"image": ["a.jpg"]}), tmp_path / "x.parquet")
    memory.pipe("/bucket/x.parquet", (tmp_path / "x.parquet").read_bytes())
    with pytest.raises(SourceError, match=r"memory://bucket/x\.parquet holds the paths"):
        open_source("memory://bucket/x.parquet")


def test_a_replaced_file_of_the_same_size_has_another_state(memory: Any, containers: Any) -> None:
    data = containers.tar().read_bytes()
    states = []
    for content in (data, data, data.replace(b"JFIF", b"JFIX")):
        memory.pipe("/bucket/x.tar", content)
        states.append(open_source("memory://bucket/x.tar")[0].state)
    assert states[0] == states[1] != states[2]


def test_a_local_table_may_list_remote_images(memory: Any, containers: Any) -> None:
    path = containers.folder / "x.csv"
    path.write_text("p,label\nant/00.jpg,1\ncat/29.jpg,5\n")
    source = open_source(path, root="memory://bucket/train")
    assert contents(source) == [containers.pictures[name] for name in ("ant/00.jpg", "cat/29.jpg")]
    assert source.columns["label"].tolist() == [1, 5]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://nothing/here", "does not exist"),
        ("memory://nothing/x*.tar", "no file has such a name"),
        ("nonsense://x/y", "nonsense"),
        ("memory://bucket/none.tar", "cannot be copied: it does not exist"),
        ("memory://bucket/train/photo.jpg", r"single image.* folder, memory://bucket/train\."),
    ],
)
def test_a_wrong_url_is_an_error(url: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_WAITS", (0.0,))
    with pytest.raises(SourceError, match=message):
        open_source(url)


def test_a_missing_protocol_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        known_implementations,
        "made-up",
        {"class": "nope.Nope", "err": "Install nope"},
    )
    with pytest.raises(DependencyError, match="Install nope"):
        open_source("made-up://bucket/train")


def test_a_folder_on_a_web_server(containers: Any) -> None:
    """In a process of its own, as fsspec starts a thread that never ends."""
    pytest.importorskip("aiohttp")
    for old, new in (("ant/00.jpg", "ant/00 b.jpg"), ("ant/01.jpg", "ant/00%20b.jpg")):
        containers.pictures[new] = containers.pictures.pop(old)
    containers.pictures["ant/0?#.jpg"] = containers.pictures.pop("ant/02.jpg")
    containers.pictures = dict(sorted(containers.pictures.items()))
    handler = functools.partial(Quiet, directory=str(containers.directory()))
    script = (
        "import sys, hashlib; from memload.building.sources.opening import open_source\n"
        "source = open_source(sys.argv[1])\n"
        "records = source.__getitems__(range(len(source)))\n"
        "print(source.classes, hashlib.sha256(b''.join(r.image for r in records)).hexdigest())"
    )
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            command = [sys.executable, "-c", script, url]
            printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        finally:
            server.shutdown()
            thread.join()
    digest = hashlib.sha256(b"".join(containers.pictures.values())).hexdigest()
    assert printed.split("]")[1].strip() == digest
    assert "['ant', 'bee', 'cat']" in printed


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""
