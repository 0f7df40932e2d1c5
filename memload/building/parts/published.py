"""Whether the data set of a build in parts is published already, so that nothing is left to do."""

import functools
import zlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from memload.building.conversion import AnySettings
from memload.building.first_samples import look_at_first
from memload.building.journal import names_of_boxes, set_columns
from memload.building.lock import Lock
from memload.building.parts.workspace import PartsWorkspace, done_shards, names_in
from memload.building.plans import differences
from memload.building.request import Request
from memload.building.sources.record import Source
from memload.building.workspace import arrays_of, remove
from memload.building.writer import rows_per_shard
from memload.errors import BuildError, FormatError
from memload.storage.format import shard_pattern
from memload.storage.index import Index

#: So many samples are converted again.
_SAMPLES = 8


def published(request: Request) -> Index | None:
    """Return the index if the data set is published.

    With ``overwrite``, only if the build would have the same result, as far as `_has_same_result`
    looks: then it was published by another part of the same build. Without, the source is not
    looked at. Raises BuildError if a data set with other settings is there.
    """
    if "plan.json" in names_in(request.folder) and not is_renamed(request):
        return None  # it is being built, or still being published
    try:
        index = Index.open(request.output)
    except FormatError:
        return None  # there is none, or `check_output` says that it is in the way
    found = dict(index.build.get("settings", {}))
    given = {name: value for name, value in request.preparation.given().items() if name in found}
    found = {name: found[name] for name in given}
    if request.shard_size is not None and given == found:  # else it may not fit the other rows
        given["rows per shard"] = rows_per_shard(index.arrays, request.shard_size)
        found["rows per shard"] = _rows_per_shard_of(index, given["rows per shard"])
    if request.overwrite:
        return index if given == found and _has_same_result(request, index) else None
    if given == found:
        return index
    raise BuildError(
        f"{request.name} exists already, with other settings: {differences(found, given)}. Choose "
        "another output, or say --overwrite.",
        path=request.output,
    )


def is_renamed(request: Request) -> bool:
    """Return whether all finished files are in their place, so that the folder has only to go."""
    if not done_shards(request.folder):
        return False
    names, shards = names_in(request.folder), shard_pattern(request.output, None)
    return request.output.with_suffix(".idx").name not in names and not any(
        map(shards.fullmatch, names)
    )


def remove_rest(request: Request, lock: Lock) -> None:
    """Remove the folder of a published build, if a part was stopped before it had done so."""
    if request.folder.exists() and lock.acquire() and published(request) is not None:
        remove(request.output)


def _rows_per_shard_of(index: Index, wanted: int | None) -> int | None:
    """Return how many rows a shard of an index has. A single shard may have fewer than wanted."""
    rows = index.image.shards[0].rows
    return wanted if len(index.image.shards) == 1 and wanted and rows <= wanted else rows


def _has_same_result(request: Request, index: Index) -> bool:
    """Return whether the source still has the samples of an index.

    The names of all samples are compared, and their columns if these can be had without decoding.
    Of a few samples, the pixels are compared.
    """
    source = request.preparation.open()
    settings = request.preparation.settings(source)
    workspace = PartsWorkspace(
        source, request.output, settings, name=request.name, rows_per_shard=None, overwrite=True
    )
    arrays = [replace(array, shards=()) for array in index.arrays]
    if (
        settings.as_dict() != index.build["settings"]
        or len(source) != index.build["records"]
        or arrays_of(settings) != arrays
    ):
        return False
    keys = workspace.keys.take(index.row)
    if not all(map(np.array_equal, keys.pack(), index.keys.pack())):
        return False
    chosen = np.unique(np.linspace(0, len(index) - 1, _SAMPLES).round().astype(int))
    rows = index.row[chosen].tolist()
    before = [[int(index.crc32[array.name][row]) for array in arrays] for row in rows]
    look = functools.partial(_checksums, source, settings, rows)
    now, _ = look_at_first(look, len(rows), request.num_workers, request.timeout, count=len(rows))
    return now == before and _has_same_columns(workspace, index)


def _has_same_columns(workspace: PartsWorkspace, index: Index) -> bool:
    """Compare the columns of all samples, apart from points and boxes."""
    source, record = workspace.source, np.zeros(1, workspace.record_type)[0]
    schema = {name: column for name, column in source.schema.items() if not column.follows}
    if index.columns.keys() != source.schema.keys():
        return False
    if not hasattr(source, "without_image"):
        return True
    for sample, row in enumerate(index.row.tolist()):
        set_columns(record, schema, source.without_image(row).columns)
        for name in schema:
            if record[f"column/{name}"].tobytes() != index.columns[name][sample].tobytes():
                return False
    return True


def _checksums(
    source: Source, settings: AnySettings, rows: Sequence[int], number: int
) -> list[int]:
    """Return the CRC-32 of the stored row of each array."""
    points = [name for name, column in source.schema.items() if column.points]
    row = settings.convert(source[rows[number]], points, names_of_boxes(source.schema))
    return [zlib.crc32(data) for data in (row.pixels, *(array.data for array in row.extra_arrays))]
