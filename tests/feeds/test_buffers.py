"""Memory that is used again."""

import torch

from memload.feeds.gather import BufferPool


def test_memory_comes_back_when_its_last_reference_dies_and_not_before():
    pool = BufferPool(2)
    first = pool.take(100)
    address = first.data_ptr()
    view = first.view(10, 10)[3:].permute(1, 0)
    array = pool.take(100).numpy()[10:]
    array[:] = 7
    del first
    others = [pool.take(100).fill_(1) for _ in range(4)]
    assert address not in {taken.data_ptr() for taken in others}
    assert (array == 7).all()
    del view
    assert pool.take(100).data_ptr() == address


def test_no_more_unused_buffers_are_kept_than_told():
    pool = BufferPool(3)
    taken = [pool.take(64) for _ in range(10)]
    addresses = {tensor.data_ptr() for tensor in taken}
    del taken
    kept = [pool.take(64) for _ in range(3)]
    assert {tensor.data_ptr() for tensor in kept} <= addresses
    assert len(pool._free) == 0


def test_a_buffer_serves_sizes_down_to_half_of_it():
    pool = BufferPool(2)
    address = pool.take(100).data_ptr()
    for size, same in [(50, True), (49, False), (100, True), (101, False)]:
        tensor = pool.take(size)
        assert (tensor.dtype, tensor.shape) == (torch.uint8, (size,))
        assert (tensor.data_ptr() == address) == same
        del tensor
