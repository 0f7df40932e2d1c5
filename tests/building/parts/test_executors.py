"""Builds by executors: one task a shard, errors that are collected, and going on afterwards."""

import asyncio
import errno
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import (
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    as_completed,
)
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import memload
from memload.building.lock import FolderRemovedError
from memload.building.parts import executors as executors_module
from memload.errors import BuildError


class Direct(Executor):
    """Runs each task at once, in this thread, after `before(task)`. Keeps the tasks."""

    def __init__(self, before: Callable[[Any], None] = lambda task: None) -> None:
        self.before, self.tasks = before, []

    def submit(self, function: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
        (task,) = arguments
        self.tasks.append(task)
        future: Future[Any] = Future()
        try:
            self.before(task)
            future.set_result(
                pickle.loads(pickle.dumps(function))(pickle.loads(pickle.dumps(task)))
            )
        except Exception as error:  # noqa: BLE001  # as executors do
            future.set_exception(pickle.loads(pickle.dumps(error)))
        return future


class Numbers:
    """A map-style data set at the top level of a module."""

    def __init__(self, count: int = 40) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        pixels = np.random.default_rng(index).integers(0, 256, (9, 11, 3), np.uint8)
        return Image.fromarray(pixels), index % 3


class Palettes:
    """Opens pictures with a palette itself, as colors."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.iterdir())

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        with Image.open(self.paths[index]) as picture:
            return picture.convert("RGB"), index % 3


class Ending(Numbers):
    """Raises what is no Exception at a sample."""

    def __init__(self, raised: type[BaseException], sample: int = 25) -> None:
        super().__init__()
        self.raised, self.sample = raised, sample

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        if index == self.sample:
            raise self.raised(0)
        return super().__getitem__(index)


class Killing(Numbers):
    """Kills its process at a sample, as long as a file exists."""

    def __init__(self, file: Path, sample: int = 25, count: int = 40) -> None:
        super().__init__(count)
        self.file, self.sample = file, sample

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        if index == self.sample and self.file.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.fixture
def expected(pictures: Path, tmp_path: Path, shard_bytes: Any, digests: Any) -> dict[str, str]:
    """The digests of the pictures in shards of ten, built on one machine."""
    folder = tmp_path / "expected"
    folder.mkdir()
    memload.build(pictures, folder / "out.bin", size=8, shard_size=shard_bytes(10), num_workers=0)
    found: dict[str, str] = digests(folder / "out.bin")
    return found


@pytest.fixture
def build(pictures: Path, tmp_path: Path, shard_bytes: Any) -> Callable[..., Any]:
    """A function that builds the pictures, or another source, in shards of ten by an executor."""

    def run(executor: Any, source: Any = pictures, **options: Any) -> Any:
        options = {"size": 8, "shard_size": shard_bytes(10), "progress": False, **options}
        return memload.build(source, tmp_path / "out.bin", executor=executor, **options)

    return run


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.bin"


def fork(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, multiprocessing.get_context("fork"))


# ---------------------------------------------------------------------------------- the same bytes


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", [ThreadPoolExecutor, fork])
def test_executors_give_the_bytes_of_one_machine(
    kind: Any, num_workers: int, build: Any, output: Path, digests: Any, expected: dict[str, str]
) -> None:
    with kind(2) as executor:
        report = build(executor, num_workers=num_workers)
    assert digests(output) == expected
    assert report.is_published
    assert (report.samples, report.converted) == (40, 40)
    assert report.seconds > 0


@pytest.mark.slow
def test_spawned_processes_give_the_bytes_of_one_machine(
    build: Any, output: Path, digests: Any, expected: dict[str, str]
) -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        build(executor)
    assert digests(output) == expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ThreadPoolExecutor, fork])
def test_a_thousand_pictures_in_ten_shards(
    kind: Any, thousand_pictures: Path, tmp_path: Path, shard_bytes: Any, digests: Any
) -> None:
    found = []
    for name in ("one", "tasks"):
        (tmp_path / name).mkdir()
        options: dict[str, Any] = {"size": 8, "shard_size": shard_bytes(100)}
        if name == "one":
            memload.build(thousand_pictures, tmp_path / name / "out.bin", **options)
        else:
            with kind(2) as executor:
                memload.build(
                    thousand_pictures, tmp_path / name / "out.bin", executor=executor, **options
                )
        found.append(digests(tmp_path / name / "out.bin"))
    assert len(found[0]) == 11
    assert found[0] == found[1]


@pytest.mark.slow
def test_loky_gives_the_bytes_of_one_machine(
    tmp_path: Path, pictures: Path, shard_bytes: Any, output: Path, digests: Any, expected: Any
) -> None:
    pytest.importorskip("loky", reason="loky is not installed")
    script = f"""
        import memload
        from loky import get_reusable_executor

        if __name__ == "__main__":
            executor = get_reusable_executor(2)
            memload.build(
                {str(pictures)!r}, {str(output)!r}, size=8, shard_size={shard_bytes(10)},
                executor=executor, num_workers=1,
            )
            executor.shutdown()
    """
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script))
    subprocess.run([sys.executable, path], check=True, timeout=250)
    assert digests(output) == expected


def test_tasks_and_their_arguments_are_small(build: Any) -> None:
    executor = Direct()
    build(executor)
    assert [task.shard for task in executor.tasks] == [0, 1, 2, 3]
    assert all(len(pickle.dumps(task)) < 2000 for task in executor.tasks)


def test_an_executor_does_what_parts_have_left(
    build: Any, output: Path, digests: Any, expected: dict[str, str]
) -> None:
    build(None, part=(1, 4))
    executor = Direct()
    report = build(executor)
    assert [task.shard for task in executor.tasks] == [0, 2, 3]
    assert report.converted == 30
    assert digests(output) == expected


def test_a_published_data_set_needs_no_task(build: Any) -> None:
    build(Direct())
    executor = Direct()
    report = build(executor)
    assert not executor.tasks
    assert report.part.was_published
    assert report.converted == 0


def test_progress_goes_on_by_shards_and_counts_rejects(
    pictures: Path, build: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    for path in sorted(pictures.rglob("*.jpg"))[:2]:
        path.write_bytes(b"no picture")
    report = build(Direct(), progress=True)
    assert report.rejected == 2
    shown = capfd.readouterr().err
    assert "40/40" in shown
    assert "2 rejected" in shown


@pytest.mark.parametrize("source", ["files", "data set"])
def test_warnings_as_errors_reject_no_pictures_in_threads(
    source: str, tmp_path: Path, build: Any
) -> None:
    picture = Image.new("P", (9, 9), 3)
    picture.putpalette(bytes(range(256)) * 3)
    (tmp_path / "palettes").mkdir()
    for number in range(40):  # Pillow warns of such a palette when it is made RGB
        picture.save(tmp_path / "palettes" / f"{number}.png", transparency=bytes(range(256)))
    given: Any = tmp_path / "palettes" if source == "files" else Palettes(tmp_path / "palettes")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = list(warnings.filters)
        with pytest.raises(UserWarning, match="Transparency"):
            Palettes(tmp_path / "palettes")[0]
        with ThreadPoolExecutor(4) as executor:
            report = build(executor, given, num_workers=0)
        assert warnings.filters == before
    assert (report.samples, report.rejected) == (40, 0)


# ------------------------------------------------------------------------------- tasks that fail


def test_failed_tasks_are_collected_and_the_others_end(
    build: Any, output: Path, digests: Any, expected: dict[str, str]
) -> None:
    def fail(task: Any) -> None:
        if task.shard in (1, 2):
            raise MemoryError("nothing left") if task.shard == 1 else LookupError("no node")

    executor = Direct(fail)
    with pytest.raises(BuildError) as failure:
        build(executor)
    text = str(failure.value)
    assert text.startswith(f"{output}: 2 of 4 tasks failed. Shard 1: MemoryError: nothing left. ")
    assert "Shard 2: LookupError: no node. " in text
    assert text.endswith("The same build does only what is left when it is run again.")
    assert failure.value.path == str(output)
    executor = Direct()
    report = build(executor)
    assert [task.shard for task in executor.tasks] == [1, 2]
    assert report.converted == 20
    assert digests(output) == expected


def test_shards_that_failed_for_the_same_reason_are_named_together(build: Any) -> None:
    def fail(task: Any) -> None:
        raise MemoryError("nothing left")

    with pytest.raises(BuildError, match=r"4 of 4 tasks failed. Shards 0, 1, 2, 3: MemoryError"):
        build(Direct(fail))


def test_a_full_disk_in_one_task_says_where_and_what_to_do(
    build: Any, output: Path, digests: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memload.building.writer import ShardWriter

    write = ShardWriter.write

    def full(self: Any, row: int, content: bytes) -> None:
        if row == 15:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, row, content)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "write", full)
        with pytest.raises(BuildError) as failure:
            build(Direct())
    text = str(failure.value)
    assert f"1 of 4 tasks failed. Shard 1, on {os.uname().nodename}: " in text
    assert "No space left on device. Make room" in text
    assert build(Direct()).converted <= 10
    assert digests(output) == expected


def test_on_error_raise_names_the_picture_after_the_others_have_ended(
    build: Any, pictures: Path, output: Path
) -> None:
    bad = sorted(pictures.rglob("*.jpg"))[5]
    bad.write_bytes(b"no picture")
    with pytest.raises(BuildError) as failure:
        build(Direct(), on_error="raise")
    text = str(failure.value)
    assert "1 of 4 tasks failed. Shard 0, on " in text
    assert f"{bad.parent.name}/{bad.name}" in text
    assert "--on-error skip" in text
    assert len(list(output.with_suffix(".building").joinpath("done").iterdir())) == 3


def test_another_version_on_a_machine_is_named(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:

        def other_machine(task: Any) -> None:
            patch.setattr("socket.gethostname", lambda: "node7")
            patch.setattr(type(task.settings), "libraries", lambda self: {"pillow": "9.0"})

        with pytest.raises(BuildError) as failure:
            build(Direct(other_machine))
    text = str(failure.value)
    assert "on node7: " in text
    assert f"began on {os.uname().nodename}" in text
    assert "and is '9.0'" in text
    assert "Use the same versions on all machines." in text


def test_a_machine_without_the_folder_is_told_so(build: Any, output: Path, tmp_path: Path) -> None:
    folder, elsewhere = output.with_suffix(".building"), tmp_path / "elsewhere"

    class Elsewhere(Direct):
        def submit(self, function: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
            folder.rename(elsewhere)
            try:
                return super().submit(function, *arguments, **options)
            finally:
                assert not folder.exists()
                elsewhere.rename(folder)

    with pytest.raises(BuildError, match="All machines have to see that folder at the same path"):
        build(Elsewhere())


def test_a_worker_that_dies_breaks_the_pool_and_the_next_call_goes_on(
    build: Any, tmp_path: Path, output: Path
) -> None:
    kill = tmp_path / "kill"
    kill.touch()
    with fork(1) as executor, pytest.raises(BuildError) as failure:
        build(executor, Killing(kill))
    text = str(failure.value)
    assert "2 of 4 tasks failed. Shards 2, 3: BrokenProcessPool: " in text
    assert "An executor that is broken takes no more tasks, so make a new one." in text
    assert "num_workers=1 finds and rejects it" in text
    with fork(1) as executor:
        report = build(executor, Killing(kill), num_workers=1)  # in a process below the task's
    assert (report.samples, report.rejected) == (39, 1)
    assert 10 < report.converted < 20  # shard 3, and what was not done of shard 2


def test_the_rows_before_a_killed_worker_are_kept(
    build: Any, tmp_path: Path, output: Path, digests: Any, shard_bytes: Any
) -> None:
    kill = tmp_path / "kill"
    kill.touch()
    data = Killing(kill, 170, 200)
    options = {"shard_size": shard_bytes(100)}
    with fork(1) as executor, pytest.raises(BuildError):
        build(executor, data, **options)
    kill.unlink()
    with fork(1) as executor:
        report = build(executor, data, **options)
    assert report.samples == 200
    assert (
        30 <= report.converted < 100
    )  # the last row is the 170th, so some chunks were done before
    one = tmp_path / "one"
    one.mkdir()
    memload.build(data, one / "out.bin", size=8, num_workers=0, **options)
    assert digests(output) == digests(one / "out.bin")


# ---------------------------------------------------------------------------------- the executor


def test_an_executor_that_was_shut_down(build: Any, output: Path) -> None:
    executor = ThreadPoolExecutor(1)
    executor.shutdown()
    with pytest.raises(
        BuildError, match=r"4 of 4 tasks failed. Shards 0, 1, 2, 3: RuntimeError: cannot"
    ):
        build(executor)
    assert build(Direct()).samples == 40


def test_a_task_that_comes_too_late_leaves_the_data_set_alone(
    build: Any, output: Path, digests: Any, expected: dict[str, str]
) -> None:
    """An engine may run a task that was given up, or whose worker it takes for dead."""
    executor = Direct()
    build(executor)
    with pytest.raises(BuildError, match="was published before this task came"):
        executors_module.run_task(executor.tasks[1])
    assert digests(output) == expected


def test_a_task_that_runs_twice_converts_once(
    build: Any, output: Path, digests: Any, expected: dict[str, str]
) -> None:
    again: list[Any] = []

    class Twice(Direct):
        def submit(self, function: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
            future = super().submit(function, *arguments, **options)
            again.append(function(*arguments))
            return future

    assert build(Twice()).converted == 40
    assert [counts.converted for counts in again] == [0, 0, 0, 0]
    assert digests(output) == expected


def test_tasks_that_were_submitted_end_if_a_later_one_cannot_be(build: Any) -> None:
    class Breaking(Direct):
        def submit(self, function: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
            if len(self.tasks) == 3:
                raise BrokenProcessPool("a process has died")
            return super().submit(function, *arguments, **options)

    with pytest.raises(BuildError, match=r"1 of 4 tasks failed. Shard 3: BrokenProcessPool"):
        build(Breaking())
    assert build(Direct()).converted == 10


def test_what_returns_no_futures_is_no_executor(build: Any) -> None:
    class Client:
        def submit(self, function: Any, task: Any) -> str:
            return "a future of another kind"

    with pytest.raises(
        TypeError, match=r"Client.submit\(\) returned a builtins.str, and no concurrent.futures"
    ):
        build(Client())


def test_a_class_is_no_executor(build: Any) -> None:
    with pytest.raises(TypeError, match=r"ThreadPoolExecutor is a class\. Give an instance"):
        build(ThreadPoolExecutor)


def test_an_executor_that_returns_one_future_for_all_tasks_is_named(build: Any) -> None:
    class Single(Direct):
        future: Future[Any] = Future()

        def submit(self, function: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
            return self.future

    with pytest.raises(TypeError, match=r"Single.submit\(\) returned the same future twice"):
        build(Single())


@pytest.mark.parametrize("result", [None, 3, "7"])
def test_an_executor_that_returns_something_else_is_named(result: Any, build: Any) -> None:
    class Other(Direct):
        def submit(self, function: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_result(result)
            return future

    with pytest.raises(BuildError, match=f"TypeError: the executor returned {result!r}, which is"):
        build(Other())


def test_cancelled_tasks_count_as_failed(build: Any) -> None:
    class Cancelling(Direct):
        def submit(self, function: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.cancel()
            future.set_running_or_notify_cancel()
            return future

    with pytest.raises(BuildError, match=r"4 of 4 tasks failed. .*CancelledError"):
        build(Cancelling())
    assert build(Direct()).samples == 40


@pytest.mark.parametrize("kind", [ThreadPoolExecutor, fork])
@pytest.mark.parametrize("raised", [SystemExit, asyncio.CancelledError, GeneratorExit])
def test_what_a_data_set_raises_to_end_a_program_ends_only_its_task(
    kind: Any, raised: type[BaseException], build: Any
) -> None:
    with kind(2) as executor, pytest.raises(BuildError) as failure:
        build(executor, Ending(raised), num_workers=0)
    text = str(failure.value)
    assert f"1 of 4 tasks failed. Shard 2, on {os.uname().nodename}: {raised.__name__}: 0" in text
    assert "The others have ended." in text


def test_a_ctrl_c_of_a_task_ends_only_that_task(build: Any) -> None:
    with ThreadPoolExecutor(1) as executor, pytest.raises(BuildError) as failure:
        build(executor, Ending(KeyboardInterrupt), num_workers=0)
    assert "1 of 4 tasks failed. Shard 2: KeyboardInterrupt: 0" in str(failure.value)


def test_a_task_whose_folder_is_removed_says_that_the_build_has_ended(
    build: Any, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def removed(*_: Any, **__: Any) -> None:
        raise FolderRemovedError

    def before(task: Any) -> None:
        if task.shard == 1:
            monkeypatch.setattr("memload.building.parts.executors.Lock.wait", removed)
        if task.shard == 2:
            monkeypatch.undo()

    with pytest.raises(BuildError) as failure:
        build(Direct(before))
    text = str(failure.value)
    assert "1 of 4 tasks failed. Shard 1, on " in text
    assert f"{output.with_suffix('.building')} was removed" in text
    assert "Make room" not in text


def test_ctrl_c_cancels_tasks_that_have_not_begun(
    build: Any, output: Path, digests: Any, expected: dict[str, str]
) -> None:
    futures: list[Future[Any]] = []

    class Interrupted(ThreadPoolExecutor):
        def submit(self, function: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
            if len(futures) == 3:
                raise KeyboardInterrupt
            futures.append(super().submit(function, *arguments, **options))
            return futures[-1]

    begun, release = threading.Event(), threading.Event()

    def block() -> None:
        begun.set()
        release.wait(60)

    with Interrupted(1) as executor:
        ThreadPoolExecutor.submit(executor, block)
        begun.wait(60)
        with pytest.raises(KeyboardInterrupt):
            build(executor)
        assert [future.cancelled() for future in futures] == [True, True, True]
        release.set()
    assert build(Direct()).converted == 40
    assert digests(output) == expected


def test_ctrl_c_ends_the_wait_for_tasks_that_never_end(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    futures: list[Future[Any]] = []

    class Endless(Executor):
        def submit(self, function: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
            futures.append(Future())
            if len(futures) == 1:
                futures[0].set_running_or_notify_cancel()
            return futures[-1]

    def wait(submitted: Any) -> Any:
        assert len(submitted) == 4
        timer.start()
        return as_completed(submitted)

    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    monkeypatch.setattr(executors_module, "as_completed", wait)
    with pytest.raises(KeyboardInterrupt):
        build(Endless())
    timer.join()
    monkeypatch.undo()
    assert [future.cancelled() for future in futures] == [False, True, True, True]
    assert build(Direct()).converted == 40


@pytest.mark.slow
def test_a_killed_driver_leaves_no_lock_with_the_processes_of_its_pool(
    tmp_path: Path,
    pictures: Path,
    shard_bytes: Any,
    build: Any,
    output: Path,
    digests: Any,
    expected: Any,
) -> None:
    """Processes of a ProcessPoolExecutor wait for ever if the process that made them is killed."""
    script = f"""
        import multiprocessing, os, signal
        from concurrent.futures import ProcessPoolExecutor
        import memload
        from memload.building.parts import executors

        def kill(future):  # which is what follows the first shard
            numbers = [child.pid for child in multiprocessing.active_children()]
            print(*numbers, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

        if __name__ == "__main__":
            executors._outcome = kill
            pool = ProcessPoolExecutor(2, multiprocessing.get_context("fork"))
            memload.build({str(pictures)!r}, {str(output)!r}, size=8, shard_size={shard_bytes(10)}, executor=pool)
    """
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script))
    with subprocess.Popen([sys.executable, path], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        children = [int(number) for number in driver.stdout.readline().split()]
        assert len(children) == 2
        try:
            assert driver.wait(60) == -signal.SIGKILL
            assert build(Direct(), lock_timeout=20).samples == 40
            assert digests(output) == expected
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)


# ------------------------------------------------------------------------------- daemonic workers


def _build_in_daemon(connection: Any, source: Path, output: Path, options: dict[str, Any]) -> None:
    try:
        connection.send(memload.build(source, output, size=8, **options).samples)
    except Exception as error:  # noqa: BLE001  # the parent asserts
        connection.send(error)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("how", ["executor", "part"])
def test_daemonic_processes(
    how: str, num_workers: int, pictures: Path, output: Path, shard_bytes: Any
) -> None:
    """The workers of Dask are daemonic, and so are those of a DataLoader."""
    options: dict[str, Any] = {"shard_size": shard_bytes(10), "num_workers": num_workers}
    if how == "part":
        options["part"] = (0, 1)
        target, arguments = _build_in_daemon, (pictures, output, options)
    else:
        memload.build(
            pictures, output, size=8, part=(0, 4), shard_size=shard_bytes(10), num_workers=0
        )
        recorded = Direct(_fail)
        with pytest.raises(BuildError):
            memload.build(pictures, output, size=8, executor=recorded, **options)
        target, arguments = _run_task_in_daemon, (recorded.tasks[0],)
    ours, its = multiprocessing.Pipe()
    process = multiprocessing.Process(target=target, args=(its, *arguments), daemon=True)
    process.start()
    its.close()
    with ours:
        result = ours.recv()
    process.join()
    process.close()
    if num_workers == 0:
        assert result == (40 if how == "part" else 10)
    else:
        assert "daemonic process" in str(result)
        assert "Use num_workers=0, which works everywhere." in str(result)
        assert "distributed.worker.daemon: False" in str(result)
        assert "--no-nanny" in str(result)


def _fail(task: Any) -> None:
    raise MemoryError("not here")


def _run_task_in_daemon(connection: Any, task: Any) -> None:
    try:
        connection.send(executors_module.run_task(task).converted)
    except Exception as error:  # noqa: BLE001  # the parent asserts
        connection.send(error)


# ------------------------------------------------------------------------ data sets of the user's


@pytest.mark.parametrize(
    "kind",
    [ThreadPoolExecutor, fork, lambda workers: Direct()],
    ids=["threads", "processes", "direct"],
)
def test_data_sets_are_pickled_once(
    kind: Any, build: Any, output: Path, tmp_path: Path, shard_bytes: Any, digests: Any
) -> None:
    one = tmp_path / "one"
    one.mkdir()
    memload.build(Numbers(), one / "out.bin", size=8, shard_size=shard_bytes(10), num_workers=0)
    with kind(2) as executor:
        build(executor, Numbers())
    assert digests(output) == digests(one / "out.bin")


@pytest.mark.slow
def test_a_data_set_of_hugging_face(
    build: Any, pictures: Path, output: Path, tmp_path: Path, shard_bytes: Any, digests: Any
) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    files = [str(path) for path in sorted(pictures.rglob("*.jpg"))]
    columns = {"image": files, "label": [number % 3 for number in range(40)]}
    data = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
    one = tmp_path / "one"
    one.mkdir()
    memload.build(data, one / "out.bin", size=8, shard_size=shard_bytes(10), num_workers=0)
    with fork(2) as executor:
        build(executor, data)
    assert digests(output) == digests(one / "out.bin")


def test_tasks_of_a_large_data_set_are_small(build: Any, output: Path) -> None:
    data = Numbers()
    data.ballast = bytes(1 << 20)  # type: ignore[attr-defined]  # it is pickled, too
    seen = []

    def look(task: Any) -> None:
        seen.append(len(pickle.dumps(task)))
        pickled = list(output.with_suffix(".building").glob("source-*.pickle"))
        assert [path.stat().st_size > 1 << 20 for path in pickled] == [True]

    build(Direct(look), data)
    assert len(seen) == 4
    assert max(seen) < 2000


def test_a_data_set_that_cannot_be_pickled(build: Any) -> None:
    data = Numbers()
    data.transform = lambda image: image  # type: ignore[attr-defined]
    with pytest.raises(
        BuildError, match=r"cannot be pickled, .*lambda.*part=\(i, n\), which does not"
    ):
        build(Direct(), data)


def test_a_data_set_of_a_script_says_to_use_a_module(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Script(Numbers):
        pass

    main = sys.modules["__main__"]
    Script.__module__, Script.__qualname__ = "__main__", "Script"
    monkeypatch.setattr(main, "Script", Script, raising=False)

    def forget(task: Any) -> None:
        monkeypatch.delattr(main, "Script", raising=False)

    with pytest.raises(BuildError, match="has to be in a module that can be imported there"):
        build(Direct(forget), Script())


def test_parts_do_not_pickle_a_data_set(
    build: Any, output: Path, tmp_path: Path, digests: Any, shard_bytes: Any
) -> None:
    data = Numbers()
    data.transform = lambda image: image  # type: ignore[attr-defined]
    build(None, data, part=(0, 2), num_workers=0)
    assert build(None, data, part=(1, 2), num_workers=0).is_published
    one = tmp_path / "one"
    one.mkdir()
    memload.build(Numbers(), one / "out.bin", size=8, shard_size=shard_bytes(10), num_workers=0)
    assert digests(output) == digests(one / "out.bin")
