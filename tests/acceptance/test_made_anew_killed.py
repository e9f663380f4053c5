"""SIGKILL of a run that makes an entity anew, when it goes on without it and not yet with it again.

The next run ends what was begun, and the other sinks of the source miss nothing and get nothing twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from penstock.embedded.handles import Database, JetStream

from ..backfill_help import from_stream
from .test_made_anew import DIRECT, MAIL, ONE, Rig, running

WINDOWS: Final = {"plain": 3600.0, "mail": 3600.0, "direct": 3600.0}
"""Within these JetStream drops what a run that was killed has published, and the next one does again."""
ONE_MAIL: Final = {**MAIL, "stream": "one"}
KEY: Final = 4711
HOLD: Final = f"""
CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    PERFORM pg_advisory_xact_lock({KEY});
    RETURN coalesce(NEW, OLD);
END $$;
CREATE TRIGGER hold BEFORE {{}} FOR EACH ROW EXECUTE FUNCTION hold();
SELECT pg_advisory_lock({KEY});
"""
HELD: Final = f"""
SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND objid = {KEY} AND NOT granted
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
DROPPED: Final = "DELETE ON penstock.removals"
"""The run goes on without the entity, and what that has left is still there."""
MOVED: Final = "DELETE ON penstock.nats_consumers"
"""The same of a NATS consumer whose stream has changed."""
REGISTERED: Final = "INSERT ON penstock.nats_consumers"
"""What was left is gone, and the entity not registered again."""


@contextmanager
def killed(rig: Rig, database: Database, step: str) -> Iterator[None]:
    """Have the run stop before a step that follows from what is written, and kill it there."""
    steps = len(rig.events("the slot is handed over"))
    with closing(database.connect(autocommit=True)) as session:
        session.execute(HOLD.format(step).encode())
        yield
        rig.wait_for(lambda: bool(session.execute(HELD.encode()).fetchall()), f"before {step}")
        assert len(rig.events("the slot is handed over")) == steps + 1
        rig.run.kill_tree()
        while held := session.execute(HELD.encode()).fetchall():
            pids = [pid for (pid,) in held]
            session.execute("SELECT pg_terminate_backend(p, 60000) FROM unnest(%s) p", [pids])
        session.execute("DROP FUNCTION hold CASCADE")
    rig.run.start().wait_ready()


def ended(rig: Rig, database: Database) -> list[int]:
    """Check what holds of every case; return what was written."""
    rig.await_load()
    written = rig.load.stop()
    for name in ("plain", "mail"):
        rig.wait_for(lambda n=name: rig.states(n)[-1:] == written[-1:], f"at the end of {name}")
    assert rig.states("plain") == written
    assert database.execute("SELECT FROM penstock.removals") == []
    rig.wait_for(lambda: rig.run.get("/readyz")[0] == 200, "ready")
    assert rig.run.status()["problems"] == []
    return written


@pytest.mark.parametrize(
    ("step", "spec"),
    [(MOVED, MAIL), (REGISTERED, ONE_MAIL)],
    ids=["moved", "anew"],
)
def test_a_consumer(
    database: Database, nats: JetStream, tmp_path: Path, step: str, spec: dict[str, Any],
) -> None:  # fmt: skip
    """It is not published for when the run is killed: all of its new stream comes, and once."""
    file = tmp_path / "penstock.yaml"
    with running(database, nats, tmp_path, "shop", windows={**WINDOWS, "mail": 0.1}) as rig:
        rig.wait_for(lambda: len(rig.states("mail")) > 20, "publishing")
        with killed(rig, database, step), rig.store.transaction():
            if spec == ONE_MAIL:
                rig.write("consumer", "mail", None)
            rig.write("consumer", "mail", spec)
            changed = file.read_text().replace("stream: one", f"stream: {spec['stream']}")
            file.write_text(changed)  # the next run applies it
        written = ended(rig, database)
        mail = rig.states("mail")
        again = mail.index(1, 1)
        assert mail[:again] == written[:again]
        assert mail[again:] == written
        query = (
            "SELECT n.name, s.name FROM penstock.nats_consumers n"
            " JOIN penstock.streams s ON s.id = n.stream_id"
        )
        assert database.execute(query) == [("mail", spec["stream"])]
        assert rig.run.stop() == 0


def test_a_stream_with_its_consumer(database: Database, nats: JetStream, tmp_path: Path) -> None:
    with running(database, nats, tmp_path, "shop", windows=WINDOWS) as rig:
        rig.wait_for(lambda: len(rig.states("mail")) > 20, "publishing")
        ((former,),) = database.execute("SELECT id FROM penstock.streams WHERE name = 'one'")
        with killed(rig, database, DROPPED), rig.store.transaction():
            for kind, name, spec in (
                ("consumer", "mail", None), ("sink", "one", None),
                ("sink", "one", ONE), ("consumer", "mail", ONE_MAIL),
            ):  # fmt: skip
                rig.write(kind, name, spec)
        written = ended(rig, database)
        assert database.execute("SELECT FROM penstock.streams WHERE id = %s", [former]) == []
        kept = [int(got.record["price"]) for got in from_stream(database.url, "one")]
        assert kept == list(range(kept[0], written[-1] + 1))
        mail = rig.states("mail")
        assert mail[-len(kept) :] == kept
        # A run that begins again publishes from its slot on; a new stream begins at the store's head.
        assert mail == sorted(set(mail))
        assert len(_jumps(mail)) <= 1
        assert rig.run.stop() == 0


def test_a_sink(database: Database, nats: JetStream, tmp_path: Path) -> None:
    with running(database, nats, tmp_path, "shop", windows=WINDOWS) as rig:
        rig.write("sink", "direct", DIRECT)
        rig.await_steps(1)
        rig.wait_for(lambda: len(rig.states("direct")) > 20, "delivering")
        with killed(rig, database, DROPPED), rig.store.transaction():
            rig.write("sink", "direct", None)
            rig.write("sink", "direct", DIRECT)
        written = ended(rig, database)
        rig.wait_for(lambda: rig.states("direct")[-1:] == written[-1:], "at the end of direct")
        direct = rig.states("direct")
        assert direct == sorted(set(direct))
        assert len(_jumps(direct)) <= 1
        assert rig.run.stop() == 0


def _jumps(states: list[int]) -> list[int]:
    """Return the states that do not follow the one before: what lies between came while it was gone."""
    return [b for a, b in itertools.pairwise(states) if b != a + 1]
