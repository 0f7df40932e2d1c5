import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memload import (
    BlockShuffledSampler,
    ClassBalancedSampler,
    MemmapDataset,
    RepeatedSampler,
    SequentialSampler,
    ShuffledSampler,
    WeightedSampler,
)
from memload.reading.epochs import OrderBatches

MAKE: dict[str, Callable[..., Any]] = {
    "sequential": lambda size, seed=0: SequentialSampler(size),
    "shuffled": lambda size, seed=0: ShuffledSampler(size, seed=seed),
    "blocks": lambda size, seed=0: BlockShuffledSampler(size, block=7, window=50, seed=seed),
    "repeated": lambda size, seed=0: RepeatedSampler(size, 3, seed=seed),
    "weighted": lambda size, seed=0: WeightedSampler(np.arange(1, size + 1), seed=seed),
    "balanced": lambda size, seed=0: ClassBalancedSampler(np.arange(size) % 3, seed=seed),
}
RANDOM = {name: MAKE[name] for name in ("shuffled", "blocks", "repeated", "weighted", "balanced")}

every_order = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
every_random_order = pytest.mark.parametrize("make", RANDOM.values(), ids=RANDOM)


def chi_square(
    counts: Sequence[int] | np.ndarray, expected: Sequence[float] | np.ndarray | float
) -> float:
    """Return the statistic in standard deviations from what chance gives."""
    observed = np.asarray(counts, np.float64)
    freedom = observed.size - 1
    return float((((observed - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(0, 2000),
    block=st.integers(1, 70),
    window=st.integers(1, 40),
    seed=st.integers(-(2**70), 2**70),
    epoch=st.integers(0, 2**70),
)
def test_any_size_block_window_seed_and_epoch_give_a_permutation(
    size: int, block: int, window: int, seed: int, epoch: int
) -> None:
    for order in (
        SequentialSampler(size),
        ShuffledSampler(size, seed=seed),
        BlockShuffledSampler(size, block=block, window=window, seed=seed),
    ):
        assert len(order) == size
        assert np.array_equal(np.sort(order.take(epoch, np.arange(size))), np.arange(size))


@pytest.mark.parametrize("make", [ShuffledSampler, BlockShuffledSampler])
@pytest.mark.parametrize("size", [2**32 - 1, 2**32 + 1, 2**40 + 3])
def test_sizes_beyond_32_bits_can_be_answered_in_parts(make: Callable[..., Any], size: int) -> None:
    order = make(size, seed=1)
    parts = [
        order.take(0, np.arange(start, start + 50_000)) for start in (0, size // 2, size - 50_000)
    ]
    taken = np.concatenate(parts)
    assert taken.dtype == np.int64
    assert 0 <= taken.min() <= taken.max() < size
    assert len(np.unique(taken)) == len(taken)
    assert taken.max() > 0.9 * size  # the whole range is in use, not 32 bits of it


@every_order
@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 2000), count=st.integers(0, 50), epoch=st.integers(0, 1000))
def test_positions_may_be_asked_for_in_any_order(
    make: Callable[..., Any], size: int, count: int, epoch: int
) -> None:
    positions = np.random.default_rng(count).integers(0, size, count)
    before = positions.copy()
    taken = make(size).take(epoch, positions)
    assert taken.dtype == np.int64
    assert np.array_equal(taken, make(size).take(epoch, np.arange(size))[positions])
    assert np.array_equal(positions, before)


@every_random_order
def test_seed_and_epoch_each_change_the_order(make: Callable[..., Any]) -> None:
    seen = {
        tuple(make(500, seed=seed).take(epoch, np.arange(500)).tolist())
        for seed in (0, 1, -1, 2**40, 12)
        for epoch in (0, 1, 2, 34)
    }
    assert len(seen) == 20


# What a version gave, all later ones give: a run that is resumed after an upgrade depends on it.
@pytest.mark.parametrize(
    ("order", "epoch", "start", "expected"),
    [
        (ShuffledSampler(10), 0, 0, [0, 8, 6, 2, 5, 1, 4, 9, 7, 3]),
        (ShuffledSampler(1000, seed=7), 3, 0, [192, 842, 728, 254, 187, 235, 121, 636]),
        (
            ShuffledSampler(5 * 10**9, seed=1),
            2,
            4 * 10**9,
            [1412133375, 3353542088, 3883877996, 1596268845],
        ),
        (
            BlockShuffledSampler(103, block=4, window=3, seed=5),
            1,
            0,
            [21, 81, 20, 82, 84, 22, 83, 85, 23, 80],
        ),
        (RepeatedSampler(90, 3, seed=5), 2, 46, [25, 45, 72, 29, 69, 24, 73, 65, 68, 6]),
        (WeightedSampler([1, 2, 3, 0, 4], seed=3, size=100), 1, 50, [2, 4, 4, 2, 0, 0, 1, 1, 0, 1]),
        (ClassBalancedSampler([0, 0, 0, 1], size=12), 0, 0, [3, 3, 3, 1, 0, 1, 3, 2, 0, 3, 2, 2]),
    ],
)
def test_orders_are_those_of_earlier_versions(
    order: Any, epoch: int, start: int, expected: list[int]
) -> None:
    assert order.take(epoch, start + np.arange(len(expected))).tolist() == expected


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_all_permutations_of_a_few_samples_are_equally_likely(size: int) -> None:
    epochs = 3000
    order = ShuffledSampler(size)
    taken = np.array([order.take(epoch, np.arange(size)) for epoch in range(epochs)])
    _, counts = np.unique(taken @ 10 ** np.arange(size), return_counts=True)
    factorial = [2, 6, 24, 120][size - 2]
    assert len(counts) == factorial
    assert chi_square(counts, epochs / factorial) < 4


def test_what_follows_a_sample_is_any_other() -> None:
    size = 100_000
    taken = ShuffledSampler(size, seed=3).take(0, np.arange(size))
    pairs = taken[:-1] * 16 // size * 16 + taken[1:] * 16 // size
    assert abs(chi_square(np.bincount(pairs, minlength=256), (size - 1) / 256)) < 4
    steps = (taken[1:] - taken[:-1]) % size
    assert abs(chi_square(np.bincount(steps * 64 // size, minlength=64), (size - 1) / 64)) < 4


@pytest.mark.parametrize("size", [3000, 3001, 2989])
def test_a_window_of_block_shuffling_comes_from_as_many_blocks(size: int) -> None:
    block, window = 10, 20
    taken = BlockShuffledSampler(size, block=block, window=window, seed=1).take(0, np.arange(size))
    full = size // block * block
    for start in range(0, full - full % (block * window), block * window):
        blocks, counts = np.unique(
            taken[start : start + block * window] // block, return_counts=True
        )
        assert len(blocks) == window
        assert set(counts.tolist()) == {block}
    # Samples that fill no block are in the last window.
    assert (np.argsort(taken)[full:] >= size // (block * window) * block * window).all()


def test_blocks_come_in_any_order_and_samples_anywhere_in_their_window() -> None:
    size, block, window, epochs = 1200, 10, 6, 400
    order = BlockShuffledSampler(size, block=block, window=window, seed=4)
    place = np.argsort([order.take(epoch, np.arange(size)) for epoch in range(epochs)], axis=1)
    for sample in (0, 637, 1199):
        assert abs(chi_square(np.bincount(place[:, sample] // 60, minlength=20), epochs / 20)) < 4
        assert abs(chi_square(np.bincount(place[:, sample] % 60, minlength=60), epochs / 60)) < 4


@pytest.mark.parametrize("repeats", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 7, 50, 51, 1000, 1020])
def test_repeated_samples_are_the_first_of_the_shuffled_order(size: int, repeats: int) -> None:
    taken = RepeatedSampler(size, repeats, seed=2).take(3, np.arange(size))
    shuffled = ShuffledSampler(size, seed=2).take(3, np.arange(size))
    samples, first, counts = np.unique(taken, return_index=True, return_counts=True)
    in_order = samples[np.argsort(first)]
    assert np.array_equal(in_order, shuffled[: len(samples)])
    assert counts.max() <= repeats
    assert (counts < repeats).sum() <= 17
    assert size / repeats <= len(samples) <= size / repeats + 17


def batches_of_ranks(order: Any, batch_size: int, ranks: int, seen: int = 0) -> list[list[Any]]:
    """Return the samples and draw numbers of each batch of each rank, of the first epoch."""
    return [
        [
            (chunk.samples[part.start : part.stop], chunk.draw_numbers[part.start : part.stop])
            for chunk in OrderBatches(
                order, batch_size, False, rank, ranks, num_samples=len(order)
            ).chunks(0, seen)
            for part in chunk.parts
        ]
        for rank in range(ranks)
    ]


@settings(max_examples=150, deadline=None)
@given(
    batch_size=st.sampled_from([2, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 50, 64, 96, 100, 128, 256]),
    ranks=st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24, 32]),
    repeats=st.integers(1, 6),
    size=st.integers(500, 2500),
    steps_seen=st.integers(0, 5),
)
def test_visits_of_a_sample_are_on_different_ranks_and_never_mixed_with_each_other(
    batch_size: int, ranks: int, repeats: int, size: int, steps_seen: int
) -> None:
    order = RepeatedSampler(size, repeats)
    seen = min(size, steps_seen * batch_size * ranks)
    shares = batches_of_ranks(order, batch_size, ranks, seen)
    assert len({len(batches) for batches in shares}) == 1
    assert seen or len(shares[0]) == len(OrderBatches(order, batch_size, False, 0, ranks, size))
    visited = [np.concatenate([batch for batch, _ in batches]) for batches in shares if batches]
    drawn = [np.concatenate([drawn for _, drawn in batches]) for batches in shares if batches]
    if drawn:
        # Some come again from the beginning of the epoch, so that ranks are even.
        positions = np.sort(np.concatenate(drawn))
        assert np.array_equal(positions, seen + np.arange(len(positions)))
        assert size <= seen + len(positions) < size + ranks
    for batches in shares:
        for batch, _ in batches:
            if len(batch) % 17 != 1:
                assert (batch != np.roll(batch, 1)).all()
    if ranks >= repeats:
        for samples, positions in zip(visited, drawn, strict=True):
            inside = samples[positions < size]
            assert len(np.unique(inside)) == len(inside)


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 200),
    batch_size=st.integers(1, 9),
    ranks=st.integers(1, 6),
    drop_last=st.booleans(),
    even=st.booleans(),
)
def test_ranks_that_take_turns_share_an_epoch(
    size: int, batch_size: int, ranks: int, drop_last: bool, even: bool
) -> None:
    order: Any = SequentialSampler(size)
    order.strides_ranks, order.even_ranks = True, even
    shares = []
    for rank in range(ranks):
        epoch = OrderBatches(order, batch_size, drop_last, rank, ranks, num_samples=size)
        chunks = list(epoch.chunks(0, 0))
        shares.append(np.concatenate([np.empty(0, int), *(chunk.samples for chunk in chunks)]))
        assert len(epoch) == sum(len(chunk.parts) for chunk in chunks)
        assert (shares[-1] % ranks == rank).all() or even
    kept = size - size % (batch_size * ranks) if drop_last else size
    taken = np.concatenate(shares)
    assert np.array_equal(np.unique(taken), np.arange(kept))
    assert len(taken) == (kept + -kept % ranks if even or drop_last else kept)


def test_weights_are_how_often_samples_are_drawn() -> None:
    weights = np.array([0.0, 1, 2, 0, 3.5, 0.5, 0])
    taken = WeightedSampler(weights, size=70_000, seed=1).take(0, np.arange(70_000))
    assert len(WeightedSampler(weights)) == len(weights)
    counts = np.bincount(taken, minlength=len(weights))
    drawn = weights > 0
    assert counts[~drawn].sum() == 0
    assert abs(chi_square(counts[drawn], 70_000 * weights[drawn] / weights.sum())) < 4


@pytest.mark.parametrize("weight", [1e308, 5e-324])
def test_weights_whose_sum_is_out_of_range_are_drawn_alike(weight: float) -> None:
    taken = WeightedSampler([weight] * 5, size=1000).take(0, np.arange(1000))
    assert np.array_equal(taken, WeightedSampler([1] * 5, size=1000).take(0, np.arange(1000)))


@pytest.mark.parametrize("kind", [np.asarray, torch.tensor])
def test_classes_are_balanced_whatever_their_size(kind: Callable[..., Any]) -> None:
    labels = np.repeat([0, 2, 5], [1000, 50, 3])
    taken = ClassBalancedSampler(kind(labels), size=60_000, seed=1).take(0, np.arange(60_000))
    counts = np.bincount(labels[taken], minlength=6)[[0, 2, 5]]
    assert abs(chi_square(counts, 20_000.0)) < 4
    rare = np.bincount(taken)[-3:]
    assert abs(chi_square(rare, rare.sum() / 3)) < 4


@pytest.mark.parametrize(
    ("make", "argument", "message"),
    [
        (WeightedSampler, [], "^weights must be finite"),
        (WeightedSampler, [-1, 2], "^weights must be finite"),
        (WeightedSampler, [float("nan"), 1], "^weights must be finite"),
        (WeightedSampler, [[1.0, 2.0]], "^weights must be finite"),
        (WeightedSampler, [0, 0], "^weights are all 0"),
        (ClassBalancedSampler, [], "^labels must be integers "),
        (ClassBalancedSampler, [-1, 2], "^labels must be integers "),
        (ClassBalancedSampler, [0.5, 1], "^labels must be integers "),
        (RepeatedSampler, -1, "size must be an integer of at least 0, not -1"),
        (functools.partial(RepeatedSampler, 9), 0, "repeats must be an integer of at least 1, not"),
        (ShuffledSampler, -1, "size must be an integer of at least 0, not -1"),
    ],
)
def test_wrong_arguments_are_refused(make: Callable[..., Any], argument: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(argument)
    with pytest.raises(ValueError, match=r"^block and window must be at least 1, not 64 and 0"):
        BlockShuffledSampler(10, window=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (ShuffledSampler, r"size must be .*, not MemmapDataset.*\. Write len\(dataset\)\.$"),
        (WeightedSampler, r"not a MemmapDataset\. Write WeightedSampler\(.*labels\]\)\.$"),
        (ClassBalancedSampler, r"not a MemmapDataset\. Write ClassBalancedSampler\(.*labels\)\.$"),
    ],
)
def test_a_data_set_in_place_of_its_numbers_is_told_what_to_write(
    make: Callable[..., Any], message: str, output: Path
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make(MemmapDataset(output))
