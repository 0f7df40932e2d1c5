import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memload import (
    Loader,
    MemmapDataset,
    MixtureSampler,
    RepeatedSampler,
    SequentialSampler,
    ShuffledSampler,
    WeightedSampler,
)

MAKE = {
    "sequential": lambda size, seed=0: SequentialSampler(size),
    "shuffled": lambda size, seed=0: ShuffledSampler(size, seed=seed),
    "repeated": lambda size, seed=0: RepeatedSampler(size, 3, seed=seed),
    "weighted": lambda size, seed=0: WeightedSampler(np.arange(1, size + 1), seed=seed),
    "mixture": lambda size, seed=0: MixtureSampler(
        [size - size // 3, size // 3], [2, size > 2], length=size, seed=seed
    ),
    "balanced": lambda size, seed=0: WeightedSampler.balanced(np.arange(size) % 3, seed=seed),
}
RANDOM = {name: MAKE[name] for name in MAKE if name != "sequential"}
every_random_order = pytest.mark.parametrize("make", RANDOM.values(), ids=RANDOM)


def chi_square(counts, expected):
    """Return the statistic in standard deviations from what chance gives."""
    observed = np.asarray(counts, np.float64)
    freedom = observed.size - 1
    return float((((observed - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


@pytest.fixture(scope="module")
def path(write_dataset, tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data"), rows=(30,)).path


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 2000),
    count=st.integers(0, 50),
    seed=st.integers(-(2**70), 2**70),
    epoch=st.integers(0, 2**70),
)
def test_positions_may_be_asked_for_in_any_order(make, size, count, seed, epoch):
    order, positions = make(size, seed), np.random.default_rng(count).integers(0, size, count)
    before = positions.copy()
    whole, taken = order.take(epoch, np.arange(size)), order.take(epoch, positions)
    assert (len(order), taken.dtype) == (size, np.int64)
    assert np.array_equal(taken, whole[positions])
    assert np.array_equal(positions, before)
    assert not np.shares_memory(taken, positions)
    assert order.repeats or np.array_equal(np.sort(whole), np.arange(size))


@every_random_order
def test_seed_and_epoch_each_change_the_order(make):
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
        (RepeatedSampler(90, 3, seed=5), 2, 46, [25, 45, 72, 29, 69, 24, 73, 65, 68, 6]),
        (WeightedSampler([1, 2, 3, 0, 4], seed=3, size=100), 1, 50, [2, 4, 4, 2, 0, 0, 1, 1, 0, 1]),
        (WeightedSampler.balanced([0, 0, 0, 1], size=12), 0, 0, [3, 3, 3, 1, 0, 1, 3, 2, 0, 3]),
    ],
)
def test_orders_are_those_of_earlier_versions(order, epoch, start, expected):
    assert order.take(epoch, start + np.arange(len(expected))).tolist() == expected


@pytest.mark.parametrize("size", [2, 4])
def test_all_permutations_of_a_few_samples_are_equally_likely(size):
    epochs = 3000
    order = ShuffledSampler(size)
    taken = np.array([order.take(epoch, np.arange(size)) for epoch in range(epochs)])
    _, counts = np.unique(taken @ 10 ** np.arange(size), return_counts=True)
    factorial = math.factorial(size)
    assert len(counts) == factorial
    assert chi_square(counts, epochs / factorial) < 4


@settings(max_examples=150, deadline=None)
@given(
    size=st.integers(1, 2500),
    repeats=st.integers(1, 6),
    batch_size=st.integers(2, 256),
    ranks=st.integers(1, 32).filter(lambda ranks: ranks != 17),
)
def test_visits_of_a_sample_are_on_different_ranks_and_never_mixed_with_each_other(
    size, repeats, batch_size, ranks
):
    taken = RepeatedSampler(size, repeats).take(0, np.arange(size))
    visited, first, counts = np.unique(taken, return_index=True, return_counts=True)
    shuffled = ShuffledSampler(size).take(0, np.arange(size))  # its first samples are visited
    assert np.array_equal(visited[np.argsort(first)], shuffled[: len(visited)])
    assert counts.max() <= repeats
    assert (counts < repeats).sum() <= 17
    for rank in range(ranks if size >= 17 * repeats else 0):
        samples = taken[rank::ranks]  # as ranks take turns
        for batch in np.split(samples, range(batch_size, len(samples), batch_size)):
            if len(batch) % 17 != 1:
                assert (batch != np.roll(batch, 1)).all()
        assert ranks < repeats or len(np.unique(samples)) == len(samples)


def test_weights_are_how_often_samples_are_drawn():
    weights = np.array([0.0, 1, 2, 0, 3.5, 0.5, 0])
    taken = WeightedSampler(weights, size=70_000, seed=1).take(0, np.arange(70_000))
    assert len(WeightedSampler(weights)) == len(weights)
    counts = np.bincount(taken, minlength=len(weights))
    drawn = weights > 0
    assert counts[~drawn].sum() == 0
    assert abs(chi_square(counts[drawn], 70_000 * weights[drawn] / weights.sum())) < 4


@pytest.mark.parametrize("kind", [np.asarray, torch.tensor, list])
def test_classes_are_balanced_whatever_their_size(kind):
    labels = np.repeat([0, 2, 5], [1000, 50, 3])
    order = WeightedSampler.balanced(kind(labels), size=60_000, seed=1)
    taken = order.take(0, np.arange(60_000))
    counts = np.bincount(labels[taken], minlength=6)[[0, 2, 5]]
    assert abs(chi_square(counts, 20_000.0)) < 4
    rare = np.bincount(taken)[-3:]
    assert abs(chi_square(rare, rare.sum() / 3)) < 4


@every_random_order
def test_integers_of_numpy_give_the_same_state_as_those_of_python(path, make):
    for size, seed in ((np.int64(30), np.int64(5)), (np.uint8(30), np.array(5)), (30, True)):
        order, expected = make(size, seed=seed), make(30, seed=int(seed))
        assert repr(order) == repr(expected)
        assert "np." not in repr(order)
        state = Loader(path, 4, sampler=order, device="cpu").state_dict()
        Loader(path, 4, sampler=expected, device="cpu").load_state_dict(state)
    state = Loader(path, 4, shuffle=True, seed=np.int64(5), device="cpu").state_dict()
    Loader(path, 4, shuffle=True, seed=5, device="cpu").load_state_dict(state)


SHARES = st.lists(st.integers(0, 12), min_size=1, max_size=5).filter(any)


def sources_of(order, samples):
    """Return which data set each sample is of, and its number there."""
    starts = np.cumsum([0, *order.sizes])
    source = starts.searchsorted(samples, side="right") - 1
    return source, samples - starts[source]


@settings(max_examples=60, deadline=None)
@given(shares=SHARES, scale=st.floats(0.01, 100), start=st.integers(0, 400), n=st.integers(1, 300))
def test_a_mixture_has_its_shares_in_every_window(shares, scale, start, n):
    sizes = [(11 if share else 0) for share in shares]
    order = MixtureSampler(sizes, [scale * share for share in shares], length=1000)
    period = sum(shares) // math.gcd(*shares)

    def error(first, stop):
        source, _ = sources_of(order, order.take(3, np.arange(first, stop)))
        exact = np.array(shares) / sum(shares) * (stop - first)
        return np.abs(np.bincount(source, minlength=len(shares)) - exact).max()

    assert error(start, start + period) < 1e-6
    assert error(0, n) < 1
    assert error(start, start + n) < 2


def test_each_data_set_of_a_mixture_is_visited_again_only_after_all_of_it():
    order = MixtureSampler([25, 90, 12], [0.6, 0.3, 0.1], length=147)
    samples = np.concatenate([order.take(epoch, np.arange(147)) for epoch in range(9)])
    source, sample = sources_of(order, samples)
    for number, size in enumerate(order.sizes):
        visited = sample[source == number]
        turns = visited[: len(visited) // size * size].reshape(-1, size)
        assert (np.sort(turns) == np.arange(size)).all()
        assert len({tuple(turn) for turn in turns.tolist()}) == len(turns)


def test_an_epoch_of_a_mixture_ends_before_a_sample_comes_twice():
    order = MixtureSampler([50, 1000, 12], [0.6, 0.3, 0.1])
    assert len(order) == 83  # then there are no more of the first
    samples = order.take(0, np.arange(83))
    assert len(set(samples.tolist())) == 83
    assert len(MixtureSampler([3, 0], [1, 0])) == 3


def test_uneven_weights_of_a_mixture_are_rounded_to_parts_of_ten_thousand():
    order = MixtureSampler([10, 10, 10], [1, math.pi, math.e], length=10_000)
    source, _ = sources_of(order, order.take(0, np.arange(10_000)))
    exact = np.array([1, math.pi, math.e]) / (1 + math.pi + math.e) * 10_000
    assert np.abs(np.bincount(source) - exact).max() < 1


def test_a_loader_mixes_data_sets(write_dataset, tmp_path):
    for name in "abc":
        (tmp_path / name).mkdir()
    datasets = [MemmapDataset(write_dataset(tmp_path / name, rows=(20,)).path) for name in "abc"]
    order = MixtureSampler([20, 20, 20], [0.6, 0.3, 0.1])
    state, seen = None, []
    for _ in range(3):  # resumed after each batch
        loader = Loader(datasets, 10, sampler=order, columns=["index"], device="cpu")
        if state is not None:
            loader.load_state_dict(state)
        seen += next(iter(loader)).index.tolist()
        state = loader.state_dict()
    assert seen == order.take(0, np.arange(30)).tolist()
    with pytest.raises(ValueError, match="data sets have 20, 20, 9 samples, but those of the"):
        Loader(datasets, 10, sampler=MixtureSampler([20, 20, 9], [1, 1, 1]))
    source, _ = sources_of(order, np.array(seen))
    assert [np.bincount(batch).tolist() for batch in source.reshape(3, 10)] == [[6, 3, 1]] * 3
