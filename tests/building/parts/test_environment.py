"""Which part a process builds, from the variables of Slurm, torchrun and Kubernetes."""

import pytest

from memload.building.parts.environment import part_of


def variables(text: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in text.split())


def array(task: int | str, count: int, first: int, last: int, step: int = 1) -> str:
    """The variables of a task of ``sbatch --array``."""
    return (
        f"SLURM_ARRAY_TASK_ID={task} SLURM_ARRAY_TASK_COUNT={count} SLURM_ARRAY_TASK_MIN={first} "
        f"SLURM_ARRAY_TASK_MAX={last} SLURM_ARRAY_TASK_STEP={step}"
    )


SRUN = "SLURM_PROCID=1 SLURM_NTASKS=3"
TORCHRUN = "RANK=2 WORLD_SIZE=5"
KUBERNETES = "JOB_COMPLETION_INDEX=6"


@pytest.mark.parametrize(
    ("environment", "parts", "part", "source"),
    [
        (array(3, 8, 0, 7), None, (3, 8), "SLURM_ARRAY_TASK_ID and SLURM_ARRAY_TASK_COUNT"),
        (array(1, 8, 1, 8), None, (0, 8), "SLURM_ARRAY_TASK_ID and SLURM_ARRAY_TASK_COUNT"),
        (array(8, 8, 1, 8), None, (7, 8), "SLURM_ARRAY_TASK_ID and SLURM_ARRAY_TASK_COUNT"),
        (array(7, 4, 1, 7, 2), None, (3, 4), "SLURM_ARRAY_TASK_ID and SLURM_ARRAY_TASK_COUNT"),
        (array(5, 1, 5, 5), None, (0, 1), "SLURM_ARRAY_TASK_ID and SLURM_ARRAY_TASK_COUNT"),
        (
            "SLURM_ARRAY_TASK_ID=2 SLURM_ARRAY_TASK_COUNT=3",
            None,
            (2, 3),
            "SLURM_ARRAY_TASK_ID and SLURM_ARRAY_TASK_COUNT",
        ),
        (SRUN, None, (1, 3), "SLURM_PROCID and SLURM_NTASKS"),
        (f"{SRUN} SLURM_JOB_ID=9 SLURM_STEP_ID=0", None, (1, 3), "SLURM_PROCID and SLURM_NTASKS"),
        (TORCHRUN, None, (2, 5), "RANK and WORLD_SIZE"),
        (TORCHRUN, 5, (2, 5), "RANK and WORLD_SIZE"),
        ("RANK=0 WORLD_SIZE=1", None, (0, 1), "RANK and WORLD_SIZE"),
        ("RANK=007 WORLD_SIZE=008", None, (7, 8), "RANK and WORLD_SIZE"),
        (KUBERNETES, 7, (6, 7), "JOB_COMPLETION_INDEX and --parts"),
        # In this order, if several are set.
        (f"{KUBERNETES} {TORCHRUN} {SRUN} {array(0, 2, 0, 1)}", None, (0, 2), "SLURM_ARRAY"),
        (f"{KUBERNETES} {TORCHRUN} {SRUN}", None, (1, 3), "SLURM_PROCID"),
        (f"{KUBERNETES} {TORCHRUN}", None, (2, 5), "RANK"),
        # A shell of salloc has a number of tasks, and is none of them.
        (f"SLURM_NTASKS=4 {TORCHRUN}", None, (2, 5), "RANK"),
    ],
)
def test_the_part_follows_from_the_environment(
    environment: str, parts: int | None, part: tuple[int, int], source: str
) -> None:
    found, said = part_of(variables(environment), parts)
    assert found == part
    assert said.startswith(source)


def test_a_single_torchrun_below_srun_counts_by_its_own_numbers() -> None:
    shell = "SLURM_JOB_ID=9 SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=1"
    assert part_of(variables(f"{shell} {TORCHRUN}"), None) == ((2, 5), "RANK and WORLD_SIZE")
    assert part_of(variables(shell), None)[0] == (0, 1)


def test_the_tasks_of_an_array_have_all_parts_once() -> None:
    found = [part_of(variables(array(task, 5, 3, 19, 4)), None)[0] for task in range(3, 20, 4)]
    assert found == [(number, 5) for number in range(5)]


SCRIPT = "SLURM_JOB_ID=9 SLURM_PROCID=0"


@pytest.mark.parametrize("script", [SCRIPT, f"{SCRIPT} SLURM_NTASKS=4"])
def test_the_script_of_a_slurm_job_is_none_of_its_tasks(script: str) -> None:
    with pytest.raises(ValueError, match=r"Write srun before the command .* or give --part I/N"):
        part_of(variables(script), None)
    assert part_of(variables(f"{script} {TORCHRUN}"), None)[0] == (2, 5)
    assert part_of(variables(f"{script} {array(1, 3, 0, 2)}"), None)[0] == (1, 3)


@pytest.mark.parametrize(
    ("environment", "parts", "message"),
    [
        ("", None, r"none of SLURM_ARRAY_TASK_ID, SLURM_PROCID, RANK, JOB_COMPLETION_INDEX is set"),
        ("", 4, "none of SLURM_ARRAY_TASK_ID"),
        ("SLURM_ARRAY_TASK_ID=1", None, "is set, but SLURM_ARRAY_TASK_COUNT is not"),
        ("SLURM_ARRAY_TASK_COUNT=1", None, "is set, but SLURM_ARRAY_TASK_ID is not"),
        ("SLURM_PROCID=1", None, "SLURM_PROCID is set, but SLURM_NTASKS is not"),
        ("SLURM_NTASKS=4", None, "SLURM_NTASKS is set, but SLURM_PROCID is not"),
        ("RANK=1", None, "RANK is set, but WORLD_SIZE is not"),
        ("WORLD_SIZE=4", None, "WORLD_SIZE is set, but RANK is not"),
        (KUBERNETES, None, r"how many parts there are. Give --parts N"),
        (KUBERNETES, 6, "JOB_COMPLETION_INDEX and --parts say part 6 of 6 does not exist"),
        ("RANK=4 WORLD_SIZE=4", None, "RANK and WORLD_SIZE say part 4 of 4 does not exist"),
        ("RANK=0 WORLD_SIZE=0", None, "part 0 of 0 does not exist"),
        ("RANK=-1 WORLD_SIZE=4", None, "RANK is '-1', which is no whole number"),
        ("RANK= WORLD_SIZE=4", None, "RANK is '', which is no whole number"),
        ("RANK=1 WORLD_SIZE=four", None, "WORLD_SIZE is 'four', which is no whole number"),
        ("RANK=1.0 WORLD_SIZE=2", None, "RANK is '1.0'"),
        ("RANK=²  WORLD_SIZE=4", None, "RANK is '²'"),
        (f"RANK={'9' * 99} WORLD_SIZE=4", None, "RANK is '9{30,40}, which is no whole number"),
        (TORCHRUN, 4, "--parts is 4, but WORLD_SIZE is 5. Leave out --parts"),
        (array(0, 8, 0, 7), 4, "--parts is 4, but SLURM_ARRAY_TASK_COUNT is 8"),
        (array(5, 3, 1, 7), None, r"5, one of 3 ids from 1 to 7 .* Submit the whole array again"),
        (array(1, 3, 1, 7), None, "not all in one range"),
        (array(20, 5, 1, 20, 2), None, "not all in one range"),
        (array("", 5, 1, 5), None, "SLURM_ARRAY_TASK_ID is ''"),
        ("SLURM_ARRAY_TASK_ID=3 SLURM_ARRAY_TASK_COUNT=3", None, "part 3 of 3 does not"),
    ],
)
def test_an_environment_that_names_no_part_is_an_error(
    environment: str, parts: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        part_of(variables(environment), parts)
    assert (
        "Give --part" in str(raised.value)
        or "Leave out --parts" in str(raised.value)
        or ("give --part I/N" in str(raised.value))
    )
