"""docs/clusters.md: its scripts run, and build the same files as one machine."""

import contextlib
import hashlib
import os
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import memload

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "clusters.md").read_text()
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

#: A shard for each eight of the 30 pictures, so that there are four.
SHARD_SIZE = 4096 + 8 * 256 * 256 * 3

#: What stands in for programs of a cluster. ``srun`` runs a command once for each task.
PROGRAMS = {
    "memload": f'exec {sys.executable} -m memload "$@"',
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    "scontrol": "echo 127.0.0.1",
    "rsync": 'shift; exec cp -p "$@"',
    "srun": """
case $1 in --cpus-per-task=*) shift ;; esac
task=0
while [ "$task" -lt "$SLURM_NTASKS" ]; do
    SLURM_PROCID=$task SLURM_STEP_ID=0 "$@" || exit 1
    task=$((task + 1))
done
""",
    "ssh": '[ "$1" = -n ] || exit 1; [ "$2" != "$DEAD" ] || exit 255; echo "$2" >> hosts; exec sh -c "$3"',
    "dask": f'exec {sys.executable} -m dask "$@"',
}

pytestmark = pytest.mark.slow


class Shared:
    """A folder in place of /shared, with pictures and programs, and another one in place of /local."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.local = folder / "shared", folder / "local"
        self.output = self.folder / "out.bin"
        programs = self.folder / "venv" / "bin"
        programs.mkdir(parents=True)
        for name, text in PROGRAMS.items():
            (programs / name).write_text(f"#!/bin/sh\n{text}\n")
            (programs / name).chmod(stat.S_IRWXU)
        (programs / "activate").write_text("")
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM_", "JOB_")) and name not in ("RANK", "WORLD_SIZE")
        }
        paths = f"{programs}:{inherited['PATH']}", str(ROOT)
        self.environment = {**inherited, "PATH": paths[0], "PYTHONPATH": paths[1]}

    def adapted(self, text: str, changes: dict[str, str] | None = None) -> str:
        """Return a block of the page for this folder, with small shards and further changes."""
        usual = {"/shared": str(self.folder), "/local": str(self.local)}
        for old, new in {**usual, **(changes or {})}.items():
            assert old in text or old in usual, old
            text = text.replace(old, new)
        return text.replace("--shard-size 4GB", f"--shard-size {SHARD_SIZE}").replace(
            'shard_size="4GB"', f"shard_size={SHARD_SIZE}"
        )

    def run(self, command: list[str], **variables: Any) -> str:
        """Run a command with further variables of the environment; return what it prints."""
        environment = {**self.environment, **{key: str(value) for key, value in variables.items()}}
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    def run_script(self, name: str, text: str, *command: str, **variables: Any) -> str:
        """Run a block as a file of this name."""
        (self.folder / name).write_text(text)
        return self.run([*(command or ("bash",)), name], **variables)

    @contextlib.contextmanager
    def started(self, *command: str) -> Iterator[None]:
        """Run a command meanwhile."""
        with (self.folder / f"{command[1]}.log").open("w") as log:
            process = subprocess.Popen(
                command, cwd=self.folder, env=self.environment, stdout=log, stderr=log
            )
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise

    def files(self) -> dict[str, str]:
        """Return the SHA-256 of each file of the data set."""
        paths = [path for path in self.folder.glob("out*") if path.is_file()]
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


@pytest.fixture
def shared(tmp_path: Path, containers: Any) -> Shared:
    folder = Shared(tmp_path)
    (folder.folder / "images").symlink_to(containers.directory())
    return folder


@pytest.fixture
def expected(shared: Shared) -> dict[str, str]:
    """The files that a build on one machine has."""
    memload.build(shared.folder / "images", shared.output, shard_size=SHARD_SIZE, num_workers=0)
    files = shared.files()
    assert sorted(files) == [*(f"out-{k:05d}-of-00004.bin" for k in range(4)), "out.idx"]
    for name in files:
        (shared.folder / name).unlink()
    return files


def block(heading: str, containing: str, kind: str = "bash") -> str:
    """Return the only block of a section that contains a text."""
    section = re.split(r"^## ", PAGE.split(f"\n## {heading}\n")[1], flags=re.MULTILINE)[0]
    found = [text for name, text in BLOCK.findall(section) if name == kind and containing in text]
    assert len(found) == 1, (heading, containing)
    return found[0]


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def test_two_parts(shared: Shared, expected: dict[str, str]) -> None:
    text = next(text for kind, text in BLOCK.findall(PAGE) if kind == "console")
    commands = re.findall(r"^\$ (.*?) +#", text, re.MULTILINE)
    printed = [shared.run(shared.adapted(command).split()) for command in commands]
    numbers = re.compile(r"[\d,]+")
    for line, shown in zip(printed, re.findall(r"^/.*", text, re.MULTILINE), strict=True):
        start = numbers.sub("N", shared.adapted(shown)).split("samples of")[0]
        assert numbers.sub("N", line).startswith(start)
    assert shared.files() == expected


def test_a_slurm_array(shared: Shared, expected: dict[str, str]) -> None:
    script = shared.adapted(block("Slurm", "--array"))
    tasks = 8
    assert f"--array=0-{tasks - 1}\n" in script
    for task in [3, *range(tasks), 3]:  # one begins out of turn, and one is run again at the end
        shared.run_script(
            "build.sh",
            script,
            SLURM_ARRAY_TASK_ID=task,
            SLURM_ARRAY_TASK_COUNT=tasks,
            SLURM_ARRAY_TASK_MIN=0,
            SLURM_ARRAY_TASK_MAX=tasks - 1,
            SLURM_ARRAY_TASK_STEP=1,
            SLURM_PROCID=0,
            SLURM_NTASKS=1,
            SLURM_CPUS_PER_TASK=1,
        )
    assert shared.files() == expected


def test_slurm_tasks_of_srun(shared: Shared, expected: dict[str, str]) -> None:
    script = shared.adapted(block("Slurm", "srun"))
    shared.run_script("build.sh", script, SLURM_NTASKS=8, SLURM_PROCID=0, SLURM_CPUS_PER_TASK=1)
    assert shared.files() == expected


def test_a_kubernetes_job(shared: Shared, expected: dict[str, str]) -> None:
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load(block("Kubernetes", "kind: Job", "yaml"))
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    command = [*container["command"], *container["args"]]
    assert spec["completions"] == int(command[command.index("--parts") + 1])
    assert spec["completionMode"] == "Indexed"
    assert pod["restartPolicy"] == "Never"  # backoffLimitPerIndex needs it
    assert int(container["resources"]["requests"]["cpu"]) == int(command[-1])
    mounts, volumes = container["volumeMounts"], pod["volumes"]
    assert [mount["name"] for mount in mounts] == [volume["name"] for volume in volumes]
    adapted = shared.adapted(" ".join(command), {"--num-workers 16": "--num-workers 1"}).split()
    for index in range(spec["completions"]):
        shared.run(adapted, JOB_COMPLETION_INDEX=index)
    assert shared.files() == expected


def test_torchrun(shared: Shared, expected: dict[str, str]) -> None:
    changes = {
        "--nnodes 4": "--nnodes 1",
        "--nproc-per-node 1": "--nproc-per-node 2",
        "node0:29500": f"127.0.0.1:{free_port()}",
    }
    shared.run_script("build.sh", shared.adapted(block("torchrun", "torchrun"), changes))
    assert shared.files() == expected


def test_ssh(shared: Shared, expected: dict[str, str]) -> None:
    script = shared.adapted(block("ssh", "wait", "sh"))
    with pytest.raises(AssertionError, match="part 2 is not done yet"):
        shared.run_script("build.sh", script, "sh", DEAD="node2")
    shared.run_script("build.sh", script, "sh")
    assert shared.files() == expected
    hosts = (shared.folder / "hosts").read_text().split()
    assert sorted(set(hosts)) == ["node0", "node1", "node2", "node3"]


def test_xargs(shared: Shared, expected: dict[str, str]) -> None:
    script = shared.adapted(block("ssh", "xargs", "sh"), {"seq 0 31": "seq 0 5", "{}/32": "{}/6"})
    with pytest.raises(AssertionError, match="255"):
        shared.run_script("build.sh", script, "sh", DEAD="node0")
    assert shared.files() == {}
    shared.run_script("build.sh", script, "sh")
    assert shared.files() == expected
    hosts = (shared.folder / "hosts").read_text().split()
    assert set(hosts) <= {"node0", "node1", "node2", "node3"}


@pytest.mark.parametrize(
    ("section", "num_workers"), [("Dask", 0), ("Any other engine, in Python", 1)]
)
def test_dask(section: str, num_workers: int, shared: Shared, expected: dict[str, str]) -> None:
    pytest.importorskip("distributed")
    scheduler = f"tcp://127.0.0.1:{free_port()}"
    usual = {"tcp://scheduler:8786": scheduler}
    worker = shared.adapted(
        block(section, "dask worker"), {**usual, "--nworkers 16": "--nworkers 2 --no-dashboard"}
    )
    script = shared.adapted(
        block("Dask", "Client", "python"),
        {**usual, "executor=": f"num_workers={num_workers}, executor="},
    )
    (shared.folder / "worker.sh").write_text(f"exec env {worker}")
    options = "--host", "127.0.0.1", "--port", scheduler.rpartition(":")[2], "--no-dashboard"
    with (
        shared.started("dask", "scheduler", *options),
        shared.started("sh", "worker.sh"),
    ):
        shared.run_script("build.py", script, sys.executable)
    assert shared.files() == expected


@pytest.mark.parametrize("containing", ["max_retries=3)(memload.build)", "class RayExecutor"])
def test_ray(containing: str, shared: Shared, expected: dict[str, str]) -> None:
    pytest.importorskip("ray")
    local = 'num_cpus=16, include_dashboard=False, logging_level="error"'
    changes = {'address="auto"': local}
    if "num_workers=16" in block("Ray", containing, "python"):
        changes["num_workers=16"] = "num_workers=0"
    else:
        changes["RayExecutor(num_cpus=1"] = "RayExecutor(num_cpus=8"
    script = shared.adapted(block("Ray", containing, "python"), changes)
    shared.run_script("build.py", script, sys.executable)
    assert shared.files() == expected


def test_the_part_of_a_task_of_srun(shared: Shared, expected: dict[str, str]) -> None:
    text = shared.adapted(block("`--part auto`", "SLURM_PROCID", "python"))
    for part in range(3):
        shared.run_script("build.py", text, sys.executable, SLURM_PROCID=part, SLURM_NTASKS=3)
    assert shared.files() == expected


def test_parts_in_python(shared: Shared, expected: dict[str, str]) -> None:
    text = shared.adapted(block("Any other engine, in Python", "part=(i, 8)", "python"))
    printed = shared.run_script("build.py", text, sys.executable).splitlines()
    # There are four shards, so that the last part with one of them publishes, and others find that.
    assert [line.split()[0] for line in printed] == 3 * ["False"] + 5 * ["True"]
    assert shared.files() == expected


def test_an_executor_of_the_standard_library(shared: Shared, expected: dict[str, str]) -> None:
    text = block("Any other engine, in Python", "ProcessPoolExecutor", "python")
    shared.run_script("build.py", shared.adapted(text), sys.executable)
    assert shared.files() == expected


def test_training_on_copied_files(shared: Shared) -> None:
    memload.build(shared.folder / "images", shared.output, size=16, num_workers=0)
    section = "Training on several machines"
    (shared.folder / "copy.sh").write_text(shared.adapted(block(section, "rsync")))
    program = {"train(224)": "train(16)", "256, shuffle": "4, shuffle", "stride=4": "stride=1"}
    train = shared.adapted(block(section, "import memload", "python"), program)
    (shared.folder / "train.py").write_text(train)
    changes = {
        "--nproc-per-node 8": "--nproc-per-node 2",
        ":29500": f":{free_port()}",
        "#!/bin/bash": "#!/bin/bash\nset -e",
    }
    printed = shared.run_script(
        "train.sh",
        shared.adapted(block(section, "scontrol"), changes),
        SLURM_NTASKS=1,
        SLURM_JOB_NUM_NODES=1,
        SLURM_JOB_NODELIST="node0",
        SLURM_JOB_ID=1,
        SLURM_CPUS_PER_TASK=2,
        CUDA_VISIBLE_DEVICES="",
        OMP_NUM_THREADS=1,
    )
    found = re.findall(r"epoch (\d), rank (\d): loss", printed)  # lines may run into each other
    assert sorted(found) == [(epoch, rank) for epoch in "012" for rank in "01"]
    assert sorted(path.name for path in (shared.local / "data").iterdir()) == ["out.bin", "out.idx"]


@pytest.mark.parametrize("kind", ["bash", "sh"])
def test_shell_scripts_can_be_parsed(kind: str) -> None:
    texts = [text for name, text in BLOCK.findall(PAGE) if name == kind]
    assert texts
    for text in texts:
        subprocess.run([kind, "-n"], input=text, text=True, check=True)


def test_python_programs_can_be_compiled() -> None:
    for name, text in BLOCK.findall(PAGE):
        if name == "python":
            compile(text, "page", "exec")
