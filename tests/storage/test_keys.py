"""Names of samples, packed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memload.storage.keys import Keys

NAMES = ["ant/1.jpg", "", "zoë/ü.jpg", "new\nline", "\udcff\udc80", "nul\0", "ant/1.jpg"]


def test_keys_are_a_sequence() -> None:
    keys = Keys.of(NAMES)
    assert "new\nline" in keys
    assert keys.index("new\nline") == 3
    assert keys.count("ant/1.jpg") == 2
    assert keys[np.int64(2)] == NAMES[2]
    assert keys[1:6:2] == NAMES[1:6:2]
    assert keys[::-1] == NAMES[::-1]
    for index in (7, -8, 2**70):
        with pytest.raises(IndexError, match=rf"key {index} is out of range: there are 7 names"):
            keys[index]
    assert repr(Keys.of(["a"])) == "Keys(['a'], 1 name)"
    assert repr(Keys.of(["name"] * 10**4)) == "Keys(['name', 'name', 'name', …], 10,000 names)"


def test_keys_compare_by_content() -> None:
    assert Keys.of(["a", "b"]) == ["a", "b"]
    assert Keys.of(["a", "b"]) == Keys.of(("a", "b"))
    assert Keys.of(["a", "b"]) != ["a"]
    assert Keys.of(["a", "b"]) != ["a", "c"]
    assert Keys.of(["a"]) != "a"
    with pytest.raises(TypeError, match="unhashable"):
        hash(Keys.of(["a"]))


@given(st.lists(st.text(max_size=9), min_size=1, max_size=8), st.data())
@settings(max_examples=60, deadline=None, database=None)
def test_taken_names_are_in_the_order_asked_for(names: list[str], data: st.DataObject) -> None:
    numbers = st.lists(st.integers(0, len(names) - 1), min_size=1, max_size=9)
    first = data.draw(numbers)
    second = data.draw(st.lists(st.integers(0, len(first) - 1), max_size=9))
    taken = Keys.of(names).take(np.array(first)).take(np.array(second, np.int64))
    expected = [names[first[position]] for position in second]
    assert list(taken) == expected
    assert list(Keys(*taken.pack())) == expected
