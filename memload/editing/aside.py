"""Files that are written into a temporary folder, and renamed once they are complete."""

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from memload.editing.lock import locked
from memload.errors import BuildError, MemloadError
from memload.storage.index import sync

_LOCK = "lock"


@contextlib.contextmanager
def temporary_folder(folder: Path, output: Path, last: str | None = None) -> Iterator[Path]:
    """Make a folder for the files of an output, yield it, and remove it with all that it holds.

    It is removed after an error, too. If the process is killed, it stays, and the next one clears
    it. ``last`` is the name of the file that is written last into the folder, and moved last out of
    it. While there is such a file, the folder stays whatever happens, so that the next process can
    move what is left. Two processes are kept apart by a lock.

    Raises FileNotFoundError if its parent is missing, FileExistsError if there is such a folder
    with other content, and BuildError if another process has it now. Any other OSError, also one of
    the body, becomes a BuildError that names the output.
    """
    if not folder.parent.is_dir():
        raise FileNotFoundError(f"{folder.parent}: there is no such folder. Make it first.")
    is_ours = (folder / _LOCK).exists() or is_empty_folder(folder)
    if os.path.lexists(folder) and not is_ours:
        raise FileExistsError(f"{folder} is in the way. Move it, or choose another output.")
    try:
        with locked(folder):
            if not _is_complete(folder, last):
                clear(folder)  # after a process that was killed
            try:
                yield folder
            finally:
                if not _is_complete(folder, last):
                    clear(folder)
                    (folder / _LOCK).unlink()  # last: until then no other process begins
                    folder.rmdir()
    except MemloadError:  # some are OSErrors, too
        raise
    except OSError as error:
        raise BuildError(
            f"{output} cannot be written: {error}. Make room or mend that, then run the same "
            "command again.",
            path=output,
        ) from error


@contextlib.contextmanager
def written_aside(targets: Sequence[Path]) -> Iterator[Path]:
    """Yield a folder in which to make files and folders of the same names as ``targets``.

    In the end they are renamed, in this order. Targets lie in one folder. The temporary one lies
    beside the last of them, and is called ``NAME.exporting``; see `temporary_folder`.

    Raises FileExistsError if there is a target that is not an empty folder.
    """
    output = targets[-1]
    for target in targets:
        if os.path.lexists(target) and not is_empty_folder(target):
            raise FileExistsError(f"{target} exists already. Remove it, or choose another output.")
    with temporary_folder(output.with_name(f"{output.name}.exporting"), output) as folder:
        yield folder
        for target in targets:
            (folder / target.name).rename(target)
        sync(output.parent)


def is_empty_folder(path: Path) -> bool:
    """Return whether a path is a folder, and no link to one, with nothing in it."""
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())


def _is_complete(folder: Path, last: str | None) -> bool:
    return last is not None and (folder / last).exists()


def clear(folder: Path) -> None:
    """Remove all that a temporary folder holds but its lock."""
    for path in folder.iterdir():
        if path.name == _LOCK:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
