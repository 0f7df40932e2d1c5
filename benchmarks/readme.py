"""The figures of the README, from the newest results.

    python benchmarks/report.py    # writes the tables between the marks in README.md, among others

`tables` has the tables by the name in their marks, and `phrases` what else the README says in numbers.
"""

from typing import Any

from performance import CPU, GPU, find, median, rate

from memload.wording import size_text

Line = dict[str, Any]

#: Data sets of the first table: name, images, pixels of a side.
DATA_SETS = (
    ("CIFAR-10", 60_000, 32),
    ("ImageNet at 224×224", 1_281_167, 224),
    ("ImageNet at 256×256", 1_281_167, 256),
    ("10 million at 256×256", 10_000_000, 256),
)
CORES = (2, 16, 64)


def tables(lines: list[Line]) -> dict[str, str]:
    """Return the tables as Markdown, by name."""
    return {"costs": costs(lines), "results": results(lines)}


def phrases(lines: list[Line]) -> dict[str, str]:
    """Return what the text of the README says in numbers, by what it is."""
    gains = {model: gain(lines, model) for model in ("ResNet-18", "ResNet-50")}
    decoding = train_step(lines, "ResNet-50")["JPEGs in a DataLoader, 16 workers"]["cores"]
    feeding = train_step(lines, "ResNet-50")["Loader, dma"]["cores"]
    error = cifar10(lines)["memload, build, 8 epochs"]["accuracy (%), mean ± 95 %"].split()[-1]
    written = 64 * rate_of_photographs(lines) * 256 * 256 * 3
    return {
        "gain of ResNet-18": f"{gains['ResNet-18']:.1f} times",
        "gain of ResNet-50": f"{gains['ResNet-50']:.1f} times",
        "cores that decoding takes": f"{median(decoding):.1f} cores",
        "cores that feeding takes": f"{100 * median(feeding):.0f} % of one core",
        "error of the accuracies": f"error of {error} points",
        "what 64 cores write": f"{written / 1e9:.1f} GB/s",
    }


def gain(lines: list[Line], model: str) -> float:
    """Return how many times as fast a model trains as from JPEGs."""
    table = train_step(lines, model)
    jpegs = median(table["JPEGs in a DataLoader, 16 workers"]["images/s"])
    return float(median(table["Loader, dma"]["images/s"])) / float(jpegs)


def costs(lines: list[Line]) -> str:
    """Return the table of disk space and time that data sets take.

    Of photographs, a rate was measured on two cores; of CIFAR-10, the time on 16. Other numbers of
    cores are in proportion.
    """
    seconds = median(cifar10(lines)["memload, build, 8 epochs"]["build (s)"])
    small = DATA_SETS[0][1] / seconds / 16
    rows = []
    for name, images, side in DATA_SETS:
        per_core = small if side == 32 else rate_of_photographs(lines)
        times = [duration(images / per_core / cores) for cores in CORES]
        rows.append([name, size_text(images * side * side * 3), *times])
    heads = ["", "disk", *(f"{cores} cores" for cores in CORES)]
    return table_of(heads, rows)


def rate_of_photographs(lines: list[Line]) -> float:
    """Return how many photographs a core converts in a second, measured with two cores."""
    return float(median(find(lines, "build", CPU, "fast False")["results"]["memload"])) / 2


def results(lines: list[Line]) -> str:
    """Return the table of results: a row for each thing that one waits for."""
    feeds = find(lines, "feeds", GPU)["results"]
    name = next(name for name in feeds if name.startswith("what else there is"))
    compared = find(lines, "compare", CPU)["results"]
    decoded = median(compared["JPEG, DataLoader, Pillow, 2 workers"]["images/s"])
    ffcv = median(compared["FFCV, raw, 2 workers"]["images/s"])
    own = median(compared["memload, Loader, 2 threads"]["images/s"])
    rows = [
        [
            "Loading 224×224 onto the GPU",
            f"{rate(median(feeds[name]['JPEGs in a DataLoader']))} images/s",
            f"**{rate(median(feeds[name]['Loader, dma']))} images/s**",
            f"{rate(median(feeds[name]['one copy']))}: one bare copy of the same bytes",
        ],
        [
            "Loading 224×224 on 2 cores, no GPU",
            f"{rate(decoded)} images/s",
            f"**{rate(own)} images/s**",
            f"{rate(ffcv)}: FFCV, raw pixels",
        ],
        *(trained(lines, model) for model in ("ResNet-50", "ResNet-18")),
        from_files(lines),
    ]
    return table_of(["", "JPEGs in a DataLoader", "memload", "compared with"], rows)


def trained(lines: list[Line], model: str) -> list[str]:
    """Return a row of the results: images/s while a model trains, and the cores this takes."""
    table = train_step(lines, model)

    def cell(row: str) -> str:
        cores = median(table[row]["cores"])
        return f"{rate(median(table[row]['images/s']))} images/s, {cores:.{1 if cores > 1 else 2}f} cores"

    limit = rate(median(table["synthetic"]["images/s"]))
    return [
        f"Training {model}",
        cell("JPEGs in a DataLoader, 16 workers"),
        f"**{cell('Loader, dma')}**",
        f"{limit}: one batch again and again, no loading",
    ]


def from_files(lines: list[Line]) -> list[str]:
    """Return a row of the results: seconds from JPEG files to the accuracy."""
    table = cifar10(lines)
    seconds = {row: f"{median(values['seconds']):.1f} s" for row, values in table.items()}
    return [
        f"CIFAR-10, from files to {accuracy(lines)} %",
        seconds["ImageFolder, 8 epochs"],
        f"**{seconds['memload, build, 8 epochs']}** including the build, "
        f"**{seconds['memload, files there, 8 epochs']}** once built",
        f"{seconds['by hand, tensors there, 8 epochs']}: a loader written for CIFAR-10 alone",
    ]


def accuracy(lines: list[Line]) -> str:
    """Return the mean accuracy of memload's runs on CIFAR-10, in percent."""
    return cifar10(lines)["memload, build, 8 epochs"]["accuracy (%), mean ± 95 %"].split()[0][:4]


# What is found in results


def train_step(lines: list[Line], model: str) -> Line:
    """Return the results of training a model."""
    results: Line = find(lines, "train_step", GPU, f"model {model},")["results"]
    return results


def cifar10(lines: list[Line]) -> Line:
    """Return the results of training on CIFAR-10 from files."""
    line = find(lines, "cifar10", GPU, "trained for 8 epochs")
    table: Line = line["results"]["from files to accuracy"]
    return table


# How it is written


def table_of(heads: list[str], rows: list[list[str]]) -> str:
    """Return a table as Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def duration(seconds: float) -> str:
    """Return a time in seconds, minutes or hours."""
    if seconds < 10:
        return "seconds"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def with_tables(readme: str, lines: list[Line]) -> str:
    """Return the README with its tables written anew.

    A table stands between ``<!-- NAME -->`` and ``<!-- end -->``.
    """
    for name, table in tables(lines).items():
        before, mark, after = readme.partition(f"<!-- {name} -->\n")
        _, end, rest = after.partition("<!-- end -->")
        readme = f"{before}{mark}{table}\n{end}{rest}"
    return readme
