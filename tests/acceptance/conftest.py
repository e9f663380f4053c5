"""What acceptance tests run against: a database with the schema tide, a NATS, a Spark cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.embedded.handles import Database, JetStream
from penstock.embedded.nats import EmbeddedNats
from penstock.embedded.process import GuardedProcess, free_port
from penstock.outbox.sql.install import install


@pytest.fixture
def app(database: Database) -> Database:
    """The application's database, with the schema tide."""
    with database.connect(autocommit=True) as connection:
        install(connection)
    return database


@pytest.fixture
def broker(server_dir: Path, request: pytest.FixtureRequest) -> Iterator[EmbeddedNats]:
    """A server that the test may stop."""
    with EmbeddedNats(server_dir / f"nats-{request.node.name}") as server:
        yield server


@pytest.fixture
def streams(broker: EmbeddedNats) -> Iterator[JetStream]:
    with JetStream(broker.url, error_cb=ignore_error) as handle:
        yield handle


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """A Spark standalone master and two workers, each a process of its own on loopback."""
    import pyspark  # noqa: PLC0415

    home = Path(next(iter(pyspark.__path__)))
    submit = str(home / "bin" / "spark-class")
    port, ui = free_port(), free_port()
    environment = {
        **os.environ,
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_HOME": str(home),
        "SPARK_WORKER_DIR": str(tmp_path / "work"),
    }
    master = f"spark://127.0.0.1:{port}"
    deploy = "org.apache.spark.deploy"
    processes = [
        GuardedProcess(
            [submit, f"{deploy}.master.Master", "--host", "127.0.0.1", "--port", str(port),
             "--webui-port", str(ui)],
            log=tmp_path / "master.log", env=environment,
        )
    ]  # fmt: skip
    processes += [
        GuardedProcess(
            [submit, f"{deploy}.worker.Worker", "--host", "127.0.0.1", "--cores", "2",
             "--memory", "1g", "--webui-port", "0", master],
            log=tmp_path / f"worker-{n}.log", env=environment,
        )
        for n in (1, 2)
    ]  # fmt: skip
    try:
        yield master
    finally:
        for process in reversed(processes):
            process.stop()


async def ignore_error(_: Exception) -> None:
    """Stand in for nats-py's logging of every try to connect to a server that a test has stopped."""
