"""The command line of the drills; see the package."""

import argparse
import contextlib
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from tests.drills import building, reading
from tests.drills.ground import Failed, Ground, Shared, Skipped

DRILLS: dict[str, Callable[[Ground], str]] = {
    "killed": building.killed,
    "size limit": building.limited,
    "disk full": building.full,
    "worker killed": building.worker_killed,
    "worker stopped": building.stopped,
    "sources change": building.sources,
    "two builds": building.together,
    "many builds": building.crowd,
    "no locks": building.lockless,
    "build beside": building.beside,
    "shards damaged": reading.shards,
    "index damaged": reading.index,
    "built anew": reading.replaced,
    "altered in place": reading.altered,
    "altered in a race": reading.racing,
    "unreadable pages": reading.unreadable,
    "read errors": reading.failing,
}


def hold(name: str, shared: Shared, seed: int, long: bool) -> bool:
    """Hold one drill in a folder of its own and say what came of it; return whether it is as it should be."""
    place = Path(tempfile.mkdtemp(prefix="memload-drill-"))
    limit = 1800 if long else 120

    def too_long(_: int, frame: FrameType | None) -> None:
        raise Failed(f"it hung: not at its end after {limit} s")

    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, too_long)
        signal.alarm(limit)
    started = time.monotonic()
    try:
        state, said = (
            "ok",
            DRILLS[name](Ground(place, shared, random.Random(f"{seed} {name}"), long)),
        )
    except Skipped as skipped:
        state, said = "skipped", str(skipped)
    except Exception as error:  # noqa: BLE001  # whatever it is, the other drills are held too
        state, said = (
            "FAILED",
            str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}",
        )
    finally:
        if hasattr(signal, "SIGALRM"):
            signal.alarm(0)
        with contextlib.suppress(OSError):
            shutil.rmtree(place)
    line = " ".join(said.split())  # whatever a system's tool has told
    print(f"{state:7} {time.monotonic() - started:6.1f} s  {name}: {line}", flush=True)
    return state != "FAILED"


def main() -> int:
    """Hold the drills asked for, all by default."""
    parser = argparse.ArgumentParser(prog="python -m tests.drills", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="DRILL", help=f"which: {', '.join(DRILLS)}; all by default"
    )
    parser.add_argument(
        "--long", action="store_true", help="a hundred kills, and so on: some minutes"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="chooses the moments and places (default 0)"
    )
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in DRILLS]
    if unknown:
        parser.error(f"no such drill: {', '.join(unknown)}; there are {', '.join(DRILLS)}")
    with tempfile.TemporaryDirectory(prefix="memload-drills-") as place:
        shared = Shared(Path(place))
        fine = [hold(name, shared, options.seed, options.long) for name in options.names or DRILLS]
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
