"""Launches that take little time do what Triton's own do."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from memload import launch as module
from memload.launch import launch


@triton.jit
def add(values, out, number, count, FACTOR: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803  # Triton's style
    """Write ``values * FACTOR + number`` to ``out``."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values + place, mask=place < count)
    tl.store(out + place, value * FACTOR + number, mask=place < count)


def added(values, number, factor=2):
    out = torch.zeros(len(values), device="cuda")
    # The constants are not in the order of the kernel's parameters.
    launch(add, 8, values, out, number, len(values), BLOCK=16, num_warps=1, FACTOR=factor)
    return out


def test_arguments_that_a_kernel_is_compiled_for_may_change():
    whole = torch.arange(100, device="cuda")
    for _ in range(3):
        for number in (0, 1, 16, 17, 2**40, -1, 1.0, 0.0, 0.5):
            for factor in (2, 3):
                # The second address is not divided by 16, and the dtypes differ.
                for values in (whole, whole[1:], whole.float(), whole.float()[3:64]):
                    expected = (values * factor + number).float()
                    assert torch.equal(added(values, number, factor), expected)


def test_a_launch_that_was_done_before_leaves_triton_alone(monkeypatch):
    values = torch.arange(50, device="cuda")
    first = added(values, 5)
    monkeypatch.setattr(type(add), "run", None)  # what Triton does at each launch
    assert torch.equal(added(values + 1, 5), first + 2)


def test_compiled_kernels_that_are_kept_have_an_end(monkeypatch):
    monkeypatch.setattr(module, "_MAX_COMPILED", 8)
    module._compiled.clear()
    values = torch.arange(50, device="cuda")
    for number in range(30):
        assert torch.equal(added(values, number), (values * 2 + number).float())
        assert len(module._compiled) <= 8


def test_work_is_done_on_the_current_stream():
    values = torch.zeros(50, device="cuda")
    added(values, 1)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        values += 3
        result = added(values, 1)
    stream.synchronize()
    assert torch.equal(result, torch.full((50,), 7.0, device="cuda"))
