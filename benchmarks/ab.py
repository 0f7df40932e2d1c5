"""Two checkouts of memload, measured in turn by the same benchmarks.

    python benchmarks/ab.py NAME ... --before PATH [--after PATH] [--quick] [--pairs 1] [--data DIR]
        [--commits BEFORE AFTER] [--dry-run] [-- OPTIONS OF THE BENCHMARKS]
    python benchmarks/ab.py --before ../old loader collate
    python benchmarks/ab.py --before ../old build -- photographs/

One process for each checkout runs the benchmark from this folder, with that checkout on PYTHONPATH.
Both use the same data. In each round every way is measured in one process, then at once in the
other, in alternating order, while the one that is not measured waits; the first round is left out.
Ratios are after / before, within each round. A process may be a few per cent faster or slower than
another of the same code, as its memory lies elsewhere: `--pairs` begins anew so many times and
takes all rounds together.

A figure is marked `worse` where the median of its ratios is more than 2 % worse than 1 and three
quarters of the ratios are worse than 1, and `better` likewise.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import (
    ENOUGH_ROUNDS,
    HERE,
    LOWER_IS_BETTER,
    argument_parser,
    commit,
    divide,
    errors_in_one_line,
    nested,
    record,
    spread,
    with_ratios,
)

NOTICEABLE = 0.02


class Side:
    """A process that measures one checkout."""

    def __init__(self, checkout: Path, name: str, options: list[str], data: Path) -> None:
        arguments = [str(HERE / f"{name}.py"), "--serve", "--data", str(data), *options]
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            env=os.environ | {"PYTHONPATH": str(checkout)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.checkout = checkout

    def answer(self) -> Any:
        """Wait for the next line of the process. Ends the program where the process has ended."""
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"The benchmark ended with {self.process.wait()} on {self.checkout}.")
        return json.loads(line)

    def ready(self) -> Any:
        """Wait until the process has its data; return its ways and its number of rounds."""
        found = self.answer()
        if Path(found["memload"]).resolve() != self.checkout:
            sys.exit(f"memload was imported from {found['memload']} instead of {self.checkout}.")
        return found

    def measure(self, way: str) -> dict[str, float]:
        """Measure a way once; return its figures by name."""
        print(json.dumps(way), file=self.process.stdin, flush=True)
        return self.answer()

    def close(self) -> None:
        """End the process."""
        self.process.stdin.close()
        if self.process.wait(60):
            sys.exit(f"The benchmark ended with {self.process.returncode} on {self.checkout}.")


def compare(
    checkouts: tuple[Path, Path], name: str, options: list[str], data: Path
) -> tuple[list[dict[str, list[float]]], dict[str, Any]]:
    """Measure one benchmark in both checkouts; return the figures of each, and what was ready."""
    sides, found = [], ({}, {})
    for checkout in checkouts:  # one after the other, as the first one writes the data
        sides.append(Side(checkout, name, options, data))
        ready = sides[-1].ready()
    for number in range(ready["rounds"] + 1):
        for place, way in enumerate(ready["ways"]):
            for which in (0, 1) if (number + place) % 2 else (1, 0):
                for figure, value in sides[which].measure(way).items():
                    if number:
                        found[which].setdefault(figure, []).append(value)
        print(f"{name}: round {number} of {ready['rounds']}", file=sys.stderr, flush=True)
    for side in sides:
        side.close()
    return [with_ratios(rounds, ready["ratios"]) for rounds in found], ready


def verdict(figure: str, ratio: dict[str, float]) -> str:
    """Tell whether a figure is noticeably better or worse than before."""
    if ratio["repeats"] < ENOUGH_ROUNDS:
        return ""
    low, middle, high = (ratio[name] for name in ("lower_quartile", "median", "upper_quartile"))
    faster, slower = middle > 1 + NOTICEABLE and low > 1, middle < 1 - NOTICEABLE and high < 1
    if LOWER_IS_BETTER.fullmatch(figure):
        faster, slower = slower, faster
    return "better" if faster else "worse" if slower else ""


def shown(value: dict[str, float]) -> str:
    """Return a median with its quartiles, in four digits each."""
    names = ("median", "lower_quartile", "upper_quartile")
    middle, low, high = (f"{float(f'{value[name]:.4g}'):,.10g}" for name in names)
    return f"{middle} ({low} to {high})"


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return a line for each figure."""
    rows = [("", "before", "after", "after / before", "")]
    for figure, values in results.items():
        cells = [shown(values[name]) for name in ("before", "after", "after / before")]
        rows.append((figure, *cells, verdict(figure, values["after / before"])))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def main() -> None:
    """Compare each benchmark named."""
    parser = argument_parser(__doc__)
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
    parser.add_argument("--quick", action="store_true", help="measure less, in 2 to 3 minutes")
    parser.add_argument("--data", type=Path, help="a folder in which data is kept between runs")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, passed_on = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    checkouts = (options.before.resolve(), options.after.resolve())
    commits = options.commits or [commit(checkout) for checkout in checkouts]
    passed_on += ["--quick"] * options.quick
    with errors_in_one_line(), tempfile.TemporaryDirectory(prefix="memload-ab-") as temporary:
        data = (options.data or Path(temporary)).resolve()
        for name in options.names:
            found: tuple[dict[str, list[float]], ...] = ({}, {})
            for _ in range(options.pairs):
                measured, ready = compare(checkouts, name, passed_on, data)
                for all_rounds, rounds in zip(found, measured, strict=True):
                    for figure, values in rounds.items():
                        all_rounds.setdefault(figure, []).extend(values)
            results = {
                figure: {
                    "before": spread(found[0][figure]),
                    "after": spread(found[1][figure]),
                    "after / before": spread(divide(found[1][figure], found[0][figure])),
                }
                for figure in found[0]
            }
            parameters = {"of": name, "before": commits[0], "after": commits[1]}
            parameters |= {"pairs": options.pairs, "options": " ".join(passed_on)}
            left_out = ["--quick"] * options.quick
            record("ab", options, nested(results), parameters, left_out, ready["machine"])
            print(table(results), flush=True)


if __name__ == "__main__":
    main()
