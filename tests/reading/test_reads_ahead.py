"""Batches whose rows are read from the disk ahead, as on CUDA, but on the CPU."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler

from memload import FormatError, Index, Loader, MemmapDataset, ShuffledSampler
from memload.feeds.interface import Begin, Feed, Fetch
from memload.jobs import Job
from memload.reading import loader as loader_module
from memload.reading.pipeline import Pipeline, make_pipeline

SIZE = 40
on_threads = pytest.mark.parametrize("num_threads", [0, 1, 3])
ahead_by = pytest.mark.parametrize("reads_ahead", [1, 2, 7, 32])

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"  # of fork, from Python 3.12 on
)


class NotingFeed:
    """A feed that notes which batches of samples were begun, and which were fetched."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self.name, self.device, self.close = feed.name, feed.device, feed.close
        self.begun: list[list[int]] = []
        self.fetched: list[list[int]] = []
        #: A batch with this sample cannot be begun.
        self.broken: int | None = None
        #: From this sample on, the rows of a batch have not been read yet.
        self.first_unread = SIZE

    def counts(self) -> None:
        return None

    def prepare(self, samples: np.ndarray) -> Begin:
        begin_batch = self._feed.prepare(samples)

        def begin(start: int, stop: int) -> Fetch:
            batch = samples[start:stop].tolist()
            if self.broken in batch:
                raise FormatError("broken.bin cannot be read.")
            self.begun.append(batch)
            fetch_batch = begin_batch(start, stop)
            return Job(partial(fetch, batch, fetch_batch), lambda: self.first_unread not in batch)

        def fetch(batch: list[int], fetch_batch: Fetch) -> Any:
            self.fetched.append(batch)
            return fetch_batch()

        return begin


class Maker(NamedTuple):
    """Makes Loaders whose feed reads some batches ahead."""

    path: Path
    monkeypatch: pytest.MonkeyPatch

    def __call__(
        self, batch_size: int = 4, *, reads_ahead: int, in_flight: int = 1, **options: Any
    ) -> tuple[Loader, NotingFeed]:
        feeds: list[NotingFeed] = []

        def make_noting(*arguments: Any, **named: Any) -> Pipeline:
            made = make_pipeline(*arguments, **named)
            feeds.append(NotingFeed(made.feed))
            if in_flight > 1:
                made = made._replace(in_flight=in_flight)
            return made._replace(feed=feeds[0], reads_ahead=reads_ahead)

        self.monkeypatch.setattr(loader_module, "make_pipeline", make_noting)
        loader = Loader(self.path, batch_size, device="cpu", columns=["number"], **options)
        return loader, feeds[0]


@pytest.fixture
def make(make_dataset: Callable[..., Index], monkeypatch: pytest.MonkeyPatch) -> Maker:
    columns = {"label": np.arange(SIZE) % 3, "number": np.arange(SIZE)}
    return Maker(make_dataset(rows=(15, 25), columns=columns).path, monkeypatch)


def visits(loader: Loader) -> list[list[int]]:
    return [batch.number.tolist() for batch in loader]


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


@on_threads
@ahead_by
def test_batches_are_those_of_the_order_and_have_their_own_pixels(
    reads_ahead: int, num_threads: int, make: Maker
) -> None:
    loader, _ = make(3, reads_ahead=reads_ahead, shuffle=True, num_threads=num_threads)
    dataset = MemmapDataset(make.path)
    for epoch in range(2):
        batches = list(loader)
        order = ShuffledSampler(SIZE).take(epoch, np.arange(SIZE)).tolist()
        assert flat([batch.number.tolist() for batch in batches]) == order
        for batch in batches:
            pixels = dataset.gather(batch.number).permute(0, 3, 1, 2)
            assert torch.equal(batch.images, pixels)


@ahead_by
def test_rows_are_read_for_so_many_batches_ahead(reads_ahead: int, make: Maker) -> None:
    loader, feed = make(4, reads_ahead=reads_ahead, num_threads=0)
    iterator: Any = iter(loader)
    assert feed.begun == []
    for number in range(3):
        next(iterator)
        assert len(feed.begun) == min(reads_ahead + number, SIZE // 4)
        assert feed.fetched == feed.begun[: number + 1]
    iterator.close()


def test_a_batch_does_not_wait_for_the_rows_of_the_next_ones(make: Maker) -> None:
    loader, feed = make(4, reads_ahead=3, in_flight=3, num_threads=0)
    feed.first_unread = 8
    iterator: Any = iter(loader)
    assert next(iterator).number.tolist() == [0, 1, 2, 3]
    assert feed.fetched == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert next(iterator).number.tolist() == [4, 5, 6, 7]
    assert len(feed.fetched) == 2
    assert next(iterator).number.tolist() == [8, 9, 10, 11]  # this had to wait
    feed.first_unread = SIZE
    assert next(iterator).number.tolist() == [12, 13, 14, 15]
    assert len(feed.fetched) == 6  # two ahead
    assert flat([batch.number.tolist() for batch in iterator]) == list(range(16, SIZE))


@on_threads
@pytest.mark.parametrize("where", ["the feed", "the transform", "the sampler"])
def test_an_exception_arrives_behind_the_batches_before_it(
    where: str, num_threads: int, make: Maker, own_threads: Callable[[], Any]
) -> None:
    class BrokenSampler:
        def __iter__(self) -> Iterator[int]:
            yield from range(12)
            raise FormatError("broken.bin cannot be read.")

    calls = 0

    def broken_transform(images: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise FormatError("broken.bin cannot be read.")
        return images

    options: dict[str, Any] = {"num_threads": num_threads}
    if where == "the transform":
        options = {"num_threads": 0, "transform": broken_transform}
    elif where == "the sampler":
        options["sampler"] = BrokenSampler()
    loader, feed = make(4, reads_ahead=7, **options)
    feed.broken = 13 if where == "the feed" else None
    iterator = iter(loader)
    assert flat([next(iterator).number.tolist() for _ in range(3)]) == list(range(12))
    with pytest.raises(FormatError, match="broken"):
        next(iterator)
    assert loader.state_dict()["samples_seen"] == 12
    assert not own_threads()


@on_threads
def test_a_loop_that_is_left_early_closes_the_users_iterator_and_the_next_one_begins_anew(
    num_threads: int, make: Maker, own_threads: Callable[[], Any]
) -> None:
    closed = []

    class Numbers:
        def __iter__(self) -> Iterator[int]:
            try:
                yield from range(SIZE)
            finally:
                closed.append(True)

    loader, _ = make(4, reads_ahead=5, sampler=Numbers(), num_threads=num_threads)
    for batch in loader:
        assert batch.number.tolist() == [0, 1, 2, 3]
        break
    del batch
    assert closed == [True]
    assert not own_threads()
    assert flat(visits(loader)) == list(range(SIZE))


@ahead_by
@pytest.mark.parametrize("kind", ["sampler", "batch_sampler"])
def test_a_users_sampler_that_is_asked_early_is_resumed_where_the_loop_was(
    kind: str, reads_ahead: int, make: Maker
) -> None:
    numbers = DistributedSampler(range(SIZE), num_replicas=1, rank=0, seed=1)  # type: ignore[arg-type]

    def own() -> Loader:
        if kind == "sampler":
            return make(4, reads_ahead=reads_ahead, sampler=numbers)[0]
        return make(1, reads_ahead=reads_ahead, batch_sampler=BatchSampler(numbers, 4, False))[0]

    loader = own()
    order = list(numbers)
    iterator: Any = iter(loader)
    seen = [next(iterator).number.tolist() for _ in range(3)]
    state = loader.state_dict()
    iterator.close()
    other = own()
    other.load_state_dict(state)
    assert flat(seen) + flat(visits(other)) == order
    numbers.set_epoch(1)
    assert flat(visits(other)) == list(numbers) != order


def test_several_iterators_of_one_loader_read_ahead_each_for_itself(make: Maker) -> None:
    loader, feed = make(4, reads_ahead=3, num_threads=0)
    first, second = iter(loader), iter(loader)
    found = [batch.number.tolist() for pair in zip(first, second, strict=True) for batch in pair]
    expected = [list(range(start, start + 4)) for start in range(0, SIZE, 4)]
    assert (found[::2], found[1::2]) == (expected, expected)
    assert sorted(feed.fetched) == sorted(expected * 2)


def test_static_buffers_have_the_batch_that_was_handed_out_last(make: Maker) -> None:
    loader, _ = make(4, reads_ahead=5, static_buffers=True, drop_last=True)
    dataset = MemmapDataset(make.path)
    addresses = set()
    for number, batch in enumerate(loader):
        assert batch.number.tolist() == list(range(4 * number, 4 * number + 4))
        assert torch.equal(batch.images.permute(0, 2, 3, 1), dataset.gather(batch.number))
        addresses.add(batch.images.data_ptr())
    assert len(addresses) == 1


def test_what_was_read_ahead_does_not_survive_a_fork(
    make: Maker, in_forked_child: Callable[..., Any]
) -> None:
    loader, _ = make(4, reads_ahead=3, num_threads=0)
    iterator: Any = iter(loader)
    next(iterator)

    def child() -> tuple[str, list[int]]:
        torch.set_num_threads(1)
        with pytest.raises(RuntimeError) as caught:
            next(iterator)
        return str(caught.value), flat(visits(loader))

    message, anew = in_forked_child(child)
    assert "Iterate anew in the child" in message
    assert anew == list(range(SIZE))
    assert next(iterator).number.tolist() == [4, 5, 6, 7]
    iterator.close()
