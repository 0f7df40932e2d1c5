"""Change some images of a batch, and leave the others as they are."""

from collections.abc import Callable

import numpy as np
from torch import Tensor

from memload.upload import upload


def change_some(images: Tensor, places: np.ndarray, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return images of which those at some places are changed, in new memory.

    ``places`` are int64 ``(n,)``, each once. ``change`` gets these images ``(n, …)`` as a copy, and
    returns as many of the same shape and dtype. It is not called if there are none.
    """
    if not len(places):
        return images.clone()
    if len(places) == len(images) and (places[1:] > places[:-1]).all():
        return change(images.clone())
    changed, chosen = images.clone(), upload(places, images.device)
    changed[chosen] = change(images[chosen])
    return changed
