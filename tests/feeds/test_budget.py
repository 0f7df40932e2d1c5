"""Loaders share a budget of RAM: what one claims is not left for the next."""

import gc
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memload import Index
from memload.feeds import budget, windows
from memload.feeds.budget import Claim, claim_all, claimed_bytes, least_left, reserve_bytes
from memload.feeds.windows import plan_for_rows
from memload.storage.shards import Shards


@pytest.fixture(autouse=True)
def nothing_claimed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(windows, "WINDOW_BYTES", 2 * 4096)
    gc.collect()
    assert not claimed_bytes()
    yield
    assert not claimed_bytes()


@pytest.fixture
def path(make_dataset: Callable[..., Index]) -> Path:
    """Ten rows in 34,096 bytes: five windows, of which the last has 1,328 bytes."""
    return make_dataset(rows=(10,), shape=(10, 100, 3)).path


def claim(path: Path, limit: float, rows: Any = range(10)) -> Claim:
    """Claim as a Loader does that opens the files for itself."""
    shards = Shards(Index.read(path))
    return claim_all([(shards, plan_for_rows(shards, np.array(rows)))], limit)[0]


def test_a_claim_is_what_fits_and_ends_with_its_last_reference(path: Path) -> None:
    one = claim(path, 20_000)
    assert (one.size, one.wanted) == (4 * 4096, 34_096)
    assert one.plan.tolist() == [[8192, 8192, 0, 0, 0]]
    assert claimed_bytes() == one.size
    del one
    assert not claimed_bytes()


def test_loaders_of_one_file_pay_for_it_once(path: Path) -> None:
    training = claim(path, 20_000)
    validation = claim(path, 20_000)
    assert np.array_equal(validation.plan, training.plan)
    assert claimed_bytes() == training.size
    more = claim(path, math.inf)
    assert more.size == claimed_bytes() == 34_096


def test_loaders_of_different_files_are_served_in_turn(
    path: Path, make_dataset: Callable[..., Index]
) -> None:
    other = make_dataset("other.bin", rows=(10,), shape=(10, 100, 3)).path
    first = claim(path, 40_000)
    second = claim(other, 40_000)
    third = claim(other, 40_000)
    assert (first.size, second.size, third.size) == (34_096, 4096, 4096)
    assert claimed_bytes() == 34_096 + 4096
    del first
    assert claim(other, 40_000).size == 34_096
    assert claim(path, 4096).size == 0  # the others hold more than that


def test_a_subset_claims_its_windows_only(path: Path) -> None:
    some = claim(path, math.inf, rows=[9])
    assert some.plan.tolist() == [[0, 0, 0, 8192, 1328]]
    assert claim(path, 16_384 + 1328, rows=[0, 9]).plan.tolist() == [[8192, 0, 0, 8192, 1328]]


def test_the_same_share_of_each_array_is_claimed(
    make_dataset: Callable[..., Index], add_array: Callable[..., Index]
) -> None:
    index = make_dataset(rows=(400,), shape=(10, 100, 3))
    index = add_array(index, "mask", np.zeros((400, 10, 100), np.uint8), "mask")
    arrays = [Shards(index), Shards(index, "mask")]
    wanted = [(shards, plan_for_rows(shards, np.arange(400))) for shards in arrays]
    images, masks = claim_all(wanted, 804_096)
    assert (images.wanted, masks.wanted) == (1_204_096, 404_096)
    assert images.size == 601_000 // 4096 * 4096  # half of each, in whole pages
    assert masks.size == 202_000 // 4096 * 4096
    again = claim_all(wanted, 804_096)
    assert [one.size for one in again] == [images.size, masks.size]
    everything = claim_all(wanted, 1_204_096 + 404_096)
    assert [one.size for one in everything] == [1_204_096, 404_096]


def test_three_gib_of_ram_are_left_to_other_uses_or_half_of_it() -> None:
    assert reserve_bytes(64 << 30) == 3 << 30
    assert reserve_bytes(4 << 30) == 2 << 30


def test_batches_may_take_a_part_of_what_is_left_where_it_is_little() -> None:
    assert least_left(64 << 30) == 3 << 30
    assert least_left(4 << 30) == 1 << 30


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_a_budget_of_its_own(path: Path) -> None:
    kept = claim(path, 3 * 4096)
    with budget._lock:  # as another thread of the parent may hold it
        child = os.fork()
        if not child:
            was_empty = not claimed_bytes()
            os._exit(0 if was_empty and claim(path, math.inf).size == 34_096 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert claimed_bytes() == kept.size
