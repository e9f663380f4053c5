"""What ends `penstock run`: signals, `--once`; and that nothing is lost or there twice after it."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.embedded.handles import Database, JetStream
from penstock.embedded.nats import EmbeddedNats

from ..pipeline import PATIENCE, Penstock, left_of, penstock
from ..waits import await_end

CONFIG = """\
sources:
  shop:
    type: postgres
    url: ${DATABASE_URL}
sinks:
  jetstream:
    type: nats
    source: shop
    url: ${NATS_URL}
spark:
  master: local[2]
"""


class Load(threading.Thread):
    """Commits one row after the other until it is stopped, and counts them."""

    def __init__(self, database: Database, first: int) -> None:
        super().__init__(daemon=True)
        self.next = first
        self._database = database
        self._stopping = threading.Event()
        self.start()

    def run(self) -> None:
        with self._database.connect(autocommit=True) as connection:
            while not self._stopping.wait(0.002):
                connection.execute("INSERT INTO orders VALUES (%s)", [self.next])
                self.next += 1

    def stop(self) -> int:
        """Return the first number that was not written."""
        self._stopping.set()
        await_end(self)
        return self.next


@pytest.fixture
def own_nats(server_dir: Path) -> Iterator[EmbeddedNats]:
    with EmbeddedNats(server_dir / "nats-to-stop") as server:
        yield server


async def _ignore_error(_: Exception) -> None:
    """Stand in for nats-py's logging of every try to connect to a server that is down."""


def test_however_it_ends_nothing_is_lost_or_there_twice(
    database: Database, own_nats: EmbeddedNats, tmp_path: Path
) -> None:
    """One story, because each start of Spark takes seconds."""
    database.execute("CREATE TABLE orders (id bigint PRIMARY KEY)")
    environment = {"DATABASE_URL": database.url, "NATS_URL": own_nats.url}
    (tmp_path / "penstock.yaml").write_text(CONFIG)
    slot = "SELECT confirmed_flush_lsn, active FROM pg_replication_slots"
    slot += " WHERE slot_name = 'penstock_shop'"
    with (
        JetStream(own_nats.url, error_cb=_ignore_error) as stream,
        Penstock(tmp_path, environment=environment, own_jvm=True) as pipeline,
    ):
        stream.add_stream("SHOP", "shop.>", duplicate_window=3600)

        def delivered() -> list[str]:
            return [message.headers["Nats-Msg-Id"] for message in stream.messages("SHOP")]

        def arrived(count: int) -> None:
            pipeline.wait_for(
                lambda: stream.info("SHOP").state.messages >= count,
                PATIENCE,
                f"at {count} messages",
            )

        # SIGINT in the middle of it: the batch is finished, and the slot is confirmed.
        pipeline.start().wait_ready()
        load = Load(database, 1)
        arrived(300)
        family = pipeline.tree()
        assert len(family) > 3
        assert pipeline.stop(signal.SIGINT) == 0
        committed = load.stop() - 1
        assert left_of(family) == []
        first = stopped(pipeline)
        assert first == len(delivered()) < committed
        ((_, active),) = database.execute(slot)
        assert not active

        # SIGTERM to every process at once, as a service manager sends it.
        pipeline.start().wait_ready()
        arrived(committed)
        # What the slot has confirmed is not read again: nothing came twice, not even to be dropped.
        rest = committed - first
        pipeline.wait_for(lambda: sink(pipeline)["delivered"] >= rest, PATIENCE, "counting")
        assert sink(pipeline)["delivered"] == rest
        assert sink(pipeline)["duplicates"] == 0
        load = Load(database, committed + 1)
        arrived(committed + 300)
        family = pipeline.tree()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):  # ended with those before it
                process.send_signal(signal.SIGTERM)
        assert pipeline.wait() == 0
        committed = load.stop() - 1
        assert left_of(family) == []

        # SIGTERM while the sink is down: it ends, and what waits in the store comes later.
        pipeline.start().wait_ready()
        arrived(committed)
        own_nats.kill()
        database.execute("INSERT INTO orders SELECT generate_series(%s::int, %s)",
                         [committed + 1, committed + 3000])  # fmt: skip
        committed += 3000
        pipeline.wait_for(lambda: sink(pipeline)["backlog"] == 3000, PATIENCE, "held up")
        family = pipeline.tree()
        assert pipeline.stop(signal.SIGTERM, timeout=60) == 0
        assert left_of(family) == []
        assert pipeline.events()[-1]["backlog"] == {"jetstream": 3000}

        # The checkpoint is a convenience: without it nothing is lost, and nothing is there twice.
        own_nats.start()
        shutil.rmtree(tmp_path / ".penstock/checkpoints")
        assert once(tmp_path, environment) == 3000
        ((written,),) = database.execute("SELECT pg_current_wal_flush_lsn()")
        assert once(tmp_path, environment) == 0
        ((confirmed, _),) = database.execute(slot)
        ahead = database.execute("SELECT %s::pg_lsn >= %s::pg_lsn", [confirmed, written])
        assert ahead == [(True,)]
        names = delivered()
        assert len(names) == committed
        assert [name for name, count in Counter(names).items() if count > 1] == []


def problem(pipeline: Penstock, subject: str) -> dict[str, Any]:
    """The worst problem of a subject, empty where there is none."""
    problems = pipeline.status()["problems"]
    return next((dict(p) for p in problems if p["subject"] == subject), {})


def sink(pipeline: Penstock) -> dict[str, Any]:
    found: dict[str, Any] = pipeline.status()["sinks"]["jetstream"]
    return found


def stopped(pipeline: Penstock) -> int:
    """What the run logged at its end as delivered."""
    return int(pipeline.events()[-1]["delivered"]["jetstream"])


def once(folder: Path, environment: dict[str, str]) -> int:
    """Run `--once`, which has to end well, and return how many messages it delivered."""
    done = penstock("run", "--once", cwd=folder, environment=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    events = [json.loads(line) for line in done.stderr.splitlines()]
    assert events[-1]["event"] == "stopped"
    return int(events[-1]["delivered"]["jetstream"])


def test_a_login_that_nats_refuses(database: Database, server_dir: Path, tmp_path: Path) -> None:
    """It is reported with its remedy and without a password, and SIGTERM still ends it."""
    database.execute("CREATE TABLE orders (id bigint PRIMARY KEY)")
    server = 'authorization { user: penstock, password: "right-hunter4" }'
    config = CONFIG.replace(
        "url: ${NATS_URL}\n", "url: ${NATS_URL}\n    user: penstock\n    password: ${SECRET}\n"
    )
    (tmp_path / "penstock.yaml").write_text(config)
    with EmbeddedNats(server_dir / "nats-refusing", server) as nats:
        environment = {
            "DATABASE_URL": database.url, "NATS_URL": nats.url, "SECRET": "wrong-hunter5"
        }  # fmt: skip
        with Penstock(tmp_path, environment=environment, own_jvm=True) as pipeline:
            pipeline.start()

            def reported() -> bool:
                sinks = pipeline.status().get("sinks", {"jetstream": {"error": None}})
                return "refuses the login" in (sinks["jetstream"]["error"] or "")

            pipeline.wait_for(reported, PATIENCE, "the report of the login")
            # What it should have is kept until the login is mended; it is not ready until then.
            pipeline.wait_for(
                lambda: pipeline.status()["sources"]["shop"]["state"] == "streaming",
                PATIENCE, "streaming",
            )  # fmt: skip
            pipeline.wait_for(
                lambda: "refuses the login" in str(problem(pipeline, "source shop").get("cause")),
                PATIENCE, "held up",
            )  # fmt: skip
            assert pipeline.get("/readyz")[0] == 503
            assert pipeline.get("/healthz")[0] == 200
            database.execute("INSERT INTO orders VALUES (1)")
            pipeline.wait_for(
                lambda: sink(pipeline)["backlog"] == 1, PATIENCE, "keeping the message"
            )
            text = pipeline.get("/status")[1] + pipeline.get("/metrics")[1]
            status = penstock("status", "--listen", pipeline.listen, cwd=tmp_path,
                              environment=environment)  # fmt: skip
            assert status.returncode == 1
            assert "refuses the login" in status.stdout
            family = pipeline.tree()
            assert pipeline.stop() == 0
            assert left_of(family) == []
            text += pipeline.log() + status.stdout + status.stderr
            assert "hunter5" not in text
