"""How messages show numbers and names."""

from itertools import count

import pytest

from memload.wording import counted, listed, shape_text, size_text


def test_numbers_are_told_with_their_nouns():
    assert counted(1, "row") == "1 row"
    assert counted(0, "row") == "0 rows"
    assert counted(12_345, "class", "classes") == "12,345 classes"


def test_long_lists_and_names_are_cut_and_hostile_ones_escaped():
    assert listed(["a", "b"], 2) == "a, b"
    assert listed(map(str, count()), 3) == "0, 1, 2, …"
    assert listed([]) == ""
    assert (
        listed(['it\'s "ä"', "a\nb", "c\x1b[1m", "\udcff"])
        == 'it\'s "ä", a\\nb, c\\x1b[1m, \\udcff'
    )
    assert len(listed(["x" * 10**6])) == 200


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (999, "999 bytes"),
        (1000, "1 kB"),
        (51_123_456, "51.1 MB"),
        (999_499_999, "999 MB"),
        (999_950_848, "1 GB"),
        (2 * 10**15, "2e+03 TB"),
    ],
)
def test_sizes_have_three_digits(size, text):
    assert size_text(size) == text


def test_shapes_are_told_with_crosses():
    assert shape_text((224, 224, 3)) == "224×224×3"
