"""How long each kind of change takes until it counts, one after the other in a run under load."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.configuration.bed import STREAM, Bed, bed, document
from benchmarks.configuration.live import SINKS, writer
from benchmarks.contenders import ContenderError, Running
from benchmarks.probe import Probe
from benchmarks.rig import POLL_S, say

_LOAD_S = 3_600.0
"""More than all changes take; the load ends with them."""
_NEVER = "record.id < 0"
_STILL_S = 3.0
"""A subject that gets nothing for so long gets no more: each table has a row every 100 ms."""


@dataclass(frozen=True, slots=True)
class Effect:
    """Seconds from the request until what it asks for is so."""

    what: str
    seconds: float


class _Live:
    """A run under load, and the messages of its JetStream stream."""

    def __init__(self, of: Bed, running: Running, probe: Probe) -> None:
        self._of = of
        self.running = running
        self._probe = probe
        self.found: list[Effect] = []

    def ask(self, path: str, body: Mapping[str, Any] | None, method: str) -> float:
        """Ask for a change, and return when that was."""
        asked = time.time()
        code, answer = self._of.ask(self.running, path, body, method)
        if code not in (200, 201):
            raise ContenderError(f"{method} {path} was refused with {code}: {answer}")
        return asked

    def note(self, what: str, seconds: float) -> None:
        self.found.append(Effect(what, seconds))
        say(f"{what}: {seconds:.2f} s")

    def more(self, subject: str) -> Callable[[], bool]:
        """Return what tells whether a subject has more messages than now."""
        had = self._probe.count_of(STREAM, subject)
        return lambda: self._probe.count_of(STREAM, subject) > had

    def await_first(self, what: str, asked: float, there: Callable[[], bool]) -> None:
        """Wait for the first message that the change lets through."""
        while not there():
            self.running.check()
            if time.time() - asked > 120:
                raise ContenderError(f"{what}: no message; {self.running.tail()}")
            time.sleep(POLL_S)
        self.note(what, time.time() - asked)

    def await_last(self, what: str, asked: float, subject: str) -> None:
        """Wait until a subject gets no more."""
        last, count = asked, self._probe.count_of(STREAM, subject)
        while time.time() - last < _STILL_S:
            self.running.check()
            if (now := self._probe.count_of(STREAM, subject)) > count:
                last, count = time.time(), now
            if last - asked > 120:
                raise ContenderError(f"{what}: messages still; {self.running.tail()}")
            time.sleep(POLL_S)
        self.note(what, last - asked)


def effects() -> list[Effect]:
    """Make each kind of change beside so many sinks, and return how long each took."""
    with bed(SINKS + 1) as of:
        file = of.file(document(of, nats=SINKS, streams=1))
        with of.serve("run", "run", "-c", str(file)) as running:
            of.wait_ready(running)
            with writer(of, _LOAD_S), Probe(of.nats_url) as probe:
                of.wait(running, "delivering", lambda: probe.count(STREAM) > 10 * SINKS)
                return _all(_Live(of, running, probe), of)


def _all(live: _Live, of: Bed) -> list[Effect]:
    subject = f"{STREAM}.live.t0"
    asked = live.ask("/v1/sinks/s0", {"filter": _NEVER}, "PATCH")
    live.await_last("a filter that leaves all out: the last message", asked, subject)
    more = live.more(subject)
    asked = live.ask("/v1/sinks/s0", {"filter": "record.id >= 0"}, "PATCH")
    live.await_first("a filter that lets all through: the first message", asked, more)
    asked = live.ask("/v1/sinks/s1", None, "DELETE")
    live.await_last("a sink is removed: its last message", asked, f"{STREAM}.live.t1")
    published = {
        "type": "nats", "stream": f"s{SINKS}", "url": of.nats_url,
        "subject": f"{STREAM}.published.{{table}}",
    }  # fmt: skip
    more = live.more(f"{STREAM}.published.>")
    asked = live.ask("/v1/consumers/publisher", published, "PUT")
    live.await_first("a NATS consumer of a stream comes: its first message", asked, more)
    more = live.more(f"{STREAM}.moved.>")
    asked = live.ask("/v1/consumers/publisher", {"subject": f"{STREAM}.moved.{{table}}"}, "PATCH")
    live.await_first("it has another subject: the first message there", asked, more)
    pulled = {"type": "pull", "stream": f"s{SINKS}", "deliver_policy": "all"}
    asked = live.ask("/v1/consumers/worker", pulled, "PUT")
    received = "/v1/consumers/worker/receive?batch_size=1&wait_for_ms=60000"
    code, answer = of.ask(live.running, received)
    if code != 200 or not answer["data"]:
        raise ContenderError(f"the pull consumer got {code}: {answer}")
    live.note("a pull consumer comes: its first message", time.time() - asked)
    source = {"type": "postgres", "url": of.url, "tables": ["public.t2"], "slot": "another"}
    sink = {"type": "nats", "source": "another", "url": of.nats_url,
            "subject": f"{STREAM}.another.{{table}}"}  # fmt: skip
    more = live.more(f"{STREAM}.another.>")
    live.ask("/v1/sources/another", source, "PUT")
    asked = live.ask("/v1/sinks/another", sink, "PUT")
    live.await_first("another source and its sink come: its first message", asked, more)
    return live.found
