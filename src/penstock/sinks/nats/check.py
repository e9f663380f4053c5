"""What a NATS sink needs of the server, and the command that mends what it lacks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from penstock.config.nats import NatsSinkConfig
from penstock.core.errors import SinkError
from penstock.core.finding import Finding
from penstock.core.subject import covers
from penstock.sinks.nats import permissions
from penstock.sinks.nats.client import Connection
from penstock.sinks.nats.errors import jetstream_not_enabled, no_stream
from penstock.sinks.nats.jetstream import CLUSTER_SECONDS, JetStreamApi

_MIN_DUPLICATE_WINDOW: Final = 60 * 10**9


def inspect(
    config: NatsSinkConfig, samples: Sequence[str] = (), *, source: str | None = None
) -> list[Finding]:
    """Look at all that a sink needs.

    `samples` are subjects that the template gives, if known, and `source` fills `{source}`.
    Stops at the first thing without which the rest cannot be looked at.
    """
    what = f"nats {config.safe_url}"
    wildcard = config.template.wildcard(source)
    found: list[Finding] = []
    try:
        with JetStreamApi(config, CLUSTER_SECONDS) as api:
            found.append(Finding("ok", what, f"reachable and logged in: {api.connection.server}"))
            try:
                found += _inspect_streams(api, config, source, samples)
            except SinkError as error:
                found.append(_not_seen(what, error))
            found.append(permissions.inspect(api.connection, wildcard, samples))
    except SinkError as error:
        found.append(Finding("error", what, error.message, error.remedy))
    return found


def _not_seen(what: str, error: SinkError) -> Finding:
    if error.code != "permission_denied":
        return Finding("error", what, error.message, error.remedy)
    # Publishing may work all the same.
    message = f"the stream cannot be looked at: {error.message}"
    return Finding("warning", what, message, 'permit this user to publish to "$JS.API.>"')


def _inspect_streams(
    api: JetStreamApi, config: NatsSinkConfig, source: str | None, samples: Sequence[str]
) -> list[Finding]:
    wildcard = config.template.wildcard(source)
    info = api.ask("INFO")
    if info is None or "error" in info:
        raise jetstream_not_enabled(api.connection.server)
    names = api.streams(wildcard)
    what = f"subject {wildcard}"
    if not names:
        error = no_stream(config, source, wildcard)
        return [Finding("error", what, error.message, error.remedy)]
    if config.stream and config.stream not in names:
        message = f"stream {config.stream} does not capture it, but {', '.join(names)} does"
        fix = f"set {config.setting('stream')} to {names[0]}, or leave it out"
        return [Finding("error", what, message, fix)]
    settings = {name: (api.ask(f"STREAM.INFO.{name}") or {}).get("config") for name in names}
    found = [_coverage(wildcard, settings, samples)]
    for name in names:
        if (known := settings[name]) is None:
            found.append(Finding("warning", f"stream {name}", "its settings cannot be read"))
            continue
        found += _inspect_settings(f"stream {name}", name, known)
        found += _may_ask(api.connection, name)
    return found


def _coverage(
    wildcard: str, settings: Mapping[str, dict[str, Any] | None], samples: Sequence[str]
) -> Finding:
    """Return whether the streams, by their settings, take every subject that the template can give."""
    what, names = f"subject {wildcard}", list(settings)
    filters = [each for known in settings.values() for each in (known or {}).get("subjects") or ()]
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


def _inspect_settings(what: str, name: str, settings: dict[str, Any]) -> Iterable[Finding]:
    window = int(settings.get("duplicate_window") or 0)
    if window < _MIN_DUPLICATE_WINDOW:
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


def _may_ask(connection: Connection, stream: str) -> Iterable[Finding]:
    """Look whether the user may see whose the messages are that the stream has already."""
    call = f"$JS.API.STREAM.MSG.GET.{stream}"
    found = permissions.inspect(connection, call, [call])
    if found.level != "ok":
        message = (
            f"{found.message}: of copies that it drops, another publisher's message is not seen"
        )
        yield Finding("warning", f"stream {stream}", message, found.fix)
