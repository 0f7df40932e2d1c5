"""The examples run in their own processes: which samples does the model see, and in which order?

Each sample has its own class, so the labels that reach the loss tell the samples of each step. The examples
run on GPUs where there is one for every rank, else on the CPU.
"""

import csv
import importlib.util
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

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
SAMPLES, EVALUATED, BATCH, EPOCHS = 41, 23, 8, 3
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


class Run:
    """What an example printed, and the labels of each batch in training and evaluation, by rank."""

    def __init__(self, printed, record):
        ranks = [
            [json.loads(line) for line in file.read_text().splitlines()]
            for file in sorted(record.iterdir())
        ]
        self.trained = [[labels for training, labels, _ in rank if training] for rank in ranks]
        lines = flat(ranks)
        self.evaluated = sorted(flat(labels for training, labels, _ in lines if not training))
        self.devices = {device for _, _, device in lines}
        pattern = r"^loss ([\d.]+), accuracy ([\d.]+), (\d+) samples$"
        (found,) = re.findall(pattern, printed, re.MULTILINE)
        self.loss, self.accuracy, self.count = map(float, found)


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


@pytest.fixture
def data(tmp_path):
    """What to train and to evaluate on: other pictures, of the first classes."""
    rng = np.random.default_rng(0)
    for part, count in {"train": SAMPLES, "validation": EVALUATED}.items():
        for number in range(count):
            path = tmp_path / part / f"{number:02d}" / "a.png"
            path.parent.mkdir(parents=True)
            Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8)).save(path)
    return build_both(tmp_path, 16)


def build_both(folder, size):
    """Build the folders ``train`` and ``validation``."""
    train, validation = folder / "train.bin", folder / "validation.bin"
    memload.build(folder / "train", train, size=size, num_workers=0)
    memload.build(folder / "validation", validation, size=size, num_workers=0, classes=train)
    return train, validation


def gpus(ranks):
    """Return one GPU a rank, as CUDA_VISIBLE_DEVICES names them; none where there are too few."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(GPUS)))).split(",")
    return named[:ranks] if ranks <= GPUS else []


@pytest.fixture
def run(tmp_path, data):
    recorder = tmp_path / "recorder.py"
    recorder.write_text(RECORDER)

    def run(name, *options, ranks=1, data=data):
        package = PACKAGES[name]
        if package and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
        record = tmp_path / f"record-{len(list(tmp_path.iterdir()))}"
        record.mkdir()
        launcher = [sys.executable]
        if ranks > 1 and name == "lightning_example":  # starts its processes itself
            options = (*options, "--devices", ranks)
        elif ranks > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        paths = [str(EXAMPLES.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {
            "RECORD": str(record),
            "EXAMPLE": str(EXAMPLES / f"{name}.py"),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(paths),
            "CUDA_VISIBLE_DEVICES": ",".join(gpus(ranks)),
        }
        for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            environment.pop(variable, None)
        options = (recorder, *data, "--epochs", EPOCHS, "--batch-size", BATCH, *options)
        finished = subprocess.run(
            [*launcher, *map(str, options)],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        assert finished.returncode == 0, finished.stderr[-3000:]
        done = Run(finished.stdout, record)
        assert done.devices == {"cuda" if gpus(ranks) else "cpu"}
        return done

    return run


def epochs(steps, ranks):
    """Return the samples of each epoch in the order of steps and ranks. All ranks make the same steps."""
    assert len(steps) == ranks
    assert len({len(rank) for rank in steps}) == 1
    each = -(-SAMPLES // (BATCH * ranks))
    together = [flat(step) for step in zip(*steps, strict=True)]
    assert len(together) == EPOCHS * each
    return [flat(together[start : start + each]) for start in range(0, len(together), each)]


@pytest.mark.parametrize(
    ("name", "ranks", "resumed", "stop"),
    [
        ("plain", 2, 1, 4),
        ("lightning_example", 2, 2, 4),
        ("accelerate_example", 2, 2, 4),
        ("hf_trainer", 2, 2, 4),
        ("lightning_example", 1, 1, 6),  # at the end of an epoch
    ],
)
def test_an_example_that_was_stopped_goes_on_at_the_very_sample(
    name, ranks, resumed, stop, run, tmp_path
):
    file = "last.ckpt" if name == "lightning_example" else ""
    checkpoint = ("--checkpoint", tmp_path / "checkpoint" / file)
    before = run(name, *checkpoint, "--stop-after", stop, ranks=ranks)
    after = run(name, *checkpoint, ranks=resumed)
    sampler = ShuffledSampler(SAMPLES)
    orders = [sampler.take(epoch, np.arange(SAMPLES)).tolist() for epoch in range(EPOCHS)]
    if ranks == resumed:
        steps = [first + then for first, then in zip(before.trained, after.trained, strict=True)]
        for seen, order in zip(epochs(steps, ranks), orders, strict=True):
            assert seen == order + order[: ranks - 1]  # the one that makes both ranks even
    else:
        seen = flat(flat(zip(*before.trained, strict=True))) + flat(after.trained[0])
        assert seen == orders[0] + orders[0][:1] + orders[1] + orders[2]
    for finished in (before, after):
        assert finished.evaluated == list(range(EVALUATED))
        assert finished.count == EVALUATED
        assert 0 < finished.loss < 10
        assert 0 <= finished.accuracy <= 1


@pytest.mark.parametrize("name", list(PACKAGES))
def test_an_example_learns_classes_that_differ_in_colour(name, run, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES.parent)
    photographs = importlib.import_module("photographs")
    for seed, (part, count) in enumerate({"train": 160, "validation": 60}.items()):
        folder = tmp_path / "photographs" / part
        photographs.write_folder(folder, count, classes=4, seed=seed, size=(48, 48))
    accuracy = run(name, data=build_both(tmp_path / "photographs", 16)).accuracy
    assert accuracy > 0.9  # 0.38 with bytes that are only scaled to 0 … 1


@pytest.mark.parametrize("name", list(PACKAGES))
def test_an_example_trains_on_labels_without_names_beside_other_columns(name, run, tmp_path):
    class Samples:
        def __init__(self, count):
            self.count = count

        def __len__(self):
            return self.count

        def __getitem__(self, index):
            return np.full((8, 8, 3), index, np.uint8), {"age": index / 7, "label": index % 5}

    both = (tmp_path / "numbers.bin", tmp_path / "fewer.bin")
    for path, count in zip(both, (SAMPLES, EVALUATED), strict=True):
        memload.build(Samples(count), path, size=8, num_workers=0)
    assert run(name, data=both).count == EVALUATED


@pytest.mark.parametrize("compiling", [True, False], ids=["compiled", "eager"])
def test_the_inference_example_writes_a_class_for_each_key(compiling, tmp_path, monkeypatch):
    if compiling and shutil.which("g++") is None:
        pytest.skip("torch.compile needs a compiler")
    monkeypatch.syspath_prepend(EXAMPLES.parent)
    photographs = importlib.import_module("photographs")
    for seed, (part, count) in enumerate({"train": 160, "validation": 61}.items()):
        photographs.write_folder(tmp_path / part, count, classes=4, seed=seed, size=(48, 48))
    train, validation = build_both(tmp_path, 16)

    def run_example(name, *options):
        finished = subprocess.run(
            [sys.executable, EXAMPLES / name, *map(str, options)],
            env=os.environ | {"PYTHONPATH": str(EXAMPLES.parents[1])},
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        assert finished.returncode == 0, finished.stderr[-3000:]

    checkpoint, table = tmp_path / "plain.pt", tmp_path / "predictions.csv"
    run_example("plain.py", train, validation, "--epochs", EPOCHS, "--checkpoint", checkpoint)
    options = ["--train", train, "--checkpoint", checkpoint, "--batch-size", 8]
    options += [] if compiling else ["--no-compile"]
    run_example("inference.py", validation, table, *options)
    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["key"] for row in rows] == list(memload.MemmapDataset(validation).keys)
    assert all(0.25 <= float(row["probability"]) <= 1 for row in rows)
    assert sum(row["key"].startswith(row["class"] + "/") for row in rows) > 0.9 * len(rows)


def test_the_segmentation_example_learns_the_masks_of_shapes(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parents[1])}
    finished = subprocess.run(
        [sys.executable, EXAMPLES / "segmentation.py", tmp_path / "shapes"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    scores = re.findall(r"^epoch \d+: loss ([\d.]+), mean IoU ([\d.]+)$", finished.stdout, re.M)
    assert len(scores) == 8
    assert float(scores[-1][0]) < float(scores[0][0]) / 3
    assert float(scores[-1][1]) > 0.9


def run_cifar10(images, *options):
    return subprocess.run(
        [sys.executable, EXAMPLES / "cifar10.py", images, "--width", "8", *map(str, options)],
        env=os.environ | {"PYTHONPATH": str(EXAMPLES.parents[1])},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def losses_and_accuracies(finished):
    """Return loss and accuracy of each epoch."""
    assert finished.returncode == 0, finished.stderr[-3000:]
    found = re.findall(r"^epoch \d+: loss ([\d.]+), accuracy ([\d.]+)$", finished.stdout, re.M)
    return [(float(loss), float(accuracy)) for loss, accuracy in found]


def test_the_cifar10_example_builds_once_and_learns_classes_that_differ_in_colour(
    tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(EXAMPLES.parent)
    photographs = importlib.import_module("photographs")
    for seed, (part, count) in enumerate({"train": 400, "test": 40}.items()):
        photographs.write_folder(tmp_path / part, count, classes=4, seed=seed, size=(32, 32))

    first = losses_and_accuracies(run_cifar10(tmp_path, "--epochs", 4))
    built = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.bin")}
    assert {path.name for path in built} == {"train.bin", "test.bin"}
    assert len(first) == 4
    assert first[-1][0] < first[0][0]
    assert first[-1][1] > 0.8
    losses_and_accuracies(run_cifar10(tmp_path, "--epochs", 1))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.bin")} == built


def test_the_cifar10_example_takes_fewer_pictures_than_a_batch_and_names_a_missing_folder(
    tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(EXAMPLES.parent)
    photographs = importlib.import_module("photographs")
    missing = run_cifar10(tmp_path)
    assert missing.returncode == 1
    assert missing.stderr.startswith(f"{tmp_path / 'train'}: there is no such folder.")
    for part in ("train", "test"):
        photographs.write_folder(tmp_path / part, 6, classes=2, size=(32, 32))
    for options in ((), ("--batch-size", 500)):
        finished = run_cifar10(tmp_path, "--epochs", 1, *options)
        assert len(losses_and_accuracies(finished)) == 1
