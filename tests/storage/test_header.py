"""The header of an index: memory and time follow from its own length, and from no number in it."""

import json
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from memload.storage.header import MAX_HEADER_BYTES, Tensor, header_bytes, parse_header


def parse(header: Any, data: bytes = b"") -> Any:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file = len(text).to_bytes(8, "little") + text + data
    return parse_header(file[: header_bytes(file[:8], len(file))], len(file))


def tensor(dtype: str, shape: list[Any], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def test_what_safetensors_writes_is_understood() -> None:
    tensors = {
        "a": np.arange(6, dtype=np.int16).reshape(2, 3),
        "é": np.zeros((0, 4)),
        "b": np.array(True),
    }
    data = safetensors.numpy.save(tensors, {"key": "value"})
    header = parse_header(data[: header_bytes(data[:8], len(data))], len(data))
    assert header.metadata == {"key": "value"}
    assert header.tensors.keys() == tensors.keys()
    for name, found in header.tensors.items():
        piece = data[header.start + found.start : header.start + found.stop]
        np.testing.assert_array_equal(
            np.frombuffer(piece, found.dtype).reshape(found.shape), tensors[name]
        )


def test_tensors_may_stand_in_any_order() -> None:
    header = parse({"b": tensor("U8", [3], 2, 5), "a": tensor("U8", [2], 0, 2)}, bytes(5))
    assert header.tensors == {"b": Tensor("|u1", (3,), 2, 5), "a": Tensor("|u1", (2,), 0, 2)}


@pytest.mark.parametrize("first", [b"", b"\1", bytes(7)])
def test_a_file_shorter_than_a_length_is_told(first: bytes) -> None:
    with pytest.raises(ValueError, match=f"{len(first)} bytes, of which a header would take"):
        header_bytes(first, len(first))


def test_a_header_longer_than_the_file_or_than_allowed_is_told_before_it_is_read() -> None:
    assert header_bytes((10).to_bytes(8, "little"), 18) == 18
    with pytest.raises(ValueError, match="17 bytes, of which a header would take 18"):
        header_bytes((10).to_bytes(8, "little"), 17)
    with pytest.raises(ValueError, match="where 100,000,000 are allowed"):
        header_bytes((MAX_HEADER_BYTES + 1).to_bytes(8, "little"), 2**40)


@pytest.mark.parametrize(
    ("header", "told"),
    [
        (
            {"a": tensor("U8", [2], 0, 2), "b": tensor("U8", [2], 1, 3)},
            "'b' from byte 1 on, and not from 2",
        ),
        (
            {"a": tensor("U8", [1], 0, 1), "b": tensor("U8", [1], 2, 3)},
            "'b' from byte 2 on, and not from 1",
        ),
        ({"a": tensor("U8", [2], 0, 2)}, "3 bytes of tensors, where the header tells of 2"),
        ({"a": tensor("U8", [4], 0, 4)}, "3 bytes of tensors, where the header tells of 4"),
        ({"a": tensor("U8", [3], 0, 3) | {"more": 1}}, "no tensor by the name 'a'"),
        ({"a": tensor("U8", [2**62, 2**62], 0, 3)}, "no tensor by the name 'a'"),
        ({"a": tensor("U8", [3.0], 0, 3)}, "no tensor by the name 'a'"),
        ({"a": tensor("O", [3], 0, 3)}, "no tensor by the name 'a'"),
        ({"\ud800": tensor("U8", [3], 0, 3)}, "surrogates not allowed"),
        ({"a": tensor("U8", [3], 0, 3), "__metadata__": {"b": 1}}, "metadata that are no texts"),
        (b'{"a":1,"a":2}', "there twice"),
        (b'{"a":NaN}', "NaN, which JSON does not know"),
        (b"[]", "no JSON object"),
        (b"\xff", "utf-8"),
    ],
)
def test_a_header_that_is_none_is_told(header: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse(header, bytes(3))


@pytest.mark.parametrize(
    "header",
    [
        {"a": tensor("U8", [10**4000] * 60, 0, 3)},
        {"a": tensor("U8", [10**4000] * 3000, 0, 3)},
        {"a": tensor("U8", [2**62] * 250_000, 0, 3)},
        {str(number): tensor("U8", [3], 0, 3) for number in range(20_000)},
        {"a": [[]] * 200_000},
    ],
    ids=["long numbers", "many long numbers", "many dimensions", "many tensors", "many lists"],
)
def test_a_header_costs_what_its_length_costs(header: Any) -> None:
    text = json.dumps(header).encode()
    started = time.process_time()
    with pytest.raises(ValueError):  # noqa: PT011  # each for another reason
        parse(text, bytes(3))
    assert time.process_time() - started < 5
    tracemalloc.start()
    try:
        with pytest.raises(ValueError):  # noqa: PT011  # as above
            parse(text, bytes(3))
        assert tracemalloc.get_traced_memory()[1] < 40 * len(text) + (1 << 20)
    finally:
        tracemalloc.stop()
