"""What Hugging Face's data sets say about their columns. Other data sets say nothing."""

from collections.abc import Collection, Mapping
from typing import Any

from memload.building.sources.columns import is_category
from memload.building.sources.names import BOX_NAMES, LABEL_NAMES


def features_of(dataset: Any) -> Mapping[str, Any]:
    """Return what Hugging Face's data set says about its columns, or nothing."""
    features = getattr(dataset, "features", None)
    return features if isinstance(features, Mapping) else {}


def stored_features(dataset: Any) -> Mapping[str, Any]:
    """Return the features if samples are as they are stored, and not what a transform returns."""
    form = getattr(dataset, "format", None)
    is_stored = isinstance(form, Mapping) and form.get("type") != "custom"
    return features_of(dataset) if is_stored else {}


def marked_image(dataset: Any, others: Collection[str]) -> str | None:
    """Return the only column that Hugging Face has as an image besides ``others``, or None."""
    features = stored_features(dataset).items()
    images = [name for name, feature in features if type(feature).__name__ == "Image"]
    images = [name for name in images if name not in others]
    return images[0] if len(images) == 1 else None


def column_names(dataset: Any) -> list[str]:
    """Return the names of the columns, or nothing."""
    names = getattr(dataset, "column_names", None)
    return list(names) if isinstance(names, list) else []


def is_text(feature: Any) -> bool:
    """Return whether a feature is text."""
    return getattr(feature, "dtype", None) in ("string", "large_string")


def is_number(feature: Any) -> bool:
    """Return whether a feature is a number, or an array of numbers of a fixed shape."""
    dtype = str(getattr(feature, "dtype", ""))
    if dtype.startswith(("int", "uint", "float", "bool")):
        return True
    inner, length = getattr(feature, "feature", None), getattr(feature, "length", -1)
    return inner is not None and length > 0 and is_number(inner)


def is_list_of_numbers(feature: Any) -> bool:
    """Return whether a feature is a list of numbers, of any length."""
    inner = getattr(feature, "feature", None)
    return getattr(feature, "length", None) == -1 and is_number(inner)


def text_values(dataset: Any) -> dict[str, list[str]]:
    """Return the distinct texts of each column of text with few values. A missing one is empty."""
    texts = {}
    for name, feature in stored_features(dataset).items():
        if is_text(feature):
            values = sorted({value or "" for value in dataset.unique(name)})
            if is_category(len(values), len(dataset)) or name in LABEL_NAMES:
                texts[name] = values
    return texts


def named_numbers(dataset: Any) -> dict[str, list[str]]:
    """Return the names that columns of type ClassLabel count into, if each number has a name."""
    return {
        name: list(feature.names)
        for name, feature in stored_features(dataset).items()
        if type(feature).__name__ == "ClassLabel"
        and set(dataset.unique(name)) <= set(range(len(feature.names)))
    }


def nullable_counts(dataset: Any) -> dict[str, int]:
    """Return the columns of single numbers some of which are missing, and how many are."""
    counts = {
        name: dataset.data.column(name).null_count
        for name, feature in stored_features(dataset).items()
        if type(feature).__name__ in ("Value", "ClassLabel") and is_number(feature)
    }
    return {name: count for name, count in counts.items() if count}


def left_out_reason(name: str, feature: Any) -> str:
    """Return why a column is not stored, and what would store it."""
    if is_text(feature):
        return "text"
    kind = type(feature).__name__
    if kind == "Image":
        return f"of type {kind}; masks=[{name!r}] or arrays=[{name!r}] stores it"
    if name in BOX_NAMES:
        return f"of type {kind}; boxes={{{name!r}: 100}} stores up to 100 boxes of each sample"
    return f"of type {kind}"
