"""Files of a build in parts that hold anything else: errors of one line, and no traceback."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import memload
from memload.building.journal import Journal, record_type
from memload.building.lock import Holder
from memload.cli import main

OPTIONS: dict[str, Any] = {"size": 8, "num_workers": 0, "progress": False}

#: Values that no field has.
WRONG = [
    None,
    True,
    -1,
    10**30,
    float("inf"),
    float("nan"),
    "",
    "x",
    "9" * 5000,
    "\x1b[31m",
    [],
    [1],
    {},
    {"a": 1},
]
NESTED = "[" * 200_000


@pytest.fixture
def output(pictures: Path, tmp_path: Path) -> Path:
    """A build of which part 0 of 2 is done."""
    output = tmp_path / "out.bin"
    memload.build(pictures, output, part=(0, 2), **OPTIONS)
    return output


@pytest.fixture
def folder(output: Path) -> Path:
    return output.with_suffix(".building")


@pytest.fixture
def run(
    pictures: Path, output: Path, capfd: pytest.CaptureFixture[str]
) -> Callable[[str], tuple[int, str]]:
    """A function that runs ``info`` or ``build`` and returns the exit status and what it prints."""

    def call(name: str) -> tuple[int, str]:
        options = {"info": (), "build": ("-s", "8", "-j", "0", "--part", "1/2", "--quiet")}[name]
        source = [str(pictures)] if name == "build" else []
        with pytest.raises(SystemExit) as ended:
            main([name, *source, str(output), *options])
        captured = capfd.readouterr()
        return int(ended.value.code or 0), captured.out + captured.err

    return call


def replaced(facts: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of JSON with another value at a path."""
    if not path:
        return value
    copy = facts.copy()
    copy[path[0]] = replaced(copy[path[0]], path[1:], value)
    return copy


#: Of these values, those that a field may have.
RIGHT: dict[tuple[Any, ...], list[Any]] = {
    ("begun", "machine"): ["", "x"],
    ("begun", "work"): ["", "x"],
    ("begun", "list_sha256"): ["", "x"],
    ("begun", "overwrite"): [True],
    ("plan", "rows per shard"): [None],
}

PLACES = [
    (),
    ("begun",),
    ("plan",),
    ("begun", "machine"),
    ("begun", "work"),
    ("begun", "rows"),
    ("begun", "source"),
    ("begun", "list_sha256"),
    ("begun", "overwrite"),
    ("plan", "rows per shard"),
    (
        "plan",
        "columns",
    ),
    ("plan", "columns", "label"),
    ("plan", "columns", "label", 0),
]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: "-".join(map(str, place)) or "all")
def test_a_plan_with_values_of_other_types_is_damaged(
    place: tuple[Any, ...], folder: Path, run: Any
) -> None:
    path = folder / "plan.json"
    plan = json.loads(path.read_text())
    for value in (value for value in WRONG if value not in RIGHT.get(place, [])):
        path.write_text(json.dumps(replaced(plan, place, value)))
        for name in ("info", "build"):
            status, text = run(name)
            assert status == 1 or name == "info"
            assert "\x1b" not in text
            assert name == "info" or any(
                word in text for word in ("plan.json", "differs", "begun without")
            )
    path.write_text(json.dumps(plan))
    assert run("build")[0] == 0


@pytest.mark.parametrize("field", ["", "machine", "process", "converted", "seconds", "crc32"])
def test_a_done_file_with_values_of_other_types_is_damaged(
    field: str, folder: Path, run: Any
) -> None:
    path = folder / "done" / "00000"
    done = json.loads(path.read_text())
    for value in WRONG:
        path.write_text(json.dumps(replaced(done, (field,) if field else (), value)))
        assert run("info")[0] == 0
    status, text = run("build")
    assert status == 1
    assert "done/00000 is missing or damaged" in text


@pytest.mark.parametrize("name", ["plan.json", "done/00000", "shards/00000/lock", "lock"])
def test_deeply_nested_files_are_damaged(name: str, folder: Path, run: Any) -> None:
    (folder / name).write_text(NESTED)
    for command in ("info", "build"):
        assert run(command)[0] in (0, 1)


@pytest.mark.parametrize("line", [NESTED, "[[1], 2]", '["1", "x"]', '[99, "x"]', "5", "null"])
def test_lines_of_the_rejects_that_are_damaged_are_passed_over(line: str, tmp_path: Path) -> None:
    journal = Journal(tmp_path, 4, record_type(3, {}), first_row=8)
    (tmp_path / "rejects.jsonl").write_text(f'\n{line}\n[9, "torn"]')
    assert journal.reasons() == {9: "torn"}


@pytest.mark.parametrize(
    "facts",
    [
        {"machine": "m", "process": 1, "work": 5},
        {"machine": "m", "process": 1},
        {"machine": ["m"], "process": 1, "work": ""},
        {"machine": "\x1b]0;evil\x07\nmemload: ok", "process": 1, "work": ""},
        {"machine": "m" * 1000, "process": 1, "work": ""},
        {"machine": "m", "process": 10**30, "work": ""},
        [["machine", "m"]],
    ],
)
def test_what_no_holder_wrote_is_no_holder(facts: Any, tmp_path: Path) -> None:
    (tmp_path / "lock").write_text(json.dumps(facts))
    assert Holder.of(tmp_path / "lock") == Holder()


@pytest.mark.parametrize("name", [".DS_Store", ".nfs0001", "3", "٣٣٣٣٣", "99999", "-1", "000000"])
@pytest.mark.parametrize("kind", ["shards", "done"])
def test_files_of_others_between_the_shards_do_not_count(
    kind: str, name: str, output: Path, folder: Path, run: Any
) -> None:
    before = memload.build_status(output)
    (folder / kind / name).mkdir() if kind == "shards" else (folder / kind / name).touch()
    after = memload.build_status(output)
    assert before is not None
    assert after is not None
    assert after.parts == before.parts
    assert run("build")[0] == 0


def test_more_samples_than_names_are_an_error_and_take_no_memory(folder: Path, run: Any) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps(replaced(plan, ("begun", "rows"), 10**12)))
    status, text = run("info")
    assert status == 1
    assert "plan.json is damaged: it says 1,000,000,000,000 samples" in text
