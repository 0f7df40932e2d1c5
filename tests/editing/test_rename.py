"""Another name for pixels and index together."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import memload
from memload.storage.index import Index

Make = Callable[..., Index]
Rows = Callable[..., np.ndarray]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_all_files_of_a_data_set_get_the_new_name(
    make_dataset: Make, tmp_path: Path, rows_in: Rows
) -> None:
    index = make_dataset("out.bin", rows=(3, 4), columns={"age": np.arange(7)}, classes=None)
    (tmp_path / "out.rejects.csv").write_text("path,reason\n")
    report = memload.rename(tmp_path / "out.bin", tmp_path / "photos.bin")
    assert names(tmp_path) == [
        "photos-00000-of-00002.bin",
        "photos-00001-of-00002.bin",
        "photos.idx",
        "photos.rejects.csv",
    ]
    new = Index.open(tmp_path / "photos.bin")
    assert (list(new.keys), new.columns["age"].tolist()) == (list(index.keys), [*range(7)])
    assert rows_in(new).shape == (7, 4, 6, 3)
    assert memload.verify(tmp_path / "photos.bin").ok
    assert str(report) == f"{tmp_path / 'photos.idx'}: 7 samples"


def test_other_arrays_follow_and_files_of_other_names_stay(
    make_dataset: Make, tmp_path: Path
) -> None:
    make_dataset("out.bin")
    make_dataset("out.mask.bin", shape=(4, 6, 1))
    np.save(tmp_path / "f.npy", np.zeros((5, 2)))
    joined = {"mask": tmp_path / "out.mask.bin", "f": tmp_path / "f.npy"}
    memload.join(tmp_path / "out.idx", tmp_path / "out.bin", **joined, overwrite=True)
    (tmp_path / "out.mask.idx").unlink()
    memload.rename(tmp_path / "out.idx", tmp_path / "new.idx")
    assert names(tmp_path) == ["f.npy", "new.bin", "new.idx", "new.mask.bin"]
    assert memload.verify(tmp_path / "new.bin").ok


def test_indexes_that_name_the_same_files_follow(make_dataset: Make, tmp_path: Path) -> None:
    index = make_dataset("out.bin")
    make_dataset("more.bin", seed=1)
    index.subset(np.array([4, 2])).write(tmp_path / "some.idx")
    memload.concat(tmp_path / "all.idx", tmp_path / "out.bin", tmp_path / "more.bin")
    report = memload.rename(tmp_path / "out.bin", tmp_path / "new.bin")
    assert report.notes == ("all.idx, some.idx name the new files, too",)
    for name in ("all.idx", "some.idx", "more.bin", "new.bin"):
        assert memload.verify(tmp_path / name).ok
    assert list(Index.open(tmp_path / "some.idx").keys) == [index.keys[4], index.keys[2]]
    memload.rename(tmp_path / "some.idx", tmp_path / "few.idx")
    assert names(tmp_path) == ["all.idx", "few.idx", "more.bin", "more.idx", "new.bin", "new.idx"]
    assert Index.open(tmp_path / "few.idx").image.shards[0].file == "new.bin"


def test_a_reader_goes_on(make_dataset: Make, tmp_path: Path) -> None:
    dataset = memload.MemmapDataset(make_dataset("out.bin").path)
    before = dataset[3][0].clone()
    memload.rename(tmp_path / "out.bin", tmp_path / "new.bin")
    assert dataset[3][0].equal(before)
    assert memload.MemmapDataset(tmp_path / "new.bin")[3][0].equal(before)


def test_names_that_are_taken_or_wrong_are_errors(make_dataset: Make, tmp_path: Path) -> None:
    make_dataset("out.bin")
    make_dataset("more.bin", rows=(2,))
    (tmp_path / "lone.bin").touch()
    before = names(tmp_path)
    for new, error, message in (
        ("more.bin", FileExistsError, "more.idx exists already. Choose another name"),
        ("lone.bin", FileExistsError, "lone.bin exists already"),
        ("new", ValueError, r"must end in '.bin'. Write '.*new.bin'"),
        ("other/new.bin", ValueError, "another folder. Move all files there with 'mv'"),
        ("out.bin", ValueError, "has this name already"),
    ):
        with pytest.raises(error, match=message):
            memload.rename(tmp_path / "out.bin", tmp_path / new)
    (tmp_path / "out.rejects.csv").touch()
    (tmp_path / "new.rejects.csv").touch()
    with pytest.raises(FileExistsError, match=r"new.rejects.csv exists already"):
        memload.rename(tmp_path / "out.bin", tmp_path / "new.bin")
    assert names(tmp_path) == sorted([*before, "out.rejects.csv", "new.rejects.csv"])


def test_without_hard_links_nothing_is_changed(
    make_dataset: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*paths: object, **options: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    make_dataset("out.bin")
    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(
        memload.MemloadError, match=r"hard link .* fails .*'memload copy out.bin new.bin'"
    ):
        memload.rename(tmp_path / "out.bin", tmp_path / "new.bin")
    assert names(tmp_path) == ["out.bin", "out.idx"]
    assert memload.verify(tmp_path / "out.bin").ok


def test_pixels_of_another_data_set_keep_their_name(make_dataset: Make, tmp_path: Path) -> None:
    make_dataset("q.bin")
    make_dataset("q.mask.bin", shape=(4, 6, 1))
    memload.join(
        tmp_path / "q.idx", tmp_path / "q.bin", mask=tmp_path / "q.mask.bin", overwrite=True
    )
    memload.rename(tmp_path / "q.bin", tmp_path / "z.bin")
    assert names(tmp_path) == ["q.mask.bin", "q.mask.idx", "z.bin", "z.idx"]
    for name in ("z.bin", "q.mask.bin"):
        assert memload.verify(tmp_path / name).ok


@pytest.mark.parametrize("rows", [(5,), (3, 2)])
def test_what_was_appended_to_opens_under_its_name(
    make_dataset: Make, tmp_path: Path, rows: tuple[int, ...]
) -> None:
    make_dataset("out.bin", rows=rows)
    make_dataset("more.bin", seed=1)
    out = tmp_path / "out.bin"
    memload.concat(tmp_path / "out.idx", out, tmp_path / "more.bin", overwrite=True)
    assert len(Index.open(out)) == 10
    memload.rename(out, tmp_path / "new.bin")
    assert len(Index.open(tmp_path / "new.bin")) == 10
    assert memload.verify(tmp_path / "new.bin").ok


def test_an_index_that_cannot_be_read_is_left_alone_and_noted(
    make_dataset: Make, tmp_path: Path
) -> None:
    index = make_dataset("out.bin")
    index.subset(np.array([4, 2])).write(tmp_path / "some.idx")
    damaged = index.subset(np.array([1])).write(tmp_path / "damaged.idx").path
    content = damaged.read_bytes()
    damaged.write_bytes(content.replace(b"bee/1.jpg", b"bee/X.jpg"))
    assert damaged.read_bytes() != content
    (tmp_path / "foreign.idx").write_bytes(b"an index of another program")
    report = memload.rename(tmp_path / "out.bin", tmp_path / "new.bin")
    assert [note.partition(":")[0] for note in report.notes] == [
        "damaged.idx cannot be read and was left as it is",
        "foreign.idx cannot be read and was left as it is",
        "some.idx names the new files, too",
    ]
    assert memload.verify(tmp_path / "some.idx").ok
    assert memload.verify(tmp_path / "new.bin").ok


def test_a_damaged_data_set_is_not_renamed(make_dataset: Make, tmp_path: Path) -> None:
    path = make_dataset("out.bin").path
    path.write_bytes(path.read_bytes().replace(b"bee/1.jpg", b"bee/X.jpg"))
    with pytest.raises(memload.FormatError, match=r"out.idx is damaged"):
        memload.rename(path, tmp_path / "new.bin")
    assert names(tmp_path) == ["out.bin", "out.idx"]


def test_rejects_of_another_data_set_are_not_taken_over(make_dataset: Make, tmp_path: Path) -> None:
    make_dataset("out.bin")
    (tmp_path / "new.rejects.csv").write_text("path,reason\n")
    with pytest.raises(FileExistsError, match=r"new.rejects.csv exists already"):
        memload.rename(tmp_path / "out.bin", tmp_path / "new.bin")
    assert names(tmp_path) == ["new.rejects.csv", "out.bin", "out.idx"]
