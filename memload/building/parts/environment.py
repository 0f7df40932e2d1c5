"""Which part this process builds, from the variables that a cluster sets for each of its tasks."""

from collections.abc import Mapping

from memload.building.checks import part_problem
from memload.building.parts.workspace import Part

#: The variables with the number of a task and that of all tasks, in the order they are looked at.
_PAIRS = (
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT"),  # sbatch --array
    ("SLURM_PROCID", "SLURM_NTASKS"),  # srun
    ("RANK", "WORLD_SIZE"),  # torchrun
)

#: Kubernetes tells the pod of an indexed job its number, and not how many there are.
_KUBERNETES = "JOB_COMPLETION_INDEX"


def part_of(environment: Mapping[str, str], parts: int | None) -> tuple[Part, str]:
    """Return the part of this process, and in words where its numbers are from.

    Slurm's arrays, ``srun``, ``torchrun`` and indexed jobs of Kubernetes are looked at in this
    order. The first whose variable with the number is set counts. ``parts`` is how many there are,
    which only Kubernetes does not say. Raises ValueError if no part follows from that.

    >>> part_of({"RANK": "3", "WORLD_SIZE": "8"}, None)
    ((3, 8), 'RANK and WORLD_SIZE')
    """
    for index_name, count_name in _PAIRS:
        if index_name not in environment or _is_passed_over(environment, index_name):
            continue
        if count_name not in environment:
            raise ValueError(f"{index_name} is set, but {count_name} is not. Give --part I/N.")
        index, count = _number(environment, index_name), _number(environment, count_name)
        if index_name == "SLURM_ARRAY_TASK_ID":
            index = _position(environment, index, count)
        if parts not in (None, count):
            raise ValueError(f"--parts is {parts}, but {count_name} is {count}. Leave out --parts.")
        source = f"{index_name} and {count_name}"
        return _checked(index, count, source), source
    if _KUBERNETES in environment:
        if parts is None:
            raise ValueError(
                f"{_KUBERNETES} is set, but not how many parts there are. Give --parts N, as many "
                "as the job has completions."
            )
        source = f"{_KUBERNETES} and --parts"
        return _checked(_number(environment, _KUBERNETES), parts, source), source
    raise ValueError(_nothing_set(environment))


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    if default is not None and name not in environment:
        return default
    text = environment[name]
    if not (text.isascii() and text.isdecimal() and len(text) <= 9):
        raise ValueError(f"{name} is {text!r:.40}, which is no whole number. Give --part I/N.")
    return int(text)


def _position(environment: Mapping[str, str], index: int, count: int) -> int:
    """Return the position of an id in a Slurm array, such as 2 for 5 in ``--array=1-15:2``."""
    first = _number(environment, "SLURM_ARRAY_TASK_MIN", 0)
    step = _number(environment, "SLURM_ARRAY_TASK_STEP", 1) or 1  # by 0, it could not be divided
    last = _number(environment, "SLURM_ARRAY_TASK_MAX", first + (count - 1) * step)
    position, remainder = divmod(index - first, step)
    if remainder or last != first + (count - 1) * step:
        raise ValueError(
            f"SLURM_ARRAY_TASK_ID is {index}, one of {count} ids from {first} to {last} that are "
            f"not all in one range, so that its position is unknown. Submit the whole array "
            "again (tasks that are done end at once), such as --array=0-7, or give --part I/N."
        )
    return position


def _checked(index: int, count: int, source: str) -> Part:
    if problem := part_problem(index, count):
        raise ValueError(f"{source} say part {problem} Give --part I/N.")
    return index, count


def _is_passed_over(environment: Mapping[str, str], index_name: str) -> bool:
    """Return whether SLURM_PROCID is that of a process from which others are started.

    It is 0 in the script of ``sbatch``, which is none of its tasks: Slurm sets SLURM_STEP_ID only
    for what ``srun`` starts. It is 0 of 1 in a shell that ``srun`` has started, and for a single
    ``torchrun``, whose processes have numbers of their own.
    """
    if index_name != "SLURM_PROCID" or environment[index_name] != "0":
        return False
    if environment.get("SLURM_NTASKS") == "1" and "RANK" in environment:
        return True
    return "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" not in environment


def _nothing_set(environment: Mapping[str, str]) -> str:
    for index_name, count_name in _PAIRS:
        if index_name in environment:
            return (
                f"{index_name} is that of the script of a Slurm job. Write srun before the command "
                "to run it once in each task, or give --part I/N."
            )
        if count_name in environment:
            return f"{count_name} is set, but {index_name} is not. Give --part I/N."
    names = ", ".join([*(name for name, _ in _PAIRS), _KUBERNETES])
    return f"none of {names} is set here. Give --part I/N, such as --part 0/8."
