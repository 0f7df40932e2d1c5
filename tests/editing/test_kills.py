"""A process that is killed while it writes: the old or the new index opens, and whole exports."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import memload
from memload.storage.index import Index


class Killed(BaseException):
    """Stands for the end of the process."""


def killed_at(step, function, monkeypatch):
    """Call a function. Before the call number ``step`` that changes a name, the process ends.

    From there on, nothing changes any more, as clean-ups do not run in a process that is killed.
    Returns whether there were that many calls.
    """
    calls = itertools.count()

    def counted(change):
        def call(*arguments, **options):
            if next(calls) >= step:
                raise Killed
            return change(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        for name in ("replace", "rename", "link", "unlink", "remove", "rmdir"):
            patch.setattr(os, name, counted(getattr(os, name)))
        try:
            function()
        except Killed:
            return True
    return False


def copies_of(folder, tmp_path_factory):
    """Yield copies of a folder, without end."""
    while True:
        copied = tmp_path_factory.mktemp("copy")
        shutil.copytree(folder, copied, dirs_exist_ok=True)
        yield copied


EDITS = {
    "save": lambda path: memload.MemmapDataset(path)[2:4].save(path, overwrite=True),
    "concat": lambda path: memload.concat(path, path.with_name("more.bin")).write(path),
    "join": lambda path: memload.join(path, f=path.with_name("f.npy")).write(path),
    "with_columns": lambda path: memload.with_columns(path, label=list("abcab")).write(path),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_index_that_replaces_another_is_the_old_or_the_new_one(
    make_dataset, tmp_path, tmp_path_factory, monkeypatch, edit
):
    make_dataset("out.bin", rows=(3, 2))
    make_dataset("more.bin", seed=1)
    np.save(tmp_path / "f.npy", np.zeros((5, 2)))
    fingerprints = []
    for step, folder in enumerate(copies_of(tmp_path, tmp_path_factory)):
        path = folder / "out.idx"
        was_killed = killed_at(step, lambda path=path: EDITS[edit](path), monkeypatch)
        assert memload.verify(path).ok
        fingerprints.append(Index.open(path).fingerprint)
        if not was_killed:
            break
    assert len(set(fingerprints)) == 2
    assert fingerprints == sorted(fingerprints, key=fingerprints.index)  # never old again


@pytest.mark.parametrize("name", ["pngs", "x.tar"])
def test_a_kill_at_any_renaming_leaves_whole_exports(
    make_dataset, add_array, tmp_path, tmp_path_factory, monkeypatch, name
):
    add_array(make_dataset("out.bin"), "depth", np.zeros((5, 2)))
    for step, folder in enumerate(copies_of(tmp_path, tmp_path_factory)):
        output = folder / name
        was_killed = killed_at(
            step,
            lambda folder=folder, output=output: memload.export(
                folder / "out.bin", output, progress=False
            ),
            monkeypatch,
        )
        if output.exists():
            count = len([*output.rglob("*.png")]) if name == "pngs" else output.stat().st_size > 9
            assert count in (5, True)
            assert name == "x.tar" or len([*folder.glob("pngs.depth/*/*.npy")]) == 5
        if not was_killed:
            break
    assert step >= 2
    assert not [*folder.glob("*.exporting")]


@pytest.mark.slow
def test_an_export_that_is_killed_says_what_to_remove(make_dataset, tmp_path):
    make_dataset("out.bin", rows=(400,), shape=(200, 200, 3))
    command = [sys.executable, "-m", "memload", "export", "out.bin", "pngs"]
    with subprocess.Popen(command, cwd=tmp_path) as process:
        while not [*tmp_path.glob("pngs.exporting/pngs/*/*.png")]:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "pngs").exists()
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "pngs.exporting" in again.stderr
    shutil.rmtree(tmp_path / "pngs.exporting")
    assert subprocess.run(command, cwd=tmp_path, check=False).returncode == 0
