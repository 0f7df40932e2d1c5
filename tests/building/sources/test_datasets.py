"""Map-style data sets, arrays, data sets of memload's, and lists of classes from elsewhere."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memload
from memload.building.sources.arrays import ArrayFile
from memload.building.sources.classes import PinnedClasses, read_classes, refuse_splits
from memload.building.sources.dataset import DatasetSource
from memload.building.sources.existing import ExistingDataset
from memload.building.sources.folder import ImageFolder
from memload.building.sources.opening import open_source
from memload.errors import DecodeError, SourceError


class Samples:
    """Samples made by a function of their number."""

    def __init__(self, make: Callable[[int], Any], count: int = 4) -> None:
        self.make, self.count = make, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def image(number: int) -> np.ndarray:
    return np.full((4, 5, 3), number, np.uint8)


@pytest.mark.parametrize("entry", ["image", "img", "jpg", "png", "webp"])
@pytest.mark.parametrize("label", ["label", "labels", "fine_label", "cls", "target"])
def test_common_names_are_found(entry: str, label: str) -> None:
    source = DatasetSource(Samples(lambda i: {entry: image(i), label: i % 2, "w": i / 2}))
    assert source[3].columns == {"label": 1, "w": 1.5}
    np.testing.assert_array_equal(source[3].image, image(3))


@pytest.mark.parametrize("label", ["label", "labels", "fine_label", "cls", "target"])
def test_common_names_are_found_in_targets(label: str) -> None:
    source = DatasetSource(Samples(lambda i: (image(i), {label: i % 2, "w": i / 2})))
    assert source[3].columns == {"label": 1, "w": 1.5}


@pytest.mark.parametrize(
    ("sample", "notes"),
    [
        (image(0), ["no labels: the data set has only images"]),
        ((image(0), 3), []),
        ((image(0), {"kind": 3}), ["no labels: there is no entry label, labels, fine_label, cls"]),
    ],
)
def test_a_data_set_without_labels_is_noted(sample: Any, notes: list[str]) -> None:
    source = DatasetSource(Samples(lambda i: sample))
    assert [note.partition(" or ")[0] for note in source.notes] == notes


def test_entries_may_be_named() -> None:
    samples = Samples(lambda i: {"a": image(i), "image": image(9), "b": i, "c": i / 2, "d": 1})
    source = DatasetSource(samples, image="a", columns={"label": "b", "weight": "c"})
    assert source[2].columns == {"label": 2, "weight": 1.0}
    np.testing.assert_array_equal(source[2].image, image(2))
    assert DatasetSource(samples, image="a", columns=["c", "d"])[2].columns == {"c": 1.0, "d": 1}


def test_two_columns_of_one_entry_are_an_error() -> None:
    samples = Samples(lambda i: {"image": image(i), "b": i})
    with pytest.raises(ValueError, match="the same entry"):
        DatasetSource(samples, columns={"label": "b", "again": "b"})


def test_a_missing_entry_is_told_with_what_is_there() -> None:
    with pytest.raises(SourceError, match=r"only \['foto', 'label'\]"):
        DatasetSource(Samples(lambda i: {"foto": image(i), "label": 0}))


def test_texts_are_left_out_and_reported() -> None:
    source = DatasetSource(Samples(lambda i: {"image": image(i), "label": 1, "caption": "a dog"}))
    assert source[0].columns == {"label": 1}
    assert source.notes == ["skipped 1 column: caption (text)"]


def test_labels_of_text_need_a_list_of_classes() -> None:
    samples = Samples(lambda i: (image(i), "ab"[i % 2]))
    with pytest.raises(SourceError, match="classes="):
        DatasetSource(samples)
    source = DatasetSource(samples, classes=["b", "a"])
    assert [source[i].columns["label"] for i in range(4)] == [1, 0, 1, 0]
    with pytest.raises(DecodeError, match="'b'"):
        DatasetSource(samples, classes=["a", "c"])[1]


def test_names_may_be_given() -> None:
    source = DatasetSource(Samples(lambda i: (image(i), i)), key=["a", "b", "c", "d"])
    assert source[2].key == source.keys[2] == "c"
    with pytest.raises(ValueError, match="Hugging Face"):
        DatasetSource(Samples(lambda i: (image(i), i)), key="name")


def test_samples_are_asked_for_together_where_the_data_set_can() -> None:
    asked = []

    class Batched(Samples):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            asked.append(indices)
            return [self[index] for index in indices]

    source = DatasetSource(Batched(lambda i: (image(i), i)))
    assert [record.columns["label"] for record in source.__getitems__([3, 1])] == [3, 1]
    assert asked == [[3, 1]]
    assert not hasattr(DatasetSource(Samples(lambda i: (image(i), i))), "__getitems__")


@pytest.mark.slow  # the extra test-slow has the library
class TestHuggingFace:
    @pytest.fixture
    def dataset(self, containers: Any, tqdm_monitor: None) -> Any:
        datasets = pytest.importorskip("datasets")
        features = datasets.Features(
            {
                "img": datasets.Image(),
                "fine_label": datasets.ClassLabel(names=["ant", "bee", "cat"]),
                "split": datasets.Value("string"),
                "caption": datasets.Value("string"),
            }
        )
        columns = {
            "img": [{"bytes": data, "path": None} for data in containers.pictures.values()],
            "fine_label": containers.labels,
            "split": containers.splits,
            "caption": list(containers.pictures),
        }
        return datasets.Dataset.from_dict(columns, features=features)

    def test_columns_classes_and_categories_are_found(self, dataset: Any, containers: Any) -> None:
        source = DatasetSource(dataset)
        assert source.classes == ["ant", "bee", "cat"]
        assert source.categories == {"split": ["train", "val"]}
        assert source.notes == ["skipped 1 column: caption (text)"]
        records = source.__getitems__(list(range(30)))
        assert [record.columns["label"] for record in records] == containers.labels
        splits = [source.categories["split"][record.columns["split"]] for record in records]
        assert splits == containers.splits

    def test_other_columns_of_class_labels_keep_their_names(self, dataset: Any) -> None:
        import datasets

        kind = datasets.ClassLabel(names=["p", "q", "r"])
        values = {"coarse": [1] * 30, "unknown": [-1] * 30, "missing": [None, *[1] * 29]}
        for name, numbers in values.items():
            dataset = dataset.add_column(name, numbers).cast_column(name, kind)
        source = DatasetSource(dataset)
        assert source.categories == {"split": ["train", "val"], "coarse": ["p", "q", "r"]}
        assert source[5].columns["coarse"] == 1
        assert source[5].columns["unknown"] == -1
        assert np.isnan(source[0].columns["missing"])

    def test_images_that_are_not_decoded_are_taken(self, dataset: Any, containers: Any) -> None:
        import datasets

        source = DatasetSource(dataset.cast_column("img", datasets.Image(decode=False)))
        assert [source[i].image for i in range(30)] == list(containers.pictures.values())

    def test_a_column_may_have_the_names(self, dataset: Any, containers: Any) -> None:
        assert list(DatasetSource(dataset, key="caption").keys) == list(containers.pictures)

    @pytest.mark.parametrize("name", ["label", "target"])
    def test_labels_of_text_become_classes(self, dataset: Any, name: str) -> None:
        source = DatasetSource(dataset.remove_columns("fine_label").rename_column("split", name))
        assert source.classes == ["train", "val"]
        assert source[0].columns["label"] == 1

    @pytest.mark.parametrize("form", ["torch", "numpy"])
    def test_formats_give_the_same(self, dataset: Any, tmp_path: Path, form: str) -> None:
        for name, rows in {"a": dataset, "b": dataset.with_format(form)}.items():
            memload.build(rows, tmp_path / f"{name}.bin", size=16, num_workers=0)
        assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()
        a, b = (memload.Index.open(tmp_path / f"{name}.bin").columns for name in "ab")
        assert {name: values.tolist() for name, values in a.items()} == {
            name: values.tolist() for name, values in b.items()
        }

    def test_columns_that_cannot_be_kept_are_told_and_missing_numbers_become_nan(
        self, dataset: Any
    ) -> None:
        lists = [[1] * (number % 3) for number in range(30)]
        ages = [None, *range(29)]
        rows = dataset.add_column("lists", lists).add_column("age", ages).with_format("numpy")
        source = DatasetSource(rows)
        assert source.notes == ["skipped 2 columns: caption (text), lists (of type List)"]
        np.testing.assert_array_equal(
            [record.columns["age"] for record in source], [np.nan, *ages[1:]]
        )
        with pytest.raises(SourceError, match="1 label is missing"):
            DatasetSource(rows, columns={"label": "age"})

    def test_named_columns_keep_their_texts(self, dataset: Any) -> None:
        source = DatasetSource(dataset, columns={"part": "split"}, image="img")
        assert source.categories == {"part": ["train", "val"]}

    def test_what_a_transform_returns_is_taken(self, dataset: Any) -> None:
        rows = dataset.with_transform(
            lambda rows: {"image": rows["img"], "age": rows["fine_label"]}
        )
        assert DatasetSource(rows)[29].columns == {"age": 2}

    def test_several_or_streamed_data_sets_are_refused(self, dataset: Any, tmp_path: Path) -> None:
        import datasets

        with pytest.raises(TypeError, match=r"\(train, test\)\. .*source\['train'\]"):
            open_source(datasets.DatasetDict(train=dataset, test=dataset))
        with pytest.raises(TypeError, match="streaming=False"):
            open_source(dataset.to_iterable_dataset())
        dataset.save_to_disk(tmp_path / "saved")
        datasets.DatasetDict(train=dataset).save_to_disk(tmp_path / "parts")
        for name, message in [
            ("saved", r"load_from_disk\('.*/saved'\), "),
            ("parts", r"load_from_disk\('.*/parts'\)\['train'\]"),
            ("saved/data-00000-of-00001.arrow", r"Dataset\.from_file"),
        ]:
            with pytest.raises(SourceError, match=message):
                open_source(tmp_path / name)


class IterableDataset:
    """As torch's, which has all methods of map-style data sets."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError

    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize("source", [iter(()), (x for x in ()), IterableDataset()])
def test_an_iterable_is_refused_with_a_remedy(source: Any) -> None:
    with pytest.raises(TypeError, match=r"list\(source\)"):
        open_source(source)


def test_labels_of_text_count_into_the_classes_of_the_build(tmp_path: Path) -> None:
    samples = [(image(number), "ab"[number % 2]) for number in range(4)]
    memload.build(samples, tmp_path / "out.bin", size=4, num_workers=0, classes=["b", "c", "a"])
    dataset = memload.MemmapDataset(tmp_path / "out.bin")
    assert (dataset.classes, dataset.labels.tolist()) == (["b", "c", "a"], [2, 0, 2, 0])


# ------------------------------------------------------------------------------------------ arrays


def test_labels_of_arrays_may_be_texts(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((3, 3, 8, 9), np.uint8))
    np.save(tmp_path / "y.npy", ["cat", "ant", "cat"])
    source = memload.open_source(tmp_path / "x.npy", labels=tmp_path / "y.npy")
    assert source.classes == ["ant", "cat"]
    assert source[0].columns["label"] == 1
    (note,) = source.notes
    assert "(3, 3, 8, 9) looks like (N, C, H, W)" in note


@pytest.mark.parametrize("shape", [(5, 4, 3), (5, 4, 3, 2)])
def test_an_array_file_gives_its_images(tmp_path: Path, shape: tuple[int, ...]) -> None:
    images = np.random.default_rng(0).integers(0, 999, shape).astype(np.uint16)
    np.save(tmp_path / "x.npy", images)
    np.save(tmp_path / "y.npy", np.arange(5)[:, None])
    source = open_source(tmp_path / "x.npy", labels=tmp_path / "y.npy")
    assert source[3].columns == {"label": 3}
    np.testing.assert_array_equal(source[3].image, images[3])


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (np.zeros((3, 3)), None, "shape"),
        (np.zeros((0, 3, 3)), None, "shape"),
        (np.zeros((3, 2, 2), np.uint8), np.zeros(4), "y.npy"),
        (np.zeros((3, 2, 2), np.uint8), np.array([1j, 2, 3]), "y.npy"),
        (np.zeros((3, 2, 2)), None, "float64.*Convert it to float32"),
        (np.zeros((3, 2, 2), bool), None, "bool.*Convert it to uint8"),
        (np.array([image(1), image(2)[1:], None], object), None, "holds Python objects"),
    ],
)
def test_wrong_arrays_are_errors(
    tmp_path: Path, images: np.ndarray, labels: np.ndarray | None, message: str
) -> None:
    np.save(tmp_path / "x.npy", images)
    if labels is not None:
        np.save(tmp_path / "y.npy", labels)
    with pytest.raises(SourceError, match=message):
        ArrayFile(tmp_path / "x.npy", labels=None if labels is None else tmp_path / "y.npy")


def test_a_file_that_is_no_array_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(b"nothing")
    with pytest.raises(SourceError, match=r"no \.npy file"):
        ArrayFile(tmp_path / "x.npy")
    np.savez(tmp_path / "z.npy", a=np.zeros(3))
    (tmp_path / "z.npy.npz").rename(tmp_path / "z.npy")
    with pytest.raises(SourceError, match=r"\.npz"):
        ArrayFile(tmp_path / "z.npy")
    with pytest.raises(SourceError, match="No such file"):
        ArrayFile(tmp_path / "missing.npy")


# ------------------------------------------------------------------------------ data sets, classes


def test_a_data_set_is_a_source_with_all_it_has(tmp_path: Path, write_dataset: Any) -> None:
    write_dataset(tmp_path, rows=(3, 4), points=("p",), columns={"label": np.arange(7) % 3, "p": np.zeros((7, 2, 2))})  # fmt: skip
    dataset = memload.MemmapDataset(tmp_path / "made.bin")
    source = ExistingDataset(tmp_path / "made.bin")
    assert source.classes == list(dataset.classes)
    assert list(source.keys) == list(dataset.keys)
    assert source.schema["p"].points
    for index in range(7):
        np.testing.assert_array_equal(source[index].image, dataset.gather([index])[0].numpy())
        assert source[index].columns["label"] == index % 3


def test_a_row_that_has_changed_is_rejected(tmp_path: Path, write_dataset: Any) -> None:
    write_dataset(tmp_path, rows=(5,))
    with (tmp_path / "made.bin").open("r+b") as file:
        file.seek(4096 + 2 * 72)
        file.write(b"changed")
    source = ExistingDataset(tmp_path / "made.bin")
    assert source[1].image.shape == (4, 6, 3)
    with pytest.raises(DecodeError, match="row 2"):
        source[2]


def test_labels_are_translated_to_a_given_list(folder: Path) -> None:
    pinned = PinnedClasses(ImageFolder(folder), ["zebra", "cat", "ant", "bee"])
    assert [pinned.classes[record.columns["label"]] for record in pinned] == [
        name.split("/")[0] for name in pinned.keys
    ]


def test_an_unknown_class_is_named(folder: Path) -> None:
    with pytest.raises(SourceError, match="cat"):
        PinnedClasses(ImageFolder(folder), ["ant", "bee"])


def test_numbers_get_names() -> None:
    source = DatasetSource(Samples(lambda i: (image(i), i)))
    pinned = PinnedClasses(source, list("abcd"))
    assert (pinned.classes, pinned[3].columns["label"]) == (tuple("abcd"), 3)
    with pytest.raises(SourceError, match="no labels"):
        PinnedClasses(DatasetSource(Samples(image)), ["a"])


def test_classes_are_read_from_anything_that_has_them(output: Path, tmp_path: Path) -> None:
    names = ["ant", "bee", "cat"]
    (tmp_path / "names.txt").write_text("ant\nbee\ncat\n")
    dataset = memload.MemmapDataset(output)
    for classes in (names, tuple(names), output, str(output), dataset, tmp_path / "names.txt"):
        assert read_classes(classes) == names


@pytest.mark.parametrize("classes", [[], ["a", "a"], [1, 2], {"a": 0}, 7])
def test_wrong_lists_of_classes_are_errors(classes: Any) -> None:
    with pytest.raises(ValueError, match="classes"):
        read_classes(classes)


@pytest.mark.parametrize("names", [["train", "val"], ["test"], ["Train", "VALIDATION", "test"]])
def test_splits_are_not_classes(tmp_path: Path, folder: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "x.jpg").touch()
    source = ImageFolder(tmp_path / "data")
    with pytest.raises(SourceError, match=f"--classes {','.join(sorted(names))}"):
        refuse_splits(source)
    refuse_splits(ImageFolder(folder))


def test_a_label_outside_the_classes_of_a_pinned_source_is_rejected() -> None:
    source = DatasetSource(Samples(lambda i: (image(i), i - 1)), classes=["a", "b"])
    pinned = PinnedClasses(source, ["b", "c", "a"])
    for index, label in enumerate([None, 2, 0, None]):
        if label is None:
            with pytest.raises(DecodeError, match="not within 0 to 1"):
                pinned[index]
        else:
            assert pinned[index].columns == {"label": label}


@pytest.mark.slow
@pytest.mark.parametrize("labels", [["a", None, "b"], ["a", "", "b"], [1, None, 0], [1, None, 0.5]])
def test_missing_labels_of_hugging_face_are_an_error(labels: Any, tqdm_monitor: None) -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"label": labels, "image": [[[1]]] * 3})
    with pytest.raises(SourceError, match="1 label is missing, the first one that of sample 1"):
        DatasetSource(dataset)
    assert DatasetSource(dataset.select([0, 2]), columns=["label"])[0].columns["label"] == 1 - (
        "a" in labels
    )


def test_a_sample_whose_label_is_nan_is_rejected() -> None:
    source = DatasetSource(Samples(lambda i: (image(i), [0.5, np.nan, 1.5, 2][i])))
    with pytest.raises(DecodeError, match="NaN"):
        source[1]
    assert source[2].columns == {"label": 1.5}
