"""Which process this one is. That it counts is tested where it is used, as in reading/test_loader.py."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from memload import ranks


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_single_process_is_the_first_of_one() -> None:
    assert (ranks.this_process(), ranks.local_replicas()) == ((0, 1), 1)


def test_torchruns_variables_say_which_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "10", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    assert (ranks.this_process(), ranks.local_replicas()) == ((10, 16), 8)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about addresses
def test_a_process_group_takes_precedence(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "not a number")
    assert ranks.this_process() == (0, 1)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("RANK", "first"),
        ("RANK", "-1"),
        ("RANK", "²"),
        ("WORLD_SIZE", "1.5"),
        ("WORLD_SIZE", "0"),
        ("LOCAL_WORLD_SIZE", ""),
    ],
)
def test_a_variable_that_is_not_a_number_is_an_error(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, text)
    read = ranks.local_replicas if name == "LOCAL_WORLD_SIZE" else ranks.this_process
    with pytest.raises(ValueError, match=rf"variable {name} is '{text}', .* at least [01]\."):
        read()
