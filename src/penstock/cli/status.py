"""`penstock status`: where slots and outboxes stand, what a run reports, and the health of both."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.common import CONFIG, LISTEN, AsJson, ConfigFile, StoreUrl, errors, size
from penstock.core.errors import CaptureError
from penstock.core.health import Failure, Health, Level, Part, run_part

if TYPE_CHECKING:
    from penstock.config.sources import OutboxSource
    from penstock.desired.with_file import Configured

Status = dict[str, Any]


def status(
    config: ConfigFile = CONFIG,
    listen: Annotated[
        str, typer.Option(help="Where `penstock run` serves HTTP, as host:port.")
    ] = LISTEN,
    store_url: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show each source's slot and lag, and what a running pipeline delivered."""
    from penstock.cli import status_tables
    from penstock.desired.with_file import configured

    with errors():
        report = collect(configured(config, store_url), listen)
    if as_json:
        typer.echo(json.dumps(report))
    else:
        status_tables.show(report)
    raise typer.Exit(int(not is_ready(report)))


def collect(found: Configured, listen: str) -> Status:
    """Return the slots and the outboxes' pipelines of a configuration, and what runs at `listen`.

    `running` is None where nothing answers; a slot, or an outbox's source, that cannot be read has an
    `error` in its place. A source that no sink takes from is not run, and has no slot.
    """
    from penstock.postgres.setup import slot_status
    from penstock.runtime import recovery

    config = found.config
    slots: dict[str, Any] = {}
    for name in config.running_sources:
        source = config.sources[name]
        try:
            slots[name] = dataclasses.asdict(slot_status(source)) | {"error": None}
        except CaptureError as error:
            slots[name] = {
                "slot": source.slot, "error": str(error), "code": error.code,
                "remedy": error.remedy,
            }  # fmt: skip
        if (gap := recovery.fault(config, name)) is not None:
            slots[name] |= {"error": str(gap), "code": gap.code, "remedy": gap.remedy}
    running, problem = _ask(listen)
    outboxes = {name: _outbox(source) for name, source in config.outboxes.items()}
    health = assess(slots, outboxes, running, problem, expected=bool(slots))
    reported = {part.subject for part in health.parts}
    unseen = [part for part in _unseen(found) if part.subject not in reported]
    health = Health((*health.parts, *unseen))
    return {
        "listen": listen, **health.as_json(), "slots": slots, "outboxes": outboxes,
        "running": running, "problem": problem,
    }  # fmt: skip


def _unseen(found: Configured) -> Iterator[Part]:
    """Yield what is wrong with the configuration, as it is seen from here."""
    if found.failure is not None:
        yield Part.failing("store", Level.FAILED, Failure.by(found.failure))
    for (kind, name), reason in found.refused.items():
        if kind not in ("source", "sink"):
            continue
        remedy = f"Correct it, or set what it needs in this environment (GET /v1/{kind}s/{name})."
        failure = Failure("refused", f"It can't be used here: {reason}.", remedy)
        yield Part.failing(f"{kind} {name}", Level.FAILED, failure)


def assess(
    slots: dict[str, Status],
    outboxes: dict[str, Status],
    running: Status | None,
    problem: str | None,
    *,
    expected: bool,
) -> Health:
    """Return the health that the run reports, and what is seen from here: slots and outboxes.

    `problem` is why nothing answers where `running` is None; that is one if a run is `expected`.
    """
    live = Health() if running is None else _reported(running)
    parts = list(live.parts)
    known = {(p.subject, p.code) for p in live.problems}
    if running is None and expected:
        remedy = "Start it with `penstock run`; where it runs elsewhere, name that with --listen."
        parts.append(run_part(Failure("not_running", problem or "", remedy)))
    for name, slot in slots.items():
        subject = f"source {name}"
        found = _slot_failure(slot)
        if found is None and running is not None:
            found = _reading_failure(name, slot, running, live)
        if found is not None and (subject, found[1].code) not in known:
            parts.append(Part.failing(f"slot {slot['slot']}", *found))
    for name, outbox in outboxes.items():
        if outbox["error"]:
            failed = Failure.of(outbox.get("code"), outbox["error"], outbox.get("remedy"))
            parts.append(Part.failing(f"source {name}", Level.FAILED, failed))
        for pipeline in outbox["pipelines"]:
            seen, of = _pipeline_failure(pipeline), pipeline["pipeline"]
            if seen is None:
                continue
            # A relay's run has the pipeline as a sink of its own.
            if not known & {(f"{kind} {of}", seen[1].code) for kind in ("sink", "pipeline")}:
                parts.append(Part.failing(f"pipeline {of}", *seen))
    return Health(tuple(parts))


def _reported(running: Status) -> Health:
    """Return the health that a run reports; one of another version may report none."""
    try:
        return Health.from_json(running)
    except (KeyError, TypeError, ValueError, AttributeError):
        failure = Failure(
            "no_health", "What runs does not report its health.",
            "Run the same version of penstock as this command's.",
        )  # fmt: skip
        return Health((run_part(failure),))


def _slot_failure(slot: Status) -> tuple[Level, Failure] | None:
    """Return what is wrong with a slot as the server has it."""
    if slot["error"] is not None:
        failure = Failure.of(slot["code"], slot["error"], slot.get("remedy"))
        return Level.FAILED, failure
    if slot["wal_status"] == "unreserved":
        return Level.DEGRADED, Failure(
            "slot_unreserved",
            f"Slot {slot['slot']} is about to be invalidated: Postgres may remove WAL that it needs at"
            f" the next checkpoint ({size(slot['retained_bytes'])} are held).",
            "Let the run catch up, or raise max_slot_wal_keep_size in Postgres' settings, at once.",
        )
    return None


def _reading_failure(
    source: str, slot: Status, running: Status, live: Health
) -> tuple[Level, Failure] | None:
    """Return that nothing reads a slot, though the run that answers reports nothing wrong with it."""
    part = next((part for part in live.parts if part.subject == f"source {source}"), None)
    if part is None and live.part("run").level is Level.READY:
        return Level.FAILED, Failure(
            "not_running", f"What runs has no source {source}.",
            "Restart it with this file, or name with --listen where the source runs.",
        )  # fmt: skip
    if part is None or part.level is not Level.READY or slot["active"]:
        return None
    if running["sources"].get(source, {}).get("state") != "streaming":
        return None  # it has just lost its connection, or begins anew: that is not a failure yet
    return Level.FAILED, Failure(
        "slot_inactive", f"Nothing reads slot {slot['slot']}, though its source runs.",
        "See whether the run has another url than this file, and its log.",
    )  # fmt: skip


def _pipeline_failure(pipeline: Status) -> tuple[Level, Failure] | None:
    """Return what is wrong with an enabled pipeline of an outbox, by `tide.relay_status`."""
    if not pipeline["enabled"] or not pipeline["error"]:
        return None
    code = str(pipeline["code"])
    if code == "no_relay" and not pipeline["pending"]:
        return None  # it is set up, and nothing waits for it
    moves = not code.startswith(("relay_", "no_relay")) or not pipeline["pending"]
    failure = Failure(code, pipeline["error"], pipeline["remedy"] or "")
    return Level.DEGRADED if moves else Level.FAILED, failure


def _outbox(source: OutboxSource) -> Status:
    """Return the pipelines of an outbox's source, each with how far it is, or the error."""
    from penstock.outbox.status import pipelines

    try:
        found = pipelines(source.address, source.relay_group)
    except CaptureError as error:
        remedy = error.remedy
        return {"error": str(error), "code": error.code, "remedy": remedy, "pipelines": []}
    return {"error": None, "pipelines": found}


def is_ready(status: Status) -> bool:
    """Return whether all is well and messages move; where something still starts they don't."""
    return bool(status["level"] == Level.READY.word)


def failure_text(pipeline: Status) -> str | None:
    """Return what keeps an enabled pipeline from moving, with the remedy."""
    found = _pipeline_failure(pipeline)
    return None if found is None else found[1].text


def _ask(listen: str) -> tuple[Status | None, str | None]:
    import urllib.error
    import urllib.request

    host, _, port = listen.rpartition(":")
    if not port.isdigit():
        return None, f"--listen {listen} is not host:port (as in 127.0.0.1:7380)."
    url = f"http://{host or '127.0.0.1'}:{port}/status"
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            body = json.load(answer)
    except (OSError, ValueError) as error:
        if isinstance(error, urllib.error.URLError) and isinstance(
            error.reason, ConnectionRefusedError
        ):
            return None, f"No pipeline runs at {listen}."
        return None, f"No answer from a pipeline at {listen}: {error}."
    if not isinstance(body, dict) or not isinstance(body.get("sources"), dict):
        return None, f"What answers at {listen} is not `penstock run`."
    kinds = {
        "sources": dict, "sinks": dict, "store": dict, "backfills": list, "relays": dict,
        "consumers": dict, "nats_consumers": dict, "syncs": dict, "level": str, "parts": dict,
        "problems": list,
    }  # fmt: skip
    return {key: body[key] for key, kind in kinds.items() if isinstance(body.get(key), kind)}, None
