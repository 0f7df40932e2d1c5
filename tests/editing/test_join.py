"""Arrays that exist already, beside the images of a data set."""

import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memload
from memload.storage.format import FLAG_ORIENTED
from memload.storage.index import Index
from memload.storage.keys import Keys

Make = Callable[..., Index]
Rows = Callable[..., np.ndarray]


def keyed(index: Index, *keys: str) -> Index:
    return replace(index, keys=Keys.of(keys), columns={}, classes=None).write(index.path)


def test_masks_of_a_data_set_are_found_by_the_names_of_samples(
    make_dataset: Make, tmp_path: Path, rows_in: Rows
) -> None:
    images = keyed(make_dataset("out.bin", rows=(4,)), "x/a.jpg", "x/b.jpg", "x/c.1.jpg", "d.jpg")
    masks = make_dataset("masks.bin", rows=(2, 2), shape=(4, 6, 1), seed=1)
    masks = keyed(masks, "x/c.1.png", "e.png", "x/a.png", "d.png")
    report = memload.join(tmp_path / "both.idx", tmp_path / "out.bin", mask=tmp_path / "masks.bin")
    both = Index.open(tmp_path / "both.idx")
    assert list(both.keys) == ["x/a.jpg", "x/c.1.jpg", "d.jpg"]
    assert np.array_equal(rows_in(both), rows_in(images)[[0, 2, 3]])
    assert np.array_equal(rows_in(both, "mask"), rows_in(masks)[[2, 0, 3], ..., 0])
    assert (both.array("mask").kind, both.array("mask").shape) == ("mask", (4, 6))
    assert report.notes == (
        "mask: masks of 4×6 uint8, 4 rows, from masks.idx",
        "mask: 1 of 4 samples is not in masks.idx and is left out: x/b.jpg",
    )
    assert memload.verify(tmp_path / "both.idx").ok


def test_numbers_that_may_be_positions_are_noted(make_dataset: Make, tmp_path: Path) -> None:
    keyed(make_dataset("out.bin", rows=(3,)), "0", "1", "2")
    keyed(make_dataset("masks.bin", rows=(3,), shape=(4, 6, 1)), "1.png", "2.png", "3.png")
    paths = {"mask": tmp_path / "masks.bin"}
    report = memload.join(tmp_path / "both.idx", tmp_path / "out.bin", **paths)
    assert any("1 has 1.png. If this number is only a position" in note for note in report.notes)
    keyed(Index.open(tmp_path / "masks.bin"), "0", "1", "2")
    report = memload.join(tmp_path / "both.idx", tmp_path / "out.bin", overwrite=True, **paths)
    assert not any("position" in note for note in report.notes)


def test_a_file_of_another_program_has_a_row_for_each_sample(
    make_dataset: Make, tmp_path: Path, rows_in: Rows
) -> None:
    index = make_dataset("out.bin", rows=(3, 4))
    index.subset(np.array([6, 2, 0])).write(tmp_path / "some.idx")
    values = np.random.default_rng(0).random((3, 2, 5), np.float32)
    ids = np.arange(3 * 24, dtype=np.uint16).reshape(3, 4, 6)
    np.save(tmp_path / "features.npy", values)
    np.save(tmp_path / "ids.npy", ids)
    paths = {name: tmp_path / f"{name}.npy" for name in ("features", "ids")}
    memload.join(tmp_path / "both.idx", tmp_path / "some.idx", **paths)
    both = Index.open(tmp_path / "both.idx")
    assert np.array_equal(rows_in(both, "features"), values)
    assert np.array_equal(rows_in(both, "ids"), ids)
    assert np.array_equal(rows_in(both), rows_in(index)[[6, 2, 0]])
    kinds = {array.name: array.kind for array in both.arrays}
    assert kinds == {"image": "image", "features": "array", "ids": "mask"}
    assert memload.verify(tmp_path / "both.idx").ok


def test_a_file_with_a_row_for_each_row_of_the_images_does_not_fit_a_subset(
    make_dataset: Make, tmp_path: Path
) -> None:
    make_dataset("out.bin", rows=(5,)).subset(np.array([3, 1])).write(tmp_path / "some.idx")
    np.save(tmp_path / "f.npy", np.zeros((5, 3)))
    with pytest.raises(
        ValueError,
        match=r"has 5 rows, but some.idx has 2 samples. It has a row for each of the images in "
        r"out.bin: join it to the data set that has all of them",
    ):
        memload.join(tmp_path / "both.idx", tmp_path / "some.idx", f=tmp_path / "f.npy")


def test_pictures_of_one_name_are_not_given_the_same_row(
    make_dataset: Make, tmp_path: Path
) -> None:
    index = keyed(make_dataset("out.bin", rows=(3,)), "a.jpg", "b.jpg", "a.jpg")
    keyed(make_dataset("masks.bin", rows=(2,), shape=(4, 6, 1)), "a.png", "b.png")
    paths = tmp_path / "both.idx", tmp_path / "out.bin"
    with pytest.raises(ValueError, match=r"out.idx has several pictures named 'a.jpg', and masks"):
        memload.join(*paths, mask=tmp_path / "masks.bin")
    index.subset(np.array([1, 2, 2])).write(tmp_path / "out.idx")  # the same picture twice
    assert memload.join(*paths, mask=tmp_path / "masks.bin").samples == 3


def test_a_data_set_without_samples_is_an_error(make_dataset: Make, tmp_path: Path) -> None:
    index = keyed(make_dataset("out.bin", rows=(1,)), "a.jpg")
    index.subset(np.array([], np.int64)).write(tmp_path / "none.idx")
    for paths in (("out.bin", "none.idx"), ("none.idx", "out.bin")):
        with pytest.raises(ValueError, match=r"none.idx has no samples"):
            memload.join(tmp_path / "x.idx", tmp_path / paths[0], mask=tmp_path / paths[1])


def test_samples_get_the_arrays_of_several_files_at_once_and_keep_those_they_have(
    make_dataset: Make, tmp_path: Path, rows_in: Rows
) -> None:
    images = keyed(make_dataset("out.bin", rows=(3,)), "a", "b", "c")
    other = keyed(make_dataset("other.bin", rows=(3,), seed=1, descr="<f4"), "c", "a", "b")
    np.save(tmp_path / "f.npy", np.arange(6).reshape(3, 2))
    memload.join(tmp_path / "one.idx", tmp_path / "out.bin", f=tmp_path / "f.npy")
    memload.join(tmp_path / "two.idx", tmp_path / "one.idx", depth=tmp_path / "other.bin")
    two = Index.open(tmp_path / "two.idx")
    assert rows_in(two, "f").tolist() == [[0, 1], [2, 3], [4, 5]]
    assert np.array_equal(rows_in(two, "depth"), rows_in(other)[[1, 2, 0]])
    assert np.array_equal(rows_in(two), rows_in(images))
    keyed(make_dataset("third.bin", rows=(3,), seed=2), "c", "a", "b")
    with pytest.raises(
        ValueError, match=r"has no array 'g', only image, f, depth. Say which, such as g="
    ):
        memload.join(tmp_path / "x.idx", tmp_path / "third.bin", g=tmp_path / "two.idx")
    memload.join(tmp_path / "x.idx", tmp_path / "third.bin", g=f"{tmp_path / 'two.idx'}:f")
    assert rows_in(Index.open(tmp_path / "x.idx"), "g").tolist() == [[4, 5], [0, 1], [2, 3]]
    memload.join(tmp_path / "y.idx", tmp_path / "third.bin", f=tmp_path / "two.idx")
    assert rows_in(Index.open(tmp_path / "y.idx"), "f").tolist() == [[4, 5], [0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((4, 2)), "has 4 rows, but out.idx has 5 samples"),
        (
            np.asfortranarray(np.zeros((5, 2))),
            r"Fortran order. Save it with np.save\('f.npy', np.asc",
        ),
        (
            np.zeros((5, 2), ">f4"),
            r"big-endian. Save it with np.save\('f.npy', array.astype\('<f4'\)\)",
        ),
        (np.array([[{}]] * 5), "Python objects. Convert them"),
        (np.zeros((5, 2), np.complex64), "elements of type complex64. Convert them"),
        (np.zeros(5), r"a number for each sample. Write it into a table, as the column 'f'"),
        (np.zeros((5, 0)), "is empty"),
        (b"not an array", "not an NPY file: .* Save an array with np.save"),
        (b"", "not an NPY file"),
    ],
)
def test_a_file_that_cannot_be_read_in_place_is_an_error_with_advice(
    make_dataset: Make, tmp_path: Path, array: np.ndarray | bytes, message: str
) -> None:
    make_dataset("out.bin")
    path = tmp_path / "f.npy"
    if isinstance(array, bytes):
        path.write_bytes(array)
    else:
        np.save(path, array)
    with pytest.raises((ValueError, memload.FormatError), match=message):
        memload.join(tmp_path / "both.idx", tmp_path / "out.bin", f=path)
    assert not (tmp_path / "both.idx").exists()


def test_a_truncated_file_and_one_that_changes_later_are_noticed(
    make_dataset: Make, tmp_path: Path
) -> None:
    make_dataset("out.bin")
    np.save(tmp_path / "f.npy", np.zeros((5, 2)))
    memload.join(tmp_path / "both.idx", tmp_path / "out.bin", f=tmp_path / "f.npy")
    np.save(tmp_path / "f.npy", np.ones((5, 2)))
    assert not memload.verify(tmp_path / "both.idx").ok
    os.truncate(tmp_path / "f.npy", 150)
    with pytest.raises(memload.FormatError, match="has 150 bytes instead of 208"):
        memload.join(tmp_path / "x.idx", tmp_path / "out.bin", f=tmp_path / "f.npy")


def test_files_in_another_folder_are_an_error_that_says_how(
    make_dataset: Make, write_dataset: Make, tmp_path: Path
) -> None:
    make_dataset("out.bin")
    (tmp_path / "other").mkdir()
    write_dataset(tmp_path / "other", "masks.bin")
    np.save(tmp_path / "other" / "f.npy", np.zeros((5, 2)))
    for name in ("masks.bin", "f.npy"):
        with pytest.raises(ValueError, match=r"must lie in one folder. Move it .* hard link: 'ln "):
            memload.join(tmp_path / "x.idx", tmp_path / "out.bin", f=tmp_path / "other" / name)
    os.link(tmp_path / "other" / "f.npy", tmp_path / "f.npy")
    memload.join(tmp_path / "x.idx", tmp_path / "out.bin", f=tmp_path / "f.npy")


def test_masks_that_would_not_lie_on_their_images_are_refused(
    make_dataset: Make, tmp_path: Path
) -> None:
    settings = {"settings": {"fit": "crop", "interpolation": "bilinear"}}
    make_dataset("out.bin", build=settings)
    turned = np.array([0, FLAG_ORIENTED, 0, FLAG_ORIENTED, 0], np.uint8)
    squashed = {"settings": {"fit": "squash"}}
    make_dataset("large.bin", shape=(8, 6, 1))
    make_dataset("squashed.bin", shape=(4, 6, 1), build=squashed)
    make_dataset("turned.bin", shape=(4, 6, 1), flags=turned, build=settings)
    paths = tmp_path / "x.idx", tmp_path / "out.bin"
    for name, message in (
        ("large", "8×6 pixels, but the images of out.idx have 4×6. Build it with --size 4x6"),
        ("squashed", "with --fit squash, but out.idx with --fit crop"),
        (
            "turned",
            r"2 of 5 samples, .* EXIF orientation says \(bee/1.jpg, ant/3.jpg: its mask\).*--no-exif",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            memload.join(*paths, mask=tmp_path / f"{name}.bin")
    make_dataset("out.bin", flags=turned)
    report = memload.join(*paths, mask=tmp_path / "turned.bin")
    assert "resized with --interpolation bilinear, which mixes ids" in report.notes[1]


def test_names_that_are_taken_or_fit_nothing_are_errors(make_dataset: Make, tmp_path: Path) -> None:
    keyed(make_dataset("out.bin", rows=(2,)), "a/1.jpg", "b/1.jpg")
    keyed(make_dataset("twice.bin", rows=(2,), seed=1), "a/1.png", "a/1.tif")
    keyed(make_dataset("flat.bin", rows=(2,), seed=1), "1.png", "2.png")
    keyed(make_dataset("other.bin", rows=(2,), seed=1), "x.png", "y.png")
    paths = tmp_path / "x.idx", tmp_path / "out.bin"
    for name, message in (
        ("twice", "twice.idx: 'a/1.png' and 'a/1.tif' both fit 'a/1.jpg'"),
        ("flat", "flat.idx: '1.png' fits both 'a/1.jpg' and 'b/1.jpg'"),
        (
            "other",
            "no sample of .*other.idx has the name of one of out.idx. The first are 'x.png' and 'a/1.jpg'",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            memload.join(*paths, mask=tmp_path / f"{name}.bin")
    for name in ("image", "images", "label", "index", "row"):
        with pytest.raises(ValueError, match=f"'{name}' has a meaning of its own"):
            memload.join(*paths, **{name: tmp_path / "other.bin"})
    for name in ("a/b", "a:b", "a b-00001", "a-00000-of-123456", ""):
        with pytest.raises(ValueError, match="cannot be the name"):
            memload.join(*paths, **{name: tmp_path / "other.bin"})
    with pytest.raises(ValueError, match=r"out.bin is already an array of this data set"):
        memload.join(*paths, again=tmp_path / "out.bin")
    with pytest.raises(ValueError, match="nothing to join"):
        memload.join(*paths)
    assert not paths[0].exists()


def test_an_index_is_replaced_only_if_told_to(make_dataset: Make, tmp_path: Path) -> None:
    make_dataset("out.bin")
    np.save(tmp_path / "f.npy", np.zeros((5, 2)))
    paths = tmp_path / "out.idx", tmp_path / "out.bin"
    with pytest.raises(FileExistsError, match="--overwrite"):
        memload.join(*paths, f=tmp_path / "f.npy")
    memload.join(*paths, f=tmp_path / "f.npy", overwrite=True)
    assert [array.name for array in Index.open(tmp_path / "out.bin").arrays] == ["image", "f"]


def test_masks_that_another_data_set_has_beside_images_must_have_the_size_of_these_images(
    make_dataset: Make, add_array: Any, tmp_path: Path
) -> None:
    make_dataset("out.bin")
    smaller = make_dataset("small.bin", shape=(2, 3, 3))
    add_array(smaller, "mask", np.zeros((5, 2, 3), np.uint8), "mask")
    with pytest.raises(
        ValueError, match=r"small.idx has 2×3 pixels, but .* Build it with --size 4x6"
    ):
        memload.join(tmp_path / "b.idx", tmp_path / "out.bin", mask=tmp_path / "small.bin")
    assert not (tmp_path / "b.idx").exists()


def test_the_advice_for_another_folder_links_all_files(make_dataset: Make, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    make_dataset("here/out.bin")
    make_dataset("m.bin", rows=(3, 2), shape=(4, 6, 1))
    make_dataset("more.bin", shape=(4, 6, 1))
    memload.concat(tmp_path / "all.idx", tmp_path / "m.bin", tmp_path / "more.bin")
    np.save(tmp_path / "f.npy", np.zeros((10, 2)))
    other = tmp_path / "both.idx"
    memload.join(other, tmp_path / "all.idx", f=tmp_path / "f.npy")
    for edit in (
        lambda: memload.join(here / "new.idx", here / "out.bin", image2=other),
        lambda: memload.concat(here / "new.idx", here / "out.bin", other),
    ):
        with pytest.raises(ValueError, match="'ln ") as caught:
            edit()
        subprocess.run(str(caught.value).split("'")[1], shell=True, check=True)
        assert memload.verify(here / "both.idx").ok
        for path in here.glob("[!o]*"):
            path.unlink()


@pytest.mark.parametrize("name", ["f.npz", "missing.npy"])
def test_what_is_no_npy_file_is_an_error_that_says_what_to_do(
    make_dataset: Make, tmp_path: Path, name: str
) -> None:
    make_dataset("out.bin")
    np.savez(tmp_path / "f.npz", a=np.zeros((5, 2)))
    remedy = r"Save an array with np\.save" if name == "f.npz" else "Check the path"
    with pytest.raises(memload.FormatError, match=remedy):
        memload.join(tmp_path / "b.idx", tmp_path / "out.bin", f=tmp_path / name)
