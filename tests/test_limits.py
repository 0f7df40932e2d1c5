"""From nothing to more than 2³¹ of everything, under any name: built, read, described, verified."""

import csv
import os

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from torch.utils.data import DataLoader

import memload
from memload import Loader, MemmapDataset, transforms
from memload.building.record import record_type
from memload.building.summary import statistics
from memload.cli import main
from memload.storage.format import HEADER_BYTES
from memload.storage.index import Array

#: More than a signed 32-bit integer can count.
MANY = 2**31


def info_text(path):
    done = CliRunner().invoke(main, ["info", str(path)])
    assert done.exit_code == 0, done.output
    return done.output


def assert_reads(path, pixels, labels=None):
    """Assert that every reader gives these pixels ``(n, H, W, C)`` and labels, and that verify passes."""
    expected = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    dataset = MemmapDataset(path)
    assert len(dataset) == len(pixels)
    for sample, image in zip(dataset, expected, strict=True):
        assert torch.equal(sample if labels is None else sample[0], image)
    assert torch.equal(dataset.gather(range(len(pixels))), torch.from_numpy(pixels))
    loaders = [DataLoader(dataset, 3, collate_fn=memload.fast_collate)]
    for batches in map(list, [*loaders, *(Loader(path, 3, num_threads=n) for n in (0, 2))]):
        images = [batch if isinstance(batch, torch.Tensor) else batch[0] for batch in batches]
        assert all(len(batch) == 3 for batch in images[:-1])
        assert all(batch.dtype == expected.dtype for batch in images)
        assert torch.equal(torch.cat([expected[:0], *images]), expected)
        if labels is not None:
            assert [label for batch in batches for label in batch[1].tolist()] == labels
    description = memload.info(path)
    assert (description["samples"], description["dtype"]) == (len(pixels), pixels.dtype.name)
    assert tuple(description["shape"]) == pixels.shape[1:]
    assert info_text(path)
    assert memload.verify(path).ok
    return dataset


def picture(seed, height=12, width=16):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


# ------------------------------------------------------------------------------------ how many


@pytest.mark.slow
def test_more_than_two_gigabytes(tmp_path, write_sparse):
    row_bytes = 256 * 257
    rows = MANY // row_bytes + 3
    path = tmp_path / "out.bin"
    values = {0: 1, rows - 2: 2, rows - 1: 3}
    pixels = {row: bytes([value]) * row_bytes for row, value in values.items()}
    (shard,) = write_sparse(path, rows, (256, 257, 1), pixels).array("image").shards
    assert shard.bytes > MANY
    dataset = MemmapDataset(path)
    last = [rows - 1, rows - 3, rows - 2, 0]
    assert [int(dataset[sample][0].max()) for sample in last] == [3, 0, 2, 1]
    assert dataset.gather(last)[:, -1, -1, 0].tolist() == [3, 0, 2, 1]
    (images, labels), *_ = Loader(path, 4, sampler=last)
    assert (images[:, 0, -1, -1].tolist(), labels.tolist()) == ([3, 0, 2, 1], last)
    assert memload.info(path)["bytes"] == shard.bytes
    with path.open("r+b") as file:
        file.seek(shard.bytes - 1)
        file.write(b"\xff")
    (damaged,) = memload.verify(path.with_suffix(".idx")).damaged
    assert damaged.bad_rows == [rows - 1]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_one_sample(num_workers, tmp_path):
    path = tmp_path / "out.bin"
    memload.build([(picture(0), 5)], path, size=(12, 16), num_workers=num_workers)
    dataset = assert_reads(path, picture(0)[None], [5])
    assert [len(images) for images, _ in Loader(path, 4, shuffle=True)] == [1]
    with pytest.warns(UserWarning, match="drop_last: an epoch has no batches, because 1 samples"):
        assert list(Loader(path, 4, drop_last=True)) == []
    assert dataset[-1][1] == dataset.subset([0, 0])[1][1] == 5


def test_one_class(tmp_path):
    for number in range(4):
        path = tmp_path / "images" / "only" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture(number)).save(path)
    memload.build(tmp_path / "images", tmp_path / "out.bin", size=(12, 16), num_workers=0)
    pixels = np.stack([picture(number) for number in range(4)])
    dataset = assert_reads(tmp_path / "out.bin", pixels, [0] * 4)
    assert (dataset.classes, dataset.class_to_idx) == (["only"], {"only": 0})
    order = memload.WeightedSampler.balanced(dataset.labels, seed=1)
    assert [len(labels) for _, labels in Loader(dataset, 2, sampler=order)] == [2, 2]
    mix = transforms.Compose([transforms.ToDtype(torch.float32), transforms.MixUp()])
    mixed, labels = next(iter(Loader(dataset, 4, transform=mix)))
    assert mixed.shape == (4, 3, 12, 16)
    assert torch.equal(labels, torch.ones(4, 1))


def test_an_empty_source_is_refused_and_an_empty_data_set_is_read(tmp_path):
    (tmp_path / "images").mkdir()
    with pytest.raises(memload.SourceError, match="images has no image files"):
        memload.build(tmp_path / "images", tmp_path / "none.bin")
    with pytest.raises(memload.SourceError, match="no samples"):
        memload.build([], tmp_path / "none.bin")
    assert [path.name for path in tmp_path.iterdir()] == ["images"]

    memload.build([(picture(0), 5)], tmp_path / "out.bin", size=(12, 16), num_workers=0)
    MemmapDataset(tmp_path / "out.bin").subset([]).save(tmp_path / "empty.idx")
    dataset = assert_reads(tmp_path / "empty.idx", np.zeros((0, 12, 16, 3), np.uint8), [])
    for options in ({}, {"shuffle": True}, {"drop_last": True}, {"rank": 1, "num_replicas": 2}):
        assert (len(loader := Loader(dataset, 4, **options)), list(loader)) == (0, [])
    loader = Loader(dataset, 4, transform=transforms.train(8))
    assert list(loader) == []
    assert loader.state_dict()["epoch"] == 1
    with pytest.raises(ValueError, match="no sample to show"):
        memload.preview(tmp_path / "empty.idx", tmp_path / "grid.png")


@pytest.mark.slow
def test_very_many_classes(tmp_path):
    class Many:
        classes = tuple(f"class {number:06}" for number in range(200_000))
        labels = (0, 1, 199_998, 199_999)

        def __len__(self):
            return len(self.labels)

        def __getitem__(self, index):
            return picture(index), self.labels[index]

    path = tmp_path / "out.bin"
    memload.build(Many(), path, size=(12, 16), num_workers=0)
    assert path.with_suffix(".idx").stat().st_size < 5e6
    dataset = MemmapDataset(path)
    assert dataset.classes[dataset[3][1]] == "class 199999"
    assert [labels.tolist() for _, labels in Loader(dataset, 2)] == [[0, 1], [199_998, 199_999]]
    order = memload.WeightedSampler.balanced(dataset.labels, size=8, seed=1)
    assert {
        label for _, labels in Loader(dataset, 4, sampler=order) for label in labels.tolist()
    } <= {*Many.labels}
    said = info_text(path)
    assert len(said) < 3000
    assert "(200,000)" in said


# ------------------------------------------------------------------------------ kinds of pixels


@pytest.mark.parametrize(
    ("height", "width", "mode"), [(3, 50, "L"), (50, 3, "RGB"), (1, 1, "L"), (1, 77, "RGB")]
)
def test_pictures_of_any_aspect_ratio(height, width, mode, tmp_path):
    pictures = [picture(number, height, width) for number in range(5)]
    options = {"size": (height, width), "mode": mode, "num_workers": 0}
    memload.build([(image, n) for n, image in enumerate(pictures)], tmp_path / "out.bin", **options)
    expected = [
        np.asarray(Image.fromarray(pixels).convert(mode)).reshape(height, width, -1)
        for pixels in pictures
    ]
    assert_reads(tmp_path / "out.bin", np.stack(expected), [0, 1, 2, 3, 4])
    resize = transforms.Compose(
        [transforms.Resize((2, 6)), transforms.RandomVerticalFlip(), transforms.Normalize()]
    )
    images, _ = next(iter(Loader(tmp_path / "out.bin", 5, transform=resize)))
    assert images.shape == (5, len(expected[0][0, 0]), 2, 6)
    assert images.isfinite().all()
    memload.preview(tmp_path / "out.bin", tmp_path / "grid.png")


def arrays(descr, shape, count=5):
    """Return arrays of arbitrary finite values."""
    rng = np.random.default_rng(7)
    if np.dtype(descr).kind in "iu":
        low, high = np.iinfo(descr).min, np.iinfo(descr).max + 1
        return [rng.integers(low, high, shape).astype(descr) for _ in range(count)]
    return [rng.normal(1e3, 30, shape).astype(descr) for _ in range(count)]


def build_arrays(samples, path, **options):
    return memload.build(
        samples, path, mode="array", **{"num_workers": 0, "max_rejects": "90%"} | options
    )


@pytest.mark.parametrize(
    ("descr", "shape"),
    [
        ("|u1", (5, 8)), ("|u1", (3, 2, 7)), ("<u2", (5, 8, 1)), ("<i2", (5, 8, 3)),
        ("<i4", (5, 8, 4)), ("<f2", (5, 8)), ("<f4", (5, 8, 3)), ("<f4", (3, 2, 7)),
    ],
)  # fmt: skip
def test_arrays_are_stored_unchanged(descr, shape, tmp_path):
    made = arrays(descr, shape)
    pixels = np.stack(made).reshape(5, *shape[:2], -1)
    options = {"shard_size": HEADER_BYTES + 3 * made[0].nbytes}
    samples = [(array, n) for n, array in enumerate(made)]
    report = build_arrays(samples, tmp_path / "out.bin", **options)
    dataset = assert_reads(tmp_path / "out.bin", pixels, [0, 1, 2, 3, 4])
    text = f"5 samples of {'×'.join(map(str, pixels.shape[1:]))} {pixels.dtype.name}, "
    assert text in str(report)
    largest = np.iinfo(descr).max if pixels.dtype.kind == "u" else 1
    exact = pixels.astype(np.float64) / largest
    assert dataset.index.statistics["mean"] == pytest.approx(exact.mean(axis=(0, 1, 2)), rel=1e-9)
    assert dataset.index.statistics["std"] == pytest.approx(exact.std(axis=(0, 1, 2)), rel=1e-9)
    flip = transforms.Compose([transforms.RandomHorizontalFlip(1.0), transforms.CenterCrop((1, 2))])
    middle = np.s_[:, shape[0] // 2 : shape[0] // 2 + 1, shape[1] // 2 - 1 : shape[1] // 2 + 1]
    flipped = torch.from_numpy(pixels[middle][:, :, ::-1].copy()).permute(0, 3, 1, 2)
    if descr in ("<u2", "<i2", "<i4"):  # torch can do next to nothing with uint16
        name = f"torch.{pixels.dtype.name}"
        with pytest.raises(ValueError, match=f"must be uint8 or floating, not {name}"):
            next(iter(Loader(dataset, 5, transform=flip)))
        images, _ = next(iter(Loader(dataset, 5, transform=lambda images: flip(images.float()))))
        assert torch.equal(images, flipped.float())
    else:
        images, _ = next(iter(Loader(dataset, 5, transform=flip)))
        assert torch.equal(images, flipped)
    memload.preview(tmp_path / "out.bin", tmp_path / "grid.png")


@pytest.mark.parametrize(
    "change",
    [
        lambda array: array.astype(array.dtype.newbyteorder(">")),
        lambda array: np.ascontiguousarray(array[::-1, ::-1])[::-1, ::-1],
        np.asfortranarray,
        lambda array: np.repeat(array, 2, axis=1)[:, ::2],
        lambda array: torch.from_numpy(array.copy()).permute(2, 0, 1),
        lambda array: torch.from_numpy(array.copy()).permute(2, 0, 1).contiguous(),
    ],
    ids=["big-endian", "reversed", "Fortran", "strided", "tensor view", "tensor"],
)
def test_arrays_of_any_layout_keep_their_values(change, tmp_path):
    made = arrays("<i4", (4, 6, 3))
    build_arrays([change(array) for array in made], tmp_path / "out.bin")
    assert_reads(tmp_path / "out.bin", np.stack(made))


def test_every_bit_of_a_float_is_kept_and_infinite_values_have_no_statistics(tmp_path):
    values = np.array([0.1, -1e30, np.inf, -0.0, 1e-45, np.nan], "<f4").reshape(2, 3, 1)
    values.view("<u4")[1, 2, 0] = 0x7F812345  # a NaN that an operation would not leave as it is
    build_arrays([values, np.zeros((2, 3), np.float32)], tmp_path / "out.bin")
    dataset = MemmapDataset(tmp_path / "out.bin")
    assert dataset.gather([0]).numpy().tobytes() == values.tobytes()
    said = memload.info(tmp_path / "out.bin")["statistics"]
    assert said["left_out"] == "mean and std: NaN or infinite values in 1 of 2 samples"
    assert not {"mean", "std"} & said.keys()
    with pytest.raises(ValueError, match="Normalize has no mean and std"):
        next(iter(Loader(dataset, 2, transform=transforms.Normalize())))
    assert info_text(tmp_path / "out.bin")
    memload.preview(tmp_path / "out.bin", tmp_path / "grid.png")


def test_statistics_of_many_wide_integers_do_not_overflow(tmp_path):
    """The sum of squares of 98,304 pictures of 256×256 16-bit pixels exceeds 64 bits."""
    rows = 3 << 15
    records = np.zeros(rows, record_type(1, {}, "<u2"))
    records["total"], records["squares"], records["size"] = 65535 << 16, 65535**2 << 16, 256
    found = statistics(records, np.arange(rows), Array("image", "<u2", (256, 256, 1), ()))
    assert (found["mean"], found["std"]) == ([1.0], [0.0])


def test_statistics_of_floats_far_from_zero_are_exact(tmp_path):
    made = np.random.default_rng(0).normal(1e7, 1, (6, 16, 16, 1)).astype(np.float32)
    build_arrays(made, tmp_path / "out.bin")
    found = memload.info(tmp_path / "out.bin")["statistics"]
    assert found["std"] == pytest.approx([made.astype(np.float64).std()], rel=1e-9)
    build_arrays(np.full((6, 16, 16), 0.1, np.float32), tmp_path / "same.bin")
    assert memload.info(tmp_path / "same.bin")["statistics"]["std"] == pytest.approx([0], abs=1e-12)


@pytest.mark.parametrize("descr", ["<i2", "<i4", "<f4"])
def test_normalize_uses_the_statistics_of_measurements(descr, tmp_path):
    values = np.random.default_rng(7).normal(-600, 90, (5, 5, 8, 2)).astype(descr)
    build_arrays(values, tmp_path / "out.bin")
    normalize = transforms.Compose([lambda images: images.float(), transforms.Normalize()])
    images = next(iter(Loader(tmp_path / "out.bin", 5, transform=normalize)))[0]
    assert torch.allclose(images.mean((0, 2, 3)), torch.zeros(2), atol=1e-4)
    assert torch.allclose(images.std((0, 2, 3), correction=0), torch.ones(2), atol=1e-4)


def test_an_array_unlike_the_first_one_is_rejected_alone(tmp_path):
    first, last = arrays("<u2", (4, 6), 2)
    differs = "the array is {}, but the first one is (4, 6, 1) of uint16"
    others = [
        (first.T, differs.format("(6, 4, 1) of uint16")),
        (np.stack([first, last], 2), differs.format("(4, 6, 2) of uint16")),
        (first.astype(np.float32), differs.format("(4, 6, 1) of float32")),
        (first.astype(np.int16), differs.format("(4, 6, 1) of int16")),
        (first.astype(np.int64), "int64 and shape (4, 6) cannot be stored. Convert it"),
        (first > 0, "bool and shape (4, 6) cannot be stored. Convert it"),
        (first.astype(np.float64), "float64 and shape (4, 6) cannot be stored. Convert it"),
        (first[:, 0], "uint16 and shape (4,) cannot be stored. Convert it"),
        (first[:0], "uint16 and shape (0, 6) cannot be stored. Convert it"),
        (Image.new("L", (6, 4)), "decodes nothing, but this is Image"),
        (b"bytes", "decodes nothing, but this is bytes"),
        ("picture.png", "decodes nothing, but this is picture.png"),
    ]
    report = build_arrays(
        [None, first, *(array for array, _ in others), last], tmp_path / "out.bin"
    )
    assert report.ledger is not None
    with report.ledger.open(newline="") as file:
        reasons = [reason for _, reason in csv.reader(file)]
    assert reasons[:2] == ["reason", "the data set returned None"]
    assert all(text in reason for (_, text), reason in zip(others, reasons[2:], strict=True))
    dataset = MemmapDataset(tmp_path / "out.bin")
    assert torch.equal(dataset.gather([0, 1]), torch.from_numpy(np.stack([first, last])[..., None]))


def test_only_unusable_arrays_are_an_error_before_the_build_begins(tmp_path):
    with pytest.raises(
        memload.SourceError,
        match=r"None of the first 3 samples .*: an array of float64 .* cannot be stored",
    ):
        build_arrays(np.zeros((3, 4, 6)), tmp_path / "out.bin")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 256}, r"size: 256 is not the size of the arrays, \(4, 6\)"),
        ({"size": (6, 4)}, r"size: \(6, 4\) is not the size of the arrays, \(4, 6\)"),
        ({"fit": "pad"}, "fit: 'pad' has no effect in mode 'array'"),
        ({"interpolation": "nearest"}, "interpolation: 'nearest' has no effect"),
        ({"fast": True}, "fast: True has no effect"),
        ({"exif": False}, "exif: False has no effect"),
        ({"max_pixels": 1}, "max_pixels: 1 has no effect"),
        ({"mode": "rgb"}, "mode must be one of RGB, L, I;16, array, not 'rgb'"),
    ],
)
def test_options_for_pictures_are_an_error_for_arrays(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        memload.build(
            np.zeros((3, 4, 6), np.uint8), tmp_path / "out.bin", **{"mode": "array"} | options
        )
    assert list(tmp_path.iterdir()) == []


def test_files_are_not_arrays(folder, tmp_path):
    (tmp_path / "list.csv").write_text("path,label\na.png,b\n")
    (tmp_path / "a.png").touch()
    for source in (folder, str(folder), memload.open_source(tmp_path / "list.csv")):
        with pytest.raises(memload.SourceError, match=r"stores NumPy arrays, .* decodes nothing"):
            build_arrays(source, tmp_path / "out.bin")
    assert {path.name for path in tmp_path.iterdir()} == {"images", "list.csv", "a.png"}


# ---------------------------------------------------------------------------------------- names

NAMES = {
    "spaces and quotes": b" a\n\t \"'`$(x);&|<>*?[]{}!#%^~,= ",
    "not UTF-8": b"\xff\xfe\x80\xe4 \xed\xa0\x80",
    "other scripts": "日本語-ñ-🐜-́".encode() + b"\x1b[31m\x07\x7f\x01",
    "as an option": b"--overwrite",
    "long": b"n" * 220,
}

on_names = pytest.mark.parametrize("raw", NAMES.values(), ids=NAMES)


@pytest.fixture
def any_name(tmp_path):
    """Skip on file systems whose names are not arbitrary bytes, as on macOS."""
    try:
        (tmp_path / os.fsdecode(b"\xff\x1b\n")).touch()
    except (OSError, UnicodeError) as error:
        pytest.skip(f"file names of any bytes: {error}")


@on_names
@pytest.mark.usefixtures("any_name")
def test_samples_and_classes_of_any_name(raw, tmp_path):
    name = os.fsdecode(raw)
    last = "\U0010ffff"
    for number, folder in enumerate((name, last)):
        (tmp_path / "images" / folder).mkdir(parents=True)
        longest = name if len(raw) < 200 else name + "n" * (255 - 4 - len(raw))
        Image.fromarray(picture(number)).save(tmp_path / "images" / folder / f"{longest}.png")
    path = tmp_path / "out.bin"
    (tmp_path / "images" / name / "~.png").write_bytes(b"no image")
    memload.build(tmp_path / "images", path, size=(12, 16), num_workers=0, max_rejects=1)
    assert raw + b"/~.png" in path.with_suffix(".rejects.csv").read_bytes().replace(b'""', b'"')
    dataset = assert_reads(path, np.stack([picture(0), picture(1)]), [0, 1])
    assert dataset.classes == [name, last]
    assert list(dataset.keys) == [f"{name}/{longest}.png", f"{last}/{longest}.png"]
    assert memload.info(path)["classes"] == [name, last]
    dataset.subset([0]).save(tmp_path / "part.idx")
    assert MemmapDataset(tmp_path / "part.idx").keys[0] == f"{name}/{longest}.png"
    memload.preview(path, tmp_path / "grid.png")


@on_names
@pytest.mark.usefixtures("any_name")
def test_a_data_set_of_any_name_in_a_folder_of_any_name(raw, tmp_path, monkeypatch):
    folder = tmp_path / os.fsdecode(raw)
    folder.mkdir()
    monkeypatch.chdir(folder)
    pictures = [picture(number) for number in range(4)]
    samples = [(image, number) for number, image in enumerate(pictures)]
    path = folder / f"{os.fsdecode(raw)}.bin"
    for shard_size, count in ((None, 1), (HEADER_BYTES + 2 * 12 * 16 * 3, 2)):
        options = {"size": (12, 16), "num_workers": 1, "shard_size": shard_size}
        memload.build(samples, path, **options, overwrite=True)
        assert_reads(path.with_suffix(".idx"), np.stack(pictures), [0, 1, 2, 3])
        assert len(list(folder.iterdir())) == count + 1
    assert_reads(path, np.stack(pictures), [0, 1, 2, 3])
    part = folder / f"{os.fsdecode(raw)} part.idx"
    MemmapDataset(path.with_suffix(".idx")).subset([3]).save(part)
    assert_reads(part, picture(3)[None], [3])
    if not raw.startswith(b"-"):  # which the shell's user writes as ./--overwrite.bin
        assert MemmapDataset(path.with_suffix(".idx").name)[3][1] == 3
