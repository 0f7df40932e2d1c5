"""Several data sets read as one, without a file of their own."""

import copy
import os
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, random_split

import memload
from memload import CudaPrefetcher, Loader, MemmapDataset, fast_collate, transforms

CLASSES = ("ant", "bee", "cat"), ("cat", "dog", "ant")
SIZES = 10, 7
LABELS = [names[n % 3] for names, size in zip(CLASSES, SIZES, strict=True) for n in range(size)]
NUMBERS = [*range(1000, 1010), *range(700, 707)]


@pytest.fixture(scope="module")
def paths(tmp_path_factory, write_dataset, add_array):
    """Data sets in two folders, of 10 and 7 samples, with masks; rows of the second in reverse."""
    found = []
    for size, classes in zip(SIZES, CLASSES, strict=True):
        index = write_dataset(
            tmp_path_factory.mktemp("folder"),
            f"{size}.bin",
            rows=(size - 3, 3),
            seed=size,
            classes=classes,
            columns={"label": np.arange(size) % 3, "number": np.arange(size) + 100 * size},
            statistics={"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.2, 0.2]},
        )
        masks = np.random.default_rng(size).integers(0, 256, (size, 4, 6)).astype(np.uint8)
        rows = {} if size == 10 else {"mask": np.arange(size)[::-1].copy()}
        found.append(add_array(index, "mask", masks, "mask", other_rows=rows).path)
    return found


@pytest.fixture
def linked(paths, tmp_path):
    """The same in one folder."""
    for path in paths:
        for file in path.parent.iterdir():
            os.link(file, tmp_path / file.name)
    return [tmp_path / path.name for path in paths]


def both(paths, name="image"):
    """What is stored, of the first and then of the second."""
    parts = [MemmapDataset(path) for path in paths]
    return np.concatenate([part.gather(range(len(part)), name=name).numpy() for part in parts])


def check(dataset, paths):
    """Check that a data set, and an epoch over it, has all samples of the first, then the second."""
    loader = Loader(dataset, 5, device="cpu")
    images, labels, masks, numbers = map(torch.cat, zip(*loader, strict=True))
    np.testing.assert_array_equal(images.permute(0, 2, 3, 1).numpy(), both(paths))
    np.testing.assert_array_equal(masks.numpy(), both(paths, "mask"))
    assert numbers.tolist() == NUMBERS
    assert [loader.dataset.classes[label] for label in labels.tolist()] == LABELS
    for batch in Loader(dataset, 5, shuffle=True, columns=["mask", "index"], device="cpu"):
        assert torch.equal(batch.mask, masks[batch.index])
        assert torch.equal(batch.images, images[batch.index])


def test_lists_concatdatasets_and_what_concat_writes_are_read_as_one(paths, linked, tmp_path):
    one, two = (MemmapDataset(path) for path in paths)
    assert type(one + two) is ConcatDataset
    for parts in ([one, two], one + two, [str(paths[0]), two], tuple(paths), MemmapDataset(paths)):
        check(parts, paths)
    memload.concat(*linked).write(tmp_path / "all.idx")
    check(tmp_path / "all.idx", paths)
    written, in_memory = MemmapDataset(tmp_path / "all.idx"), MemmapDataset(linked)
    assert (list(written.keys), written.classes) == (list(in_memory.keys), in_memory.classes)
    in_memory.save(tmp_path / "saved.idx")
    assert MemmapDataset(tmp_path / "saved.idx").fingerprint == written.fingerprint
    with pytest.raises(ValueError, match="must be in the folder of the pixels"):
        MemmapDataset(paths).save(paths[0].with_name("saved.idx"))


def test_samples_are_the_mapped_files_themselves(paths):
    dataset = MemmapDataset(paths)
    assert (len(dataset), dataset.classes) == (17, ["ant", "bee", "cat", "dog"])
    image, label, mask, number = dataset[11]
    expected = MemmapDataset(paths[1])[1]
    assert torch.equal(image, expected[0])
    assert torch.equal(mask, expected[2])
    assert (label, number) == (3, 701)
    mask[0, 0] ^= 1
    assert torch.equal(dataset[11][2], mask)
    named = f"[{str(paths[0])!r}, {str(paths[1])!r}]: 17 samples of 4×6×3, label, mask, number"
    assert repr(dataset) == f"MemmapDataset({named})"
    assert len(dataset.where(label="cat")) == 6


def test_views_of_views_are_put_together(paths):
    a, b = (MemmapDataset(path, columns=["number"]) for path in paths)
    inner = ConcatDataset([a.subset([8, 1]), Subset(b, [6, 2])])
    for parts in (
        ConcatDataset([inner, b[1:2]]),
        [inner, b[1:2]],
        Subset(ConcatDataset([a, b]), [8, 1, 16, 12, 11]),
        Subset(Subset(ConcatDataset([a, b]), [11, 12, 16, 8, 1]), [3, 4, 2, 1, 0]),
        [MemmapDataset([a, b]).subset([8, 1, 16]), MemmapDataset([b[::-1], a]).subset([4, 5])],
    ):
        (batch,) = pickle.loads(pickle.dumps(Loader(parts, 5, device="cpu")))
        assert batch._fields == ("images", "number")
        assert batch.number.tolist() == [1008, 1001, 706, 702, 701]
        expected = both(paths)[[8, 1, 16, 12, 11]]
        np.testing.assert_array_equal(batch.images.permute(0, 2, 3, 1).numpy(), expected)
    parts = random_split(MemmapDataset(paths[0]), [6, 4], torch.Generator().manual_seed(1))
    numbers = [number for part in parts for batch in Loader(part, 3) for number in batch.number]
    assert sorted(numbers) == NUMBERS[:10]


def test_it_pickles_as_paths_and_resumes_anywhere(paths, linked):
    loader = Loader(paths, 4, shuffle=True, seed=3, device="cpu")
    whole = [batch.number.tolist() for batch in loader]
    loader.set_epoch(0)
    first = [batch.number.tolist() for _, batch in zip(range(2), loader, strict=False)]
    state = loader.state_dict()
    assert len(pickle.dumps(loader.dataset)) < 3000
    for other in (
        copy.deepcopy(loader),
        Loader(linked, 4, shuffle=True, seed=3, device="cpu"),
        Loader(ConcatDataset(list(map(MemmapDataset, linked))), 4, shuffle=True, seed=3),
    ):
        other.load_state_dict(state)
        assert first + [batch.number.tolist() for batch in other] == whole
    for wrong in (paths[::-1], paths[:1], [paths[0], MemmapDataset(paths[1])[::-1]]):
        with pytest.raises(ValueError, match="state belongs to another Loader: its fingerprint is"):
            Loader(wrong, 4, shuffle=True, seed=3, device="cpu").load_state_dict(state)


def test_transforms_follow_masks_and_get_statistics_and_classes_of_all(paths):
    mix = transforms.Compose([transforms.Normalize(), transforms.MixUp()])
    batch = next(iter(Loader(paths, 5, columns=["label"], transform=mix, device="cpu")))
    assert batch.labels.shape == (5, 4)
    parts = [MemmapDataset(path, columns=["mask", "label"]) for path in paths]
    batches = DataLoader(Subset(ConcatDataset(parts), range(17)), 6, collate_fn=fast_collate)
    flip = transforms.RandomHorizontalFlip(1)
    found = [batch[1] for batch in CudaPrefetcher(batches, transform=flip, device="cpu")]
    np.testing.assert_array_equal(torch.cat(found).numpy(), both(paths, "mask")[..., ::-1])


def test_a_list_of_one_is_saved_without_the_arrays_that_it_does_not_name(linked, tmp_path):
    MemmapDataset(linked[:1], columns=["label"]).save(tmp_path / "without.idx")
    without, whole = MemmapDataset(tmp_path / "without.idx"), MemmapDataset(linked[0])
    assert [*without.arrays, *without.columns] == ["image", "label", "number"]
    np.testing.assert_array_equal(without.gather(range(10)), whole.gather(range(10)))


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["one", "two", "three"], {"columns": ["label"]}, None),
        (["one", "two"], {}, r"differ in 'age': int64 in one\.idx, float64"),
        (["one", "two"], {"columns": ["age"]}, r"differ in 'age': int64 in one\.idx, fl"),
        (["one", "two"], {"columns": "all"}, r"differ in 'age': int64 in one\.idx, floa"),
        (
            ["one", "three"],
            {},
            r"differ in 'age': int64 in one.*MemmapDataset, columns=\['label'\]",
        ),
        (["three", "one"], {"columns": ["depth"]}, "columns names 'depth', .* It has label, age"),
    ],
)
def test_data_sets_that_differ_are_read_if_what_is_asked_for_is_the_same(
    make_dataset, add_array, names, options, message
):
    columns = {"label": np.arange(5) % 3}
    make_dataset("one.bin", columns=columns | {"age": np.arange(5)})
    make_dataset("two.bin", columns=columns | {"age": np.arange(5) / 2})
    folder = add_array(make_dataset("three.bin", columns=columns), "depth", np.zeros((5, 2))).path
    paths = [folder.with_name(f"{name}.idx") for name in names]
    if message is None:
        parts = [MemmapDataset(path, **options) for path in paths]
        for loader in (Loader(paths, 15, **options, device="cpu"), Loader(parts, 15)):
            (batch,) = loader
            assert (batch._fields, batch.labels.tolist()) == (
                ("images", "labels"),
                [0, 1, 2, 0, 1] * 3,
            )
    for use in (Loader, MemmapDataset) if message else ():
        with pytest.raises(ValueError, match=message):
            use(paths, **options)
