"""Write RESULTS.md, its plots, docs/speed.svg, docs/performance.md and the tables of README.md.

All are made of the lines in ``results/``. Run it after a benchmark has added one. Shown is the newest
line of each benchmark, kind of machine (processor, number of cores, GPUs) and variant; a line of a
partial run only if there is no whole one.

The results of a line are names with values, in tables of any depth. A value is a median with
quartiles, a number, a text, or a curve: a list of numbers. Images a second are plotted, and curves of
seconds.
`results/remarks.json` has what was found out about lines later.
"""

import ast
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SPEED = HERE.parent / "docs" / "speed.svg"
README = HERE.parent / "README.md"
#: Parameters that make two runs of a benchmark two results, not an old one and a new one.
VARIANTS = ("fast", "ranks", "device", "model", "pages", "first epoch", "of", "trained for")
#: Which figures are images a second, in benchmarks whose names do not say so.
RATES = {
    "build": "memload|bare",
    "cold": r"\d threads.*|read from.*|.*images/s",
    "collate": ".*_collate",
    "feeds": r"(\d+×|what else)[^/]*",
    "loader": "np.take|(memload|ffcv), [^/]*",
    "masks": "[^/]*",
    "several_gpus": "together|.* alone",
    "shards": "[^/]*",
}
RATE = r".*images(/s|_per_second)"
#: A table of curves, by benchmark: what they have against the number of epochs.
CURVES = {"cifar10": "seconds after each epoch"}
#: Rows of the table `feeds` › "what else there is …" in docs/speed.svg, with their labels.
SPEED_ROWS = {
    "JPEGs in a DataLoader": "JPEGs in a DataLoader, {workers} workers",
    "DataLoader over MemmapDataset, fast_collate": "out.bin in a DataLoader, fast_collate",
    "Loader, pinned, 12 threads": "Loader, pinned: 12 threads gather",
    "Loader, dma": "Loader, dma: copy engines fetch",
    "one copy": "limit: one copy of such a batch",
}
#: With so many columns, only the first two have quartiles.
MANY_COLUMNS = 6
#: The column of a table that has one value a row.
VALUE = "median (quartiles) or value"
NOT_COLUMNS = ("error", "versions")
BLUE, GREY = "#2f6fde", "#afb8c1"


def newest(folder: Path) -> list[dict[str, Any]]:
    """Return the lines to show, with their remarks."""
    files = [file.read_text().splitlines() for file in sorted(folder.glob("*.jsonl"))]
    lines = [json.loads(line) for file in files for line in file]
    lines.sort(key=lambda line: ("partial" not in line, line["when"]))
    found = {(line["benchmark"], machine(line), variant(line)): line for line in lines}
    remarks = folder / "remarks.json"
    for remark in json.loads(remarks.read_text()) if remarks.exists() else []:
        for line in found.values():
            if all(line[key].startswith(start) for key, start in remark["of"].items()):
                line.setdefault("remarks", []).append(remark["remark"])
    return [found[key] for key in sorted(found)]


def machine(line: dict[str, Any]) -> str:
    """Return the kind of machine in words."""
    facts = line["machine"]
    gpus = f", {facts['gpus']} × {facts['gpu']}" if "gpu" in facts else ""
    return f"{facts['cpu']}, {facts['cores']} cores{gpus}"


def variant(line: dict[str, Any]) -> str:
    """Return what distinguishes a line from others of the same benchmark, in words."""
    parameters = line["parameters"]
    return ", ".join(f"{name} {parameters[name]}" for name in VARIANTS if name in parameters)


# Values and tables


def is_spread(value: Any) -> bool:
    """Tell whether a value is a median with quartiles."""
    return isinstance(value, dict) and "median" in value


def number(value: Any) -> str:
    """Return a number with three digits, or with all that stand before the point."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".") if value else "0"


def cell(value: Any, quartiles: bool = True) -> str:
    """Return a value in a few characters."""
    if value is None:
        return ""
    if isinstance(value, list):
        return f"{number(value[0])} → {number(value[-1])}, {len(value)} values"
    if not is_spread(value):
        return number(value)
    names = ("median", "lower_quartile", "upper_quartile")
    median, low, high = (number(value[name]) for name in names)
    return f"{median} ({low} to {high})" if quartiles and value["repeats"] > 1 else median


@dataclass
class Table:
    """Values by row and column. A row with an ``error`` has no others."""

    title: str
    columns: list[str]
    rows: dict[str, dict[str, Any]]

    def markdown(self) -> str:
        """Return the table with a note on repeats and versions."""
        lines = [["", *self.columns], ["---"] * (1 + len(self.columns))]
        for name, row in self.rows.items():
            cells = [
                cell(row.get(column), len(self.columns) < MANY_COLUMNS or place < 2)
                for place, column in enumerate(self.columns)
            ]
            if "error" in row:
                cells[0] = f"not measured: {row['error']}"
            lines.append([name.replace("|", "\\|"), *cells])
        text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return "\n\n".join([text, *self._notes()])

    def _notes(self) -> Iterator[str]:
        values = [value for row in self.rows.values() for value in row.values()]
        repeats = sorted({value["repeats"] for value in values if is_spread(value)})
        if repeats:
            yield f"Medians of {' or '.join(map(str, repeats))} rounds."
        versions = {
            f"{name} {version}"
            for row in self.rows.values()
            for name, version in row.get("versions", {}).items()
        }
        if versions:
            yield f"Versions: {', '.join(sorted(versions))}."


def tables(results: dict[str, Any], title: str = "") -> list[Table]:
    """Return results as tables: one for names that have the same values below them."""
    branches, leaves = {}, {}
    for name, value in results.items():
        if isinstance(value, dict) and not is_spread(value):
            branches[name] = value
        elif value is not None:
            leaves[name] = {VALUE: value}
    found = [Table(title, [VALUE], leaves)] if leaves else []
    inner = [
        {name: value for name, value in branch.items() if name not in NOT_COLUMNS}
        for branch in branches.values()
        if "error" not in branch
    ]
    columns = list(dict.fromkeys(name for values in inner for name in values))
    values = [value for branch in inner for value in branch.values()]
    flat = all(is_spread(value) or not isinstance(value, dict) for value in values)
    if len(branches) > 1 and flat and 2 * len(values) > len(columns) * len(inner):
        return [*found, Table(title, columns or ["result"], branches)]
    for name, branch in branches.items():
        found += tables(branch, f"{title} › {name}" if title else name)
    return found


# RESULTS.md


def text(lines: list[dict[str, Any]]) -> str:
    """Return RESULTS.md."""
    parts = [
        "# Results",
        "`python benchmarks/report.py` generates this page from [`results/`](results). It shows the "
        "newest run of each benchmark on each kind of machine; partial runs appear only if there is "
        "no complete one. Figures are medians, with the quartiles in parentheses. Compare figures "
        "only within a table: other tables are from other runs.",
    ]
    for heading, of_benchmark in itertools.groupby(lines, lambda line: line["benchmark"]):
        source = HERE / f"{heading}.py"
        about = ast.get_docstring(ast.parse(source.read_text())) or ""
        summary = about.split("\n\n")[0].replace("\n", " ").replace("``", "`")
        parts += [f"## {heading}", f"{summary} Method: [{source.name}]({source.name})."]
        for line in of_benchmark:
            parts += section(line)
    return "\n\n".join(parts) + "\n"


def section(line: dict[str, Any]) -> Iterator[str]:
    """Yield the parts of the page about one line."""
    yield f"### {'; '.join(filter(None, [machine(line), variant(line)]))}"
    parameters = (f"{name} {number(value)}" for name, value in line["parameters"].items())
    versions = (
        f"{name} {version}"
        for name, version in line["versions"].items()
        if version != "not installed"
    )
    facts = [f"{line['when'][:10]}, commit {line['commit']}"]
    facts += [f"**Partial run**: {', '.join(line['partial'])}"] if "partial" in line else []
    facts += [f"**Remark**: {remark}" for remark in line.get("remarks", [])]
    facts += [f"GPU driver {line['machine']['driver']}"] if "driver" in line["machine"] else []
    facts += [f"Parameters: {', '.join(parameters)}"]
    facts += [f"Command: `{line['command']}`"] if "command" in line else []
    facts += [f"Versions: {', '.join(versions)}"]
    yield "\n".join(f"- {fact}" for fact in facts)
    for table in tables(line["results"]):
        if table.title:
            yield f"**{table.title}**"
        yield table.markdown()
    if plotted(line):
        yield f"![{line['benchmark']}](plots/{plot_name(line)})"


# Plots


def plot_name(line: dict[str, Any]) -> str:
    """Return the file name of a line's plot."""
    name = f"{line['benchmark']} {machine(line)} {variant(line)}".lower()
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-") + ".png"


def plotted(line: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what is plotted of a line, by title: curves, or tables with several images a second."""
    pattern, found = RATES.get(line["benchmark"], RATE), {}
    if (curves := CURVES.get(line["benchmark"])) in line["results"]:
        return {curves: line["results"][curves]}
    for table in tables(line["results"]):
        title = f"{table.title} › " if table.title else ""
        for column in table.columns:
            rates = {
                name: row[column]
                for name, row in table.rows.items()
                if is_spread(row.get(column))
                and re.fullmatch(pattern, title + (name if column == VALUE else column))
            }
            if len(rates) > 1:
                found.setdefault(table.title, rates)
    return found


def draw(line: dict[str, Any], path: Path) -> None:
    """Draw the tables of a line, one below the other."""
    from matplotlib.figure import Figure

    shown, curves = plotted(line), CURVES.get(line["benchmark"])
    heights = [4.5 if title == curves else 1 + 0.3 * len(rates) for title, rates in shown.items()]
    figure = Figure(figsize=(9, 0.6 + sum(heights)), layout="constrained")
    figure.suptitle(
        "; ".join(filter(None, [line["benchmark"], machine(line), variant(line)])), wrap=True
    )
    panels = figure.subplots(len(shown), squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, rates) in zip(panels, shown.items(), strict=True):
        axes.set_title(title, fontsize="medium")
        (draw_curves if title == curves else draw_bars)(axes, rates)
    figure.savefig(path, dpi=100, metadata={"Software": None})


def draw_bars(axes: Any, rates: dict[str, Any]) -> None:
    """Draw images a second with their quartiles."""
    medians = [value["median"] for value in rates.values()]
    errors = [
        [abs(value["median"] - value[f"{side}_quartile"]) for value in rates.values()]
        for side in ("lower", "upper")
    ]
    bars = axes.barh(list(rates), medians, xerr=errors, color=BLUE, ecolor="black", capsize=2)
    axes.bar_label(bars, [number(median) for median in medians], padding=4)
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.xaxis.set_major_formatter("{x:,.10g}")
    axes.set_xlabel("images/s, median and quartiles")


def draw_curves(axes: Any, curves: dict[str, list[float]]) -> None:
    """Draw seconds against epochs, from none."""
    for name, seconds in curves.items():
        axes.plot(range(len(seconds)), seconds, marker=".", label=name)
    axes.set(xlabel="epochs", ylabel="seconds from the start of the process", xlim=0, ylim=0)
    axes.legend(frameon=False)


def speed(lines: list[dict[str, Any]]) -> tuple[dict[str, float], str]:
    """Return the bars of docs/speed.svg by label, and the GPU they were measured on."""
    for line in sorted(lines, key=lambda line: line["when"], reverse=True):
        for name, table in line["results"].items():
            if name.startswith("what else there is, behind") and "partial" not in line:
                workers = line["parameters"].get("workers") or table["workers"]
                bars = {
                    label.format(workers=workers): table[row]["median"]
                    for row, label in SPEED_ROWS.items()
                }
                return bars, line["machine"]["gpu"]
    raise LookupError("No complete run of feeds.py is recorded. Run it on a machine with a GPU.")


def draw_speed(lines: list[dict[str, Any]], path: Path) -> None:
    """Draw the picture in the README."""
    import matplotlib
    from matplotlib.figure import Figure

    bars, gpu = speed(lines)
    colors = [BLUE if not label.startswith(("JPEGs", "limit")) else GREY for label in bars]
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "memload"}):
        figure = Figure(figsize=(9.6, 2.8), layout="constrained")
        axes = figure.add_subplot(frame_on=False)
        drawn = axes.barh(list(bars), list(bars.values()), color=colors)
        labels = [f"{float(f'{rate:.4g}'):,.0f}" for rate in bars.values()]
        axes.bar_label(drawn, labels, padding=6)
        axes.invert_yaxis()
        axes.tick_params(length=0)
        axes.set_xticks([])
        axes.set_title(
            f"Images a second on the GPU: 224×224, batches of 256, random order ({gpu})",
            fontsize="medium",
        )
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Write the page and its pictures."""
    lines, plots = newest(HERE / "results"), HERE / "plots"
    (HERE / "RESULTS.md").write_text(text(lines))
    plots.mkdir(exist_ok=True)
    drawn = {plot_name(line): line for line in lines if plotted(line)}
    for name, line in drawn.items():
        draw(line, plots / name)
    for path in plots.glob("*.png"):
        if path.name not in drawn:
            path.unlink()
    draw_speed(lines, SPEED)
    import performance  # here, as these import this module
    import readme

    performance.write(lines)
    README.write_text(readme.with_tables(README.read_text(), lines))


if __name__ == "__main__":
    main()
