"""Compares what the writers know to be committed with what stands in the stream."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.embedded.handles import JetStream, Msg

from .writer import ROLLED_BACK, Key, Step

_SHOWN = 10
_OUTBOX_ID = re.compile(r"(?P<outbox>\w+)/[0-9a-f]{8}(?::(?P<key>.+)|#(?P<id>\d+))")


@dataclass
class Verdict:
    """What was found; `violations` counts by kind, `examples` names the first of them."""

    committed: int = 0
    delivered: int = 0
    keys: int = 0
    violations: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def blame(self, kind: str, what: str, count: int = 1) -> None:
        self.violations[kind] += count
        if len(self.examples) < _SHOWN:
            self.examples.append(f"{kind}: {what}")


def read_all(url: str, stream: str, timeout: float = 300) -> list[Msg]:
    """Return every message of a stream, in its order."""
    found: list[Msg] = []
    with JetStream(url) as reader:
        last = reader.info(stream).state.last_seq
        done = threading.Event()

        def take(message: Msg) -> None:
            found.append(message)
            if message.seq >= last:
                done.set()

        if last:
            reader.follow(stream, ">", take)
            assert done.wait(timeout), f"read {len(found)} of {last} messages in {timeout:g} s"
    return found


class Said(NamedTuple):
    """What a message says: its id as its body has it, a note, and what happened to which keys."""

    name: str
    note: str | None
    steps: list[tuple[Key, Step]]


Reader = Callable[[Msg], Said]


def compare(
    histories: Mapping[Key, Sequence[Step]],
    messages: Iterable[Msg],
    read: Reader,
) -> Verdict:
    """Judge a stream whose deduplication window was longer than the run.

    So no message may be there twice, and each key's messages must be its history, in its order.
    """
    verdict = Verdict(keys=len(histories))
    arrived: dict[Key, list[tuple[Step, int]]] = defaultdict(list)
    seen: dict[str, int] = {}
    for message in messages:
        verdict.delivered += 1
        name = message.headers.get("Nats-Msg-Id", "")
        output = read(message)
        if not name or name != output.name:
            verdict.blame("wrong id", f"#{message.seq}: {name!r} of {message.data[:200]!r}")
        if name in seen:
            verdict.blame("duplicate", f"#{message.seq} repeats #{seen[name]}: {name}")
            continue
        seen[name] = message.seq
        if output.note == ROLLED_BACK:
            verdict.blame("rolled back", f"#{message.seq}: {message.data[:300]!r}")
        for key, step in output.steps:
            arrived[key].append((step, message.seq))
    for key in sorted({*histories, *arrived}):
        _judge(verdict, key, histories.get(key, ()), arrived.get(key, []))
    return verdict


def message_of_table(message: Msg) -> Said:
    """Read a change of a row."""
    body = json.loads(message.data)
    name, note = body["metadata"]["idempotency_key"], body["record"].get("note")
    return Said(name, note, steps_of(body))


def message_of_outbox(message: Msg) -> Said:
    """Read a publisher's message; the writers' histories have what its id stands for."""
    body = json.loads(message.data)
    found = _OUTBOX_ID.fullmatch(message.headers.get("Nats-Msg-Id", ""))
    # Without a key of its own it has the row's number.
    name = found["key"] or f"{found['outbox']}:{found['id']}" if found is not None else ""
    key = Key(message.subject.rpartition(".")[2], body["key"])
    whole = message.headers.get("Nats-Msg-Id", "")
    return Said(whole, body["note"], [(key, Step(name, body["n"]))])


def steps_of(body: dict[str, Any]) -> list[tuple[Key, Step]]:
    """Return what a message says happened, and to which keys."""
    table, record = body["metadata"]["table_name"], body["record"]
    key, action = Key(table, record["id"]), body["action"]
    if action == "delete":
        return [(key, Step("delete", None))]
    old = (body["changes"] or {}).get("id", key.id)
    if action == "update" and old != key.id:
        return [
            (Key(table, old), Step("moved_out", None)),
            (key, Step("moved_in", record["version"])),
        ]
    return [(key, Step(action, record["version"]))]


def _judge(
    verdict: Verdict, key: Key, expected: Sequence[Step], arrived: Sequence[tuple[Step, int]]
) -> None:
    got = [step for step, _ in arrived]
    verdict.committed += sum(step.action != "moved_in" for step in expected)
    if got == list(expected):
        return
    name = f"{key.table} {key.id}"
    missing, extra = Counter(expected) - Counter(got), Counter(got) - Counter(expected)
    at = next(
        (i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b),
        min(len(expected), len(got)),
    )
    where = f"history goes {list(expected[at : at + 4])}, stream {list(arrived[at : at + 4])}"
    if missing:
        verdict.blame("lost", f"{name} {dict(missing)}; {where}", missing.total())
    if extra:
        verdict.blame("unexpected", f"{name} {dict(extra)}; {where}", extra.total())
    if not missing and not extra:
        verdict.blame("out of order", f"{name}: {where}")
