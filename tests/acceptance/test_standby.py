"""Two `penstock run` over one store: one runs the source, the other takes it over within 15 s.

The first one is killed, or cut off and back: then it has lost its lease, and stands by.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from penstock.desired.entities import Change
from penstock.desired.state import DesiredState
from penstock.embedded.handles import Database, JetStream
from penstock.embedded.nats import EmbeddedNats
from penstock.streams.store import Store

from ..pipeline import PATIENCE, Penstock, left_of

CONFIG = """\
sources:
  shop:
    type: postgres
    url: ${DATABASE_URL}
sinks:
  standby:
    type: nats
    source: shop
    url: ${NATS_URL}
    subject: "standby.{table}"
store: ${DATABASE_URL}
spark:
  master: local[2]
"""
WITHIN = 15.0
WARM = "ready to take the source over"
HANDED_OVER = "the slot is handed over"


@pytest.mark.alone
def test_a_standby_takes_over_what_a_killed_run_leaves(
    database: Database, nats: JetStream, nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE orders (id bigint PRIMARY KEY, step int)")
    for stream in ("STANDBY", "MORE"):
        nats.add_stream(stream, f"{stream.lower()}.>", duplicate_window=3600)
    with runs(database, nats_server, tmp_path) as (first, second):
        (logged,) = [e for e in second.events() if e["event"].startswith("standing by: ")]
        assert logged["source"] == "shop"
        assert f"(process {first.process.pid}) runs source shop" in logged["event"]
        found = second.status()["sources"]["shop"]
        assert found["state"] == "standing by"
        assert found["holder"] == logged["holder"] == first.status()["sources"]["shop"]["holder"]

        change_while_it_stands_by(database, first, second)
        for number in range(1, 201):
            database.execute("INSERT INTO orders VALUES (%s, 0)", [number])
            if number % 2:
                database.execute("UPDATE orders SET step = 1 WHERE id = %s", [number])
        family, before = first.tree(), len(second.events())
        first.process.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        first.process.wait(PATIENCE)
        assert left_of(family) == []  # so that none of its own delivers this
        database.execute("INSERT INTO orders VALUES (999, 0), (1000, 0)")
        second.wait_for(lambda: has(nats, 1000), PATIENCE, "delivering")
        seconds = time.monotonic() - killed
        since = [(e["timestamp"], e["event"]) for e in second.events()[before:]]
        print(f"taken over after {seconds:.1f} s: {since}")
        assert seconds < WITHIN, since
        second.wait_for(lambda: ready(second) == "ready", PATIENCE, "ready")
        messages = [json.loads(m.data) for m in nats.messages("STANDBY")]
        rows = [(m["record"]["id"], m["record"]["step"]) for m in messages]
        expected = [(n, 0) for n in range(1, 201)] + [(n, 1) for n in range(1, 201, 2)]
        assert sorted(rows) == sorted([*expected, (1000, 0)])
        # What changed while it stood by: 999 is left out by the new filter, and the new sink has it.
        second.wait_for(lambda: len(nats.messages("MORE")) == 302, PATIENCE, "the new sink")
        for number in range(1, 201, 2):  # in a row's order
            assert rows.index((number, 0)) < rows.index((number, 1))
        assert second.stop() == 0
    nats.delete_stream("STANDBY")
    nats.delete_stream("MORE")


def test_a_run_that_was_cut_off_loses_its_lease_and_stands_by(
    database: Database, nats: JetStream, nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    """Its processes stop in the middle of everything, and go on when another one has the source."""
    database.execute("CREATE TABLE orders (id bigint PRIMARY KEY, step int)")
    database.execute("INSERT INTO orders VALUES (0, 0)")
    nats.add_stream("STANDBY", "standby.>", duplicate_window=3600)
    with runs(database, nats_server, tmp_path) as (first, second):
        steps = iter(range(1, 1_000_000))

        def write(seconds: float) -> None:
            end = time.monotonic() + seconds
            with database.connect(autocommit=True) as connection:
                while time.monotonic() < end:
                    step = next(steps)
                    connection.execute("UPDATE orders SET step = %s WHERE id = 0", [step])
                    connection.execute("INSERT INTO orders VALUES (%s, %s)", [step, step])

        write(1.0)
        second.wait_for(lambda: bool(nats.messages("STANDBY")), PATIENCE, "delivering")
        family = first.tree()
        signal_all(family, signal.SIGSTOP)
        try:
            write(1.0)
            second.wait_for(lambda: ready(second) == "ready", PATIENCE, "taking over")
            write(1.0)
        finally:
            signal_all(family, signal.SIGCONT)
        write(1.0)
        first.wait_for(lambda: ready(first) == "standing by", PATIENCE, "standing by")
        write(1.0)
        last = next(steps)
        database.execute("INSERT INTO orders VALUES (%s, %s)", [last, last])
        second.wait_for(lambda: has(nats, last), PATIENCE, "delivering")
        rows = [json.loads(m.data)["record"] for m in nats.messages("STANDBY")]
        assert sorted(r["id"] for r in rows if r["id"]) == list(range(1, last + 1))
        changed = [r["step"] for r in rows if not r["id"]]
        assert sorted(changed) in (list(range(last)), list(range(1, last)))
        assert changed == sorted(changed)
        assert second.stop() == 0
        first.wait_for(lambda: ready(first) == "ready", PATIENCE, "taking it over in turn")
        assert first.stop() == 0
    nats.delete_stream("STANDBY")


@contextlib.contextmanager
def runs(
    database: Database, nats_server: EmbeddedNats, folder: Path
) -> Iterator[tuple[Penstock, Penstock]]:
    """Yield a run, and one that is ready to take its source over."""
    environment = {"DATABASE_URL": database.url, "NATS_URL": nats_server.url}
    folders = [folder / name for name in ("first", "second")]
    for each in folders:
        each.mkdir()
        (each / "penstock.yaml").write_text(CONFIG)
    with (
        Penstock(folders[0], environment=environment, own_jvm=True) as first,
        Penstock(folders[1], environment=environment, own_jvm=True) as second,
    ):
        first.start().wait_ready()
        second.start()
        second.wait_for(lambda: ready(second) == "standing by", PATIENCE, "standing by")
        second.wait_for(lambda: WARM in events(second), PATIENCE, "warm")
        yield first, second


def change_while_it_stands_by(database: Database, first: Penstock, second: Penstock) -> None:
    """Change the sink's filter and add a sink; return once both runs are ready with it."""
    handovers, warmed = events(first).count(HANDED_OVER), events(second).count(WARM)
    with Store(database.url) as store:
        state = DesiredState(store, {})
        sink = state.read().entities["sink", "standby"].spec
        changes = [
            Change("sink", "standby", None, {**sink, "filter": "record.id <> 999"}),
            Change("sink", "more", None, {**sink, "subject": "more.{table}"}),
        ]
        state.write(changes, by="ann", door="api")
    first.wait_for(lambda: events(first).count(HANDED_OVER) > handovers, PATIENCE, "handed over")
    second.wait_for(lambda: events(second).count(WARM) > warmed, PATIENCE, "warm again")


def signal_all(family: list[psutil.Process], number: signal.Signals) -> None:
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def ready(run: Penstock) -> str:
    code, body = run.get("/readyz")
    return str(json.loads(body)["status"]) if code == 200 else ""


def events(run: Penstock) -> list[str]:
    return [event["event"] for event in run.events()]


def has(nats: JetStream, number: int) -> bool:
    messages = nats.messages("STANDBY")
    return any(json.loads(message.data)["record"]["id"] == number for message in messages)
