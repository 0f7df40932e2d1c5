"""Builds by Dask or Ray in a process of its own, since both keep threads and connections.

    python engine_process.py dask|ray

It starts two nodes here. For each line of JSON that it reads it builds, and it writes a line of JSON:
the report, or the error. It ends with its input.
"""

import concurrent.futures
import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from killing_pictures import KillingPictures

import memload


def ray_executor(**options: Any) -> concurrent.futures.Executor:
    """Return the adapter that docs/clusters.md shows."""
    import ray

    page = Path(__file__).parents[3] / "docs/clusters.md"
    shown = re.search(r"^class RayExecutor.*?(?=^\S)", page.read_text(), re.MULTILINE | re.DOTALL)
    assert shown is not None
    names: dict[str, Any] = {"concurrent": concurrent, "ray": ray}
    exec(shown[0], names)
    executor: concurrent.futures.Executor = names["RayExecutor"](**options)
    return executor


@contextlib.contextmanager
def dask() -> Iterator[tuple[Any, Any]]:
    """Yield an executor, and a function that runs another one in tasks."""
    from distributed import Client, LocalCluster

    with (
        LocalCluster(n_workers=2, threads_per_worker=2, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):

        def run(function: Any, calls: list[dict[str, Any]]) -> list[Any]:
            return list(client.gather([client.submit(function, **call) for call in calls]))

        yield client.get_executor(pure=False), run


@contextlib.contextmanager
def ray() -> Iterator[tuple[Any, Any]]:
    """Yield an executor, and a function that runs another one in tasks."""
    import ray
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    cluster.add_node(**node)
    ray.init(address=cluster.address, log_to_driver=False)

    def run(function: Any, calls: list[dict[str, Any]]) -> list[Any]:
        task = ray.remote(num_cpus=1)(function)
        return list(ray.get([task.remote(**call) for call in calls]))

    try:
        yield ray_executor(num_cpus=1, max_retries=3), run
    finally:
        ray.shutdown()
        cluster.shutdown()


def build(executor: Any, run: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Build what a request says, and return the report or the error."""
    source, parts = request.pop("source"), request.pop("parts", 0)
    if isinstance(source, list):
        source = KillingPictures(Path(source[0]), source[1])
    try:
        if parts:
            calls = [{"source": source, **request, "part": (i, parts)} for i in range(parts)]
            reports = run(memload.build, calls)
            return next(report.as_dict() for report in reports if report.is_published)
        return memload.build(source, executor=executor, **request).as_dict()
    except Exception as error:  # noqa: BLE001  # the test asserts
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Serve requests until the input ends."""
    engine = {"dask": dask, "ray": ray}[sys.argv[1]]
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # Ray prints
    with answers, engine() as (executor, run):
        for line in sys.stdin:
            answer = build(executor, run, json.loads(line))
            print(json.dumps(answer, default=str), file=answers, flush=True)


if __name__ == "__main__":
    main()
