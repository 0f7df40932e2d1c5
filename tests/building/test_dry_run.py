"""What a build would store, and how long it would take."""

import json

import numpy as np
import pytest
from PIL import Image

import memload
from memload.cli import main


@pytest.fixture
def images(tmp_path):
    """A folder of 60 pictures in two classes, with one other file."""
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        (tmp_path / "masks" / name).mkdir(parents=True)
        for number in range(30):
            picture = Image.fromarray(rng.integers(0, 255, (20, 30, 3), np.uint8))
            picture.save(tmp_path / "images" / name / f"{number}.png")
            picture.convert("L").save(tmp_path / "masks" / name / f"{number}.png")
    (tmp_path / "images" / "notes.txt").write_text("a note")
    return tmp_path / "images"


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dry_run_says_what_the_build_then_does_and_leaves_nothing(images, num_workers):
    output = images.with_name("out.bin")
    options = {"size": (8, 12), "num_workers": num_workers, "masks": images.with_name("masks")}
    before = sorted(images.parent.rglob("*"))
    found = memload.dry_run(images, output, **options)
    assert sorted(images.parent.rglob("*")) == before
    report = memload.build(images, output, **options)
    assert (found.samples, found.classes, found.shape, found.dtype) == (60, 2, (8, 12, 3), "uint8")
    assert (found.samples, found.bytes) == (report.samples, report.bytes)
    assert [*found.notes] == [*report.notes][: len(found.notes)] != []
    assert 0 < found.seconds < 600
    assert "60 samples of 2 classes as 8×12×3 uint8" in str(found)
    assert json.loads(json.dumps(found.as_dict()))["samples"] == 60


def test_a_dry_run_heeds_the_options_as_the_build_does(images):
    for old, new in (("cat", "train"), ("dog", "val")):
        (images / old).rename(images / new)
    output = images.with_name("out.bin")
    options = {"size": 8, "num_workers": 0, "classes": ["train", "val"], "shard_size": 8192}
    found = memload.dry_run(images, output, **options)
    report = memload.build(images, output, **options)
    assert (found.classes, found.bytes) == (2, report.bytes)  # each shard has a header
    with pytest.raises(ValueError, match="shard_size: 4,100 bytes are too few"):
        memload.dry_run(images, output, **options | {"shard_size": 4100})


def test_a_dry_run_of_arrays_and_of_a_data_set_in_python_stores_them_as_they_are(tmp_path):
    class Numbers:
        def __len__(self):
            return 30

        def __getitem__(self, number):
            return np.full((4, 6, 2), number, np.float32), number

    found = memload.dry_run(Numbers(), tmp_path / "out.bin", mode="array", num_workers=0)
    assert (found.shape, found.dtype, found.bytes) == (
        (4, 6, 2),
        "float32",
        4096 + 30 * 4 * 6 * 2 * 4,
    )
    assert not any(tmp_path.iterdir())


def test_a_dry_run_of_new_samples_takes_the_settings_of_the_data_set(tmp_path):
    for count, name in ((2, "old"), (3, "new")):
        np.save(tmp_path / f"{name}.npy", np.zeros((count, 4, 6), np.float32))
    memload.build(tmp_path / "old.npy", tmp_path / "old.bin", mode="array", num_workers=0)
    options = {"new_to": tmp_path / "old.bin", "num_workers": 0}
    found = memload.dry_run(tmp_path / "new.npy", tmp_path / "new.bin", **options)
    report = memload.build(tmp_path / "new.npy", tmp_path / "new.bin", **options)
    assert (found.samples, found.dtype, found.bytes) == (1, "float32", report.bytes)


def test_the_command_prints_a_dry_run(images, capsys):
    arguments = ["build", str(images), str(images.with_name("out.bin")), "-s", "8", "-j", "0"]
    main([*arguments, "--dry-run"], standalone_mode=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "60 samples of 2 classes as 8×8×3 uint8"
    assert lines[1].startswith("15.6 kB are needed, and ")
    assert lines[2].endswith(" with 0 workers")
    main([*arguments, "--dry-run", "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["bytes"] == 4096 + 60 * 8 * 8 * 3
    assert not images.with_name("out.bin").exists()


def test_a_dry_run_of_packing_takes_the_options_that_a_build_takes(images, tmp_path):
    memload.build(images, tmp_path / "out.bin", size=16, num_workers=0)
    given = {"fit": "pad", "num_workers": 0}
    found = memload.dry_run(tmp_path / "out.bin", tmp_path / "packed.bin", **given)
    report = memload.build(tmp_path / "out.bin", tmp_path / "packed.bin", **given)
    assert (found.samples, found.shape) == (report.samples, report.shape)
