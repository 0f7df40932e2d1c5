"""One task for each shard, on any `concurrent.futures.Executor`.

::

    this process                       a process or thread of the executor
    build_with    ── ShardTask ─────▶  run_task    reads the source from the folder of the build
      │                                  │         builds the shard under its lock
    as_completed  ◀────── Counts ──────  ▼

The executor decides where a task runs, and whether it is run again if its process dies.
"""

import dataclasses
import uuid
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import (
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    as_completed,
)
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from memload.building.checks import check_may_start_workers
from memload.building.conversion import AnySettings
from memload.building.lock import FolderRemovedError, Holder, Lock
from memload.building.parts.listing import read_data_set, read_source, write_data_set
from memload.building.parts.workspace import (
    PartsWorkspace,
    Running,
    build_locked,
    names_in,
    read_done,
)
from memload.building.plans import Begun, differences
from memload.building.progress import Show
from memload.building.system_errors import system_error
from memload.building.workspace import read_plan
from memload.errors import BuildError, MemloadError, describe_error
from memload.wording import counted, listed

#: The most reasons that the error of a failed build shows, and the most letters of each.
_REASONS, _LETTERS = 3, 1000


class Counts(NamedTuple):
    """What the task of a shard returns."""

    converted: int  #: rows that this task converted
    rejected: int  #: those of the whole shard


@dataclass(frozen=True)
class ShardTask:
    """What a task of an executor has to know. It is small, and can be pickled."""

    shard: int
    output: Path
    name: Path
    settings: AnySettings
    rows_per_shard: int | None
    digest: str  #: of a pickled data set of the user's; empty if the folder has the list
    running: Running
    call: str  #: makes tasks differ between calls: Dask keeps results of equal ones


def build_with(
    executor: Executor,
    workspace: PartsWorkspace,
    shards: Sequence[int],
    running: Running,
    show: Show,
) -> int:
    """Have the tasks of an executor build shards; return how many rows were converted.

    If tasks fail, the others end first. Then BuildError is raised, which shows the first reasons.
    Waits as long as the executor does.
    """
    task = _task(workspace, running)
    futures: dict[Future[Counts], int] = {}
    failed: dict[int, BaseException] = {}
    converted = rejected = 0
    try:
        for shard in shards:
            try:
                future = executor.submit(run_task, dataclasses.replace(task, shard=shard))
            except Exception as error:  # noqa: BLE001  # it was shut down, or a process has died
                failed[shard] = error
            else:
                futures[_checked(future, futures, executor)] = shard
        for future in as_completed(futures):
            shard = futures[future]
            outcome = _outcome(future)
            if isinstance(outcome, BaseException):
                failed[shard] = outcome
                continue
            converted += outcome.converted
            rejected += outcome.rejected
            show(workspace.rows_of(shard), rejected)
    finally:  # after a Ctrl-C, tasks that have not begun are given up
        for future in futures:
            future.cancel()
    if failed:
        raise _failure(workspace, failed, len(shards), running.num_workers)
    return converted


def _task(workspace: PartsWorkspace, running: Running) -> ShardTask:
    """Return the task of shard 0. A data set of the user's is written into the folder for it."""
    is_listed = "source" in names_in(workspace.folder)
    return ShardTask(
        shard=0,
        output=workspace.output,
        name=workspace.name,
        settings=workspace.settings,
        rows_per_shard=workspace.rows_per_shard,
        digest="" if is_listed else write_data_set(workspace.source, workspace.folder),
        running=running,
        call=uuid.uuid4().hex,
    )


def _outcome(future: Future[Any]) -> Counts | BaseException:
    """Return what a task that has ended returned, or what it raised, even if it is no Exception.

    ``future.result()`` would raise a SystemExit of a task as if it were one of this process.
    """
    try:
        error = future.exception()
    except CancelledError as cancelled:  # by the executor
        error = cancelled
    if error is not None:
        return error
    result = future.result()
    if isinstance(result, Counts):
        return result
    return TypeError(f"the executor returned {result!r:.80}, which is not what the task returns")


def _checked(future: object, others: Collection[object], executor: Executor) -> Future[Counts]:
    """Return a future. Raises TypeError if it is one of another library, as of Dask's Client."""
    if future in others:
        raise TypeError(
            f"executor: {type(executor).__name__}.submit() returned the same future twice. Give an "
            "executor that returns one for each task."
        )
    if not isinstance(future, Future):
        found = f"{type(future).__module__}.{type(future).__name__}"
        raise TypeError(
            f"executor: {type(executor).__name__}.submit() returned a {found}, and no "
            "concurrent.futures.Future. Give an executor, such as client.get_executor() of Dask."
        )
    return future


def _failure(
    workspace: PartsWorkspace, failed: Mapping[int, BaseException], tasks: int, num_workers: int
) -> BuildError:
    """Return one error for all tasks that failed. Shards with the same reason are put together."""
    shards_of: dict[object, list[int]] = {}
    for shard, error in sorted(failed.items()):
        # An executor's own messages differ from task to task, so its errors are grouped by type.
        kind = _reason(error) if isinstance(error, MemloadError) else type(error)
        shards_of.setdefault(kind, []).append(shard)
    reasons = [_named(shards) + _reason(failed[shards[0]]) for shards in shards_of.values()]
    if len(reasons) > _REASONS:
        reasons[_REASONS:] = [f"{counted(len(reasons) - _REASONS, 'other reason')}."]
    if any(isinstance(error, BrokenExecutor) for error in failed.values()):
        reasons.append("An executor that is broken takes no more tasks, so make a new one.")
    are_ours = all(isinstance(error, MemloadError) for error in failed.values())
    if not (are_ours or num_workers):
        reasons.append(
            "If an image is what ends the process of a task, num_workers=1 finds and rejects it."
        )
    if len(failed) < tasks:
        reasons.append("The others have ended.")
    return BuildError(
        f"{workspace.name}: {len(failed):,} of {counted(tasks, 'task')} failed. "
        f"{' '.join(reasons)} The same build does only what is left when it is run again.",
        path=workspace.output,
    )


def _named(shards: Sequence[int]) -> str:
    return f"{'Shard' if len(shards) == 1 else 'Shards'} {listed(shards, 5)}"


def _reason(error: BaseException) -> str:
    """Return what a task or the executor says, to follow the name of a shard."""
    # Ray's errors have that of the task as their argument, and a traceback as their text.
    is_ours = isinstance(error, MemloadError)
    text = f", {error.args[0]}" if is_ours else f": {describe_error(error)}"
    text = text if len(text) <= _LETTERS else text[: _LETTERS - 1] + "…"
    return text if text.endswith((".", "…")) else text + "."


def run_task(task: ShardTask) -> Counts:
    """Build a shard in a task.

    Raises BuildError, which names the machine. Other errors could not be pickled, or not be read by
    a process without the code of the data set.
    """
    try:
        check_may_start_workers(task.running.num_workers)
        return _build(task)
    except MemloadError as error:
        text = str(error)
    except FolderRemovedError:
        text = (
            f"{task.output.with_suffix('.building')} was removed when this task came: the build "
            "has ended meanwhile"
        )
    except OSError as error:
        text = str(system_error(task.name, error))
    except KeyboardInterrupt:  # of this process
        raise
    except BaseException as error:  # noqa: BLE001  # a data set's own code may raise anything
        text = describe_error(error)
    raise BuildError(f"on {Holder.here().machine}: {text}", path=task.output)


def _build(task: ShardTask) -> Counts:
    folder = task.output.with_suffix(".building")
    facts = _read_plan(task, folder)
    lock = Lock(folder)
    # The process that has begun this build may have ended, while this task goes on.
    lock.wait(task.running.lock_timeout, shared=True)
    try:
        plan, begun = facts["plan"], facts["begun"]
        workspace = _workspace(task, folder, begun)
        if plan != workspace.plan:
            raise BuildError(
                f"{folder} holds a build that began on {begun.machine}, and here is another "
                f"environment: {differences(plan, workspace.plan)}. Use the same versions on all "
                "machines."
            )
        shard_lock = workspace.lock_of(task.shard)
        shard_lock.wait(task.running.lock_timeout, work=task.running.work)
        converted = build_locked(workspace, task.shard, shard_lock, task.running, _show_nothing)
        done = read_done(folder, task.shard)
        return Counts(converted, 0 if done is None else done.rejected)
    finally:
        lock.release()


def _read_plan(task: ShardTask, folder: Path) -> dict[str, Any]:
    """Return the plan of a build in parts. Raises BuildError if there is none."""
    plan = read_plan(folder) if "plan.json" in names_in(folder) else None
    if plan is not None and "begun" in plan:
        return plan
    if task.output.with_suffix(".idx").name in names_in(folder.parent):
        raise BuildError(
            f"{folder} holds no build any more: {task.name} was published before this task came."
        )
    raise BuildError(
        f"{folder} holds no build in parts. All machines have to see that folder at the same path, "
        "so give an output on a file system that they share."
    )


def _workspace(task: ShardTask, folder: Path, begun: Begun) -> PartsWorkspace:
    if task.digest:
        source = read_data_set(folder, task.digest)
    else:
        source = read_source(folder / "source", begun.list_sha256)
    return PartsWorkspace(
        source,
        task.output,
        task.settings,
        name=task.name,
        rows_per_shard=task.rows_per_shard,
        overwrite=False,
    )


def _show_nothing(done: int, rejected: int | None) -> None:
    """Take what a progress bar would show: the executor's caller has one, with a step a shard."""
