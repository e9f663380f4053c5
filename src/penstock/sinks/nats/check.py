"""What a NATS sink needs of the server, and the command that mends what it lacks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from penstock.config.nats import NatsSinkConfig
from penstock.config.sinks import NatsSinkSettings
from penstock.core.errors import SinkError
from penstock.core.finding import Finding
from penstock.core.subject import covers
from penstock.sinks.nats import permissions
from penstock.sinks.nats.client import NatsConnection
from penstock.sinks.nats.errors import jetstream_not_enabled, no_stream
from penstock.sinks.nats.jetstream import CLUSTER_SECONDS, JetStreamApi
from penstock.sinks.nats.make_stream import conflict, expected
from penstock.sinks.nats.stream_settings import demanded_name, differences, wanted_config

_MIN_DUPLICATE_WINDOW: Final = 60 * 10**9


def inspect(
    config: NatsSinkConfig,
    samples: Sequence[str] = (),
    *,
    source: str | None = None,
    sink: str = "",
) -> list[Finding]:
    """Look at all that a sink needs.

    `samples` are subjects that the template gives, if known (tokens that are not may be `*`), `source`
    fills `{source}`, and `sink` is the sink's name, after which a stream is called that a run makes.
    Stops at the first thing without which the rest cannot be looked at.
    """
    what = f"nats {config.safe_url}"
    wildcard = config.template.wildcard(source)
    found: list[Finding] = []
    try:
        with JetStreamApi(config, CLUSTER_SECONDS) as api:
            found.append(Finding("ok", what, f"reachable and logged in: {api.connection.server}"))
            try:
                found += _inspect_streams(api, config, source, samples, sink)
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
    api: JetStreamApi,
    config: NatsSinkConfig,
    source: str | None,
    samples: Sequence[str],
    sink: str,
) -> list[Finding]:
    wildcard = config.template.wildcard(source)
    info = api.ask("INFO")
    if info is None or "error" in info:
        raise jetstream_not_enabled(api.connection.server)
    names = api.streams(wildcard)
    what = f"subject {wildcard}"
    settings_of_file = config if isinstance(config, NatsSinkSettings) else None
    demanded = config.stream if settings_of_file is None else demanded_name(settings_of_file)
    if settings_of_file is not None and settings_of_file.create_stream:
        others = [name for each in expected(settings_of_file) for name in api.streams(each)]
        if not others or (demanded and demanded not in others):
            return [_to_be_made(api, settings_of_file, sink, what)]
    if not names:
        error = no_stream(config, source, wildcard)
        return [Finding("error", what, error.message, error.remedy)]
    if demanded and demanded not in names:
        message = f"stream {demanded} does not capture it, but {', '.join(names)} does"
        key = config.setting("stream" if config.stream else "stream_config.name")
        fix = f"set {key} to {names[0]}, or leave it out"
        return [Finding("error", what, message, fix)]
    settings = {name: (api.ask(f"STREAM.INFO.{name}") or {}).get("config") for name in names}
    found = [_coverage(wildcard, settings, samples)]
    for name in names:
        if (known := settings[name]) is None:
            found.append(Finding("warning", f"stream {name}", "its settings cannot be read"))
            continue
        found += _inspect_settings(f"stream {name}", name, known, settings_of_file)
        if settings_of_file is not None:
            found += _compare(f"stream {name}", settings_of_file, known)
            found += _one_a_subject(name, settings_of_file, known)
        found += _may_ask(api.connection, name)
    return found


def _to_be_made(api: JetStreamApi, settings: NatsSinkSettings, sink: str, what: str) -> Finding:
    """Return that a run makes the stream, or why it can't."""
    if (error := conflict(api, settings, sink)) is not None:
        return Finding("error", what, error.message, error.remedy)
    made = wanted_config(settings, sink)
    message = f"no stream captures it yet: a run makes stream {made['name']} of"
    return Finding("ok", what, f"{message} {', '.join(made['subjects'])}")


def _compare(what: str, settings: NatsSinkSettings, known: Mapping[str, Any]) -> Iterable[Finding]:
    """Compare a stream with the sink's `stream_config`; Penstock never changes one that is there."""
    if settings.stream_config is None:
        return
    found = list(differences(settings, known))
    for each in found:
        message = f"{each.setting}: stream_config wants {each.wanted}, it has {each.found}"
        yield Finding("warning", what, message, each.fix)
    if not found:
        yield Finding("ok", what, "it is as `stream_config` wants it")


def _one_a_subject(
    name: str, settings: NatsSinkSettings, known: Mapping[str, Any]
) -> Iterable[Finding]:
    """Look whether rows that share a subject would replace each other."""
    if settings.kind != "rows" or known.get("max_msgs_per_subject") != 1:
        return
    if isinstance(settings.route, str) or "key" in settings.template.variables:
        return
    message = (
        f"stream {name} keeps one message per subject, and the subject has no {{key}}: of the rows"
        " that share a subject only the one that was sent last stays"
    )
    fix = f"write {settings.subject}.{{key}}, or: nats stream edit {name} --max-msgs-per-subject=-1"
    yield Finding("warning", f"subject {settings.template.wildcard(settings.source)}", message, fix)


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


def _inspect_settings(
    what: str, name: str, settings: dict[str, Any], sink: NatsSinkSettings | None
) -> Iterable[Finding]:
    given = sink.stream_config.given() if sink is not None and sink.stream_config else {}
    window = int(settings.get("duplicate_window") or 0)
    if window < _MIN_DUPLICATE_WINDOW:
        message = f"its duplicate window is {window / 1e9:g} s: replays after it show up twice"
        yield Finding("warning", what, message, f"nats stream edit {name} --dupe-window 2m")
    else:
        yield Finding("ok", what, f"its duplicate window is {window / 1e9:g} s")
    if settings.get("storage") == "memory" != given.get("storage"):
        message = "it is kept in memory: a restart of the server loses its messages"
        yield Finding("warning", what, message, "make a new stream with --storage file")
    if (largest := int(settings.get("max_msg_size") or -1)) > 0:
        message = f"larger messages than {largest} bytes (max_msg_size) become dead letters"
        yield Finding("warning", what, message, f"nats stream edit {name} --max-msg-size=-1")
    if settings.get("sealed"):
        yield Finding("error", what, "it is sealed and takes no messages", "make a new stream")
    limits = [k for k in ("max_msgs", "max_bytes") if int(settings.get(k) or -1) > 0]
    if settings.get("discard") == "new" != given.get("discard") and limits:
        shown = ", ".join(f"{k} {settings[k]}" for k in limits)
        message = f"once it is full ({shown}, discard new) the sink waits until there is room"
        yield Finding("warning", what, message, f"nats stream edit {name} --discard old")
    if settings.get("no_ack"):
        message = "it does not ack, so nothing can be known to have arrived"
        yield Finding("error", what, message, f"nats stream edit {name} --ack")


def _may_ask(connection: NatsConnection, stream: str) -> Iterable[Finding]:
    """Look whether the user may see whose the messages are that the stream has already."""
    call = f"$JS.API.STREAM.MSG.GET.{stream}"
    found = permissions.inspect(connection, call, [call])
    if found.level != "ok":
        message = (
            f"{found.message}: of copies that it drops, another publisher's message is not seen"
        )
        yield Finding("warning", f"stream {stream}", message, found.fix)
