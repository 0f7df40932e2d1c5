"""Which names stand for the same picture."""

import pytest

from memload.editing.matching import match_or_raise


@pytest.mark.parametrize(
    ("keys", "names", "expected"),
    [
        (["a/1.jpg", "b/2.jpg", "c"], ["b/2.png", "c", "a/1"], [2, 0, 1]),
        (["a.jpg", "a.png"], ["a.png", "a.jpg"], [1, 0]),  # the names themselves come first
        (["a.jpg", "a.png"], ["a.png"], [-1, 0]),  # and belong to nobody else
        (["a.jpg"], ["a.jpg.PNG"], [0]),
        (["v1.0/a.0001.jpg", "v1.0/b"], ["v1.0/b", "v1.0/a.0001"], [1, 0]),
        (["x.1", "x.2"], ["x.1.png", "x.2.png"], [0, 1]),  # a dot is not always an extension
        (["x.1.jpg", "x.2.jpg"], ["x.2", "x.1"], [1, 0]),
        (["f_0.25", "f_0.50"], ["f_0.25"], [0, -1]),
        (["a.jpg", "a.jpg"], ["a.png"], [0, 0]),  # a sample that is there twice
        (["a/1.jpg", "b/2.jpg"], ["2.png", "1.png"], [1, 0]),
        (["1.jpg", "2.jpg"], ["v/2.png", "v/1.png", "w/3.png"], [1, 0]),
        (["a/1.jpg", "b/1.jpg"], ["b/1.png"], [-1, 0]),  # folders count as long as one name fits
        (["a/1.jpg", "a/2.jpg"], ["b/2.png"], [-1, -1]),  # other folders, other pictures
        (["train/1.jpg"], ["val/1.jpg"], [-1]),
        (["a"], ["b"], [-1]),
        (["a"], [], [-1]),
        ([], ["a"], []),
    ],
)
def test_names_fit_whatever_their_extension(
    keys: list[str], names: list[str], expected: list[int]
) -> None:
    assert match_or_raise(keys, names, "masks.bin").tolist() == expected


@pytest.mark.parametrize(
    ("keys", "names", "message"),
    [
        (
            ["a.jpg"],
            ["a.png", "a.tif"],
            "masks.bin: 'a.png' and 'a.tif' both fit 'a.jpg'",
        ),
        (["a"], ["a", "b", "a"], "masks.bin: 'a' and 'a' both fit 'a'"),
        (
            ["a/1.jpg", "b/1.jpg"],
            ["1.png"],
            "masks.bin: '1.png' fits both 'a/1.jpg' and 'b/1.jpg'",
        ),
        (["a.jpg", "a.tif"], ["a.png"], "masks.bin: 'a.png' fits both 'a.jpg' and 'a.tif'"),
    ],
)
def test_names_that_fit_twice_are_errors(keys: list[str], names: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        match_or_raise(keys, names, "masks.bin")


def test_a_name_that_fits_twice_is_no_error_where_it_is_not_needed() -> None:
    assert match_or_raise(["a.jpg"], ["a.jpg", "b.png", "b.tif"], "masks.bin").tolist() == [0]
