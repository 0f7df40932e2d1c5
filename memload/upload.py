"""Small arrays from the host to a device."""

import numpy as np
import torch
from torch import Tensor


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """Return a small array as a tensor on ``device``. The host never waits for the device.

    On CUDA the copy is ordered on the current stream. It goes through page-locked memory, since a
    copy from ordinary memory may wait for all the work on the stream. On the CPU the tensor shares
    the array's memory.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    page_locked = torch.empty_like(tensor, pin_memory=True)
    # NumPy copies in this thread. Of an array of 128 KB or more, torch copies a part in each of its
    # threads, and these then keep their cores busy for 10 ms.
    page_locked.numpy()[...] = array
    return page_locked.to(device, non_blocking=True)
