"""Which samples have the values that a user or a command line asks for.

tests/reading/test_dataset.py has more of them, as `MemmapDataset.where`.
"""

import numpy as np
import pytest

from memload.storage.where import matching, values_in

COLUMNS = {
    "label": np.arange(8) % 4,
    "split": np.arange(8) // 4,
    "age": np.arange(8, dtype=np.float32) / 10,
    "sharp": np.arange(8) < 2,
    "id": 2**60 + np.arange(8),
}


@pytest.fixture
def index(make_dataset):
    categories, classes = {"split": ("a,b", "c")}, ("ant", "bee", "cat", "dog")
    return make_dataset(rows=(8,), columns=COLUMNS, categories=categories, classes=classes)


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ({"label": 1}, [1, 5]),
        ({"label": ["bee", np.int64(0)], "split": "c"}, [4, 5]),
        ({"split": {"a,b"}, "sharp": True}, [0, 1]),
        ({"age": (0.1, 0.7)}, [1, 7]),
        ({"age": 0}, [0]),
        ({"id": 2**60 + 1}, [1]),
    ],
)
def test_samples_match_that_have_one_of_the_values_in_each_column(index, conditions, expected):
    assert matching(index, conditions).tolist() == expected


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ({"label": 4}, "'label' has no value 4. It has ant, bee, cat, dog"),
        ({"label": True}, "'label' has no value True"),
        ({"sharp": 2}, "'sharp' has no value 2. It has False, True"),
    ],
)
def test_what_no_sample_can_have_is_refused_with_what_there_is(index, condition, message):
    with pytest.raises(ValueError, match=message):
        matching(index, condition)


@pytest.mark.parametrize(
    ("name", "text", "values"),
    [
        ("label", "bee,cat", ["bee", "cat"]),
        ("label", "1", ["1"]),
        ("split", "a,b", ["a,b"]),
        ("age", "-1,0.5,1e3", [-1, 0.5, 1000.0]),
        ("id", f"{2**60 + 1}", [2**60 + 1]),
        ("sharp", "1,true", [1, True]),
        ("none", "1,2", ["1,2"]),
    ],
)
def test_a_text_of_the_command_line_is_split_at_commas_unless_it_is_a_value(
    index, name, text, values
):
    assert values_in(text, index, name) == values


def test_a_text_in_a_column_of_numbers_is_refused(index):
    with pytest.raises(ValueError, match="age is '1,old', but this column has no texts"):
        values_in("1,old", index, "age")
