"""Many readers at once, and readers of a data set that is built anew."""

import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import memload
from memload import FormatError, Loader, MemmapDataset
from memload.storage.index import Index
from memload.storage.shards import Shards

ROWS = 61


@pytest.fixture
def path(make_dataset: Callable[..., Any]) -> Path:
    """Two shards, and labels that say which sample it is."""
    return Path(
        make_dataset(
            rows=(40, 21), shape=(31, 33, 3), columns={"label": np.arange(ROWS)}, classes=None
        ).path
    )


def checksums(path: Path) -> dict[int, int]:
    return dict(enumerate(Index.read(path).crc32["image"].tolist()))


def epoch_of(loader: Loader) -> dict[int, int]:
    """Return the checksum of the pixels of every sample by its label."""
    read: dict[int, int] = {}
    for images, labels in loader:
        for image, label in zip(images.permute(0, 2, 3, 1), labels.tolist(), strict=True):
            assert label not in read
            read[label] = zlib.crc32(image.contiguous().numpy())
    return read


def test_many_readers_of_one_data_set_do_not_disturb_each_other(path: Path) -> None:
    expected, shared = checksums(path), MemmapDataset(path)
    loader = Loader(path, 8, shuffle=True, num_threads=1)

    def reader(number: int) -> None:
        dataset = shared if number % 2 else MemmapDataset(path)
        own = Loader(dataset, 7, shuffle=True, seed=number, num_threads=number % 3)
        assert epoch_of(own) == expected
        assert epoch_of(loader) == expected
        for index in np.random.default_rng(number).integers(0, ROWS, 100).tolist():
            image, label = dataset[index]
            assert label == index
            assert torch.equal(dataset.gather([index, 0])[0], image.permute(1, 2, 0))

    with ThreadPoolExecutor(8) as readers:
        list(readers.map(reader, range(16), timeout=100))


class Version:
    """Three images, which differ from another version's in the middle one alone.

    No check of a shard's first and last row sees that.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        value = self.number if index == 1 else 0
        return np.full((4, 4, 3), value, np.uint8), value


@pytest.fixture
def build(tmp_path: Path) -> Callable[[int], Path]:
    """A function that builds a version in the place of the one before."""

    def build(number: int) -> Path:
        path = tmp_path / "out.bin"
        memload.build(Version(number), path, size=4, num_workers=0, overwrite=True)
        return path

    return build


def test_labels_are_never_those_of_other_pixels(
    build: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened = build(1), Shards.__init__

    def open_late(self: Shards, *arguments: Any) -> None:
        monkeypatch.undo()
        build(2)  # ends after the index was read
        opened(self, *arguments)

    monkeypatch.setattr(Shards, "__init__", open_late)
    with pytest.raises(FormatError, match="does not belong to"):
        MemmapDataset(path)
    image, label = MemmapDataset(path)[1]
    assert (int(image.max()), label) == (2, 2)
