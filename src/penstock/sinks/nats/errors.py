"""The errors of NATS: what is wrong, with which value, and the command that mends it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from penstock.config.nats import NatsServer, NatsSinkConfig
from penstock.config.sinks import NatsSinkSettings
from penstock.core.errors import SinkError
from penstock.core.subject import covers
from penstock.sinks.nats.stream_settings import flags

DENIED: Final = re.compile(r'permissions violation for (publish|subscription) to "([^"]*)"', re.I)
"""Finds what a server does not permit, and the subject."""
_FULL: Final = {10047, 10023, 10028, 10005}
UNAVAILABLE: Final = frozenset({10004, 10008, 10009, 10118})
"""Errors of a cluster that can't do it now: incomplete, unavailable, not the leader, stream offline."""
NOT_ENABLED: Final = frozenset({10039, 10076})
"""Errors of an account, or a server, without JetStream."""


def none_of(errors: Sequence[SinkError]) -> SinkError:
    """Return one error for all servers of a sink, with each one's reason."""
    # A server's reply explains more than another server that could not be reached.
    lead = next((error for error in errors if not error.transient), errors[0])
    reasons = list(dict.fromkeys(error.message.removesuffix(".") for error in errors))
    if len(reasons) == 1:
        return lead
    return SinkError(
        lead.code,
        f"None of {len(errors)} servers can be used: {'; '.join(reasons)}.",
        remedy=lead.remedy,
        transient=lead.transient,
    )


def problem_error(text: str, config: NatsSinkConfig, server: NatsServer) -> SinkError:
    """Return the `SinkError` for a server's `-ERR` that concerns the connection."""
    low = text.lower()
    if "authorization violation" in low or "authentication" in low or "revoked" in low:
        expired = "expired" in low or "timeout" in low
        return SinkError(
            "authorization_violation",
            f"{server} refuses the login: {text}.",
            remedy=f"Set {config.setting('user')} and {config.setting('password')}, "
            f"{config.setting('token')}, {config.setting('credentials_file')} or "
            f"{config.setting('nkey_seed')} to what the server's configuration has.",
            transient=expired,
        )
    if "permissions violation" in low:
        return SinkError(
            "permission_denied",
            f"{server} does not permit it: {text}.",
            remedy=_permit(text),
            transient=False,
        )
    if "secure connection" in low or "tls" in low:
        return tls_error(config, server, text)
    return SinkError("server_error", f"{server} closes the connection: {text}.")


def _permit(text: str) -> str:
    """Return what mends a violation of permissions."""
    found = DENIED.search(text)
    if found is None:
        return "Permit it in the user's `permissions`."
    if found[1].lower() == "subscription":
        return 'Permit this user to subscribe to "_INBOX.>", where acks and replies come.'
    subject = "$JS.API.>" if found[2].startswith("$JS.API.") else found[2]
    return f'Permit this user to publish to "{subject}".'


def tls_error(
    config: NatsSinkConfig, server: NatsServer, reason: str, remedy: str | None = None
) -> SinkError:
    """Return the error for a connection that could not be secured."""
    return SinkError(
        "tls_failed",
        f"No secure connection to {server}: {reason}.",
        remedy=remedy
        or f"Set {config.setting('tls_ca_cert')} to the CA that signed the server's certificate, "
        f"{config.setting('tls_cert')} and {config.setting('tls_key')} if it asks for a client's, "
        f"and {config.setting('url')} to a name that is in the certificate.",
        transient=False,
    )


def unresponsive(server: NatsServer, seconds: float) -> SinkError:
    """Return the error for a server that sends nothing."""
    return SinkError(
        "timeout",
        f"{server} has not answered for {seconds:g} s.",
        remedy="See whether the server is stopped or overloaded, and the network.",
    )


def not_nats(where: str, line: bytes) -> SinkError:
    """Return the error for a port where something else listens."""
    return SinkError(
        "protocol_error",
        f"What listens {where} does not speak NATS: {line[:40]!r}.",
        remedy="Set `url` to the client port of nats-server (4222 by default).",
    )


def stream_add(config: NatsSinkConfig, source: str | None, subject: str | None = None) -> str:
    """Return the command that makes a stream for the sink's subjects, and for one of a route."""
    called = config.form.name if config.form is not None else source or "penstock"
    wanted = config.stream_config if isinstance(config, NatsSinkSettings) else None
    given = (wanted and wanted.name) or config.stream
    name = given or re.sub(r"[^A-Z0-9_-]", "_", called.upper())
    subjects = list((wanted and wanted.subjects) or [config.template.wildcard(source)])
    if subject is not None and not any(covers(each, subject) for each in subjects):
        subjects.append(subject)
    return f'nats stream add {name} --subjects "{",".join(subjects)}" {flags(wanted)} --defaults'


def no_stream(config: NatsSinkConfig, source: str | None, subject: str) -> SinkError:
    """Return the error for a subject that no stream captures."""
    return SinkError(
        "no_stream",
        f"No JetStream stream captures the subject {subject!r}.",
        remedy=f"Run: {stream_add(config, source, subject)}",
    )


def jetstream_not_enabled(server: NatsServer) -> SinkError:
    """Return the error for a server or an account without JetStream."""
    return SinkError(
        "jetstream_not_enabled",
        f"JetStream is not enabled at {server} for this user's account.",
        remedy="Start nats-server with -js (or a `jetstream {}` block), and enable JetStream in "
        "the account.",
    )


def publish_denied(subject: str, server: NatsServer) -> SinkError:
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


def no_leader(subject: str, server: NatsServer) -> SinkError:
    """Return the error for a subject that no stream of a cluster answers for, for a reason not known."""
    return SinkError(
        "no_leader",
        f"No stream answers for {subject!r} in the cluster of {server}: a leader is being chosen, or no"
        " stream captures the subject.",
        remedy="Wait some seconds, it is tried again. If it lasts and no other cause is named, permit"
        ' this user to publish to "$JS.API.>", and see: nats stream report',
    )


def no_quorum(server: NatsServer, subject: str | None = None) -> SinkError:
    """Return the error for a cluster that has no leader, or, with `subject`, its stream has none."""
    if subject is None:
        message = f"The JetStream cluster of {server} has no leader"
        voters = "the cluster's servers"
        see = "nats server report jetstream"
    else:
        message = f"The stream that captures {subject!r}, in the cluster of {server}, has no leader"
        voters = "the servers that have a replica of the stream"
        see = "nats stream report"
    return SinkError(
        "no_quorum",
        f"{message}: it has no quorum, as too few servers run or reach each other.",
        remedy=f"Start the servers that are down: more than half of {voters} must run. See: {see}",
    )
