"""Whether the data set of a build in parts is published already, so that nothing is left to do."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from memload.building.conversion import AnySettings
from memload.building.lock import Lock
from memload.building.parts.workspace import done_shards, names_in
from memload.building.plans import differences
from memload.building.request import Request
from memload.building.sources.beside import FilesBeside
from memload.building.sources.classes import PinnedClasses
from memload.building.sources.listed import ListedSource
from memload.building.sources.record import Column, Source, optional
from memload.building.workspace import arrays_of, partly_published, remove
from memload.building.writer import rows_per_shard
from memload.errors import BuildError, DecodeError, FormatError
from memload.storage.format import output_paths, shard_pattern
from memload.storage.index import Array, Index
from memload.storage.keys import Keys
from memload.wording import counted

logger = logging.getLogger("memload")


def published(request: Request) -> Index | None:
    """Return the index if another part of this build has published it. Otherwise, None.

    The settings, arrays and classes are compared, and the names of all samples. If these are the
    same, so are the columns. The pixels are not, so that a build whose pictures have changed under
    the same names counts as published, too. Without ``overwrite``, it is enough that half of the
    names are there. Raises BuildError then if another data set is there.
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
    found, given = _content(index), _content_of(source, settings)
    columns = [
        {name: form.pop(name) for name in ("columns", "categories")} for form in (found, given)
    ]
    before, now = index.build["settings"], settings.as_dict()
    common = before.keys() & now.keys()  # those of masks differ only if the masks do
    found |= {name: before[name] for name in common}
    given |= {name: now[name] for name in common}
    if found != given:
        return f"settings or content: {differences(found, given)}"
    keys = source.keys if isinstance(source.keys, Keys) else Keys.of(list(source.keys))
    is_same = len(keys) == index.build["records"]
    if not is_same or not all(map(np.array_equal, keys.take(index.row).pack(), index.keys.pack())):
        return _different_names(request, keys, index)
    if columns[0] != columns[1]:
        return f"columns: {differences(*columns)}"
    return _different_columns(source, index)


def _different_names(request: Request, keys: Keys, index: Index) -> str:
    """Say how the names of samples differ, if it is not the same source that has changed since.

    A late part is not to fail because pictures were added or removed meanwhile.
    """
    known = set(keys)
    shared = sum(name in known for name in index.keys)
    if request.overwrite or 2 * shared < len(index):
        return f"samples: {shared:,} of its {counted(len(index), 'name')} are in the source"
    more = max(0, len(keys) - shared - index.build["rejected"])
    logger.info(
        f"{request.name} is published already. The source has changed since: "
        f"{counted(more, 'name')} more, {len(index) - shared:,} fewer. --new-to builds what is new"
    )
    return ""


def _content(index: Index) -> dict[str, Any]:
    """Return what the samples of an index have, in the form of a plan."""
    schema = {
        name: Column(values.dtype.str, values.shape[1:], name in index.points, name in index.boxes)
        for name, values in index.columns.items()
    }
    return _form(schema, index.arrays, index.classes, index.categories)


def _content_of(source: Source, settings: AnySettings) -> dict[str, Any]:
    """Return what the samples of a source have, in the form of a plan."""
    categories = optional(source).categories
    return _form(source.schema, arrays_of(settings), source.classes, categories)


def _form(
    schema: Mapping[str, Column],
    arrays: Iterable[Array],
    classes: Sequence[str] | None,
    categories: Mapping[str, Sequence[str]],
) -> dict[str, Any]:
    return {
        "columns": {
            name: [np.dtype(dtype).str, list(shape), points, *["boxes"] * boxes]
            for name, (dtype, shape, points, boxes) in schema.items()
        },
        "arrays": {array.name: [array.kind, array.descr, list(array.shape)] for array in arrays},
        "classes": None if classes is None else list(classes),
        "categories": {name: list(texts) for name, texts in categories.items()},
    }


def _different_columns(source: Source, index: Index) -> str:
    """Say which column has other values, apart from points and boxes, which are stored moved.

    Only sources that give columns without decoding are looked at.
    """
    if not hasattr(source, "without_image"):
        return ""
    try:
        columns = _columns_of(source, index.row)
    except DecodeError as error:
        return f"columns: {error}"
    for name, column in source.schema.items():
        if not column.follows and columns[name].tobytes() != index.columns[name].tobytes():
            return f"values of the column {name!r}"
    return ""


def _columns_of(source: Any, rows: np.ndarray) -> Mapping[str, np.ndarray]:
    """Return the columns of some samples, at once where they are in memory. Raises DecodeError."""
    if isinstance(source, FilesBeside):  # it leaves the columns as they are
        return _columns_of(source.source, rows)
    if isinstance(source, PinnedClasses):
        columns = _columns_of(source.source, rows)
        return {**columns, "label": source.renumbered(columns["label"])}
    if isinstance(source, ListedSource):
        return {name: values[rows] for name, values in source.columns.items()}
    found = {
        name: np.empty((len(rows), *column.shape), column.dtype)
        for name, column in source.schema.items()
    }
    for position, row in enumerate(rows.tolist()):
        for name, value in source.without_image(row).columns.items():
            if not source.schema[name].follows:  # there may be any number of boxes
                found[name][position] = value
    return found


def state_of_index(output: Path) -> tuple[int, ...]:
    """Return what changes if an index is replaced; nothing if there is none."""
    path = output.with_suffix(".idx")
    if path.name not in names_in(path.parent):
        return ()
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size
