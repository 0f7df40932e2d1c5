"""`memload.build` from every kind of source beside the folder that holds the same pictures.

All are built in this process and its workers, one after another, from the call to the finished data
set: libraries are loaded by then, and files are warm. Images/s of the sources differ by how they
find and read the encoded pictures; decoding is the same. CPU time is that of all processes, for an
image. An array and a data set of memload's hold
pixels of the stored size instead, so nothing is decoded. `--images` is a folder of JPEGs, by default
made ones of ImageNet's sizes; they are repeated under other names until there are `--count`. Parquet
has `--group` rows in a row group. Sources whose libraries are missing are left out.
"""

import csv
import io
import os
import resource
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from build import photographs
from harness import Way, run_benchmark

import memload

#: The sources besides the folder, and the package that each needs.
NEEDS = {
    "CSV": "memload",
    "tar": "memload",
    "zip": "memload",
    "parquet": "pyarrow",
    "Hugging Face": "datasets",
    "Hugging Face, not decoded": "datasets",
    "LMDB": "lmdb",
    "memory://": "fsspec",
    "npy": "memload",
    "memload": "memload",
}


class Lmdb:
    """Pictures in LMDB, as people wrap it: opened by each process when it first reads."""

    def __init__(self, path: Path, labels: list[int]) -> None:
        self.path, self.labels, self.process = path, labels, 0

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        if self.process != os.getpid():
            import lmdb

            self.database = lmdb.open(str(self.path), readonly=True, lock=False)
            self.process = os.getpid()
        with self.database.begin() as transaction:
            return transaction.get(b"%08d" % index), self.labels[index]


def write_csv(root: Path, names: list[str], path: Path) -> str:
    """Write a table of paths and classes."""
    with path.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label"])
        writer.writerows((str(root / name), name.partition("/")[0]) for name in names)
    return file.name


def write_tar(root: Path, names: list[str], path: Path) -> str:
    """Write samples as WebDataset has them."""
    with tarfile.open(path.with_suffix(".tar"), "w") as file:
        for number, name in enumerate(names):
            contents = ("jpg", (root / name).read_bytes()), ("cls", name.partition("/")[0].encode())
            for extension, content in contents:
                member = tarfile.TarInfo(f"{number:08d}.{extension}")
                member.size = len(content)
                file.addfile(member, io.BytesIO(content))
    return str(path.with_suffix(".tar"))


def write_zip(root: Path, names: list[str], path: Path) -> str:
    """Write a zip of class folders, not compressed."""
    with zipfile.ZipFile(path.with_suffix(".zip"), "w") as file:
        for name in names:
            file.write(root / name, name)
    return str(path.with_suffix(".zip"))


def write_parquet(root: Path, names: list[str], path: Path, group: int) -> str:
    """Write images as Hugging Face has them."""
    import pyarrow
    from pyarrow import parquet

    images = [{"bytes": (root / name).read_bytes(), "path": name} for name in names]
    table = pyarrow.table({"image": images, "label": [name.partition("/")[0] for name in names]})
    parquet.write_table(
        table, path.with_suffix(".parquet"), row_group_size=group, use_dictionary=["label"]
    )
    return str(path.with_suffix(".parquet"))


def write_lmdb(root: Path, names: list[str], path: Path, labels: list[int]) -> Lmdb:
    """Write the encoded images, by number."""
    import lmdb

    with lmdb.open(str(path), map_size=1 << 36) as database, database.begin(write=True) as put:
        for number, name in enumerate(names):
            put.put(b"%08d" % number, (root / name).read_bytes())
    return Lmdb(path, labels)


def write_memory(root: Path, names: list[str]) -> str:
    """Write the files to fsspec's file system in memory."""
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe({f"/pictures/{name}": (root / name).read_bytes() for name in names})
    return "memory://pictures"


def hugging_face(path: str, *, decode: bool) -> Any:
    """Open a Parquet file as a Hugging Face data set."""
    import datasets

    found = datasets.Dataset.from_parquet(path, cache_dir=str(Path(path).parent / "hugging-face"))
    return found.cast_column("image", datasets.Image(decode=decode))


def measured(build: Callable[[], int]) -> Way:
    """Return a way that measures a build: its rate, and what it costs."""

    def cpu_seconds() -> float:
        usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)

    def way() -> dict[str, float]:
        start, cpu_start = time.perf_counter(), cpu_seconds()
        images = build()
        seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu_start
        return {"images/s": images / seconds, "CPU time (ms)": 1000 * cpu / images}

    return way


def ways(options: Any, folder: Path) -> dict[str, Way]:
    """Return a build from each source."""
    root = photographs(options.images, folder, options.count)
    names = sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())
    classes = sorted({name.partition("/")[0] for name in names})
    labels = [classes.index(name.partition("/")[0]) for name in names]
    work = folder / f"sources-{os.getpid()}"
    work.mkdir()
    files, output = work / "pictures", work / "output.bin"

    def build(source: Any, size: int | None = options.side, output: Path = output) -> int:
        report = memload.build(source, output, size=size, overwrite=True, progress=False)
        return int(report.samples)

    build(root, output=work / "stored.bin")
    pixels = np.load(work / "stored.bin", mmap_mode="r")
    make: dict[str, Callable[[], Any]] = {
        "CSV": lambda: write_csv(root, names, files),
        "tar": lambda: write_tar(root, names, files),
        "zip": lambda: write_zip(root, names, files),
        "parquet": lambda: write_parquet(root, names, files, options.group),
        "Hugging Face": lambda: hugging_face(
            write_parquet(root, names, files, options.group), decode=True
        ),
        "Hugging Face, not decoded": lambda: hugging_face(
            write_parquet(root, names, files, options.group), decode=False
        ),
        "LMDB": lambda: write_lmdb(root, names, work / "lmdb", labels),
        "memory://": lambda: write_memory(root, names),
        "npy": lambda: np.save(files, pixels) or str(files.with_suffix(".npy")),
        "memload": lambda: work / "stored.bin",
    }
    found = {"folder": measured(lambda: build(root))}
    for name, package in NEEDS.items():
        if find_spec(package) is None:
            print(f"{name} is left out: {package} is not installed.", file=sys.stderr)
            continue
        if options.only and name not in options.only:
            continue
        source, is_array = make[name](), name == "npy"
        found[name] = measured(
            lambda source=source, size=None if is_array else options.side: build(source, size)
        )
        build(source, None if is_array else options.side)
        if not np.array_equal(np.load(output, mmap_mode="r"), pixels):
            sys.exit(f"{name}: the pixels are not those of the folder.")
    return found


if __name__ == "__main__":
    run_benchmark(
        ways,
        options={"images": None, "count": 260, "side": 256, "group": 50, "only": [], "rounds": 5},
        quick={"rounds": 2},
        ratios={f"{name} / folder": (f"{name} › images/s", "folder › images/s") for name in NEEDS},
        facts={"files": "warm"},
    )
