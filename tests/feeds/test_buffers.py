import threading

import torch

from memload.feeds.buffers import BufferPool


def test_memory_comes_back_when_its_last_reference_dies_and_not_before() -> None:
    pool = BufferPool(2)
    first = pool.take(100)
    address = first.data_ptr()
    view = first.view(10, 10)[3:].permute(1, 0)
    del first
    assert pool.take(100).data_ptr() != address
    del view
    assert address in {taken.data_ptr() for taken in [pool.take(100), pool.take(100)]}


def test_an_array_of_a_tensor_keeps_its_memory() -> None:
    pool = BufferPool(2)
    array = pool.take(100).numpy()[10:]
    array[:] = 7
    others = [pool.take(100).fill_(1) for _ in range(4)]
    assert (array == 7).all()
    assert len(others) == 4


def test_no_more_than_told_are_kept() -> None:
    pool = BufferPool(3)
    held = [pool.take(64) for _ in range(10)]
    del held
    assert len(pool._free) == 3


def test_a_buffer_serves_sizes_down_to_half_of_it() -> None:
    pool = BufferPool(2)
    address = pool.take(100).data_ptr()
    for size, same in [(50, True), (49, False), (101, False), (100, True)]:
        tensor = pool.take(size)
        assert (tensor.dtype, tensor.shape) == (torch.uint8, (size,))
        assert (tensor.data_ptr() == address) == same


def test_threads_never_get_the_same_memory() -> None:
    pool = BufferPool(3)
    wrong = []

    def work(value: int) -> None:
        for _ in range(300):
            tensor = pool.take(512).fill_(value)
            if not (tensor == value).all():
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
