import copy
import os
import pickle
import subprocess
import sys
import textwrap
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import memload
from memload import MemmapDataset
from memload.storage.format import HEADER_BYTES, npy_header, shard_names
from memload.storage.index import Array, Index, Shard
from memload.storage.keys import Keys

HEIGHT, WIDTH, CHANNELS = 5, 7, 3
SAMPLES = 10
# Any order, two rows that no sample uses (0 and 8), and one (4) that serves two.
ROWS = (4, 1, 3, 7, 2, 4, 9, 5, 11, 6)
CLASSES = ("ant", "bee", "cat")

on_linux = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads /proc")


def write(
    path: Path,
    pixels: np.ndarray,
    rows: Sequence[int],
    columns: Mapping[str, np.ndarray],
    *,
    classes: Sequence[str] | None = None,
    rows_a_shard: int = 100_000,
) -> Path:
    """Write a data set by hand, so that nothing here depends on decoding."""
    parts = [pixels[first : first + rows_a_shard] for first in range(0, len(pixels), rows_a_shard)]
    listed = []
    for name, part in zip(shard_names(path, len(parts)), parts, strict=True):
        data = npy_header(pixels.dtype.str, part.shape) + part.tobytes()
        path.with_name(name).write_bytes(data)
        listed.append(Shard(name, len(part), len(data)))
    index = path.with_suffix(".idx")
    Index(
        path=index,
        arrays=(Array("image", pixels.dtype.str, pixels.shape[1:], tuple(listed)),),
        row=np.array(rows, np.int64),
        flags=np.zeros(len(rows), np.uint8),
        keys=Keys.of([f"{sample:04d}.jpg" for sample in range(len(rows))]),
        columns=columns,
        crc32={"image": np.array([zlib.crc32(row.tobytes()) for row in pixels], np.uint32)},
        classes=None if classes is None else tuple(classes),
    ).write(index)
    return path


def some_pixels(seed: int = 0, dtype: str = "|u1") -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (12, HEIGHT, WIDTH, CHANNELS)).astype(dtype)


PIXELS = some_pixels()
LABELS = np.array([0, 1, 2, 0, 1, 2, 0, 1, 2, 0], np.int64)
LANDMARKS = np.random.default_rng(1).random((SAMPLES, 4, 2), np.float32)
WEIGHTS = np.linspace(0, 1, SAMPLES)
COLUMNS = {"label": LABELS, "landmarks": LANDMARKS, "weight": WEIGHTS, "sharp": WEIGHTS > 0.4}


pytestmark = pytest.mark.usefixtures("quick_collections")


@pytest.fixture(scope="module", params=[12, 5], ids=["one shard", "three shards"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    return write(
        folder / "out.bin", PIXELS, ROWS, COLUMNS, classes=CLASSES, rows_a_shard=request.param
    )


def expected_image(sample: int) -> torch.Tensor:
    return torch.from_numpy(PIXELS[ROWS[sample]]).permute(2, 0, 1)


def expected_batch(samples: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(PIXELS[[ROWS[sample] for sample in samples]])


def assert_is(dataset: MemmapDataset, samples: Sequence[int]) -> None:
    """Assert that a data set holds these samples of the whole, in all that it says of itself."""
    assert len(dataset) == len(samples)
    for (image, label), sample in zip(dataset, samples, strict=True):
        assert torch.equal(image, expected_image(sample))
        assert label == LABELS[sample]
    assert list(dataset.keys) == [f"{sample:04d}.jpg" for sample in samples]
    assert dataset.columns.keys() == COLUMNS.keys()
    for name, column in dataset.columns.items():
        np.testing.assert_array_equal(column.numpy(), COLUMNS[name][list(samples)])
    assert torch.equal(dataset.gather(range(len(samples))), expected_batch(samples))


def mapped_ranges(name: str) -> list[tuple[int, int]]:
    """Return the address ranges where this process maps a file."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in lines if line.endswith(name)]
    return [(int(start, 16), int(stop, 16)) for start, stop in ranges]


def anonymous_kilobytes(folder: Path) -> int:
    """Return how much of what this process maps from a folder is its own, not the page cache's."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            inside = str(folder) in line
        elif inside and line.startswith("Anonymous:"):
            total += int(line.split()[1])
    return total


def test_a_sample_is_an_image_and_its_label(path: Path) -> None:
    dataset = MemmapDataset(path)
    image, label = dataset[3]
    assert torch.equal(image, expected_image(3))
    assert (image.dtype, image.shape) == (torch.uint8, (CHANNELS, HEIGHT, WIDTH))
    assert dataset.shape == (CHANNELS, HEIGHT, WIDTH)
    assert image.stride() == (1, WIDTH * CHANNELS, CHANNELS)
    assert type(label) is int
    assert label == 0


def test_all_samples_come_in_order(path: Path) -> None:
    dataset = MemmapDataset(path)
    assert_is(dataset, range(SAMPLES))


@on_linux
def test_an_image_is_the_mapped_file_itself(path: Path) -> None:
    dataset = MemmapDataset(path)
    ranges = mapped_ranges(".bin")
    for image, _ in dataset:
        assert any(start <= image.data_ptr() < stop for start, stop in ranges)
    assert dataset[0][0].data_ptr() == dataset[5][0].data_ptr()  # both are row 4
    assert dataset[1:][0][0].data_ptr() == dataset[1][0].data_ptr()


@pytest.mark.parametrize("index", [SAMPLES, -SAMPLES - 1, 10**30])
def test_an_index_out_of_bounds_raises_index_error(path: Path, index: int) -> None:
    dataset = MemmapDataset(path)
    with pytest.raises(IndexError, match=rf"index {index} is out of range: .* 10 samples"):
        dataset[index]


@pytest.mark.parametrize(
    "index", [np.int64(3), np.uint8(3), torch.tensor(3)], ids=["int64", "uint8", "tensor"]
)
def test_whole_numbers_of_other_libraries_are_indices(path: Path, index: Any) -> None:
    dataset = MemmapDataset(path)
    assert torch.equal(dataset[index][0], expected_image(3))


@pytest.mark.parametrize("index", [1.0, "1", None])
def test_what_is_no_whole_number_is_no_index(path: Path, index: Any) -> None:
    dataset = MemmapDataset(path)
    with pytest.raises(TypeError):
        dataset[index]
    with pytest.raises(TypeError):
        dataset.__getitems__([index])


def test_getitems_returns_samples_one_by_one(path: Path) -> None:
    dataset = MemmapDataset(path)
    samples = dataset.__getitems__([3, -1, 3])
    assert [label for _, label in samples] == [0, 0, 0]
    for (image, _), sample in zip(samples, [3, 9, 3], strict=True):
        assert torch.equal(image, expected_image(sample))
    with pytest.raises(IndexError):
        dataset.__getitems__([0, SAMPLES])


def test_classes_are_named_in_the_order_of_their_labels(path: Path) -> None:
    dataset = MemmapDataset(path)
    assert dataset.classes == ["ant", "bee", "cat"]
    assert dataset.class_to_idx == {"ant": 0, "bee": 1, "cat": 2}


def test_columns_come_in_the_order_asked_for(path: Path) -> None:
    _, sharp, landmarks, weight = MemmapDataset(path, columns=["sharp", "landmarks", "weight"])[7]
    assert sharp is True
    assert type(weight) is float
    assert weight == WEIGHTS[7]
    assert landmarks.dtype == torch.float32
    np.testing.assert_array_equal(landmarks.numpy(), LANDMARKS[7])


def test_no_columns_give_the_image_alone(path: Path) -> None:
    assert torch.equal(MemmapDataset(path, columns=())[2], expected_image(2))


def test_unknown_columns_are_refused(path: Path) -> None:
    with pytest.raises(ValueError, match=r"columns names 'lable', which .* It has .*sharp"):
        MemmapDataset(path, columns=["label", "lable"])


def test_a_name_in_place_of_columns_is_told_how_to_be_written(path: Path) -> None:
    with pytest.raises(TypeError, match=r"columns is 'label' .* Write \['label'\]"):
        MemmapDataset(path, columns="label")


def test_without_a_label_all_columns_come(tmp_path: Path) -> None:
    columns = {"angle": WEIGHTS, "landmarks": LANDMARKS}
    dataset = MemmapDataset(write(tmp_path / "out.bin", PIXELS, ROWS, columns))
    image, *values = dataset[4]
    assert torch.equal(image, expected_image(4))
    assert sorted(dataset.sample_columns) == ["angle", "landmarks"]
    found = dict(zip(dataset.sample_columns, values, strict=True))
    assert found["angle"] == WEIGHTS[4]
    np.testing.assert_array_equal(found["landmarks"].numpy(), LANDMARKS[4])
    assert dataset.labels is None
    assert (dataset.classes, dataset.class_to_idx) == ([], {})


def test_a_flat_folder_gives_images_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "out.bin", PIXELS, ROWS, {})
    dataset = MemmapDataset(path)
    assert torch.equal(dataset[3], expected_image(3))
    assert torch.equal(dataset[2:][1], expected_image(3))
    assert (
        MemmapDataset(path, transform=lambda image: image.sum().item())[3]
        == expected_image(3).sum()
    )
    assert MemmapDataset(path, transforms=lambda image: ("joint", image.ndim))[3] == ("joint", 3)
    assert repr(dataset).endswith("10 samples of 5×7×3, no columns)")


@pytest.mark.parametrize("dtype", ["<u2", "<f2", "<f4"])
def test_other_element_types_keep_their_values(tmp_path: Path, dtype: str) -> None:
    pixels = some_pixels(dtype=dtype) * np.array(3, dtype)
    dataset = MemmapDataset(write(tmp_path / "out.bin", pixels, ROWS, {}))
    np.testing.assert_array_equal(dataset[6].permute(1, 2, 0).numpy(), pixels[ROWS[6]])
    np.testing.assert_array_equal(dataset.gather([6, 0]).numpy(), pixels[[ROWS[6], ROWS[0]]])


def test_transform_gets_the_image_and_target_transform_the_label(path: Path) -> None:
    dataset = MemmapDataset(
        path, transform=lambda image: image.float() / 255, target_transform=lambda label: -label
    )
    image, label = dataset[5]
    assert torch.equal(image, expected_image(5).float() / 255)
    assert label == -2


def test_transforms_gets_image_and_columns_together_and_returns_the_sample(path: Path) -> None:
    def joint(image: torch.Tensor, landmarks: torch.Tensor, label: int) -> dict[str, Any]:
        return {"image": image.flip(2), "landmarks": WIDTH - 1 - landmarks, "label": label}

    sample = MemmapDataset(path, columns=["landmarks", "label"], transforms=joint)[8]
    assert torch.equal(sample["image"], expected_image(8).flip(2))
    np.testing.assert_array_equal(sample["landmarks"].numpy(), WIDTH - 1 - LANDMARKS[8])
    assert sample["label"] == 2


@pytest.mark.parametrize("other", ["transform", "target_transform"])
def test_transforms_stands_alone(path: Path, other: str) -> None:
    options: dict[str, Any] = {other: str}
    with pytest.raises(ValueError, match="transforms cannot be combined"):
        MemmapDataset(path, transforms=lambda image, label: image, **options)


def test_a_subset_keeps_transforms_and_columns(path: Path) -> None:
    dataset = MemmapDataset(
        path, columns=["weight"], transform=torch.Tensor.float, target_transform=str
    )
    image, weight = dataset[4:][2]
    assert torch.equal(image, expected_image(6).float())
    assert weight == str(WEIGHTS[6])


@pytest.mark.parametrize(
    "indices",
    [
        [3, -1, 3, 0],
        (3, -1, 3, 0),
        np.array([3, -1, 3, 0]),
        np.array([3, 9, 3, 0], np.uint8),
        torch.tensor([3, -1, 3, 0]),
        [torch.tensor(3), torch.tensor(-1), torch.tensor(3), torch.tensor(0)],
    ],
    ids=["list", "tuple", "array", "uint8", "tensor", "tensors"],
)
def test_gather_and_subset_take_any_kind_of_whole_numbers(path: Path, indices: Any) -> None:
    dataset = MemmapDataset(path)
    assert torch.equal(dataset.gather(indices), expected_batch([3, 9, 3, 0]))
    assert_is(dataset.subset(indices), [3, 9, 3, 0])


def test_gather_fills_the_memory_it_is_given(path: Path) -> None:
    dataset = MemmapDataset(path)
    whole = torch.zeros((5, HEIGHT, WIDTH, CHANNELS), dtype=torch.uint8)
    out = whole[1:4]
    assert dataset.gather([8, 2, -10], out=out) is out
    assert torch.equal(whole[1:4], expected_batch([8, 2, 0]))
    assert not whole[0].any()
    assert not whole[4].any()


@pytest.mark.parametrize(
    "nothing", [[], (), np.array([], np.int64), np.zeros(SAMPLES, bool), range(0)]
)
def test_gather_and_subset_of_nothing_are_empty(path: Path, nothing: Any) -> None:
    dataset = MemmapDataset(path)
    assert dataset.gather(nothing).shape == (0, HEIGHT, WIDTH, CHANNELS)
    assert_is(dataset.subset(nothing), [])


@pytest.mark.parametrize(
    ("out", "told"),
    [
        (torch.empty(1, HEIGHT, WIDTH, CHANNELS, dtype=torch.uint8), r"\(1, 5, 7, 3\)"),
        (torch.empty(2, CHANNELS, HEIGHT, WIDTH, dtype=torch.uint8), r"\(2, 3, 5, 7\)"),
        (torch.empty(2, HEIGHT, WIDTH, CHANNELS), "of torch.float32"),
        (torch.empty(4, HEIGHT, WIDTH, CHANNELS, dtype=torch.uint8)[::2], "not contiguous"),
        (torch.empty(2, HEIGHT, WIDTH, CHANNELS, dtype=torch.uint8, device="meta"), "on meta"),
    ],
    ids=["too few", "channels first", "float", "with gaps", "device"],
)
def test_gather_refuses_memory_that_does_not_fit(path: Path, out: torch.Tensor, told: str) -> None:
    dataset = MemmapDataset(path)
    with pytest.raises(
        ValueError,
        match=rf"out is .*{told}.*, but \(2, 5, 7, 3\) of torch.uint8 on cpu, contiguous, is needed",
    ):
        dataset.gather([0, 1], out=out)
    with pytest.raises(TypeError, match="out is of type ndarray instead of a tensor"):
        dataset.gather([0, 1], out=np.empty((2, HEIGHT, WIDTH, CHANNELS), np.uint8))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "indices",
    [
        [0, SAMPLES],
        [-SAMPLES - 1],
        [0.5],
        [[1, 2]],
        3,
        np.ones(SAMPLES - 1, bool),
        [True],
        ["a"],
        np.zeros((0, 2)),
    ],
    ids=["above", "below", "float", "2-d", "0-d", "short mask", "list mask", "text", "empty 2-d"],
)
def test_wrong_indices_raise_index_error(path: Path, indices: Any) -> None:
    dataset = MemmapDataset(path)
    with pytest.raises(IndexError, match=r"out of range|indices are .* must be integers"):
        dataset.subset(indices)
    with pytest.raises(IndexError, match=r"out of range|indices are .* must be integers"):
        dataset.gather(indices)


def test_a_mask_chooses_samples(path: Path) -> None:
    dataset = MemmapDataset(path)
    chosen = [1, 4, 7]
    assert_is(dataset.subset(LABELS == 1), chosen)
    assert dataset.labels is not None
    assert_is(dataset.subset(dataset.labels == 1), chosen)
    assert_is(dataset.subset((LABELS == 1).tolist()), chosen)


def test_a_subset_has_a_fingerprint_of_its_own(path: Path) -> None:
    dataset = MemmapDataset(path)
    assert len(dataset.fingerprint) == 64
    assert len(dataset[:3].fingerprint) == 64
    assert dataset[:3].fingerprint == dataset.subset([0, 1, 2]).fingerprint
    assert (
        len(
            {
                dataset[:3].fingerprint,
                dataset[:2].fingerprint,
                dataset[1:4].fingerprint,
                dataset.fingerprint,
            }
        )
        == 4
    )


def test_a_saved_subset_opens_over_the_same_pixels(path: Path) -> None:
    dataset = MemmapDataset(path)
    target = path.with_name("train-10pct.idx")
    before = {file: file.stat().st_mtime_ns for file in path.parent.glob("*.bin")}
    dataset.subset([7, 2, 2]).save(target)
    try:
        saved = MemmapDataset(target)
        assert_is(saved, [7, 2, 2])
        assert saved.path == target
        assert saved.classes == dataset.classes
        assert len({saved.fingerprint, dataset.fingerprint, ""}) == 3
        assert_is(saved[1:], [2, 2])
        assert {file: file.stat().st_mtime_ns for file in path.parent.glob("*.bin")} == before
        assert target.stat().st_size < 10_000
    finally:
        target.unlink()
    assert_is(MemmapDataset(path), range(SAMPLES))


def test_an_index_is_saved_beside_its_pixels_only(tmp_path: Path) -> None:
    path = write(tmp_path / "out.bin", PIXELS, ROWS, COLUMNS)
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(
        ValueError,
        match=r"part.idx', but the index must be in the folder of the pixels. Write '",
    ):
        MemmapDataset(path)[:2].save(other / "part.idx")
    assert not list(other.iterdir())


@pytest.mark.parametrize("name", ["part.bin", "part", "part.idx.txt"])
def test_an_index_is_saved_under_a_name_of_its_kind_only(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "out.bin", PIXELS, ROWS, COLUMNS)
    with pytest.raises(ValueError, match=r"its name must end in '\.idx'"):
        MemmapDataset(path)[:2].save(tmp_path / name)


def test_saving_overwrites_only_when_told_to(tmp_path: Path) -> None:
    path = write(tmp_path / "out.bin", PIXELS, ROWS, COLUMNS)
    target = tmp_path / "part.idx"
    dataset = MemmapDataset(path)
    dataset[:2].save(target)
    before = target.read_bytes()
    with pytest.raises(FileExistsError, match=r"part.idx exists already. Say overwrite=True"):
        dataset[:3].save(target)
    assert target.read_bytes() == before
    dataset[:3].save(target, overwrite=True)
    assert_is(MemmapDataset(target), range(3))
    assert not list(tmp_path.glob("*.tmp"))


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[str, Any]]:
    """Draw ways to make a data set from a data set, each fit for the size that the one before leaves."""
    size, drawn = SAMPLES, list[tuple[str, Any]]()
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["slice", "indices", "mask", "pickle", "copy", "save"]))
        given: Any = None
        if kind == "slice":
            given = draw(st.slices(size))
            size = len(range(size)[given])
        elif kind == "indices":
            given = draw(st.lists(st.integers(-size, size - 1), max_size=15)) if size else []
            size = len(given)
        elif kind == "mask":
            given = draw(st.lists(st.booleans(), min_size=size, max_size=size))
            size = sum(given)
        drawn.append((kind, given))
    return drawn


@settings(max_examples=80, deadline=None, database=None, derandomize=True)
@given(steps=steps(), data=st.data())
def test_it_behaves_as_a_list_of_samples(
    path: Path, steps: list[tuple[str, Any]], data: st.DataObject
) -> None:
    dataset, reference = MemmapDataset(path), list(range(SAMPLES))
    saved = path.with_name("step.idx")
    for kind, chosen in steps:
        if kind == "slice":
            dataset, reference = dataset[chosen], reference[chosen]
        elif kind == "indices":
            dataset, reference = dataset.subset(chosen), [reference[index] for index in chosen]
        elif kind == "mask":
            kept = [sample for sample, keep in zip(reference, chosen, strict=True) if keep]
            dataset, reference = dataset.subset(np.array(chosen, bool)), kept
        elif kind == "pickle":
            dataset = pickle.loads(pickle.dumps(dataset))
        elif kind == "copy":
            dataset = copy.deepcopy(dataset)
        else:
            dataset.save(saved, overwrite=True)
            dataset = MemmapDataset(saved)
    assert_is(dataset, reference)
    for index in data.draw(st.lists(st.integers(-SAMPLES - 3, SAMPLES + 3), max_size=5)):
        try:
            sample = reference[index]
        except IndexError:
            with pytest.raises(IndexError):
                dataset[index]
        else:
            image, label = dataset[index]
            assert torch.equal(image, expected_image(sample))
            assert label == LABELS[sample]
            assert torch.equal(dataset.gather([index]), expected_batch([sample]))


def test_writing_into_a_tensor_leaves_the_file_alone(path: Path) -> None:
    dataset = MemmapDataset(path)
    files = {
        file: file.read_bytes() for file in path.parent.iterdir() if file.suffix in (".bin", ".idx")
    }
    other = MemmapDataset(path)
    for image, _ in dataset:
        image.fill_(7)
    for column in dataset.columns.values():
        column.zero_()
    assert dataset[0][0].unique().tolist() == [7]
    assert {file: file.read_bytes() for file in files} == files
    assert_is(other, range(SAMPLES))
    assert_is(MemmapDataset(path), range(SAMPLES))


@on_linux
def test_what_is_only_read_stays_in_the_page_cache(path: Path) -> None:
    dataset = MemmapDataset(path)
    assert_is(dataset, range(SAMPLES))
    assert anonymous_kilobytes(path.parent) == 0
    dataset[0][0].fill_(1)
    assert anonymous_kilobytes(path.parent) > 0


def test_it_pickles_in_a_few_hundred_bytes(path: Path) -> None:
    dataset = MemmapDataset(path)
    dataset[0]
    data = pickle.dumps(dataset)
    assert len(data) < 1000
    assert_is(pickle.loads(data), range(SAMPLES))


def test_a_pickle_keeps_columns_and_transforms(path: Path) -> None:
    dataset = MemmapDataset(
        path, columns=["weight", "label"], transform=torch.Tensor.float, target_transform=str
    )
    image, weight, label = pickle.loads(pickle.dumps(dataset))[6]
    assert torch.equal(image, expected_image(6).float())
    assert (weight, label) == (str(WEIGHTS[6]), 0)


def test_a_saved_subset_pickles_as_its_path(tmp_path: Path) -> None:
    path = write(tmp_path / "out.bin", PIXELS, ROWS * 200, {})
    MemmapDataset(path)[::2].save(tmp_path / "half.idx")
    data = pickle.dumps(MemmapDataset(tmp_path / "half.idx"))
    assert len(data) < 1000
    assert len(pickle.loads(data)) == SAMPLES * 100


@pytest.mark.parametrize("part", [slice(None), slice(3)], ids=["whole", "subset"])
def test_a_data_set_rebuilt_since_it_was_pickled_is_refused(tmp_path: Path, part: slice) -> None:
    path = write(tmp_path / "out.bin", PIXELS, ROWS, COLUMNS)
    data = pickle.dumps(MemmapDataset(path)[part])
    write(path, some_pixels(seed=2), ROWS, COLUMNS)
    with pytest.raises(
        memload.FormatError, match=r"it was built again meanwhile. Open it anew"
    ) as caught:
        pickle.loads(data)
    assert caught.value.path == str(path.with_suffix(".idx"))


def test_a_relative_path_is_found_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "out.bin", PIXELS, ROWS, COLUMNS)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    dataset = MemmapDataset("out.bin")
    data = pickle.dumps(dataset)
    monkeypatch.chdir(elsewhere)
    assert_is(pickle.loads(data), range(SAMPLES))
    dataset[:2].save(tmp_path / "two.idx")
    assert_is(MemmapDataset("../two.idx"), range(2))


def test_a_data_set_that_has_moved_is_told_missing(tmp_path: Path) -> None:
    path = write(tmp_path / "out.bin", PIXELS, ROWS, COLUMNS)
    data = pickle.dumps(MemmapDataset(path))
    path.with_suffix(".idx").unlink()
    with pytest.raises(memload.MissingError):
        pickle.loads(data)
    with pytest.raises(FileNotFoundError):
        MemmapDataset(path)


class Doubled(MemmapDataset):
    def __init__(self, path: Path, factor: int = 2) -> None:
        super().__init__(path)
        self.factor = factor

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return super().__getitem__(index)
        image, label = super().__getitem__(index)
        return image.int() * self.factor, label


def test_a_subclass_stays_one_through_subsets_and_pickles(path: Path) -> None:
    dataset = Doubled(path, 3)
    for other in (
        dataset,
        dataset[1:][:-1],
        pickle.loads(pickle.dumps(dataset)),
        pickle.loads(pickle.dumps(dataset[:8])),
    ):
        assert type(other) is Doubled
        assert other.factor == 3
    assert torch.equal(pickle.loads(pickle.dumps(dataset[2:]))[1][0], expected_image(3).int() * 3)
    assert torch.equal(dataset.__getitems__([3])[0][0], expected_image(3).int() * 3)
    assert [image.dtype for image, _ in dataset] == [torch.int32] * SAMPLES


def test_a_data_set_opens_by_any_of_its_names(path: Path) -> None:
    names = [path, str(path), path.with_suffix(".idx"), *path.parent.glob("out*.bin")]
    for name in names:
        assert len(MemmapDataset(name)) == SAMPLES


def test_it_says_what_it_is(path: Path) -> None:
    dataset = MemmapDataset(path)
    told = f"MemmapDataset('{path.with_suffix('.idx')}': 10 samples of 5×7×3, {', '.join(dataset.columns)})"
    assert repr(dataset) == told


def test_threads_read_the_same(path: Path) -> None:
    dataset = MemmapDataset(path)

    def read(seed: int) -> None:
        for index in np.random.default_rng(seed).integers(0, SAMPLES, 300).tolist():
            assert torch.equal(dataset[index][0], expected_image(index))
            assert torch.equal(dataset.gather([index, 0]), expected_batch([index, 0]))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, range(8)))


def test_the_stock_loader_with_its_own_collate_reads_it(path: Path) -> None:
    dataset = MemmapDataset(path)
    batches = list(DataLoader(dataset, batch_size=4, sampler=[3, 1, 4, 1, 5, 9], drop_last=False))
    assert torch.equal(
        torch.cat([images for images, _ in batches]).permute(0, 2, 3, 1),
        expected_batch([3, 1, 4, 1, 5, 9]),
    )
    assert (
        torch.cat([labels for _, labels in batches]).tolist() == LABELS[[3, 1, 4, 1, 5, 9]].tolist()
    )


def in_new_process(script: str, *arguments: str | Path, modules: Path | None = None) -> str:
    search = [str(modules)] if modules else []
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*search, os.environ.get("PYTHONPATH", "")])
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert not done.returncode, done.stderr
    return done.stdout


SPAWNED = """
import multiprocessing
import pathlib

import memload
import torch
from torch.utils.data import DataLoader


class Numbered(memload.MemmapDataset):
    def __init__(self, path):
        super().__init__(path)
        self.offset = 100

    def __getitem__(self, index):
        if isinstance(index, slice):
            return super().__getitem__(index)
        image, label = super().__getitem__(index)
        assert torch.utils.data.get_worker_info() is not None
        return image, label + self.offset


def shared(samples):
    images, labels = memload.fast_collate(samples)
    return images, labels, images.is_shared(), images.is_contiguous(memory_format=torch.channels_last)


def main(path):
    dataset = Numbered(path)[2:]
    loader = DataLoader(
        dataset, 3, num_workers=2, collate_fn=shared, prefetch_factor=3, multiprocessing_context="spawn"
    )
    whole = memload.MemmapDataset(path)
    batches = list(loader)
    assert [len(batch[0]) for batch in batches] == [3, 3, 2]
    assert all(is_shared and channels_last for _, _, is_shared, channels_last in batches)
    images = torch.cat([batch[0] for batch in batches])
    assert torch.equal(images.permute(0, 2, 3, 1), whole.gather(range(2, 10)))
    labels = torch.cat([batch[1] for batch in batches])
    assert torch.equal(labels, whole.labels[2:] + 100)
    print("right")
"""


def test_a_subclass_reaches_spawned_workers_by_path(tmp_path: Path) -> None:
    path = write(tmp_path / "out.bin", PIXELS, ROWS, COLUMNS, classes=CLASSES, rows_a_shard=7)
    (tmp_path / "spawned.py").write_text(SPAWNED)
    script = "import sys, spawned\nif __name__ == '__main__':\n    spawned.main(sys.argv[1])"
    assert in_new_process(script, path, modules=tmp_path) == "right\n"


@on_linux
def test_opening_many_samples_takes_the_memory_of_rows_flags_labels_and_checksums(
    tmp_path: Path,
) -> None:
    samples, shape = 150_000, (8, 8, 3)
    row_bytes = int(np.prod(shape))
    small = write(tmp_path / "small.bin", PIXELS, ROWS, COLUMNS, classes=CLASSES)
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        file.write(npy_header("|u1", (samples, *shape)))
        file.truncate(HEADER_BYTES + samples * row_bytes)
    shard = Shard(path.name, samples, HEADER_BYTES + samples * row_bytes)
    numbers = np.arange(samples, dtype=np.int64)
    index = Index(
        path=path.with_suffix(".idx"),
        arrays=(Array("image", "|u1", shape, (shard,)),),
        row=numbers,
        flags=np.zeros(samples, np.uint8),
        keys=Keys.of([f"n{number % 1000:08d}/image_{number:08d}" for number in range(samples)]),
        columns={"label": numbers % 1000},
        crc32={"image": np.full(samples, zlib.crc32(bytes(row_bytes)), np.uint32)},
        classes=[f"class {number}" for number in range(1000)],
    )
    index.write(index.path)
    # Without the pages of files, which all processes share. 21 bytes a sample are 3.1 MB; the names would take 5 MB more.
    script = """
    import sys
    from pathlib import Path
    from memload import MemmapDataset

    def own():
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:"))

    first = MemmapDataset(sys.argv[1])
    before = own()
    dataset = MemmapDataset(sys.argv[2])
    assert len(dataset) == 150_000
    assert dataset[149_999][1] == 999
    assert dataset.keys[77] == "n00000077/image_00000077"
    assert dataset.classes[5] == "class 5"
    print(own() - before)
    """
    assert int(in_new_process(script, small, path)) < 4500


def test_samples_are_the_same_from_one_shard_as_from_many(folder: Path, tmp_path: Path) -> None:
    one, many = tmp_path / "one.bin", tmp_path / "many.bin"
    memload.build(folder, one, size=(9, 11), num_workers=0)
    memload.build(
        folder, many, size=(9, 11), num_workers=0, shard_size=HEADER_BYTES + 5 * 9 * 11 * 3
    )
    assert len(list(tmp_path.glob("many-*.bin"))) == 3
    first, second = MemmapDataset(one), MemmapDataset(many)
    assert first.keys == second.keys
    assert torch.equal(first.gather(range(12)), second.gather(range(12)))
    for (image, label), (other, other_label) in zip(first, second, strict=True):
        assert torch.equal(image, other)
        assert label == other_label


class OwnMethod(MemmapDataset):
    def __init__(self, path: Path) -> None:
        super().__init__(path, transforms=self.flipped)

    def flipped(self, image: torch.Tensor, label: int) -> tuple[torch.Tensor, int]:
        return image.flip(2), label


def test_a_transform_may_be_a_method_of_the_data_set(path: Path) -> None:
    dataset = OwnMethod(path)
    copied = copy.deepcopy(dataset)
    assert copied.transforms.__self__ is copied
    assert torch.equal(copied[0][0], dataset[0][0])
    assert torch.equal(copy.deepcopy(dataset[1:])[0][0], dataset[1][0])


def test_samples_written_to_and_files_touched_are_no_damage(path: Path) -> None:
    dataset = MemmapDataset(path)
    image, _ = dataset[1]
    image += 1
    assert dataset.labels is not None
    dataset.labels.add_(1)
    for file in path.parent.iterdir():
        os.utime(file)
    assert torch.equal(dataset.gather([1])[0], expected_batch([1])[0] + 1)
    assert dataset[1][1] == LABELS[1] + 1
    assert memload.verify(path).ok


def test_an_index_that_takes_the_place_of_an_open_one_is_not_read(make_dataset: Any) -> None:
    index = make_dataset()
    dataset = MemmapDataset(index.path)
    before = list(dataset.keys), dataset.gather([3, 1])
    index.subset(np.array([3, 1])).write(index.path)
    assert (len(dataset), list(dataset.keys)) == (5, before[0])
    assert torch.equal(dataset.gather([3, 1]), before[1])
