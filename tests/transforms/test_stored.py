"""Outputs stay as they were: images within one level, or 1.5e-5 for floats, and what follows them."""

import numpy as np
import pytest

from tests.transforms import stored

NAMES = [
    *(f"{name} {dtype}" for name in stored.STEPS for dtype in ("uint8", "float")),
    *stored.RECIPES,
]


@pytest.fixture(scope="module")
def expected():
    with np.load(stored.FILE) as file:
        return dict(file)


@pytest.fixture(scope="module")
def found():
    return {name: dict(stored.flat(name, value)) for name, value in stored.outputs()}


def test_every_output_is_compared(expected, found):
    assert {key.split("/")[0] for key in expected} <= {*found} <= {*NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_those_of_before(name, expected, found):
    for key, array in found.get(name, {}).items():
        if key not in expected:
            assert stored.is_given(key, array)
            continue
        before, kind = expected[key], key.split("/")[1]
        tolerance = {"mask": 0, "points": 1e-3, "boxes": 1e-3}.get(kind, 1.5e-5)
        if kind == "images" and not name.endswith("float"):
            tolerance = 1 if array.dtype == np.uint8 else 1.05 / 255 / 0.224  # ImageNet's std
        assert array.dtype.kind == before.dtype.kind
        is_close = np.isclose(array.astype(float), before, 1.5e-5, tolerance, equal_nan=True)
        # Where two pixels are equally near, the nearest may be the other one.
        is_warped = any(step in name for step in ("Augment", "Affine", "Rotation", "Perspective"))
        assert is_close.mean() >= (0.997 if is_warped and kind in ("images", "mask") else 1)
