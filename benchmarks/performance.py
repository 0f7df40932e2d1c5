"""Write docs/performance.md: a readable choice of the lines in ``results/``, one system a row.

`report.py` calls it. Each section names a benchmark, a machine, a table of its newest result, and the rows and columns
to show. A row that is renamed in a benchmark is an error here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
GPU = "16 cores, 1 × NVIDIA H200"
CPU = "Intel(R) Xeon(R) Processor, 2 cores"

Line = dict[str, Any]
Row = dict[str, Any]


@dataclass
class Column:
    """A column: its heading, what it shows of a row, given all rows, and as what text."""

    heading: str
    value: Callable[[Row, dict[str, Row]], Any]
    text: Callable[[Any], str]


@dataclass
class Section:
    """A table of the page, and the sentences above it."""

    title: str
    above: str
    benchmark: str
    machine: str
    table: str
    rows: dict[str, str]
    columns: list[Column]
    variant: str = ""
    first: str = "system"


def median(value: Any) -> Any:
    """Return the median of a spread, or the value itself."""
    return value["median"] if isinstance(value, dict) else value


def of(name: str) -> Callable[[Row, dict[str, Row]], Any]:
    """Return what shows one value of a row."""
    return lambda row, rows: median(row.get(name))


def beside(other: str, name: str) -> Callable[[Row, dict[str, Row]], Any]:
    """Return what divides a value by that of another row."""
    return lambda row, rows: median(row[name]) / median(rows[other][name])


def rate(value: float) -> str:
    """Return a number with four digits."""
    return f"{float(f'{value:.4g}'):,.0f}"


def percent(value: float) -> str:
    """Return a share in percent."""
    return f"{100 * value:.1f} %" if value < 1.1 else f"{100 * value:.0f} %"


def times(value: float) -> str:
    """Return a ratio with two digits, or with all that stand before the point."""
    return f"{value:.1f} ×" if value < 10 else f"{value:,.0f} ×"


def cores(value: float) -> str:
    """Return a number of cores."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def seconds(value: float) -> str:
    """Return seconds with three digits."""
    return f"{value:.3g} s"


VALUE = "median (quartiles) or value"
IMAGES = Column("images/s", of("images/s"), rate)
RATE = Column("images/s", of(VALUE), rate)
CORES = Column("CPU cores", of("cores"), cores)

SYNTHETIC = {"synthetic": "the same batch again and again (no loading)"}
LOADERS = {
    "Loader, dma": "`Loader`, feed `dma`",
    "Loader, resident": "`Loader`, feed `resident`",
    "Loader, pinned": "`Loader`, feed `pinned`",
}
IN_A_DATALOADER = {
    "DataLoader, no workers": "`MemmapDataset` in a DataLoader, no workers",
    "the same in CudaPrefetcher": "the same in `CudaPrefetcher`",
    "DataLoader, 16 workers": "`MemmapDataset` in a DataLoader, 16 workers",
}
JPEGS = "JPEGs in a DataLoader, 16 workers"


def training(title: str, above: str, model: str) -> Section:
    """Return the section of a model that trains."""
    columns = [
        IMAGES,
        Column("of the first row", of("share of synthetic"), percent),
        Column("beside JPEGs", beside(JPEGS, "images/s"), times),
        CORES,
    ]
    rows = {
        **SYNTHETIC,
        **LOADERS,
        **IN_A_DATALOADER,
        JPEGS: "JPEGs in a DataLoader (Pillow), 16 workers",
    }
    return Section(title, above, "train_step", GPU, "", rows, columns, f"model {model},")


LOADED = "what else there is, behind the first batch of each worker, 224×224×3, batch 256"
SECTIONS = [
    training(
        "Training ResNet-50",
        "In bfloat16, batches of 256 images of 224×224, in random order, files in RAM. The first row trains on one batch that "
        "stays on the GPU: no loader can be faster. The last row decodes JPEGs of that size.",
        "ResNet-50",
    ),
    training(
        "Training ResNet-18",
        "The same with a smaller model, which needs more images a second.",
        "ResNet-18",
    ),
    training(
        "Training one convolution",
        "The smallest model there is shows what each way can deliver while a model trains.",
        "stem",
    ),
    Section(
        "Predicting with ResNet-50",
        "A trained network in bfloat16, batches of 256 images of 224×224, in order, files in RAM. Compiled networks run "
        "as a CUDA graph. The Loader has the feed `dma`, and JPEGs are decoded by Pillow.",
        "inference",
        GPU,
        "",
        {
            "synthetic, eager": "the same batch again and again (no loading)",
            "Loader, eager": "`Loader`",
            "JPEGs, eager": "JPEGs in a DataLoader of 16 workers",
            "synthetic, captured": "compiled: the same batch again and again",
            "Loader, captured": "compiled: `Loader`",
            "JPEGs, captured": "compiled: JPEGs in a DataLoader of 16 workers",
        },
        [IMAGES, Column("of no loading", of("share of synthetic"), percent), CORES],
    ),
    Section(
        "Loading alone",
        "Batches of 256 images of 224×224, to the GPU, in random order, files in RAM. The limit is one copy of a batch from "
        "page-locked memory.",
        "feeds",
        GPU,
        LOADED,
        {
            "one copy": "limit: one copy of such a batch",
            "Loader, dma": "`Loader`, feed `dma`",
            "Loader, pinned, 12 threads": "`Loader`, feed `pinned`, 12 threads",
            "the same in CudaPrefetcher": "`MemmapDataset` in a DataLoader of 16 workers, `fast_collate`, in `CudaPrefetcher`",
            "DataLoader over MemmapDataset, fast_collate": "`MemmapDataset` in a DataLoader of 16 workers, `fast_collate`",
            "DataLoader over MemmapDataset, default collate": "`MemmapDataset` in a DataLoader of 16 workers, torch's collate",
            "JPEGs in a DataLoader": "JPEGs (Pillow) in a DataLoader of 16 workers",
        },
        [RATE, Column("of one copy", beside("one copy", VALUE), percent)],
    ),
    Section(
        "Loading from the GPU's own memory",
        "The same batches of a data set that fits into the GPU. Nothing crosses the bus.",
        "feeds",
        GPU,
        "224×224×3, batch 256",
        {"index_select": "limit: `index_select` alone", "resident": "`Loader`, feed `resident`"},
        [RATE],
    ),
    Section(
        "Loading small images",
        "Batches of 2,048 images of 32×32.",
        "feeds",
        GPU,
        "32×32×3, batch 2,048",
        {
            "copy": "limit over the bus: one copy of such a batch",
            "dma": "`Loader`, feed `dma`",
            "index_select": "limit on the GPU: `index_select`",
            "resident": "`Loader`, feed `resident`",
        },
        [RATE],
    ),
    Section(
        "Other libraries, with a GPU",
        "Batches of 256 images of 224×224, to the GPU, files in RAM. Each library at the better of 0 and 16 workers. FFCV, DALI "
        "and others were not installed on this machine.",
        "compare",
        GPU,
        "",
        {
            "memload, Loader, dma, 1 thread": "memload, `Loader`, feed `dma`",
            "memload, DataLoader + fast_collate, 0 workers": "memload, DataLoader with `fast_collate`",
            "tensordict, memory-mapped, 0 workers": "tensordict, memory-mapped",
            "NumPy memmap, default collate, 16 workers": "NumPy memmap in a DataLoader of 16 workers",
            "WebDataset, arrays, 16 workers": "WebDataset, arrays, 16 workers",
            "LitData, tensors, 16 workers": "LitData, tensors, 16 workers",
            "JPEG, DataLoader, torchvision.io, 16 workers": "JPEGs by torchvision, 16 workers",
            "JPEG, DataLoader, Pillow, 16 workers": "JPEGs by Pillow, 16 workers",
        },
        [IMAGES, Column("memload's `dma` beside it", of("memload / it"), times), CORES],
    ),
    Section(
        "Other libraries, on two cores",
        "Batches of 256 photographs of 224×224, on the CPU, files in RAM. Each library at its best number of workers.",
        "compare",
        CPU,
        "",
        {
            "memload, Loader, 2 threads": "memload, `Loader`, 2 threads",
            "memload, DataLoader + fast_collate, 0 workers": "memload, DataLoader with `fast_collate`",
            "FFCV, raw, 2 workers": "FFCV, raw pixels, 2 workers",
            "NumPy memmap, a batch by one index, 0 workers": "NumPy memmap, a batch by one index",
            "NumPy memmap, default collate, 2 workers": "NumPy memmap in a DataLoader of 2 workers",
            "tensordict, memory-mapped, 0 workers": "tensordict, memory-mapped",
            "LitData, tensors, 2 workers": "LitData, tensors, 2 workers",
            "MosaicML streaming, arrays, 2 workers": "MosaicML streaming, arrays, 2 workers",
            "Hugging Face datasets, torch format, 2 workers": "Hugging Face datasets, arrays, 2 workers",
            "WebDataset, arrays, 2 workers": "WebDataset, arrays, 2 workers",
            "JPEG, DataLoader, torchvision.io, 2 workers": "JPEGs by torchvision, 2 workers",
            "JPEG, DataLoader, Pillow, 2 workers": "JPEGs by Pillow, 2 workers",
        },
        [IMAGES, Column("memload's Loader beside it", of("memload / it"), times), CORES],
    ),
    Section(
        "Collating on two cores",
        "Batches of 256 images of 224×224 from a `MemmapDataset` in a DataLoader without workers.",
        "collate",
        CPU,
        "",
        {"fast_collate": "`fast_collate`", "default_collate": "torch's default collate"},
        [RATE],
    ),
    Section(
        "Random crops and flips on a GPU",
        "`RandomResizedCrop(224)`, flip, normalise and cast, of 256 images of 256×256, with the host's part. memload draws for "
        "each image.",
        "transforms",
        GPU,
        "",
        {
            "resized crop, flip, normalise, images/s": "memload, in a Loader",
            "resized crop, flip, normalise, a call by itself, images/s": "memload, a call outside of a Loader",
            "torchvision v2, one draw a batch, images/s": "torchvision v2, one draw for the whole batch",
            "torchvision v2, one draw a sample, images/s": "torchvision v2, a draw for each image",
            "kornia, images/s": "Kornia, a draw for each image",
        },
        [RATE],
    ),
    Section(
        "Recipes on a GPU",
        "256 images of 256×256 at a time (32×32 for the last two), with and without the host's part.",
        "transforms",
        GPU,
        "recipes, of pictures of 256×256 or 32×32",
        {
            f"{name}({size})": f"`{name}({size})`"
            for name, size in (
                *(
                    ("imagenet_v1", 224),
                    ("imagenet_v2", 176),
                    ("deit", 224),
                    ("deit3", 224),
                    ("convnext", 224),
                ),
                *(("simclr", 224), ("byol", 224), ("mae", 224), ("cifar", 32), ("airbench", 32)),
            )
        },
        [
            Column("images/s", of("memload, images/s"), rate),
            Column("images/s on the GPU alone", of("memload, on the device, images/s"), rate),
        ],
        first="recipe",
    ),
    Section(
        "Crops and flips on two cores",
        "Without a GPU, transforms take more time than loading. `plain` is the same in torch's own operations, one image after "
        "another.",
        "transforms",
        CPU,
        "",
        {
            "resized crop, flip, normalise, 256, images/s": "`train(224)`, from 256×256",
            "resized crop, flip, normalise, 256, plain, images/s": "the same, plain",
            "padded crop, flip, normalise, 32, images/s": "padded crop, flip, normalise at 32×32",
            "padded crop, flip, normalise, 32, plain, images/s": "the same, plain",
        },
        [RATE],
        first="transform",
    ),
    Section(
        "A cold file that fits in RAM",
        "The whole first epoch of a file that is not in RAM yet. The limit is one read of the file from start to end.",
        "cold",
        GPU,
        "whole first epochs of a cold file that fits",
        {
            "read from start to end": "limit: read from start to end",
            "dma": "`Loader`, feed `dma`",
            "pinned": "`Loader`, feed `pinned`",
            "resident": "`Loader`, feed `resident`",
        },
        [IMAGES, Column("of the limit", of("of the limit"), percent), CORES],
        "device cuda",
    ),
    Section(
        "A file larger than RAM",
        "In random order, after the first epoch. The limit is what bare reads of such rows reach on this disk: times 2 if half of "
        "the rows are held in RAM. This disk varies by a quarter from run to run.",
        "cold",
        GPU,
        "a file larger than RAM",
        {
            "bare O_DIRECT, 64 threads": "bare reads of rows (O_DIRECT), 64 threads",
            "disk, nothing held": "`Loader`, feed `disk`, no rows held",
            "disk, half held": "`Loader`, feed `disk`, half of the rows held",
        },
        [IMAGES, Column("of the limit", of("of the limit"), percent), CORES],
        "device cuda",
    ),
    Section(
        "Prefetching batches of another DataLoader",
        "A DataLoader's batches of 256 images are copied and normalised, and a model trains on them.",
        "async_prefetch",
        GPU,
        "DataLoader, 256 of 3×224×224",
        {
            "synchronous": "copied and normalised in the loop",
            "synchronous, page-locked": "the same, from page-locked memory",
            "CudaPrefetcher": "in `CudaPrefetcher`",
        },
        [
            Column("ms a step", of("ms a step"), "{:.1f}".format),
            Column("of the slower of loading and training", of("share of the bound"), percent),
        ],
    ),
    Section(
        "CIFAR-10, from files to an accuracy",
        "Wall-clock time of the whole process, with importing torch and compiling kernels, from 60,000 JPEG files to the accuracy "
        "on the test files after 8 epochs.",
        "cifar10",
        GPU,
        "from files to accuracy",
        {
            "memload, build, 8 epochs": "memload, with the build",
            "memload, files there, 8 epochs": "memload, files built before",
            "by hand, 8 epochs": "a loader written for CIFAR-10 alone, all on the GPU",
            "by hand, tensors there, 8 epochs": "the same, tensors saved before",
            "ImageFolder, 8 epochs": "`ImageFolder` and a DataLoader of 16 workers",
        },
        [
            Column("time", of("seconds"), seconds),
            Column("accuracy (%)", of("accuracy (%), mean ± 95 %"), str),
            Column("CPU time", of("CPU (s)"), seconds),
        ],
        "trained for 8 epochs",
    ),
    Section(
        "Building on two cores",
        "ImageNet's photographs to 256×256. The limit is a bare loop that decodes and resizes, and writes nothing.",
        "build",
        CPU,
        "",
        {"bare": "limit: decode and resize", "memload": "`memload build`"},
        [RATE],
        "fast False",
    ),
]


def text(lines: list[Line]) -> str:
    """Return the page."""
    parts = [
        "# Performance",
        "Everything here was measured, and `python benchmarks/report.py` wrote this page from the results. Each figure is a "
        "median of several rounds. Compare figures within a table only: other tables are from other runs, often on other "
        "machines. All measurements, in `benchmarks/RESULTS.md`, have quartiles, versions and parameters. "
        "[`memload doctor`](profiling.md#memload-doctor) measures your machine.",
        "If your cores decode as fast as your model trains, memload does not make training faster; it frees those cores. It "
        "makes training faster where the model is small, the cores are few, or several GPUs share them.",
    ]
    for section in SECTIONS:
        line = find(lines, section.benchmark, section.machine, section.variant)
        tables = [table for table in report.tables(line["results"]) if table.title == section.table]
        rows = {name: row for table in tables for name, row in table.rows.items()}
        parts += [f"## {section.title}", section.above, markdown(section, rows), source(line)]
    return "\n\n".join([*parts, *several_gpus(lines)]) + "\n"


def find(lines: list[Line], benchmark: str, machine: str, variant: str = "") -> Line:
    """Return the line of a benchmark on a machine. Raises LookupError if there is none.

    ``machine`` is the end of the name of a machine, and ``variant`` is a part of what
    `report.variant` says, with a comma behind it.
    """
    for line in lines:
        if (
            line["benchmark"] == benchmark
            and report.machine(line).endswith(machine)
            and variant in f"{report.variant(line)},"
        ):
            return line
    raise LookupError(
        f"There is no result of {benchmark}.py, {variant}, on {machine}. Run it there."
    )


def markdown(section: Section, rows: dict[str, Row]) -> str:
    """Return the table of a section."""
    lines = [[section.first, *(column.heading for column in section.columns)]]
    lines.append(["---", *("---:" for _ in section.columns)])
    for name, label in section.rows.items():
        values = [column.value(rows[name], rows) for column in section.columns]
        shown = zip(values, section.columns, strict=True)
        lines.append(
            [label, *("" if value is None else column.text(value) for value, column in shown)]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def source(line: Line) -> str:
    """Return where the figures are from."""
    partial = "; a shorter run than usual" if "partial" in line else ""
    link = f"`{line['benchmark']}`"
    return f"{report.machine(line)}, {line['when'][:10]}{partial}: {link}."


def several_gpus(lines: list[Line]) -> list[str]:
    """Return the section about several GPUs, each of whose rows is a line of its own."""
    found = {
        line["parameters"]["ranks"]: line for line in lines if line["benchmark"] == "several_gpus"
    }
    rates = [
        f"| {ranks} | {rate(median(found[ranks]['results']['together']))} |"
        for ranks in sorted(found)
    ]
    return [
        "## Several GPUs",
        "Batches of 256 images of 224×224, one process for each GPU with the feed `dma`. All share one page cache.",
        "\n".join(["| GPUs | images/s together |", "| --- | ---: |", *rates]),
        source(found[max(found)]),
    ]


def write(lines: list[Line]) -> None:
    """Write the page."""
    PAGE.write_text(text(lines))
