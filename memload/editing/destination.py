"""The files of the output: whether they may be written, and how a finished build replaces them."""

import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from memload.errors import BuildError, FormatError
from memload.storage.format import HEADER_BYTES, array_path, output_paths, shard_pattern
from memload.storage.index import Array, Index, sync

#: What the index that is replaced is called in the temporary folder, while files are renamed.
_REPLACED = "replaced.idx"


def check_output(output: Path, arrays: Sequence[Array], overwrite: bool) -> None:
    """Raise BuildError if the output exists and is not to be replaced."""
    index, folder, _ = output_paths(output)
    for path, array in _array_of(output, arrays).items():
        for other in {path.with_suffix(".idx"), array_path(output, array.name).with_suffix(".idx")}:
            if other != index and other.exists():
                raise BuildError(
                    f"A file of this output would be called {path.name}, which is the data set "
                    f"of {other.name}. Choose another output.",
                    path=output,
                )
    existing = existing_files(output, arrays)
    if existing and not overwrite:
        raise BuildError(
            f"{existing[0]} exists already. Choose another output, or say --overwrite.",
            path=output,
        )
    _check_no_folders(existing, output)
    if not (index.exists() or (folder / _REPLACED).exists()):
        _check_other_indexes(output, existing)
    replaced = {output.parent / name for name in _unused(_own_shards(index, output), output)}
    _check_owners(output, {*existing, *replaced})


def existing_files(output: Path, arrays: Sequence[Array]) -> list[Path]:
    """Return the files that are there already and would be replaced."""
    index, _, ledger = output_paths(output)
    paths = (index, ledger, *_array_of(output, arrays))
    return [path for path in paths if os.path.lexists(path)]


def _array_of(output: Path, arrays: Sequence[Array]) -> dict[Path, Array]:
    """Return the array that each file of the pixels holds."""
    return {output.parent / shard.file: array for array in arrays for shard in array.shards}


def _check_no_folders(paths: Iterable[Path], output: Path) -> None:
    """Raise BuildError if a path is a folder, which no file can replace."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            raise BuildError(
                f"{path} is a folder. Move it away, or choose another output.", path=output
            )


def check_not_read(index: Index, output: Path, arrays: Sequence[Array]) -> None:
    """Raise BuildError if this output would replace files of a data set that it is made from.

    If it were stopped while files are renamed, neither data set would be whole.
    """
    read = {index.path.parent / shard.file for shard in index.shards}
    written = {output.parent / shard.file for array in arrays for shard in array.shards}
    resolved = {path.resolve() for path in (*read, index.path)}
    replaced = (*written, output_paths(output)[0])
    if both := sorted(path for path in replaced if path.resolve() in resolved):
        raise BuildError(
            f"{both[0]} belongs to {index.path.name}, which is read from, and cannot be replaced. "
            "Choose another output.",
            path=output,
        )


def _check_other_indexes(output: Path, existing: Sequence[Path]) -> None:
    """Raise BuildError if a file is a mask or another array of a data set of another name."""
    names = {path.name for path in existing}
    for path in output.parent.glob("*.idx") if names else ():
        for array in _arrays_of(path):
            shared = names & {shard.file for shard in array.shards}
            if shared and array.name != "image":
                raise BuildError(
                    f"{min(shared)} is the {array.kind} {array.name!r} of {path.name}. Choose "
                    "another output.",
                    path=output,
                )


def _check_owners(output: Path, paths: Iterable[Path]) -> None:
    """Raise BuildError if files cannot be replaced, as those of others in a folder like /tmp."""
    folder, user = output.parent.stat(), os.geteuid()
    if not folder.st_mode & stat.S_ISVTX or user in (0, folder.st_uid):
        return
    for path in sorted(paths):
        if os.path.lexists(path) and path.lstat().st_uid != user:
            raise BuildError(
                f"{path} belongs to another user, and in {output.parent} only its owner may "
                "replace it. Choose another output.",
                path=output,
            )


def publish(index: Index, folder: Path, output: Path, overwrite: bool) -> None:
    """Rename the files of a finished build in ``folder`` into place, the index last.

    If it was stopped before, it goes on where it stopped, with ``overwrite`` if that was said then.
    Raises BuildError if files of these names have appeared since the build began, without
    ``overwrite``, or folders.
    """
    parent, replaced = output.parent, folder / _REPLACED
    output_index, _, ledger = output_paths(output)
    overwrite = overwrite or (replaced.exists() and not output_index.exists())
    shards = [shard.file for shard in index.shards]
    has_ledger = index.build["rejected"] > 0
    names = [*shards, ledger.name] if has_ledger else shards
    waiting = [name for name in (*names, output_index.name) if (folder / name).exists()]
    _check_no_folders((parent / name for name in waiting), output)
    for target in (parent / name for name in waiting):
        if not overwrite and os.path.lexists(target):
            raise BuildError(
                f"{target} was made by somebody else while the build ran. The finished build "
                f"waits in {folder}. Move that file away, or say --overwrite, and run the "
                "same command again.",
                path=output,
            )
    if output_index.exists():
        # From here on until the end there is no data set.
        output_index.replace(replaced)
        sync(parent)
    for name in names:
        move(folder / name, parent)
    if overwrite:
        for name in _unused(_own_shards(replaced, output), output) - set(shards):
            (parent / name).unlink(missing_ok=True)
        if not has_ledger:
            ledger.unlink(missing_ok=True)
    sync(parent)
    move(folder / output_index.name, parent)
    sync(parent)


def publish_before_another(index: Index, folder: Path, output: Path, overwrite: bool) -> None:
    """Finish a `publish` that was stopped, before something else is built or copied there.

    Otherwise there would be no data set at all until that is finished.
    """
    if is_partly_published(index, folder) and not output_paths(output)[0].exists():
        publish(index, folder, output, overwrite)


def is_partly_published(index: Index, folder: Path) -> bool:
    """Return whether `publish` was stopped after it had begun to rename files of ``folder``."""
    return (folder / _REPLACED).exists() or not all(
        (folder / shard.file).exists() for shard in index.shards
    )


def _own_shards(index: Path, output: Path) -> set[str]:
    """Return those files of an index that a build of this output has written."""
    return {
        shard.file
        for array in _arrays_of(index)
        for shard in array.shards
        if array.header_bytes == HEADER_BYTES  # not an NPY file of the user's
        and shard_pattern(output, array.name).fullmatch(shard.file)
    }


def _unused(shards: set[str], output: Path) -> set[str]:
    """Return those shards of this output that no other index names."""
    for other in output.parent.glob("*.idx") if shards else ():
        if other != output.with_suffix(".idx"):
            shards = shards - {shard.file for array in _arrays_of(other) for shard in array.shards}
    return shards


def _arrays_of(index: Path) -> Sequence[Array]:
    """Return the arrays of an index; none if it is missing or damaged."""
    if not index.exists():
        return ()
    try:
        return Index.read(index).arrays
    except FormatError:
        return ()


def move(path: Path, folder: Path) -> None:
    """Move a file, unless it was moved before a crash."""
    if path.exists():
        path.replace(folder / path.name)
