"""One state machine for what a Loader promises of orders, ranks, epochs, resuming and pickling."""

import pickle

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch.utils.data import BatchSampler, DistributedSampler

import memload
from memload import Loader, MemmapDataset

SIZE = 23


class Backwards:
    """An order of the user's, with the attributes that are given."""

    def __init__(self, **attributes):
        vars(self).update(attributes)

    def __len__(self):
        return SIZE

    def take(self, epoch, positions):
        return SIZE - 1 - positions


#: In each of these cases: the order of an epoch, and whether it is an iterable of the user's own,
#: of which each rank has a whole one.
ORDERS = {
    "sequential": (lambda seed: memload.SequentialSampler(SIZE), False),
    "shuffle": (lambda seed: memload.ShuffledSampler(SIZE, seed=seed), False),
    "weighted": (lambda seed: memload.WeightedSampler(np.arange(SIZE), seed=seed), False),
    "repeated": (lambda seed: memload.RepeatedSampler(SIZE, 3, seed=seed), False),
    "own": (lambda seed: Backwards(), False),
    "own, even": (lambda seed: Backwards(even_ranks=True), False),
    "own, in turns": (lambda seed: Backwards(strides_ranks=True), False),
    "own, even, in turns": (lambda seed: Backwards(even_ranks=True, strides_ranks=True), False),
    "iterable": (lambda seed: DistributedSampler(range(SIZE), 1, 0, seed=seed), True),
    "batch_sampler": (lambda seed: DistributedSampler(range(SIZE), 1, 0, seed=seed), True),
}

pytestmark = pytest.mark.filterwarnings("ignore:drop_last:UserWarning")  # nothing is left


class Training(RuleBasedStateMachine):
    """All ranks of a training in turn. The model of it: an epoch, and how many samples were seen."""

    def __init__(self, dataset):
        super().__init__()
        self.dataset = dataset

    @initialize(
        kind=st.sampled_from(sorted(ORDERS)), drop_last=st.booleans(), seed=st.integers(0, 3)
    )
    def choose(self, kind, drop_last, seed):
        self.kind, self.drop_last, self.seed = kind, drop_last, seed
        make_order, self.is_iterable = ORDERS[kind]
        self.make_order = lambda: make_order(seed)
        self.epoch, self.seen, self.is_left, self.state = 0, 0, False, None
        self.start(batch_size=4, ranks=2, threads=0)

    def make_loader(self, rank):
        options = {"batch_size": self.batch_size, "drop_last": self.drop_last, "seed": self.seed}
        if self.kind == "batch_sampler":
            batches = BatchSampler(self.make_order(), self.batch_size, self.drop_last)
            options = {"batch_sampler": batches}
        elif self.kind == "shuffle":
            options["shuffle"] = True
        elif self.kind != "sequential":
            options["sampler"] = self.make_order()
        options |= {"rank": rank, "num_replicas": self.ranks, "num_threads": self.threads}
        return Loader(self.dataset, **options, device="cpu")

    @rule(batch_size=st.integers(1, 9), ranks=st.integers(1, 4), threads=st.sampled_from([0, 2]))
    def start(self, batch_size, ranks, threads):
        """Start or go on, with any number of ranks and threads and any size of batches."""
        self.batch_size, self.ranks, self.threads = batch_size, ranks, threads
        self.iterators, self.is_left, self.is_chosen = None, False, False
        self.loaders = [self.make_loader(rank) for rank in range(ranks)]
        for loader in self.loaders if self.state is not None else ():
            loader.load_state_dict(pickle.loads(pickle.dumps(self.state)))

    @precondition(lambda self: self.seen < SIZE)  # else ranks may be at different positions
    @rule()
    def pickle(self):
        """Copies go on where the loaders are."""
        self.loaders = pickle.loads(pickle.dumps(self.loaders))
        self.iterators, self.is_left = None, False

    @precondition(lambda self: self.iterators is not None and self.stop() > self.seen)
    @rule()
    def leave(self):
        """Leave the loop. The state stays where it was, and the next loop begins the next epoch."""
        self.iterators, self.is_left = None, True

    @precondition(lambda self: self.iterators is None and not self.is_left)
    @rule(later=st.sampled_from([0, 0, 0, 0, 1, 3]))
    def set_epoch(self, later):
        """Choose an epoch. One that was resumed goes on, even if it has no batches any more."""
        self.seen = 0 if later else self.seen
        self.epoch, self.is_chosen = self.epoch + later, True
        for loader in self.loaders:
            loader.set_epoch(self.epoch)

    @precondition(lambda self: self.seen == 0)
    @rule()
    def count(self):
        """A whole epoch has as many batches as `len` says."""
        for loader in pickle.loads(pickle.dumps(self.loaders)):
            assert len(list(loader)) == len(loader)

    @rule()
    def step(self):
        """Take a batch of every rank. Together they are the next samples of the order."""
        if self.iterators is None:
            is_over = self.seen > 0 and self.stop() == self.seen  # saved behind the last batch
            if self.is_left or (is_over and not self.is_chosen):
                self.epoch, self.seen = self.epoch + 1, 0
            self.is_left = self.is_chosen = False
            self.iterators = [iter(loader) for loader in self.loaders]
        batches = [next(iterator, None) for iterator in self.iterators]
        batches = [batch.index.tolist() for batch in batches if batch is not None]
        stop = self.stop()
        if stop == self.seen:
            assert batches == []
            self.epoch, self.seen, self.iterators = self.epoch + 1, 0, None
        else:
            self.check(batches, self.expected(stop))
            self.seen = stop
        self.states_of_all_ranks_are_where_the_loop_is()

    @rule(is_asked_again=st.booleans())
    def finish(self, is_asked_again):
        """Take all batches that are left of an epoch, and perhaps ask once more."""
        self.step()
        while self.seen and self.stop() != self.seen:
            self.step()
        if self.seen and is_asked_again:
            self.step()

    def stop(self):
        """Return how many samples will be seen after the next step; as many as now at the end."""
        step = self.batch_size * (1 if self.is_iterable else self.ranks)
        begun = self.seen % step if self.kind == "batch_sampler" else 0  # its batches stay the same
        stop = self.seen - begun + step
        return stop if stop <= SIZE else self.seen if self.drop_last else SIZE

    def expected(self, stop):
        """Return the next samples, and on ranks that are even those that come again."""
        order = self.make_order()
        if self.is_iterable:
            order.set_epoch(self.epoch)
            return list(order)[self.seen : stop]
        numbers = order.take(self.epoch, np.arange(SIZE)).tolist()
        padding = (self.seen - stop) % self.ranks if self.has("even_ranks") else 0
        return numbers[self.seen : stop] + numbers[:padding]

    def has(self, attribute):
        return getattr(self.make_order(), attribute, False)

    def check(self, batches, expected):
        if self.is_iterable:
            assert batches == [expected] * self.ranks
            return
        assert all(1 <= len(batch) <= self.batch_size for batch in batches)
        if self.has("even_ranks") or self.drop_last:
            assert {len(batch) for batch in batches} == {len(expected) // self.ranks}
        if self.has("strides_ranks"):  # ranks take samples in turn
            shares = [expected[rank :: self.ranks] for rank in range(self.ranks)]
            assert batches == [share for share in shares if share]
        else:
            assert [number for batch in batches for number in batch] == expected

    @invariant()
    def states_of_all_ranks_are_where_the_loop_is(self):
        states = [loader.state_dict() for loader in self.loaders]
        found = [(state["epoch"], state["samples_seen"]) for state in states]
        expected = self.epoch, self.seen
        self.state = states[found.index(expected)]
        # A rank without a share of the last step has ended before the others.
        assert {*found} <= {expected, (self.epoch + 1, 0) if self.seen == SIZE else expected}


@pytest.mark.parametrize("examples", [40, pytest.param(150, marks=pytest.mark.slow)])
def test_a_training_goes_on_wherever_it_was_stopped(make_dataset, examples):
    index = make_dataset(rows=(9, 8, 6), shape=(2, 2, 3))
    dataset = MemmapDataset(index.path, columns=["index"])
    run_state_machine_as_test(
        lambda: Training(dataset),
        # Shrinking would take minutes, and 20 steps can be read as they are.
        settings=settings(
            max_examples=examples,
            stateful_step_count=20,
            deadline=None,
            phases=[Phase.reuse, Phase.generate],
        ),
    )
