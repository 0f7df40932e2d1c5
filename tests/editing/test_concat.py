"""Several data sets under one index."""

import pickle
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memload
from memload.editing.concat import concatenate
from memload.storage.format import npy_header
from memload.storage.index import Array, Index, Shard
from memload.storage.keys import Keys

Make = Callable[..., Index]
Rows = Callable[..., np.ndarray]


def with_mask(index: Index, ids: Sequence[int] = ()) -> Index:
    """Return the index with masks whose rows are in the opposite order."""
    rows, (height, width, _) = index.image.rows, index.image.shape
    masks = np.random.default_rng(rows).integers(0, 9, (rows, height, width), np.uint8)
    path = index.path.with_name(f"{index.path.stem}.mask.bin")
    path.write_bytes(npy_header("|u1", masks.shape) + masks.tobytes())
    shard = Shard(path.name, rows, path.stat().st_size)
    array = Array("mask", "|u1", (height, width), (shard,), "mask")
    crc32 = {**index.crc32, "mask": np.array([zlib.crc32(m.tobytes()) for m in masks], np.uint32)}
    made = replace(
        index, arrays=(*index.arrays, array), other_rows={"mask": index.row[::-1].copy()}
    )
    return replace(made, crc32=crc32, statistics={"mask_ids": {"mask": ids}}).write(index.path)


def test_samples_of_data_sets_follow_one_another_with_pixels_names_and_classes(
    make_dataset: Make, tmp_path: Path, rows_in: Rows
) -> None:
    first = make_dataset("out.bin", rows=(3, 4), classes=("cat", "dog", "elk"))
    second = make_dataset("more.bin", rows=(5,), seed=1, classes=("ant", "dog", "cat"))
    second = replace(second, keys=Keys.of([f"x/{n}.jpg" for n in range(5)])).write(second.path)
    sizes = {path: path.stat().st_size for path in tmp_path.glob("*.bin")}
    report = memload.concat(tmp_path / "all.idx", tmp_path / "out.bin", second.path)
    both = Index.open(tmp_path / "all.idx")
    assert np.array_equal(rows_in(both), np.concatenate([rows_in(first), rows_in(second)]))
    assert list(both.keys) == [*first.keys, *second.keys]
    assert both.classes == ("cat", "dog", "elk", "ant")
    names = [part.classes[label] for part in (first, second) for label in part.columns["label"]]
    assert [both.classes[label] for label in both.columns["label"]] == names
    assert both.statistics["class_counts"] == [names.count(name) for name in both.classes]
    assert (report.samples, report.classes, report.notes) == (12, 4, ())
    assert str(report) == f"{tmp_path / 'all.idx'}: 12 samples, 4 classes"
    assert memload.verify(tmp_path / "all.idx").ok
    assert {path: path.stat().st_size for path in tmp_path.glob("*.bin")} == sizes


def test_mean_and_deviation_are_those_of_all_pixels(
    folder: Path, tmp_path: Path, rows_in: Rows
) -> None:
    memload.build(folder / "ant", tmp_path / "a.bin", size=16, num_workers=0)
    memload.build(folder, tmp_path / "b.bin", size=16, num_workers=0)
    memload.concat(tmp_path / "all.idx", tmp_path / "a.bin", tmp_path / "b.bin", columns="common")
    both = Index.open(tmp_path / "all.idx")
    values = rows_in(both) / 255
    assert np.allclose(both.statistics["mean"], values.mean((0, 1, 2)), atol=1e-12)
    assert np.allclose(both.statistics["std"], values.std((0, 1, 2)), atol=1e-12)
    assert (
        both.statistics["source_width"] == Index.open(tmp_path / "b.bin").statistics["source_width"]
    )
    assert sum(both.statistics["source_shorter_side"].values()) == 16
    assert both.build["records"] == 16


def test_subsets_of_one_data_set_name_its_files_once(make_dataset: Make, tmp_path: Path) -> None:
    whole = make_dataset("out.bin", rows=(3, 4), statistics={"mean": [0.5] * 3, "std": [0.1] * 3})
    whole.subset(np.array([5, 1])).write(tmp_path / "some.idx")
    whole.subset(np.array([6, 0, 6])).write(tmp_path / "other.idx")
    report = memload.concat(tmp_path / "all.idx", tmp_path / "some.idx", tmp_path / "other.idx")
    both = Index.open(tmp_path / "all.idx")
    assert both.image == whole.image
    assert both.row.tolist() == [5, 1, 6, 0, 6]
    assert np.allclose(both.statistics["std"], 0.1)
    assert report.notes == ("1 sample has the name of one before it: ant/6.jpg",)


def test_files_of_a_former_build_are_refused(make_dataset: Make, tmp_path: Path) -> None:
    make_dataset("out.bin").write(tmp_path / "old.idx")
    make_dataset("out.bin", seed=1)
    with pytest.raises(ValueError, match="of a former build"):
        memload.concat(tmp_path / "all.idx", tmp_path / "old.idx", tmp_path / "out.bin")
    with pytest.raises(memload.FormatError):
        memload.concat(tmp_path / "all.idx", tmp_path / "old.idx")
    assert not (tmp_path / "all.idx").exists()


def test_masks_and_rows_in_another_order_follow(
    make_dataset: Make, tmp_path: Path, rows_in: Rows
) -> None:
    first, second = (
        with_mask(make_dataset(f"{name}.bin", seed=len(ids)), ids)
        for name, ids in (("a", [9, 1]), ("b", [1, 4, 7]))
    )
    memload.concat(tmp_path / "all.idx", tmp_path / "a.bin", tmp_path / "b.bin")
    both = Index.open(tmp_path / "all.idx")
    assert np.array_equal(
        rows_in(both, "mask"), np.concatenate([rows_in(first, "mask"), rows_in(second, "mask")])
    )
    assert both.array("mask").kind == "mask"
    assert both.statistics["mask_ids"] == {"mask": [1, 4, 7, 9]}
    assert memload.verify(tmp_path / "all.idx").ok


def test_points_boxes_texts_and_numbers_follow(make_dataset: Make, tmp_path: Path) -> None:
    def columns(seed: int) -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        return {
            "label": rng.integers(0, 3, 5),
            "marks": rng.random((5, 2, 2), np.float32),
            "box": rng.random((5, 3, 4), np.float32),
            "split": rng.integers(0, 2, 5),
        }

    kinds: dict[str, Any] = {"points": ("marks",), "boxes": ("box",)}
    splits = {"split": ("test", "train")}, {"split": ("val", "test")}
    parts = [
        make_dataset(f"{n}.bin", seed=n, columns=columns(n), categories=splits[n], **kinds)
        for n in range(2)
    ]
    memload.concat(tmp_path / "all.idx", *(part.path for part in parts))
    both = Index.open(tmp_path / "all.idx")
    assert (both.points, both.boxes) == (("marks",), ("box",))
    for name in ("marks", "box"):
        values = np.concatenate([part.columns[name] for part in parts])
        assert np.array_equal(both.columns[name], values)
    assert both.categories == {"split": ("test", "train", "val")}
    texts = [part.categories["split"][n] for part in parts for n in part.columns["split"]]
    assert [both.categories["split"][n] for n in both.columns["split"]] == texts


def test_columns_that_differ_are_named_or_left_out(make_dataset: Make, tmp_path: Path) -> None:
    label = np.arange(5) % 3
    columns = {"label": label, "age": label / 2, "size": label, "depth": label}
    make_dataset("out.bin", columns=columns)
    make_dataset("more.bin", columns={"label": label, "age": label, "size": label, "far": label})
    paths = tmp_path / "all.idx", tmp_path / "out.bin", tmp_path / "more.bin"
    with pytest.raises(ValueError, match="differ in columns") as error:
        memload.concat(*paths)
    assert "'age' (float64 in out.idx, int64 in more.idx)" in str(error.value)
    assert "'depth' (int64 in out.idx, missing in more.idx)" in str(error.value)
    assert "'far' (missing in out.idx, int64 in more.idx)" in str(error.value)
    assert "--columns common" in str(error.value)
    report = memload.concat(*paths, columns="common")
    assert list(Index.open(paths[0]).columns) == ["label", "size"]
    assert report.notes[0] == "columns that differ are left out: age, depth, far"


def test_labels_without_names_stay_and_do_not_mix_with_names(
    make_dataset: Make, tmp_path: Path
) -> None:
    make_dataset("out.bin", classes=None)
    make_dataset("more.bin", classes=None, columns={"label": np.arange(5) + 7})
    report = memload.concat(tmp_path / "all.idx", tmp_path / "out.bin", tmp_path / "more.bin")
    assert Index.open(tmp_path / "all.idx").columns["label"].tolist() == [
        0,
        1,
        2,
        0,
        1,
        7,
        8,
        9,
        10,
        11,
    ]
    assert "labels have no names of classes, so their numbers stay as they are" in report.notes
    assert report.classes is None
    make_dataset("named.bin")
    for columns in ("same", "common"):
        with pytest.raises(
            ValueError,
            match=r"out\.idx are numbers without names of classes.*--classes named\.idx",
        ):
            memload.concat(
                tmp_path / "x.idx", tmp_path / "named.bin", tmp_path / "out.bin", columns=columns
            )  # type: ignore[arg-type]


def test_arrays_that_differ_are_errors_that_say_what_to_do(
    make_dataset: Make, tmp_path: Path
) -> None:
    make_dataset("out.bin")
    make_dataset("large.bin", shape=(8, 6, 3))
    make_dataset("deep.bin", descr="<u2", shape=(4, 6, 1))
    with_mask(make_dataset("masked.bin"))
    for name, message in (
        ("large", r"large.idx has 8×6×3 uint8 as 'image', but out.idx has 4×6×3.*--size 4x6'"),
        ("deep", "deep.idx has 4×6×1 uint16 as 'image', but out.idx has 4×6×3 uint8.*--mode"),
        (
            "masked",
            r"out.idx has no array 'mask', which masked.idx has. Add it with 'memload join'",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            memload.concat(tmp_path / "x.idx", tmp_path / "out.bin", tmp_path / f"{name}.bin")


def test_files_in_another_folder_are_an_error_that_says_how(
    make_dataset: Make, write_dataset: Make, tmp_path: Path
) -> None:
    make_dataset("out.bin")
    (tmp_path / "other").mkdir()
    write_dataset(tmp_path / "other", "more.bin")
    paths = tmp_path / "out.bin", tmp_path / "other" / "more.bin"
    with pytest.raises(ValueError, match=r"must lie in one folder. Move .* hard links: 'ln "):
        memload.concat(tmp_path / "all.idx", *paths)
    with pytest.raises(ValueError, match=r"must be in the folder of the pixels. Write"):
        memload.concat(tmp_path / "other" / "all.idx", paths[0])
    with pytest.raises(ValueError, match=r"must end in '.idx'. Write"):
        memload.concat(tmp_path / "all.bin", paths[0])


def test_in_memory_files_may_be_anywhere_but_such_an_index_is_not_written(
    make_dataset: Make, write_dataset: Make, tmp_path: Path, rows_in: Rows
) -> None:
    (tmp_path / "other").mkdir()
    parts = [make_dataset("out.bin"), write_dataset(tmp_path / "other", "out.bin", seed=1)]
    both = concatenate(parts)
    assert np.array_equal(rows_in(both), np.concatenate([rows_in(part) for part in parts]))
    with pytest.raises(ValueError, match="all files of an index must lie in its folder"):
        both.write(tmp_path / "all.idx")
    again = pickle.loads(pickle.dumps(both))
    assert list(again.keys) == list(both.keys)
    assert np.array_equal(rows_in(concatenate([both, parts[0]]))[:10], rows_in(both))


def test_names_that_occur_twice_are_told(make_dataset: Make, tmp_path: Path) -> None:
    make_dataset("out.bin")
    report = memload.concat(tmp_path / "all.idx", *[tmp_path / "out.bin"] * 2)
    assert report.notes == (
        "5 samples have the name of one before them: ant/0.jpg, bee/1.jpg, cat/2.jpg, …",
    )


def test_an_index_is_replaced_only_if_told_to(make_dataset: Make, tmp_path: Path) -> None:
    make_dataset("out.bin")
    make_dataset("more.bin", rows=(2,))
    paths = tmp_path / "out.idx", tmp_path / "out.bin", tmp_path / "more.bin"
    with pytest.raises(FileExistsError, match="--overwrite"):
        memload.concat(*paths)
    assert len(Index.open(tmp_path / "out.bin")) == 5
    memload.concat(*paths, overwrite=True)  # which appends
    assert len(Index.open(tmp_path / "out.bin")) == 7


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_views_of_any_data_sets_follow_one_another(
    stored: list[Index], rows_in: Rows, data: st.DataObject
) -> None:
    parts = []
    for _ in range(data.draw(st.integers(1, 4))):
        index = data.draw(st.sampled_from(stored))
        chosen = data.draw(st.lists(st.integers(0, len(index) - 1), max_size=6))
        parts.append(index.subset(np.array(chosen, np.int64)))
    both = concatenate(parts)
    assert np.array_equal(rows_in(both), np.concatenate([rows_in(part) for part in parts]))
    assert list(both.keys) == [key for part in parts for key in part.keys]
    names = [names_of(part) for part in parts]
    assert names_of(both) == [name for part_names in names for name in part_names]
    files = [shard.file for shard in both.image.shards]
    assert len(set(files)) == len(files)


def names_of(index: Index) -> list[str]:
    assert index.classes is not None
    return [index.classes[label] for label in index.columns["label"]]


@pytest.fixture(scope="module")
def stored(write_dataset: Make, tmp_path_factory: pytest.TempPathFactory) -> list[Index]:
    """Three data sets in two folders, with the same classes in different orders, and others."""
    classes = ("ant", "bee", "cat"), ("cat", "dog", "ant"), ("bee", "elk", "ant")
    shards = (5,), (2, 3), (1, 1, 4)
    folders = [tmp_path_factory.mktemp("folder") for _ in range(2)]
    return [
        write_dataset(
            folders[number % 2], f"{number}.bin", rows=rows, seed=number, classes=classes[number]
        )
        for number, rows in enumerate(shards)
    ]


def test_views_are_put_together_as_paths_are(
    make_dataset: Make, tmp_path: Path, rows_in: Rows
) -> None:
    index = make_dataset("out.bin")
    make_dataset("more.bin", seed=1)
    more = memload.MemmapDataset(tmp_path / "more.bin")
    memload.concat(tmp_path / "all.idx", tmp_path / "out.bin", more[1:3], index)
    both = Index.open(tmp_path / "all.idx")
    expected = [rows_in(index), rows_in(more.index)[1:3], rows_in(index)]
    assert np.array_equal(rows_in(both), np.concatenate(expected))
    for wrong in ([tmp_path / "out.bin"], 5, None):
        with pytest.raises(TypeError, match=r"Give a path such as 'out.bin'"):
            memload.concat(tmp_path / "all.idx", wrong, overwrite=True)
        with pytest.raises(TypeError, match="PathLike"):
            memload.info(wrong)  # type: ignore[arg-type]
