"""Worker processes: what crashes or hangs costs itself alone, and nothing is left running."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import memload

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux alone")
MAIN = os.getpid()


class Numbered:
    """A data set of small gray pictures. In workers, ``act`` is called with each number first."""

    def __init__(self, count, act=lambda number: None):
        self.count, self.act = count, act

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        if os.getpid() != MAIN:
            self.act(number)
        return np.full((4, 4), number % 256, np.uint8), number


def die(number):
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)  # not pytest's, which prints where
    os.kill(os.getpid(), number)


def build(source, folder, **options):
    defaults = {"size": 4, "num_workers": 2, "max_rejects": "100%"}
    return memload.build(source, folder / "out.bin", **defaults | options)


# Samples that do harm


@LINUX
@pytest.mark.parametrize(
    ("harm", "rows", "reason"),
    [
        (lambda: die(signal.SIGSEGV), (0, 17, 39), "decoding it killed the process (SIGSEGV)"),
        (lambda: die(signal.SIGKILL), (7, 8), "decoding it killed the process (SIGKILL)"),
        (lambda: os._exit(0), (0, 4), "decoding it ended the process (exit status 0)"),
        (lambda: time.sleep(600), (5,), "it took longer than 0.5 s"),
    ],
    ids=["SIGSEGV", "SIGKILL", "exits", "hangs"],
)
def test_a_sample_that_ends_or_blocks_its_worker_costs_itself_alone(
    harm,
    rows,
    reason,
    tmp_path,
    ledger,
):
    source = Numbered(40, lambda number: number in rows and harm())
    build(source, tmp_path, timeout=0.5 if "longer" in reason else 60)
    assert ledger() == {str(row): reason for row in rows}
    dataset = memload.MemmapDataset(tmp_path / "out.bin")
    assert dataset.columns["label"].tolist() == [n for n in range(40) if n not in rows]
    assert [int(image[0, 0, 0]) for image, _ in dataset] == dataset.columns["label"].tolist()
    assert memload.verify(tmp_path / "out.bin").ok


@LINUX
def test_a_sample_that_kills_its_worker_only_once_is_kept(tmp_path):
    def once(number):
        mark = tmp_path / f"mark {number}"
        if number in (3, 4, 20) and not mark.exists():
            mark.touch()
            die(signal.SIGSEGV)

    assert build(Numbered(40, once), tmp_path).rejected == 0
    memload.build(Numbered(40), tmp_path / "expected.bin", size=4, num_workers=0)
    assert (tmp_path / "out.bin").read_bytes() == (tmp_path / "expected.bin").read_bytes()


@LINUX
def test_a_row_that_is_rejected_after_it_was_written_holds_zeros(tmp_path, ledger):
    def fickle(number):
        mark = tmp_path / "mark"
        if number == 1 and mark.exists():
            raise ValueError("not again")
        if number == 2 and not mark.exists():
            mark.touch()
            die(signal.SIGSEGV)

    # Row 1 is written before row 2 kills the worker, and rejected when their chunk is done again.
    build(Numbered(12, fickle), tmp_path, num_workers=1)
    assert ledger() == {"1": "ValueError: not again"}
    assert not np.load(tmp_path / "out.bin")[1].any()
    assert memload.verify(tmp_path / "out.bin").ok


@LINUX
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["RGB", "array"])
def test_first_samples_that_hang_heed_the_timeout(tmp_path, mode):
    options = {"timeout": 0.5, "mode": mode}
    one = Numbered(20, lambda number: number == 0 and time.sleep(600))
    assert build(one, tmp_path, **options).rejected == 1
    every = Numbered(2, lambda number: time.sleep(600))
    with pytest.raises(memload.SourceError, match=r"sample 0: it took longer than 0\.5 s"):
        build(every, tmp_path, overwrite=True, **options)


class UnprintableError(Exception):
    def __str__(self):
        raise AttributeError("no text")


class UnpicklableError(Exception):
    def __reduce__(self):
        raise TypeError("cannot be pickled")


@LINUX
@pytest.mark.parametrize("row", [0, 7])
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (UnprintableError(), "UnprintableError: (its message cannot be read"),
        (UnpicklableError("why"), "UnpicklableError: why"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (SystemExit(3), "SystemExit: 3"),
        (GeneratorExit(), "GeneratorExit"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_exception_of_any_kind_costs_its_sample_alone(
    tmp_path,
    capfd,
    ledger,
    error,
    reason,
    row,
):
    def act(number):
        if number == row:
            raise error

    assert build(Numbered(20, act), tmp_path).samples == 19
    assert ledger()[str(row)].startswith(reason)
    assert capfd.readouterr().err == ""


# Starting and ending workers


def run_script(script, *arguments):
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)


@LINUX
@pytest.mark.parametrize(
    ("hook", "message"),
    [
        ("after_in_child=lambda: time.sleep(1)", "12"),
        ("after_in_child=lambda: os._exit(1)", "BuildError: Workers die, whatever row"),
        (
            "after_in_child=lambda: setattr(os, 'pwrite', lambda *_: os._exit(1))",
            "BuildError: Workers die, whatever row",
        ),
        ("before=lambda: os.kill(os.getpid(), signal.SIGINT)", "KeyboardInterrupt"),
        ("after_in_child=lambda: os.kill(os.getpid(), signal.SIGINT)", "12"),
    ],
    ids=["slow", "dies", "dies when it writes", "Ctrl-C within the fork", "Ctrl-C in the worker"],
)
def test_what_comes_of_troubles_of_a_worker_whatever_its_row(folder, tmp_path, hook, message):
    script = f"""
    import os, signal, sys, time
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # a thread of NumPy's could receive the Ctrl-C
    import memload
    os.register_at_fork({hook})
    try:
        print(memload.build(*sys.argv[1:], size=8, num_workers=1, timeout=0.5).samples)
    except BaseException as error:
        print(type(error).__name__, error, sep=": ")
    """
    done = run_script(script, folder, tmp_path / "out.bin")
    assert (done.stdout[: len(message)], done.stderr) == (message, "")


#: Has memload start its workers anew, as on macOS.
SPAWN = """
import multiprocessing, sys
import memload
usual = multiprocessing.get_context
multiprocessing.get_context = lambda method=None: usual("spawn")

from memload.building import build
build._LOCK_SECONDS = 0.1  # a worker that runs the script, too, waits for the lock of its shard
from memload.sources import samples

class Source(samples.Source):
    def __init__(self, root):
        vars(self).update(vars(memload.open_source(root)))

"""


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("if __name__ == '__main__': memload.build(sys.argv[1], {0})", ""),
        ("memload.build(sys.argv[1], {0})", "under 'if __name__ == \"__main__\":'"),
        (
            "source = Source(sys.argv[1]); source.function = lambda: 0\n"
            "if __name__ == '__main__': memload.build(source, {0})",
            "pickle",
        ),
    ],
    ids=["works", "without a guard", "a source with a lambda"],
)
def test_workers_may_be_started_anew(folder, output, tmp_path, call, message):
    script = tmp_path / "script.py"
    script.write_text(SPAWN + call.format("sys.argv[2], size=16, num_workers=1"))
    command = [sys.executable, script, folder, tmp_path / "spawned.bin"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert message in done.stderr
    if message:
        assert done.returncode == 1
    else:
        assert (tmp_path / "spawned.bin").read_bytes() == output.read_bytes()


SLOW = """
import sys, time
import numpy as np
import memload

class Slow:
    def __len__(self):
        return 200
    def __getitem__(self, number):
        if number > 0:
            sys.stdout.write("begun\\n")  # at once, even where output is not buffered
            sys.stdout.flush()
            time.sleep({seconds})
        return np.full((4, 4), number, np.uint8), number

report = memload.build(Slow(), sys.argv[1], size=4, num_workers=2, timeout={timeout})
print(report.samples)
"""


def slow_build(output, seconds, timeout=600):
    """Start a build in a process group of its own; return once its workers are busy."""
    code = SLOW.format(seconds=seconds, timeout=timeout)
    process = subprocess.Popen(
        [sys.executable, "-c", code, output],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    return process


def children(process):
    return [int(n) for n in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def is_alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@LINUX
@pytest.mark.parametrize("seconds", [1, 600], ids=["busy", "hanging"])
def test_workers_whose_parent_was_killed_end_and_let_go_of_the_lock(tmp_path, seconds):
    with slow_build(tmp_path / "out.bin", seconds) as process:
        while len(orphans := children(process.pid)) < 2:
            time.sleep(0.005)  # the other one is being started
        process.kill()
    deadline = time.monotonic() + 30
    while any(map(is_alive, orphans)):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.005)
    done = run_script(SLOW.format(seconds=0, timeout=60), tmp_path / "out.bin")
    assert (done.returncode, done.stdout.split()[-1]) == (0, "200")


@LINUX
def test_ctrl_c_ends_the_command_and_its_workers(tmp_path):
    Image.new("RGB", (8000, 8000)).save(tmp_path / "a.png", compress_level=1)
    for name in "bc":  # large enough to stop the workers over them
        shutil.copy(tmp_path / "a.png", tmp_path / f"{name}.png")
    command = [sys.executable, "-m", "memload", "build", tmp_path, tmp_path / "out.bin"]
    with subprocess.Popen(
        [*command, "--num-workers", "2"], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        while process.poll() is None and len(workers := children(process.pid)) < 2:
            time.sleep(0.005)
        for worker in workers:
            os.kill(worker, signal.SIGSTOP)
        os.killpg(process.pid, signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error.splitlines()[-1].startswith("memload: interrupted. Run the same command again")
    assert "Traceback" not in error
    assert not any(map(is_alive, workers))
    with pytest.raises(memload.MissingError):
        memload.MemmapDataset(tmp_path / "out.bin")


# What it takes


def peak_memory(count, output):
    source = Numbered(count)
    tracemalloc.start()
    try:
        memload.build(source, output, size=1, num_workers=1, mode="L")
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_memory_does_not_grow_with_the_rows(tmp_path):
    peak_memory(100, tmp_path / "first.bin")  # what is imported and cached on the way
    few, many = (peak_memory(n, tmp_path / f"{n}.bin") for n in (500, 4_000))
    # Names, records and columns grow by some hundred bytes a row. Pixels and chunks do not.
    assert (many - few) / 3_500 < 1_000


@pytest.mark.slow
@LINUX
def test_a_data_set_that_uses_torch_is_read_by_forked_workers(tmp_path):
    script = """
    import sys, torch, memload
    torch.exp(torch.rand(4_000_000)).sum()  # starts its threads

    class Random:
        def __len__(self): return 4
        def __getitem__(self, i):
            return (torch.exp(torch.rand(3, 600, 600)) / 3 * 255).to(torch.uint8), i

    print(memload.build(Random(), sys.argv[1], size=8, num_workers=2, timeout=30).rejected)
    """
    done = run_script(script, tmp_path / "out.bin")
    assert done.stdout == "0\n", done.stderr
