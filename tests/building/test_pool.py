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

import pytest

import memload
from memload.building import pool
from memload.building.pool import Chunk, run

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

    def __call__(self, chunk: Chunk, note_row: Callable[[int], None]) -> list[int]:
        rows = [row for row in range(chunk.start, chunk.stop) if row not in chunk.lost]
        for row in rows:
            note_row(row)
            if self.act:
                self.act(row)
        return [row * row for row in rows]

    def close(self) -> None:
        self.closed = True


def tasks(rows: int = 20, step: int = 3) -> Iterator[Chunk]:
    return (Chunk(start, min(start + step, rows)) for start in range(0, rows, step))


def collect(
    make: Callable[[], Any], *, num_workers: int = 2, timeout: float = 60, rows: int = 20
) -> tuple[Any, Any]:
    """Return the results by row, each of which must be there once, and what was lost."""
    found: dict[int, int] = {}
    lost: dict[int, str] = {}
    for chunk, values in run(make, tasks(rows), num_workers=num_workers, timeout=timeout):
        rows_done = set(range(chunk.start, chunk.stop)) - chunk.lost.keys()
        assert not found.keys() & rows_done
        found.update(zip(sorted(rows_done), values, strict=True))
        lost.update(chunk.lost)
    assert found.keys() | lost.keys() == set(range(rows))
    assert not found.keys() & lost.keys()
    assert all(value == row * row for row, value in found.items())
    return found, lost


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3, 9])
def test_every_row_is_done_once(num_workers: int) -> None:
    assert collect(Squares, num_workers=num_workers)[1] == {}


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
    monkeypatch.setattr(pool, "_START_SECONDS", 0.1)
    with pytest.raises(memload.BuildError, match="Workers die before their first row"):
        collect(functools.partial(Squares, start=start), num_workers=1, timeout=0.1)


@FORKS
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(28, "No space left on device"), OSError),
        (memload.SourceError("s"), memload.SourceError),
        (EOFError("e"), memload.BuildError),
        (KeyError("k"), memload.BuildError),
        (SystemExit("x"), memload.BuildError),
    ],
)
def test_an_exception_in_a_worker_is_raised_here(
    error: BaseException, expected: type[Exception]
) -> None:
    def act(row: int) -> None:
        if row == 7:
            raise error

    with pytest.raises(expected, match=str(error.args[-1])):
        collect(functools.partial(Squares, act))


@FORKS
def test_a_worker_stopped_between_two_tasks_is_overdue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pausing(Squares):
        def __call__(self, chunk: Chunk, note_row: Callable[[int], None]) -> list[int]:
            if chunk.start == 6 and not (tmp_path / "mark").exists():
                (tmp_path / "mark").touch()
                os.kill(os.getpid(), signal.SIGSTOP)
            return super().__call__(chunk, note_row)

    monkeypatch.setattr(pool, "_START_SECONDS", 0.5)
    assert collect(Pausing, timeout=0.5, num_workers=1)[1] == {}


@FORKS
@pytest.mark.slow
def test_time_in_which_all_were_suspended_is_not_held_against_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = iter(range(1000))
    # Each second look comes 1000 seconds later than it should, and rows take longer than a look.
    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + 1000 * (next(looks) // 2))
    monkeypatch.setattr(pool, "time", clock)
    monkeypatch.setattr(pool, "_LOOK_SECONDS", 0.1)
    found, lost = collect(
        functools.partial(Squares, lambda row: time.sleep(0.5)), timeout=60, rows=4
    )
    assert (len(found), lost) == (4, {})


@pytest.mark.skipif(
    "spawn" not in multiprocessing.get_all_start_methods(), reason="this system does not spawn"
)
def test_work_that_cannot_be_pickled_is_told_where_processes_start_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make() -> Squares:
        return Squares()

    monkeypatch.setattr(pool, "_CONTEXT", multiprocessing.get_context("spawn"))
    with pytest.raises(
        memload.BuildError,
        match=r"source cannot be pickled.*use num_workers=0",
    ):
        collect(make, num_workers=2)


def test_a_script_without_its_guard_is_told_where_processes_start_anew(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            import functools, multiprocessing, sys, memload
            from memload.building import pool
            pool._CONTEXT = multiprocessing.get_context("spawn")
            pool._START_SECONDS = 1
            try:
                list(pool.run(functools.partial(dict), iter([pool.Chunk(0, 1)]), num_workers=1, timeout=60))
            except memload.BuildError as error:
                print(error)
        """)
    )
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False, timeout=120
    )
    assert "under 'if __name__ == \"__main__\":'" in done.stdout


@FORKS
def test_a_daemonic_process_is_told_that_it_may_not_start_others(tmp_path: Path) -> None:
    def build(results: Any) -> None:
        try:
            memload.build(tmp_path, tmp_path / "out.bin", num_workers=1)
        except memload.BuildError as error:
            results.send(str(error))
        os._exit(0)

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=build, args=(theirs,), daemon=True)
    process.start()
    assert "is a daemonic process" in ours.recv()
    process.join()
    process.close()
    ours.close()
    theirs.close()


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
        from memload.building.pool import Chunk, run

        class Idle:
            def __call__(self, chunk, note_row): return chunk
            def close(self): pass

        os.register_at_fork(before=lambda: os.kill(os.getpid(), signal.SIGINT))
        try:
            list(run(Idle, iter([Chunk(0, 1)]), num_workers=1, timeout=60))
        except KeyboardInterrupt:
            print("interrupted")
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")


class UnpicklableError(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("cannot be pickled")


@FORKS
def test_an_exception_that_cannot_be_pickled_is_raised_as_a_build_error() -> None:
    def act(row: int) -> None:
        raise UnpicklableError("why")

    with pytest.raises(memload.BuildError, match="UnpicklableError: why"):
        collect(functools.partial(Squares, act))
