"""The way of one part through a build that several machines share."""

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import Executor
from typing import Any

import numpy as np

from memload.building.completion import all_notes, complete, report_of, report_on, unfinished_report
from memload.building.conversion import AnySettings
from memload.building.destination import check_not_read, check_output, publish
from memload.building.file_systems import check_file_system
from memload.building.lock import FolderRemovedError, Holder, Lock, wait_until
from memload.building.parts.executors import build_with
from memload.building.parts.listing import read_source, write_source
from memload.building.parts.published import published, remove_rest, state_of, state_of_index
from memload.building.parts.samples import checksums, difference
from memload.building.parts.workspace import (
    Part,
    PartsWorkspace,
    Running,
    build_locked,
    names_in,
    work_of,
)
from memload.building.plans import Begun, differences
from memload.building.progress import Show
from memload.building.progress import progress as progress_display
from memload.building.report import BuildReport, PartReport
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


def build_in_parts(request: Request, part: Part | None, executor: Executor | None) -> BuildReport:
    """Build the shards of a part, or without one all that are left; publish if all are done.

    With an ``executor``, its tasks build the shards.
    """
    check_file_system(request.output.parent, in_parts=True)
    # A part may be run late, as by a retry. It must not replace what the others have published.
    is_looked_for = executor is None or not request.overwrite
    while True:
        lock, index_before = Lock(request.folder), state_of_index(request.output)
        workspace = None
        try:
            index = published(request) if is_looked_for else None
            is_looked_for = True
            if index is not None:
                remove_rest(request, lock)
                return _published_report(request, part, index)
            workspace = _join(request, part, lock, index_before)
            return _build_and_publish(request, workspace, part, executor, lock)
        except _ChangedError:
            continue
        except FolderRemovedError:
            if workspace is not None and state_of_index(request.output) == index_before:
                raise _removed(request) from None
        finally:
            lock.release()


class _ChangedError(Exception):
    """Another part has published the data set, or begun to: look again."""


def _removed(request: Request) -> BuildError:
    return BuildError(
        f"{request.folder} was removed while this build ran, and nothing is published: either by "
        "hand, or by another part, because no sample can be used. In that case its message says "
        "why. Run the same command again: it begins anew.",
        path=request.output,
    )


def _published_report(request: Request, part: Part | None, index: Index) -> BuildReport:
    if request.overwrite:
        logger.info(
            f"{request.name}: a data set with these settings, names and columns is published "
            f"already. To build it anew, delete {request.name.with_suffix('.idx')}"
        )
    shards = len(index.image.shards)
    report = PartReport(part, _count(shards, part), shards, (), was_published=True)
    return report_on(request.name, index, report)


# ----------------------------------------------------------------------------- joining, beginning


def _join(
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
                raise _ChangedError
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

    if not can_go_on() and former_plan is not None:
        logger.info(
            f"{request.folder} holds another build, which is replaced as soon as its parts have "
            "ended. Stop them if nobody needs it"
        )
    wait_until(can_go_on, lock.path, request.lock_timeout)
    return lock.is_alone


def _open(request: Request) -> PartsWorkspace | None:
    """Open the build in the folder. None if it has yet to begin, or only has to be renamed.

    Raises BuildError if it is another build.
    """
    plan = _plan_in(request)
    if plan is None:
        return None
    begun, former_overwrite = plan.pop("parts"), plan.pop("overwrite")
    described = request.preparation.description()
    if described != begun["source"]:
        if request.overwrite:
            return None
        raise _other_build(request, begun, differences(begun["source"], described))
    listed = _listed_source(request, begun)
    source = request.preparation.open() if listed is None else listed
    settings = request.preparation.settings(source)
    rows = plan["rows per shard"]
    if request.shard_size is not None:
        rows = rows_per_shard(arrays_of(settings), request.shard_size)
    workspace = _workspace(request, source, settings, rows, former_overwrite)
    if workspace.plan != plan:
        if request.overwrite:
            return None
        raise _other_build(request, begun, differences(plan, workspace.plan))
    _check_samples(request, workspace, begun, has_names=listed is not None)
    if listed is None:
        (request.folder / "source").unlink(missing_ok=True)
    return workspace


def _listed_source(request: Request, begun: dict[str, Any]) -> Source | None:
    """Return the source as the first part has listed it; None if there is no list to be used."""
    path = request.folder / "source"
    if not begun["list_sha256"] or path.name not in names_in(request.folder):
        return None
    try:
        return read_source(path, begun["list_sha256"])
    except BuildError as error:
        logger.warning(f"{error}. So the source is listed again")
        return None


def _plan_in(request: Request) -> dict[str, Any] | None:
    """Return the plan of the build in the folder, or None if there is none to go on with.

    Raises BuildError if it is damaged, or of a build without parts.
    """
    if state_of(request.output) != "building":
        return None
    plan = read_plan(request.folder)
    if plan is not None and {"parts", "overwrite", "rows per shard"} <= plan.keys():
        return plan
    if request.overwrite:
        return None
    if plan is not None and "parts" not in plan:
        text = "holds a build that was begun without --part. Finish it without --part"
    else:
        text = "holds a build whose plan.json is missing or damaged. Restore that file"
    raise BuildError(
        f"{request.folder} {text}, or say --overwrite to begin anew in parts.",
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
    request: Request, workspace: PartsWorkspace, begun: dict[str, Any], *, has_names: bool
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
        now = checksums(workspace.source, request.num_workers, request.timeout)
        found = difference(workspace.source, now, begun["samples"])
    if found:
        raise _other_build(request, begun, f"the source is another one, or is missing: {found}")


def _other_build(request: Request, begun: dict[str, Any], text: str) -> BuildError:
    here, there = Holder.here().machine, begun["machine"]
    return BuildError(
        f"{request.folder} holds a build that began on {there}, and what is given on {here} "
        f"differs: {text}. Use the same source, settings and versions on all machines, or delete "
        "that folder to begin anew.",
        path=request.output,
    )


def _finish_renaming(request: Request) -> None:
    """Rename what a publisher has left that was stopped. The lock is held alone.

    Raises _ChangedError if there was something left.
    """
    index = partly_published(request.output)
    if index is None:
        return
    former_plan = read_plan(request.folder) or {}
    overwrite = request.overwrite or former_plan.get("overwrite", False)
    publish(index, request.folder, request.output, overwrite)
    remove(request.output)
    raise _ChangedError


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
    samples = checksums(source, request.num_workers, request.timeout)
    with alive():
        _write_plan(request, part, workspace, samples)


def _write_plan(
    request: Request,
    part: Part | None,
    workspace: PartsWorkspace,
    samples: Mapping[str, int | None],
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
        samples=dict(samples),
    )
    for name in ("shards", "done"):
        (request.folder / name).mkdir()
    plan = {**workspace.plan, "parts": begun._asdict(), "overwrite": request.overwrite}
    workspace.write_plan(request.folder, plan)


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


# ------------------------------------------------------------------------------ shards, publishing


def _build_and_publish(
    request: Request,
    workspace: PartsWorkspace,
    part: Part | None,
    executor: Executor | None,
    lock: Lock,
) -> BuildReport:
    """Build the shards of a part, and publish the data set if those of all parts are done."""
    began, shards = time.perf_counter(), range(workspace.num_shards)
    own = {shard for shard in shards if part is None or shard % part[1] == part[0]}
    if executor is None:
        converted = _build_left(request, workspace, part, own, None)
    else:
        converted = _build_with_tasks(request, workspace, own, executor, lock)
    missing = set(shards) - workspace.done()
    if missing & own:
        raise BuildError(
            f"{request.name}: files of {counted(len(missing & own), 'shard')} were removed from "
            f"{request.folder} while this build ran. Run the same command again: it builds only "
            "these again.",
            path=request.output,
        )
    count = 1 if part is None else part[1]
    unfinished = tuple(sorted({shard % count for shard in missing}))
    report = PartReport(part, len(own), len(shards), unfinished, by_executor=executor is not None)
    num_workers = request.num_workers
    if missing:
        seconds = time.perf_counter() - began
        return unfinished_report(workspace, converted, seconds, num_workers, report)
    index, notes = _publish(request, workspace, lock)
    seconds = time.perf_counter() - began
    return report_of(workspace, index, converted, seconds, num_workers, notes, report)


def _build_with_tasks(
    request: Request, workspace: PartsWorkspace, own: Set[int], executor: Executor, lock: Lock
) -> int:
    """Have an executor build what is not done; return how many rows were converted.

    Each task shares the lock of the folder. Meanwhile this process does not: processes that an
    executor forks would keep it, and they can outlive this one. Raises _ChangedError if a part has
    published the data set.
    """
    lock.release()
    try:
        converted = _build_left(request, workspace, None, own, executor)
    except BuildError:
        if not workspace.is_in_folder():
            raise _ChangedError from None
        raise
    lock.wait(request.lock_timeout, shared=True)
    if not workspace.is_in_folder():
        raise _ChangedError
    return converted


def _build_left(
    request: Request,
    workspace: PartsWorkspace,
    part: Part | None,
    own: Set[int],
    executor: Executor | None,
) -> int:
    """Build what is not done of a part; return how many rows were converted.

    Shards that were done, and have to be built again, are anyone's: the part that they belong to
    may have ended for good.
    """
    workspace.reopen_missing()
    left = sorted((own | workspace.reopened()) - workspace.done())
    logger.info(
        f"{request.name}: {work_of(part) or 'this build'} has {len(own):,} of "
        f"{counted(workspace.num_shards, 'shard')} of {counted(workspace.rows_of(0), 'row')}, and "
        f"builds {len(left):,} now"
    )
    running = Running(request.num_workers, request.timeout, request.on_error, work_of(part))
    rows = sum(map(workspace.rows_of, left))
    with progress_display(str(request.name), rows, request.progress) as show:
        if executor is None:
            return _build_shards(workspace, left, running, request.lock_timeout, show)
        return build_with(executor, workspace, left, running, request.lock_timeout, show)


def _build_shards(
    workspace: PartsWorkspace,
    shards: Sequence[int],
    running: Running,
    lock_timeout: float,
    show: Show,
) -> int:
    """Build shards one after the other; return how many rows were converted.

    Those that others are at come last. If they are not done by then, their locks are waited for.
    """
    converted, busy = 0, []
    for shard in shards:
        lock = workspace.lock_of(shard)
        if lock.acquire(work=running.work):
            converted += build_locked(workspace, shard, lock, running, show)
        else:
            busy.append(shard)
    for shard in busy:
        lock = workspace.lock_of(shard)
        lock.wait(lock_timeout, work=running.work)
        converted += build_locked(workspace, shard, lock, running, show)
    return converted


def _publish(
    request: Request, workspace: PartsWorkspace, lock: Lock
) -> tuple[Index, Sequence[str]]:
    """Join the journals and rename the files into place; return the index and the notes.

    Raises FolderRemovedError or _ChangedError if another part has tried so meanwhile.
    """
    lock.wait(request.lock_timeout, work="publishes")
    # Another part has renamed files, or lets shards with rejected samples be tried again.
    if not workspace.is_in_folder() or len(workspace.done()) < workspace.num_shards:
        raise _ChangedError
    with lock.alive():
        workspace.check()
        try:
            index = complete(workspace, request.limit)
        except BuildError:
            # Too many are rejected. The next part that runs tries them again.
            workspace.reopen_rejects()
            raise
        notes = all_notes(workspace, index, request.new_to)
        publish(index, request.folder, request.output, workspace.overwrite)
    remove(request.output)
    return index, notes


def _count(shards: int, part: Part | None) -> int:
    """Return how many of so many shards a part has."""
    return shards if part is None else len(range(part[0], shards, part[1]))
