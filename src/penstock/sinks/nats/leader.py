"""Why nothing answers a publish in a cluster: no stream, no leader, no quorum, or no JetStream.

In a cluster "no responders" (503) proves little: a stream that changes its leader answers nothing for
some seconds, and neither does a cluster that has lost its quorum. So JetStream's API is asked, several
times over some seconds, before there is a verdict. No I/O: `replies` sends the questions.

Measured with nats-server 2.15: without a quorum the API answers nothing for ten seconds, and then
"temporarily unavailable" (10008); while the cluster chooses a leader it answers nothing either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import orjson

from penstock.config.nats import NatsServer, NatsSinkConfig
from penstock.core.errors import SinkError
from penstock.sinks.nats.errors import (
    NOT_ENABLED,
    UNAVAILABLE,
    jetstream_not_enabled,
    no_leader,
    no_quorum,
    no_stream,
)

Verdict = Literal["no_leader", "no_quorum", "no_stream", "stream_leaderless", "not_enabled"]

GRACE: Final = 6.0
"""Seconds for which the answers must be the same before there is a verdict; elections take as long."""
ASK_SECONDS: Final = 1.0
_UNANSWERED: Final = 3.0
_FORGET: Final = 60.0


def api_verdict(answer: dict[str, Any] | None) -> Verdict:
    """Return what an answer to `STREAM.NAMES` means; None: there is no JetStream to answer."""
    if answer is None:
        return "not_enabled"
    error = answer.get("error")
    if isinstance(error, dict):
        code = error.get("err_code")
        away = code in UNAVAILABLE or (error.get("code") == 503 and code not in NOT_ENABLED)
        return "no_quorum" if away else "not_enabled"
    return "stream_leaderless" if answer.get("streams") else "no_stream"


@dataclass
class _Case:
    """What is known of one subject's silence."""

    seen: float
    asked: float | None = None
    verdict: Verdict | None = None
    since: float = 0.0


class Silence:
    """Judges what publishes get no answer for, over one connection to a server of a cluster."""

    def __init__(self) -> None:
        self._cases: dict[str, _Case] = {}
        self._pending: str | None = None
        self._forbidden = False

    def seen(self, subject: str, now: float) -> tuple[Verdict, bytes | None]:
        """Note that a publish was not answered; return what is known, and what to ask the API."""
        case = self._cases.get(subject)
        if case is None or now - case.seen > _FORGET:
            if len(self._cases) > 100:
                self._cases.clear()
            case = self._cases[subject] = _Case(now)
        case.seen = now
        question = None
        pending = self._cases.get(self._pending) if self._pending is not None else None
        waits = pending is not None and now - (pending.asked or now) < _UNANSWERED
        if not waits and not self._forbidden and now - (case.asked or -ASK_SECONDS) >= ASK_SECONDS:
            if pending is not None:
                self._take(pending, "no_quorum", pending.asked or now)
            case.asked, self._pending = now, subject
            question = orjson.dumps({"subject": subject})
        if case.verdict is None or now - case.since < GRACE:
            return "no_leader", question
        return case.verdict, question

    def answered(self, status: int, body: bytes, now: float) -> None:
        """Take the API's answer to the question."""
        case = self._cases.get(self._pending) if self._pending is not None else None
        self._pending = None
        if case is None:
            return
        try:
            answer = None if status else orjson.loads(body)
        except orjson.JSONDecodeError:
            return
        if answer is None or isinstance(answer, dict):
            self._take(case, api_verdict(answer), now)

    def forbidden(self) -> None:
        """Note that the user may not ask the API: there is no verdict then."""
        self._forbidden, self._pending = True, None

    @staticmethod
    def _take(case: _Case, verdict: Verdict, now: float) -> None:
        if case.verdict != verdict:
            case.verdict, case.since = verdict, now


def unanswered(
    verdict: Verdict, config: NatsSinkConfig, source: str | None, subject: str, server: NatsServer
) -> SinkError:
    """Return the error for a subject that nothing in a cluster answers for."""
    if verdict == "no_stream":
        return no_stream(config, source, subject)
    if verdict == "not_enabled":
        return jetstream_not_enabled(server)
    if verdict == "no_leader":
        return no_leader(subject, server)
    return no_quorum(server, subject if verdict == "stream_leaderless" else None)
