"""Sharpness and blur: each pixel becomes a weighted sum of its neighbours.

All sums have a fixed order, and each product is rounded before it is added. So an image gets the
same bits on every device and in every batch. The order within a `conv2d` depends on the library.
"""

from collections.abc import Sequence
from numbers import Integral

import numpy as np
import torch
from torch import Tensor

from memload.transforms.arguments import wrong
from memload.transforms.geometry import HAS_TRITON
from memload.transforms.sub_batches import parts
from memload.upload import upload

#: Smaller weights become 0. They add less than the rounding does, and subnormal ones are slow.
_SMALLEST_WEIGHT = 2.0**-64
#: The kernel keeps the rows that it sums in registers, which are too few for larger radii.
_LARGEST_RADIUS_IN_KERNEL = 20


def sharpen(images: Tensor, factor: np.ndarray) -> Tensor:
    """Return images ``(n, C, H, W)``, each blurred or sharpened by its ``factor``.

    ``factor`` is float64 ``(n,)``, at least 0; 1 changes nothing. uint8 images have exactly the
    values of torchvision's ``adjust_sharpness`` for tensors. Floats are clamped to 0 to 1.
    """
    _check_each("sharpen", "factor", factor, len(images), "of at least 0", factor >= 0)
    return sharpen_in_place(images.clone(), factor)


def gaussian_blur(images: Tensor, kernel_size: int | Sequence[int], sigma: np.ndarray) -> Tensor:
    """Return images ``(n, C, H, W)``, each blurred by a Gaussian of its ``sigma`` in pixels.

    ``kernel_size`` is odd, or a pair (width, height), and ``sigma`` is float64 ``(n,)``, above 0.
    The values are those of torchvision's ``gaussian_blur``, but for roundings in float32 (in
    float64 for images of float64), which are smaller here. Raises ValueError if an image is too
    small to be reflected.

    uint8 images on CUDA go through one kernel of Triton, which takes no memory beyond the result,
    for kernel sizes of up to 41. It is compiled when a size is first used, in up to 6 s.
    """
    _check_each("GaussianBlur", "sigma", sigma, len(images), "above 0", sigma > 0)
    if not images.numel():
        return torch.empty_like(images)
    radii = radii_of(kernel_size, images)
    weights = _upload(weights_of(sigma, radii), images)
    if images.is_cuda and images.dtype == torch.uint8 and HAS_TRITON and fits_kernel(kernel_size):
        from memload.transforms.blur_kernel import blur

        return blur(images, weights, radii)
    return _blur(images, weights, radii)


def fits_kernel(kernel_size: int | Sequence[int]) -> bool:
    """Return whether `blur_kernel` can blur with a Gaussian kernel of this size."""
    return max(kernel_size_of(kernel_size)) // 2 <= _LARGEST_RADIUS_IN_KERNEL


def weights_of(sigma: np.ndarray, radii: tuple[int, int]) -> np.ndarray:
    """Return the weights of each image, float64 ``(n, …)``: those along x, then those along y.

    They are by the distance from the middle, from 0 to the radius.
    """
    different = {radius: _weights(sigma, radius) for radius in radii}
    return np.concatenate([different[radius] for radius in radii], 1)


def radii_of(kernel_size: int | Sequence[int], images: Tensor) -> tuple[int, int]:
    """Return the radii of a kernel along x and y. Raise ValueError for images too small for it."""
    radius_x, radius_y = (size // 2 for size in kernel_size_of(kernel_size))
    height, width = images.shape[2:]
    if width <= radius_x or height <= radius_y:
        expected = "less than twice as large as the images, which are reflected at their border"
        found = f"{kernel_size!r} for images of {height}x{width} pixels"
        raise wrong("GaussianBlur", "kernel_size", expected, found)
    return radius_x, radius_y


def _blur(images: Tensor, weights: Tensor, radii: tuple[int, int]) -> Tensor:
    """Return blurred images. ``weights`` are those along x, followed by those along y."""
    blurred = torch.empty_like(images)
    _, channels, height, width = images.shape
    radius_x, radius_y = radii
    along_x, along_y = weights[:, : radius_x + 1], weights[:, radius_x + 1 :]
    # What a sum needs at once: its terms, their border, a pair of them, and the sum itself.
    values = 4 * height * width + 2 * max(radius_x * height, radius_y * width)
    for part in parts(images, channels * values * weights.element_size()):
        result = images[part]
        for weight, axis, radius in ((along_x, 3, radius_x), (along_y, 2, radius_y)):
            result = _weighted_sum(result, weight[part], axis, radius)
        blurred[part] = result if images.is_floating_point() else result.round_()
    return blurred


def kernel_size_of(value: int | Sequence[int]) -> tuple[int, int]:
    """Return (width, height) of a kernel."""
    sizes = tuple(value) if isinstance(value, Sequence) else (value,)
    are_odd = all(isinstance(size, Integral) and size > 0 and size % 2 for size in sizes)
    if len(sizes) not in (1, 2) or not are_odd:
        expected = "an odd integer of at least 1, or a pair (width, height) of them"
        raise wrong("GaussianBlur", "kernel_size", expected, repr(value))
    return int(sizes[0]), int(sizes[-1])


def _check_each(
    owner: str, argument: str, values: np.ndarray, count: int, expected: str, is_right: np.ndarray
) -> None:
    """Check that there is a finite number for each of ``count`` images, and each is right."""
    if values.shape != (count,) or not (is_right & np.isfinite(values)).all():
        raise wrong(owner, argument, f"numbers {expected} ({count},)", repr(values))


def _computed_in(images: Tensor) -> torch.dtype:
    """Return the dtype of the sums."""
    return torch.float64 if images.dtype == torch.float64 else torch.float32


def _upload(numbers: np.ndarray, images: Tensor) -> Tensor:
    """Return numbers on the device of the images, in the dtype of the sums."""
    dtype = np.float64 if _computed_in(images) == torch.float64 else np.float32
    return upload(numbers.astype(dtype), images.device)


def _weights(sigma: np.ndarray, radius: int) -> np.ndarray:
    """Return weights ``(n, radius + 1)`` by the distance from the middle; both sides sum to 1."""
    with np.errstate(over="ignore"):  # a tiny sigma gives exp(-infinity), which is 0
        weights = np.exp(-0.5 * (np.arange(radius + 1) / sigma[:, None]) ** 2)
    weights /= (2 * weights.sum(1) - 1)[:, None]
    weights[weights < _SMALLEST_WEIGHT] = 0
    return np.asarray(weights)


def _weighted_sum(images: Tensor, weights: Tensor, axis: int, radius: int) -> Tensor:
    """Return the sums of pixels and their neighbours along an axis.

    Neighbours at the same distance are added first, since they have the same weight.
    """
    size, weights = images.shape[axis], weights.T[..., None, None, None]
    padded = _reflect(images, axis, radius).to(weights.dtype)
    result = padded.narrow(axis, radius, size) * weights[0]
    for distance in range(1, radius + 1):
        before = padded.narrow(axis, radius - distance, size)
        after = padded.narrow(axis, radius + distance, size)
        result.add_((before + after).mul_(weights[distance]))
    return result


def _reflect(images: Tensor, axis: int, radius: int) -> Tensor:
    """Return images continued as in a mirror by ``radius`` pixels on both sides of an axis."""
    if not radius:
        return images
    before = images.narrow(axis, 1, radius).flip(axis)
    after = images.narrow(axis, images.shape[axis] - 1 - radius, radius).flip(axis)
    return torch.cat([before, images, after], axis)


def sharpen_in_place(images: Tensor, factor: np.ndarray) -> Tensor:
    """Do what `sharpen` does, and write the result to the images."""
    _, channels, height, width = images.shape
    if min(height, width) < 3:
        return images
    dtype, is_uint8 = _computed_in(images), images.dtype == torch.uint8
    amount = _upload(1 - factor, images)[:, None, None, None].double()
    for part in parts(images, 28 * channels * height * width):
        values = images[part].to(dtype)
        middle, smooth = values[..., 1:-1, 1:-1], _smooth(values)
        if is_uint8:
            smooth = smooth.round_()  # never a tie, as 13 is odd
        # torchvision's blend is a fused multiply-add. In float64 the product and, but for factors
        # within 1e-6 of 1, the sum are exact, so its result is rounded just once as well.
        mixed = smooth.sub_(middle).double().mul_(amount[part]).add_(middle).to(dtype)
        images[part, :, 1:-1, 1:-1] = mixed.clamp_(0, 255) if is_uint8 else mixed
    return images if is_uint8 else images.clamp_(0, 1)


def _smooth(values: Tensor) -> Tensor:
    """Return the means of 3×3 pixels of which the one in the middle counts 5 times."""
    sums = values[..., :-2, :] + values[..., 1:-1, :]
    sums = sums.add_(values[..., 2:, :])
    sums = (sums[..., :-2] + sums[..., 1:-1]).add_(sums[..., 2:])
    return sums.add_(values[..., 1:-1, 1:-1] * 4).mul_(1 / 13)
