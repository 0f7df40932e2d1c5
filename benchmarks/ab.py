"""Two checkouts of memload, measured in turn by the same benchmark. Prints a table, records nothing.

    python -m benchmarks.ab ../old loading feeds --quick
    python -m benchmarks.ab ../old build build --count 1000

One process for each checkout runs the benchmark of this folder, with that checkout's memload. Both
use the same data. In each round every way is measured in one process, then at once in the other, in
random order, while the one that is not measured waits; the first round is left out. Ratios are
after / before, within each round. A process may be a few per cent faster or slower than another of
the same code, as its memory lies elsewhere: run it again before you believe a small difference.
"""

import importlib
import os
import random
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import memload
from benchmarks.figures import cell, table
from benchmarks.harness import (
    HERE,
    Child,
    Way,
    choose,
    divide,
    figures,
    measure,
    prepared_ways,
    spread,
)

#: In a process of a checkout.
ways: dict[str, Way] = {}


def prepare(module: str, words: list[str], temporary: str) -> tuple[str, list[str], int]:
    """Prepare a benchmark; return where memload is, the names of the ways, and how many rounds."""
    benchmarks = importlib.import_module(f"benchmarks.{module}").BENCHMARKS
    _, benchmark, given = choose(benchmarks, words)
    ways.update(prepared_ways(benchmark, given, temporary))
    return str(Path(memload.__file__).parents[1]), list(ways), given.rounds


def take(way: str) -> Any:
    """Measure a way once."""
    return ways[way]()


def start(checkout: Path, folder: Path) -> Child:
    """Start a process with the memload of a checkout."""
    # a folder with a link, as the checkout has benchmarks of its own
    folder.mkdir()
    (folder / "memload").symlink_to(checkout.resolve() / "memload")
    path = os.pathsep.join([str(folder), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    # for its own processes, too: the folder where this runs must not come before the path
    return Child("ab", PYTHONPATH=path, PYTHONSAFEPATH="1")


def main() -> None:
    """Compare the checkouts."""
    if len(sys.argv) < 3 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    before, module, *words = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="memload-ab-") as temporary:
        sides = {}
        # one after the other, as the first one writes the data
        for side, checkout in (("before", Path(before)), ("after", HERE.parent)):
            folder = Path(temporary, side)
            sides[side] = start(checkout, folder)
            place, names, rounds = sides[side].ask("prepare", module, words, temporary)
            if place != str(folder):
                sys.exit(f"memload was imported from {place} instead of {checkout}.")

        def both() -> dict[str, float]:
            found = {}
            for name in names:
                for side in random.sample([*sides], 2):
                    taken = figures(name, partial(sides[side].ask, "take", name))
                    for figure, value in taken.items():
                        if not isinstance(value, str):
                            found[f"{side} › {figure}"] = value
            return found

        found = measure({"": both}, rounds)
    rows = []
    for name in [name.removeprefix("before › ") for name in found if name.startswith("before")]:
        old, new = found[f"before › {name}"], found[f"after › {name}"]
        rows.append((name, *(cell(spread(values)) for values in (old, new, divide(new, old)))))
    print(table(("", "before", "after", "after / before"), rows))


if __name__ == "__main__":
    main()
