"""The same photographs in every kind of container: the same names, bytes, pixels, and labels."""

import concurrent.futures
import json
import multiprocessing
import random
import zipfile

import numpy as np
import pytest
from PIL import Image

import memload

from .conftest import content

CLASSES = ["ant", "bee", "cat"]


def write_shards(made):
    for number in range(3):
        made.tar(f"{number:03d}.tar", range(10 * number, 10 * number + 10))
    return f"{made.folder}/{{000..002}}.tar"


def write_json_lines(made):
    made.directory()
    lines = [
        {"file_name": f"images/{name}", "label": name[:3], "age": age, "split": split}
        for name, age, split in zip(made.pictures, made.ages, made.splits, strict=True)
    ]
    path = made.folder / "metadata.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def write_template(made):
    made.directory()
    lines = [
        f"{name[4:6]},{name[:3]},{age},{split}"
        for name, age, split in zip(made.pictures, made.ages, made.splits, strict=True)
    ]
    path = made.folder / "ids.csv"
    path.write_text("\n".join(["id,label,age,split", *lines]))
    return path


def write_table(made, **options):
    made.directory()
    return made.table(**options)


def put_on_server(made):
    system = pytest.importorskip("fsspec").filesystem("memory")
    system.put(f"{made.directory()}/", "/bucket/images/", recursive=True)
    return "memory://bucket/images"


def hugging_face(made, **options):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_parquet(str(made.parquet()), cache_dir=str(made.folder / "cache"))
    return rows.cast_column("image", datasets.Image(**options))


class Mapped:
    classes = CLASSES

    def __init__(self, made):
        self.samples = [
            {"image": data, "label": name[:3], "age": age}
            for (name, data), age in zip(made.pictures.items(), made.ages, strict=True)
        ]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


SOURCES = {
    "folder": lambda made: made.directory(),
    "csv": write_table,
    "tsv": lambda made: write_table(made, name="images.tsv", delimiter="\t"),
    "jsonl": write_json_lines,
    "template": write_template,
    "tar": lambda made: made.tar(),
    "tar of folders": lambda made: made.tar(labels=False),
    "shards": write_shards,
    "zip": lambda made: made.zip(),
    "deflated zip": lambda made: made.zip(compression=zipfile.ZIP_DEFLATED),
    "parquet": lambda made: made.parquet(),
    "server": put_on_server,
    "mapped": Mapped,
    "decoded": lambda made: hugging_face(made, decode=True),
    "undecoded": lambda made: hugging_face(made, decode=False),
}
OPTIONS = {"template": {"image": "images/{label}/{id}.jpg"}}
SLOW = {"decoded", "undecoded"}
NAMES = [
    name if name not in SLOW else pytest.param(name, marks=pytest.mark.slow) for name in SOURCES
]


def read_all(source, order):
    return {row: content(source[row].image) for row in order}


@pytest.fixture(scope="module")
def other_process():
    """A process that was started anew, which gets sources as pickles."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
        executor.submit(abs, 1).result()
        yield executor


@pytest.mark.parametrize("name", [name for name in NAMES if name != "server"])  # not in its memory
def test_another_process_reads_the_bytes_of_every_source_in_any_order(
    other_process, containers, tqdm_monitor, name
):
    source = memload.open_source(SOURCES[name](containers), **OPTIONS.get(name, {}))
    order = random.Random(name).sample(range(30), 30)
    source[order[0]]  # what has been read from may be sent
    found = other_process.submit(read_all, source, order).result(100)
    assert [found[row] for row in range(30)] == [*containers.pictures.values()]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", NAMES)
def test_every_source_gives_the_pixels_and_labels_of_the_folder(
    containers, tmp_path, tqdm_monitor, name, num_workers
):
    memload.build(containers.directory(), tmp_path / "folder.bin", size=24, num_workers=0)
    source = SOURCES[name](containers)
    options = OPTIONS.get(name, {})
    output = tmp_path / "out.bin"
    report = memload.build(source, output, size=24, num_workers=num_workers, **options)
    assert report.rejected == 0
    assert output.read_bytes() == (tmp_path / "folder.bin").read_bytes()
    dataset = memload.MemmapDataset(output)
    assert (dataset.labels.tolist(), dataset.classes) == (containers.labels, CLASSES)
    if name not in ("folder", "zip", "deflated zip", "tar of folders", "server"):
        assert dataset.columns["age"].tolist() == containers.ages
    if name not in ("folder", "zip", "deflated zip", "tar of folders", "server", "mapped"):
        assert dataset.categories["split"] == ["train", "val"]
        assert dataset.columns["split"].tolist() == [part == "val" for part in containers.splits]


@pytest.mark.parametrize("name", NAMES)
def test_some_samples_are_samples(containers, tqdm_monitor, name):
    source = memload.open_source(SOURCES[name](containers), **OPTIONS.get(name, {}))
    rows = np.array([29, 3, 3, 17])
    source[2]  # what is open for it is not that of others
    taken = source.take(rows).take(np.array([3, 0]))
    assert list(taken.keys) == [source.keys[17], source.keys[29]]
    pictures = [*containers.pictures.values()]
    assert [content(taken[row].image) for row in (0, 1)] == [pictures[17], pictures[29]]
    assert [content(source[row].image) for row in (3, 6)] == [pictures[3], pictures[6]]
    assert [taken[row].columns["label"] for row in (0, 1)] == [1, 2]
    assert list(source.new_to(list(source.keys)[:28]).keys) == list(source.keys)[28:]
    renumbered = source.with_classes(["cat", "dog", "bee", "ant"])
    assert [renumbered[row].columns["label"] for row in (0, 10, 29)] == [3, 2, 0]


def test_a_data_set_of_memloads_and_an_array_are_sources(containers, tmp_path):
    first, second = tmp_path / "first.bin", tmp_path / "second.bin"
    memload.build(write_table(containers), first, size=24, num_workers=0)
    memload.build(first, second, num_workers=0)
    assert second.read_bytes() == first.read_bytes()
    before, after = memload.MemmapDataset(first), memload.MemmapDataset(second)
    assert list(after.keys) == list(before.keys)
    assert (after.classes, after.categories) == (before.classes, before.categories)
    chosen = memload.open_source(first, where={"split": "val", "label": "bee"})
    assert list(chosen.keys) == ["images/bee/10.jpg", "images/bee/15.jpg"]
    np.save(tmp_path / "x.npy", np.stack([before.gather([row])[0] for row in range(30)]))
    np.save(tmp_path / "y.npy", before.columns["label"])
    memload.build(tmp_path / "x.npy", tmp_path / "x.bin", label=tmp_path / "y.npy", num_workers=0)
    assert (tmp_path / "x.bin").read_bytes() == first.read_bytes()
    assert memload.MemmapDataset(tmp_path / "x.bin").labels.tolist() == containers.labels


def test_pil_images_and_tensors_are_images():
    torch = pytest.importorskip("torch")
    array = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    samples = [Image.fromarray(array), array, torch.tensor(array).permute(2, 0, 1)]
    source = memload.DatasetSource(samples)
    assert all(np.array_equal(source[row].image, array) for row in range(3))
