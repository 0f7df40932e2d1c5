"""Two checkouts of memload, measured in turn by the same benchmarks.

    python benchmarks/ab.py --before ../old loader collate
    python benchmarks/ab.py --before ../old build -- photographs/ --fast

One process for each checkout runs the benchmark from this folder, with that checkout on PYTHONPATH.
What follows `--` are options of the benchmarks. Both use the same data. In each round every way is
measured in one process, then at once in the other, in alternating order, while the one that is not
measured waits; the first round is left out. Ratios are after / before, within each round. A process
may be a few per cent faster or slower than another of the same code, as its memory lies elsewhere:
`--pairs` begins anew so many times and takes all rounds together.

A figure is marked `worse` where the median of its ratios is more than 2 % worse than 1 and three
quarters of the ratios are worse than 1, and `better` likewise.
"""

import argparse
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from harness import (
    ENOUGH_ROUNDS,
    HERE,
    LOWER_IS_BETTER,
    Child,
    argument_parser,
    commit,
    divide,
    nested,
    record,
    spread,
    with_ratios,
)
from report import Table

NOTICEABLE = 0.02
COLUMNS = ("before", "after", "after / before")
#: The rounds of a figure, by its name.
Rounds = dict[str, list[float]]


def start(name: str, checkout: Path, arguments: list[str]) -> tuple[Child, dict[str, Any]]:
    """Start a benchmark with a checkout; return its process, and what it says when it is ready."""
    child = Child([sys.executable, HERE / f"{name}.py", "--serve", *arguments], checkout)
    ready = child.answer()
    if Path(ready["memload"]).resolve() != checkout:
        sys.exit(f"memload was imported from {ready['memload']} instead of {checkout}.")
    return child, ready


def measure(
    checkouts: list[Path], name: str, arguments: list[str], found: tuple[Rounds, Rounds]
) -> dict[str, Any]:
    """Add the rounds of a benchmark in both checkouts; return what was ready."""
    # one after the other, as the first one writes the data
    children, (ready, _) = zip(*(start(name, path, arguments) for path in checkouts), strict=True)
    for number in range(ready["rounds"] + 1):
        for place, way in enumerate(ready["ways"]):
            for side in (0, 1) if (number + place) % 2 else (1, 0):
                for figure, value in children[side].measure(way).items():
                    found[side][figure] += [value] if number else []
        print(f"{name}: round {number} of {ready['rounds']}", file=sys.stderr, flush=True)
    for child in children:
        if status := child.close():
            sys.exit(f"{name} ended with status {status}.")
    return ready


def compare(
    checkouts: list[Path], name: str, arguments: list[str], pairs: int
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Return each figure before and after, from all pairs of processes, and their machine."""
    found: tuple[Rounds, Rounds] = (defaultdict(list), defaultdict(list))
    for _ in range(pairs):
        ready = measure(checkouts, name, arguments, found)
    before, after = (with_ratios(rounds, ready["ratios"]) for rounds in found)
    results = {}
    for figure, values in before.items():
        rounds = (values, after[figure], divide(after[figure], values))
        results[figure] = dict(zip(COLUMNS, map(spread, rounds), strict=True))
    return results, ready["machine"]


def verdict(figure: str, ratio: dict[str, float]) -> str:
    """Tell whether a figure is noticeably better or worse than before."""
    if ratio["repeats"] < ENOUGH_ROUNDS:
        return ""
    low, middle, high = (ratio[name] for name in ("lower_quartile", "median", "upper_quartile"))
    faster, slower = middle > 1 + NOTICEABLE and low > 1, middle < 1 - NOTICEABLE and high < 1
    if LOWER_IS_BETTER.fullmatch(figure):
        faster, slower = slower, faster
    return "better" if faster else "worse" if slower else ""


def parse_options() -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and those of the benchmarks."""
    parser = argument_parser()
    parser.add_argument("names", nargs="+", metavar="NAME", help="such as loader")
    parser.add_argument("--before", type=Path, required=True, metavar="PATH")
    parser.add_argument("--after", type=Path, default=HERE.parent, metavar="PATH")
    parser.add_argument("--pairs", type=int, default=1, help="of processes, one after another")
    parser.add_argument(
        "--commits",
        nargs=2,
        metavar=("BEFORE", "AFTER"),
        help="what to record where the checkouts have no history",
    )
    parser.add_argument("--data", type=Path, help="a folder in which data is kept between runs")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:split])
    return options, sys.argv[split + 1 :] + ["--quick"] * options.quick


def main() -> None:
    """Compare each benchmark named."""
    options, passed_on = parse_options()
    checkouts = [options.before.resolve(), options.after.resolve()]
    before, after = options.commits or map(commit, checkouts)
    parameters = {"before": before, "after": after, "pairs": options.pairs}
    parameters["options"] = " ".join(passed_on)
    with tempfile.TemporaryDirectory(prefix="memload-ab-") as temporary:
        data = str((options.data or Path(temporary)).resolve())
        for name in options.names:
            arguments = ["--data", data, *passed_on]
            results, machine = compare(checkouts, name, arguments, options.pairs)
            described = {"of": name, **parameters}
            left_out = ["--quick"] * options.quick
            record("ab", options, nested(results), described, left_out, machine)
            rows = {
                figure: values | {"verdict": verdict(figure, values["after / before"])}
                for figure, values in results.items()
            }
            print(Table(name, [*COLUMNS, "verdict"], rows).markdown(), flush=True)


if __name__ == "__main__":
    main()
