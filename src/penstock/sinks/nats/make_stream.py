"""Makes the JetStream stream that a sink wants, and never changes one that is there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from penstock.config.sinks import NatsSinkSettings
from penstock.core.errors import SinkError
from penstock.core.subject import overlaps
from penstock.sinks.nats.errors import NOT_ENABLED, jetstream_not_enabled
from penstock.sinks.nats.jetstream import CLUSTER_SECONDS, JetStreamApi
from penstock.sinks.nats.stream_settings import demanded_name, wanted_config

_NOT_FOUND: Final = 10059
_NO_PEERS: Final = frozenset({10005, 10074})
"""Errors of a server, or a cluster, that has too few servers for the replicas."""
_NO_ROOM: Final = frozenset({10002, 10023, 10026, 10027, 10028, 10047, 10122})
"""Errors of an account, or a server, that may keep no more streams or bytes."""


@dataclass(frozen=True, slots=True)
class MadeStream:
    """A stream that was made: its name, its subjects, and its settings by the names of JetStream's API.

    Durations are nanoseconds there, and -1 is no limit.
    """

    name: str
    subjects: tuple[str, ...]
    config: dict[str, Any]


def make_stream(settings: NatsSinkSettings, sink: str) -> MadeStream:
    """Make the stream that a sink, called `sink`, wants.

    Blocks for the server's answers; in a cluster without a leader for some seconds. Raises `SinkError`:
    `stream_exists`, `subjects_overlap`, `permission_denied`, `stream_limits`, `stream_refused`, none of
    them transient, `jetstream_not_enabled`, and those of a server that can't be reached or logged in to.
    """
    with JetStreamApi(settings, CLUSTER_SECONDS) as api:
        return _make(api, settings, sink)


def ensure_stream(settings: NatsSinkSettings, sink: str) -> MadeStream | None:
    """Make the stream unless one takes some of the sink's subjects; then return None.

    Raises as `make_stream` does, `subjects_overlap` too where the file demands another stream's name.
    """
    name = demanded_name(settings)
    with JetStreamApi(settings, CLUSTER_SECONDS) as api:
        names = [stream for subject in expected(settings) for stream in api.streams(subject)]
        if names and (name is None or name in names):
            return None
        return _make(api, settings, sink)


def expected(settings: NatsSinkSettings) -> tuple[str, ...]:
    """Return the patterns of what a sink may publish to, as far as the file has them."""
    wanted = settings.stream_config
    # What a route's expression gives stands nowhere else.
    by_expression = isinstance(settings.route, str) and wanted is not None
    return settings.wildcards() + ((wanted.subjects or ()) if by_expression and wanted else ())


def conflict(api: JetStreamApi, settings: NatsSinkSettings, sink: str) -> SinkError | None:
    """Return why the stream that a sink wants can't be made beside those that are there."""
    wanted = wanted_config(settings, sink)
    if (found := _config_of(api, wanted["name"])) is not None:
        return SinkError(
            "stream_exists",
            f"A stream {wanted['name']} is there already: it takes {_subjects(found)}.",
            remedy="Set `stream_config.name` to another name, or add the sink's subjects to it:"
            f' nats stream edit {wanted["name"]} --subjects "'
            f'{",".join([*(found.get("subjects") or ()), *wanted["subjects"]])}"',
            transient=False,
        )
    for subject in wanted["subjects"]:
        for other in api.streams(subject):
            theirs = (_config_of(api, other) or {}).get("subjects") or ()
            both = [each for each in theirs if overlaps(each, subject)]
            return SinkError(
                "subjects_overlap",
                f"Stream {wanted['name']} can't be made for {subject}: stream {other} takes a part of"
                f" it ({', '.join(both or theirs)}), and a subject is in one stream.",
                remedy="Set `stream_config.subjects` to subjects that it does not take, set"
                f" {settings.setting('stream')} to {other}, or edit that stream.",
                transient=False,
            )
    return None


def _make(api: JetStreamApi, settings: NatsSinkSettings, sink: str) -> MadeStream:
    if (error := conflict(api, settings, sink)) is not None:
        raise error
    wanted = wanted_config(settings, sink)
    answer = api.ask(f"STREAM.CREATE.{wanted['name']}", **wanted)
    if answer is None:
        raise jetstream_not_enabled(api.connection.server)
    if "error" in answer:
        raise _refused(api, answer["error"], settings, wanted)
    config = dict(answer.get("config") or wanted)
    return MadeStream(wanted["name"], tuple(config.get("subjects") or ()), config)


def _config_of(api: JetStreamApi, name: str) -> dict[str, Any] | None:
    """Return the settings of a stream, None if there is none of that name."""
    answer = api.ask(f"STREAM.INFO.{name}")
    if answer is None:
        raise jetstream_not_enabled(api.connection.server)
    refusal = answer.get("error")
    if refusal and refusal.get("err_code") in NOT_ENABLED:
        raise jetstream_not_enabled(api.connection.server)
    if refusal and refusal.get("err_code") == _NOT_FOUND:
        return None
    return dict(answer.get("config") or {})


def _subjects(config: dict[str, Any]) -> str:
    return ", ".join(config.get("subjects") or ["no subject of its own"])


def _refused(
    api: JetStreamApi, refusal: dict[str, Any], settings: NatsSinkSettings, wanted: dict[str, Any]
) -> SinkError:
    """Return the error for a stream that the server does not make."""
    code, text = int(refusal.get("err_code") or 0), refusal.get("description") or "no reason given"
    if code in NOT_ENABLED:
        return jetstream_not_enabled(api.connection.server)
    kind = "stream_refused"
    remedy = "Correct `stream_config`, or make the stream yourself: nats stream add"
    if code in _NO_PEERS:
        kind, remedy = "stream_limits", (
            "Set `stream_config.replicas` to no more than the cluster has servers with JetStream"
            " (1 without a cluster)."
        )  # fmt: skip
    elif code in _NO_ROOM:
        kind, remedy = "stream_limits", (
            "Lower `stream_config.max_bytes`, or raise the limits of JetStream for this account."
        )  # fmt: skip
    return SinkError(
        kind,
        f"{settings.safe_url} does not make stream {wanted['name']} for"
        f" {', '.join(wanted['subjects'])}: {text} ({code}).",
        remedy=remedy,
        transient=False,
    )
