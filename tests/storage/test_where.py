"""Which samples have the values that a user or a command line asks for."""

import numpy as np
import pytest

from memload.storage.where import matching, values_in

COLUMNS = {
    "label": np.arange(8) % 4,
    "split": np.arange(8) // 4,
    "fold": np.arange(8) % 2,
    "age": np.arange(8, dtype=np.float32) / 10,
    "sharp": np.arange(8) < 2,
}


@pytest.fixture
def index(make_dataset):
    categories = {"split": ("a,b", "c"), "fold": ("7", "0")}
    return make_dataset(
        rows=(8,), columns=COLUMNS, categories=categories, classes=("ant", "bee", "cat", "dog")
    )


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"label": "bee"}, [1, 5]),
        ({"label": 1}, [1, 5]),
        ({"label": ["bee", np.int64(0)], "split": "c"}, [4, 5]),
        ({"split": {"a,b"}, "sharp": True}, [0, 1]),
        ({"age": (0.1, 0.7)}, [1, 7]),
        ({"age": 0}, [0]),
        ({"split": []}, []),
    ],
)
def test_samples_match_that_have_one_of_the_values_in_each_column(index, conditions, expected):
    assert matching(index, conditions).tolist() == expected


@pytest.mark.parametrize(
    ("condition", "error", "message"),
    [  # tests/reading/test_wrong_arguments.py has the others
        ({"label": 4}, ValueError, "'label' has no value 4. It has ant, bee, cat, dog"),
        ({"label": True}, TypeError, "'label' has no value True"),
        ({"sharp": 2}, ValueError, "'sharp' has no value 2. It has False, True"),
    ],
)
def test_what_no_sample_can_have_is_refused_with_what_there_is(index, condition, error, message):
    with pytest.raises(error, match=message):
        matching(index, condition)


@pytest.mark.parametrize(
    ("name", "text", "values"),
    [
        ("label", "bee,cat", ["bee", "cat"]),
        ("label", "1,cat", [1, "cat"]),
        ("split", "a,b", ["a,b"]),
        ("fold", "7,0", ["7", "0"]),
        ("age", "-1,0.5,1e3", [-1, 0.5, 1000.0]),
        ("sharp", "1", [1]),
    ],
)
def test_a_text_of_the_command_line_is_split_at_commas_unless_it_is_a_value(
    index, name, text, values
):
    assert values_in(text, index, name) == values


def test_a_text_in_a_column_of_numbers_is_refused(index):
    with pytest.raises(ValueError, match="age is '1,old', but this column has no texts"):
        values_in("1,old", index, "age")
