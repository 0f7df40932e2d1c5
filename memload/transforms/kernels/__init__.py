"""Triton kernels for uint8 images on CUDA. Each has a counterpart in torch, in the folder above.

    crops        a plan: crop, resize, flip, and a map of pixels
    masks        masks that follow
    operations   changes of colours, warps and sharpness, several in one pass
    blur         Gaussian blurs
    painting     boxes painted over, and images mixed in pairs

Kernels and torch agree within one level. Resizes agree within two, and but for few pixels bilinear
ones within one.
"""
