"""Rows are those of the files, wherever they lie and whatever happens meanwhile."""

import itertools
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from memload.storage.format import DESCRS, DESCRS_OF_ARRAYS, DESCRS_OF_MASKS
from tests.feeds.fake_cuda import FakeCuda, Reads, open_array

PAGE = 4096
PHASES = [Phase.explicit, Phase.generate, Phase.shrink]  # to explain a failure takes a minute
FOLDERS = [None, "/dev/shm"] if os.access("/dev/shm", os.W_OK) else [None]

row_sizes = st.one_of(
    st.integers(1, 64),
    st.integers(1, 4 * PAGE),
    st.sampled_from([PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE, 4 * PAGE]),
)


def write_arrays(draw, folder, write_dataset, add_array, window_bytes):
    """Write images in up to four shards, and up to two other arrays. Return the index."""

    def shape_of(descr, dimensions):  # rows have to fit in a window
        values = min(draw(row_sizes), window_bytes) // np.dtype(descr).itemsize
        return (max(1, values), *[1] * (dimensions - 1))

    rows = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    descr, rng = draw(st.sampled_from(DESCRS)), np.random.default_rng(1)
    index = write_dataset(Path(folder), rows=rows, shape=shape_of(descr, 3), descr=descr)
    for kind, descrs in (("mask", DESCRS_OF_MASKS), ("npy", DESCRS_OF_ARRAYS)):
        if draw(st.booleans()):
            descr, count = draw(st.sampled_from(descrs)), draw(st.integers(1, 9))
            shape = (count, *shape_of(descr, 2))
            values = rng.integers(0, 2 if descr == "|b1" else 120, shape).astype(descr)
            row = {**index.other_rows, kind: rng.integers(0, count, len(index))}
            index = add_array(index, kind, values, kind, other_rows=row)
    return index


def held_rows(cuda, samples):
    """Return which rows of an array lie in registered pages as a whole."""
    array, paths = samples.shards.array, samples.shards.paths
    registered = np.array([cuda.registered_bytes_of(path) for path in paths])
    shard, offset = array.locate(np.arange(array.rows))
    return offset + array.row_bytes <= registered[shard]


def stored(samples):
    return np.concatenate(
        [
            np.fromfile(path, samples.shards.array.descr, offset=samples.shards.array.header_bytes)
            for path in samples.shards.paths
        ]
    ).reshape(-1, *samples.shards.array.shape)


@pytest.mark.parametrize("examples", [50, pytest.param(200, marks=pytest.mark.slow)])
def test_every_row_is_that_of_its_file_and_counts_add_up(write_dataset, add_array, examples):
    @given(st.data())
    @settings(max_examples=examples, deadline=None, database=None, phases=PHASES)
    def check(data):
        check_rows(data.draw, write_dataset, add_array)

    check()


def check_rows(draw, write_dataset, add_array):
    window_bytes = PAGE * draw(st.sampled_from([1, 2, 4]))
    driver = draw(st.sampled_from(["batch v2", "batch", "one by one"]))
    ends = draw(st.sampled_from(["never", "before", "RAM runs short", "pages are refused"]))
    direct = draw(st.sampled_from(["allowed", "refused", "failing", "short"]))
    with (
        tempfile.TemporaryDirectory(dir=draw(st.sampled_from(FOLDERS))) as folder,
        FakeCuda(driver, window_bytes) as cuda,
        Reads(direct) as read,
    ):
        index = write_arrays(draw, folder, write_dataset, add_array, window_bytes)
        order = st.lists(st.integers(0, len(index) - 1), min_size=1, max_size=30)
        chosen = np.array(draw(order))
        arrays = [
            open_array(index, array.name, index.rows_of(array.name)[chosen])
            for array in index.arrays
        ]
        size = sum(  # files without used rows are not held
            samples.shards.array.shards[number].bytes
            for samples in arrays
            for number in set(samples.shards.array.shard_of(samples.used_rows).tolist())
        )
        budget = draw(st.one_of(st.sampled_from([0, size - 1, size]), st.integers(0, size)))
        if ends == "RAM runs short":
            left = itertools.chain([1 << 40] * draw(st.integers(0, 9)), itertools.repeat(0))
            cuda.available_memory = lambda: next(left)
        if ends == "pages are refused":
            most = draw(st.integers(0, size))
            cuda.may_register = lambda size: (
                size <= PAGE  # as in the trial when a feed is made
                or cuda.registered_bytes + size <= most
            )
        feed = cuda.feed(arrays, budget)
        if ends == "before":
            cuda.wait()

        expected = [stored(samples)[samples.row] for samples in arrays]
        served = hits = 0
        for _ in range(draw(st.integers(1, 2))):
            numbers = st.lists(st.integers(0, len(chosen) - 1), min_size=1, max_size=40)
            chunk = np.array(draw(numbers))
            begin, size_of_batch = feed.prepare(chunk), draw(st.integers(1, 12))
            begun = [  # all batches at once, as a Loader reads ahead
                (chunk[start : start + size_of_batch], begin(start, start + size_of_batch))
                for start in range(0, len(chunk), size_of_batch)
            ]
            for samples, pending in begun:
                found = pending.fetch()
                assert pending.is_ready()
                for tensor, rows in zip(found, expected, strict=True):
                    assert tensor.is_contiguous()
                    np.testing.assert_array_equal(tensor.numpy(), rows[samples])
                served += len(samples) * len(arrays)
                hits += sum(int(held_rows(cuda, a)[a.row[samples]].sum()) for a in arrays)
        counts = feed.counts()
        assert counts.served == served
        assert counts.hits == hits if ends == "before" else counts.hits <= hits

        cuda.wait()
        counts, registered = feed.counts(), cuda.registered_bytes
        assert counts.rows == sum(array.rows for array in index.arrays)
        rows_held = sum(int(held_rows(cuda, samples).sum()) for samples in arrays)
        assert counts.rows_held == counts.rows_to_hold == rows_held
        assert registered <= budget
        files = sum(len(array.shards) for array in index.arrays)
        if ends in ("never", "before"):
            assert not counts.problem
            assert (
                registered == size if budget == size else budget - registered < files * (PAGE + 1)
            )
            assert feed.name == ("dma" if budget == size else "disk")
        if direct in ("refused", "failing") or counts.hits == counts.served:
            assert not read.direct
        assert bool(read.direct or read.through_cache) == (counts.hits < counts.served)
        feed.close()
        del feed, begin, begun, pending, arrays
