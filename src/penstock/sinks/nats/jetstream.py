"""JetStream's API: which streams there are, asked over a connection of its own."""

from __future__ import annotations

import time
from typing import Any, Final, Self

import orjson

from penstock.config.nats import NatsSinkConfig
from penstock.core.errors import SinkError
from penstock.sinks.nats.client import connect_first
from penstock.sinks.nats.errors import UNAVAILABLE, jetstream_not_enabled, no_quorum, no_stream

_REQUEST_SECONDS: Final = 5.0
_CLUSTER_REQUEST_SECONDS: Final = 2.0
CLUSTER_SECONDS: Final = 10.0
"""Seconds for which a cluster without a leader is asked again; an election takes less."""
_ASK_SECONDS: Final = 0.5


class JetStreamApi:
    """JetStream's API over a connection of its own; a context manager.

    A cluster is asked again for up to `patience` seconds where it has no leader, or reports no stream:
    both may be so while it chooses one.
    """

    def __init__(self, config: NatsSinkConfig, patience: float = 0.0):
        self.connection = connect_first(config, "penstock check")
        self._is_cluster = bool(self.connection.info.get("cluster"))
        self._patience = patience if self._is_cluster else 0.0
        self._until = time.monotonic() + self._patience

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def ask(self, call: str, **payload: Any) -> dict[str, Any] | None:
        """Return the reply of an API call, None if JetStream does not answer.

        Raises `SinkError` (`no_quorum`) where a cluster has no leader.
        """
        body = orjson.dumps(payload) if payload else b""
        answer = self._ask(call, body)
        while isinstance(answer, SinkError):
            if not self._may_ask_again():
                raise answer
            answer = self._ask(call, body)
        return answer

    def _may_ask_again(self) -> bool:
        """Return whether there is patience left to ask again, a little later."""
        if time.monotonic() >= self._until:
            return False
        time.sleep(_ASK_SECONDS)
        return True

    def _ask(self, call: str, body: bytes) -> dict[str, Any] | SinkError | None:
        timeout = _CLUSTER_REQUEST_SECONDS if self._patience else _REQUEST_SECONDS
        try:
            reply = self.connection.request(f"$JS.API.{call}", body, timeout)
        except SinkError as error:
            if error.code == "timeout" and self._is_cluster:
                return no_quorum(self.connection.server)
            raise
        if reply.status:
            return None
        answer = orjson.loads(reply.body)
        if not isinstance(answer, dict):
            return None
        refusal = answer.get("error")
        if isinstance(refusal, dict) and refusal.get("err_code") in UNAVAILABLE:
            return no_quorum(self.connection.server)
        return answer

    def streams(self, subject: str) -> list[str]:
        """Return the names of the streams whose subjects overlap `subject`."""
        while True:
            answer = self.ask("STREAM.NAMES", subject=subject)
            if answer is None or "error" in answer:
                raise jetstream_not_enabled(self.connection.server)
            found = list(answer.get("streams") or [])
            if found or not self._may_ask_again():
                return found


def find_stream(config: NatsSinkConfig, source: str) -> str:
    """Return the name of the stream that captures the sink's subjects; raises `SinkError`."""
    with JetStreamApi(config) as api:
        return stream_of(api, config, source)


def stream_of(api: JetStreamApi, config: NatsSinkConfig, source: str) -> str:
    """Return the same over a connection that is there."""
    names = api.streams(config.template.wildcard(source))
    if config.stream and config.stream in names:
        return config.stream
    if not names:
        raise no_stream(config, source, config.template.wildcard(source))
    return names[0]


def why_unanswered(config: NatsSinkConfig, source: str, subject: str) -> SinkError:
    """Ask JetStream why nothing answers for a subject; in a cluster that may take some seconds."""
    try:
        with JetStreamApi(config, CLUSTER_SECONDS) as api:
            found = api.streams(subject)
    except SinkError as error:
        return error
    if found:
        return no_quorum(api.connection.server, subject)
    return no_stream(config, source, subject)
