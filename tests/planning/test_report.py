"""What a plan prints."""

import re
from typing import Any

import pytest

from memload.planning.report import Plan
from memload.planning.serving import Epoch, Serving

PLAN: dict[str, Any] = {
    "source": "images",
    "records": 1200,
    "usable": 1194,
    "shape": (256, 256, 3),
    "dtype": "uint8",
    "arrays": ["mask", "depth"],
    "bytes": 5_000_000,
    "free_bytes": 64_000_000,
    "seconds": 300.0,
    "seconds_range": (270.0, 330.0),
    "num_workers": 16,
    "scaled_from_cores": None,
    "serving": Serving("dma", "5 MB fit", Epoch("disk", 4321.09, ", once"), Epoch("bus", None), 1),
    "tried": 200,
    "tried_rejected": 1,
    "seed": 0,
    "warnings": [],
    "notes": ["skipped"],
    "output_exists": False,
}


def line(name: str, **changes: Any) -> str:
    """Return what a plan says of something."""
    lines = list(Plan(**{**PLAN, **changes}).lines())
    (found,) = [line for line in lines if re.match(rf"  {name}\s", line)]
    return found.split(name, 1)[1].strip()


def test_each_fact_has_a_line() -> None:
    assert list(Plan(**PLAN).lines()) == [
        "images: 1,200 records; a random sample of 200 (seed 0) was converted; 1 of them cannot be used",
        "  rows          1,194 of 256×256×3 uint8 with mask with depth",
        "  size          5 MB; 64 MB are free on the disk",
        "  time          5.0 minutes (4.5 to 5.5) by 16 workers, 4 images/s built",
        "  feed          dma: 5 MB fit",
        "  first epoch   bound by the disk, up to about 4,300 images/s here, once",
        "  later epochs  bound by the bus to the GPU",
    ]
    assert line("warning:", warnings=["the build will stop"]) == "the build will stop"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (5, "5.0 seconds (2.5 to 10.0) by"),
        (10, "10 seconds (5 to 20) by"),
        (119, "119 seconds (60 to 238) by"),
        (120, "2.0 minutes (1.0 to 4.0) by"),
        (600, "10 minutes (5 to 20) by"),
        (7199, "120 minutes (60 to 240) by"),
        (7200, "2.0 hours (1.0 to 4.0) by"),
        (3_600_000, "1,000.0 hours (500.0 to 2,000.0) by"),
    ],
)
def test_a_time_has_the_unit_that_one_would_say(seconds: float, text: str) -> None:
    found = line("time", seconds=seconds, seconds_range=(seconds / 2, 2 * seconds))
    assert found.startswith(text)


@pytest.mark.parametrize(
    ("workers", "cores", "text"),
    [
        (0, None, "in one process, 4 images/s built"),
        (1, None, "by 1 worker, 4 images/s built"),
        (4, 1, "by 4 workers, 4 images/s built; measured with 1 core of this machine"),
        (4, 2.5, "by 4 workers, 4 images/s built; measured with 2.5 cores of this machine"),
    ],
)
def test_workers_and_cores_are_told(workers: int, cores: float | None, text: str) -> None:
    assert line("time", num_workers=workers, scaled_from_cores=cores).endswith(text)


def test_json_has_the_names_that_are_documented() -> None:
    facts = Plan(**{**PLAN, "seconds": 299.987654}).as_dict()
    assert facts == {
        **{name: value for name, value in PLAN.items() if name in facts},
        "samples": 1194,
        "seconds": 299.99,
        "seconds_range": [270.0, 330.0],
        "images_per_second_built": 4.0,
        "feed": "dma",
        "feed_reason": "5 MB fit",
        "first_epoch_bound": "disk",
        "first_epoch_images_per_second": 4321.1,
        "later_epochs_bound": "bus",
        "later_epochs_images_per_second": None,
        "share_in_memory": 1,
        "sampled": 200,
        "rejected": 1,
    }
