"""Names of samples, packed."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memload.storage.keys import Keys

NAMES = ["ant/1.jpg", "", "zoë/ü.jpg", "new\nline", "\udcff\udc80", "nul\0", "ant/1.jpg"]


def test_keys_are_a_sequence():
    keys = Keys.of(NAMES)
    assert list(keys) == NAMES
    assert "new\nline" in keys
    assert keys.index("new\nline") == 3
    assert keys.count("ant/1.jpg") == 2
    assert keys[np.int64(2)] == keys[-5] == NAMES[2]
    assert keys[1:6:2] == NAMES[1:6:2]
    assert keys[::-1] == NAMES[::-1]
    for index in (7, -8, 2**70):
        with pytest.raises(IndexError):
            keys[index]
    assert repr(Keys.of(["a"])) == "Keys(1 name: a)"
    assert repr(Keys.of(["name"] * 10**4)) == "Keys(10,000 names: name, name, name, …)"


@given(st.lists(st.text(max_size=9), min_size=1, max_size=8), st.data())
@settings(max_examples=60, deadline=None, database=None)
def test_taken_names_are_in_the_order_asked_for(names, data):
    numbers = st.lists(st.integers(0, len(names) - 1), min_size=1, max_size=9)
    first = data.draw(numbers)
    second = data.draw(st.lists(st.integers(0, len(first) - 1), max_size=9))
    taken = Keys.of(names).take(np.array(first)).take(np.array(second, np.int64))
    expected = [names[first[position]] for position in second]
    assert list(taken) == [taken[i] for i in range(len(taken))] == expected
    assert list(Keys(*taken.pack())) == list(pickle.loads(pickle.dumps(taken))) == expected
