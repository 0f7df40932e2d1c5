"""Which feed serves, and why."""

import re

import numpy as np
import pytest
import torch

from memload import FeedError, Loader
from memload.feeds.choice import FEEDS, choose_feed, expected_feed
from memload.feeds.feed import Counts
from tests.feeds.fake_cuda import FakeCuda, open_array

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
#: Shapes of images: rows of 9,000 bytes and of 3,000 bytes. There are 20, beside 160 bytes of labels.
LARGE, SMALL, HUGE = (30, 100, 3), (10, 100, 3), (30, 1000, 3)
PLENTY = 1 << 40


@pytest.mark.parametrize(
    ("name", "device", "shape", "machine", "cache_bytes", "chosen", "reason"),
    [  # chosen is None: an error
        ("auto", CPU, LARGE, {}, None, "cpu", "^the device is cpu$"),
        ("cpu", CPU, LARGE, {}, None, "cpu", "^the device is cpu$"),
        ("auto", CUDA, LARGE, {"free": 4 * 180_000}, None, "resident",
         r"^180 kB fits in 25% of the 720 kB free on cuda:0$"),
        ("auto", CUDA, LARGE, {"free": 4 * 180_000 - 1}, None, "dma",
         r"^all 184 kB will be held, as 550 GB of RAM may hold rows; resident: 180 kB does not fit "
         r"in 25% of the 720 kB free on cuda:0$"),
        ("auto", CUDA, SMALL, {}, None, "pinned",
         r"^it serves any file; resident: 60 kB does not fit .*; dma: threads are faster for rows "
         r"of 3 kB$"),
        ("auto", CUDA, LARGE, {"may_register": lambda size: False}, None, "pinned",
         r"; dma: 4,096 bytes of page cache cannot be registered with CUDA, perhaps because of the "
         r"file system \(status 712\)\."),
        ("auto", CUDA, LARGE, {"driver": None}, None, "pinned",
         r"; dma: the CUDA driver cannot be loaded: libcuda\.so\.1: cannot open"),
        ("auto", CUDA, HUGE, {}, None, "pinned", r"; dma: rows of 90 kB are too large\."),
        ("auto", CUDA, LARGE, {}, 100_000, "disk",
         r"^98\.3 kB of 184 kB will be held, as 100 kB of RAM may hold rows; resident: "),
        ("auto", CUDA, LARGE, {}, 0, "disk", r"^0 bytes of 184 kB will be held, as 0 bytes of RAM"),
        ("auto", CUDA, LARGE, {"driver": "one by one"}, None, "dma",
         r"will be held, as .*; the driver copies row by row, since it is older than CUDA 12\.8;"),
        ("resident", CUDA, LARGE, {"free": 1}, None, "resident", "^asked for$"),
        ("dma", CUDA, SMALL, {"free": PLENTY}, None, "dma", r"^all 64\.1 kB will be held"),
        ("disk", CUDA, LARGE, {}, None, "dma", "^all 184 kB will be held"),
        ("dma", CUDA, LARGE, {}, 8192, "disk", r"^8\.19 kB of 184 kB will be held"),
        ("pinned", CUDA, LARGE, {"free": PLENTY}, None, "pinned", "^it serves any file$"),
        *((name, CPU, LARGE, {}, None, None, rf"^feed='{name}' needs a CUDA device, but the device "
           r"is cpu\. Use feed='auto'") for name in FEEDS if name not in ("auto", "cpu")),
        ("cpu", CUDA, LARGE, {}, None, None, "^feed='cpu' needs device='cpu', but the device is cuda"),
        ("dma", CUDA, HUGE, {}, None, None, r"^rows of 90 kB are too large\. Use feed='pinned'"),
        ("dma", CUDA, LARGE, {"may_register": lambda size: False}, None, None,
         r"cannot be registered .* Use feed='pinned'\.$"),
        ("dma", CUDA, LARGE, {"driver": None}, None, None, r"cannot be loaded: .* Use feed='cpu'\.$"),
        ("resident", CUDA, LARGE, {"device_bytes": 0}, None, None,
         r"^feed='resident' needs 180,000 bytes of memory on cuda:0, which has fewer\. Use"),
    ],
)  # fmt: skip
def test_the_feed_and_the_reason_or_the_error(
    name, device, shape, machine, cache_bytes, chosen, reason, make_dataset, caplog
):
    with FakeCuda(machine.get("driver", "batch v2"), 1 << 16) as cuda:
        vars(cuda).update(machine)
        array = open_array(make_dataset(rows=(20,), shape=shape))
        if chosen is None:
            with pytest.raises(FeedError, match=reason):
                choose_feed(name, [array], device)
            return
        if name == "auto":
            expected = expected_feed([array], device, cache_bytes)
            assert expected == chosen.replace("disk", "dma")
        with caplog.at_level("INFO", logger="memload"):
            feed, choice = choose_feed(name, [array], device, cache_bytes=cache_bytes)
        assert feed.name == choice.name == chosen
        assert re.search(reason, choice.reason), choice.reason
        assert f"made.bin: {choice}" in caplog.text
        cuda.wait()
        feed.close()


def test_of_several_arrays_all_rows_count(make_dataset, add_array, cuda):
    index = make_dataset(rows=(10,), shape=(2, 4096, 1))
    index = add_array(index, "mask", np.ones((10, 2, 1024), np.uint8), "mask")
    chosen = [3, 3, 5]  # two rows of 8 KiB, and of 2 KiB
    arrays = [open_array(index, name, chosen) for name in ("image", "mask")]
    needed = 2 * 8192 + 2 * 2048
    cuda.free = 4 * needed
    feed, choice = choose_feed("auto", arrays, CUDA)
    assert choice.name == "resident"
    feed.close()
    cuda.free -= 4
    feed, choice = choose_feed("auto", arrays, CUDA, cache_bytes=index.image.data_bytes)
    assert choice.name == "disk"  # what is planned counts the masks, and rows that nobody uses
    assert choice.reason.startswith("81.9 kB of 111 kB will be held")
    feed.close()


def test_what_a_feed_was_given_is_let_go_when_another_array_cannot_be_served(
    make_dataset, add_array, cuda
):
    index = make_dataset(rows=(9,), shape=(2, 4096, 1))
    index = add_array(index, "small", np.ones((9, 5), np.uint8), "npy")
    cuda.may_register = lambda size: size >= 4096  # which the file of the second array has not
    arrays = [open_array(index), open_array(index, "small")]
    feed, choice = choose_feed("auto", arrays, CUDA)
    assert choice.name == "pinned"
    assert "; dma: 173 bytes of page cache cannot be registered" in choice.reason
    cuda.wait()
    assert not cuda.pages
    feed.close()


def test_a_container_with_two_gigabytes_holds_at_most_half_and_leaves_a_quarter(make_dataset, cuda):
    index = make_dataset(rows=(150,), shape=(64, 128, 1))
    cuda.ram = 1_200_000
    for cache_bytes in (None, 600_000, 10**12):
        feed, choice = choose_feed("auto", [open_array(index)], CUDA, cache_bytes=cache_bytes)
        cuda.wait()
        assert choice.name == "disk"
        assert "of 1.23 MB will be held, as 600 kB of RAM may hold rows" in choice.reason
        assert 590_000 < cuda.registered_bytes <= 600_000
        assert not feed.counts().problem
        feed.close()
        del feed
    cuda.ram = 2 << 30
    feed, choice = choose_feed("auto", [open_array(index)], CUDA, cache_bytes=1 << 40)
    assert "as 1.07 GB of RAM may hold rows" in choice.reason
    feed.close()
    cuda.ram = 100 << 30  # there, 3 GiB are left
    feed, choice = choose_feed("auto", [open_array(index)], CUDA, cache_bytes=1 << 40)
    assert "as 104 GB of RAM may hold rows" in choice.reason
    feed.close()


def test_a_loader_says_which_feed_serves_and_where_rows_were_found(make_dataset, cuda):
    loader = Loader(make_dataset(rows=(20,), shape=(2, 4096, 1)).path, 8, cache_bytes=100_000)
    assert loader.feed.name == "disk"
    cuda.wait()
    list(loader)
    assert str(loader.feed).startswith("disk: 98.3 kB of 168 kB will be held")
    assert str(loader.feed).endswith(
        "; 11 of 20 rows are held; of 20 rows so far, 11 came from memory and 9 from the files"
    )


def test_counts_are_told_in_a_sentence():
    counts = Counts(2000, rows_held=600, rows_to_hold=1000)
    assert str(counts) == "600 of 2,000 rows are held, and 400 more will be"
    counts = Counts(2000, 1000, 1000, served=50, hits=24, problem="no RAM")
    assert str(counts) == (
        "1,000 of 2,000 rows are held; of 50 rows so far, 24 came from memory and 26 from the files; "
        "no RAM"
    )
