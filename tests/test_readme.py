"""The README and docs/: their Python and their memload commands run, and their links exist."""

import importlib
import importlib.util
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

import memload
from memload.cli import main

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", *DOCS]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: Pages with commands or Python. test_clusters.py has those of one more.
EXAMPLES = [
    page
    for page in PAGES
    if re.search("^```(console|python)$", page.read_text(), re.MULTILINE)
    and page.name != "clusters.md"
]
#: Commands of others, and errors, which test_faq.py has.
UNTESTED = ("sh", "text", "shell-session", "pycon")
#: Pages that take seconds, or need the extra test-slow.
SLOW = (
    *("arrays.md", "index.md", "landmarks.md", "quickstart.md", "segmentation.md", "sources.md"),
    "validation.md",
    "recipes",
)


@pytest.fixture(scope="module")
def files(containers_in, tmp_path_factory):
    """A folder with the files that the pages mention."""
    folder = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_files(containers_in(folder))
    return folder


def write_files(containers):
    """Write the files that the pages mention into the working directory."""
    for write in (containers.directory, containers.table, containers.tar, containers.zip):
        write()
    for name in ("out.bin", "train.bin", "val.bin", "photos.bin", "drawings.bin"):
        memload.build("images", name, size=256, num_workers=0)
    memload.build("out.bin", "big.bin", num_workers=0)
    for name in ("train", "val", "more"):
        Path(name).symlink_to("images")
    Path("scans").mkdir()
    for number in range(3):
        Image.fromarray(np.full((300, 280), 1000 * number, np.uint16)).save(f"scans/{number}.tif")
    keys = [*containers.pictures]
    Path("labels.csv").write_text("\n".join(["key,label", *(f"{key},new" for key in keys)]))
    Path("few.csv").write_text(f"key,label\n{keys[0]},rare\n")
    np.save("features.npy", np.zeros((len(keys), 8), np.float32))
    np.save("images.npy", np.zeros((6, 8, 8, 3), np.uint8))
    np.save("labels.npy", np.arange(6))
    for key in keys:
        mask = Path("masks", key).with_suffix(".png")
        mask.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (300, 280), 1).save(mask)
    rows = [f"{key},{number},{number + 1},3,4" for number, key in enumerate(keys)]
    columns = "path,part_0_x,part_0_y,part_1_x,part_1_y"
    Path("faces.csv").write_text("\n".join([columns, *rows]))
    rows = [f"{key},{pet},train" for key in keys for pet in ("cat", "dog")]
    Path("images/table.csv").write_text("\n".join(["path,label,split", *rows]))
    memload.build("images/table.csv", "table.bin", size=16, num_workers=0)


@pytest.fixture
def names(files, tmp_path, monkeypatch):
    """The names that the pages leave to the reader. The files that they mention are in this folder."""
    shutil.copytree(files, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    layers = torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, 3)
    model = torch.nn.Sequential(*layers)
    images = sorted((tmp_path / "images").rglob("*.jpg"))
    given = {
        "__name__": "__main__",
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
        "transform": lambda image: image / 255,
        "your_dataset": [(path, number % 3) for number, path in enumerate(images)],
        "segmenter": torch.nn.Conv2d(3, 4, 3, padding=1),
    }
    yield given
    given.clear()  # close what a page has opened


def write_more_sources(containers):
    """Write the other files of docs/sources.md. Skips the test if a library is missing."""
    containers.parquet()
    write_masks(containers)
    for name in containers.pictures:
        path = Path("features", name).with_suffix(".npy")
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, np.zeros((2, 3)))
    lmdb = pytest.importorskip("lmdb")
    with lmdb.open("images.lmdb") as environment, environment.begin(write=True) as transaction:
        for name, content in containers.pictures.items():
            transaction.put(name.encode(), content)


def write_masks(containers):
    """Write the masks of docs/segmentation.md: of the images, and of some cells in black and white."""
    rng = np.random.default_rng(0)
    for name in containers.pictures:
        path = Path("masks", name).with_suffix(".png")
        path.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(Path("images", name)) as image:
            ids = rng.integers(0, 4, (image.height, image.width), np.uint8)
        mask = Image.fromarray(np.where(ids == 3, 255, ids).astype(np.uint8))
        mask.putpalette(rng.integers(0, 256, 768, np.uint8).tobytes())
        mask.save(path)
    for folder in ("images", "masks"):
        Path("cells", folder).mkdir(parents=True)
    for number in range(6):
        mask = rng.integers(0, 2, (40, 50), np.uint8) * 255
        Image.fromarray(mask).save(f"cells/masks/{number}.png")
        Image.fromarray(mask // 2).save(f"cells/images/{number}.png")


def run_commands(text):
    """Run the memload commands of a console block, and return how many there are."""
    commands = re.findall(r"^\$ memload (.*)", text, re.MULTILINE)
    for command in commands:
        if command.startswith(("bench", "doctor")) or "://" in command or "..123" in command:
            continue  # see the tests of measure, and of URLs
        overwrite = ["--overwrite"] if command.startswith("build") else []
        done = CliRunner().invoke(main, shlex.split(command, comments=True) + overwrite)
        assert done.exit_code == 0, f"{command}: {done.output}"
    return len(commands)


def run_python(text, names):
    """Run a Python block and return 1, or return 0 if it needs a package that is not installed."""
    imported = re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE)
    if any(importlib.util.find_spec(package) is None for package in imported):
        return 0
    exec(compile(text, "page", "exec"), names)
    return 1


def marks_of(page):
    """Return the marks of a page's test. What other libraries of the recipes warn of is theirs."""
    marks = [pytest.mark.slow] if {page.name, page.parent.name} & {*SLOW} else []
    return (
        [*marks, pytest.mark.filterwarnings("ignore")] if page.parent.name == "recipes" else marks
    )


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page,
            marks=marks_of(page),
            id=str(page.relative_to(ROOT)),
        )
        for page in EXAMPLES
    ],
)
def test_the_examples_of_a_page_run(page, names, containers, tqdm_monitor, monkeypatch):
    monkeypatch.setattr("memload.measure.stages.SECONDS", 0)  # a diagnosis measures little
    if page.name in ("sources.md", "huggingface.md"):
        write_more_sources(containers)
    if page.name in ("segmentation.md", "quickstart.md"):
        write_masks(containers)
    blocks = [block for block in BLOCK.findall(page.read_text()) if block[0] not in UNTESTED]
    ran = {kind: 0 for kind, _ in blocks}
    for kind, text in blocks:
        # A block of the README runs in an empty file.
        known = {"__name__": "__main__"} if page.name == "README.md" else names
        ran[kind] += run_commands(text) if kind == "console" else run_python(text, known)
    assert set(ran) <= {"console", "python"}
    if page.name == "accelerate.md" and not ran["python"]:
        pytest.skip("Accelerate is not installed")
    assert all(ran.values())
    if page.name == "ffcv.md":
        assert memload.MemmapDataset("dataset.bin").labels.tolist() == [0, 1, 2] * 10
    if page.name == "quickstart.md":
        assert names["images"].shape == (30, 3, 224, 224)
    if page.name == "segmentation.md":
        assert names["masks"].unique().tolist() == [0, 1, 2, 255]
        assert names["ids"] == [0, 1, 2, 255]
        assert names["numbered"].unique().tolist() == [0, 1, 255]
        for target in names["targets"]:
            assert len(target["boxes"]) == len(target["labels"]) <= 2
            assert {*target["labels"].tolist()} <= {7, 8}
    if page.name == "landmarks.md":
        assert names["landmarks"].shape == (6, 2, 2)  # of the last batch
        images = torch.tensor([0, 1, 0, 0, 0, 0, 2, 0, 0]).expand(64, 1, 1, 9)  # left and right
        images, points = names["flip"](images, torch.tensor([[1.0, 0], [6, 0]]).expand(64, 2, 2))
        at = images[:, 0, 0].gather(1, points[..., 0].long())
        assert at.unique(dim=0).tolist() == [[1, 2], [2, 1]]  # some are mirrored
        assert (points[:, 0, 0] < points[:, 1, 0]).all()  # the first is on the left in all
    if page.name == "reading.md":
        assert list(names["numbers"]()) == list(range(10))


def test_links_exist_and_those_of_the_site_stay_in_it():
    for page in PAGES:
        texts = re.findall(r"\]\(([^)#]+)", page.read_text())
        links = [page.parent / text for text in texts if "://" not in text]
        assert [link for link in links if not link.exists()] == []
        if page in DOCS:  # name a file outside of docs/ as code, without a link
            outside = [x for x in links if not x.resolve().is_relative_to(ROOT / "docs")]
            assert outside == []


def test_the_site_lists_every_page():
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text())
    assert {str(page.relative_to(ROOT / "docs")) for page in DOCS} == set(listed)


@pytest.mark.parametrize("module", ["memload", "memload.transforms", "memload.transforms.recipes"])
def test_the_reference_has_every_public_name(module):
    page = ROOT / "docs" / "api" / f"{module.rpartition('.')[2]}.md"
    described = set(re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)) - {module}
    described -= {"memload.reading.stats.Stats", "memload.reading.samplers.Order"}  # of a Loader
    names = set(importlib.import_module(module).__all__) - {"__version__", "recipes"}
    if module == "memload.transforms":
        names -= {"train", "evaluate"}  # which are among the recipes
    assert described == {f"{module}.{name}" for name in names}, f"add it to {page}"
