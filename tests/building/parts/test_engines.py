"""Builds by Dask and by Ray, each started here with two nodes of one or two workers."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

#: The module of each engine.
_MODULES = {"dask": "distributed", "ray": "ray"}
_SCRIPT = Path(__file__).with_name("engine_process.py")

Build = Callable[..., dict[str, Any]]


def _start(engine: str, **environment: str) -> "subprocess.Popen[str]":
    if importlib.util.find_spec(_MODULES[engine]) is None:
        pytest.skip(f"{engine} is not installed, or has no wheel for this Python")
    return subprocess.Popen(
        [sys.executable, _SCRIPT, engine],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", **environment},
        start_new_session=True,
    )


def _stop(process: "subprocess.Popen[str]") -> None:
    try:
        process.communicate(timeout=60)  # it ends with its input
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _ask(process: "subprocess.Popen[str]", **request: Any) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps({"size": 8, "progress": False, **request}, default=str) + "\n")
    process.stdin.flush()
    answer: dict[str, Any] = json.loads(process.stdout.readline())
    return answer


@pytest.fixture(scope="module", params=["dask", "ray"])
def engine(request: pytest.FixtureRequest) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """The name of an engine, and a process that builds with it."""
    process = _start(request.param)
    try:
        yield request.param, process
    finally:
        _stop(process)


@pytest.fixture
def build(engine: tuple[str, "subprocess.Popen[str]"], tmp_path: Path, shard_bytes: Any) -> Build:
    """A function that builds a source in shards of a hundred in the folder ``engine``."""
    (tmp_path / "engine").mkdir()

    def run(source: Any, **options: Any) -> dict[str, Any]:
        output = tmp_path / "engine/out.bin"
        return _ask(engine[1], source=source, output=output, shard_size=shard_bytes(100), **options)

    return run


@pytest.fixture
def build_here(tmp_path: Path, shard_bytes: Any) -> Callable[[Any], None]:
    """A function that builds a source in this process, in the folder ``here``."""
    import memload

    def run(source: Any) -> None:
        (tmp_path / "here").mkdir()
        memload.build(
            source, tmp_path / "here/out.bin", size=8, shard_size=shard_bytes(100), num_workers=0
        )

    return run


@pytest.fixture
def killing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Any]:
    """A function that returns the data set whose sample 170 kills its process so many times."""
    monkeypatch.syspath_prepend(_SCRIPT.parent)
    from killing_pictures import KillingPictures

    (tmp_path / "kills").mkdir()
    return lambda times: KillingPictures(tmp_path / "kills", times)


def test_engines_give_the_bytes_of_one_machine(
    build: Build, build_here: Any, thousand_pictures: Path, tmp_path: Path, digests: Any
) -> None:
    report = build(thousand_pictures)
    assert (report["samples"], report["converted"]) == (1_000, 1_000)
    assert report["part"]["shards"] == 10
    build_here(thousand_pictures)
    assert digests(tmp_path / "engine/out.bin") == digests(tmp_path / "here/out.bin")


def test_parts_run_as_tasks_of_an_engine(
    build: Build, build_here: Any, thousand_pictures: Path, tmp_path: Path, digests: Any
) -> None:
    report = build(thousand_pictures, parts=3, num_workers=0)
    assert report["samples"] == 1_000
    build_here(thousand_pictures)
    assert digests(tmp_path / "engine/out.bin") == digests(tmp_path / "here/out.bin")


def test_workers_within_a_task(
    engine: Any,
    build: Build,
    build_here: Any,
    thousand_pictures: Path,
    tmp_path: Path,
    digests: Any,
) -> None:
    report = build(thousand_pictures, num_workers=2)
    if engine[0] == "dask":  # whose workers are daemonic
        assert "daemonic process" in report["error"]
        assert "distributed.worker.daemon: False" in report["error"]
        assert "dask worker --no-nanny" in report["error"]
        report = build(thousand_pictures)
    assert report["converted"] == 1_000
    build_here(thousand_pictures)
    assert digests(tmp_path / "engine/out.bin") == digests(tmp_path / "here/out.bin")


def test_workers_of_dask_may_have_processes_if_they_are_not_daemonic(
    thousand_pictures: Path, tmp_path: Path, shard_bytes: Any
) -> None:
    process = _start("dask", DASK_DISTRIBUTED__WORKER__DAEMON="False")
    try:
        options = {"shard_size": shard_bytes(100), "num_workers": 1}
        report = _ask(process, source=thousand_pictures, output=tmp_path / "out.bin", **options)
    finally:
        _stop(process)
    assert report["converted"] == 1_000


def test_a_killed_worker_costs_only_what_it_had_not_written(
    build: Build, build_here: Any, killing: Any, tmp_path: Path, digests: Any
) -> None:
    report = build([str(tmp_path / "kills"), 1])
    assert len(list((tmp_path / "kills").iterdir())) == 1
    assert report["samples"] == 300
    # The engine runs the task again. Rows 100 to 149 were done by then, if not more.
    assert report["converted"] <= 250
    build_here(killing(0))
    assert digests(tmp_path / "engine/out.bin") == digests(tmp_path / "here/out.bin")


def test_a_task_that_always_kills_its_worker_is_given_up(
    engine: Any, build: Build, build_here: Any, killing: Any, tmp_path: Path, digests: Any
) -> None:
    error = build([str(tmp_path / "kills"), 1_000])["error"]
    reason = {"dask": "KilledWorker: ", "ray": "WorkerCrashedError: "}[engine[0]]
    assert reason in error
    assert "num_workers=1 finds and rejects it" in error
    assert error.endswith("The same build does only what is left when it is run again.")
    if engine[0] == "ray":  # while Dask also gives up other tasks of a worker that dies
        assert f"1 of 3 tasks failed. Shard 1: {reason}" in error
    # A later call goes on, here with the source as it should be.
    report = build([str(tmp_path / "kills"), 0])
    assert report["samples"] == 300
    assert report["converted"] < 300
    build_here(killing(0))
    assert digests(tmp_path / "engine/out.bin") == digests(tmp_path / "here/out.bin")


def test_errors_of_tasks_are_one_sentence_whatever_the_engine(
    build: Build, thousand_pictures: Path, tmp_path: Path
) -> None:
    pictures = shutil.copytree(thousand_pictures, tmp_path / "pics")
    bad = sorted(pictures.rglob("*.jpg"))[250]
    bad.write_bytes(b"no picture")
    error = build(pictures, on_error="raise")["error"]
    assert f"1 of 10 tasks failed. Shard 2, on {os.uname().nodename}: " in error
    assert bad.name in error
    assert "Traceback" not in error
    assert "File " not in error
