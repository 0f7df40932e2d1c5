"""The fault drills in their short form, by their own command."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
LIMIT = 300

#: The drills with one that fails among them.
BROKEN = """
import sys
from tests.drills import __main__ as drills
from tests.drills.ground import Failed, Skipped, expect

def fine(ground):
    return "all well"

def skipped(ground):
    raise Skipped("not here")

def failed(ground):
    expect(ground.place.is_dir(), "no ground")
    expect(False, "what must not be")

def broken(ground):
    raise KeyError("a fault of the drill's own")

drills.DRILLS = {"fine": fine, "skipped": skipped, "failed": failed, "broken": broken}
sys.exit(drills.main())
"""


def drill(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
    )


@pytest.mark.timeout(LIMIT + 10)
def test_every_drill_ends_as_it_should() -> None:
    done = drill("-m", "tests.drills")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) > 10
    assert all(line.startswith(("ok ", "skipped ")) for line in lines), done.stdout
    assert sum(line.startswith("ok ") for line in lines) >= (
        10 if sys.platform == "linux" else 2
    ), done.stdout


def test_a_drill_that_fails_is_told_and_the_others_are_held() -> None:
    done = drill("-c", BROKEN, "failed", "broken", "skipped", "fine")
    assert done.returncode == 1, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        "FAILED",
        "FAILED",
        "skipped",
        "ok",
    ]
    assert "failed: what must not be" in done.stdout
    assert "broken: KeyError" in done.stdout
    assert drill("-c", BROKEN, "fine", "skipped").returncode == 0


def test_a_drill_that_is_none_is_wrong_usage() -> None:
    done = drill("-m", "tests.drills", "nonsense")
    assert done.returncode == 2
    assert "no such drill: nonsense; there are killed, " in done.stderr
