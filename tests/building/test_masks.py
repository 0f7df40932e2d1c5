"""Masks, other arrays and boxes that are converted beside their images."""

import io
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from memload.building.extra_arrays import ExtraArray
from memload.building.resizing import FITS, Placement, nearest, turn
from memload.building.settings import Settings
from memload.errors import DecodeError
from memload.sources.samples import Sample


def noise(width, height, seed=0, high=256):
    return np.random.default_rng(seed).integers(0, high, (height, width)).astype(np.uint8)


def encode(image, format="PNG", **options):
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def exif(orientation):
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


def palette(ids):
    image = Image.fromarray(ids).convert("L")
    image.putpalette(np.random.default_rng(9).integers(0, 256, 768).astype(np.uint8).tobytes())
    return image


def convert(
    image,
    mask,
    *,
    descr="|u1",
    missing_id=None,
    size=(16, 16),
    **options,
):
    array = ExtraArray("mask", "mask", descr, size, missing_id)
    record = Sample("key", image, {}, arrays={} if mask is None else {"mask": mask})
    return Settings(size=size, extra_arrays=(array,), **options).convert(record, [])


def converted(image, mask, *, descr="|u1", **options):
    size = options.setdefault("size", (16, 16))
    row = convert(image, mask, descr=descr, **options)
    return np.frombuffer(row.extra_arrays[0].data, descr).reshape(size)


def reason(mask, image=None, **options):
    image = Image.new("RGB", (8, 6)) if image is None else image
    with pytest.raises(DecodeError) as caught:
        convert(image, mask, **options)
    return caught.value.reason


def reference(upright, size, fit, fill):
    """A mask resized with the nearest neighbor, pixel by pixel, with fractions as they are."""
    height, width = upright.shape
    placement = Placement.of((width, height), size[::-1], fit)
    out = np.full(size, fill, upright.dtype)
    for y in range(size[0]):
        for x in range(size[1]):
            column, row = x + placement.left, y + placement.top
            if 0 <= column < placement.resized[0] and 0 <= row < placement.resized[1]:
                out[y, x] = upright[
                    (2 * row + 1) * height // (2 * placement.resized[1]),
                    (2 * column + 1) * width // (2 * placement.resized[0]),
                ]
    return out


# Where a mask goes


@settings(max_examples=60, deadline=None)
@given(
    size=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    target=st.tuples(st.integers(1, 24), st.integers(1, 24)),
    orientation=st.integers(1, 8),
    fit=st.sampled_from(FITS),
    seed=st.integers(0, 9),
)
def test_a_mask_goes_where_its_image_goes(size, target, orientation, fit, seed):
    ids = noise(*size, seed=seed, high=200)
    image = encode(Image.new("RGB", size), exif=exif(orientation))
    found = converted(image, encode(ids), size=target, fit=fit)
    upright = np.asarray(turn(Image.fromarray(ids), orientation))
    np.testing.assert_array_equal(found, reference(upright, target, fit, 255), strict=True)
    assert set(found.ravel()) <= {*ids.ravel().tolist(), 255}


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("fast", [False, True])
def test_ids_follow_an_image_that_shows_them(orientation, fit, fast):
    ids = noise(50, 31)
    image = encode(ids, exif=exif(orientation))
    options = {"mode": "L", "interpolation": "nearest", "fit": fit, "fast": fast, "fill": "white"}
    row = convert(image, encode(ids), size=(16, 23), **options)
    pixels, mask = (
        np.frombuffer(row.pixels, np.uint8),
        np.frombuffer(row.extra_arrays[0].data, np.uint8),
    )
    assert np.mean(pixels == mask) > 0.9  # Pillow takes either one of two equally near pixels


def test_the_orientation_of_a_mask_itself_is_ignored():
    ids = noise(16, 12)
    for orientation in range(1, 9):
        mask = encode(ids, exif=exif(orientation))
        found = converted(Image.new("RGB", (16, 12)), mask, size=(12, 16))
        assert np.array_equal(found, ids), orientation


@settings(max_examples=200, deadline=None)
@given(length=st.integers(1, 400), resized=st.integers(1, 400))
def test_the_nearest_pixels_are_pillows_except_for_ties(length, resized):
    pixels = Image.fromarray(np.arange(length, dtype=np.int32)[None])
    expected = np.asarray(pixels.resize((resized, 1), Image.Resampling.NEAREST))[0]
    found = nearest(length, resized, 0, resized)
    is_tie = (2 * np.arange(resized) + 1) * length % (2 * resized) == 0
    assert np.array_equal(found[~is_tie], expected[~is_tie])
    assert np.all(np.abs(found - expected) <= 1)


def test_of_two_pixels_that_are_equally_near_the_later_one_is_taken():
    assert nearest(4, 2, 0, 2).tolist() == [1, 3]
    assert nearest(2**31, 2**30, 2**30 - 1, 2**30).tolist() == [2**31 - 1]


# What a mask may be


IDS = noise(8, 6, high=4)


@pytest.mark.parametrize(
    "mask",
    [
        encode(IDS),
        encode(palette(IDS)),
        encode(palette(IDS), bits=2),
        encode(IDS, "TIFF"),
        encode(IDS, "PPM"),
        encode(IDS.astype(np.uint16)),
        encode(IDS.astype(np.int32), "TIFF"),
        palette(IDS),
        Image.fromarray(IDS),
        IDS,
        IDS[:, :, None],
        IDS.astype(np.int64),
        IDS.astype(">u2"),
        np.asfortranarray(IDS),
    ],
    ids=lambda mask: f"{type(mask).__name__}",
)
def test_ids_are_stored_as_they_are(mask, tmp_path):
    for value in (mask, tmp_path / "mask") if isinstance(mask, bytes) else (mask,):
        if isinstance(value, Path):
            value.write_bytes(mask)
        found = converted(Image.new("RGB", (8, 6)), value, size=(6, 8))
        assert np.array_equal(found, IDS)


def test_a_mask_of_one_bit_has_the_ids_0_and_1():
    mask = Image.fromarray(noise(8, 6) > 100)
    assert mask.mode == "1"
    for value in (mask, encode(mask), encode(mask, "TIFF"), np.asarray(mask)):
        found = converted(Image.new("RGB", (8, 6)), value, size=(6, 8))
        assert np.array_equal(found, np.asarray(mask).astype(np.uint8))


def test_ids_of_16_bits_are_kept():
    ids = np.random.default_rng(0).integers(0, 65536, (6, 8)).astype(np.uint16)
    pgm = b"P5\n8 6\n65535\n" + ids.astype(">u2").tobytes()
    for mask in (encode(ids), encode(ids, "TIFF"), pgm, ids, ids.astype(np.int32)):
        found = converted(Image.new("RGB", (8, 6)), mask, size=(6, 8), descr="<u2")
        assert np.array_equal(found, ids)


def test_ids_that_do_not_fit_8_bits_are_told():
    ids = noise(8, 6).astype(np.uint16)
    assert np.array_equal(converted(Image.new("RGB", (8, 6)), encode(ids), size=(6, 8)), ids)
    ids[0, 0] = 300
    assert reason(encode(ids)).startswith("mask 'mask': its largest id is 300, but all masks")


def test_a_missing_mask_is_told_or_filled():
    assert reason(None).startswith("mask 'mask': it is missing. Add it, or say --missing-masks 0")
    found = converted(Image.new("RGB", (8, 6)), None, missing_id=7)
    assert np.array_equal(found, np.full((16, 16), 7, np.uint8))


def test_another_size_is_told_with_both_sizes():
    text = reason(noise(6, 8))
    assert text.startswith("mask 'mask': its size is 6×8, but its image has 8×6 in its file. ")
    image = encode(Image.new("RGB", (8, 6)), "JPEG", exif=exif(6))
    assert "has 8×6 in its file" in reason(noise(6, 8), image)
    for mask in (encode(noise(6, 8)), Image.fromarray(noise(6, 8))):
        assert reason(mask) == text


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (encode(Image.new("RGB", (8, 6))), "it has colors or floats (Pillow's mode RGB)"),
        (encode(IDS, "JPEG"), "a JPEG, in which ids are not exact"),
        (encode(IDS.astype(np.float32), "TIFF"), "colors or floats (Pillow's mode F)"),
        (IDS.astype(np.float32), "(6, 8) of float32 is no mask"),
        (np.zeros((2, 6, 8), bool), "a mask for each object, make one of their numbers"),
        (IDS.astype(np.int64) - 100, "its ids go from -100 to"),
        (np.ma.masked_equal(IDS, IDS[0, 0]), "some of its values are masked out"),
        (encode(IDS)[:60], "truncated"),
        (b"", "the file is empty"),
        (b"junk", "not an image in a supported format"),
        (b"\x93NUMPY junk", "a damaged .npy file"),
        ("mask.png", "it must be a PIL image, an array, bytes or a path, not str"),
        (Path("missing.png"), "no such file"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_what_is_no_mask_is_told(mask, text):
    found = reason(mask)
    assert found.startswith("mask 'mask': ")
    assert text in found


# Other arrays


def array_row(value, shape, descr, **options):
    array = ExtraArray("depth", "array", descr, shape)
    record = Sample("key", Image.new("RGB", (8, 6)), {}, arrays={"depth": value})
    row = Settings(size=(4, 4), extra_arrays=(array,), **options).convert(record, [])
    return np.frombuffer(row.extra_arrays[0].data, descr).reshape(shape)


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


@pytest.mark.parametrize("dtype", ["u1", "i1", "?", "<u2", ">i2", "<i4", "<i8", "<f2", ">f4", "f8"])
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4, 1)])
def test_arrays_are_stored_as_they_are(dtype, shape, tmp_path):
    values = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    path = tmp_path / "values.npy"
    np.save(path, np.asfortranarray(values))
    descr = np.dtype(dtype).newbyteorder("<").str
    for value in (values, npy(values), path, values[::-1][::-1]):
        found = array_row(value, shape, descr)
        np.testing.assert_array_equal(found, values.astype(descr), strict=True)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.zeros((2, 4)), "it is (2, 4) of float64, but the first one is (2, 3) of float64"),
        (np.zeros((2, 4), np.uint8), "Masks of ids (--mask) are resized with their images"),
        (np.zeros((2, 3), complex), "(2, 3) of complex128 cannot be stored"),
        (np.zeros((2, 0)), "(2, 0) of float64 cannot be stored"),
        (np.array(3.0), "a single number to the shape (1,)"),
        (np.array([[None, 1]]), "cannot be stored"),
        (None, "it is missing"),
        (npy(np.zeros((2, 3)))[:-1], "a damaged .npy file"),
        (npy(np.array([None])), "a damaged .npy file: ValueError: cannot create an OBJECT array"),
        (npy(np.zeros((2, 3))).replace(b"(2, 3), }", b"(99999,  "), "a damaged .npy file"),
        (b"junk", "not an image"),
    ],
    ids=str,
)
def test_other_arrays_that_cannot_be_stored_are_told(value, text):
    with pytest.raises(DecodeError) as caught:
        array_row(value, (2, 3), "<f8")
    assert caught.value.reason.startswith("array 'depth': ")
    assert text in caught.value.reason


def signed_tiff(values):
    """A TIFF of signed integers of 8 bits, which Pillow does not write."""
    data = bytearray(encode(values.view(np.uint8), "TIFF", tiffinfo={339: 1}))
    entry = data.index(struct.pack("<HHI", 339, 3, 1))
    data[entry + 8 : entry + 10] = struct.pack("<H", 2)
    return bytes(data)


@pytest.mark.parametrize(
    "mask",
    [
        signed_tiff(IDS.astype(np.int8)),
        encode(IDS, "TIFF", exif=exif(6)),
        b"P5\n8 6\n20\n" + noise(8, 6, high=21).tobytes(),
    ],
    ids=["signed", "turned", "few levels"],
)
def test_values_that_pillow_would_change_are_refused(mask):
    assert "Pillow would change its values" in reason(mask)


def test_colors_of_16_bits_are_not_reduced_silently():
    data = b"P6\n2 1\n65535\n" + bytes(12)
    with pytest.raises(DecodeError, match="Pillow would change its values"):
        array_row(data, (1, 2, 3), "|u1")


# Boxes


def boxes_of(boxes, image, **options):
    record = Sample("key", image, {"boxes": np.asarray(boxes, np.float32)})
    found = Settings(**options).convert(record, [], ["boxes"]).columns["boxes"]
    return np.asarray(found)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("fit", FITS)
def test_boxes_enclose_what_they_enclosed(orientation, fit):
    ids = np.zeros((30, 50), np.uint8)
    ids[6:18, 10:20] = 1
    image = encode(Image.new("RGB", (50, 30)), exif=exif(orientation))
    options = {"size": (90, 90), "fit": fit}
    mask = converted(image, ids, **options)
    rows, columns = np.nonzero(mask == 1)
    found = boxes_of([[10, 6, 20, 18]], image, **options)[0]
    assert found.dtype == np.float32
    expected = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
    np.testing.assert_allclose(found, expected, atol=1)


def test_boxes_are_clipped_and_those_outside_are_none():
    image = Image.new("RGB", (40, 20))  # of which the columns 10 to 30 are kept
    boxes = [[0, 0, 15, 20], [5, 5, 10, 15], [29, -5, 99, 99], [12, 3, 12, 9], [14, 4, 12, 2]]
    found = boxes_of(boxes, image, size=(20, 20))
    assert found[[0, 2, 4]].tolist() == [[0, 0, 5, 20], [19, 0, 20, 20], [2, 2, 4, 4]]
    assert np.isnan(found[[1, 3]]).all()


def test_rows_of_nan_are_no_boxes():
    nan = np.nan
    boxes = [[nan] * 4, [1, 2, 3, 4], [1, 2, nan, 4], [1, 2, np.inf, 4]]
    found = boxes_of(boxes, Image.new("RGB", (8, 8)), size=(8, 8))
    assert np.isnan(found[[0, 2]]).all()
    assert found[[1, 3]].tolist() == [[1, 2, 3, 4], [1, 2, 8, 4]]


# Beside images that are arrays


def test_masks_of_arrays_are_stored_as_they_are():
    mask = ExtraArray("mask", "mask", "|u1", (6, 8))
    settings = Settings((6, 8), mode="array", channels=5, descr="<f4", extra_arrays=(mask,))
    image = np.zeros((6, 8, 5), np.float32)
    row = settings.convert(Sample("key", image, {}, arrays={"mask": IDS}), [])
    assert np.array_equal(row.extra_arrays[0], IDS)
    with pytest.raises(DecodeError, match="its size is 6×8, but its image has 8×6"):
        settings.convert(Sample("key", image, {}, arrays={"mask": noise(6, 8)}), [])
