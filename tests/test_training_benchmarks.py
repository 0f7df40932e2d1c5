"""train_step.py, async_prefetch.py and fidelity.py of benchmarks/, on a few small pictures."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import memload

HERE = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(HERE))
import async_prefetch  # noqa: E402
import fidelity  # noqa: E402
import train_step  # noqa: E402

CPU = torch.device("cpu")


def toy(tmp_path: Path, script: str, *options: str) -> Any:
    """Run a script's toy; return what it printed. It records nothing, and leaves nothing in the temporary folder."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    before = sorted((HERE / "results").iterdir())
    command = [sys.executable, str(HERE / script), "--device", "cpu", "--rounds", "1", *options]
    environment = os.environ | {"TMPDIR": str(temporary)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, check=False)
    assert not done.returncode, done.stderr[-3000:]
    assert sorted((HERE / "results").iterdir()) == before
    assert [path.name for path in temporary.iterdir() if not path.name.startswith("torch")] == []
    return json.loads(done.stdout)


def test_every_way_of_feeding_trains(tmp_path: Path) -> None:
    found = toy(tmp_path, "train_step.py", "--seconds", "0.01", "--images", "64", "--workers", "1")["results"]
    ends = [found[name]["images/s"]["median"] for name in ("synthetic", "synthetic, again")]
    for values in found.values():
        share = values["images/s"]["median"] / (sum(ends) / 2)
        assert values["share of synthetic"]["median"] == pytest.approx(share)
    assert len([name for name in found if "DataLoader" in name or "Prefetcher" in name]) == 5
    assert {"Loader, cpu", "Loader, cpu, train(64)", "first place"} <= found.keys()


def test_a_missing_library_of_models_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(SystemExit, match=r"models: expected torchvision, which has ResNet-18, .*--models stem"):
        train_step.model("resnet18")


def test_batches_of_another_shape_are_not_measured() -> None:
    training = train_step.Training(train_step.Stem(), CPU)
    way = train_step.Way(lambda count: iter([(torch.zeros(2, 3, 16, 16), torch.zeros(2))] * count))
    with pytest.raises(RuntimeError, match=r"batch: expected .*bfloat16 on cpu, found .*float32"):
        train_step.measure(training, way, (2, 3, 16, 16), 1)


def test_synchronous_and_prefetched_loading_are_timed_side_by_side() -> None:
    training = async_prefetch.Training(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, 9)), CPU)
    for ways in (async_prefetch.made_on_device(4, 16, CPU), async_prefetch.data_loader(3, 2, 16, CPU)):
        found = async_prefetch.run(training, ways, 2)
        assert list(found) == ["loading alone", "training alone", *ways]
        for name in ways:
            assert found[name]["ms a step"]["median"] >= found[name]["ms a step, the device not waited for"]["median"]
            assert {"times as fast as synchronous", "share of the bound"} <= found[name].keys()


@pytest.mark.parametrize("other", [{"shuffle": True, "seed": 3}, None], ids=["other samples", "fewer samples"])
def test_a_way_that_gives_something_else_is_refused(other: dict[str, Any] | None) -> None:
    ways = async_prefetch.made_on_device(6, 16, CPU)
    made = memload.CudaPrefetcher(async_prefetch.MadeOnDevice(6, 16, CPU), **(other or {}))
    ways["other"] = (lambda: made) if other else (lambda: list(made)[:5])
    with pytest.raises(RuntimeError, match="other: expected"):
        async_prefetch.check(ways)


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
        fidelity, "reference", lambda *given: reference(*given).point(lambda level: min(level + 1, 255))
    )
    assert fidelity.training(folder, 1)["memory map, Loader"]["largest difference"] > 0
