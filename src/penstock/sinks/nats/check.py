"""What can be wrong between the NATS sink and JetStream, and the command that mends it.

The sink uses the errors while it runs; `inspect` looks for the same troubles before it starts.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

import orjson

from penstock.config.nats import NatsSinkConfig, Server
from penstock.core.errors import SinkError
from penstock.core.finding import Finding
from penstock.core.subject import covers
from penstock.sinks.nats import permissions as nats_permissions
from penstock.sinks.nats.client import connect_first
from penstock.sinks.nats.leader import NOT_ENABLED, UNAVAILABLE, Verdict, no_leader, no_quorum

REQUEST_TIMEOUT: Final = 5.0
CLUSTER_SECONDS: Final = 10.0
"""Seconds for which a cluster without a leader is asked again; an election takes less."""
_ASK_SECONDS: Final = 0.5
MIN_DUPLICATE_WINDOW: Final = 60 * 10**9
ATOMIC_DISABLED: Final = 10174
"""The error of a stream without `allow_atomic` to which an atomic batch is sent."""
_ATOMIC_SINCE: Final = (2, 12)
_FULL: Final = {10047, 10023, 10028, 10005}


def knows_batches(info: dict[str, Any]) -> bool:
    """Tell by a server's `INFO` whether it knows atomic batches; others store their parts at once."""
    found = re.match(r"(\d+)\.(\d+)", str(info.get("version", "")))
    return found is not None and (int(found[1]), int(found[2])) >= _ATOMIC_SINCE


def stream_add(config: NatsSinkConfig, source: str | None, subject: str | None = None) -> str:
    """Return the command that makes a stream for the sink's subjects, and for one of a route."""
    called = config.form.name if config.form is not None else source or "penstock"
    name = config.stream or re.sub(r"[^A-Z0-9_-]", "_", called.upper())
    subjects = config.template.wildcard(source)
    if subject is not None and not covers(subjects, subject):
        subjects += f",{subject}"
    return (
        f'nats stream add {name} --subjects "{subjects}" --storage file --dupe-window 2m --defaults'
    )


def no_stream(config: NatsSinkConfig, source: str | None, subject: str) -> SinkError:
    """Return the error for a subject that no stream captures."""
    return SinkError(
        "no_stream",
        f"No JetStream stream captures the subject {subject!r}.",
        remedy=f"Run: {stream_add(config, source, subject)}",
    )


def jetstream_not_enabled(server: Server) -> SinkError:
    """Return the error for a server or an account without JetStream."""
    return SinkError(
        "jetstream_not_enabled",
        f"JetStream is not enabled at {server} for this user's account.",
        remedy="Start nats-server with -js (or a `jetstream {}` block), and enable JetStream in "
        "the account.",
    )


def unanswered(
    verdict: Verdict, config: NatsSinkConfig, source: str | None, subject: str, server: Server
) -> SinkError:
    """Return the error for a subject that nothing in a cluster answers for."""
    if verdict == "no_stream":
        return no_stream(config, source, subject)
    if verdict == "not_enabled":
        return jetstream_not_enabled(server)
    if verdict == "no_leader":
        return no_leader(subject, server)
    return no_quorum(server, subject if verdict == "stream_leaderless" else None)


def why_unanswered(config: NatsSinkConfig, source: str, subject: str) -> SinkError:
    """Ask JetStream why nothing answers for a subject; in a cluster that may take some seconds."""
    try:
        api = _Api(config, CLUSTER_SECONDS)
        try:
            found = api.streams(subject)
        finally:
            api.close()
    except SinkError as error:
        return error
    if found:
        return no_quorum(api.connection.server, subject)
    return no_stream(config, source, subject)


def publish_denied(subject: str, server: Server) -> SinkError:
    """Return the error for a subject that the user may not publish to."""
    return SinkError(
        "permission_denied",
        f"This user may not publish to {subject!r} at {server}.",
        remedy=f'Allow it in the user\'s `permissions {{ publish {{ allow: ["{subject}"] }} }}`.',
    )


def ack_overdue(subject: str, seconds: float) -> SinkError:
    """Return the error for a message without an ack in time."""
    return SinkError(
        "timeout",
        f"No ack for a message to {subject!r} within {seconds:g} s.",
        remedy="If it lasts: check that a stream captures the subject (`nats stream ls --subject "
        f'"{subject}"`) and has a leader (`nats stream report`).',
    )


def refused_by_stream(body: dict[str, Any], config: NatsSinkConfig, subject: str) -> SinkError:
    """Return the error for a negative ack of JetStream; `message_too_large` is for ever."""
    code = int(body["error"].get("err_code") or 0)
    text = str(body["error"].get("description") or "no reason given")
    stream = str(body.get("stream") or config.stream or "<stream>")
    if code in (10054, 10097):
        return SinkError(
            "message_too_large",
            f"Stream {stream!r} refuses the message to {subject!r}: {text} ({code}).",
            remedy=f"Run: nats stream edit {stream} --max-msg-size=-1",
            transient=False,
        )
    if code == 10070:
        return SinkError(
            "out_of_line",
            f"Stream {stream!r} has another message before the one to {subject!r}: {text} ({code}).",
            remedy="Nothing is to be done: it is sent again.",
        )
    if code == 10060:
        return SinkError(
            "wrong_stream",
            f"The subject {subject!r} is captured by another stream than "
            f"{config.setting('stream')}, {config.stream!r} ({text}, {code}).",
            remedy=f"Set {config.setting('stream')} to the one that captures it, or change the "
            "streams' subjects; "
            f'see: nats stream ls --subject "{subject}"',
        )
    if code in _FULL or (code == 10077 and "maximum" in text):
        return SinkError(
            "stream_full",
            f"Stream {stream!r} takes no more messages: {text} ({code}).",
            remedy=f"Run: nats stream purge {stream} --keep <n>, or raise its limits: "
            f"nats stream edit {stream} --max-msgs=-1 --max-bytes=-1",
        )
    if code in UNAVAILABLE:
        return SinkError(
            "no_quorum",
            f"Stream {stream!r} can't take the message to {subject!r} now: {text} ({code}).",
            remedy="Start the servers that are down: more than half of those that have a replica of "
            "the stream must run. See: nats stream report",
        )
    if code in NOT_ENABLED:
        return SinkError(
            "jetstream_not_enabled",
            f"JetStream is not enabled for this user's account: {text} ({code}).",
            remedy="Enable JetStream in the server's configuration for the account.",
        )
    if code == 10167:
        return SinkError(
            "too_many_requests",
            f"Stream {stream!r} has too many messages waiting: {text} ({code}).",
            remedy="Publish from fewer tasks, or raise `max_buffered_msgs` of the server.",
        )
    return SinkError(
        "stream_refused",
        f"Stream {stream!r} refuses a message to {subject!r}: {text} ({code}).",
        remedy=f"See: nats stream info {stream}",
    )


def log_in(config: NatsSinkConfig) -> Server:
    """Return the server that takes the login; raises `SinkError`."""
    api = _Api(config)
    api.close()
    return api.connection.server


def find_stream(config: NatsSinkConfig, source: str) -> str:
    """Return the name of the stream that captures the sink's subjects; raises `SinkError`."""
    api = _Api(config)
    try:
        names = api.streams(config.template.wildcard(source))
    finally:
        api.close()
    if config.stream and config.stream in names:
        return config.stream
    if not names:
        raise no_stream(config, source, config.template.wildcard(source))
    return names[0]


def inspect(
    config: NatsSinkConfig, samples: Sequence[str] = (), *, source: str | None = None
) -> list[Finding]:
    """Look at all that a sink needs.

    `samples` are subjects that the template gives, if known, and `source` fills `{source}`.
    Stops at the first thing without which the rest cannot be looked at.
    """
    what = f"nats {config.safe_url}"
    try:
        api = _Api(config, CLUSTER_SECONDS)
    except SinkError as error:
        return [Finding("error", what, error.message, error.remedy)]
    found = [Finding("ok", what, f"reachable and logged in: {api.connection.server}")]
    try:
        found += _inspect_stream(api, config, source, samples)
    except SinkError as error:
        if error.code == "permission_denied":  # publishing may work all the same
            message = f"the stream cannot be looked at: {error.message}"
            fix = 'permit this user to publish to "$JS.API.>"'
            found.append(Finding("warning", what, message, fix))
        else:
            found.append(Finding("error", what, error.message, error.remedy))
    try:
        wildcard = config.template.wildcard(source)
        found.append(api.permission(wildcard, samples))
    except SinkError as error:
        found.append(Finding("error", what, error.message, error.remedy))
    finally:
        api.close()
    return found


def _inspect_stream(
    api: _Api, config: NatsSinkConfig, source: str | None, samples: Sequence[str]
) -> list[Finding]:
    wildcard = config.template.wildcard(source)
    info = api.ask("INFO")
    if info is None or "error" in info:
        error = jetstream_not_enabled(api.connection.server)
        return [Finding("error", f"nats {config.safe_url}", error.message, error.remedy)]
    names = api.streams(wildcard)
    what = f"subject {wildcard}"
    if not names:
        error = no_stream(config, source, wildcard)
        return [Finding("error", what, error.message, error.remedy)]
    if config.stream and config.stream not in names:
        message = f"stream {config.stream} does not capture it, but {', '.join(names)} does"
        fix = f"set {config.setting('stream')} to {names[0]}, or leave it out"
        return [Finding("error", what, message, fix)]
    found = [_coverage(api, wildcard, names, samples)]
    for name in names:
        reply = api.ask(f"STREAM.INFO.{name}")
        if reply is None or "config" not in reply:
            found.append(Finding("warning", f"stream {name}", "its settings cannot be read"))
            continue
        found += _settings(f"stream {name}", name, reply)
        found += api.may_ask(name)
    return found


def _coverage(api: _Api, wildcard: str, names: list[str], samples: Sequence[str]) -> Finding:
    """Tell whether the streams take every subject that the template can give."""
    what = f"subject {wildcard}"
    filters: list[str] = []
    for name in names:
        reply = api.ask(f"STREAM.INFO.{name}") or {}
        filters += reply.get("config", {}).get("subjects") or []
    if any(covers(pattern, wildcard) for pattern in filters):
        return Finding("ok", what, f"captured by stream {', '.join(names)}")
    missed = [s for s in samples if not any(covers(pattern, s) for pattern in filters)]
    subjects = ",".join([*filters, wildcard])
    fix = f'nats stream edit {names[0]} --subjects "{subjects}"'
    if missed:
        return Finding("error", what, f"no stream captures {', '.join(missed[:3])}", fix)
    if samples:
        return Finding("ok", what, f"what it gives now is captured by stream {', '.join(names)}")
    return Finding("warning", what, f"only a part of it is captured ({', '.join(filters)})", fix)


def _settings(what: str, name: str, reply: dict[str, Any]) -> Iterable[Finding]:
    settings = reply["config"]
    window = int(settings.get("duplicate_window") or 0)
    if window < MIN_DUPLICATE_WINDOW:
        message = f"its duplicate window is {window / 1e9:g} s: replays after it show up twice"
        yield Finding("warning", what, message, f"nats stream edit {name} --dupe-window 2m")
    else:
        yield Finding("ok", what, f"its duplicate window is {window / 1e9:g} s")
    if settings.get("storage") == "memory":
        message = "it is kept in memory: a restart of the server loses its messages"
        yield Finding("warning", what, message, "make a new stream with --storage file")
    if (largest := int(settings.get("max_msg_size") or -1)) > 0:
        message = f"larger messages than {largest} bytes (max_msg_size) become dead letters"
        yield Finding("warning", what, message, f"nats stream edit {name} --max-msg-size=-1")
    if settings.get("sealed"):
        yield Finding("error", what, "it is sealed and takes no messages", "make a new stream")
    limits = [k for k in ("max_msgs", "max_bytes") if int(settings.get(k) or -1) > 0]
    if settings.get("discard") == "new" and limits:
        shown = ", ".join(f"{k} {settings[k]}" for k in limits)
        message = f"once it is full ({shown}, discard new) the sink waits until there is room"
        yield Finding("warning", what, message, f"nats stream edit {name} --discard old")
    if settings.get("no_ack"):
        message = "it does not ack, so nothing can be known to have arrived"
        yield Finding("error", what, message, f"nats stream edit {name} --ack")


class _Api:
    """JetStream's API over a connection of its own.

    A cluster is asked again for up to `patience` seconds where it has no leader, or reports no stream:
    both may be so while it chooses one.
    """

    def __init__(self, config: NatsSinkConfig, patience: float = 0.0):
        self._inbox = f"_INBOX.{secrets.token_hex(8)}.".encode()
        self.connection = connect_first(config, self._inbox, "penstock check")
        self._is_cluster = bool(self.connection.info.get("cluster"))
        self._patience = patience if self._is_cluster else 0.0
        self._until = time.monotonic() + self._patience

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
        timeout = 2.0 if self._patience else REQUEST_TIMEOUT
        try:
            reply = self.connection.request(f"$JS.API.{call}", body, self._inbox, timeout)
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

    def permission(self, wildcard: str, samples: Sequence[str]) -> Finding:
        """Look whether the user may publish to what a template gives."""
        return nats_permissions.inspect(self.connection, self._inbox, wildcard, samples)

    def may_ask(self, stream: str) -> Iterable[Finding]:
        """Look whether the user may see whose the messages are that the stream has already."""
        call = f"$JS.API.STREAM.MSG.GET.{stream}"
        found = nats_permissions.inspect(self.connection, self._inbox, call, [call])
        if found.level != "ok":
            message = (
                f"{found.message}: of copies that it drops, another publisher's message is not seen"
            )
            yield Finding("warning", f"stream {stream}", message, found.fix)

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()
