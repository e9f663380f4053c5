"""A Spark standalone master with two workers, each a process of its own on the loopback address."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx
import psutil
import pyspark
from tests.waits import await_true

from penstock.embedded.process import GuardedProcess, free_port

from .pipeline import NO_TLS, PATIENCE, kill

ENVIRONMENT: Final = {
    **os.environ,
    "PYSPARK_PYTHON": sys.executable,
    "SPARK_LOCAL_IP": "127.0.0.1",
}
# None lives long enough for the C2 compiler to pay.
QUICK_JAVA: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_DEPLOY: Final = "org.apache.spark.deploy"


class SparkCluster:
    """The cluster; `master` is what a session names, `folder` has what its workers write."""

    def __init__(self, master: str, folder: Path, workers: list[GuardedProcess]) -> None:
        self.master = master
        self.folder = folder
        self.workers = workers

    def tree(self, worker: int) -> list[psutil.Process]:
        """Return a worker's process and all below it: its executors, and their Python processes."""
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.workers[worker].pid)
            return [root, *root.children(recursive=True)]
        return []

    def kill(self, worker: int) -> None:
        """Kill a worker with all below it, as where its machine is gone."""
        kill(self.tree(worker))
        assert self.workers[worker].wait(PATIENCE) is not None


@contextmanager
def spark_cluster(folder: Path, *, cores: int = 1) -> Iterator[SparkCluster]:
    """Start a master, and two workers with so many cores each; yield once it has both."""
    home = Path(next(iter(pyspark.__path__)))
    submit = str(home / "bin" / "spark-class")
    port, ui = free_port(), free_port()
    work = folder / "work"
    environment = {
        **ENVIRONMENT, "SPARK_HOME": str(home), "SPARK_WORKER_DIR": str(work),
        "SPARK_DAEMON_JAVA_OPTS": QUICK_JAVA,
    }  # fmt: skip
    master = f"spark://127.0.0.1:{port}"
    commands = {
        "master": [f"{_DEPLOY}.master.Master", "--host", "127.0.0.1", "--port", str(port),
                   "--webui-port", str(ui)],
    }  # fmt: skip
    for n in (1, 2):
        commands[f"worker-{n}"] = [
            f"{_DEPLOY}.worker.Worker", "--host", "127.0.0.1", "--cores", str(cores),
            "--memory", "1g", "--webui-port", "0", master,
        ]  # fmt: skip

    def has_both() -> bool:
        with contextlib.suppress(httpx.TransportError, ValueError):  # its pages come one by one
            page = httpx.get(
                f"http://127.0.0.1:{ui}/json/", trust_env=False, timeout=5, verify=NO_TLS
            )
            return bool(page.json()["aliveworkers"] == 2)
        return False

    processes: list[GuardedProcess] = []
    try:
        for name, command in commands.items():
            log = folder / f"{name}.log"
            processes.append(GuardedProcess([submit, *command], log=log, env=environment))
        await_true(has_both, 120)
        yield SparkCluster(master, work, processes[1:])
    finally:
        for process in reversed(processes):
            process.stop()
