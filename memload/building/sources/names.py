"""The names that images, labels, masks, boxes and parts of data sets commonly have."""

from collections.abc import Iterable

#: in the order of preference
IMAGE_NAMES = ("image", "img", "jpg", "png", "webp")
LABEL_NAMES = ("label", "labels", "fine_label", "cls", "target")

BOX_NAMES = ("boxes", "bboxes", "bbox")
#: columns of tables
BOX_COLUMNS = (("x1", "y1", "x2", "y2"), ("xmin", "ymin", "xmax", "ymax"))
MASK_NAMES = ("mask", "masks")
POINT_NAMES = ("points", "landmarks", "keypoints")

#: Folders of these names hold parts of a data set, and are no classes.
SPLITS = frozenset({"train", "training", "val", "valid", "validation", "test", "testing"})


def are_splits(names: Iterable[str]) -> bool:
    """Return whether all of these are names of parts of a data set."""
    return all(name.lower() in SPLITS for name in names)
