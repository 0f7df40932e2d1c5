"""A process that is killed while it copies a data set: the old or the new one opens."""

import errno
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memload
from memload.errors import BuildError
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


def copies_of(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield copies of a folder, without end."""
    while True:
        copied = tmp_path_factory.mktemp("copy")
        shutil.copytree(folder, copied, dirs_exist_ok=True)
        yield copied


def failing_at(step: int, function: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Call a function. Its renaming number ``step`` fails. Return whether there were that many."""
    renamings, replace = itertools.count(), os.replace

    def fail(*arguments: Any, **options: Any) -> None:
        if next(renamings) == step:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        replace(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        try:
            function()
        except (BuildError, OSError) as error:
            assert "Input/output error" in str(error)  # noqa: PT017  # a loop over all of them
            return True
    return False


@pytest.fixture
def copied_folders(
    make_dataset: Make, add_array: Any, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """Copies of a folder with a data set to copy, and two more that it replaces, without end."""
    depths = np.arange(14.0).reshape(7, 2)
    add_array(make_dataset("from.bin", rows=(7,), seed=1), "depth", depths)
    add_array(make_dataset("old.bin", rows=(2, 2, 1, 1)), "mask", np.zeros((6, 4, 6), "u1"), "mask")
    (tmp_path / "old.rejects.csv").write_text("path,reason\n")
    return copies_of(tmp_path, tmp_path_factory)


#: What a copy of five images of 72 bytes in files of two becomes.
COPIED = {
    *("X-00000-of-00004.bin", "X-00001-of-00004.bin", "X-00002-of-00004.bin"),
    *("X-00003-of-00004.bin", "X.depth.bin", "X.idx"),
}


@pytest.mark.parametrize("stop", [killed_at, failing_at])
@pytest.mark.parametrize("name", ["new", "old"])
@pytest.mark.parametrize("says_it_again", [True, False])
def test_a_copy_that_was_stopped_goes_on_or_begins_anew_when_called_again(
    copied_folders: Iterator[Path],
    monkeypatch: pytest.MonkeyPatch,
    stop: Callable[..., bool],
    name: str,
    says_it_again: bool,
) -> None:
    states = []
    for step, folder in enumerate(copied_folders):
        output = folder / f"{name}.bin"
        old = Index.open(output).fingerprint if name == "old" else ""

        def copy(overwrite: bool = name == "old", output: Path = output) -> None:
            source = output.with_name("from.bin")
            limit = 4096 + 2 * 72
            memload.copy(source, output, shard_size=limit, overwrite=overwrite, progress=False)

        was_stopped = stop(step, copy, monkeypatch)
        state = "old"
        if not _opens(output):
            state = "none" if name == "old" else "old"
        elif Index.open(output).fingerprint != old:
            state = "new"
        if state == "none" or not says_it_again:
            # The data set is not whole, so that it need not be said that it is replaced.
            try:
                copy(overwrite=False)
            except BuildError as error:
                assert "exists already" in str(error)  # noqa: PT017
                assert _opens(output)
                copy(overwrite=True)
        else:
            copy(overwrite=state == "new" or name == "old")
        assert memload.verify(output).ok
        assert Index.open(output).fingerprint != old
        copied = {file.replace("X", name) for file in COPIED}
        kept = {"from.bin", "from.idx", "from.depth.bin"}
        others = {path.name for path in folder.glob("old*") if name != "old"}
        assert {path.name for path in folder.iterdir()} == copied | kept | others
        states.append(state)
        if not was_stopped:
            break
    assert states == sorted(states, key=["old", "none", "new"].index)
    assert {"old", "new"} <= {*states}
    assert ("none" in states) == (name == "old")


def test_a_copy_of_other_samples_first_ends_one_that_was_stopped(
    copied_folders: Iterator[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for step, folder in enumerate(copied_folders):
        output = folder / "old.bin"

        def copy(start: int, overwrite: bool, output: Path = output) -> None:
            samples = memload.MemmapDataset(output.with_name("from.bin"))[start:]
            memload.copy(samples, output, overwrite=overwrite, progress=False)

        was_killed = killed_at(step, lambda: copy(0, True), monkeypatch)
        with pytest.raises(BuildError, match=r"old.* exists already"):
            copy(2, overwrite=False)
        assert memload.verify(output).ok
        copy(2, overwrite=True)
        assert memload.verify(output).ok
        assert len(Index.open(output)) == 5
        assert {path.name for path in folder.glob("old*")} == {
            "old.bin", "old.depth.bin", "old.idx"
        }  # fmt: skip
        if not was_killed:
            break
    assert step > 10


def test_a_copy_that_goes_on_does_not_replace_what_was_made_there_since(
    copied_folders: Iterator[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = next(copied_folders)
    output = folder / "old.bin"

    def copy(overwrite: bool) -> None:
        memload.copy(folder / "from.bin", output, overwrite=overwrite, progress=False)

    step = 0
    while _opens(output):  # until it is stopped while files are renamed
        step += 1
        assert killed_at(step, lambda: copy(overwrite=True), monkeypatch)
    shutil.copy(folder / "from.bin", output)
    made = Index.open(folder / "from.bin").subset(np.array([3]))
    image = replace(made.image, shards=(replace(made.image.shards[0], file="old.bin"),))
    made = replace(made, arrays=(image,), crc32={"image": made.crc32["image"]}, other_rows={})
    made.write(output.with_suffix(".idx"))
    with pytest.raises(BuildError, match="was made by somebody else"):
        copy(overwrite=False)
    assert list(Index.open(output).keys) == list(made.keys)
    assert memload.verify(output).ok
    copy(overwrite=True)
    assert len(Index.open(output)) == 7
    assert memload.verify(output).ok


def _opens(path: Path) -> bool:
    try:
        return len(memload.MemmapDataset(path)) > 0
    except memload.MissingError:
        return False
