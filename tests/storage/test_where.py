"""Which samples have the values that a user or a command line asks for.

tests/reading/test_dataset.py has more of them, as `MemmapDataset.where`.
"""

import numpy as np
import pytest

from memload.storage.where import matching

COLUMNS = {
    "label": np.arange(8) % 4,
    "split": np.arange(8) // 4,
    "age": np.arange(8, dtype=np.float32) / 10,
    "sharp": np.arange(8) < 2,
    "id": 2**60 + np.arange(8),
}


def chosen(index, conditions):
    return matching(len(index), index.columns, index.texts, conditions).tolist()


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
        ({"label": "bee,cat"}, [1, 2, 5, 6]),
        ({"split": "a,b"}, [0, 1, 2, 3]),
        ({"split": "c", "age": "0.1,0.5,6e-1"}, [5, 6]),
        ({"id": f"{2**60 + 1}"}, [1]),
        ({"sharp": "true"}, [0, 1]),
    ],
)
def test_samples_match_that_have_one_of_the_values_in_each_column(index, conditions, expected):
    assert chosen(index, conditions) == expected


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ({"label": 4}, "'label' has no value 4. It has ant, bee, cat, dog"),
        ({"label": True}, "'label' has no value True"),
        ({"label": "1"}, "'label' has no value '1'"),
        ({"sharp": 2}, "'sharp' has no value 2. It has False, True"),
        ({"age": "0.1,old"}, "'age' has no value 'old'"),
        ({"kind": "1,2"}, "no column 'kind'. There are label, split"),
    ],
)
def test_what_no_sample_can_have_is_refused_with_what_there_is(index, condition, message):
    with pytest.raises(ValueError, match=message):
        chosen(index, condition)
