"""Arrays that are joined to images: NPY files, and arrays of other data sets."""

from dataclasses import replace

import numpy as np
import pytest

import memload
from memload.storage.keys import Keys


@pytest.fixture
def saved(tmp_path):
    """A function that saves an array, and returns its path."""

    def save(values, name="f.npy"):
        np.save(tmp_path / name, values)
        return tmp_path / name

    return save


def test_what_has_a_small_integer_for_each_pixel_becomes_masks(make_dataset, saved):
    index = make_dataset()
    for values, kind, shape in (
        (np.zeros((5, 4, 6), "u1"), "mask", (4, 6)),
        (np.zeros((5, 4, 6, 1), "u2"), "mask", (4, 6)),
        (np.zeros((5, 4, 6), "i4"), "array", (4, 6)),
        (np.zeros((5, 6, 4), "u1"), "array", (6, 4)),
        (np.zeros((5, 3), "f2"), "array", (3,)),
    ):
        array = memload.join(index, f=saved(values)).array("f")
        assert (array.kind, array.shape) == (kind, shape)


def test_a_later_change_of_an_npy_file_is_found(make_dataset, saved, tmp_path):
    path = saved(np.arange(10.0).reshape(5, 2))
    memload.join(make_dataset(), f=path).write(tmp_path / "both.idx")
    assert memload.verify(tmp_path / "both.idx").ok
    saved(np.arange(10.0).reshape(5, 2) * [1, 2])
    assert not memload.verify(tmp_path / "both.idx").ok


def test_samples_of_data_sets_are_matched_by_name_and_left_out_without_one(
    make_dataset, add_array, samples_in, tmp_path, caplog
):
    first = make_dataset("a.bin")
    depths = np.arange(10.0).reshape(5, 2)
    keys = Keys.of(["cat/2.png", "ant/0.png", "x.png", "ant/3.png", "bee/1.png"])
    other = add_array(make_dataset("b.bin", seed=1), "depth", depths, keys=keys)
    joined = memload.join(first, depth=other).write(tmp_path / "both.idx")
    found = [np.frombuffer(sample["depth"])[0] for sample in samples_in(joined.path)]
    assert found == [2, 8, 0, 6]
    assert "depth: 1 of 5 samples not in b.idx and left out: bee/4.jpg" in caplog.text
    images = memload.join(first, other=make_dataset("c.bin", shape=(2, 2, 3), seed=2))
    assert images.array("other").kind == "array"


def test_masks_that_would_not_lie_on_the_images_are_refused(make_dataset, add_array):
    def masks(shape=(4, 6), **settings):
        index = make_dataset("masks.bin", seed=1, build={"settings": settings})
        return add_array(index, "mask", np.zeros((5, *shape), "u1"), "mask")

    first = make_dataset("a.bin", build={"settings": {"fit": "crop", "exif": True}})
    assert memload.join(first, mask=masks(fit="crop", exif=True)).array("mask").kind == "mask"
    for other in (
        masks((4, 5), fit="crop", exif=True),
        masks(fit="pad", exif=True),
        masks(fit="crop", exif=False),
        masks(),
        make_dataset("gray.bin", shape=(4, 6, 1)),
    ):
        with pytest.raises(ValueError, match=r"may not lie on the images of a.idx"):
            memload.join(first, mask=other)


def test_masks_of_several_settings_are_joined_only_if_these_are_known(make_dataset, add_array):
    def made(name, fit, seed, **settings):
        facts = {
            "build": {"settings": {"fit": fit, "exif": True, **settings}},
            "keys": Keys.of([f"{seed}/{number}.jpg" for number in range(5)]),
        }
        index = make_dataset(name, seed=seed, **facts)
        masks = make_dataset(f"m{name}", seed=seed, **facts)
        return index, add_array(masks, "mask", np.zeros((5, 4, 6), "u1"), "mask")

    crop, crop_masks = made("a.bin", "crop", 1)
    pad, pad_masks = made("b.bin", "pad", 2)
    other, other_masks = made("c.bin", "crop", 3, interpolation="bicubic")
    with pytest.raises(ValueError, match="may not lie on the images"):
        memload.join(memload.concat(crop, pad), mask=memload.concat(pad_masks, crop_masks))
    both = memload.join(memload.concat(crop, other), mask=memload.concat(other_masks, crop_masks))
    assert both.array("mask").kind == "mask"


def test_names_that_fit_two_pictures_are_refused(make_dataset, saved):
    first, other = make_dataset("a.bin"), make_dataset("b.bin", seed=1)
    both = memload.concat(first, other)
    with pytest.raises(ValueError, match="several pictures named"):
        memload.join(both, other=make_dataset("c.bin", seed=2))
    twice = replace(other, keys=Keys.of(["ant/0.bmp", "ant/0.png", "x", "y", "z"]))
    with pytest.raises(ValueError, match="may stand for the same picture"):
        memload.join(first, other=twice)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (np.zeros(5), r"an array \(5,\) of <f8 .* memload.with_columns"),
        (np.zeros((5, 2), ">f4"), "of >f4 in C order"),
        (np.asfortranarray(np.zeros((5, 2))), "Fortran order"),
        (np.array([["a"]] * 5), "of <U1"),
        (np.zeros((5, 2), "c8"), "of <c8"),
        (np.array([[None]] * 5), "cannot be joined"),
        (np.zeros((0, 2)), "has 0 rows"),
        (np.zeros((4, 2)), "has 4 rows, but made.idx has 5 samples"),
    ],
)
def test_npy_files_that_cannot_be_used_in_place_are_refused(make_dataset, saved, values, problem):
    with pytest.raises((memload.FormatError, ValueError), match=problem):
        memload.join(make_dataset(), f=saved(values))


def test_files_that_are_no_npy_are_refused(make_dataset, tmp_path):
    (tmp_path / "b.npy").write_text("no array")
    for name in ("b.npy", "missing.npy"):
        with pytest.raises(memload.FormatError, match=f"{name} cannot be joined"):
            memload.join(make_dataset(), f=tmp_path / name)
