"""The data sources in a PySpark job of one's own, and pipelines on a Spark cluster."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.waits import await_true

from penstock.core.group_hash import group_hash
from penstock.embedded.handles import Database, JetStream, Msg
from penstock.embedded.nats import EmbeddedNats
from penstock.embedded.process import GuardedProcess

from ..bastions import SshServer, public
from ..pipeline import PATIENCE
from ..spark_cluster import ENVIRONMENT, QUICK_JAVA, SparkCluster, spark_cluster

ROOT = Path(__file__).parents[2]


def run(*command: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env={**ENVIRONMENT, **environment},
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_the_example_delivers_what_its_filter_lets_through(
    database: Database, nats: JetStream, nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    nats.add_stream("EXAMPLE", ["shop.>"])
    try:
        database.execute("CREATE TABLE orders (id int PRIMARY KEY, status text)")
        database.execute("CREATE TABLE customers (id int PRIMARY KEY, name text)")
        script = str(ROOT / "examples/changes_to_jetstream.py")
        urls = {"DATABASE_URL": database.url, "NATS_URL": nats_server.url}
        run(script, "--once", cwd=tmp_path, **urls)  # makes publication and slot
        database.execute("INSERT INTO orders SELECT i, 'new' FROM generate_series(1, 5000) i")
        database.execute("UPDATE orders SET status = 'paid' WHERE id <= 3000")
        database.execute("INSERT INTO customers VALUES (1, 'Ada')")

        run(script, "--once", cwd=tmp_path, **urls)

        messages = nats.messages("EXAMPLE")
        assert sorted(m.subject for m in messages) == (
            ["shop.customers.insert"] + ["shop.orders.update"] * 3000
        )
        orders = [json.loads(m.data) for m in messages if "orders" in m.subject]
        assert {o["record"]["id"] for o in orders} == set(range(1, 3001))
        first = min(orders, key=lambda o: o["metadata"]["commit_idx"])
        assert first["record"] == {"id": 1, "status": "paid"}
        assert first["metadata"]["record_pks"] == [1]
        assert first["metadata"]["consumer"] == {"id": "jetstream", "name": "jetstream"}

        run(script, "--once", cwd=tmp_path, **urls)  # nothing new, nothing again
        assert nats.info("EXAMPLE").state.messages == 3001
    finally:
        nats.delete_stream("EXAMPLE")


FRAME = """
import sys, json
from penstock.spark import PostgresChanges
from penstock.spark.session import create
spark = create("local[2]")
spark.dataSource.register(PostgresChanges)
rows = []
frame = spark.readStream.format("postgres-changes").options(
    url=sys.argv[1], tables="public.things", slot=sys.argv[2], maxRowsPerBatch="1000"
).load()
print(frame.schema.simpleString())
def collect(batch, _):
    rows.extend(batch.selectExpr(
        "get_json_object(record, '$.id') AS id", "action", "metadata.commit_timestamp AS at",
        "metadata.record_pks AS pks", "metadata.unavailable AS unavailable", "group_hash",
    ).collect())
frame.writeStream.foreachBatch(collect).option("checkpointLocation", sys.argv[3]).trigger(
    availableNow=True).start().awaitTermination()
print(json.dumps([len(rows), len({r.id for r in rows}), rows[0].at.year > 2000, rows[0].pks]))
print(next(r.group_hash for r in rows if r.id == "1"))
"""


def test_a_frame_of_changes_in_a_job_of_ones_own(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE things (id int PRIMARY KEY)")
    command = ["-c", FRAME, database.url, f"slot_{database.name}", str(tmp_path / "checkpoint")]
    with pytest.raises(AssertionError, match="IndexError"):
        run(*command, cwd=tmp_path)  # no rows yet; publication and slot are there now
    database.execute("INSERT INTO things SELECT generate_series(1, 12000)")
    # Every process with a seed of its own for Python's hashes.
    schema, result, group = run(*command, cwd=tmp_path, PYTHONHASHSEED="random").splitlines()
    assert schema.startswith("struct<record:string,changes:string,action:string,metadata:struct<")
    assert json.loads(result) == [12000, 12000, True, "[1]"]
    # A stream's groups are the same after a restart, whatever the environment.
    assert int(group) == group_hash(b'["public","things",[1]]') == 1541503167444655338


REAL_TIME = """
import sys
from penstock.spark import JetStream, PostgresChanges
from penstock.spark.session import create
spark = create("local[2]")
spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "1")
spark.dataSource.register(PostgresChanges)
spark.dataSource.register(JetStream)
frame = spark.readStream.format("postgres-changes").options(
    url=sys.argv[1], tables="public.things", slot=sys.argv[2], latency="realtime", splits="1",
    batchSeconds=sys.argv[5],
).load()
frame.writeStream.format("jetstream").options(url=sys.argv[3], subject="things.{action}").option(
    "checkpointLocation", sys.argv[4]).start().awaitTermination()
"""


def test_a_job_of_ones_own_in_real_time(
    database: Database, nats: JetStream, nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    """Messages come while their batch lasts; after a kill in its middle all of it comes, once."""
    nats.add_stream("THINGS", ["things.>"])
    database.execute("CREATE TABLE things (id int PRIMARY KEY)")
    command = [sys.executable, "-c", REAL_TIME, database.url, f"slot_{database.name}",
               nats_server.url, str(tmp_path / "checkpoint")]  # fmt: skip
    slot = (
        "SELECT count(*) FROM pg_replication_slots WHERE active AND database = current_database()"
    )

    def has(count: int) -> bool:
        return len(there()) >= count

    def job(seconds: str) -> GuardedProcess:
        return GuardedProcess([*command, seconds], log=tmp_path / "job.log", env=ENVIRONMENT)

    def fetched(query: str, values: Sequence[Any] = ()) -> Any:
        with database.connect() as connection:
            row = connection.execute(query.encode(), values).fetchone()
            assert row is not None
            return row[0]

    def there() -> list[int]:
        return [json.loads(m.data)["record"]["id"] for m in nats.messages("THINGS")]

    try:
        process = job("600")
        try:
            await_true(lambda: fetched(slot) == 1, 120)
            for number in range(10):
                database.execute(f"INSERT INTO things VALUES ({number})")
                # A row comes when the next one is there, or the one after that.
                await_true(partial(has, number - 1), 60)
        finally:
            process.stop(signal.SIGKILL)
        database.execute("INSERT INTO things VALUES (10)")
        end = fetched("SELECT pg_current_wal_lsn()")
        process = job("2")
        try:
            await_true(lambda: len(there()) == 11, 120)
            assert there() == list(range(11))
            behind = "SELECT count(*) FROM pg_replication_slots WHERE confirmed_flush_lsn < %s"
            await_true(lambda: fetched(behind, [end]) == 0, 60)
        finally:
            process.stop()
    finally:
        nats.delete_stream("THINGS")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SparkCluster]:
    with spark_cluster(tmp_path) as made:
        yield made


class Bastion(SshServer):
    """Keeps in which folders the processes run that log in: an executor has one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.folders: set[Path] = set()

    def logged_in(self, port: int) -> None:
        super().logged_in(port)
        for connection in psutil.net_connections("tcp4"):
            at = connection.laddr
            if at and at.port == port and connection.pid is not None:
                self.folders.add(Path(psutil.Process(connection.pid).cwd()))


@pytest.fixture
def ssh(nats_server: EmbeddedNats) -> Iterator[Bastion]:
    """A bastion, with NATS behind it by a name that it alone resolves."""
    with Bastion() as server:
        server.names["nats.internal", 4222] = ("127.0.0.1", nats_server.port or 0)
        yield server


def test_a_pipeline_on_a_cluster_of_two_workers(
    database: Database,
    nats: JetStream,
    nats_server: EmbeddedNats,
    cluster: SparkCluster,
    ssh: Bastion,
    tmp_path: Path,
) -> None:
    """A sink, and a consumer of type nats that lies behind a bastion: each executor goes through it."""
    bastion = {
        "host": "127.0.0.1", "port": ssh.port, "user": "penstock", "host_key": public(ssh.host_key),
        "private_key": ssh.user_key.export_private_key().decode(),
    }  # fmt: skip
    far = {"type": "nats", "url": "nats://nats.internal:4222", "bastion": bastion}
    nats.add_stream("CLUSTER", ["cluster.>"])
    nats.add_stream("MAIL", ["mail.>"])
    database.execute("CREATE TABLE things (id int PRIMARY KEY, version int)")
    (tmp_path / "penstock.yaml").write_text(
        f"""
sources:
  cluster: {{type: postgres, url: "{database.url}", slot: slot_{database.name}}}
sinks:
  things: {{type: nats, source: cluster, url: "{nats_server.url}"}}
  events: {{type: stream, source: cluster}}
consumers:
  mail: {{type: nats, stream: events, target: far, subject: "mail.{{table}}"}}
targets:
  far: {json.dumps(far)}
spark:
  master: {cluster.master}
  conf:
    spark.executor.memory: 512m
    spark.executor.extraJavaOptions: {QUICK_JAVA}
    spark.cores.max: 2
    spark.scheduler.minRegisteredResourcesRatio: 1.0
    spark.driver.host: 127.0.0.1
store: "{database.url}"
"""
    )
    command = ["-m", "penstock", "run", "-c", "penstock.yaml", "--once"]
    try:
        run(*command, cwd=tmp_path)
        ssh.folders.clear()
        database.execute("INSERT INTO things SELECT i, 1 FROM generate_series(1, 30000) i")
        database.execute("UPDATE things SET version = 2")

        run(*command, cwd=tmp_path)

        for stream in ("CLUSTER", "MAIL"):
            assert _versions(nats.messages(stream)) == {i: [1, 2] for i in range(1, 30001)}
        # The driver looks first, and each executor has a tunnel of its own.
        executors = {folder for folder in ssh.folders if folder.is_relative_to(cluster.folder)}
        assert len(executors) == 2
        assert ssh.folders == {tmp_path, *executors}
    finally:
        nats.delete_stream("CLUSTER")
        nats.delete_stream("MAIL")


def _versions(messages: list[Msg]) -> dict[int, list[int]]:
    versions: dict[int, list[int]] = defaultdict(list)
    for message in messages:
        record = json.loads(message.data)["record"]
        versions[record["id"]].append(record["version"])
    return versions
