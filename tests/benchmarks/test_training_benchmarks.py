"""train_step.py, async_prefetch.py, feeds.py and fidelity.py of benchmarks/, on a few small pictures."""

import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import memload

HERE = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(HERE))
import async_prefetch  # noqa: E402
import feeds  # noqa: E402
import fidelity  # noqa: E402
import train_step  # noqa: E402

CPU = torch.device("cpu")


def toy(script: str, *options: str) -> Any:
    """Run a script's toy; return what it printed. It records nothing, and leaves nothing in the temporary folder."""
    before = sorted((HERE / "results").iterdir())
    command = [sys.executable, str(HERE / script), "--device", "cpu", "--rounds", "1", *options]
    with (
        tempfile.TemporaryDirectory() as temporary
    ):  # a short path, as a DataLoader's workers have sockets there
        environment = os.environ | {"TMPDIR": temporary}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=100, env=environment, check=False
        )
        assert not done.returncode, done.stderr[-3000:]
        assert [
            path.name for path in Path(temporary).iterdir() if not path.name.startswith("torch")
        ] == []
    assert sorted((HERE / "results").iterdir()) == before
    return json.loads(done.stdout)


def test_every_way_of_feeding_trains() -> None:
    found = toy("train_step.py", "--seconds", "0.01", "--images", "64", "--workers", "1")["results"]
    ends = [found[name]["images/s"]["median"] for name in ("synthetic", "synthetic, again")]
    for values in found.values():
        share = values["images/s"]["median"] / (sum(ends) / 2)
        assert values["share of synthetic"]["median"] == pytest.approx(share)
    assert len([name for name in found if "DataLoader" in name or "Prefetcher" in name]) == 5
    assert {"Loader, cpu", "Loader, cpu, train(64)"} <= found.keys()


def test_the_order_of_ways_is_another_in_every_round_and_synthetic_is_at_both_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns: list[str] = []
    names = ["synthetic", *"abcdef"]
    ways = {name: train_step.Way(lambda count: iter([])) for name in names}
    named = {id(way): name for name, way in ways.items()}
    monkeypatch.setattr(train_step, "settle", lambda *_: None)
    monkeypatch.setattr(
        train_step,
        "measure",
        lambda training, way, *_: (turns.append(named[id(way)]), (1.0, 0.0, 1.0))[1],
    )
    found = train_step.run(train_step.Training(train_step.Stem(), CPU), ways, (2, 3, 8, 8), 3, 0.1)
    assert list(found) == [*names, "synthetic, again"]
    rounds = [turns[start : start + 8] for start in range(0, 24, 8)]
    assert all((one[0], one[-1]) == ("synthetic", "synthetic") for one in rounds)
    assert all(sorted(one) == sorted([*names, "synthetic"]) for one in rounds)
    assert len({tuple(one) for one in rounds}) == 3


def test_a_missing_library_of_models_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(
        SystemExit, match=r"models: expected torchvision, which has ResNet-18, .*--models stem"
    ):
        train_step.model("resnet18")


def test_batches_of_another_shape_are_not_measured() -> None:
    training = train_step.Training(train_step.Stem(), CPU)
    way = train_step.Way(lambda count: iter([(torch.zeros(2, 3, 16, 16), torch.zeros(2))] * count))
    with pytest.raises(RuntimeError, match=r"batch: expected .*bfloat16 on cpu, found .*float32"):
        train_step.measure(training, way, (2, 3, 16, 16), 1)


def test_synchronous_and_prefetched_loading_are_timed_side_by_side() -> None:
    training = async_prefetch.Training(
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, 9)), CPU
    )
    for ways in (
        async_prefetch.made_on_device(4, 16, CPU),
        async_prefetch.data_loader(3, 2, 16, CPU),
    ):
        found = async_prefetch.run(training, ways, 2)
        assert list(found) == ["loading alone", "training alone", *ways]
        best = [name for name in ways if name.startswith("synchronous")][-1]
        assert found[best][f"times as fast as {best}"]["median"] == 1
        for name in ways:
            assert (
                found[name]["ms a step"]["median"]
                >= found[name]["ms a step, the device not waited for"]["median"]
            )
            assert {"times as fast as synchronous", "share of the bound"} <= found[name].keys()


@pytest.mark.parametrize(
    "other", [{"shuffle": True, "seed": 3}, None], ids=["other samples", "fewer samples"]
)
def test_a_way_that_gives_something_else_is_refused(other: dict[str, Any] | None) -> None:
    ways = async_prefetch.made_on_device(6, 16, CPU)
    made = memload.CudaPrefetcher(async_prefetch.MadeOnDevice(6, 16, CPU), **(other or {}))
    ways["other"] = (lambda: made) if other else (lambda: list(made)[:5])
    with pytest.raises(RuntimeError, match="other: expected"):
        async_prefetch.check(ways)


def test_the_network_for_large_pictures_has_more_work_than_calls() -> None:
    network = async_prefetch.wide()
    found = network(torch.zeros(1, 3, 64, 64))
    assert found.shape == (1, 1000)
    convolutions = [layer for layer in network if isinstance(layer, torch.nn.Conv2d)]
    assert len(convolutions) == 6
    assert sum(layer.weight.numel() for layer in convolutions) > 1_000_000


def test_what_comes_before_the_clock_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        def synchronize(self) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    clock = iter([0.0, 10.0, 14.0, 100.0, 104.0])
    monkeypatch.setattr(feeds.time, "perf_counter", lambda: next(clock))
    batches = [([0] * 8,)] * 3 + [([0] * 4,)]
    assert feeds.steady_rate(batches, 2) == 12 / 4  # behind the second, from 10 to 14
    assert feeds.steady_rate(batches, 0) == 28 / 4


def test_jpegs_beside_the_feeds_are_resized_bilinearly_and_cropped() -> None:
    dataset = feeds.Jpegs(3)
    pixels, label = dataset[1]
    with Image.open(io.BytesIO(dataset.files[1])) as image:
        wanted = np.asarray(image.convert("RGB").resize((298, 224), Image.Resampling.BILINEAR))[
            :, 37:261
        ]
    assert (tuple(pixels.shape), label) == ((3, 224, 224), 1)
    assert np.array_equal(pixels.permute(1, 2, 0), wanted)


@pytest.mark.parametrize(
    ("script", "options", "found"),
    [
        ("feeds.py", (), "device: expected a CUDA device, found none"),
        ("several_gpus.py", (), "device: expected a CUDA device, found none"),
        ("train_step.py", (), "device: expected a CUDA device, found none"),
        (
            "fidelity.py",
            ("no/such/folder",),
            "images: no/such/folder: expected a folder of images, found no such folder",
        ),
        ("fidelity.py", (".",), "images: .: expected image files"),
        ("compare.py", ("--device", "cuda"), "device: expected a CUDA device, found none"),
        ("build.py", ("no/such/folder",), "no/such/folder: expected"),
        (
            "loader.py",
            ("--rounds", "0"),
            "loader.py: error: argument --rounds: expected 1 or more, found 0",
        ),
        (
            "compare.py",
            ("--rounds", "0"),
            "compare.py: error: argument --rounds: expected 1 or more, found 0",
        ),
    ],
)
def test_what_cannot_be_measured_is_told_in_a_line(
    tmp_path: Path, script: str, options: tuple[str, ...], found: str
) -> None:
    command = [sys.executable, str(HERE / script), *options]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        env=environment,
        check=False,
    )
    assert done.returncode
    assert done.stderr.splitlines()[-1].startswith(found)
    assert "Traceback" not in done.stderr


def test_stored_pixels_are_those_of_the_reference(folder: Path) -> None:
    found = fidelity.pixels([path.read_bytes() for path in sorted(folder.rglob("*.jpg"))], 16)
    for fit in ("crop", "squash", "pad"):
        assert found[f"pillow, {fit}, default"]["equal_images"] == 12
    assert found["pillow, crop, torch"]["largest_difference"] > 0


def test_a_network_learns_the_same_from_files_and_from_the_memory_map(folder: Path) -> None:
    found = fidelity.training(folder, 2)
    curves = {name: value for name, value in found.items() if isinstance(value, dict)}
    assert len(curves["files"]["loss"]) == 2
    assert curves["files"]["loss"][0] != curves["files"]["loss"][1]
    same = ("files", "memory map, DataLoader", "memory map, Loader")
    assert {name: curves[name]["largest difference"] for name in same} == dict.fromkeys(same, 0)


def test_other_pixels_show_in_the_losses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = fidelity.reference
    monkeypatch.setattr(
        fidelity,
        "reference",
        lambda *given: reference(*given).point(lambda level: min(level + 1, 255)),
    )
    assert fidelity.training(folder, 1)["memory map, Loader"]["largest difference"] > 0
