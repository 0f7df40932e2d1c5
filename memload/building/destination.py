"""The files of the output: whether they may be written, and how a finished build replaces them."""

import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from memload.errors import BuildError, FormatError
from memload.storage.format import output_paths
from memload.storage.index import Index, sync


def shard_pattern(output: Path) -> re.Pattern[str]:
    """Return what the shards of an output are called, however many there are."""
    return re.compile(re.escape(output.stem) + r"(-\d{5,}-of-\d{5,})?\.bin")


def check_output(output: Path, shards: Iterable[str], overwrite: bool) -> None:
    """Raise BuildError if the output exists and is not to be replaced."""
    paths = [output.parent / name for name in shards]
    for path in paths:
        other = path.with_suffix(".idx")
        if path != output and other.exists():
            raise BuildError(
                f"A shard of this output would be called {path.name}, which is the data set "
                f"of {other.name}. Choose another output.",
                path=output,
            )
    index, _, ledger = output_paths(output)
    existing = [path for path in (index, ledger, *paths) if os.path.lexists(path)]
    if existing and not overwrite:
        raise BuildError(
            f"{existing[0]} exists already. Choose another output, or say --overwrite.",
            path=output,
        )
    replaced = {output.parent / name for name in _unused(shards_of(index), output)}
    _check_owners(output, {*existing, *replaced})


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

    If it was stopped before, it goes on where it stopped. Raises BuildError if files of these
    names have appeared since the build began, without ``overwrite``.
    """
    parent, replaced = output.parent, folder / "replaced.idx"
    output_index, _, ledger = output_paths(output)
    shards = [shard.file for shard in index.image.shards]
    has_ledger = index.build["rejected"] > 0
    names = [*shards, ledger.name] if has_ledger else shards
    if overwrite and output_index.exists():
        # From here on until the end there is no data set.
        output_index.replace(replaced)
        sync(parent)
    for name in [*names, output_index.name]:
        target = parent / name
        if not overwrite and os.path.lexists(target) and (folder / name).exists():
            raise BuildError(
                f"{target} was made by somebody else while the build ran. The finished build "
                f"waits in {folder}. Move that file away, or say --overwrite, and run the "
                "same command again.",
                path=output,
            )
    for name in names:
        move(folder / name, parent)
    if overwrite:
        for name in _unused(shards_of(replaced), output) - set(shards):
            (parent / name).unlink(missing_ok=True)
        if not has_ledger:
            ledger.unlink(missing_ok=True)
    sync(parent)
    move(folder / output_index.name, parent)
    sync(parent)


def _unused(shards: Iterable[str], output: Path) -> set[str]:
    """Return those shards of this output that no other index names."""
    unused = {name for name in shards if shard_pattern(output).fullmatch(name)}
    if unused:
        for other in output.parent.glob("*.idx"):
            if other != output.with_suffix(".idx"):
                unused -= shards_of(other)
    return unused


def shards_of(index: Path) -> set[str]:
    """Return the files that an index names; none if it is missing or damaged."""
    if not index.exists():
        return set()
    try:
        return {shard.file for array in Index.read(index).arrays for shard in array.shards}
    except FormatError:
        return set()


def move(path: Path, folder: Path) -> None:
    """Move a file, unless it was moved before a crash."""
    if path.exists():
        path.replace(folder / path.name)
