"""Whether the data set of a build in parts is published already, so that nothing is left to do."""

from pathlib import Path
from typing import Literal

import numpy as np

from memload.building.journal import set_columns
from memload.building.lock import Lock
from memload.building.parts.workspace import PartsWorkspace, done_shards, names_in
from memload.building.plans import differences
from memload.building.request import Request
from memload.building.workspace import arrays_of, partly_published, remove
from memload.building.writer import rows_per_shard
from memload.errors import BuildError, FormatError
from memload.storage.format import output_paths, shard_pattern
from memload.storage.index import Index


def published(request: Request) -> Index | None:
    """Return the index if another part of this build has published it. Otherwise, None.

    The settings, the names of all samples and their columns are compared. The pixels are not, so
    that a build whose pictures have changed under the same names counts as published, too. Raises
    BuildError if another data set is there, without ``overwrite``.
    """
    if state_of(request.output) in ("building", "renaming"):
        return None
    try:
        index = Index.open(request.output)
    except FormatError:
        return None  # there is none, or `check_output` says that it is in the way
    different = _different_settings(request, index) or _different_samples(request, index)
    if not different:
        return index
    if request.overwrite:
        return None
    raise BuildError(
        f"{request.name} exists already, with other {different}. Choose another output, or say "
        "--overwrite.",
        path=request.output,
    )


def state_of(output: Path) -> Literal["nothing", "building", "renaming", "renamed"]:
    """Return how far the build in the folder of an output is.

    ==============  ================================================================================
    ``"nothing"``   it is not begun, or nothing but other people's files is left of it
    ``"building"``  shards are being built, or too many samples were rejected
    ``"renaming"``  it is complete, and some of its files are in their place
    ``"renamed"``   all of its files are in their place, so that the folder has only to go
    ==============  ================================================================================
    """
    index_path, folder, _ = output_paths(output)
    if partly_published(output) is not None:
        return "renaming"
    names, done = names_in(folder), done_shards(folder)
    has_files = any(map(shard_pattern(output, None).fullmatch, names))
    if done and not has_files and index_path.name not in names:
        return "renamed"
    # Without its plan, a build with shards that are done is damaged.
    return "building" if done or "plan.json" in names else "nothing"


def remove_rest(request: Request, lock: Lock) -> None:
    """Remove the folder of a published build, if a part was stopped before it had done so."""
    if not request.folder.exists() or not lock.acquire():
        return
    if state_of(request.output) in ("nothing", "renamed"):
        remove(request.output)


def _different_settings(request: Request, index: Index) -> str:
    """Say which settings differ. Only those that are known before the source is opened count."""
    found = dict(index.build.get("settings", {}))
    given = {name: value for name, value in request.preparation.given().items() if name in found}
    found = {name: found[name] for name in given}
    if given == found and request.shard_size is not None:
        given["rows per shard"] = rows_per_shard(index.arrays, request.shard_size)
        found["rows per shard"] = _rows_per_shard_of(index, given["rows per shard"])
    return "" if given == found else f"settings: {differences(found, given)}"


def _rows_per_shard_of(index: Index, wanted: int | None) -> int | None:
    """Return how many rows a shard has. A single shard may have fewer than wanted."""
    rows = index.image.shards[0].rows
    return wanted if len(index.image.shards) == 1 and wanted and rows <= wanted else rows


def _different_samples(request: Request, index: Index) -> str:
    """Say what differs between the samples of the source and those of an index."""
    source = request.preparation.open()
    settings = request.preparation.settings(source)
    if settings.as_dict() != index.build["settings"]:
        return f"settings: {differences(index.build['settings'], settings.as_dict())}"
    workspace = PartsWorkspace(
        source, request.output, settings, name=request.name, rows_per_shard=None, overwrite=True
    )
    if len(source) != index.build["records"]:
        return (
            f"samples: it was made from {index.build['records']:,}, and these are {len(source):,}"
        )
    if [array.name for array in arrays_of(settings)] != [array.name for array in index.arrays]:
        return "masks or arrays"
    keys = workspace.keys.take(index.row)
    if not all(map(np.array_equal, keys.pack(), index.keys.pack())):
        return "samples: their names differ"
    return _different_columns(workspace, index)


def _different_columns(workspace: PartsWorkspace, index: Index) -> str:
    """Say which column differs, apart from points and boxes, which are stored moved.

    Only sources that give columns without decoding are looked at.
    """
    source, record = workspace.source, np.zeros(1, workspace.record_type)[0]
    schema = {name: column for name, column in source.schema.items() if not column.follows}
    if index.columns.keys() != source.schema.keys():
        return "columns"
    if not hasattr(source, "without_image"):
        return ""
    for sample, row in enumerate(index.row.tolist()):
        set_columns(record, schema, source.without_image(row).columns)
        for name in schema:
            if record[f"column/{name}"].tobytes() != index.columns[name][sample].tobytes():
                return f"values of the column {name!r}"
    return ""


def state_of_index(output: Path) -> tuple[int, ...]:
    """Return what changes if an index is replaced; nothing if there is none."""
    path = output.with_suffix(".idx")
    if path.name not in names_in(path.parent):
        return ()
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size
