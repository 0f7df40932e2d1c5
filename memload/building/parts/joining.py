"""How a part comes into a build: it opens what another part has begun, or begins it."""

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from memload.building.conversion import AnySettings
from memload.building.destination import check_not_read, check_output, publish
from memload.building.lock import Holder, Lock, wait_until
from memload.building.parts.listing import read_source, write_source
from memload.building.parts.published import state_of, state_of_index
from memload.building.parts.samples import Checksums, checksums, difference
from memload.building.parts.workspace import (
    Part,
    PartsWorkspace,
    names_in,
    work_of,
)
from memload.building.plans import Begun, differences
from memload.building.preparation import different_descriptions
from memload.building.request import Request
from memload.building.sources.record import Source, optional
from memload.building.workspace import (
    arrays_of,
    partly_published,
    read_keys,
    read_plan,
    remove,
    remove_files,
)
from memload.building.writer import rows_per_shard, shard_bytes
from memload.errors import BuildError
from memload.storage.index import Array, Index
from memload.wording import counted

logger = logging.getLogger("memload")

#: If no shard size is given, each part has so many shards or more, and none is larger than this.
_SHARDS_PER_PART = 4
_LARGEST_SHARD = 4_000_000_000


class ChangedError(Exception):
    """Another part has published the data set, or begun to: look again."""


def join(
    request: Request, part: Part | None, lock: Lock, index_before: tuple[int, ...]
) -> PartsWorkspace:
    """Share the lock of the folder, and open the build in it. The first one begins it.

    ``index_before`` is the state of the index when `published` looked at it.
    """
    while True:
        lock.wait(request.lock_timeout, shared=True)
        former_plan = read_plan(request.folder)
        workspace = _open(request)
        if workspace is not None:
            return workspace
        if not _wait_to_begin(request, lock, former_plan):
            continue
        is_new = names_in(request.folder) <= {"lock"}
        try:
            _finish_renaming(request)
            if state_of_index(request.output) != index_before:
                raise ChangedError
            if _open(request) is None:
                _begin(request, part, lock)
        except BaseException:  # a Ctrl-C, too, is to leave no empty folder behind
            if is_new:
                remove(request.output)
            raise


def _wait_to_begin(request: Request, lock: Lock, former_plan: dict[str, Any] | None) -> bool:
    """Wait for the lock alone. Returns false if another part has begun the build meanwhile.

    That part shares the lock for as long as it builds.
    """

    def can_go_on() -> bool:
        return lock.acquire(work="begins the build") or read_plan(request.folder) != former_plan

    wait_until(can_go_on, lock.path, request.lock_timeout)
    return lock.is_alone


def _open(request: Request) -> PartsWorkspace | None:
    """Open the build in the folder. None if it has yet to begin, or only has to be renamed.

    Raises BuildError if it is another build, even with ``overwrite``: that replaces only data sets
    that are published.
    """
    facts = _plan_in(request)
    if facts is None:
        return None
    plan, begun = facts
    described = request.preparation.description()
    if described != begun.source:
        raise _other_build(request, begun, different_descriptions(begun.source, described))
    listed = _listed_source(request, begun)
    source = request.preparation.open() if listed is None else listed
    settings = request.preparation.settings(source)
    rows = plan["rows per shard"]
    if request.shard_size is not None:
        rows = rows_per_shard(arrays_of(settings), request.shard_size)
    workspace = _workspace(request, source, settings, rows, begun.overwrite)
    if workspace.plan != plan:
        raise _other_build(request, begun, differences(plan, workspace.plan))
    _check_samples(request, workspace, begun, has_names=listed is not None)
    if listed is None:
        (request.folder / "source").unlink(missing_ok=True)
    return workspace


def _listed_source(request: Request, begun: Begun) -> Source | None:
    """Return the source as the first part has listed it; None if there is no list to be used."""
    path = request.folder / "source"
    if not begun.list_sha256 or path.name not in names_in(request.folder):
        return None
    try:
        return read_source(path, begun.list_sha256)
    except BuildError as error:
        logger.warning(f"{error}. So the source is listed again")
        return None


def _plan_in(request: Request) -> tuple[dict[str, Any], Begun] | None:
    """Return the plan of the build in the folder, and who began it. None if it has yet to begin.

    Raises BuildError if it is damaged, or of a build without parts.
    """
    if state_of(request.output) != "building":
        return None
    facts = read_plan(request.folder)
    if facts is not None and "begun" in facts:
        return facts["plan"], facts["begun"]
    if facts is not None:
        text = "holds a build that was begun without --part. Finish it without --part"
    else:
        text = "holds a build whose plan.json is missing or damaged. Restore that file"
    raise BuildError(
        f"{request.folder} {text}, or delete that folder to begin anew in parts.",
        path=request.output,
    )


def _workspace(
    request: Request, source: Source, settings: AnySettings, rows: int | None, overwrite: bool
) -> PartsWorkspace:
    return PartsWorkspace(
        source,
        request.output,
        settings,
        name=request.name,
        rows_per_shard=rows,
        overwrite=request.overwrite or overwrite,
    )


def _check_samples(
    request: Request, workspace: PartsWorkspace, begun: Begun, *, has_names: bool
) -> None:
    """Raise BuildError if the source of this machine has other samples.

    ``has_names`` says whether their names come from the list of the first part.
    """
    found = ""
    if not has_names:
        keys = read_keys(request.folder / "keys")
        if keys is None:
            raise BuildError(
                f"{request.folder / 'keys'} is missing or damaged. Restore it, or delete "
                f"{request.folder} to begin anew.",
                path=request.output,
            )
        is_same = all(map(np.array_equal, keys.pack(), workspace.keys.pack()))
        found = "" if is_same else "its samples have other names"
    if not found:
        now = checksums(workspace.source, workspace.settings, request.num_workers, request.timeout)
        found = difference(workspace.source, now, begun.samples)
    if found:
        raise _other_build(request, begun, f"the source is another one, or is missing: {found}")


def _other_build(request: Request, begun: Begun, text: str) -> BuildError:
    here, there = Holder.here().machine, begun.machine
    return BuildError(
        f"{request.folder} holds a build that began on {there}, and what is given on {here} "
        f"differs: {text}. Use the same source, settings and versions on all machines, or delete "
        "that folder to begin anew.",
        path=request.output,
    )


def _finish_renaming(request: Request) -> None:
    """Rename what a publisher has left that was stopped. The lock is held alone.

    Raises ChangedError if there was something left.
    """
    index = partly_published(request.output)
    if index is None:
        return
    facts = read_plan(request.folder) or {}
    former_overwrite = facts["begun"].overwrite if "begun" in facts else facts.get("overwrite")
    overwrite = request.overwrite or bool(former_overwrite)
    publish(index, request.folder, request.output, overwrite)
    remove(request.output)
    raise ChangedError


def _begin(request: Request, part: Part | None, lock: Lock) -> None:
    """List the source and write the plan. The lock is held alone."""
    preparation = request.preparation
    # User's code may fork, which should not be done beside a thread.
    alive = lock.alive if preparation.is_of_files else contextlib.nullcontext
    with alive():
        source = preparation.with_absolute_paths().open()
    settings = preparation.settings(source)
    arrays = arrays_of(settings)
    rows = rows_per_shard(arrays, request.shard_size)
    if rows is None and part is not None:
        rows = _default_rows(request, part, len(source), arrays)
    workspace = _workspace(request, source, settings, rows, overwrite=False)
    for path in request.data_sets_read(source):
        check_not_read(Index.open(path), request.output, workspace.arrays)
    check_output(request.output, workspace.arrays, request.overwrite)
    workspace.check_space()
    samples = checksums(source, settings, request.num_workers, request.timeout)
    with alive():
        _write_plan(request, part, workspace, samples)


def _write_plan(
    request: Request,
    part: Part | None,
    workspace: PartsWorkspace,
    samples: Checksums,
) -> None:
    """Write what the other parts need to go on, the plan last."""
    remove_files(request.output)
    source = workspace.source
    is_listed = request.preparation.is_of_files and optional(source).is_portable
    begun = Begun(
        *Holder.here(work_of(part)),
        rows=len(source),
        source=request.preparation.description(),
        list_sha256=write_source(source, request.folder / "source") if is_listed else "",
        samples=samples,
        overwrite=request.overwrite,
    )
    for name in ("shards", "done"):
        (request.folder / name).mkdir()
    workspace.write_plan(request.folder, {"plan": workspace.plan, "begun": begun._asdict()})


def _default_rows(request: Request, part: Part, rows: int, arrays: Sequence[Array]) -> int:
    """Choose how many rows a shard has, and say so. All parts of as many choose the same."""
    largest = rows_per_shard(arrays, _LARGEST_SHARD) or rows
    chosen = max(1, min(rows // (_SHARDS_PER_PART * part[1]), largest))
    logger.info(
        f"{request.name}: no --shard-size is given, so a shard has {counted(chosen, 'row')}, as "
        f"with --shard-size {shard_bytes(arrays, chosen)}. That makes "
        f"{counted(-(-rows // chosen), 'shard')} for {counted(part[1], 'part')}"
    )
    return chosen
