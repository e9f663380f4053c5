"""Why nothing answers in a cluster: what is known by which time, whatever the API answers."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from penstock.config.nats import NatsServer
from penstock.sinks.nats.errors import no_leader, no_quorum
from penstock.sinks.nats.leader import GRACE, Silence, api_verdict

NAMES: dict[str, Any] = {"type": "…stream_names_response", "total": 0, "streams": None}


def names(*streams: str) -> bytes:
    return orjson.dumps({**NAMES, "total": len(streams), "streams": list(streams) or None})


def error(code: int, err_code: int) -> bytes:
    return orjson.dumps({**NAMES, "error": {"code": code, "err_code": err_code}})


@pytest.mark.parametrize(
    ("status", "body", "verdict"),
    [
        (0, names(), "no_stream"),
        (0, names("ORDERS"), "stream_leaderless"),
        (0, error(503, 10008), "no_quorum"),
        (0, error(503, 10039), "not_enabled"),
        (0, error(503, 10076), "not_enabled"),
        (503, b"", "not_enabled"),
    ],
)
def test_a_verdict_needs_the_same_answer_for_a_while(
    status: int, body: bytes, verdict: str
) -> None:
    silence, now, asked = Silence(), 100.0, 0
    while now < 100.0 + GRACE:
        found, question = silence.seen("orders.x", now)
        assert found == "no_leader"
        if question is not None:
            asked += 1
            assert orjson.loads(question) == {"subject": "orders.x"}
            silence.answered(status, body, now)
        now += 0.4
    assert 3 <= asked <= GRACE + 1
    assert silence.seen("orders.x", now + 0.4)[0] == verdict


def test_no_answer_at_all_is_no_quorum() -> None:
    silence = Silence()
    found = [silence.seen("orders.x", 100.0 + n / 2)[0] for n in range(40)]
    assert set(found[:12]) == {"no_leader"}
    assert found[-1] == "no_quorum"


def test_an_answer_that_changes_begins_anew() -> None:
    """A stream that was just made, say: not every server knows of it at once."""
    silence, found = Silence(), []
    for n in range(40):
        now = 100.0 + n / 2
        verdict, question = silence.seen("orders.x", now)
        found.append(verdict)
        if question is not None:
            silence.answered(0, names() if n < 8 else names("ORDERS"), now)
    # The first answer of the new ones comes at 104 s.
    assert set(found[: 8 + int(2 * GRACE)]) == {"no_leader"}
    assert set(found[9 + int(2 * GRACE) :]) == {"stream_leaderless"}


def test_a_user_who_may_not_ask_gets_no_verdict() -> None:
    silence = Silence()
    assert silence.seen("orders.x", 100.0)[1] is not None
    silence.forbidden()
    assert {silence.seen("orders.x", 100.0 + n) for n in range(30)} == {("no_leader", None)}


def test_each_subject_has_its_own() -> None:
    silence = Silence()
    for n in range(60):
        now = 100.0 + n / 4
        for subject, streams in (("there.x", ("THERE",)), ("gone.x", ())):
            _, question = silence.seen(subject, now)
            if question is not None:
                silence.answered(0, names(*streams), now)
    assert silence.seen("there.x", 115.0)[0] == "stream_leaderless"
    assert silence.seen("gone.x", 115.0)[0] == "no_stream"
    # What was so a while ago says nothing.
    assert silence.seen("gone.x", 1000.0)[0] == "no_leader"


def test_what_is_printed_names_quorum() -> None:
    server = NatsServer("127.0.0.1", 4222, False)
    assert "quorum" in no_quorum(server).message
    assert "stream that captures 'a.b'" in no_quorum(server, "a.b").message
    assert "-js" not in no_quorum(server).remedy + no_leader("a", server).remedy
    assert api_verdict({"error": {"code": 400, "err_code": 10003}}) == "not_enabled"
