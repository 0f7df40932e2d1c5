import copy
import pickle
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, get_worker_info

from memload import FormatError, MemmapDataset, MissingError, fast_collate, rename
from memload.storage.index import Index
from memload.storage.keys import Keys

HEIGHT, WIDTH, CHANNELS = 5, 7, 3
SAMPLES = 10
# Any order, two rows that no sample uses (0 and 8), and one (4) that serves two.
ROWS = (4, 1, 3, 7, 2, 4, 9, 5, 11, 6)


PIXELS = np.random.default_rng(0).integers(0, 256, (12, HEIGHT, WIDTH, CHANNELS)).astype(np.uint8)
LABELS = np.array([0, 1, 2, 0, 1, 2, 0, 1, 2, 0], np.int64)
LANDMARKS = np.random.default_rng(1).random((SAMPLES, 4, 2), np.float32)
WEIGHTS = np.linspace(0, 1, SAMPLES)
COLUMNS = {"label": LABELS, "landmarks": LANDMARKS, "weight": WEIGHTS, "sharp": WEIGHTS > 0.4}


@pytest.fixture(scope="session")
def write(write_dataset: Callable[..., Index]) -> Callable[..., Path]:
    """A function that writes a data set of ten samples into a folder, and returns its path."""

    def write(folder: Path, **facts: Any) -> Path:
        index = write_dataset(
            folder,
            "out.bin",
            **{
                "rows": (12,),
                "shape": (HEIGHT, WIDTH, CHANNELS),
                "row": np.array(ROWS),
                "flags": np.zeros(SAMPLES, np.uint8),
                "keys": Keys.of([f"{sample:04d}.jpg" for sample in range(SAMPLES)]),
                "columns": COLUMNS,
                **facts,
            },
        )
        return index.path.with_suffix(".bin")

    return write


@pytest.fixture(scope="module", params=[(12,), (5, 5, 2)], ids=["one shard", "three shards"])
def path(
    request: pytest.FixtureRequest,
    write: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    return write(tmp_path_factory.mktemp("data"), rows=request.param)


@pytest.fixture
def own_path(write: Callable[..., Path], tmp_path: Path) -> Path:
    """A data set that a test may change."""
    return write(tmp_path)


def expected_image(sample: int) -> torch.Tensor:
    return torch.from_numpy(PIXELS[ROWS[sample]]).permute(2, 0, 1)


def expected_batch(samples: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(PIXELS[[ROWS[sample] for sample in samples]])


def assert_is(dataset: MemmapDataset, samples: Sequence[int]) -> None:
    """Assert that a data set holds these samples of the whole, in all that it says of itself."""
    assert len(dataset) == len(samples)
    for (image, label, *_), sample in zip(dataset, samples, strict=True):
        assert torch.equal(image, expected_image(sample))
        assert label == LABELS[sample]
    assert list(dataset.keys) == [f"{sample:04d}.jpg" for sample in samples]
    assert dataset.columns.keys() == COLUMNS.keys()
    for name, column in dataset.columns.items():
        np.testing.assert_array_equal(column.numpy(), COLUMNS[name][list(samples)])
    assert torch.equal(dataset.gather(range(len(samples))), expected_batch(samples))


def test_a_sample_is_an_image_and_its_label(path: Path) -> None:
    dataset = MemmapDataset(path)
    assert_is(dataset, range(SAMPLES))
    image, label = MemmapDataset(path, columns=["label"])[3]
    assert (image.dtype, image.shape) == (torch.uint8, (CHANNELS, HEIGHT, WIDTH))
    assert dataset.shape == (CHANNELS, HEIGHT, WIDTH)
    assert image.stride() == (1, WIDTH * CHANNELS, CHANNELS)
    assert type(label) is int
    assert dataset.classes == ["ant", "bee", "cat"]
    assert dataset.class_to_idx == {"ant": 0, "bee": 1, "cat": 2}
    columns = ", ".join(dataset.columns)
    assert repr(dataset) == f"MemmapDataset('{dataset.path}': 10 samples of 5×7×3, {columns})"


def test_a_sample_has_a_whole_number_within_bounds(path: Path) -> None:
    dataset = MemmapDataset(path)
    for index in (np.int64(3), np.uint8(3), torch.tensor(3), 3 - SAMPLES):
        assert torch.equal(dataset[index][0], expected_image(3))
    for outside in (SAMPLES, -SAMPLES - 1, 10**30):
        with pytest.raises(IndexError, match=rf"index {outside} is out of range: .* 10 samples"):
            dataset[outside]
    for wrong in (1.0, "1", None):
        with pytest.raises(TypeError):
            dataset[wrong]  # type: ignore[call-overload]


def test_columns_come_in_the_order_asked_for(path: Path) -> None:
    _, sharp, landmarks, weight = MemmapDataset(path, columns=["sharp", "landmarks", "weight"])[7]
    assert sharp is True
    assert type(weight) is float
    assert weight == WEIGHTS[7]
    assert landmarks.dtype == torch.float32
    np.testing.assert_array_equal(landmarks.numpy(), LANDMARKS[7])
    with pytest.raises(ValueError, match=r"columns names 'lable', which .* It has .*sharp"):
        MemmapDataset(path, columns=["label", "lable"])
    with pytest.raises(TypeError, match=r"columns is 'label' .* Write \['label'\]"):
        MemmapDataset(path, columns="label")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Name each column once"):
        MemmapDataset(path, columns=["label", "label"])


@pytest.mark.parametrize("options", [{}, {"columns": "all"}], ids=["default", "all"])
def test_all_columns_come_with_the_label_first(
    write: Callable[..., Path], tmp_path: Path, options: Any
) -> None:
    columns = {"angle": WEIGHTS, "label": LABELS, "landmarks": LANDMARKS}
    image, label, angle, landmarks = MemmapDataset(write(tmp_path, columns=columns), **options)[4]
    assert torch.equal(image, expected_image(4))
    assert (label, angle) == (LABELS[4], WEIGHTS[4])
    np.testing.assert_array_equal(landmarks.numpy(), LANDMARKS[4])


def test_a_data_set_without_labels_has_no_classes(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    dataset = MemmapDataset(write(tmp_path, columns={"angle": WEIGHTS}, classes=None))
    assert dataset[4][1:] == (WEIGHTS[4],)
    assert dataset.labels is None
    assert (dataset.classes, dataset.class_to_idx) == ([], {})
    assert not hasattr(dataset, "targets")
    with pytest.raises(ValueError, match="has no column 'label', and therefore no classes"):
        dataset.num_classes  # noqa: B018


def test_the_numbers_of_samples_are_positions_in_the_view(
    write: Callable[..., Path], path: Path, tmp_path: Path
) -> None:
    dataset = MemmapDataset(path, columns=["index", "label"])
    assert [sample[1:] for sample in dataset[6:8]] == [(0, LABELS[6]), (1, LABELS[7])]
    assert dataset[-1][1:] == (SAMPLES - 1, LABELS[-1])
    own = write(tmp_path, columns={"label": LABELS, "index": LABELS + 40})
    assert MemmapDataset(own, columns=["index"])[3][1] == LABELS[3] + 40


def test_lists_of_labels_and_names_are_those_of_torchvision(path: Path) -> None:
    dataset = MemmapDataset(path)
    assert dataset.targets == LABELS.tolist()
    assert dataset.samples[4] == ("0004.jpg", 1)
    assert dataset.imgs is dataset.samples
    for part in (dataset[4:6], pickle.loads(pickle.dumps(dataset[4:6]))):
        assert part.samples == [("0004.jpg", 1), ("0005.jpg", 2)]
        assert part.targets == [1, 2]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (LABELS + 4, 7),
        (LABELS.astype(np.uint8), 3),
        (WEIGHTS, "do not number classes: they are float64"),
        (LABELS - 1, "int64 of shape (10,), from -1"),
        (np.zeros((SAMPLES, 2), np.int64), "of shape (10, 2)"),
    ],
    ids=["int64", "uint8", "float", "negative", "two each"],
)
def test_numeric_labels_without_names_count_classes(
    write: Callable[..., Path], tmp_path: Path, labels: np.ndarray, expected: int | str
) -> None:
    dataset = MemmapDataset(write(tmp_path, columns={"label": labels}, classes=None))
    if isinstance(expected, int):
        assert dataset.num_classes == expected
        assert dataset[:1].num_classes == expected
    else:
        with pytest.raises(ValueError, match=re.escape(expected)):
            dataset.num_classes  # noqa: B018


SPLITS = np.array([0, 0, 1, 0, 1, 1, 0, 0, 1, 0])


@pytest.fixture
def with_splits(write: Callable[..., Path], tmp_path: Path) -> Path:
    """A data set with a column of text, ``split``."""
    columns = COLUMNS | {"split": SPLITS}
    return write(tmp_path, columns=columns, categories={"split": ("train", "val")})


def test_a_view_is_chosen_by_the_values_of_columns(with_splits: Path) -> None:
    def names(dataset: MemmapDataset) -> list[str]:
        return [name.lstrip("0")[:-4] for name in dataset.keys]

    dataset = MemmapDataset(with_splits)
    assert dataset.categories == {"split": ["train", "val"]}
    assert dataset.num_classes == 3
    val = dataset.where(split="val")
    assert names(val) == ["2", "4", "5", "8"]
    assert val.categories == dataset.categories
    assert names(val.where(label="cat")) == names(dataset.where(split="val", label="cat"))
    assert names(dataset.where(split="val", label="cat")) == ["2", "5", "8"]
    assert names(dataset.where(label=["ant", "bee"], sharp=True)) == ["4", "6", "7", "9"]
    assert names(dataset.where(weight=1)) == ["9"]
    assert names(dataset.where(split=[])) == []
    assert len(dataset.where()) == SAMPLES
    val.save(dataset.path.with_name("val.idx"))
    saved = MemmapDataset(dataset.path.with_name("val.idx"))
    assert (saved.categories, saved[1][-1]) == (dataset.categories, 1)


@pytest.mark.parametrize(
    ("condition", "error", "message"),
    [
        ({"splt": "train"}, ValueError, "no column 'splt'. .* label, .*, split"),
        ({"split": "test"}, ValueError, "'split' has no value 'test'. It has train, val"),
        ({"split": ["val", 2]}, ValueError, "'split' has no value 2. It has train, val"),
        ({"split": None}, TypeError, "'split' has no value None. It has train, val"),
        ({"label": "dog"}, ValueError, "'label' has no value 'dog'. It has ant, bee, cat"),
        ({"weight": "1"}, TypeError, "'weight' has no value '1'. It has 0.0, 0.1"),
        ({"weight": 3}, ValueError, "'weight' has no value 3. It has 0.0, 0.1"),
        ({"landmarks": 3}, ValueError, r"an array of shape \(4, 2\) for each sample"),
    ],
    ids=str,
)
def test_a_column_or_value_that_is_not_there_is_refused(
    with_splits: Path, condition: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        MemmapDataset(with_splits).where(**condition)


def test_without_columns_a_sample_is_the_image_alone(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    path = write(tmp_path, columns={}, classes=None)
    assert torch.equal(MemmapDataset(path)[3], expected_image(3))
    assert torch.equal(MemmapDataset(path)[2:][1], expected_image(3))
    assert MemmapDataset(path, transform=lambda image: image.ndim)[3] == 3
    assert MemmapDataset(path, transforms=lambda image: ("joint", image.ndim))[3] == ("joint", 3)
    assert repr(MemmapDataset(path)).endswith("10 samples of 5×7×3, no columns)")


@pytest.mark.parametrize("descr", ["<u2", "<i2", "<i4", "<f2", "<f4"])
def test_other_element_types_keep_their_values(
    write: Callable[..., Path], tmp_path: Path, descr: str
) -> None:
    dataset = MemmapDataset(write(tmp_path, descr=descr))
    pixels = PIXELS.astype(descr)
    np.testing.assert_array_equal(dataset[6][0].permute(1, 2, 0).numpy(), pixels[ROWS[6]])
    np.testing.assert_array_equal(dataset.gather([6, 0]).numpy(), pixels[[ROWS[6], ROWS[0]]])


def test_transform_gets_the_image_and_target_transform_the_first_column(path: Path) -> None:
    dataset = MemmapDataset(
        path, columns=["weight", "label"], transform=torch.Tensor.float, target_transform=str
    )
    for view, index in ((dataset, 6), (dataset[4:], 2), (pickle.loads(pickle.dumps(dataset)), 6)):
        image, weight, label = view[index]
        assert torch.equal(image, expected_image(6).float())
        assert (weight, label) == (str(WEIGHTS[6]), 0)


def test_transforms_gets_image_and_columns_together_and_returns_the_sample(path: Path) -> None:
    def joint(image: torch.Tensor, landmarks: torch.Tensor, label: int) -> dict[str, Any]:
        return {"image": image.flip(2), "landmarks": WIDTH - 1 - landmarks, "label": label}

    sample = MemmapDataset(path, columns=["landmarks", "label"], transforms=joint)[8]
    assert torch.equal(sample["image"], expected_image(8).flip(2))
    np.testing.assert_array_equal(sample["landmarks"].numpy(), WIDTH - 1 - LANDMARKS[8])
    assert sample["label"] == 2
    with pytest.raises(ValueError, match="transforms cannot be combined"):
        MemmapDataset(path, transforms=joint, target_transform=str)


@pytest.mark.parametrize(
    ("indices", "expected"),
    [
        ([3, -1, 3, 0], [3, 9, 3, 0]),
        (np.array([3, 9, 3, 0], np.uint8), [3, 9, 3, 0]),
        (torch.tensor([3, -1, 3, 0]), [3, 9, 3, 0]),
        ([torch.tensor(3), torch.tensor(-1)], [3, 9]),
        (LABELS == 1, [1, 4, 7]),
        (torch.from_numpy(LABELS == 1), [1, 4, 7]),
        ((LABELS == 1).tolist(), [1, 4, 7]),
        ([], []),
        (np.zeros(SAMPLES, bool), []),
        (range(0), []),
    ],
    ids=str,
)
def test_gather_and_subset_take_whole_numbers_and_masks(
    path: Path, indices: Any, expected: list[int]
) -> None:
    dataset = MemmapDataset(path)
    assert torch.equal(dataset.gather(indices), expected_batch(expected))
    assert_is(dataset.subset(indices), expected)
    out = torch.zeros((len(expected), HEIGHT, WIDTH, CHANNELS), dtype=torch.uint8)
    assert dataset.gather(indices, out=out) is out
    assert torch.equal(out, expected_batch(expected))


@pytest.mark.parametrize(
    ("out", "told"),
    [
        (torch.empty(2, CHANNELS, HEIGHT, WIDTH, dtype=torch.uint8), r"\(2, 3, 5, 7\)"),
        (torch.empty(2, HEIGHT, WIDTH, CHANNELS), "of torch.float32"),
        (torch.empty(4, HEIGHT, WIDTH, CHANNELS, dtype=torch.uint8)[::2], "not contiguous"),
        (torch.empty(2, HEIGHT, WIDTH, CHANNELS, dtype=torch.uint8, device="meta"), "on meta"),
    ],
    ids=["channels first", "float", "with gaps", "device"],
)
def test_gather_refuses_memory_that_does_not_fit(path: Path, out: torch.Tensor, told: str) -> None:
    needed = r"\(2, 5, 7, 3\) of torch.uint8 on cpu, contiguous, is needed"
    with pytest.raises(ValueError, match=rf"out is .*{told}.*, but {needed}"):
        MemmapDataset(path).gather([0, 1], out=out)
    with pytest.raises(TypeError, match="out is of type ndarray instead of a tensor"):
        MemmapDataset(path).gather([0, 1], out=np.zeros(2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "indices",
    [[0, SAMPLES], [-SAMPLES - 1], [0.5], [[1, 2]], 3, np.ones(SAMPLES - 1, bool), ["a"]],
    ids=["above", "below", "float", "2-d", "0-d", "short mask", "text"],
)
def test_wrong_indices_raise_index_error(path: Path, indices: Any) -> None:
    dataset = MemmapDataset(path)
    for use in (dataset.subset, dataset.gather):
        with pytest.raises(IndexError, match=r"out of range|indices are .* must be integers"):
            use(indices)


def test_a_subset_of_pixels_that_were_renamed_is_not_saved(own_path: Path) -> None:
    dataset = MemmapDataset(own_path)
    rename(own_path, own_path.with_name("new.bin"))
    target = own_path.with_name("subset.idx")
    with pytest.raises(MissingError, match=own_path.name):
        dataset.subset([0]).save(target)
    assert not target.exists()


def test_a_saved_subset_opens_over_the_same_pixels(own_path: Path) -> None:
    dataset, target = MemmapDataset(own_path), own_path.with_name("part.idx")
    dataset.subset([7, 2, 2]).save(target)
    saved = MemmapDataset(target)
    assert_is(saved, [7, 2, 2])
    assert (saved.path, saved.classes) == (target, dataset.classes)
    assert target.stat().st_size < 10_000
    before = target.read_bytes()
    with pytest.raises(FileExistsError, match=r"part.idx exists already. Say overwrite=True"):
        dataset[:3].save(target)
    assert target.read_bytes() == before
    dataset[:3].save(target, overwrite=True)
    assert_is(MemmapDataset(target), range(3))
    views = (dataset, saved, dataset[:3], dataset[1:4])
    assert len({view.fingerprint for view in views}) == 4
    assert dataset[:3].fingerprint == dataset.subset([0, 1, 2]).fingerprint


def test_an_index_is_saved_beside_its_pixels_under_a_name_of_its_kind(own_path: Path) -> None:
    part, other = MemmapDataset(own_path)[:2], own_path.with_name("other")
    other.mkdir()
    with pytest.raises(ValueError, match=r"part.idx', but the index must be in the folder of the"):
        part.save(other / "part.idx")
    assert not list(other.iterdir())
    for name in ("part.bin", "part", "part.idx.txt"):
        with pytest.raises(ValueError, match=r"its name must end in '\.idx'"):
            part.save(own_path.with_name(name))


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
            image, label, *_ = dataset[index]
            assert torch.equal(image, expected_image(sample))
            assert label == LABELS[sample]
            assert torch.equal(dataset.gather([index]), expected_batch([sample]))


@pytest.mark.parametrize("part", [slice(None), slice(3)], ids=["whole", "subset"])
def test_a_data_set_rebuilt_since_it_was_pickled_is_refused(
    write: Callable[..., Path], own_path: Path, part: slice
) -> None:
    data = pickle.dumps(MemmapDataset(own_path)[part])
    write(own_path.parent, seed=2)
    with pytest.raises(FormatError, match=r"it was built again meanwhile. Open it anew") as caught:
        pickle.loads(data)
    assert caught.value.path == str(own_path.with_suffix(".idx"))
    own_path.with_suffix(".idx").unlink()
    with pytest.raises(FileNotFoundError):
        pickle.loads(data)


def test_writing_into_a_tensor_leaves_the_file_alone(path: Path) -> None:
    dataset, other = MemmapDataset(path), MemmapDataset(path)
    files = {file: file.read_bytes() for file in path.parent.glob("*.*")}
    for image, *_ in dataset:
        image.fill_(7)
    for column in dataset.columns.values():
        column.zero_()
    assert dataset[0][0].unique().tolist() == [7]
    assert {file: file.read_bytes() for file in files} == files
    assert_is(other, range(SAMPLES))
    assert_is(MemmapDataset(path), range(SAMPLES))


def test_a_relative_path_is_found_from_another_folder(
    own_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = own_path.with_name("elsewhere")
    elsewhere.mkdir()
    monkeypatch.chdir(own_path.parent)
    dataset = MemmapDataset("out.bin")
    data = pickle.dumps(dataset)
    assert len(data) < 1000
    monkeypatch.chdir(elsewhere)
    assert_is(pickle.loads(data), range(SAMPLES))
    dataset[:2].save(own_path.with_name("two.idx"))
    assert_is(MemmapDataset("../two.idx"), range(2))


class Doubled(MemmapDataset):
    """With a method of its own as the transform."""

    def __init__(self, path: Path, factor: int = 2) -> None:
        super().__init__(path, transform=self.scale)
        self.factor = factor

    def scale(self, image: torch.Tensor) -> torch.Tensor:
        return image.int() * self.factor


def test_a_subclass_stays_one_through_subsets_copies_and_pickles(path: Path) -> None:
    dataset = Doubled(path, 3)
    views = (
        dataset[1:][:-1],
        pickle.loads(pickle.dumps(dataset[1:])),
        copy.deepcopy(dataset)[1:],
    )
    for view in views:
        assert type(view) is Doubled
        assert torch.equal(view[2][0], expected_image(3).int() * 3)
    copied = copy.deepcopy(dataset)
    copied.factor = 5
    assert torch.equal(copied[3][0], expected_image(3).int() * 5)
    assert torch.equal(dataset[3][0], expected_image(3).int() * 3)


class Collated:
    """Collates, and says whether that was done in a worker, in memory that the loop shares."""

    def __call__(self, samples: list[Any]) -> Any:
        images, labels = fast_collate(samples)
        return images, labels, get_worker_info() is not None and images.is_shared()


@pytest.mark.slow
def test_a_subset_reaches_workers_that_do_not_fork(path: Path) -> None:
    dataset = MemmapDataset(path, columns=["label"])[2:]
    loader = DataLoader(
        dataset, 3, num_workers=2, collate_fn=Collated(), multiprocessing_context="forkserver"
    )
    images, labels, shared = zip(*loader, strict=True)
    assert shared == (True,) * 3
    assert torch.equal(torch.cat(images).permute(0, 2, 3, 1), expected_batch(range(2, SAMPLES)))
    assert torch.cat(labels).tolist() == LABELS[2:].tolist()
