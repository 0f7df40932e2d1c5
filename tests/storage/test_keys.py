"""Names of samples, packed."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memload.errors import FormatError
from memload.storage.keys import Keys

NAMES = ["ant/1.jpg", "", "zoë/ü.jpg", "new\nline", "\udcff\udc80", "nul\0", "ant/1.jpg"]


@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"])) | st.binary().map(os.fsdecode), max_size=8
    )
)
@settings(max_examples=60, deadline=None, database=None)
def test_names_come_back_as_they_were(names: list[str]) -> None:
    keys = Keys.of(names)
    keys.check()
    assert len(keys) == len(names)
    assert list(keys) == names
    assert [keys[-1 - i] for i in range(len(names))] == names[::-1]


def test_names_are_packed_as_the_bytes_of_the_filesystem() -> None:
    keys = Keys.of(["é", "\udcff", ""])
    assert keys.data.tobytes() == b"\xc3\xa9\xff"
    assert keys.offsets.tolist() == [0, 2, 3, 3]
    assert keys.offsets.dtype == np.int64


def test_a_slice_is_a_list_of_names() -> None:
    assert Keys.of(NAMES)[1:6:2] == NAMES[1:6:2]
    assert Keys.of(NAMES)[::-1] == NAMES[::-1]


def test_keys_are_a_sequence() -> None:
    keys = Keys.of(NAMES)
    assert "new\nline" in keys
    assert keys.index("new\nline") == 3
    assert keys.count("ant/1.jpg") == 2
    assert keys[np.int64(2)] == NAMES[2]


@pytest.mark.parametrize("index", [3, -4, 2**70])
def test_an_index_out_of_range_is_told(index: int) -> None:
    with pytest.raises(IndexError, match=rf"key: expected -3 <= index < 3, found {index}"):
        Keys.of(["a", "b", "c"])[index]


def test_keys_compare_by_content() -> None:
    assert Keys.of(["a", "b"]) == ["a", "b"]
    assert Keys.of(["a", "b"]) == Keys.of(("a", "b"))
    assert Keys.of(["a", "b"]) != ["a"]
    assert Keys.of(["a", "b"]) != ["a", "c"]
    assert Keys.of(["a"]) != "a"
    with pytest.raises(TypeError, match="unhashable"):
        hash(Keys.of(["a"]))


def test_the_repr_is_short() -> None:
    assert repr(Keys.of(["a"])) == "Keys(['a'], 1 names)"
    assert repr(Keys.of(["name"] * 10**4)) == "Keys(['name', 'name', 'name', …], 10000 names)"


def test_taken_names_are_in_the_order_asked_for() -> None:
    taken = Keys.of(NAMES).take(np.array([4, 0, 4, 1]))
    assert list(taken) == [NAMES[4], NAMES[0], NAMES[4], NAMES[1]]
    taken.check()


@pytest.mark.parametrize(
    "offsets",
    [
        [0, 2, 1, 4],  # goes back
        [1, 2, 3, 4],  # starts late
        [0, 1, 2, 3],  # ends early
        [0, 1, 2, 5],  # ends late
        [0, -1, 2, 4],
        [0, 2**62, -(2**63), -(2**62), 4],  # a step back so long that the difference overflows
    ],
)
def test_offsets_that_do_not_fit_the_bytes_are_found(offsets: list[int]) -> None:
    with pytest.raises(
        FormatError, match=r"^key/offsets: expected numbers that rise from 0 to 4, found .* damaged"
    ):
        Keys(np.array(offsets), np.zeros(4, np.uint8)).check()


@pytest.mark.parametrize(
    "offsets", [[3, 2], [-1, 2], [0, 5], [2**63 - 1, 2**63 - 1], [-(2**63), 4]]
)
def test_a_name_outside_the_bytes_is_never_read(offsets: list[int]) -> None:
    with pytest.raises(
        FormatError, match=r"^key/offsets: expected 0 <= start <= stop <= 4, found .* for sample 0"
    ):
        Keys(np.array(offsets), np.zeros(4, np.uint8))[0]
