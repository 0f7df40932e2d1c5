import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memload
from memload.building import workers
from memload.building.workers import Lost, Task, run
from memload.machine import available_cores

FORKS = pytest.mark.skipif(
    sys.platform != "linux", reason="work of this module reaches spawned workers nowhere else"
)


def die(number: signal.Signals) -> None:
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)  # not pytest's, which prints where
    os.kill(os.getpid(), number)


class Squares:
    """Returns the squares of its rows, and acts up on the way where ``act`` says so."""

    def __init__(
        self, act: Callable[[int], None] | None = None, start: Callable[[], None] | None = None
    ) -> None:
        if start:
            start()
        self.act, self.closed = act, False

    def __call__(self, task: Task, begin: Callable[[int], None]) -> list[int]:
        for row in range(*task):
            begin(row)
            if self.act:
                self.act(row)
        return [row * row for row in range(*task)]

    def close(self) -> None:
        self.closed = True


def tasks(rows: int = 20, step: int = 3) -> Iterator[Task]:
    return (Task(start, min(start + step, rows)) for start in range(0, rows, step))


def collect(
    make: Callable[[], Any], *, num_workers: int = 2, timeout: float = 60, rows: int = 20
) -> tuple[Any, Any]:
    """Return the results by row, each of which must be there once, and what was lost."""
    found: dict[int, int] = {}
    lost: dict[int, str] = {}
    for result in run(make, tasks(rows), num_workers=num_workers, timeout=timeout):
        if isinstance(result, Lost):
            assert result.row not in lost
            lost[result.row] = result.reason
        else:
            task, values = result
            assert not found.keys() & set(range(*task))
            found.update(zip(range(*task), values, strict=True))
    assert found.keys() | lost.keys() == set(range(rows))
    assert not found.keys() & lost.keys()
    assert all(value == row * row for row, value in found.items())
    return found, lost


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3, 9])
def test_every_row_is_done_once(num_workers: int) -> None:
    assert collect(Squares, num_workers=num_workers)[1] == {}


def test_no_tasks_are_no_results() -> None:
    assert list(run(Squares, iter(()), num_workers=2, timeout=60)) == []


def test_without_workers_the_work_is_closed() -> None:
    work = Squares()
    results = run(lambda: work, tasks(), num_workers=0, timeout=60)
    next(results)
    results.close()
    assert work.closed


@FORKS
@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL, signal.SIGABRT])
def test_a_row_that_kills_its_worker_is_lost_alone(number: signal.Signals) -> None:
    def act(row: int) -> None:
        if row in (0, 7, 8, 19):
            die(number)

    _, lost = collect(functools.partial(Squares, act))
    assert lost == dict.fromkeys((0, 7, 8, 19), f"decoding it killed the process ({number.name})")


@FORKS
@pytest.mark.parametrize("status", [0, 3])
def test_a_row_that_ends_its_worker_is_lost_alone(status: int) -> None:
    _, lost = collect(
        functools.partial(Squares, lambda row: os._exit(status) if row == 4 else None)
    )
    assert lost == {4: f"decoding it ended the process (exit status {status})"}


@FORKS
def test_all_rows_may_kill_their_workers() -> None:
    assert len(collect(functools.partial(Squares, lambda row: os._exit(1)), rows=5)[1]) == 5


@FORKS
def test_a_row_that_kills_its_worker_once_is_kept(tmp_path: Path) -> None:
    def act(row: int) -> None:
        mark = tmp_path / str(row)
        if row in (0, 5, 6, 19) and not mark.exists():
            mark.touch()
            die(signal.SIGSEGV)

    assert collect(functools.partial(Squares, act))[1] == {}
    assert len(list(tmp_path.iterdir())) == 4


@FORKS
def test_a_row_that_hangs_is_given_up() -> None:
    _, lost = collect(
        functools.partial(Squares, lambda row: time.sleep(600) if row == 7 else None), timeout=0.3
    )
    assert lost == {7: "it took longer than 0.3 s"}


@FORKS
def test_a_slow_start_is_not_held_against_the_timeout_of_a_row() -> None:
    assert (
        collect(
            functools.partial(Squares, start=lambda: time.sleep(1.5)), timeout=0.1, num_workers=1
        )[1]
        == {}
    )


@FORKS
@pytest.mark.parametrize(
    "start", [lambda: os._exit(1), lambda: time.sleep(600)], ids=["dies", "hangs"]
)
def test_workers_that_never_start_are_told(
    monkeypatch: pytest.MonkeyPatch, start: Callable[[], None]
) -> None:
    monkeypatch.setattr(workers, "_START", 0.1)
    with pytest.raises(
        memload.BuildError, match="workers: expected them to start, found that they die"
    ):
        collect(functools.partial(Squares, start=start), num_workers=1, timeout=0.1)


@FORKS
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), EOFError("e"), ValueError("v"), KeyError("k")]
)
def test_an_exception_in_a_worker_is_raised_here(error: Exception) -> None:
    def act(row: int) -> None:
        if row == 7:
            raise error

    with pytest.raises(type(error), match=str(error.args[-1])):
        collect(functools.partial(Squares, act))


class HalfSent(Squares):
    """Dies once in the middle of sending a result that is larger than a pipe."""

    def __init__(self, mark: Path) -> None:
        super().__init__()
        self.mark = mark

    def __call__(self, task: Task, begin: Callable[[int], None]) -> Any:
        values = super().__call__(task, begin)
        begin(workers.IDLE)
        return Large(values, self.mark) if task.start == 6 and not self.mark.exists() else values


class Large:
    def __init__(self, values: list[int], mark: Path) -> None:
        self.values, self.mark = values, mark

    def __reduce__(self) -> Any:
        self.mark.touch()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(
            signal.ITIMER_REAL, 0.2
        )  # kills the process, which waits for the pipe to drain
        return bytes, (bytes(50_000_000),)


@FORKS
def test_a_worker_killed_while_it_sends_a_result_costs_nothing(tmp_path: Path) -> None:
    results = run(
        functools.partial(HalfSent, tmp_path / "mark"), tasks(), num_workers=1, timeout=60
    )
    found = set[int]()
    for result in results:
        assert not isinstance(result, Lost)
        found.update(range(*result[0]))
        while not found.isdisjoint({3}) and not (tmp_path / "mark").exists():
            time.sleep(0.01)
        if found == set(range(6)):
            time.sleep(0.5)  # by when the worker has died with half of it sent
    assert found == set(range(20))


class Stopping(Large):
    """Is stopped, as by SIGSTOP from elsewhere, while it is sent."""

    def __reduce__(self) -> Any:
        self.mark.touch()
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
        signal.setitimer(signal.ITIMER_REAL, 0.2)  # by when it waits for the pipe to drain
        return bytes, (bytes(50_000_000),)


class Stopped(Squares):
    """Is stopped once in the middle of sending a result that is larger than a pipe."""

    def __init__(self, mark: Path) -> None:
        super().__init__()
        self.mark = mark

    def __call__(self, task: Task, begin: Callable[[int], None]) -> Any:
        values = super().__call__(task, begin)
        return Stopping(values, self.mark) if task.start == 6 and not self.mark.exists() else values


def is_stopped(process: int) -> bool:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@FORKS
def test_a_worker_stopped_while_it_sends_a_result_is_overdue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_PAUSE", 0.5)
    mark, found = tmp_path / "mark", set[int]()
    for result in run(functools.partial(Stopped, mark), tasks(), num_workers=1, timeout=0.5):
        assert not isinstance(result, Lost)
        found.update(range(*result[0]))
        if found == set(
            range(6)
        ):  # the next is the large one: nobody reads before its sender is stopped
            while not any(
                is_stopped(child.pid or 0) for child in multiprocessing.active_children()
            ):
                time.sleep(0.01)
    assert found == set(range(20))


@FORKS
def test_a_worker_stopped_between_two_tasks_is_overdue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pausing(Squares):
        def __call__(self, task: Task, begin: Callable[[int], None]) -> list[int]:
            if task.start == 6 and not (tmp_path / "mark").exists():
                (tmp_path / "mark").touch()
                os.kill(os.getpid(), signal.SIGSTOP)
            return super().__call__(task, begin)

    monkeypatch.setattr(workers, "_PAUSE", 0.5)
    assert collect(Pausing, timeout=0.5, num_workers=1)[1] == {}


@FORKS
def test_a_large_result_is_received_whole() -> None:
    class Much(Squares):
        def __call__(self, task: Task, begin: Callable[[int], None]) -> Any:
            return np.random.default_rng(task.start).bytes(3_000_000 + task.start)

    for result in run(Much, tasks(), num_workers=2, timeout=60):
        assert not isinstance(result, Lost)
        task, data = result
        assert data == np.random.default_rng(task.start).bytes(3_000_000 + task.start)


@FORKS
def test_a_signal_without_a_name_is_told_by_its_number() -> None:
    _, lost = collect(
        functools.partial(Squares, lambda row: os.kill(os.getpid(), 40) if row == 4 else None)
    )
    assert lost == {4: "decoding it killed the process (signal 40)"}


@FORKS
def test_time_in_which_all_were_suspended_is_not_held_against_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = iter(range(1000))
    # Each second look comes 1000 seconds later than it should, and rows take longer than a look.
    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + 1000 * (next(looks) // 2))
    monkeypatch.setattr(workers, "time", clock)
    monkeypatch.setattr(workers, "_LOOK", 0.1)
    found, lost = collect(
        functools.partial(Squares, lambda row: time.sleep(0.5)), timeout=60, rows=4
    )
    assert (len(found), lost) == (4, {})


def test_a_row_that_hangs_is_given_up_even_where_each_look_is_late() -> None:
    worker: Any = types.SimpleNamespace(row=7, spent=0.0, started=True, tasks=[Task(7, 8)])
    looks = next(look for look in range(10_000) if workers._overdue(worker, 7, 5.0, timeout=60))
    assert looks * 5 < 10_000


@pytest.mark.skipif(
    "spawn" not in multiprocessing.get_all_start_methods(), reason="this system does not spawn"
)
def test_work_that_cannot_be_pickled_is_told_where_processes_start_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make() -> Squares:
        return Squares()

    monkeypatch.setattr(workers, "_CONTEXT", multiprocessing.get_context("spawn"))
    with pytest.raises(
        memload.BuildError,
        match=r"expected a source that can be pickled.* found: .*say num_workers=0",
    ):
        collect(make, num_workers=2)


def test_a_script_without_its_guard_is_told_where_processes_start_anew(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            import functools, multiprocessing, sys, memload
            from memload.building import workers
from memload.machine import available_cores
            workers._CONTEXT = multiprocessing.get_context("spawn")
            workers._START = 1
            try:
                list(workers.run(functools.partial(dict), iter([workers.Task(0, 1)]), num_workers=1, timeout=60))
            except memload.BuildError as error:
                print(error)
        """)
    )
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False, timeout=120
    )
    assert "under 'if __name__ == \"__main__\":'" in done.stdout


@FORKS
def test_a_daemonic_process_is_told_that_it_may_not_start_others() -> None:
    def build(results: Any) -> None:
        try:
            list(run(Squares, tasks(), num_workers=1, timeout=60))
        except memload.BuildError as error:
            results.send(str(error))
        os._exit(0)

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=build, args=(theirs,), daemon=True)
    process.start()
    assert "found a daemonic one" in ours.recv()
    process.join()
    process.close()
    ours.close()
    theirs.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only there is memory limited")
def test_a_limit_beyond_what_can_be_addressed_is_none() -> None:
    code = "import resource, memload.building.workers as w; w.limit_memory(10**25); print(resource.getrlimit(2))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("(-1,")


def test_closing_the_generator_ends_the_workers() -> None:
    results = run(Squares, tasks(1000), num_workers=3, timeout=60)
    next(results)
    results.close()  # that nothing is left is checked after every test


@FORKS
def test_workers_do_not_heed_ctrl_c() -> None:
    def act(row: int) -> None:
        if row == 4:
            os.kill(os.getpid(), signal.SIGINT)

    assert collect(functools.partial(Squares, act))[1] == {}


@FORKS
def test_a_ctrl_c_that_comes_within_a_fork_is_not_forgotten() -> None:
    script = """
        import os, signal, sys
        from memload.building.workers import Task, run

        class Idle:
            def __call__(self, task, begin): return task
            def close(self): pass

        os.register_at_fork(before=lambda: os.kill(os.getpid(), signal.SIGINT))
        try:
            list(run(Idle, iter([Task(0, 1)]), num_workers=1, timeout=60))
        except KeyboardInterrupt:
            print("interrupted")
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")


def test_the_cores_that_may_be_used_are_counted() -> None:
    assert 1 <= available_cores() <= (os.cpu_count() or 1)
