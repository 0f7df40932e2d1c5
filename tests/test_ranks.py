"""Which process this one is. That it counts is tested where it is used, as by a Loader."""

import pytest
import torch.distributed as dist

from memload import ranks


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_single_process_is_the_first_of_one():
    assert (ranks.this_process(), ranks.local_replicas()) == ((0, 1), 1)


def test_torchruns_variables_say_which_it_is(monkeypatch):
    for name, value in {"RANK": "10", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    assert (ranks.this_process(), ranks.local_replicas()) == ((10, 16), 8)
    assert ranks.resolve(0, 2) == (0, 2)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about addresses
@pytest.mark.parametrize("names", [["RANK"], ["WORLD_SIZE"], ["RANK", "WORLD_SIZE"]])
def test_a_process_group_takes_precedence(group, names, monkeypatch):
    for name in names:
        monkeypatch.setenv(name, "not a number")
    assert ranks.resolve(None, None) == (0, 1)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"WORLD_SIZE": "4"},
            "variable WORLD_SIZE is '4', but RANK is not set, .* Set both, unset",
        ),
        ({"RANK": "0"}, "variable RANK is '0', but WORLD_SIZE is not set, .* give rank=…"),
        ({"RANK": "3", "WORLD_SIZE": "3"}, "^rank must be at least 0 and less than num_replicas=3"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "variable RANK is '-1', .* of at least 0"),
        ({"RANK": "²", "WORLD_SIZE": "2"}, "variable RANK is '²', .* of at least 0"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "variable WORLD_SIZE is '0', .* of at least 1"),
        ({"RANK": "0", "WORLD_SIZE": "1.5"}, r"variable WORLD_SIZE is '1\.5', .* of at least 1"),
    ],
)
def test_variables_that_do_not_say_which_it_is_are_an_error(variables, message, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        ranks.resolve(None, None)
    assert ranks.resolve(1, 2) == (1, 2)


def test_a_number_of_local_processes_that_is_none_is_an_error(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "")
    with pytest.raises(ValueError, match=r"variable LOCAL_WORLD_SIZE is '', .* of at least 1"):
        ranks.local_replicas()
