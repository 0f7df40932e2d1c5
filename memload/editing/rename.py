"""Another name for a data set: its pixels and its index together."""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from memload.editing.report import EditReport, report_on
from memload.errors import FormatError, MemloadError
from memload.storage.format import array_path, output_paths, shard_pattern
from memload.storage.index import Index, sync
from memload.wording import listed


def rename(path: str | Path, new: str | Path) -> EditReport:
    """Rename a data set: the files of its arrays, its index, and the list of rejected images.

    ``path`` is ``out.bin`` or its index. ``new``, such as ``photos.bin``, is in the same folder.
    Files that have names of their own, as those of other data sets that were put together, keep
    them. Other indexes in the folder that name the renamed files, such as saved subsets, are
    written anew with the new names; one that cannot be read is left as it is, and noted. What
    processes have mapped already stays readable, but start no workers from it: they would open the
    old name. The fingerprint changes, since it includes the names of files.

    At any moment, the old or the new name opens, and so does every other index: the files first get
    the new names beside the old ones, as hard links, and lose the old ones last. If it is
    interrupted, call it again. On file systems without hard links, this raises MemloadError.

    Returns a report whose ``notes`` tell which other indexes name the new files, too. Raises
    ValueError for a wrong name, FileExistsError, FormatError and OSError.

    >>> memload.rename("out.bin", "photos.bin")  # doctest: +SKIP
    """
    index, target = Index.open(path), Path(new)
    if target.suffix not in (".bin", ".idx") or not target.stem:
        raise ValueError(
            f"The new name is {str(new)!r}, but it must end in '.bin'. Write "
            f"'{target.with_suffix('.bin') if target.name else 'photos.bin'}'."
        )
    if target.resolve().parent != index.path.resolve().parent:
        raise ValueError(
            f"The new name is {str(new)!r}, which is in another folder. Move all files there with "
            f"'mv'. Or rename here: '{index.path.with_name(target.name)}'."
        )
    target = target.with_suffix(".idx")
    if target == index.path:
        raise ValueError(f"{path} has this name already.")
    files = _new_names(index, target.stem)
    renamed = _with_names(index, files).identified()
    _check_free(index, renamed, target, files)
    folder = index.path.parent
    others, notes = _indexes_naming(index, target, files)
    for old_name, new_name in files.items():
        _link(folder / old_name, folder / new_name)
    sync(folder)
    # Each file has both names now, so that all of these indexes open, whichever name they have.
    renamed.write(target)
    for other in others:
        _with_names(other, files).write(other.path)
    for old_name in files:
        (folder / old_name).unlink(missing_ok=True)
    index.path.unlink()  # last, so that a second call finds what is left to do
    sync(folder)
    return report_on(target, renamed, notes)


def _new_names(index: Index, stem: str) -> dict[str, str]:
    """Return the new name of each file that is named after the data set."""
    names = {}
    for array in index.arrays:
        owner = array_path(index.path, array.name).with_suffix(".idx")
        if array.name != "image" and owner.exists():  # out.mask.bin is a data set of its own
            continue
        pattern = shard_pattern(index.path, array.name)
        for shard in array.shards:
            if match := pattern.fullmatch(shard.file):
                names[shard.file] = f"{stem}{match[1]}"
    rejects = output_paths(index.path.with_suffix(".bin"))[2]
    if rejects.exists():
        names[rejects.name] = output_paths(f"{stem}.bin")[2].name
    return names


def _with_names(index: Index, names: Mapping[str, str]) -> Index:
    """Return the index with other names for its files."""
    arrays = (
        replace(
            array,
            shards=tuple(
                replace(shard, file=names.get(shard.file, shard.file)) for shard in array.shards
            ),
        )
        for array in index.arrays
    )
    return replace(index, arrays=tuple(arrays))


def _check_free(index: Index, renamed: Index, target: Path, files: Mapping[str, str]) -> None:
    """Raise FileExistsError if a new name is taken by anything but an interrupted renaming."""
    folder, is_done = index.path.parent, False
    with contextlib.suppress(FormatError):
        is_done = Index.read(target).fingerprint == renamed.fingerprint
    rejects = output_paths(target.with_suffix(".bin"))[2]
    foreign = [target] if rejects.name in files.values() else [target, rejects]
    taken = [path for path in foreign if os.path.lexists(path) and not is_done]
    for old_name, new_name in files.items():
        old, new = folder / old_name, folder / new_name
        is_linked = old.exists() and new.exists() and old.samefile(new)
        is_moved = is_done and not os.path.lexists(old)
        if os.path.lexists(new) and not is_linked and not is_moved:
            taken.append(new)
    if taken:
        raise FileExistsError(f"{taken[0]} exists already. Choose another name.")


def _link(old: Path, new: Path) -> None:
    if os.path.lexists(new):  # by a call that was interrupted, see `_check_free`
        return
    try:
        os.link(old, new, follow_symlinks=False)
    except FileNotFoundError:
        raise FormatError(f"{old} is missing. Restore it, and rename again.", path=old) from None
    except OSError as error:
        raise MemloadError(
            f"{old.name} cannot have two names for a moment, as safe renaming needs: a hard link "
            f"in {old.parent.resolve()} fails ({error.strerror}). Write a copy under the new name "
            f"instead: 'memload copy {old.name} {new.name}'."
        ) from error


def _indexes_naming(
    index: Index, target: Path, files: Mapping[str, str]
) -> tuple[list[Index], list[str]]:
    """Return the other indexes in the folder that name one of these files, and notes on them."""
    others, notes = [], []
    for path in sorted(index.path.parent.glob("*.idx")):
        if path.name in (index.path.name, target.name):
            continue
        try:
            other = Index.read(path)
            other.keys.pack()  # which checks them; all else was checked when it was read
        except FormatError as error:
            notes.append(f"{path.name} cannot be read and was left as it is: {error}")
            continue
        if any(shard.file in files for shard in other.shards):
            others.append(other)
    if others:
        verb = "names" if len(others) == 1 else "name"
        listing = listed([other.path.name for other in others])
        notes.append(f"{listing} {verb} the new files, too")
    return others, notes
