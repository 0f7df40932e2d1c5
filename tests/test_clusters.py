"""docs/clusters.md: its scripts run, and build the same files as one machine."""

import contextlib
import hashlib
import os
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path

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

    def __init__(self, folder):
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

    def adapted(self, text, changes=None):
        """Return a block of the page for this folder, with small shards and further changes."""
        usual = {"/shared": str(self.folder), "/local": str(self.local)}
        for old, new in {**usual, **(changes or {})}.items():
            assert old in text or old in usual, old
            text = text.replace(old, new)
        return text.replace("--shard-size 4GB", f"--shard-size {SHARD_SIZE}").replace(
            'shard_size="4GB"', f"shard_size={SHARD_SIZE}"
        )

    def run(self, command, **variables):
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

    def run_script(self, name, text, *command, **variables):
        """Run a block as a file of this name."""
        (self.folder / name).write_text(text)
        return self.run([*(command or ("bash",)), name], **variables)

    @contextlib.contextmanager
    def started(self, *command):
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

    def files(self):
        """Return the SHA-256 of each file of the data set."""
        paths = [path for path in self.folder.glob("out*") if path.is_file()]
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


@pytest.fixture
def shared(tmp_path, containers):
    folder = Shared(tmp_path)
    (folder.folder / "images").symlink_to(containers.directory())
    return folder


@pytest.fixture
def expected(shared):
    """The files that a build on one machine has."""
    memload.build(shared.folder / "images", shared.output, shard_size=SHARD_SIZE, num_workers=0)
    files = shared.files()
    assert sorted(files) == [*(f"out-{k:05d}-of-00004.bin" for k in range(4)), "out.idx"]
    for name in files:
        (shared.folder / name).unlink()
    return files


def block(heading, containing, kind="bash"):
    """Return the only block of a section that contains a text."""
    section = re.split(r"^## ", PAGE.split(f"\n## {heading}\n")[1], flags=re.MULTILINE)[0]
    found = [text for name, text in BLOCK.findall(section) if name == kind and containing in text]
    assert len(found) == 1, (heading, containing)
    return found[0]


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def test_two_parts(shared, expected):
    text = next(text for kind, text in BLOCK.findall(PAGE) if kind == "console")
    commands = re.findall(r"^\$ (.*?) +#", text, re.MULTILINE)
    printed = [shared.run(shared.adapted(command).split()) for command in commands]
    numbers = re.compile(r"[\d,]+")
    for line, shown in zip(printed, re.findall(r"^/.*", text, re.MULTILINE), strict=True):
        start = numbers.sub("N", shared.adapted(shown)).split("samples of")[0]
        assert numbers.sub("N", line).startswith(start)
    assert shared.files() == expected


def test_a_slurm_array(shared, expected):
    tasks = 3
    script = shared.adapted(block("Slurm", "--array"), {"--array=0-7": f"--array=0-{tasks - 1}"})
    for task in [2, *range(tasks), 2]:  # one begins out of turn, and one is run again at the end
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


def test_slurm_tasks_of_srun(shared, expected):
    script = shared.adapted(block("Slurm", "srun"))
    shared.run_script("build.sh", script, SLURM_NTASKS=3, SLURM_PROCID=0, SLURM_CPUS_PER_TASK=1)
    assert shared.files() == expected


def test_a_kubernetes_job(shared, expected):
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load(block("Kubernetes", "kind: Job", "yaml"))
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    (script,) = container["args"]
    count = spec["completions"]
    assert f"--part $JOB_COMPLETION_INDEX/{count} " in script
    assert spec["completionMode"] == "Indexed"
    assert pod["restartPolicy"] == "Never"  # backoffLimitPerIndex needs it
    assert container["resources"]["requests"]["cpu"] == script.split()[-1]
    mounts, volumes = container["volumeMounts"], pod["volumes"]
    assert [mount["name"] for mount in mounts] == [volume["name"] for volume in volumes]
    adapted = shared.adapted(script, {"--num-workers 16": "--num-workers 1"})
    for index in range(count):
        shared.run([*container["command"], adapted], JOB_COMPLETION_INDEX=index)
    assert shared.files() == expected


def test_torchrun(shared, expected):
    changes = {
        "--nnodes 4": "--nnodes 1",
        "--nproc-per-node 1": "--nproc-per-node 2",
        "node0:29500": f"127.0.0.1:{free_port()}",
    }
    shared.run_script("build.sh", shared.adapted(block("torchrun", "torchrun"), changes))
    assert shared.files() == expected


def test_dask(shared, expected):
    pytest.importorskip("distributed")
    scheduler = f"tcp://127.0.0.1:{free_port()}"
    usual = {"tcp://scheduler:8786": scheduler}
    worker = shared.adapted(
        block("Dask", "dask worker"), {**usual, "--nworkers 16": "--nworkers 2 --no-dashboard"}
    )
    script = shared.adapted(block("Dask", "Client", "python"), usual)
    (shared.folder / "worker.sh").write_text(f"exec env {worker}")
    options = "--host", "127.0.0.1", "--port", scheduler.rpartition(":")[2], "--no-dashboard"
    with (
        shared.started("dask", "scheduler", *options),
        shared.started("sh", "worker.sh"),
    ):
        shared.run_script("build.py", script, sys.executable)
    assert shared.files() == expected


def test_ray(shared, expected):
    pytest.importorskip("ray")
    local = 'num_cpus=16, include_dashboard=False, logging_level="error"'
    changes = {'address="auto"': local, "RayExecutor(num_cpus=1": "RayExecutor(num_cpus=8"}
    script = shared.adapted(block("Ray", "class RayExecutor", "python"), changes)
    shared.run_script("build.py", script, sys.executable)
    assert shared.files() == expected


def test_an_executor_of_the_standard_library(shared, expected):
    text = block("Any other engine, in Python", "ProcessPoolExecutor", "python")
    shared.run_script("build.py", shared.adapted(text), sys.executable)
    assert shared.files() == expected


def test_training_on_copied_files(shared):
    memload.build(shared.folder / "images", shared.output, size=16, num_workers=0)
    section = "Training on several machines"
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
    assert sorted(path.name for path in (shared.local / "data").glob("out*")) == [
        "out.bin",
        "out.idx",
    ]


def test_shell_scripts_can_be_parsed():
    texts = [text for name, text in BLOCK.findall(PAGE) if name == "bash"]
    assert texts
    for text in texts:
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_python_programs_can_be_compiled():
    for name, text in BLOCK.findall(PAGE):
        if name == "python":
            compile(text, "page", "exec")
