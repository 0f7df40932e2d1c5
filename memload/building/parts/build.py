"""The way of one part through a build that several machines share."""

import logging
import time
from collections.abc import Collection, Sequence, Set
from concurrent.futures import Executor
from typing import Any

from memload.building.completion import all_notes, complete, report_on, unfinished_report
from memload.building.destination import check_output, publish
from memload.building.file_systems import check_file_system
from memload.building.lock import FolderRemovedError, Holder, Lock
from memload.building.parts.executors import build_with
from memload.building.parts.joining import ChangedError, join
from memload.building.parts.published import published, remove_rest, state_of_index
from memload.building.parts.workspace import (
    Part,
    PartsWorkspace,
    Running,
    build_locked,
    work_of,
)
from memload.building.progress import Show
from memload.building.progress import progress as progress_display
from memload.building.rejects import frequent_reasons
from memload.building.report import BuildReport, PartReport
from memload.building.request import Request
from memload.building.workspace import remove
from memload.errors import BuildError
from memload.storage.index import Index
from memload.wording import counted

logger = logging.getLogger("memload")


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
            workspace = join(request, part, lock, index_before)
            return _build_and_publish(request, workspace, part, executor, lock)
        except ChangedError:
            continue
        except FolderRemovedError:
            if workspace is not None and state_of_index(request.output) == index_before:
                raise _removed(request) from None
        finally:
            lock.release()


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
    report = PartReport(part, len(_own(shards, part)), shards, (), was_published=True)
    return report_on(request.name, index, report)


def _build_and_publish(
    request: Request,
    workspace: PartsWorkspace,
    part: Part | None,
    executor: Executor | None,
    lock: Lock,
) -> BuildReport:
    """Build the shards of a part, and publish the data set if those of all parts are done."""
    began, shards = time.perf_counter(), workspace.num_shards
    own = set(_own(shards, part))
    if executor is None:
        converted = _build_left(request, workspace, part, own, None)
    else:
        converted = _build_with_tasks(request, workspace, own, executor, lock)
    missing = set(range(shards)) - workspace.done()
    if missing & workspace.reopened():
        raise ChangedError  # another part has tried to publish: too many samples are rejected
    if missing & own:
        raise BuildError(
            f"{request.name}: files of {counted(len(missing & own), 'shard')} were removed from "
            f"{request.folder} while this build ran. Run the same command again: it builds only "
            "these again.",
            path=request.output,
        )
    rejected = 0 if part is None else _log_rejects(request, workspace, part, own)
    count = 1 if part is None else part[1]
    unfinished = tuple(sorted({shard % count for shard in missing}))
    report = PartReport(part, len(own), shards, unfinished, by_executor=executor is not None)
    work: dict[str, Any] = {"converted": converted, "num_workers": request.num_workers}
    if missing:
        work["seconds"] = time.perf_counter() - began
        return unfinished_report(workspace, report, rejected=rejected, **work)
    index, notes = _publish(request, workspace, lock)
    work["seconds"] = time.perf_counter() - began
    return report_on(request.name, index, report, notes=notes, **work)


def _log_rejects(
    request: Request, workspace: PartsWorkspace, part: Part, own: Collection[int]
) -> int:
    """Warn of samples that a part has rejected, and return how many they are.

    A folder that only this machine lacks shows in that way.
    """
    reasons = workspace.reasons_in(own)
    if reasons:
        logger.warning(
            f"{request.name}: {counted(len(reasons), 'sample')} of {work_of(part)} cannot be used "
            f"on {Holder.here().machine}: {frequent_reasons(reasons, workspace.keys)}"
        )
    return len(reasons)


def _build_with_tasks(
    request: Request, workspace: PartsWorkspace, own: Set[int], executor: Executor, lock: Lock
) -> int:
    """Have an executor build what is not done; return how many rows were converted.

    Each task shares the lock of the folder. Meanwhile this process does not: processes that an
    executor forks would keep it, and they can outlive this one. Raises ChangedError if a part has
    published the data set.
    """
    lock.release()
    try:
        converted = _build_left(request, workspace, None, own, executor)
    except BuildError:
        if not workspace.is_in_folder():
            raise ChangedError from None
        raise
    lock.wait(request.lock_timeout, shared=True)
    if not workspace.is_in_folder():
        raise ChangedError
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
    running = Running(
        request.num_workers,
        request.timeout,
        request.lock_timeout,
        request.on_error,
        work_of(part),
    )
    rows = sum(map(workspace.rows_of, left))
    with progress_display(str(request.name), rows, request.progress) as show:
        if executor is None:
            return _build_shards(workspace, left, running, show)
        return build_with(executor, workspace, left, running, show)


def _build_shards(
    workspace: PartsWorkspace, shards: Sequence[int], running: Running, show: Show
) -> int:
    """Build shards one after the other; return how many rows were converted.

    Shards that are locked come last. If they are not done by then, their locks are waited for.
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
        lock.wait(running.lock_timeout, work=running.work)
        converted += build_locked(workspace, shard, lock, running, show)
    return converted


def _publish(
    request: Request, workspace: PartsWorkspace, lock: Lock
) -> tuple[Index, Sequence[str]]:
    """Join the journals and rename the files into place; return the index and the notes.

    Raises FolderRemovedError or ChangedError if another part has tried so meanwhile.
    """
    lock.wait(request.lock_timeout, work="publishes")
    # Another part has renamed files, or lets shards with rejected samples be tried again.
    if not workspace.is_in_folder() or len(workspace.done()) < workspace.num_shards:
        raise ChangedError
    if workspace.overwrite:  # data sets of other names may have appeared since the build began
        check_output(request.output, workspace.arrays, overwrite=True)
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


def _own(shards: int, part: Part | None) -> range:
    """Return those of so many shards that a part has."""
    return range(shards) if part is None else range(part[0], shards, part[1])
