"""Which process this one is; the rest is in test_loader.py and transforms/test_compose.py, which use it."""

from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from memload import ranks

NAMES = {
    "RANK": ranks.rank,
    "WORLD_SIZE": ranks.this_process,
    "LOCAL_WORLD_SIZE": ranks.local_replicas,
}


@pytest.fixture(autouse=True)
def nobody_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_alone_it_is_the_first_of_one() -> None:
    assert (ranks.rank(), ranks.this_process(), ranks.local_replicas()) == (0, 1, 1)


def test_torchruns_variables_say_which_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "10", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    assert (ranks.rank(), ranks.this_process(), ranks.local_replicas()) == (10, 16, 8)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of the group's own, about addresses
def test_a_process_group_goes_before_them(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "none of its business")
    assert (ranks.rank(), ranks.this_process()) == (0, 1)


@pytest.mark.parametrize("told", ["", "first", "-1", "1.5", "²", "٣"])
@pytest.mark.parametrize(("name", "ask"), NAMES.items())
def test_what_is_no_number_is_told(
    name: str, ask: Callable[[], int], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, told)
    with pytest.raises(
        ValueError,
        match=rf"variable {name} is '.*torchrun sets it to an integer of at least [01]",
    ):
        ask()


def test_there_is_one_process_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "0")
    with pytest.raises(ValueError, match="WORLD_SIZE is '0'"):
        ranks.this_process()
