"""What the benchmarks make of what they measure."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2]))
from benchmarks import cold, harness


def test_ways_take_turns_and_the_first_round_is_left_out():
    called = []

    def way(name):
        called.append(name)
        return {"rate": len(called), "cores": 1.0} if name == "b" else float(len(called))

    found = harness.measure({"a": lambda: way("a"), "b": lambda: way("b")}, 2)
    assert called == ["a", "b"] * 3
    assert found == {"a": [3, 5], "b › rate": [4, 6], "b › cores": [1, 1]}


def test_the_ratio_of_each_round_is_not_a_number_beside_nothing():
    first, second, third = harness.divide([1.0, 10.0, 1.0], [2.0, 40.0, 0.0])
    assert (first, second) == (0.5, 0.25)
    assert third != third


@pytest.mark.parametrize(
    ("values", "quartiles"),
    [([4.0], (4, 4, 4)), ([1.0, 3.0], (1.5, 2, 2.5)), ([1.0, 2.0, 3.0], (1, 2, 3))],
)
def test_a_spread_is_median_and_quartiles(values, quartiles):
    found = harness.spread(values)
    assert (found["lower_quartile"], found["median"], found["upper_quartile"]) == quartiles
    assert found["repeats"] == len(values)


def test_names_become_tables():
    assert harness.nested({"a › b": 1, "a › c": 2, "d": 3}) == {"a": {"b": 1, "c": 2}, "d": 3}


def test_a_run_with_less_than_usual_is_partial():
    usual = {"images": 10, "only": [], "rounds": 5, "fast": False, "batch": 8}
    words = ["--images", "5", "--only", "a b", "--rounds", "3", "--fast"]
    options = harness.parse_options(usual, {}, words)
    assert harness.left_out(options, usual) == ["--images 5", "--only 'a b'"]
    options.rounds = 2
    assert "--rounds 2" in harness.left_out(options, usual)


@pytest.fixture
def cold_file(tmp_path):
    path = tmp_path / "rows.bin"
    path.write_bytes(bytes(cold.HEADER_BYTES + 400 * 5000))
    try:
        cold.drop_from_page_cache(path)
    except RuntimeError as error:
        pytest.skip(str(error))  # such as on tmpfs
    return path


def test_a_file_is_not_in_ram_once_it_was_dropped_and_is_once_it_was_read(cold_file):
    assert cold.share_in_ram(cold_file) == 0
    assert cold.read_directly(cold_file, np.arange(400), 5000) == 400
    assert cold.share_in_ram(cold_file) == 0
    cold.read_sequentially(cold_file, 400)
    assert cold.share_in_ram(cold_file) == 1


def test_a_file_that_is_mapped_cannot_be_dropped(cold_file):
    mapped = np.memmap(cold_file, mode="r")
    assert not mapped.any()
    with pytest.raises(RuntimeError, match=r"% of rows.bin stays in RAM"):
        cold.drop_from_page_cache(cold_file)
