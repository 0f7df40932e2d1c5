"""The examples run in their own processes: which samples does the model see, and in which order?

Each sample has its own class, so the labels that reach the loss tell the samples of each step. The examples
run on GPUs where there is one for every rank, else on the CPU.
"""

import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import memload
from memload.reading.samplers import ShuffledSampler

pytestmark = pytest.mark.slow
#: Asked for before the first test, as the driver that tells it opens pipes of its own and keeps them.
GPUS = torch.cuda.device_count()
EXAMPLES = Path(__file__).parents[1] / "scripts" / "examples"
SAMPLES, BATCH, EPOCHS, STOP = 41, 8, 3, 4
PACKAGES = {
    "plain": None,
    "lightning_example": "lightning",
    "accelerate_example": "accelerate",
    "hf_trainer": "transformers",
}

RECORDER = """
import json, os
from torch.nn import functional

real = functional.cross_entropy

def recorded(output, labels, **kwargs):
    loss = real(output, labels, **kwargs)
    rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
    with open(os.path.join(os.environ["RECORD"], rank), "a") as file:
        print(json.dumps([loss.requires_grad, labels.tolist(), output.device.type]), file=file)
    return loss

functional.cross_entropy = recorded
with open(os.environ["EXAMPLE"]) as file:  # not by runpy, whose argv[0] Lightning would start further processes with
    exec(compile(file.read(), file.name, "exec"))
"""


#: Replaces the GPU by the device "meta", where any tensor that was left on the CPU is an error.
ELSEWHERE = """
import os, torch, memload

class Loader(memload.Loader):
    def __init__(self, *args, device=None, **kwargs):
        assert device in (None, torch.device("meta")), device
        super().__init__(*args, **kwargs)

    device = torch.device("meta")

    def __iter__(self):
        return (type(batch)(*(tensor.to("meta") for tensor in batch)) for batch in super().__iter__())

def tolist(tensor):
    assert tensor.device.type == "meta"
    return [1.0] * len(tensor)

memload.Loader = Loader
torch.Tensor.tolist = tolist
with open(os.environ["EXAMPLE"]) as file:
    exec(compile(file.read(), file.name, "exec"))
"""


class Run:
    """What an example printed, and the labels of each batch in training and evaluation, by rank."""

    def __init__(self, printed: str, record: Path) -> None:
        lines = [
            [json.loads(line) for line in file.read_text().splitlines()]
            for file in sorted(record.iterdir())
        ]
        self.trained = [[labels for training, labels, _ in rank if training] for rank in lines]
        self.evaluated = sorted(
            label
            for rank in lines
            for training, labels, _ in rank
            if not training
            for label in labels
        )
        self.devices = {device for rank in lines for _, _, device in rank}
        found = re.findall(
            r"^loss ([\d.]+), accuracy ([\d.]+), (\d+) samples$", printed, re.MULTILINE
        )
        assert len(found) == 1, printed
        self.loss, self.accuracy, self.count = (
            float(found[0][0]),
            float(found[0][1]),
            int(found[0][2]),
        )


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for number in range(SAMPLES):
        path = tmp_path / "images" / f"{number:02d}" / "a.png"
        path.parent.mkdir(parents=True)
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8)).save(path)
    memload.build(tmp_path / "images", tmp_path / "data.bin", size=16, num_workers=0)
    return tmp_path / "data.bin"


def gpus(ranks: int) -> list[str]:
    """Return one GPU a rank, as CUDA_VISIBLE_DEVICES names them; none where there are too few."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(GPUS)))).split(",")
    return named[:ranks] if ranks <= GPUS else []


@pytest.fixture
def run(tmp_path: Path, data: Path) -> Callable[..., Run]:
    recorder = tmp_path / "recorder.py"
    recorder.write_text(RECORDER)

    def run(name: str, *options: object, ranks: int = 1, data: Path = data) -> Run:
        package = PACKAGES[name]
        if package and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
        record = tmp_path / f"record-{len(list(tmp_path.iterdir()))}"
        record.mkdir()
        launcher = [sys.executable]
        if ranks > 1 and name == "lightning_example":  # starts its processes itself
            options = (*options, "--devices", ranks)
        elif ranks > 1:
            launcher += [
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(ranks),
            ]
        kept = {
            key: value
            for key, value in os.environ.items()
            if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        }
        paths = os.pathsep.join([str(EXAMPLES.parents[1]), *filter(None, [kept.get("PYTHONPATH")])])
        own = {
            "RECORD": str(record),
            "EXAMPLE": str(EXAMPLES / f"{name}.py"),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": paths,
            "CUDA_VISIBLE_DEVICES": ",".join(gpus(ranks)),
        }
        finished = subprocess.run(
            [
                *launcher,
                str(recorder),
                str(data),
                "--epochs",
                str(EPOCHS),
                "--batch-size",
                str(BATCH),
                *map(str, options),
            ],
            env=kept | own,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert finished.returncode == 0, finished.stderr[-3000:]
        done = Run(finished.stdout, record)
        assert done.devices == {"cuda" if gpus(ranks) else "cpu"}
        return done

    return run


def flat(lists: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


def epochs(steps: list[list[list[int]]], ranks: int) -> list[list[int]]:
    """Return the samples of each epoch in the order of steps and ranks. All ranks make the same steps."""
    assert len(steps) == ranks
    assert len({len(rank) for rank in steps}) == 1
    each = -(-SAMPLES // (BATCH * ranks))
    together = [flat(step) for step in zip(*steps, strict=True)]
    assert len(together) == EPOCHS * each
    return [flat(together[start : start + each]) for start in range(0, len(together), each)]


@pytest.mark.parametrize(
    ("name", "ranks", "resumed"),
    [
        ("plain", 2, 1),
        ("lightning_example", 2, 2),
        ("accelerate_example", 2, 2),
        ("hf_trainer", 2, 2),
    ],
)
def test_an_example_that_was_stopped_in_an_epoch_goes_on_at_the_very_sample(
    name: str, ranks: int, resumed: int, run: Callable[..., Run], tmp_path: Path
) -> None:
    checkpoint = (
        "--checkpoint",
        tmp_path / "checkpoint" / ("last.ckpt" if "lightning" in name else ""),
    )
    before = run(name, *checkpoint, "--stop-after", STOP, ranks=ranks)
    after = run(name, *checkpoint, ranks=resumed)
    orders = [
        ShuffledSampler(SAMPLES).take(epoch, np.arange(SAMPLES)).tolist() for epoch in range(EPOCHS)
    ]
    if ranks == resumed:
        steps = [
            first + second for first, second in zip(before.trained, after.trained, strict=True)
        ]
        for seen, order in zip(epochs(steps, ranks), orders, strict=True):
            assert seen == order + order[:1]  # the one that makes both ranks even
    else:
        seen = flat(flat(zip(*before.trained, strict=True))) + flat(after.trained[0])
        assert seen == orders[0] + orders[0][:1] + orders[1] + orders[2]
    for finished in (before, after):
        assert finished.evaluated == list(range(SAMPLES))
        assert finished.count == SAMPLES
        assert 0 < finished.loss < 10
        assert 0 <= finished.accuracy <= 1


@pytest.mark.parametrize("name", ["lightning_example", "hf_trainer"])
def test_an_example_that_was_stopped_at_the_end_of_an_epoch_loses_none(
    name: str, run: Callable[..., Run], tmp_path: Path
) -> None:
    checkpoint = (
        "--checkpoint",
        tmp_path / "checkpoint" / ("last.ckpt" if "lightning" in name else ""),
    )
    before = run(name, *checkpoint, "--stop-after", 6)
    after = run(name, *checkpoint)
    orders = [
        ShuffledSampler(SAMPLES).take(epoch, np.arange(SAMPLES)).tolist() for epoch in range(EPOCHS)
    ]
    assert epochs([before.trained[0] + after.trained[0]], 1) == orders


@pytest.mark.parametrize("name", list(PACKAGES))
def test_an_example_learns_classes_that_differ_in_colour(
    name: str, run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES.parent)
    importlib.import_module("photographs").write_folder(
        tmp_path / "photographs", 160, classes=4, size=(48, 48)
    )
    memload.build(tmp_path / "photographs", tmp_path / "photographs.bin", size=16, num_workers=0)
    assert (
        run(name, data=tmp_path / "photographs.bin").accuracy > 0.9
    )  # 0.38 with bytes that are only scaled to 0 … 1


@pytest.mark.parametrize("name", ["plain", "accelerate_example"])
def test_an_example_keeps_all_on_the_device_of_the_batches(
    name: str, data: Path, tmp_path: Path
) -> None:
    package = PACKAGES[name]
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    script = tmp_path / "elsewhere.py"
    script.write_text(ELSEWHERE)
    own = {
        "EXAMPLE": str(EXAMPLES / f"{name}.py"),
        "ACCELERATE_TORCH_DEVICE": "meta",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(EXAMPLES.parents[1]),
    }
    finished = subprocess.run(
        [sys.executable, script, data, "--batch-size", str(BATCH)],
        env=os.environ | own,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert finished.stdout == "loss 1.0000, accuracy 1.0000, 1 samples\n"
