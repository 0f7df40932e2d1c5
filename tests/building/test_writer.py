"""Shards under construction: rows come back as they were written, from any number of writers."""

import os
from pathlib import Path

import pytest

from memload.building.writer import ShardWriter
from memload.storage.format import npy_header, shard_names
from memload.storage.index import Array, Shard


def written(folder: Path, rows: tuple[int, ...] = (2, 1)) -> ShardWriter:
    names = shard_names("out.bin", len(rows))
    shards = tuple(
        Shard(name, held, 4096 + 6 * held) for name, held in zip(names, rows, strict=True)
    )
    writer = ShardWriter(folder, Array("image", "|u1", (1, 2, 3), shards))
    writer.create()
    return writer


def test_shards_begin_as_zeros_at_full_size(tmp_path: Path) -> None:
    written(tmp_path)
    first, second = sorted(tmp_path.iterdir())
    assert first.read_bytes() == npy_header("|u1", (2, 1, 2, 3)) + bytes(12)
    assert second.read_bytes() == npy_header("|u1", (1, 1, 2, 3)) + bytes(6)


def test_several_writers_write_the_same_files(tmp_path: Path) -> None:
    one, other = written(tmp_path), written(tmp_path)
    other.write(2, b"third.")
    one.write(0, b"first.")
    other.write(1, b"second")
    assert [one.read(row) for row in range(3)] == [b"first.", b"second", b"third."]
    for writer in (one, other):
        writer.close()


def test_a_blanked_row_is_zeros(tmp_path: Path) -> None:
    writer = written(tmp_path)
    writer.write(0, b"first.")
    writer.write(1, b"second")
    for _ in range(2):
        writer.blank(0)
    assert [writer.read(0), writer.read(1)] == [bytes(6), b"second"]
    writer.close()


def test_writes_that_are_cut_short_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: real_write(file, data[:2], offset))
    writer = written(tmp_path, (1,))
    writer.write(0, b"abcdef")
    assert writer.read(0) == b"abcdef"
    writer.close()
    assert (tmp_path / "out.bin").read_bytes() == npy_header("|u1", (1, 1, 2, 3)) + b"abcdef"
