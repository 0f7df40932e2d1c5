"""Samples as image files in folders, or in a tar, and back."""

import io
import itertools
import json
import os
import subprocess
import sys
import tarfile
import textwrap
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import memload
from memload.storage.index import Index
from memload.storage.keys import Keys

#: Keys that are awkward as paths.
ODD = (
    "../../outside.jpg", "/absolute.jpg", "a/../b.jpg", ".hidden/.file.jpg", "ant/..",
    "cat/ant/1.jpg", "ant/1.jpg", "ant/1.png", "ant/1-2.png", "dots.in.the.name", "dots.in",
    " spaces around.jpg ", "new\nline.png", 'quo"te,comma.png', "größe/ñ.png", "caf\udce9/\udce9.jpg",
    "x" * 300 + ".jpg", "/".join(["deep"] * 300), "a\0b.png", "https://x/y.jpg?z=1",
)  # fmt: skip
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)

BOTH = pytest.mark.parametrize("name", ["pngs", "x.tar"])


def build_again(source, output, mode="RGB", **options):
    """Build from an export at the size of the made data sets, and return the path."""
    source = source if source.suffix == ".tar" else source / "metadata.jsonl"
    memload.build(source, output, size=(4, 6), mode=mode, num_workers=0, progress=False, **options)
    return output


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]


def files_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@BOTH
def test_what_was_exported_builds_the_same_samples(
    write_dataset, samples_in, tmp_path_factory, name
):
    @settings(max_examples=25, deadline=None, suppress_health_check=[*HealthCheck])
    @given(st.data(), st.lists(TEXTS, min_size=1, max_size=6, unique=True))
    def round_trip(data, keys):
        folder, count = tmp_path_factory.mktemp("export"), len(keys)
        columns = {
            "label": [data.draw(st.sampled_from(["a", "b/c", "007", "nan", " d "])) for _ in keys],
            "caption": [data.draw(TEXTS) for _ in keys],
            "code": data.draw(st.permutations(["x", "007", "1.5", "nan", "-", ""]))[:count],
            "number": [data.draw(st.integers(-(2**62), 2**62)) for _ in keys],
            "share": [data.draw(st.floats(allow_nan=False, allow_infinity=False)) for _ in keys],
            "pose": np.arange(4.0 * count, dtype="f4").reshape(count, 2, 2),
        }
        index = write_dataset(folder, rows=(count,), keys=Keys.of(keys), classes=None, columns={})
        index = memload.with_columns(index, **columns).write(index.path)
        memload.export(index, folder / name, progress=False)
        again = samples_in(build_again(folder / name, folder / "again.bin"))
        assert again == samples_in(index.path)

    round_trip()


def test_a_folder_has_typed_lines_and_the_pixels_of_the_rows(make_dataset, rows_in, tmp_path):
    index = memload.with_columns(
        make_dataset(),
        code=["007", "", "nan", "x", "y"], age=[3, 4, 5, 6, 2**60 + 1], share=[0.5, np.nan, 1, 2, 3],
        pose=np.ones((5, 1, 2), "f4"), file_name=["a"] * 5,
    )  # fmt: skip
    assert memload.export(index, tmp_path / "pngs", progress=False) == tmp_path / "pngs"
    lines = lines_of(tmp_path / "pngs")
    assert lines[1] == {
        "file_name": "bee/1.png", "memload_key": "bee/1.jpg", "label": "bee", "code": "", "age": 4,
        "share": None, "pose": [[1.0, 1.0]], "file_name_": "a",
    }  # fmt: skip
    assert lines[4]["age"] == 2**60 + 1
    found = [np.asarray(Image.open(tmp_path / "pngs" / line["file_name"])) for line in lines]
    assert np.array_equal(found, rows_in(index))


def test_a_folder_alone_builds_the_same_pixels_and_labels(make_dataset, samples_in, tmp_path):
    index = make_dataset(rows=(7,))
    memload.export(index.path, tmp_path / "pngs", progress=False)
    memload.build(
        tmp_path / "pngs", tmp_path / "again.bin", size=(4, 6), num_workers=0, progress=False
    )
    found = sorted((one["label"], one["image"]) for one in samples_in(tmp_path / "again.bin"))
    assert found == sorted((one["label"], one["image"]) for one in samples_in(index.path))


@BOTH
def test_masks_and_arrays_lie_beside_and_are_found_again(
    make_dataset, add_array, samples_in, tmp_path, name
):
    ids, depth = np.arange(120).reshape(5, 4, 6), np.arange(10.0).reshape(5, 2)
    add_array(make_dataset(), "ids", ids.astype("<u2"), "mask")
    index = add_array(Index.open(tmp_path / "made.idx"), "depth", depth)
    memload.export(index.path, tmp_path / name, progress=False)
    beside = {"ids": tmp_path / "pngs.ids"}, {"depth": tmp_path / "pngs.depth"}
    if name == "x.tar":
        beside = {"ids": "ids.png"}, {"depth": "depth.npy"}
    else:
        assert files_in(tmp_path / "pngs.ids")[0] == "ant/0.png"
        assert np.array_equal(np.load(tmp_path / "pngs.depth/bee/1.npy"), depth[1])
    build_again(tmp_path / name, tmp_path / "again.bin", masks=beside[0], arrays=beside[1])
    assert samples_in(tmp_path / "again.bin") == samples_in(index.path)


@pytest.mark.parametrize(("descr", "channels"), [("|u1", 1), ("|u1", 2), ("|u1", 4), ("<u2", 1)])
def test_png_holds_pixels_as_they_are(make_dataset, rows_in, tmp_path, descr, channels):
    index = make_dataset(shape=(4, 6, channels), descr=descr)
    memload.export(index, tmp_path / "pngs", progress=False)
    paths = [tmp_path / "pngs" / line["file_name"] for line in lines_of(tmp_path / "pngs")]
    found = [np.asarray(Image.open(path)) for path in paths]
    assert np.array_equal(np.reshape(found, (5, 4, 6, channels)), rows_in(index))


@pytest.mark.parametrize(("descr", "channels"), [("<u2", 3), ("<i4", 1), ("<i2", 1), ("|u1", 5)])
def test_images_that_png_cannot_hold_are_refused(make_dataset, tmp_path, descr, channels):
    index = make_dataset(shape=(4, 6, channels), descr=descr)
    with pytest.raises(ValueError, match=r"PNG cannot hold the images .* np.load"):
        memload.export(index, tmp_path / "pngs", progress=False)
    assert not [*tmp_path.glob("pngs*")]


@pytest.mark.parametrize("name", ["out/pngs", "out/x.tar"])
def test_all_files_lie_in_the_folder_whatever_the_keys_are(make_dataset, tmp_path, name):
    keys = [*ODD, *ODD]
    index = make_dataset(rows=(len(keys),), keys=Keys.of(keys))
    (tmp_path / "out").mkdir()
    memload.export(index, tmp_path / name, progress=False)
    if name.endswith("tar"):
        with tarfile.open(tmp_path / name) as tar:
            paths = tar.getnames()
            files = [tar.extractfile(path).read() for path in paths if path.endswith(".json")]
        assert len({path.partition(".")[0] for path in paths}) == len(keys)
        found = [json.loads(file)["memload_key"] for file in files]
    else:
        paths = files_in(tmp_path / "out")
        assert len(paths) == len(keys) + 1
        found = [line["memload_key"] for line in lines_of(tmp_path / name)]
    assert found == keys
    parts = [part for path in paths for part in path.split("/")]
    assert not [part for part in parts if part.startswith(".") or len(part) > 255]
    assert {path.name for path in tmp_path.iterdir()} == {"out", "made.bin", "made.idx"}


def test_classes_whose_names_would_be_one_folder_get_two(make_dataset, tmp_path):
    keys = Keys.of(["1.jpg", "2.jpg", "3.jpg"])
    index = make_dataset(rows=(3,), keys=keys, classes=(".a", "_a", "a/b"))
    memload.export(index, tmp_path / "pngs", progress=False)
    assert files_in(tmp_path / "pngs") == ["_a-1/2.png", "_a/1.png", "a_b/3.png", "metadata.jsonl"]


def test_a_tar_has_the_members_of_a_sample_side_by_side_and_always_the_same_bytes(
    make_dataset, tmp_path
):
    index = make_dataset(rows=(2,), keys=Keys.of(["v1.0/a.b.jpg", "v1.0/a_b"]))
    for name in ("x.tar", "y.tar"):
        memload.export(index, tmp_path / name, progress=False)
    assert (tmp_path / "x.tar").read_bytes() == (tmp_path / "y.tar").read_bytes()
    with tarfile.open(tmp_path / "x.tar") as tar:
        names = tar.getnames()
        facts = json.load(tar.extractfile(names[2]))
        assert tar.extractfile(names[1]).read() == b"0"
        assert Image.open(io.BytesIO(tar.extractfile(names[0]).read())).size == (6, 4)
    endings = itertools.product(["v1.0/a_b", "v1.0/a_b-1"], ["png", "cls", "json"])
    assert names == [".".join(parts) for parts in endings]
    assert facts == {"memload_key": "v1.0/a.b.jpg", "label": "ant"}


def test_some_samples_of_views_are_exported(make_dataset, tmp_path):
    index = make_dataset(rows=(9,))
    view = memload.MemmapDataset(index.path).subset([8, 1, 1, 0]).where(label=["cat", "bee"])
    memload.export(view, tmp_path / "pngs", progress=False)
    assert [line["file_name"] for line in lines_of(tmp_path / "pngs")] == [
        "cat/8.png", "bee/1.png", "bee/1-2.png",
    ]  # fmt: skip


@BOTH
def test_a_damaged_row_ends_the_export_and_leaves_nothing(make_dataset, tmp_path, name):
    index = make_dataset(rows=(300,))
    with index.path.with_name("made.bin").open("r+b") as file:
        file.seek(4096 + 290 * 72)
        file.write(b"damage")
    with pytest.raises(memload.ChecksumError, match=r"damaged: row 290 of image \(cat/290.jpg"):
        memload.export(index, tmp_path / name, progress=False)
    assert {path.name for path in tmp_path.iterdir()} == {"made.bin", "made.idx"}


@BOTH
def test_nothing_is_replaced(make_dataset, add_array, tmp_path, name):
    index = add_array(make_dataset(), "depth", np.zeros((5, 2)))
    output = tmp_path / name
    (output.write_bytes if name == "x.tar" else lambda _: output.mkdir())(b"old")
    with pytest.raises(FileExistsError, match="exists already"):
        memload.export(index, output, progress=False)
    (tmp_path / "new.exporting").mkdir()
    with pytest.raises(FileExistsError, match=r"new\.exporting"):
        memload.export(index, tmp_path / "new", progress=False)
    assert (tmp_path / "new.exporting").is_dir()


def test_a_full_disk_leaves_nothing(make_dataset, full_behind, tmp_path):
    index = make_dataset(shape=(40, 40, 3))
    with full_behind(1000), pytest.raises(OSError, match="File too large"):
        memload.export(index, tmp_path / "pngs", progress=False)
    assert {path.name for path in tmp_path.iterdir()} == {"made.bin", "made.idx"}


@pytest.mark.slow
def test_hugging_face_reads_folders_and_tars(make_dataset, samples_in, tmp_path):
    pytest.importorskip("datasets")
    index = replace(make_dataset(), keys=Keys.of([f"{n}.x/a b.jpg" for n in range(5)]))
    index = memload.with_columns(index, code=["007", "", "x", "y", "z"], pose=np.ones((5, 2), "f4"))
    memload.export(index, tmp_path / "pngs", progress=False)
    memload.export(index, tmp_path / "x.tar", progress=False)
    script = """
    import json, sys
    import numpy as np
    from datasets import load_dataset

    pngs, tar, cache = sys.argv[1:]
    options = {"split": "train", "cache_dir": cache}
    found = {}
    for one in load_dataset("imagefolder", data_dir=pngs, **options):
        pixels = np.asarray(one.pop("image")).tobytes().hex()
        found[one["memload_key"]] = [one, pixels]
    for one in load_dataset("webdataset", data_files=tar, **options):
        pixels = np.asarray(one["png"]).tobytes().hex()
        found[one["json"]["memload_key"]] += [one["json"], one["cls"], pixels]
    print(json.dumps(found))
    """
    paths = (tmp_path / name for name in ("pngs", "x.tar", "cache"))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *paths],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")},
        check=True, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    index.write(tmp_path / "made.idx")
    expected = {}
    for one, number in zip(samples_in(tmp_path / "made.idx"), index.columns["label"], strict=True):
        pixels = one.pop("image").hex()
        one["memload_key"] = key = one.pop("key")
        expected[key] = [one, pixels, one, number, pixels]
    assert json.loads(done.stdout) == expected
