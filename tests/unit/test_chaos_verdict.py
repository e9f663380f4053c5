"""The fault test's verdict on an outbox's messages finds what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from penstock.embedded.handles import Msg

from ..chaos.verdict import compare, message_of_outbox
from ..chaos.writer import ROLLED_BACK, Key, Step

TAG = "chaos/0123abcd"
HISTORIES = {
    Key("chaos", 1): [Step("1/1", 1), Step("chaos:2", 2)],
    Key("chaos", 2): [Step("2/1", 1)],
}


def message(seq: int, name: str, key: int, n: int, note: str = "0-1") -> Msg:
    data = json.dumps({"key": key, "n": n, "note": note}).encode()
    return Msg("chaos.chaos", data, {"Nats-Msg-Id": name}, seq)


GOOD = [
    message(1, f"{TAG}:1/1", 1, 1),
    message(2, f"{TAG}:2/1", 2, 1),
    message(3, f"{TAG}#2", 1, 2),
]


def test_a_whole_stream() -> None:
    verdict = compare(HISTORIES, GOOD, message_of_outbox)
    assert not verdict.violations
    assert (verdict.committed, verdict.delivered, verdict.keys) == (3, 3, 2)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("lost", lambda good: good[:2]),
        ("duplicate", lambda good: [*good, good[0]._replace(seq=4)]),
        ("out of order", lambda good: good[::-1]),
        ("unexpected", lambda good: [*good, message(4, f"{TAG}#9", 2, 2)]),
        ("unexpected", lambda good: [*good[:2], message(3, f"{TAG}#7", 1, 2)]),
        ("rolled back", lambda good: [*good, message(4, f"{TAG}#9", 2, 2, ROLLED_BACK)]),
        ("wrong id", lambda good: [good[0]._replace(headers={}), *good[1:]]),
    ],
)
def test_what_is_wrong(kind: str, change: Callable[[list[Msg]], list[Msg]]) -> None:
    assert compare(HISTORIES, change(GOOD), message_of_outbox).violations[kind] == 1
