"""Samples as image files in folders, or in a tar, and back."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import strategies as st
from PIL import Image

import memload
from memload.cli import main
from memload.errors import BuildError, ChecksumError
from memload.storage.index import Index
from memload.storage.keys import Keys
from memload.storage.shards import Shards

Make = Callable[..., Index]

#: Keys that are awkward as paths.
ODD = (
    "../../outside.jpg", "/absolute.jpg", "a/../b.jpg", ".hidden/.file.jpg", "ant/..",
    "cat/ant/1.jpg", "ant/1.jpg", "ant/1.png", "ant/1-2.png", "dots.in.the.name", "dots.in",
    " spaces around.jpg ", "new\nline.png", 'quo"te,comma.png', "caf\udce9.jpg", "größe/ñ.png",
    "x" * 300 + ".jpg", "/".join(["deep"] * 900), "a\0b.png", "ant.png/1.jpg", "https://x/y.jpg?z=1",
)  # fmt: skip

KINDS = [("|u1", 3), ("|u1", 1), ("<u2", 1)]


def pixels(index: Index, name: str = "image") -> np.ndarray:
    rows = index.rows_of(name)
    shards = Shards(index, name)
    return shards.gather(rows, np.empty((len(rows), *shards.array.shape), shards.array.descr))


def by_stem(index: Index, name: str = "image") -> dict[str, bytes]:
    rows = zip(index.keys, pixels(index, name), strict=True)
    return {key.rpartition(".")[0]: row.tobytes() for key, row in rows}


def labels(index: Index) -> list[Any]:
    numbers = index.columns["label"].tolist()
    return numbers if index.classes is None else [index.classes[number] for number in numbers]


def build(source: Any, output: Path, like: Index, **options: Any) -> Index:
    """Build from files at the size and the mode of another data set."""
    height, width, channels = like.image.shape
    mode = {("|u1", 1): "L", ("|u1", 3): "RGB", ("<u2", 1): "I;16"}[like.image.descr, channels]
    memload.build(
        source, output, size=(height, width), mode=mode, num_workers=0, progress=False, **options
    )
    return Index.open(output)


def mixed(index: Index, **facts: Any) -> Index:
    """Return an index with rows in another order, and with labels in no order."""
    label = np.random.default_rng(len(index)).permutation(np.arange(len(index)) % 3)
    changed = {"columns": {"label": label}, "row": index.row[::-1].copy(), **facts}
    return replace(index, **changed).write(index.path)


def files(folder: Path, below: str = ".") -> list[str]:
    """Return the files in a folder, or only those below a part of it."""
    found = [folder / below] if (folder / below).is_file() else (folder / below).rglob("*")
    return sorted(str(path.relative_to(folder)) for path in found if not path.is_dir())


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(main, [*map(str, arguments)])


# ------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize(("descr", "channels"), KINDS)
@pytest.mark.parametrize("name", ["files.tar"])
def test_what_was_exported_with_its_facts_builds_the_same_data_set(
    make_dataset: Make, tmp_path: Path, descr: str, channels: int, name: str
) -> None:
    index = mixed(make_dataset(rows=(9, 4), shape=(5, 7, channels), descr=descr))
    report = memload.export(index.path, tmp_path / name, progress=False)
    assert (report.path, report.samples, report.format) == (tmp_path / name, 13, "png")
    source = tmp_path / name
    again = build(source / "metadata.csv" if name == "files" else source, tmp_path / "b.bin", index)
    assert list(again.keys) == list(index.keys)
    assert np.array_equal(pixels(again), pixels(index))
    assert again.classes == index.classes
    assert np.array_equal(again.columns["label"], index.columns["label"])


@pytest.mark.parametrize(("descr", "channels"), KINDS)
def test_a_folder_alone_builds_the_same_pixels_labels_and_names(
    make_dataset: Make, tmp_path: Path, descr: str, channels: int
) -> None:
    index = make_dataset(rows=(7,), shape=(5, 7, channels), descr=descr)
    memload.export(index.path, tmp_path / "pngs", progress=False)
    again = build(tmp_path / "pngs", tmp_path / "again.bin", index)
    assert by_stem(again) == by_stem(index)
    assert again.classes == index.classes
    assert sorted(zip(again.keys, labels(again), strict=True)) == sorted(
        (key.replace(".jpg", ".png"), label)
        for key, label in zip(index.keys, labels(index), strict=True)
    )


def test_a_folder_of_pngs_keeps_its_names_and_its_order(
    folder: Path, tmp_path: Path, make_dataset: Make
) -> None:
    for path in sorted(folder.rglob("*.jpg")):
        Image.open(path).save(path.with_suffix(".png"))
        path.unlink()
    memload.build(folder, tmp_path / "out.bin", size=16, num_workers=0, progress=False)
    index = Index.open(tmp_path / "out.bin")
    memload.export(index.path, tmp_path / "pngs", progress=False)
    again = build(tmp_path / "pngs", tmp_path / "again.bin", index)
    assert list(again.keys) == list(index.keys)
    assert np.array_equal(pixels(again), pixels(index))
    assert labels(again) == labels(index)


@pytest.mark.parametrize("name", ["pngs", "x.tar"])
def test_masks_of_a_folder_and_of_a_tar_are_found_without_a_table(
    make_dataset: Make, add_array: Any, tmp_path: Path, name: str
) -> None:
    ids = np.random.default_rng(0).integers(0, 256, (7, 4, 6)).astype(np.uint8)
    index = add_array(make_dataset(rows=(7,)), "mask", ids, "mask")
    memload.export(index.path, tmp_path / name, progress=False)
    masks: Any = tmp_path / "pngs.mask" if name == "pngs" else ["mask"]
    again = build(tmp_path / name, tmp_path / "again.bin", index, masks=masks)
    for array in ("image", "mask"):
        assert by_stem(again, array) == by_stem(index, array)


@pytest.mark.parametrize("renames", range(2))
def test_a_kill_at_any_renaming_leaves_whole_folders(
    make_dataset: Make, add_array: Any, tmp_path: Path, renames: int
) -> None:
    index = add_array(make_dataset(), "mask", np.zeros((5, 4, 6), np.uint8), "mask")
    script = """
    import os, signal, sys
    from pathlib import Path
    import memload

    rename, left = Path.rename, iter(range(int(sys.argv[3])))
    def killed(self, target):
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(self, target)
    Path.rename = killed
    memload.export(*sys.argv[1:3], progress=False)
    """
    output = tmp_path / "pngs"
    command = [sys.executable, "-c", textwrap.dedent(script), index.path, output, str(renames)]
    assert subprocess.run(command, check=False, timeout=60).returncode == -signal.SIGKILL
    assert not output.exists()  # the masks come first
    masks = tmp_path / "pngs.mask"
    assert len(files(masks)) == 5 * renames
    if renames:
        with pytest.raises(FileExistsError, match=r"pngs.mask exists already"):
            memload.export(index.path, output, progress=False)
        masks.rename(tmp_path / "elsewhere")
    memload.export(index.path, output, progress=False)
    assert len(files(output)) == 6
    assert not (tmp_path / "pngs.exporting").exists()


@pytest.mark.parametrize("name", ["files.tar"])
def test_keys_of_any_kind_come_back_and_no_file_lies_elsewhere(
    make_dataset: Make, tmp_path: Path, name: str
) -> None:
    index = mixed(make_dataset(rows=(len(ODD),)), keys=Keys.of(ODD))
    folder = tmp_path / "out/in/here"
    folder.mkdir(parents=True)
    before = files(tmp_path)
    memload.export(index.path, folder / name, progress=False)
    inside = f"out/in/here/{name}"
    assert all(file.startswith(inside) for file in set(files(tmp_path)) - {*before})
    if name == "files":
        assert len(files(folder / name)) == len(ODD) + 1  # metadata.csv
        assert not any(part.startswith(".") for file in files(folder) for part in file.split("/"))
    source = folder / name
    again = build(source / "metadata.csv" if name == "files" else source, tmp_path / "b.bin", index)
    assert list(again.keys) == list(ODD)
    assert np.array_equal(pixels(again), pixels(index))
    assert labels(again) == labels(index)


#: What keys and names of classes are put together from.
PIECES = (
    *(
        "a",
        "b.",
        "..",
        "/",
        " ",
        "\n",
        "\t",
        "\\",
        '"',
        ",",
        ";",
        "-2",
        ".jpg",
        ".PNG",
        "é",
        "\udce9",
    ),
    *(
        "日",
        "~",
        "%20",
        "ant",
        "bee",
        "0",
        "metadata.csv",
        "[0].x",
        ".npy",
        "\r",
        "\0",
        "x" * 99,
        "nan",
    ),
)
NAMES = st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("".join)


@pytest.mark.parametrize("name", ["files.tar"])
def test_without_labels_no_folder_becomes_one(
    make_dataset: Make, tmp_path: Path, name: str
) -> None:
    keys = Keys.of(["a/1.jpg", "a/2.jpg", "b/1.jpg", "3.jpg", "c"])
    index = make_dataset(columns={}, classes=None, keys=keys)
    memload.export(index.path, tmp_path / name, progress=False)
    source = tmp_path / name
    if name == "files":
        expected = ["3.png", "a/1.png", "a/2.png", "b/1.png", "c.png", "metadata.csv"]
        assert files(source) == expected
        source /= "metadata.csv"
    again = build(source, tmp_path / "again.bin", index)
    assert list(again.keys) == list(keys)
    assert not again.columns
    assert np.array_equal(pixels(again), pixels(index))


@pytest.mark.parametrize("name", ["files.tar"])
def test_labels_and_classes_that_are_numbers_stay_what_they_are(
    make_dataset: Make, tmp_path: Path, name: str
) -> None:
    label = np.array([10, 0, 2, 11, 1, 9])
    numbers = make_dataset("numbers.bin", rows=(6,), columns={"label": label}, classes=None)
    names = tuple(sorted(map(str, range(12))))  # 0, 1, 10, 11, 2, …
    named = make_dataset("named.bin", rows=(6,), columns={"label": label}, classes=names)
    for index in (numbers, named):
        source = tmp_path / index.path.stem / name
        source.parent.mkdir()
        memload.export(index.path, source, progress=False)
        source = source / "metadata.csv" if name == "files" else source
        again = build(source, tmp_path / "b.bin", index, overwrite=True, classes=index.classes)
        assert np.array_equal(again.columns["label"], label)
        assert again.classes == index.classes


def test_the_folders_of_labels_without_names_sort_as_the_labels(
    make_dataset: Make, tmp_path: Path
) -> None:
    label = np.array([3, 10, 0, 2, 1, 4, 5, 6, 7, 8, 9, 10])
    keys = Keys.of([f"{n}.jpg" for n in range(12)])
    index = make_dataset(rows=(12,), columns={"label": label}, classes=None, keys=keys)
    memload.export(index.path, tmp_path / "pngs", progress=False)
    again = build(tmp_path / "pngs", tmp_path / "again.bin", index)
    found = {
        Path(key).stem: label for key, label in zip(again.keys, again.columns["label"], strict=True)
    }
    assert found == {str(n): label for n, label in enumerate(label)}


def test_a_class_whose_name_is_no_name_of_a_folder_gets_one(
    make_dataset: Make, tmp_path: Path
) -> None:
    names = ("a/b", "a_b", "../..")
    keys = Keys.of([f"{number}.jpg" for number in range(6)])
    index = make_dataset(rows=(6,), columns={"label": np.arange(6) % 3}, classes=names, keys=keys)
    memload.export(index.path, tmp_path / "pngs", progress=False)
    assert {path.name for path in (tmp_path / "pngs").iterdir() if path.is_dir()} == {
        "a_b",
        "a_b-2",
        "_._..",
    }
    again = build(tmp_path / "pngs/metadata.csv", tmp_path / "again.bin", index)
    assert labels(again) == labels(index)


# --------------------------------------------------------------------------------- what is written


def test_the_table_is_as_image_folders_of_hugging_face_have_it(
    make_dataset: Make, tmp_path: Path
) -> None:
    split = {"columns": {"split": np.array([0, 1, 0, 1, 0]), "label": np.arange(5) % 3}}
    index = make_dataset(**split, categories={"split": ("train", "val")})
    memload.export(index.path, tmp_path / "pngs", progress=False)
    with (tmp_path / "pngs/metadata.csv").open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert list(lines[0]) == ["file_name", "key", "label", "split"]
    assert lines[1] == {
        "file_name": "bee/1.png", "key": "bee/1.jpg", "label": "bee", "split": "val",
    }  # fmt: skip
    for line, pixel in zip(lines, pixels(index), strict=True):
        with Image.open(tmp_path / "pngs" / line["file_name"]) as image:
            assert np.array_equal(np.asarray(image), pixel)


def test_a_tar_has_one_sample_after_another_and_always_the_same_bytes(
    make_dataset: Make, add_array: Any, tmp_path: Path
) -> None:
    index = make_dataset(keys=Keys.of(["v1.0/a.b.jpg", "v1.0/a_b.jpg", "c.jpg", "ant/d", "e"]))
    index = add_array(index, "mask", np.zeros((5, 4, 6), np.uint8), "mask")
    index = add_array(index, "depth", np.arange(5.0)[:, None])
    for name in ("x.tar", "y.tar"):
        memload.export(index.path, tmp_path / name, num_threads=3, progress=False)
    assert (tmp_path / "x.tar").read_bytes() == (tmp_path / "y.tar").read_bytes()
    with tarfile.open(tmp_path / "x.tar") as tar:
        names = tar.getnames()
        assert not any(member.mtime or member.uid or member.uname for member in tar)
        facts = json.loads(tar.extractfile(names[4]).read())  # type: ignore[union-attr]
        number = tar.extractfile(names[3]).read()  # type: ignore[union-attr]
        depth = np.load(io.BytesIO(tar.extractfile(names[2]).read()))  # type: ignore[union-attr]
    endings = ["png", "mask.png", "depth.npy", "cls", "json"]
    keys = ["v1.0/a_b", "v1.0/a_b-2", "c", "ant/d", "e"]
    assert names == [f"{key}.{ending}" for key in keys for ending in endings]
    assert facts == {"key": "v1.0/a.b.jpg", "label": "ant"}
    assert (number, depth) == (b"0", np.zeros(1))


@pytest.mark.slow
def test_hugging_face_reads_folders_and_tars(make_dataset: Make, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    index = make_dataset(keys=Keys.of([f"{n}.x/a b.jpg" for n in range(5)]))
    memload.export(index.path, tmp_path / "pngs", progress=False)
    memload.export(index.path, tmp_path / "x.tar", progress=False)
    script = """
    import json, sys
    import numpy as np
    from datasets import load_dataset

    pngs, tar, cache = sys.argv[1:]
    options = {"split": "train", "cache_dir": cache}
    found = {
        one["key"]: [one["label"], np.asarray(one["image"]).tolist()]
        for one in load_dataset("imagefolder", data_dir=pngs, **options)
    }
    for one in load_dataset("webdataset", data_files=tar, **options):
        found[one["json"]["key"]] += [one["json"]["label"], one["cls"], np.asarray(one["png"]).tolist()]
    print(json.dumps(found))
    """
    paths = (tmp_path / name for name in ("pngs", "x.tar", "cache"))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *paths],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")},
        check=True, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    rows = zip(index.keys, labels(index), index.columns["label"], pixels(index), strict=True)
    assert json.loads(done.stdout) == {
        key: [name, pixel.tolist(), name, number, pixel.tolist()]
        for key, name, number, pixel in rows
    }


def test_samples_that_share_a_row_or_a_key_are_all_written(
    make_dataset: Make, tmp_path: Path
) -> None:
    index = make_dataset()
    dataset = memload.MemmapDataset(index.path).subset([4, 1, 1, 1])
    dataset.export(tmp_path / "pngs", progress=False)
    assert files(tmp_path / "pngs") == [
        "bee/1-2.png", "bee/1-3.png", "bee/1.png", "bee/4.png", "metadata.csv",
    ]  # fmt: skip
    again = build(tmp_path / "pngs/metadata.csv", tmp_path / "again.bin", index)
    assert list(again.keys) == ["bee/4.jpg", "bee/1.jpg", "bee/1.jpg", "bee/1.jpg"]
    assert np.array_equal(pixels(again), pixels(index)[[4, 1, 1, 1]])


@pytest.mark.parametrize("channels", [2, 4])
def test_pngs_with_an_alpha_channel_are_lossless(
    make_dataset: Make, tmp_path: Path, channels: int
) -> None:
    index = make_dataset(shape=(4, 6, channels))
    memload.export(index.path, tmp_path / "pngs", progress=False)
    found = [
        np.asarray(Image.open(tmp_path / "pngs" / key.replace(".jpg", ".png")))
        for key in index.keys
    ]
    assert np.array_equal(found, pixels(index))


def test_npy_holds_any_array_and_builds_it_again(make_dataset: Make, tmp_path: Path) -> None:
    index = mixed(make_dataset(shape=(3, 4, 5), descr="<f4"))
    memload.export(index.path, tmp_path / "npys", format="npy", progress=False)
    again = tmp_path / "again.bin"
    for source, options in (("npys/metadata.csv", []), ("npys", ["--extensions", ".npy"])):
        done = run("build", tmp_path / source, again, "--mode", "array", "--overwrite", *options)
        assert done.exit_code == 0, done.output
        found = Index.open(again)
        assert (found.image.descr, found.image.shape) == ("<f4", (3, 4, 5))
        assert sorted(row.tobytes() for row in pixels(found)) == sorted(
            row.tobytes() for row in pixels(index)
        )
        assert sorted(labels(found)) == sorted(labels(index))
        if source != "npys":
            assert list(found.keys) == list(index.keys)
            assert np.array_equal(pixels(found), pixels(index))


def test_npy_holds_any_array_and_jpg_is_close(make_dataset: Make, tmp_path: Path) -> None:
    floats = make_dataset("floats.bin", shape=(3, 4, 5), descr="<f4")
    memload.export(floats.path, tmp_path / "npys", format="npy", progress=False)
    values = [np.load(tmp_path / "npys" / key.replace(".jpg", ".npy")) for key in floats.keys]
    assert np.array_equal(values, pixels(floats))
    smooth = make_dataset("smooth.bin", shape=(16, 16, 3))
    memload.export(smooth.path, tmp_path / "jpgs", format="jpg", progress=False)
    with Image.open(tmp_path / "jpgs/ant/0.jpg") as image:
        assert (image.format, image.size, image.mode) == ("JPEG", (16, 16), "RGB")
        difference = np.asarray(image).astype(int) - pixels(smooth)[0]
        assert np.abs(difference).mean() < 10


@pytest.mark.parametrize(
    ("descr", "channels", "format", "remedy"),
    [("<f4", 3, "png", "npy"), ("<u2", 3, "png", "npy"), ("|u1", 5, "png", "npy"), ("<u2", 1, "jpg", "png")],
)  # fmt: skip
def test_a_format_that_cannot_hold_the_images_names_one_that_can(
    make_dataset: Make, tmp_path: Path, descr: str, channels: int, format: Any, remedy: str
) -> None:
    index = make_dataset(shape=(4, 6, channels), descr=descr)
    with pytest.raises(ValueError, match=f"{format}.* cannot hold .*--format {remedy}"):
        memload.export(index.path, tmp_path / "files", format=format)
    assert not (tmp_path / "files").exists()


# ----------------------------------------------------------------------------------- which samples


def test_conditions_choose_samples_as_in_a_data_set(make_dataset: Make, tmp_path: Path) -> None:
    columns = {"label": np.arange(8) % 3, "split": np.arange(8) // 4, "age": np.arange(8) / 2}
    index = make_dataset(rows=(8,), columns=columns, categories={"split": ("a,b", "c")})
    conditions: Mapping[str, Any]
    for number, (conditions, options, expected) in enumerate(
        [
            ({"label": "bee"}, ["label=bee"], [1, 4, 7]),
            ({"label": ["bee", "cat"], "split": "c"}, ["label=bee,cat", "split=c"], [4, 5, 7]),
            ({"split": "a,b", "age": [0, 1.5]}, ["split=a,b", "age=0,1.5"], [0, 3]),
        ]
    ):
        memload.export(index.path, tmp_path / f"{number}.tar", where=conditions, progress=False)
        wheres = [word for option in options for word in ("--where", option)]
        done = run("export", index.path, tmp_path / f"{number}.cli.tar", *wheres)
        assert done.exit_code == 0, done.output
        dataset = memload.MemmapDataset(index.path).where(**conditions)
        dataset.export(tmp_path / f"{number}.view.tar", progress=False)
        written = {path.read_bytes() for path in tmp_path.glob(f"{number}*.tar")}
        assert len(written) == 1
        with tarfile.open(tmp_path / f"{number}.tar") as tar:
            names = [name.removesuffix(".png") for name in tar.getnames() if name.endswith("png")]
        assert names == [index.keys[sample].removesuffix(".jpg") for sample in expected]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--where", "label=dog"], "'label' has no value 'dog'. It has ant, bee, cat"),
        (["--where", "kind=dog"], "no column 'kind'"),
        (["--where", "age=old"], "age is 'old', but this column has no texts"),
        (["--where", "age=0", "--where", "label=bee"], "no sample with age=[0] and label=['bee']"),
    ],
)
def test_conditions_that_choose_nothing_are_errors(
    make_dataset: Make, tmp_path: Path, options: list[str], message: str
) -> None:
    index = make_dataset(columns={"label": np.arange(5) % 3, "age": np.arange(5)})
    done = run("export", index.path, tmp_path / "pngs", *options)
    assert done.exit_code == 1
    assert message in done.output
    assert not (tmp_path / "pngs").exists()


def test_the_command_says_what_it_wrote_and_how_to_build_it_again(
    make_dataset: Make, tmp_path: Path
) -> None:
    index = make_dataset(shape=(4, 6, 1), classes=("b", "a", "c"))
    done = run("export", index.path, tmp_path / "pngs")
    assert done.stdout == f"{tmp_path / 'pngs'}: 5 samples as PNG\n"
    command = done.stderr.strip().removeprefix("note: build it again: memload ").split()
    command[2] = str(tmp_path / "again.bin")
    assert run(*command).exit_code == 0
    again = Index.open(tmp_path / "again.bin")
    assert np.array_equal(pixels(again), pixels(index))
    assert again.classes == index.classes
    assert np.array_equal(again.columns["label"], index.columns["label"])


# ----------------------------------------------------------------------------------------- safety


@pytest.mark.parametrize("format", ["png", "jpg", "npy"])
@pytest.mark.parametrize("name", ["files", "x.tar"])
def test_a_file_and_a_folder_of_one_name_get_different_ones(
    make_dataset: Make, add_array: Any, tmp_path: Path, format: Any, name: str
) -> None:
    keys = ["a", *(f"a{ending}/b" for ending in (".png", ".jpg", ".npy", ".mask.png", ".json"))]
    index = make_dataset(rows=(6,), classes=None, columns={})
    index = replace(index, keys=Keys.of(keys))
    index = add_array(index, "mask", np.zeros((6, 4, 6), np.uint8), "mask")
    memload.export(index.path, tmp_path / name, format=format, progress=False)
    if name == "x.tar":
        with tarfile.open(tmp_path / name) as file:
            file.extractall(tmp_path / "files", filter="data")
    images = [path for path in (tmp_path / "files").rglob(f"*.{format}") if path.is_file()]
    assert len([path for path in images if "mask" not in path.name]) == 6


def test_nothing_is_replaced(make_dataset: Make, add_array: Any, tmp_path: Path) -> None:
    index = add_array(make_dataset(), "mask", np.zeros((5, 4, 6), np.uint8), "mask")
    (tmp_path / "pngs").mkdir()
    (tmp_path / "pngs.mask").mkdir()
    (tmp_path / "pngs.mask/mine.txt").write_text("mine")
    (tmp_path / "x.tar").write_text("mine")
    for name, found in (("pngs", "pngs.mask"), ("x.tar", "x.tar")):
        with pytest.raises(FileExistsError, match=f"{found} exists already. Remove it"):
            memload.export(index.path, tmp_path / name, progress=False)
    assert (tmp_path / "x.tar").read_text() == "mine"
    (tmp_path / "pngs.mask/mine.txt").unlink()  # empty folders are as good as none
    memload.export(index.path, tmp_path / "pngs", progress=False)
    assert len(files(tmp_path / "pngs.mask")) == 5
    assert not list(tmp_path.glob("*.exporting"))


def test_a_damaged_row_is_named_and_nothing_is_left(make_dataset: Make, tmp_path: Path) -> None:
    index = make_dataset()
    with (tmp_path / "made.bin").open("r+b") as file:
        file.seek(4096 + 2 * index.image.row_bytes)
        file.write(b"damaged")
    before = files(tmp_path)
    for name in ("pngs", "x.tar"):
        with pytest.raises(
            ChecksumError, match=r"made.bin is damaged: row 2 \(cat/2.jpg\)"
        ) as caught:
            memload.export(index.path, tmp_path / name, progress=False)
        assert caught.value.rows == (2,)
    assert files(tmp_path) == before


@pytest.mark.parametrize("name", ["pngs", "x.tar"])
def test_a_full_disk_leaves_nothing(
    make_dataset: Make, full_behind: Any, tmp_path: Path, name: str
) -> None:
    index = make_dataset(rows=(30,), shape=(64, 64, 3))
    before = files(tmp_path)
    message = f"{name} cannot be written: .*File too large. Make room"
    with full_behind(5_000), pytest.raises(BuildError, match=message):
        memload.export(index.path, tmp_path / name, progress=False)
    assert files(tmp_path) == before
    memload.export(index.path, tmp_path / name, progress=False)


@pytest.mark.parametrize("name", ["pngs", "x.tar"])
def test_a_kill_leaves_nothing_that_passes_for_complete(
    make_dataset: Make, tmp_path: Path, name: str
) -> None:
    index = make_dataset(rows=(30,))
    script = """
    import os, signal, sys
    import memload
    from memload.editing import encoding

    encode, count = encoding.Encoder.encode, iter(range(20))
    def killed(self, position):
        if next(count, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(self, position)
    encoding.Encoder.encode = killed
    memload.export(*sys.argv[1:], progress=False)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), index.path, tmp_path / name]
    done = subprocess.run(command, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / name).exists()
    assert (tmp_path / f"{name}.exporting").is_dir()
    memload.export(index.path, tmp_path / name, progress=False)
    assert not (tmp_path / f"{name}.exporting").exists()
    source = tmp_path / name / "metadata.csv" if name == "pngs" else tmp_path / name
    assert np.array_equal(pixels(build(source, tmp_path / "b.bin", index)), pixels(index))


def test_a_folder_of_others_in_the_way_is_not_touched(make_dataset: Make, tmp_path: Path) -> None:
    index = make_dataset()
    (tmp_path / "pngs.exporting").mkdir()
    (tmp_path / "pngs.exporting/mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"pngs.exporting is in the way"):
        memload.export(index.path, tmp_path / "pngs", progress=False)
    assert files(tmp_path / "pngs.exporting") == ["mine.txt"]
    with pytest.raises(FileNotFoundError, match="there is no such folder"):
        memload.export(index.path, tmp_path / "missing/pngs", progress=False)


def test_an_output_that_cannot_be_one_is_an_error(
    make_dataset: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = make_dataset()
    with pytest.raises(ValueError, match=r"would be compressed.* Write 'x.tar'"):
        memload.export(index.path, tmp_path / "x.tar.gz", progress=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ValueError, match=r"this is the current folder. Name a new one"):
        memload.export(index.path, ".", progress=False)
    assert files(tmp_path) == ["made.bin", "made.idx"]


def test_a_link_to_a_folder_is_not_written_through(make_dataset: Make, tmp_path: Path) -> None:
    index = make_dataset()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "pngs").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        memload.export(index.path, tmp_path / "pngs", progress=False)
    assert files(tmp_path / "elsewhere") == []
