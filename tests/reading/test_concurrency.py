"""Many readers at once, and readers of a data set that is built anew."""

import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from memload import FormatError, Loader, MemmapDataset, build
from memload.storage.shards import Shards

ROWS = 61


def epoch_of(loader):
    """Return the checksum of the pixels of every sample by its number."""
    read = {}
    for images, index in loader:
        for image, number in zip(images.permute(0, 2, 3, 1), index.tolist(), strict=True):
            assert number not in read
            read[number] = zlib.crc32(image.contiguous().numpy())
    return read


def test_many_readers_of_one_data_set_do_not_disturb_each_other(make_dataset):
    index = make_dataset(rows=(40, 21), shape=(31, 33, 3))
    expected = dict(enumerate(index.crc32["image"].tolist()))
    shared = MemmapDataset(index.path, columns=["index"])
    loader = Loader(shared, 8, shuffle=True, num_threads=1)

    def reader(number):
        dataset = shared if number % 2 else MemmapDataset(index.path, columns=["index"])
        own = Loader(dataset, 7, shuffle=True, seed=number, num_threads=number % 3)
        assert epoch_of(own) == epoch_of(loader) == expected
        for sample in np.random.default_rng(number).integers(0, ROWS, 100).tolist():
            image, found = dataset[sample]
            assert found == sample
            assert torch.equal(dataset.gather([sample, 0])[0], image.permute(1, 2, 0))

    with ThreadPoolExecutor(8) as readers:
        list(readers.map(reader, range(16), timeout=100))


class Version:
    """Three images, which differ from another version's in the middle one alone.

    No check of a shard's first and last row sees that.
    """

    def __init__(self, number):
        self.values = [0, number, 0]

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return np.full((4, 4, 3), self.values[index], np.uint8), self.values[index]


def test_labels_are_never_those_of_other_pixels(tmp_path, monkeypatch):
    path, opened = tmp_path / "out.bin", Shards.__init__

    def build_version(number):
        build(Version(number), path, size=4, num_workers=0, overwrite=True)

    def open_late(shards, *arguments):
        monkeypatch.undo()
        build_version(2)  # ends after the index was read
        opened(shards, *arguments)

    build_version(1)
    monkeypatch.setattr(Shards, "__init__", open_late)
    with pytest.raises(FormatError, match="does not belong to"):
        MemmapDataset(path)
    image, label = MemmapDataset(path)[1]
    assert (int(image.max()), label) == (2, 2)
