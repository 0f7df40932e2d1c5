"""A process that is killed while it edits a data set: the old or the new one opens."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memload
from memload.storage.index import Index

Make = Callable[..., Index]


class Killed(BaseException):
    """Stands for the end of the process."""


def killed_at(step: int, function: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Call a function. Before the call number ``step`` that changes a name, the process ends.

    From there on, nothing changes any more, as clean-ups do not run in a process that is killed.
    Returns whether there were that many calls.
    """
    calls = 0

    def counted(change: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > step:
                raise Killed
            return change(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        for name in ("replace", "rename", "link", "unlink", "remove"):
            patch.setattr(os, name, counted(getattr(os, name)))
        try:
            function()
        except Killed:
            return True
    return False


@pytest.fixture
def folders(
    make_dataset: Make, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """Copies of a folder with data sets and files that belong to them, without end."""
    index = make_dataset("out.bin", rows=(3, 2))
    index.subset(np.array([4, 0])).write(tmp_path / "some.idx")
    make_dataset("more.bin", seed=1)
    (tmp_path / "out.rejects.csv").write_text("path,reason\n")
    np.save(tmp_path / "f.npy", np.zeros((5, 2)))
    lines = (f"{key},x" for key in index.keys)
    (tmp_path / "labels.csv").write_text("\n".join(["key,label", *lines]))

    def copies() -> Iterator[Path]:
        while True:
            folder = tmp_path_factory.mktemp("copy")
            shutil.copytree(tmp_path, folder, dirs_exist_ok=True)
            yield folder

    return copies()


EDITS: dict[str, Callable[[Path], Any]] = {
    "subset": lambda path: memload.MemmapDataset(path)[2:4].save(path, overwrite=True),
    "concat": lambda path: memload.concat(path, path, path.with_name("more.bin"), overwrite=True),
    "join": lambda path: memload.join(path, path, f=path.with_name("f.npy"), overwrite=True),
    "relabel": lambda path: memload.relabel(
        path, path.with_name("labels.csv"), path, overwrite=True
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_index_that_replaces_another_is_the_old_or_the_new_one(
    folders: Iterator[Path], monkeypatch: pytest.MonkeyPatch, edit: str
) -> None:
    fingerprints = []
    for step, folder in enumerate(folders):
        path = folder / "out.idx"
        was_killed = killed_at(step, lambda path=path: EDITS[edit](path), monkeypatch)  # type: ignore[misc]
        assert memload.verify(path).ok
        fingerprints.append(Index.open(path).fingerprint)
        if not was_killed:
            break
    assert len(fingerprints) >= 3  # killed at least before and after it was renamed
    assert len(set(fingerprints)) == 2
    assert fingerprints == sorted(fingerprints, key=fingerprints.index)  # never old again


def test_renaming_leaves_the_old_or_the_new_name_and_goes_on_when_called_again(
    folders: Iterator[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()
    for step, folder in enumerate(folders):
        old, new = folder / "out.bin", folder / "new.bin"
        keys = list(Index.open(old).keys)
        was_killed = killed_at(step, lambda: memload.rename(old, new), monkeypatch)  # noqa: B023
        opened = [path for path in (old, new) if _opens(path)]
        assert opened
        for path in opened:
            assert memload.verify(path).ok
            assert list(Index.open(path).keys) == keys
        assert memload.verify(folder / "some.idx").ok
        seen.add(tuple(path.name for path in opened))
        if not was_killed:
            break
        memload.rename(old, new)
        assert memload.verify(new).ok
        assert memload.verify(folder / "some.idx").ok
        files = {path.name for path in folder.iterdir() if not path.name.endswith(".tmp")}
        others = {"some.idx", "more.bin", "more.idx", "f.npy", "labels.csv"}
        assert files - others == {
            *("new.idx", "new.rejects.csv"),
            *("new-00000-of-00002.bin", "new-00001-of-00002.bin"),
        }
    assert seen == {("out.bin",), ("out.bin", "new.bin"), ("new.bin",)}
    assert step > 10


def _opens(path: Path) -> bool:
    try:
        return len(memload.MemmapDataset(path)) > 0
    except memload.MissingError:
        return False
