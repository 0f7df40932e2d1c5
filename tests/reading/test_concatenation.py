"""Several data sets read as one, without a file of their own."""

import copy
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset, random_split

import memload
from memload import (
    CudaPrefetcher,
    FormatError,
    Index,
    Loader,
    MemmapDataset,
    fast_collate,
    transforms,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [tmp_path_factory.mktemp(name) for name in ("a", "b")]


@pytest.fixture(scope="module")
def paths(
    folders: list[Path],
    write_dataset: Callable[..., Index],
    add_array: Callable[..., Index],
) -> list[Path]:
    """Data sets in two folders, of 10 and 7 samples, with masks; rows of the second in reverse."""
    found = []
    for folder, size in zip(folders, (10, 7), strict=True):
        rng = np.random.default_rng(size)
        index = write_dataset(
            folder,
            f"{folder.name}.bin",
            rows=(size - 3, 3),
            seed=size,
            classes=("ant", "bee", "cat") if size == 10 else ("cat", "dog", "ant"),
            columns={"label": np.arange(size) % 3, "number": np.arange(size) + 100 * size},
            statistics={"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.2, 0.2]},
        )
        masks = rng.integers(0, 256, (size, 4, 6)).astype(np.uint8)
        rows = {} if size == 10 else {"mask": np.arange(size)[::-1].copy()}
        found.append(add_array(index, "mask", masks, "mask", other_rows=rows).path)
    return found


def both(paths: list[Path], name: str = "image") -> np.ndarray:
    """What is stored, of a and then of b."""
    parts = [MemmapDataset(path) for path in paths]
    return np.concatenate([part.gather(range(len(part)), name=name).numpy() for part in parts])


def names_of_labels(dataset: MemmapDataset, labels: torch.Tensor) -> list[str]:
    return [dataset.classes[label] for label in labels.tolist()]


def check(loader: Loader, paths: list[Path]) -> None:
    """Check that an epoch holds a, then b."""
    batches = list(loader)
    images = torch.cat([batch.images for batch in batches]).permute(0, 2, 3, 1)
    np.testing.assert_array_equal(images.numpy(), both(paths))
    masks = torch.cat([batch.mask for batch in batches])
    np.testing.assert_array_equal(masks.numpy(), both(paths, "mask"))
    numbers = torch.cat([batch.number for batch in batches]).tolist()
    assert numbers == [*range(1000, 1010), *range(700, 707)]
    labels = torch.cat([batch.labels for batch in batches])
    names = names_of_labels(loader.dataset, labels)
    assert names == [("ant", "bee", "cat")[n % 3] for n in range(10)] + [
        ("cat", "dog", "ant")[n % 3] for n in range(7)
    ]


def test_a_loader_reads_a_list_and_a_concatdataset_as_one(paths: list[Path]) -> None:
    one, two = (MemmapDataset(path) for path in paths)
    for parts in ([one, two], one + two, [str(paths[0]), two], tuple(paths)):
        check(Loader(parts, 5, device="cpu"), paths)
    check(Loader(MemmapDataset(paths), 5, device="cpu"), paths)


def test_it_is_what_memload_concat_writes(paths: list[Path], tmp_path: Path) -> None:
    for path in paths:
        for file in path.parent.iterdir():
            os.link(file, tmp_path / file.name)
    linked = [tmp_path / path.name for path in paths]
    memload.concat(tmp_path / "all.idx", *linked)
    check(Loader(tmp_path / "all.idx", 5, device="cpu"), paths)
    written, in_memory = MemmapDataset(tmp_path / "all.idx"), MemmapDataset(linked)
    assert written.samples == in_memory.samples
    assert written.index.statistics == in_memory.index.statistics
    in_memory.save(tmp_path / "saved.idx")
    assert MemmapDataset(tmp_path / "saved.idx").fingerprint == written.fingerprint
    with pytest.raises(ValueError, match="must lie in its folder"):
        MemmapDataset(paths).save(paths[0].with_name("saved.idx"))


def test_samples_are_the_mapped_files_themselves(paths: list[Path]) -> None:
    dataset = MemmapDataset(paths)
    assert len(dataset) == 17
    assert dataset.classes == ["ant", "bee", "cat", "dog"]
    image, label, mask, number = dataset[11]
    expected = MemmapDataset(paths[1])[1]
    assert torch.equal(image, expected[0])
    assert torch.equal(mask, expected[2])
    assert (label, number) == (3, 701)
    mask[0, 0] ^= 1
    assert torch.equal(dataset[11][2], mask)
    assert repr(dataset) == (
        f"MemmapDataset([{str(paths[0])!r}, {str(paths[1])!r}]: 17 samples of 4×6×3, label, "
        "mask 4×6, number)"
    )
    assert len(dataset.where(label="cat")) == 6


def test_views_of_views_are_put_together(paths: list[Path]) -> None:
    a, b = (MemmapDataset(path, columns=["number"]) for path in paths)
    inner = ConcatDataset([a.subset([8, 1]), Subset(b, [6, 2])])
    for parts in (
        ConcatDataset([inner, b[1:2]]),
        [inner, b[1:2]],
        Subset(ConcatDataset([a, b]), [8, 1, 16, 12, 11]),
        Subset(Subset(ConcatDataset([a, b]), [11, 12, 16, 8, 1]), [3, 4, 2, 1, 0]),
        [MemmapDataset([a, b]).subset([8, 1, 16]), MemmapDataset([b[::-1], a]).subset([4, 5])],
    ):
        loader: Any = Loader(parts, 5, device="cpu")
        (batch,) = pickle.loads(pickle.dumps(loader))
        assert batch._fields == ("images", "number")
        assert batch.number.tolist() == [1008, 1001, 706, 702, 701]
        expected = both(paths)[[8, 1, 16, 12, 11]]
        np.testing.assert_array_equal(batch.images.permute(0, 2, 3, 1).numpy(), expected)


def test_a_random_split_is_a_view(paths: list[Path]) -> None:
    dataset = MemmapDataset(paths[0])
    parts = random_split(dataset, [6, 4], torch.Generator().manual_seed(1))
    numbers: list[int] = []
    for part in parts:
        for batch in Loader(part, 3, device="cpu", shuffle=True):
            numbers += batch.number.tolist()
    assert sorted(numbers) == list(range(1000, 1010))


def test_it_pickles_as_paths_and_resumes_anywhere(paths: list[Path], tmp_path: Path) -> None:
    loader = Loader(paths, 4, shuffle=True, seed=3, device="cpu")
    whole = [batch.number.tolist() for batch in loader]
    loader.set_epoch(0)
    batches = iter(loader)
    first = [next(batches).number.tolist() for _ in range(2)]
    batches.close()
    state = loader.state_dict()
    assert len(pickle.dumps(loader.dataset)) < 3000
    moved = [tmp_path / path.parent.name / path.name for path in paths]
    for path, target in zip(paths, moved, strict=True):
        target.parent.mkdir()
        for file in path.parent.iterdir():
            os.link(file, target.parent / file.name)
    for other in (
        copy.deepcopy(loader),
        Loader(moved, 4, shuffle=True, seed=3, device="cpu"),
        Loader(ConcatDataset(list(map(MemmapDataset, moved))), 4, shuffle=True, seed=3),
    ):
        other.load_state_dict(state)
        assert first + [batch.number.tolist() for batch in other] == whole
    for wrong in (paths[::-1], paths[:1], [paths[0], MemmapDataset(paths[1])[::-1]]):
        with pytest.raises(ValueError, match="state belongs to another Loader: its fingerprint is"):
            Loader(wrong, 4, shuffle=True, seed=3, device="cpu").load_state_dict(state)


def test_links_of_a_cache_may_be_put_together(paths: list[Path], tmp_path: Path) -> None:
    linked = []
    for path in paths:
        snapshot = tmp_path / path.parent.name
        snapshot.mkdir()
        for file in path.parent.iterdir():
            (snapshot / file.name).symlink_to(file)
        linked.append(snapshot / path.name)
    check(Loader(linked, 5, device="cpu"), paths)


def test_a_prefetcher_moves_masks_of_a_concatdataset(paths: list[Path]) -> None:
    parts = [MemmapDataset(path, columns=["mask", "label"]) for path in paths]
    batches = DataLoader(Subset(ConcatDataset(parts), range(17)), 6, collate_fn=fast_collate)
    flip = transforms.RandomHorizontalFlip(1)
    found = [batch[1] for batch in CudaPrefetcher(batches, transform=flip, device="cpu")]
    np.testing.assert_array_equal(torch.cat(found).numpy(), both(paths, "mask")[..., ::-1])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_data_loader_reads_it_in_workers(paths: list[Path]) -> None:
    loader = DataLoader(
        MemmapDataset(paths, columns=["mask"]), 6, num_workers=2, multiprocessing_context="spawn"
    )
    masks = torch.cat([mask.clone() for _, mask in loader])
    np.testing.assert_array_equal(masks.numpy(), both(paths, "mask"))
    del loader


def test_a_part_that_was_built_again_is_told_by_its_path(
    folders: list[Path], make_dataset: Callable[..., Index]
) -> None:
    paths = [make_dataset("one.bin").path, make_dataset("two.bin", seed=1).path]
    state = pickle.dumps(MemmapDataset(paths))
    make_dataset("two.bin", rows=(3,))
    with pytest.raises(FormatError, match=r"two\.idx is another data set .* built again meanwhile"):
        pickle.loads(state)


def test_transforms_get_statistics_and_classes_of_all(paths: list[Path]) -> None:
    mix = transforms.Compose([transforms.Normalize(), transforms.MixUp()])
    batch = next(iter(Loader(paths, 5, columns=["label"], transform=mix, device="cpu")))
    assert batch.labels.shape == (5, 4)


def test_columns_that_differ_are_named_unless_others_are_asked_for(
    make_dataset: Callable[..., Index], add_array: Callable[..., Index]
) -> None:
    columns = {"label": np.arange(5) % 3}
    one = make_dataset("one.bin", columns=columns | {"age": np.arange(5)}).path
    two = make_dataset("two.bin", columns=columns | {"age": np.arange(5) / 2}).path
    three = make_dataset("three.bin", columns=columns)
    three = add_array(three, "depth", np.zeros((5, 2))).path
    with pytest.raises(ValueError, match=r"differ in columns: 'age' \(int64 in one\.idx, float64"):
        Loader([one, two])
    with pytest.raises(ValueError, match=r"differ in columns: 'age' \(int64 in one\.idx, float64"):
        Loader([one, two], columns=["age"])
    with pytest.raises(
        ValueError,
        match=r"one.idx hands out label, age, but .*three.idx label, depth. Name the "
        r"columns that you want, such as columns=\['label'\]",
    ):
        Loader([one, three])
    for loader in (
        Loader([one, two, three], 15, columns=["label"], device="cpu"),
        Loader([MemmapDataset(path, columns=["label"]) for path in (one, two, three)], 15),
    ):
        (batch,) = loader
        assert batch._fields == ("images", "labels")
        assert batch.labels.tolist() == [0, 1, 2, 0, 1] * 3
    narrowed = [MemmapDataset(one, columns=["label"]), MemmapDataset(one)]
    with pytest.raises(ValueError, match=r"one.idx hands out label, but .*one.idx label, age"):
        Loader(narrowed)
    with pytest.raises(ValueError, match="columns names 'nose', which the data set does not have"):
        Loader([one, one], columns=["nose"])


@pytest.mark.parametrize(
    ("dataset", "error", "message"),
    [
        ([], ValueError, "dataset is an empty list"),
        ([TensorDataset(torch.zeros(3))], TypeError, "not a TensorDataset. Build one of it first"),
        (Subset(TensorDataset(torch.zeros(3)), [0]), TypeError, "not a TensorDataset. Build one"),
    ],
    ids=["empty", "list", "subset"],
)
def test_parts_of_other_kinds_are_refused(
    dataset: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Loader(dataset)


def test_parts_with_transforms_are_refused(paths: list[Path]) -> None:
    part = MemmapDataset(paths[0], transform=str)
    with pytest.raises(ValueError, match="dataset has a transform, which is for single samples"):
        Loader([part, paths[1]])
    with pytest.raises(ValueError, match=r"\.idx has a transform of its own"):
        MemmapDataset([part, paths[1]])
    with pytest.raises(TypeError, match=r"path is \[\] instead of a path or a list"):
        MemmapDataset([])


@settings(max_examples=40, deadline=None, database=None, derandomize=True)
@given(data=st.data())
def test_every_batch_of_any_rank_has_the_masks_of_its_samples(
    paths: list[Path], data: st.DataObject
) -> None:
    dataset = MemmapDataset(paths)
    samples = data.draw(st.lists(st.integers(0, 16), min_size=1, max_size=30))
    if data.draw(st.booleans()):
        dataset = dataset.subset(samples)
    num_replicas = data.draw(st.integers(1, 4))
    options: dict[str, Any] = {
        "shuffle": data.draw(st.booleans()),
        "seed": data.draw(st.integers(0, 99)),
        "drop_last": data.draw(st.booleans()),
        "columns": data.draw(st.permutations(["mask", "index", "number"])),
        "num_threads": data.draw(st.integers(0, 3)),
        "device": "cpu",
        "rank": data.draw(st.integers(0, num_replicas - 1)),
        "num_replicas": num_replicas,
    }
    batch_size = data.draw(st.integers(1, 6))
    options["drop_last"] &= len(dataset) >= 6 * 4
    loader = Loader(dataset, batch_size, **options)
    seen = _check_batches(loader, dataset, data.draw(st.integers(0, 5)))
    is_over = len(seen) == len(dataset)  # then the next epoch follows
    resumed = Loader(dataset, data.draw(st.integers(1, 6)), **options)
    resumed.load_state_dict(loader.state_dict())
    seen += _check_batches(resumed, dataset, 10_000)
    if num_replicas == 1 and not options["drop_last"] and not is_over:
        assert sorted(seen) == list(range(len(dataset)))


def _check_batches(loader: Loader, dataset: MemmapDataset, max_batches: int) -> list[int]:
    """Compare so many batches with the samples of the data set; return their numbers."""
    numbers: list[int] = []
    batches = iter(loader)
    for _, batch in zip(range(max_batches), batches, strict=False):
        for image, mask, number in zip(batch.images, batch.mask, batch.index.tolist(), strict=True):
            assert torch.equal(mask, dataset[number][2])
            assert torch.equal(image, dataset[number][0])
            numbers.append(number)
    return numbers


def test_the_sum_of_data_sets_has_labels_that_follow_their_names(
    make_dataset: Callable[..., Index],
) -> None:
    one = MemmapDataset(make_dataset("one.bin", classes=("ant", "bee", "cat")).path, transform=str)
    two = MemmapDataset(make_dataset("two.bin", classes=("bee", "cat", "dog")).path, transform=str)
    both = one + two
    assert isinstance(both, MemmapDataset)
    assert both.classes == ["ant", "bee", "cat", "dog"]
    names = [dataset.classes[label] for dataset in (one, two) for label in dataset.targets]
    assert [both.classes[label] for label in both.targets] == names
    assert both[7][0] == two[2][0]  # a text, so the transform is there
    two.transform = None
    assert type(one + two) is ConcatDataset
    assert type(two + TensorDataset(torch.zeros(2))) is ConcatDataset
