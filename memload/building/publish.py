"""From shards that are all done to a data set: the index, the ledger, and the renames.

::

    records of all shards ─▶ out.building/out.idx, out.rejects.csv
    out.idx, if it is replaced ─▶ out.building/replaced.idx     from here on there is no data set
    out.building/out*.bin ─▶ out*.bin
    out.building/out.idx ─▶ out.idx                             now there is the new one

Any number of processes may try, at any moment: one has the lock. If it is killed, the next call
renames what is left.
"""

import csv
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from memload.building.record import DONE, column_values, crc32_field
from memload.building.settings import Settings
from memload.building.shard import PLAN
from memload.building.summary import statistics
from memload.errors import BuildError, FormatError
from memload.sources.samples import Source
from memload.storage.format import HEADER_BYTES, output_paths, shard_pattern
from memload.storage.index import Array, Index, class_counts, sync
from memload.storage.keys import Keys

#: What the index that is replaced is called meanwhile.
_REPLACED = "replaced.idx"


def check_output(output: Path, files: Iterable[str], overwrite: bool) -> None:
    """Raise BuildError if the output exists without ``overwrite``, or is of another data set.

    ``files`` are the names of the shards that are to be written.
    """
    index_path, _, ledger = output_paths(output)
    names = [index_path.name, ledger.name, *sorted(files)]
    existing = [name for name in names if os.path.lexists(output.parent / name)]
    for other in output.parent.glob("*.idx") if existing else ():
        owned = _own_files(other, other) & set(existing)
        if other.name != index_path.name and owned:
            raise BuildError(
                f"{min(owned)} belongs to the data set {other.name}, and cannot be replaced alone. "
                "Choose another output.",
                path=output,
            )
    if existing and not overwrite:
        raise BuildError(
            f"{output.parent / existing[0]} exists already. Choose another output, or say "
            "--overwrite.",
            path=output,
        )


def _own_files(index: Path, output: Path) -> set[str]:
    """Return those files of an index that a build of ``output`` has written. They have its name."""
    pattern, found = shard_pattern(output, None), set()
    with suppress(FormatError, OSError):
        for array in Index.read(index).arrays:
            if array.header_bytes == HEADER_BYTES:  # not an NPY file of the user's
                found |= {shard.file for shard in array.shards if pattern.fullmatch(shard.file)}
    return found


def check_not_read(read: Path, output: Path) -> None:
    """Raise BuildError if the output is the data set whose index is ``read``, or a part of it."""
    index = Index.open(read)
    used = {index.path, *(index.path.parent / shard.file for shard in index.shards)}
    if {output_paths(output)[0].resolve(), output.resolve()} & {path.resolve() for path in used}:
        raise BuildError(
            f"{output} belongs to {index.path.name}, which is read from, and cannot be replaced. "
            "Choose another output.",
            path=output,
        )


@contextmanager
def publishing(folder: Path) -> Iterator[bool]:
    """Keep others from publishing meanwhile. Yields whether nobody has done so already."""
    try:
        descriptor = os.open(folder / PLAN, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:  # it was published, and its folder removed
        yield False
        return
    try:
        with suppress(OSError):  # this file system has no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield os.fstat(descriptor).st_nlink > 0
    finally:
        os.close(descriptor)


def make_index(
    source: Source,
    settings: Settings,
    arrays: Sequence[Array],
    index_path: Path,
    keys: Keys,
    records: np.ndarray,
) -> Index:
    """Return the index of a data set from the records of all rows."""
    from memload import __version__

    schema, classes = source.schema, source.classes
    used = np.flatnonzero(records["status"] == DONE)
    columns = {name: column_values(records, used, name, schema) for name in schema}
    facts = statistics(records, used, arrays[0])
    if classes is not None:
        facts["class_counts"] = class_counts(columns["label"], len(classes))
    return Index(
        path=index_path,
        arrays=tuple(arrays),
        row=used.astype(np.int64),
        flags=np.ascontiguousarray(records["flags"][used]),
        keys=keys.take(used),
        columns=columns,
        crc32={
            array.name: np.ascontiguousarray(records[crc32_field(array.name)]) for array in arrays
        },
        classes=None if classes is None else tuple(classes),
        points=tuple(name for name, column in schema.items() if column.points),
        boxes=tuple(name for name, column in schema.items() if column.boxes),
        categories={name: tuple(texts) for name, texts in source.categories.items()},
        build={
            "memload": __version__,
            "settings": settings.as_dict(),
            "libraries": settings.libraries(),
            "records": len(records),
            "rejected": len(records) - len(used),
        },
        statistics=facts,
    )


def write_ledger(path: Path, keys: Sequence[str], reasons: Mapping[int, str]) -> None:
    """Write the list of rejected samples, or remove a former one if there are none."""
    if not reasons:
        path.unlink(missing_ok=True)
        return
    with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        ledger = csv.writer(file)
        ledger.writerow(["path", "reason"])
        ledger.writerows((keys[row], reason) for row, reason in sorted(reasons.items()))
    sync(path)


def has_index(output: Path) -> bool:
    """Say whether a build has its index, so that only renaming is left to do."""
    index_path, folder, _ = output_paths(output)
    return (folder / index_path.name).exists()


def publish(output: Path, overwrite: bool) -> None:
    """Rename the files of a finished build into place, the index last. Hold `publishing` meanwhile.

    Raises BuildError if a data set has appeared since the build began, without ``overwrite``.
    """
    index_path, folder, ledger = output_paths(output)
    finished, replaced = folder / index_path.name, folder / _REPLACED
    index = Index.read(finished)
    files = {shard.file for shard in index.shards}
    left = {name for name in files if (folder / name).exists()}
    if left == files and not replaced.exists():  # otherwise it was killed when it had begun
        check_output(output, files, overwrite)
    if index_path.exists():
        index_path.replace(replaced)  # from here on until the end there is no data set
        sync(output.parent)
    for name in sorted(files):
        _move(folder / name, output.parent)
    if index.build["rejected"]:
        _move(folder / ledger.name, output.parent)
    else:
        ledger.unlink(missing_ok=True)
    for name in unused_files(replaced, output) - files:
        (output.parent / name).unlink(missing_ok=True)
    sync(output.parent)
    _move(finished, output.parent)
    sync(output.parent)
    (folder / PLAN).unlink(missing_ok=True)  # without it, nobody goes on with the folder
    shutil.rmtree(folder, ignore_errors=True)


def unused_files(replaced: Path, output: Path) -> set[str]:
    """Return the files of the data set that was replaced, but not those that others name, too."""
    files = _own_files(replaced, output)
    for other in output.parent.glob("*.idx") if files else ():
        with suppress(FormatError, OSError):
            files -= {shard.file for shard in Index.read(other).shards}
    return files


def remove_leftovers(output: Path) -> None:
    """Remove the folder of a build that was killed just after it had published its data set.

    Shards that are done have their files there otherwise.
    """
    folder = output_paths(output)[1]
    is_left = any(folder.glob("*.done")) and not any(folder.glob("*.bin"))
    if is_left and not has_index(output):
        shutil.rmtree(folder, ignore_errors=True)


def _move(path: Path, folder: Path) -> None:
    """Move a file, unless it was moved before a kill."""
    with suppress(FileNotFoundError):
        path.replace(folder / path.name)
