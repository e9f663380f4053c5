"""What comes from a NATS server, however it is cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.nats_frames_help import INBOX

from penstock.core.errors import SinkError
from penstock.sinks.nats.parser import (
    Event,
    Info,
    Parser,
    Ping,
    Pong,
    Reply,
    ServerError,
    StoredAnswer,
)


def msg(number: int, body: bytes) -> bytes:
    return b"MSG %s%d 1 %d\r\n%s\r\n" % (INBOX, number, len(body), body)


def ack(number: int, more: bytes = b"") -> bytes:
    return msg(number, b'{"stream":"S", "seq":%d%s}' % (number + 7, more))


NO_RESPONDERS = b"HMSG " + INBOX + b"9 1 16 16\r\nNATS/1.0 503\r\n\r\n\r\n"
FULL = b'{"error":{"code":503,"err_code":10077,"description":"maximum messages exceeded"}}'
FOUND = b'{"message":{"subject":"a","seq":9}}'
COPY = b'{"stream":"S", "seq":9,"duplicate": true}'
TALK = (
    b'INFO {"max_payload":10}\r\n'
    + ack(1)
    + ack(2, b',"duplicate": true')
    + b"PING\r\n"
    + ack(3)
    + NO_RESPONDERS
    + msg(4, FULL)
    + msg(4, FOUND).replace(INBOX, INBOX + b"q")
    + b"-ERR 'Permissions Violation for Publish to \"a.b\"'\r\n"
    + msg(5, b'{"stream":"S", "domain":"hub", "seq":0}')
    + msg(6, b"+OK\r\nMSG " + INBOX + b'77 1 2\r\n{"stream":"S", "seq":1}')
    + b"MSG other.7 2 2\r\nhi\r\n+OK\r\nPONG\r\n"
    + ack(8, b"")
)


def feed(pieces: Sequence[bytes]) -> tuple[list[int], list[Event], dict[bytes, bytes]]:
    parser = Parser(INBOX)
    acks: list[int] = []
    events: list[Event] = []
    for piece in pieces:
        some, more = parser.feed(piece)
        acks += map(int, some)
        events += more
    return acks, events, parser.copies


def test_parser() -> None:
    acks, events, copies = feed([TALK])
    assert acks == [1, 2, 3, 8]
    assert copies == {b"2": COPY}
    assert [type(e) for e in events] == [
        Info, Ping, Reply, Reply, StoredAnswer, ServerError, Reply, Reply, Pong,
    ]  # fmt: skip
    assert events[0] == Info({"max_payload": 10})
    assert events[2] == Reply(9, 503, b"")
    assert events[3] == Reply(4, 0, FULL)
    assert events[4] == StoredAnswer(4, 0, FOUND)
    problem = events[5]
    assert isinstance(problem, ServerError)
    assert problem.denied_subject == "a.b"


@given(st.lists(st.integers(0, len(TALK)), max_size=20))
def test_however_it_is_cut(cuts: list[int]) -> None:
    at = [0, *sorted(cuts), len(TALK)]
    assert feed([TALK[a:b] for a, b in pairwise(at)]) == feed([TALK])


def test_an_ack_of_sequence_0_or_with_an_error_is_no_ack() -> None:
    body = b'{"error":{"code":400},"stream":"S","seq":0}'
    assert feed([msg(1, body)])[:2] == ([], [Reply(1, 0, body)])
    assert feed([msg(1, b'{"stream":"S","seq":0}')])[0] == []


def test_something_else_than_nats() -> None:
    with pytest.raises(SinkError, match="does not speak NATS"):
        Parser(INBOX).feed(b"HTTP/1.1 400 Bad Request\r\n")
    with pytest.raises(SinkError, match="does not speak NATS"):
        Parser(INBOX).feed(b"\0" * 2_000_000)
