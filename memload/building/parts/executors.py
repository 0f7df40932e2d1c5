"""One task for each shard, on any `concurrent.futures.Executor`."""

from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Executor, Future, wait
from dataclasses import dataclass
from pathlib import Path

from memload.building.conversion import AnySettings
from memload.building.parts.listing import read_data_set, read_source, write_data_set
from memload.building.parts.workspace import PartsWorkspace, Running, build_locked
from memload.building.plans import differences
from memload.building.progress import Show
from memload.building.workspace import read_plan
from memload.errors import BuildError, describe_error
from memload.wording import counted


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
    lock_timeout: float


def build_with(
    executor: Executor,
    workspace: PartsWorkspace,
    shards: Sequence[int],
    running: Running,
    lock_timeout: float,
    show: Show,
) -> int:
    """Have the tasks of an executor build shards; return how many rows were converted.

    If tasks fail, the others end first. Then BuildError is raised, which shows the first reasons.
    """
    is_listed = (workspace.folder / "source").exists()
    digest = "" if is_listed else write_data_set(workspace.source, workspace.folder)
    futures: dict[Future[int], int] = {}
    converted = 0
    failed: dict[int, BaseException] = {}
    try:
        for shard in shards:
            task = ShardTask(
                shard,
                workspace.output,
                workspace.name,
                workspace.settings,
                workspace.rows_per_shard,
                digest,
                running,
                lock_timeout,
            )
            futures[executor.submit(run_task, task)] = shard
        pending = set(futures)
        while pending:
            ended, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in ended:
                shard = futures[future]
                try:
                    converted += future.result()
                    show(workspace.rows_of(shard), None)
                except (Exception, CancelledError) as error:  # noqa: BLE001  # whatever an engine raises
                    failed[shard] = error
    finally:  # after a Ctrl-C
        for future in futures:
            future.cancel()
    if failed:
        raise _failure(workspace, failed, len(shards))
    return converted


def _failure(
    workspace: PartsWorkspace, failed: Mapping[int, BaseException], tasks: int
) -> BuildError:
    """Return one error for all tasks that failed."""
    reasons = [
        f"shard {shard}: {error if isinstance(error, BuildError) else describe_error(error)}"
        for shard, error in sorted(failed.items())
    ]
    return BuildError(
        f"{workspace.name}: {len(failed):,} of {counted(tasks, 'task')} failed. "
        f"{' '.join(reason[:500] for reason in reasons[:3])} The others have ended. Run the same "
        "build again: it does only what is left.",
        path=workspace.output,
    )


def run_task(task: ShardTask) -> int:
    """Build a shard in a task; return how many rows were converted."""
    folder = task.output.with_suffix(".building")
    source = read_data_set(folder, task.digest) if task.digest else read_source(folder / "source")
    workspace = PartsWorkspace(
        source,
        task.output,
        task.settings,
        name=task.name,
        rows_per_shard=task.rows_per_shard,
        overwrite=False,
    )
    plan = read_plan(folder) or {}
    plan = {name: value for name, value in plan.items() if name not in ("parts", "overwrite")}
    if plan != workspace.plan:
        raise BuildError(differences(plan, workspace.plan))
    lock = workspace.lock_of(task.shard)
    lock.wait(task.lock_timeout, work=task.running.work)
    return build_locked(workspace, task.shard, lock, task.running, lambda done, rejected: None)
