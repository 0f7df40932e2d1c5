"""What do the examples print, and which samples does the model see, in which order?

Each sample has its own class, so the labels that reach the loss tell the samples of each step. The examples
run on GPUs where there is one for every rank, else on the CPU.
"""

import contextlib
import csv
import importlib
import importlib.util
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
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
ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "scripts" / "examples"
SAMPLES, EVALUATED, BATCH, EPOCHS = 41, 23, 8, 3
#: The trainers, and what is imported for them.
PACKAGES = {
    "plain": "torch",
    "lightning_example": "lightning",
    "accelerate_example": "accelerate",
    "hf_trainer": "transformers.trainer",
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


class PreparedPython:
    """A process of Python that has imported a module, and runs programs in forks of itself."""

    def __init__(self, module):
        self._process = subprocess.Popen(
            [
                sys.executable,
                Path(__file__).with_name("prepared_python.py"),
                module,
                "torch._dynamo",
            ],
            env=os.environ
            | {
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, folder, *arguments, environments=({},), **changes):
        """Run a program once in each environment, at once. Return how all ended, stdout and stderr."""
        programs = [
            [
                [*map(str, arguments)],
                {**changes, **environment},
                str(folder),
                str(folder / f"printed-{number}"),
            ]
            for number, environment in enumerate(environments)
        ]
        for path in folder.glob("printed-*"):
            path.unlink()
        self._process.stdin.write(json.dumps(programs) + "\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        stdout, stderr = (
            "".join(path.read_text() for path in sorted(folder.glob(f"printed-*.{kind}")))
            for kind in ("out", "err")
        )
        return status, stdout, stderr

    def succeed(self, *arguments, **options):
        """Run a program that has to succeed. Return what it has printed."""
        status, stdout, stderr = self.run(*arguments, **options)
        assert status == 0, stderr[-3000:]
        return stdout

    def close(self):
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


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


@pytest.fixture(scope="module", params=list(PACKAGES))
def trainer(request):
    """The name of an example that trains."""
    return request.param


#: For tests of one example that trains, and for examples that need only torch.
plain_only = pytest.mark.parametrize("trainer", ["plain"], indirect=True)


@pytest.fixture(scope="module")
def python(trainer):
    package = PACKAGES[trainer].partition(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    prepared = PreparedPython(PACKAGES[trainer])
    yield prepared
    prepared.close()


@pytest.fixture
def data(tmp_path):
    """What to train and to evaluate on: other pictures, of the first classes."""
    rng = np.random.default_rng(0)
    for part, count in {"train": SAMPLES, "validation": EVALUATED}.items():
        for number in range(count):
            path = tmp_path / part / f"{number:02d}" / "a.png"
            path.parent.mkdir(parents=True)
            Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8)).save(path)
    return build_both(tmp_path / "data", tmp_path / "train", tmp_path / "validation")


def build_both(folder, *sources, **options):
    """Build what to train on and what to evaluate on, in a new folder."""
    folder.mkdir()
    both = folder / "train.bin", folder / "validation.bin"
    memload.build(sources[0], both[0], size=16, num_workers=0)
    memload.build(sources[1], both[1], size=16, num_workers=0, **({"classes": both[0]} | options))
    return both


@pytest.fixture(scope="module")
def write_photographs():
    """The function that writes a folder of photographs, whose classes differ in colour."""
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(EXAMPLES.parent)
        return importlib.import_module("photographs").write_folder


@pytest.fixture(scope="module")
def photographs(write_photographs, tmp_path_factory):
    """Folders of photographs in four classes: train and test."""
    folder = tmp_path_factory.mktemp("photographs")
    for seed, (part, count) in enumerate({"train": 160, "test": 61}.items()):
        write_photographs(folder / part, count, classes=4, seed=seed, size=(48, 48))
    return folder


class Numbered:
    """The pictures of a folder, with numbers of classes without names, beside another column."""

    def __init__(self, folder):
        self.paths = sorted(folder.rglob("*.jpg"))
        self.classes_of_paths = sorted({path.parent for path in self.paths})

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        path = self.paths[index]
        label = self.classes_of_paths.index(path.parent)
        return np.asarray(Image.open(path)), {"age": index / 7, "label": label}


def gpus(ranks):
    """Return one GPU a rank, as CUDA_VISIBLE_DEVICES names them; none where there are too few."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(GPUS)))).split(",")
    return named[:ranks] if ranks <= GPUS else []


@contextlib.contextmanager
def as_torchrun(ranks):
    """What torchrun sets for each rank, while the ranks can find each other."""
    # libuv would keep a pipe.
    options = {"is_master": True, "wait_for_workers": False, "use_libuv": False}
    store = torch.distributed.TCPStore("127.0.0.1", 0, **options)
    common = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    yield [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    del store


@pytest.fixture
def run(trainer, python, tmp_path, data):
    recorder = tmp_path / "recorder.py"
    recorder.write_text(RECORDER)

    def run(*options, ranks=1, data=data):
        record = tmp_path / f"record-{len(list(tmp_path.iterdir()))}"
        record.mkdir()
        is_starting = trainer == "lightning_example"  # starts its processes itself
        with as_torchrun(ranks) if ranks > 1 and not is_starting else nullcontext([{}]) as ranked:
            printed = python.succeed(
                tmp_path,
                *(recorder, *data, "--epochs", EPOCHS, "--batch-size", BATCH, *options),
                *(("--devices", ranks) if is_starting else ()),
                environments=ranked,
                RECORD=str(record),
                EXAMPLE=str(EXAMPLES / f"{trainer}.py"),
                CUDA_VISIBLE_DEVICES=",".join(gpus(ranks)),
            )
        done = Run(printed, record)
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
    ("trainer", "ranks", "resumed", "stop"),
    [
        ("plain", 2, 1, 4),
        ("lightning_example", 2, 2, 4),
        ("accelerate_example", 2, 2, 4),
        ("hf_trainer", 2, 2, 4),
        ("lightning_example", 1, 1, 6),  # at the end of an epoch
    ],
    indirect=["trainer"],
)
def test_an_example_that_was_stopped_goes_on_at_the_very_sample(
    trainer, ranks, resumed, stop, run, tmp_path
):
    file = "last.ckpt" if trainer == "lightning_example" else ""
    checkpoint = ("--checkpoint", tmp_path / "checkpoint" / file)
    before = run(*checkpoint, "--stop-after", stop, ranks=ranks)
    after = run(*checkpoint, ranks=resumed)
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


def test_an_example_learns_classes_without_names_that_differ_in_colour(run, photographs, tmp_path):
    sources = (Numbered(photographs / part) for part in ("train", "test"))
    accuracy = run(data=build_both(tmp_path / "photographs", *sources, classes=None)).accuracy
    assert accuracy > 0.9  # 0.38 with bytes that are only scaled to 0 … 1


@plain_only
def test_the_inference_example_writes_a_class_for_each_key(photographs, python, tmp_path):
    train, validation = build_both(
        tmp_path / "photographs", photographs / "train", photographs / "test"
    )
    checkpoint, table = tmp_path / "plain.pt", tmp_path / "predictions.csv"
    options = ("--epochs", EPOCHS, "--checkpoint", checkpoint)
    python.succeed(tmp_path, EXAMPLES / "plain.py", train, validation, *options)
    options = (table, "--train", train, "--checkpoint", checkpoint, "--batch-size", 8)
    ways = [("--no-compile",)] + [()] * (shutil.which("g++") is not None)
    for way in ways:  # torch.compile needs a compiler
        table.unlink(missing_ok=True)
        python.succeed(tmp_path, EXAMPLES / "inference.py", validation, *options, *way)
        with table.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        assert [row["key"] for row in rows] == list(memload.MemmapDataset(validation).keys)
        assert all(0.25 <= float(row["probability"]) <= 1 for row in rows)
        assert sum(row["key"].startswith(row["class"] + "/") for row in rows) > 0.9 * len(rows)


@plain_only
def test_the_segmentation_example_learns_the_masks_of_shapes(python, tmp_path):
    arguments = (EXAMPLES / "segmentation.py", tmp_path / "shapes", "--epochs", 4)
    printed = python.succeed(tmp_path, *arguments)
    scores = re.findall(r"^epoch \d+: loss ([\d.]+), mean IoU ([\d.]+)$", printed, re.M)
    assert len(scores) == 4
    assert float(scores[-1][0]) < float(scores[0][0]) / 3
    assert float(scores[-1][1]) > 0.9


@pytest.fixture
def cifar10(python, tmp_path):
    """A function that runs the example, and returns loss and accuracy of each epoch."""

    def run(images, *options):
        arguments = (EXAMPLES / "cifar10.py", images, "--width", 8, *options)
        printed = python.succeed(tmp_path, *arguments)
        found = re.findall(r"^epoch \d+: loss ([\d.]+), accuracy ([\d.]+)$", printed, re.M)
        return [(float(loss), float(accuracy)) for loss, accuracy in found]

    return run


@plain_only
def test_the_cifar10_example_builds_once_and_learns_classes_that_differ_in_colour(
    photographs, cifar10, tmp_path
):
    for part in ("train", "test"):
        (tmp_path / part).symlink_to(photographs / part)
    first = cifar10(tmp_path, "--epochs", 4)
    built = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.bin")}
    assert {path.name for path in built} == {"train.bin", "test.bin"}
    assert len(first) == 4
    assert first[-1][0] < first[0][0]
    assert first[-1][1] > 0.8
    cifar10(tmp_path, "--epochs", 1)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.bin")} == built


@plain_only
def test_the_cifar10_example_takes_fewer_pictures_than_a_batch_and_names_a_missing_folder(
    write_photographs, python, cifar10, tmp_path
):
    status, _, stderr = python.run(tmp_path, EXAMPLES / "cifar10.py", tmp_path)
    assert status == 1
    assert stderr.startswith(f"{tmp_path / 'train'}: there is no such folder.")
    for part in ("train", "test"):
        write_photographs(tmp_path / part, 6, classes=2, size=(32, 32))
    for options in ((), ("--batch-size", 500)):
        assert len(cifar10(tmp_path, "--epochs", 1, *options)) == 1
