"""Files that are written under another name, and renamed once they are complete."""

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from memload.building.lock import locked
from memload.storage.index import sync

_LOCK = "lock"


@contextlib.contextmanager
def written_aside(targets: Sequence[Path]) -> Iterator[Path]:
    """Yield a folder in which to make files and folders of the same names as ``targets``.

    In the end they are renamed, in this order, and the folder is removed. It lies beside the last
    target, and is called ``NAME.exporting``. After an error it is removed with all that it holds;
    if the process was killed, the next one does so. Two processes are kept apart by a lock.

    Targets lie in one folder. Raises FileExistsError if there is one that is not an empty folder,
    FileNotFoundError if their folder is missing, BuildError if another process writes them now, and
    OSError.
    """
    output = targets[-1]
    folder = output.with_name(f"{output.name}.exporting")
    if not folder.parent.is_dir():
        raise FileNotFoundError(f"{folder.parent}: there is no such folder. Make it first.")
    for target in targets:
        if os.path.lexists(target) and not _is_empty_folder(target):
            raise FileExistsError(f"{target} exists already. Remove it, or choose another output.")
    is_ours = (folder / _LOCK).exists() or _is_empty_folder(folder)
    if os.path.lexists(folder) and not is_ours:
        raise FileExistsError(f"{folder} is in the way. Move it, or choose another output.")
    with locked(folder):
        _clear(folder)  # after a process that was killed
        try:
            yield folder
            for target in targets:
                (folder / target.name).rename(target)
            sync(folder.parent)
        finally:
            _clear(folder)
            (folder / _LOCK).unlink()  # last: until then no other process begins
            folder.rmdir()


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())


def _clear(folder: Path) -> None:
    """Remove all but the lock."""
    for path in folder.iterdir():
        if path.name == _LOCK:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
