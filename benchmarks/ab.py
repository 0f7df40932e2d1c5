"""Two checkouts of memload, measured in turn by the same benchmarks. Prints a table, records nothing.

    python -m benchmarks.ab ../old loading.feeds transforms
    python -m benchmarks.ab ../old build -- --images 1000

One process for each checkout runs the benchmark from this folder, with that checkout's memload. What
follows `--` are options of the benchmarks. Both use the same data. In each round every way is
measured in one process, then at once in the other, in alternating order, while the one that is not
measured waits; the first round is left out. Ratios are after / before, within each round. A process
may be a few per cent faster or slower than another of the same code, as its memory lies elsewhere:
`--pairs` begins anew so many times and takes all rounds together.

A figure is marked `worse` where the median of its ratios is more than 2 % worse than 1 and three
quarters of the ratios are worse than 1, and `better` likewise.
"""

import contextlib
import os
import re
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.figures import cell, table
from benchmarks.harness import (
    ENOUGH_ROUNDS,
    HERE,
    Ask,
    argument_parser,
    child,
    divide,
    spread,
    with_ratios,
)

NOTICEABLE = 0.02
LOWER_IS_BETTER = re.compile(r".*\((s|ms|µs|MB|GB|bytes[^)]*)\)( › .*)?|.*› cores")
#: The rounds of a figure, by its name.
Rounds = dict[str, list[float]]


def start(
    opened: contextlib.ExitStack, checkout: Path, command: list[str], timeout: float
) -> tuple[Ask, dict[str, Any]]:
    """Start a benchmark with the memload of a checkout; return it, and what it says when ready."""
    # a folder with a link, as the checkout has benchmarks of its own
    folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="memload-ab-"))
    Path(folder, "memload").symlink_to(checkout.resolve() / "memload")
    path = os.pathsep.join([folder, str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    ask = opened.enter_context(child([sys.executable, "-P", *command], timeout, PYTHONPATH=path))
    ready = ask(None)
    if ready["memload"] != folder:
        sys.exit(f"memload was imported from {ready['memload']} instead of {checkout}.")
    return ask, ready


def measure(
    checkouts: list[Path], command: list[str], timeout: float, found: tuple[Rounds, Rounds]
) -> dict[str, Any]:
    """Add the rounds of a benchmark in both checkouts; return what it said when it was ready."""
    with contextlib.ExitStack() as opened:
        # one after the other, as the first one writes the data
        sides, facts = zip(
            *(start(opened, path, command, timeout) for path in checkouts), strict=True
        )
        rounds = facts[0]["rounds"]
        for number in range(rounds + 1):
            for place, way in enumerate(facts[0]["ways"]):
                for side in (0, 1) if (number + place) % 2 else (1, 0):
                    for figure, value in sides[side](way).items():
                        found[side][figure] += [value] if number else []
            print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
    return facts[0]


def verdict(figure: str, ratio: dict[str, float]) -> str:
    """Tell whether a figure is noticeably better or worse than before."""
    if ratio["repeats"] < ENOUGH_ROUNDS:
        return ""
    low, middle, high = (ratio[name] for name in ("lower_quartile", "median", "upper_quartile"))
    faster, slower = middle > 1 + NOTICEABLE and low > 1, middle < 1 - NOTICEABLE and high < 1
    if LOWER_IS_BETTER.fullmatch(figure):
        faster, slower = slower, faster
    return "better" if faster else "worse" if slower else ""


def main() -> None:
    """Compare each benchmark named."""
    parser = argument_parser()
    parser.add_argument("before", type=Path, metavar="CHECKOUT")
    parser.add_argument("names", nargs="+", metavar="NAME", help="such as build or loading.feeds")
    parser.add_argument("--after", type=Path, default=HERE.parent, metavar="CHECKOUT")
    parser.add_argument("--pairs", type=int, default=1, help="of processes, one after another")
    parser.add_argument("--data", type=Path, help="a folder in which data is kept between runs")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that a way may take")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:split])
    passed_on = sys.argv[split + 1 :] + ["--quick"] * options.quick
    with tempfile.TemporaryDirectory(prefix="memload-ab-") as temporary:
        data = str((options.data or Path(temporary)).resolve())
        for name in options.names:
            module, _, part = name.partition(".")
            command = ["-m", f"benchmarks.{module}", *filter(None, [part])]
            command += ["--serve", "--data", data, *passed_on]
            found: tuple[Rounds, Rounds] = (defaultdict(list), defaultdict(list))
            for _ in range(options.pairs):
                checkouts = [options.before, options.after]
                ready = measure(checkouts, command, options.timeout, found)
            before, after = (with_ratios(rounds, ready["ratios"]) for rounds in found)
            rows = []
            for figure, values in before.items():
                ratio = spread(divide(after[figure], values))
                cells = map(cell, (spread(values), spread(after[figure]), ratio))
                rows.append((figure, *cells, verdict(figure, ratio)))
            columns = (name, "before", "after", "after / before", "")
            print(table(columns, rows), flush=True)


if __name__ == "__main__":
    main()
