"""The same pictures through every source: the same pixels, labels and columns."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import memload

from .conftest import Done, Server

CLASSES = ["ant", "bee", "cat"]


class Lmdb:
    """Undecoded images of an LMDB file, which each process opens for itself."""

    def __init__(self, path: Path) -> None:
        self.path, self.environment = path, None
        lmdb = pytest.importorskip("lmdb")
        with (
            contextlib.closing(lmdb.open(str(path), readonly=True, lock=False)) as environment,
            environment.begin() as transaction,
        ):
            self.keys = [key for key, _ in transaction.cursor()]

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> Any:
        import lmdb

        environment = lmdb.open(str(self.path), readonly=True, lock=False)
        with contextlib.closing(environment), environment.begin() as transaction:
            return transaction.get(self.keys[index]), index // 10


def hugging_face(path: Path, *, decode: bool) -> Any:
    datasets = pytest.importorskip("datasets")
    cache = str(path.parent / "cache")
    rows = datasets.Dataset.from_parquet(str(path), cache_dir=cache)
    return rows.cast_column("image", datasets.Image(decode=decode))


@pytest.fixture
def expected(containers: Any, tmp_path: Path, tqdm_monitor: None) -> bytes:
    """The pixels of the pictures, built from a folder."""
    memload.build(containers.directory(), tmp_path / "folder.bin", size=24, num_workers=0)
    return pixels(tmp_path / "folder.bin")


def write_lmdb(path: Path, containers: Any) -> Path:
    lmdb = pytest.importorskip("lmdb")
    with (
        contextlib.closing(lmdb.open(str(path), map_size=1 << 24)) as environment,
        environment.begin(write=True) as transaction,
    ):
        for name, file in containers.pictures.items():
            transaction.put(name.encode(), file)
    return path


def write_shards(containers: Any) -> str:
    for number in range(3):
        containers.tar(f"{number:03d}.tar", range(10 * number, 10 * number + 10))
    return f"{containers.folder}/{{000..002}}.tar"


def pixels(path: Path) -> bytes:
    return path.read_bytes()[4096:]


SOURCES: dict[str, Callable[[Any], Any]] = {
    "csv": lambda made: made.table(),
    "tsv": lambda made: made.table("images.tsv", "\t"),
    "tar": lambda made: made.tar(),
    "tar of folders": lambda made: made.tar(labels=False),
    "shards": write_shards,
    "zip": lambda made: made.zip(),
    "parquet": lambda made: made.parquet(),
    "lmdb": lambda made: Lmdb(write_lmdb(made.folder / "images.lmdb", made)),
    "decoded": lambda made: hugging_face(made.parquet(), decode=True),
    "undecoded": lambda made: hugging_face(made.parquet(), decode=False),
}
SLOW = {"decoded", "undecoded"}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in SOURCES]
)
def test_every_source_gives_the_pixels_and_labels_of_the_folder(
    containers: Any, expected: bytes, tmp_path: Path, name: str, num_workers: int
) -> None:
    output = tmp_path / "out.bin"
    report = memload.build(SOURCES[name](containers), output, size=24, num_workers=num_workers)
    assert report.rejected == 0
    assert pixels(output) == expected
    dataset = memload.MemmapDataset(output)
    assert dataset.labels.tolist() == containers.labels
    if name != "lmdb":
        assert dataset.classes == CLASSES
    if name not in ("lmdb", "zip", "tar of folders"):
        assert dataset.columns["age"].tolist() == containers.ages
        assert dataset.columns["split"].tolist() == [part == "val" for part in containers.splits]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", ["images", "images.tar"])
def test_a_server_gives_the_pixels_of_the_folder(
    containers: Any, expected: bytes, tmp_path: Path, name: str, num_workers: int
) -> None:
    system = pytest.importorskip("fsspec").filesystem("memory")
    system.put(f"{containers.folder}/images/", "/bucket/images/", recursive=True)
    system.put(str(containers.tar()), "/bucket/images.tar")
    output = tmp_path / "out.bin"
    memload.build(f"memory://bucket/{name}", output, size=24, num_workers=num_workers)
    system.rm("/bucket", recursive=True)
    assert pixels(output) == expected
    dataset = memload.MemmapDataset(output)
    assert (dataset.classes, dataset.labels.tolist()) == (CLASSES, containers.labels)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", ["0", "2"])
@pytest.mark.parametrize(
    "arguments",
    [
        ["{url}/images"],
        ["{url}/images.csv"],
        ["{url}/images.parquet?download=true"],
        ["{folder}/images.csv", "--root", "{url}"],
    ],
)
def test_an_http_server_gives_the_pixels_of_the_folder(
    containers: Any,
    expected: bytes,
    tmp_path: Path,
    serve: Callable[[Path], Server],
    command: Callable[..., Done],
    arguments: Sequence[str],
    num_workers: str,
) -> None:
    containers.table()
    containers.parquet()
    places = {"url": serve(containers.folder).url, "folder": containers.folder}
    source = [argument.format(**places) for argument in arguments]
    done = command("build", *source, "out.bin", "--size", "24", "-j", num_workers)
    assert done.status == 0, done.error
    assert pixels(tmp_path / "out.bin") == expected
    assert memload.MemmapDataset(tmp_path / "out.bin").labels.tolist() == containers.labels


def test_names_on_a_server_may_have_special_characters(containers: Any, tmp_path: Path) -> None:
    system = pytest.importorskip("fsspec").filesystem("memory")
    names = ["a b/[1]*?.jpg", "é/#%20.jpg"]
    for name, file in zip(names, containers.pictures.values(), strict=False):
        system.pipe(f"/special/{name}", file)
    memload.build("memory://special", tmp_path / "out.bin", size=8, num_workers=0)
    system.rm("/special", recursive=True)
    dataset = memload.MemmapDataset(tmp_path / "out.bin")
    assert (list(dataset.keys), dataset.classes) == (names, ["a b", "é"])
