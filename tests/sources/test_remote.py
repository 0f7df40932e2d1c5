"""Folders and tables at URLs."""

import hashlib

import numpy as np
import pytest

import memload
from memload.sources import remote

from .conftest import content, touch

pytest.importorskip("fsspec")


@pytest.fixture
def no_waits(monkeypatch):
    monkeypatch.setattr(remote, "_WAITS", (0, 0, 0))


@pytest.fixture
def bucket():
    """A folder of fsspec's in memory."""
    import fsspec

    system = fsspec.filesystem("memory")
    yield lambda name, data: system.pipe(f"/bucket/{name}", data)
    system.rm("/bucket", recursive=True)


def test_names_may_have_special_characters(bucket, containers, tmp_path):
    names = ["a b/[1]*?.jpg", "é/#%20.jpg"]
    for name, data in zip(names, containers.pictures.values(), strict=False):
        bucket(name, data)
    memload.build("memory://bucket", tmp_path / "out.bin", size=8, num_workers=0)
    dataset = memload.MemmapDataset(tmp_path / "out.bin")
    assert (list(dataset.keys), dataset.classes) == (names, ["a b", "é"])


def test_a_table_lists_images_on_a_server(bucket, containers, tmp_path):
    for name, data in containers.pictures.items():
        bucket(f"images/{name}", data)
    bucket("images.csv", containers.table().read_bytes())
    for source, options in [
        (containers.folder / "images.csv", {"root": "memory://bucket"}),
        ("memory://bucket/images.csv", {"masks": {"mask": "{image}"}}),
    ]:
        opened = memload.open_source(source, **options)
        records = opened.several([29, 0])
        assert [content(record.image) for record in records] == [
            containers.pictures["cat/29.jpg"],
            containers.pictures["ant/00.jpg"],
        ]
        assert opened.values["label"].tolist() == containers.labels
    assert records[0].arrays == {"mask": containers.pictures["cat/29.jpg"]}


def test_what_is_not_there_is_an_error(bucket, no_waits):
    bucket("notes.txt", b"")
    for url, message in [
        ("memory://bucket", "has no image files"),
        ("memory://none", "cannot be listed: it does not exist"),
        ("memory://bucket/none.csv", "cannot be read: it does not exist"),
        ("nothing://bucket", "cannot be opened"),
    ]:
        with pytest.raises(memload.SourceError, match=message):
            memload.open_source(url)


@pytest.mark.slow
def test_a_web_server_is_asked_again_and_given_up(tmp_path, serve, no_waits):
    root = touch(tmp_path / "i", *(f"a/{number:02d}.jpg" for number in range(40)))
    names = "\n".join(f"a/{number:02d}.jpg" for number in range(40))
    (tmp_path / "t.csv").write_text(f"path\n{names}\n")
    server = serve(root)
    faulty = set()
    server.fault = lambda name, start: faulty.discard(name) or "busy" if name in faulty else None
    source = memload.open_source(tmp_path / "t.csv", root=server.url)
    faulty.add("03.jpg")
    digests = {hashlib.sha256(source[row].image).digest() for row in range(40)}
    assert len(digests) == 40
    assert server.asked.count(("03.jpg", 0)) == 2
    assert isinstance(source.several([5])[0].image, bytes)
    missing = source.take(np.array([0]))
    (root / "a/00.jpg").unlink()
    assert isinstance(missing.several([0])[0], FileNotFoundError)
    server.fault = lambda name, start: "busy"
    with pytest.raises(memload.BuildError, match="files in a row cannot be fetched"):
        source.several(range(1, 40))
