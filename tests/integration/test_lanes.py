"""Lanes over real sockets: attempts of a task that take over from each other, ends, strangers."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest

from penstock.core.blocks import Opening
from penstock.core.errors import SparkError
from penstock.spark.lane_server import Event, Joined, LaneServer, Lost, Reported
from penstock.spark.lanes import LAST, MORE, Lane, Reports, connected, read

PATIENCE = 30


@pytest.fixture
def server() -> Iterator[LaneServer]:
    server = LaneServer("127.0.0.1", reports=True)
    server.open(1)
    yield server
    server.close()


class Reader(threading.Thread):
    """An attempt of a task: where Spark reads."""

    def __init__(self, server: LaneServer, batch: int, session: int, number: int = 0) -> None:
        super().__init__(daemon=True)
        self.frames: SimpleQueue[tuple[bytes, bytes] | SparkError | None] = SimpleQueue()
        self._lane = Lane(server.address, batch, number)
        self._session = session
        self.start()

    def run(self) -> None:
        try:
            for frame in read(self._lane, self._session):
                self.frames.put(frame)
            self.frames.put(None)
        except SparkError as error:
            self.frames.put(error)


def polled(server: LaneServer, enough: Callable[[list[Event]], bool]) -> list[Event]:
    """Return what has happened, once it is enough."""
    events: list[Event] = []
    for _ in range(PATIENCE * 10):
        if enough(events):
            return events
        events += server.poll(0.1)
    raise AssertionError(events)


def writer(server: LaneServer, session: int, number: int = 0) -> Reports:
    return Reports(Opening(server.address, 1, number, session))


def next_frame(server: LaneServer, reader: Reader) -> object:
    polled(server, lambda _: not reader.frames.empty())
    return reader.frames.get(timeout=PATIENCE)


def test_a_lane_joins_when_both_ends_are_there_and_has_its_frames(server: LaneServer) -> None:
    reader = Reader(server, 1, 7)
    reports = writer(server, 7)
    assert polled(server, bool) == [Joined(0)]
    large = bytes(8 << 20)  # more than a socket takes at once
    server.send(0, MORE, large)
    server.send(0, LAST, b"end")
    assert next_frame(server, reader) == (MORE, large)
    assert next_frame(server, reader) == (LAST, b"end")
    reports.send([1, {}, {}, None])
    reports.send([2, {}, {}, True])
    sent = [Reported(0, [1, {}, {}, None]), Reported(0, [2, {}, {}, True])]
    assert polled(server, lambda events: len(events) == 2) == sent
    server.end()
    assert next_frame(server, reader) is None


@pytest.mark.parametrize("dies", ["reader", "writer"])
def test_another_attempt_waits_until_the_first_is_gone(server: LaneServer, dies: str) -> None:
    hello = ["read", 1, 0, 7]
    first = _connection(server, hello)
    reports = writer(server, 7)
    assert polled(server, bool) == [Joined(0)]
    second, second_reports = Reader(server, 1, 8), writer(server, 8)
    assert server.poll(0.5) == []
    (first if dies == "reader" else reports).close()
    assert polled(server, lambda events: Joined(0) in events) == [Lost(0), Joined(0)]
    server.send(0, LAST, b"again")
    assert next_frame(server, second) == (LAST, b"again")
    second_reports.close()


def test_a_batch_that_has_ended_ends_who_comes_late_and_refuses_who_reads_it_again(
    server: LaneServer,
) -> None:
    reader, reports = Reader(server, 1, 7), writer(server, 7)
    assert polled(server, bool) == [Joined(0)]
    server.end()
    assert next_frame(server, reader) is None
    again = next_frame(server, Reader(server, 1, 9))
    assert isinstance(again, SparkError)
    assert again.code == "read_twice"
    # A lane that never had a slot has missed nothing.
    assert next_frame(server, Reader(server, 1, 10, number=1)) is None
    reports.close()


def test_a_reader_whose_capture_is_gone(server: LaneServer) -> None:
    reader, reports = Reader(server, 1, 7), writer(server, 7)
    assert polled(server, bool) == [Joined(0)]
    server.close()
    server.close()
    reports.close()
    error = reader.frames.get(timeout=PATIENCE)
    assert isinstance(error, SparkError)
    assert (error.code, error.transient) == ("capture_gone", True)


def test_a_stranger_is_hung_up_on(server: LaneServer) -> None:
    host, port, _ = server.address.split(":")
    with socket.create_connection((host, int(port)), PATIENCE) as stranger:
        stranger.sendall(b"\0" * 200)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(4096):
                pass
    lane = Lane(f"{host}:{port}:wrong", 1, 0)
    with pytest.raises(SparkError, match="AuthenticationError"):
        next(read(lane, 1))
    assert server.poll(0.2) == []


def _connection(server: LaneServer, hello: list[object]) -> socket.socket:
    return connected(server.address, hello)
