"""The names that images and labels commonly have in data sets, in the order of preference."""

IMAGE_NAMES = ("image", "img", "jpg", "png", "webp")
LABEL_NAMES = ("label", "labels", "fine_label", "cls", "target")
