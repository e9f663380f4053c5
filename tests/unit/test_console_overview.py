"""Which consumers stand on the overview, and in which order."""

from __future__ import annotations

from typing import Any

from penstock.api.console.overview import MOST, _worst_consumers


def http(lag: int) -> dict[str, Any]:
    return {"stream": "s", "type": "pull", "lag_messages": lag, "lag_seconds": 1.0, "in_flight": 2,
            "dead_letters": 3}  # fmt: skip


def test_the_worst_consumers_of_either_type_come_first() -> None:
    nats = {"out": {"stream": "s", "lag_messages": 500, "dead_lettered": 7, "state": "attached"}}
    every = [*((f"c{n}", http(n)) for n in range(2 * MOST)), *nats.items()]
    parts = {"consumer s/c1": "degraded", "consumer s/c2": "failed", "consumer other/c3": "failed"}
    rows = _worst_consumers(every, nats, parts)
    names = [row["name"] for row in rows]
    rest = [f"c{n}" for n in range(2 * MOST - 1, -1, -1)]
    assert names == ["c2", "c1", "out", *rest][:MOST]
    assert [row["level"] for row in rows[:4]] == ["failed", "degraded", "ready", "ready"]
    shown = {"type": "nats", "dead_letters": 7, "lag_seconds": None, "in_flight": None}
    assert rows[2].items() >= shown.items()
    assert rows[0] == {"name": "c2", "level": "failed", **http(2)}


def test_consumers_that_are_alike_keep_their_order() -> None:
    rows = _worst_consumers([("b", http(1)), ("a", http(1))], {}, {})
    assert [row["name"] for row in rows] == ["b", "a"]
