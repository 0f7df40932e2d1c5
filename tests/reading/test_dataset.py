import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memload import FormatError, MemmapDataset, MissingError
from memload.storage.keys import Keys

HEIGHT, WIDTH, CHANNELS = 5, 7, 3
SAMPLES = 10
# Any order, two rows that no sample uses (0 and 8), and one (4) that serves two.
ROWS = (4, 1, 3, 7, 2, 4, 9, 5, 11, 6)

PIXELS = np.random.default_rng(0).integers(0, 256, (12, HEIGHT, WIDTH, CHANNELS)).astype(np.uint8)
LABELS = np.array([0, 1, 2, 0, 1, 2, 0, 1, 2, 0], np.int64)
LANDMARKS = np.random.default_rng(1).random((SAMPLES, 4, 2), np.float32)
WEIGHTS = np.linspace(0, 1, SAMPLES)
SPLITS = np.array([0, 0, 1, 0, 1, 1, 0, 0, 1, 0])
COLUMNS = {
    "label": LABELS,
    "landmarks": LANDMARKS,
    "weight": WEIGHTS,
    "sharp": WEIGHTS > 0.4,
    "split": SPLITS,
}


@pytest.fixture(scope="session")
def write(write_dataset):
    """A function that writes a data set of ten samples into a folder, and returns its path."""

    def write(folder, **facts):
        columns = facts.get("columns", COLUMNS)
        standard = {
            "rows": (12,),
            "shape": (HEIGHT, WIDTH, CHANNELS),
            "row": np.array(ROWS),
            "flags": np.zeros(SAMPLES, np.uint8),
            "keys": Keys.of([f"{sample:04d}.jpg" for sample in range(SAMPLES)]),
            "columns": columns,
            "categories": {"split": ("train", "val")} if "split" in columns else {},
        }
        return write_dataset(folder, "out.bin", **standard | facts).path.with_suffix(".bin")

    return write


@pytest.fixture(scope="module", params=[(12,), (5, 5, 2)], ids=["one shard", "three shards"])
def path(request, write, tmp_path_factory):
    return write(tmp_path_factory.mktemp("data"), rows=request.param)


@pytest.fixture
def own_path(write, tmp_path):
    """A data set that a test may change."""
    return write(tmp_path)


def images_of(samples):
    """The images that samples have, (n, H, W, C)."""
    return PIXELS[[ROWS[sample] for sample in samples]]


def assert_is(dataset, samples):
    """Assert that a data set holds these samples of the whole, in all that it says of itself."""
    assert len(dataset) == len(samples)
    for (image, label, *_), pixels, sample in zip(
        dataset, images_of(samples), samples, strict=True
    ):
        np.testing.assert_array_equal(image.permute(1, 2, 0).numpy(), pixels)
        assert label == LABELS[sample]
    assert list(dataset.keys) == [f"{sample:04d}.jpg" for sample in samples]
    assert dataset.targets == LABELS[list(samples)].tolist()
    assert dataset.columns.keys() == COLUMNS.keys()
    for name, column in dataset.columns.items():
        np.testing.assert_array_equal(column.numpy(), COLUMNS[name][list(samples)])
    np.testing.assert_array_equal(dataset.gather(range(len(samples))), images_of(samples))


def test_a_sample_is_an_image_and_its_label(path):
    dataset = MemmapDataset(path)
    assert_is(dataset, range(SAMPLES))
    image, label = MemmapDataset(path, columns=["label"])[3]
    assert (image.dtype, image.shape, type(label)) == (torch.uint8, dataset.shape, int)
    assert dataset.shape == (CHANNELS, HEIGHT, WIDTH)
    assert image.stride() == (1, WIDTH * CHANNELS, CHANNELS)
    # What a worker sends is the storage of a tensor: this row, and not the whole file.
    assert image.untyped_storage().nbytes() == image.numel()
    assert (dataset.classes, dataset.num_classes) == (["ant", "bee", "cat"], 3)
    assert dataset.class_to_idx == {"ant": 0, "bee": 1, "cat": 2}
    for index in (np.int64(3), np.uint8(3), torch.tensor(3), 3 - SAMPLES):
        assert torch.equal(dataset[index][0], image)
    columns = ", ".join(dataset.columns)
    assert repr(dataset) == f"MemmapDataset('{dataset.path}': 10 samples of 5×7×3, {columns})"


def test_columns_come_in_the_order_asked_for_or_all_with_the_label_first(write, path, tmp_path):
    columns = ["sharp", "landmarks", "index", "weight"]
    _, sharp, landmarks, number, weight = MemmapDataset(path, columns=columns)[2:][-3]
    assert (sharp, number, type(weight), weight) == (True, SAMPLES - 5, float, WEIGHTS[7])
    assert landmarks.dtype == torch.float32
    np.testing.assert_array_equal(landmarks.numpy(), LANDMARKS[7])
    other = write(tmp_path, columns={"index": WEIGHTS, "label": LABELS, "score": WEIGHTS + 1})
    for options in ({}, {"columns": "all"}):
        assert MemmapDataset(other, **options)[4][1:] == (LABELS[4], WEIGHTS[4], WEIGHTS[4] + 1)
    assert MemmapDataset(other, columns=["index"])[3][1] == WEIGHTS[3]  # a column of this name


def test_without_columns_a_sample_is_the_image_alone(write, tmp_path):
    path = write(tmp_path, columns={}, classes=None)
    dataset = MemmapDataset(path)
    np.testing.assert_array_equal(dataset[2:][1].permute(1, 2, 0), images_of([3])[0])
    assert MemmapDataset(path, transform=lambda image: image.ndim)[3] == 3
    assert MemmapDataset(path, transforms=lambda image: ("joint", image.ndim))[3] == ("joint", 3)
    assert repr(dataset).endswith("10 samples of 5×7×3, no columns)")
    assert (dataset.labels, dataset.classes, dataset.class_to_idx) == (None, [], {})
    assert not hasattr(dataset, "targets")
    with pytest.raises(ValueError, match="has no labels, so its classes cannot be counted"):
        dataset.num_classes  # noqa: B018


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (LABELS.astype(np.uint8) + 4, 7),
        (WEIGHTS, None),
        (LABELS - 1, None),
        (np.zeros((SAMPLES, 2), np.int64), None),
    ],
    ids=["uint8", "float", "negative", "two each"],
)
def test_labels_without_names_count_classes_if_they_can(write, tmp_path, labels, expected):
    dataset = MemmapDataset(write(tmp_path, columns={"label": labels}, classes=None))
    assert dataset.targets == labels.tolist()
    if expected is not None:
        assert dataset.num_classes == dataset[:1].num_classes == expected
    else:
        with pytest.raises(ValueError, match=r"as labels, so its classes cannot be counted"):
            dataset.num_classes  # noqa: B018


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ({"split": "val"}, [2, 4, 5, 8]),
        ({"split": "val", "label": "cat"}, [2, 5, 8]),
        ({"label": ["ant", "bee"], "sharp": True}, [4, 6, 7, 9]),
        ({"weight": 1}, [9]),
        ({"split": []}, []),
        ({}, range(SAMPLES)),
    ],
    ids=str,
)
def test_where_is_a_view_of_the_samples_with_these_values(path, conditions, expected):
    dataset = MemmapDataset(path)
    assert_is(dataset.where(**conditions), expected)
    assert dataset.where(**conditions).categories == {"split": ["train", "val"]}


@pytest.mark.parametrize("descr", ["<u2", "<i2", "<i4", "<f2", "<f4"])
def test_other_element_types_keep_their_values(write, tmp_path, descr):
    dataset = MemmapDataset(write(tmp_path, descr=descr))
    pixels = images_of([6, 0]).astype(descr)
    np.testing.assert_array_equal(dataset[6][0].permute(1, 2, 0).numpy(), pixels[0])
    np.testing.assert_array_equal(dataset.gather([6, 0]).numpy(), pixels)


INTEGERS = [list, np.array, torch.tensor, lambda values: [np.int64(value) for value in values]]
BOOLEANS = [list, lambda values: np.array(values, bool), lambda values: torch.tensor(values) > 0]


@settings(max_examples=40, deadline=None, database=None, derandomize=True)
@given(data=st.data())
def test_views_pickles_copies_and_saved_indexes_of_each_other(path, data):
    dataset, reference = MemmapDataset(path), list(range(SAMPLES))
    saved = path.with_name("part.idx")
    for _ in range(data.draw(st.integers(0, 4))):
        size = len(reference)
        kind = data.draw(st.sampled_from(["slice", "indices", "mask", "pickle", "copy", "save"]))
        if kind == "pickle":
            dataset = pickle.loads(pickle.dumps(dataset))
        elif kind == "copy":
            dataset = copy.deepcopy(dataset)
        elif kind == "save":
            dataset.save(saved, overwrite=True)
            dataset = MemmapDataset(saved)
        else:
            if kind == "slice":
                chosen = data.draw(st.slices(size))
                positions = range(size)[chosen]
            elif kind == "indices":
                numbers = st.lists(st.integers(-size, size - 1), max_size=15)
                positions = data.draw(numbers if size else st.just([]))
                chosen = data.draw(st.sampled_from(INTEGERS))(positions)
            else:
                mask = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
                positions = np.flatnonzero(mask).tolist()
                chosen = data.draw(st.sampled_from(BOOLEANS))(mask)
            reference = [reference[position] for position in positions]
            out = torch.zeros((len(reference), HEIGHT, WIDTH, CHANNELS), dtype=torch.uint8)
            assert dataset.gather(chosen, out=out) is out
            np.testing.assert_array_equal(out, images_of(reference))
            same = dataset.subset([position % size for position in positions])
            dataset = dataset[chosen] if kind == "slice" else dataset.subset(chosen)
            assert dataset.fingerprint == same.fingerprint
        assert dataset.fingerprint == pickle.loads(pickle.dumps(dataset)).fingerprint
        assert dataset.targets == LABELS[reference].tolist()
    assert_is(dataset, reference)


def test_writing_into_a_tensor_leaves_the_file_alone(path):
    dataset, other = MemmapDataset(path), MemmapDataset(path)
    files = {file: file.read_bytes() for file in path.parent.glob("*.*")}
    for image, *_ in dataset:
        image.fill_(7)
    for column in dataset.columns.values():
        column.zero_()
    assert dataset[0][0].unique().tolist() == [7]
    assert {file: file.read_bytes() for file in files} == files
    assert_is(other, range(SAMPLES))


def test_an_index_is_saved_beside_its_pixels_and_replaces_none_by_mistake(own_path):
    dataset, target = MemmapDataset(own_path), own_path.with_name("part.idx")
    dataset.subset([7, 2, 2]).save(target)
    saved = MemmapDataset(target)
    assert_is(saved, [7, 2, 2])
    assert (saved.path, saved.classes) == (target, dataset.classes)
    assert saved.categories == dataset.categories
    with pytest.raises(FileExistsError, match=r"part.idx exists already. Say overwrite=True"):
        dataset[:3].save(target)
    assert_is(MemmapDataset(target), [7, 2, 2])
    assert len({view.fingerprint for view in (dataset, saved, dataset[:3], dataset[1:4])}) == 4
    (own_path.parent / "other").mkdir()
    for wrong, message in (
        ("other/part.idx", "in the folder of the"),
        ("a.bin", r"end in '\.idx'"),
    ):
        with pytest.raises(ValueError, match=message):
            dataset.save(own_path.parent / wrong)
    own_path.rename(own_path.with_name("renamed"))
    with pytest.raises(MissingError, match=own_path.name):
        dataset.save(own_path.with_name("late.idx"))


class Doubled(MemmapDataset):
    """With a method of its own as the transform."""

    def __init__(self, path, factor=2):
        super().__init__(path, transform=self.scale, columns=["weight", "label"])
        self.factor, self.target_transform = factor, str

    def scale(self, image):
        return image.int() * self.factor


def test_a_subclass_and_its_transforms_stay_through_views_copies_and_pickles(path):
    dataset = Doubled(path, 3)
    pickled, copied = pickle.loads(pickle.dumps(dataset[1:])), copy.deepcopy(dataset)
    copied.factor = 5
    for view, factor in ((dataset[1:][:-1], 3), (pickled, 3), (copied[1:], 5)):
        assert type(view) is Doubled
        image, weight, label = view[2]
        expected = images_of([3])[0].astype(np.int32) * factor
        np.testing.assert_array_equal(image.permute(1, 2, 0), expected)
        assert (weight, label) == (str(WEIGHTS[3]), 0)


def test_a_joint_transform_gets_and_returns_the_whole_sample(path):
    def joint(image, weight, label):
        return {"image": image.flip(2), "weight": 1 - weight, "label": label}

    sample = MemmapDataset(path, columns=["weight", "label"], transforms=joint)[8]
    np.testing.assert_array_equal(sample["image"].permute(1, 2, 0), images_of([8])[0][:, ::-1])
    assert (sample["weight"], sample["label"]) == (1 - WEIGHTS[8], 2)


@pytest.mark.parametrize("part", [slice(None), slice(3)], ids=["whole", "view"])
def test_a_data_set_pickles_as_its_absolute_path_and_is_refused_if_rebuilt(
    write, own_path, part, monkeypatch
):
    monkeypatch.chdir(own_path.parent)
    dataset = MemmapDataset("out.bin")[part]
    assert dataset.targets  # which are not pickled
    data = pickle.dumps(dataset)
    assert len(data) < 1000
    monkeypatch.chdir("/")
    assert_is(pickle.loads(data), range(len(dataset)))
    write(own_path.parent, seed=2)
    with pytest.raises(FormatError, match=r"it was built again meanwhile. Open it anew") as caught:
        pickle.loads(data)
    assert caught.value.path == str(own_path.with_suffix(".idx"))
    own_path.with_suffix(".idx").unlink()
    with pytest.raises(FileNotFoundError):
        pickle.loads(data)
