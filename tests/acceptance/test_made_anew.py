"""Entities that a run has to make anew under load: the other sinks of the source go on meanwhile.

They miss nothing and get nothing twice, and no run of the source ends before the next one streams.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.desired.entities import Change
from penstock.desired.state import DesiredState
from penstock.embedded.handles import Database, JetStream
from penstock.streams.store import Store

from ..pipeline import PATIENCE, Penstock
from .test_follow import Load

CONFIG = """\
store: ${SHOP_URL}
sources:
  shop: &database
    type: postgres
    url: ${SHOP_URL}
  other: *database
sinks:
  plain:
    type: nats
    source: shop
    url: ${NATS_URL}
    subject: anew.plain
  one: {type: stream, source: shop, actions: [update]}
  two: {type: stream, source: TWO, actions: [update]}
consumers:
  mail:
    type: nats
    stream: one
    url: ${NATS_URL}
    subject: anew.mail
spark:
  master: local[2]
"""
MAIL = {"type": "nats", "stream": "two", "url": "${NATS_URL}", "subject": "anew.mail"}
DIRECT = {"type": "nats", "source": "shop", "url": "${NATS_URL}", "subject": "anew.direct"}
ONE = {"type": "stream", "source": "shop", "actions": ["update"]}


class Rig:
    """A run under load whose entities change."""

    def __init__(
        self,
        run: Penstock,
        store: Store,
        environment: Mapping[str, str],
        nats: JetStream,
        load: Load,
    ) -> None:
        self.run = run
        self.store = store
        self._state = DesiredState(store, environment)
        self._nats = nats
        self.load = load
        self.steps = 0

    def wait_for(self, condition: Any, what: str) -> None:
        self.run.wait_for(condition, PATIENCE, what)

    def write(self, kind: str, name: str, spec: dict[str, Any] | None) -> None:
        self._state.write([Change(kind, name, None, spec)], by="test", door="api")

    def events(self, event: str) -> list[dict[str, Any]]:
        return [e for e in self.run.events() if e["event"] == event]

    def await_steps(self, count: int) -> None:
        """Wait until the source's run was replaced so many times more, and goes on."""
        self.steps += count
        self.wait_for(lambda: len(self.events("the slot is handed over")) >= self.steps, "replaced")
        self.await_load()

    def await_load(self) -> None:
        """Wait until something more was written."""
        at = self.load.last
        self.wait_for(lambda: self.load.last > at + 20, "writing")

    def starts(self) -> list[dict[str, Any]]:
        return [e for e in self.events("started") if e.get("step") == "sinks"]

    def states(self, name: str) -> list[int]:
        """Return the states of row 0 that came to a JetStream stream, in their order."""
        records = [json.loads(m.data)["record"] for m in self._nats.messages(f"ANEW_{name}")]
        return [int(r["price"]) for r in records if not r["id"] and int(r["price"])]


@contextmanager
def running(
    database: Database, nats: JetStream, folder: Path, two: str, *, windows: Mapping[str, float]
) -> Iterator[Rig]:
    """A run whose stream `two` is of this source; JetStream drops copies within `windows`."""
    database.execute("CREATE TABLE items (id bigint PRIMARY KEY, price numeric)")
    database.execute("INSERT INTO items VALUES (0, 0)")
    (folder / "penstock.yaml").write_text(CONFIG.replace("TWO", two))
    environment = {"SHOP_URL": database.url, "NATS_URL": nats.url}
    with ExitStack() as stack:
        for name, window in windows.items():
            nats.add_stream(f"ANEW_{name}", f"anew.{name}", duplicate_window=window)
            stack.callback(nats.delete_stream, f"ANEW_{name}")
        run = stack.enter_context(Penstock(folder, environment=environment))
        run.start().wait_ready()
        store = stack.enter_context(Store(database.url))
        load = Load(database, 1)
        stack.callback(load.stop)
        yield Rig(run, store, environment, nats, load)


@pytest.fixture
def rig(
    database: Database, nats: JetStream, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Rig]:
    """A run whose stream `two` is of the source that the test names."""
    windows = dict.fromkeys(("plain", "mail", "direct"), 0.1)
    with running(database, nats, tmp_path, request.param, windows=windows) as rig:
        yield rig


@pytest.mark.parametrize("rig", ["shop"], indirect=True)
def test_the_others_go_on_while_an_entity_is_made_anew(rig: Rig) -> None:
    rig.wait_for(lambda: len(rig.states("mail")) > 20, "publishing")
    rig.write("consumer", "mail", MAIL)  # another stream
    rig.await_steps(2)
    rig.write("consumer", "mail", None)
    rig.write("consumer", "mail", MAIL)
    rig.await_steps(2)
    rig.write("sink", "one", None)
    rig.write("sink", "one", ONE)
    rig.await_steps(2)
    rig.write("sink", "direct", DIRECT)
    rig.await_steps(1)
    rig.wait_for(lambda: bool(rig.states("direct")), "delivering")
    rig.write("sink", "direct", None)
    rig.write("sink", "direct", DIRECT)
    rig.await_steps(2)
    written = rig.load.stop()
    for name in ("plain", "mail", "direct"):
        rig.wait_for(lambda n=name: written[-1] in rig.states(n), f"at the end of {name}")
    # Each run but the first one took the slot over from one that streamed until then.
    handed_over = rig.events("the slot is handed over")
    print([e["ms"] for e in handed_over], [e["prepared"] for e in rig.events(REPLACED)])
    assert [e["in_order"] for e in handed_over] == [True] * rig.steps
    rig.wait_for(lambda: len(rig.starts()) > rig.steps, "started")
    assert len(rig.starts()) == 1 + rig.steps
    assert rig.states("plain") == written
    # The consumer has published all of three streams: of one up to its change, and of two twice.
    mail = rig.states("mail")
    first = mail.index(1, 1)
    second = mail.index(1, first + 1)
    assert mail[:first] == written[:first]
    assert mail[first:second] == written[: second - first]
    assert mail[second:] == written
    direct = rig.states("direct")
    assert direct == sorted(set(direct))
    assert direct[-10:] == written[-10:]
    assert rig.run.stop() == 0


@pytest.mark.parametrize("rig", ["other"], indirect=True)
def test_a_consumer_moves_to_a_stream_of_another_source(rig: Rig) -> None:
    """The one source's run lets it go, and only then the other's takes it."""
    rig.wait_for(lambda: len(rig.states("mail")) > 20, "publishing")
    rig.write("consumer", "mail", MAIL)
    rig.await_steps(2)
    written = rig.load.stop()
    rig.wait_for(lambda: rig.states("plain")[-1:] == written[-1:], "at the end")
    rig.wait_for(lambda: rig.states("mail")[-1:] == written[-1:], "at the end of the other")
    assert {e["source"] for e in rig.events("the slot is handed over")} == {"shop", "other"}
    assert rig.states("plain") == written
    mail = rig.states("mail")
    second = mail.index(1, 1)
    assert mail[:second] == written[:second]
    assert mail[second:] == written
    assert rig.run.status()["problems"] == []
    assert rig.run.stop() == 0


REPLACED = "the configuration changed: the source's run is replaced"
