"""`penstock status`: where slots and outboxes stand, and what a running pipeline reports."""

from __future__ import annotations

import dataclasses
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.cli.common import local_time, table_console
from penstock.config.file import Config, OutboxSource
from penstock.core.errors import CaptureError
from penstock.core.health import Failure, Health, Level, Part, run_part
from penstock.outbox.status import pipelines
from penstock.postgres.setup import slot_status
from penstock.runtime import recovery

Status = dict[str, Any]


def collect(config: Config, listen: str) -> Status:
    """Return the slots and the outboxes' pipelines of a configuration, and what runs at `listen`.

    `running` is None where nothing answers; a slot, or an outbox's source, that cannot be read has an
    `error` in its place.
    """
    slots: dict[str, Any] = {}
    for name, source in config.sources.items():
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
    health = assess(slots, outboxes, running, problem, expected=bool(config.sources))
    return {
        "listen": listen, **health.as_json(), "slots": slots, "outboxes": outboxes,
        "running": running, "problem": problem,
    }  # fmt: skip


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
        found = _slot_failure(name, slot)
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


def _slot_failure(source: str, slot: Status) -> tuple[Level, Failure] | None:
    """Return what is wrong with a slot as the server has it."""
    if slot["error"] is not None:
        failure = Failure.of(slot["code"], slot["error"], slot.get("remedy"))
        return Level.FAILED, failure
    name, keep = slot["slot"], "max_slot_wal_keep_size"
    if slot["wal_status"] == "lost":
        return Level.FAILED, Failure(
            "slot_invalidated",
            f"Slot {name} is invalidated: Postgres has removed WAL that it needed, and changes after"
            f" {slot['confirmed_flush_lsn']} are lost to it.",
            f"penstock recover {source}",
        )
    if slot["wal_status"] == "unreserved":
        return Level.DEGRADED, Failure(
            "slot_unreserved",
            f"Slot {name} is about to be invalidated: Postgres may remove WAL that it needs at the"
            f" next checkpoint ({size(slot['retained_bytes'])} are held).",
            f"Let the run catch up, or raise {keep} in Postgres' settings, at once.",
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
    try:
        found = pipelines(source.url.get_secret_value(), source.relay_group)
    except CaptureError as error:
        remedy = error.remedy
        return {"error": str(error), "code": error.code, "remedy": remedy, "pipelines": []}
    return {"error": None, "pipelines": found}


def is_ready(status: Status) -> bool:
    """Return whether all is well and messages move; where something still starts they don't."""
    return bool(status["level"] == Level.READY.word)


def show(status: Status) -> None:
    """Print a status for people."""
    console = table_console()
    running = status["running"] or {}
    slots = Table()
    for heading in ("source", "slot", "state", "confirmed", "lag", "seconds", "WAL held"):
        slots.add_column(heading, overflow="fold")
    for name, slot in status["slots"].items():
        live = running.get("sources", {}).get(name, {})
        state = live.get("state") or ("read" if slot.get("active") else "not read")
        cells = [name, slot["slot"], "error" if slot["error"] else state]
        if slot["error"] is None:
            cells.append(slot["confirmed_flush_lsn"] or "-")
            cells += [size(slot["lag_bytes"]), _seconds(slot["lag_seconds"])]
            held = "" if slot["wal_status"] == "reserved" else f" ({slot['wal_status']})"
            cells.append(size(slot["retained_bytes"]) + held)
        slots.add_row(*map(Text, cells))
    if status["slots"]:
        console.print(slots)
    if status["outboxes"]:
        _show_outboxes(console, status["outboxes"])
    if status["running"] is None:
        # With a source of Postgres' that is among the problems.
        if not any(problem["code"] == "not_running" for problem in status["problems"]):
            console.print(Text(status["problem"]), soft_wrap=True)
    else:
        sinks = Table("sink", "delivered", "duplicates", "dead letters", "retries", "state")
        for name, sink in running.get("sinks", {}).items():
            counts = [
                sink.get(k, 0) for k in ("delivered", "duplicates", "dead_lettered", "retries")
            ]
            sinks.add_row(*map(Text, [name, *(f"{c:,}" for c in counts), _state(sink)]))
        if sinks.row_count:
            console.print(sinks)
        _show_consumers(console, running.get("consumers", {}))
        _show_backfills(console, running.get("backfills", []))
    for title, warning in _warnings(status):
        console.print(Text(f"! {title}: {warning}"), soft_wrap=True)
    for problem in status["problems"]:
        mark = "✗" if problem["level"] == "failed" else "!"
        since = local_time(problem["since"])
        console.print(Text(f"{mark} {problem['subject']}: {problem['cause']}"
                           f"{f' (since {since})' if since else ''}"), soft_wrap=True)  # fmt: skip
        console.print(Text(f"    {problem['remedy']}", style="dim"), soft_wrap=True)
    console.print(Text(f"{status['level']}"), soft_wrap=True)


def _show_outboxes(console: Console, outboxes: dict[str, Status]) -> None:
    table = Table(
        "source", "pipeline", "for", "group", "state", "delivered", "waiting", "since", "seen",
        "dead letters",
    )  # fmt: skip
    for name, outbox in outboxes.items():
        for each in outbox["pipelines"]:
            since, seen = (local_time(each[k]) or "-" for k in ("pending_since", "at"))
            waiting = "-" if each["pending"] is None else str(each["pending"])
            cells = [name, each["pipeline"], each["outbox"] or each["inbox"], each["relay_group"]]
            cells += [pipeline_state(each), str(each["delivered"]), waiting, since, seen]
            cells.append(f"{each['dead_letters']:,}")
            table.add_row(*map(Text, cells))
        if not outbox["pipelines"]:
            table.add_row(name, Text("error" if outbox["error"] else "none"))
    console.print(table)


def pipeline_state(pipeline: Status) -> str:
    """Return how a pipeline of `tide.relay_status` is, in a word or two."""
    if pipeline["state"] == "dead":
        return f"dead since {local_time(pipeline['relay']['heartbeat_at'])}"
    return str(pipeline["state"])


def _show_consumers(console: Console, consumers: dict[str, Status]) -> None:
    if not consumers:
        return
    numbers = ("lag_messages", "in_flight", "waiting_for_retry", "redeliveries", "failures")
    table = Table(
        "consumer", "stream", "lag", "seconds", "in flight", "to retry", "redeliveries",
        "failures", "dead letters", "state",
    )  # fmt: skip
    for name, each in consumers.items():
        lag, *others = (f"{each[key]:,}" for key in (*numbers, "dead_letters"))
        cells = [name, each["stream"], lag, f"{each['lag_seconds']:,.1f}", *others, each["state"]]
        table.add_row(*map(Text, cells))
    console.print(table)


def _show_backfills(console: Console, backfills: list[Status]) -> None:
    if not backfills:
        return
    table = Table("backfill", "table", "sink", "rows", "of about", "state")
    for each in backfills:
        total = each["rows_total"]
        cells = [str(each["number"]), each["table"], each["sink"], f"{each['rows_done']:,}"]
        cells += ["-" if total is None else f"{total:,}", each["state"]]
        table.add_row(*map(Text, cells))
    console.print(table)


def _warnings(status: Status) -> Iterator[tuple[str, str]]:
    """Yield what may be wrong with pipelines, each under its title."""
    for outbox in status["outboxes"].values():
        for pipeline in outbox["pipelines"]:
            if (waiting := dead_letters(pipeline)) is not None:
                yield f"pipeline {pipeline['pipeline']}", waiting
    for groups in (status["running"] or {}).get("relays", {}).values():
        for group in groups.values():
            for name, pipeline in group.get("pipelines", {}).items():
                if pipeline.get("warning"):
                    yield f"pipeline {name}", pipeline["warning"]


def failure_text(pipeline: Status) -> str | None:
    """Return what keeps an enabled pipeline from moving, with the remedy."""
    found = _pipeline_failure(pipeline)
    return None if found is None else found[1].text


def dead_letters(pipeline: Status) -> str | None:
    """Return how many dead letters of a pipeline wait, and the cause of the newest."""
    count = pipeline["dead_letters"]
    if not count:
        return None
    since = local_time(pipeline["dead_letter_at"])
    return (
        f"{count:,} dead letter{'s' * (count > 1)}, the newest of {since}: {pipeline['dead_letter']};"
        f" penstock dead-letters list --url … --sink {pipeline['pipeline']}"
    )


def _state(sink: Status) -> str:
    """Return how a sink is, in a word."""
    state = str(sink.get("state", "attached"))
    return state if state != "attached" else "error" if sink.get("error") else "ok"


def _ask(listen: str) -> tuple[Status | None, str | None]:
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
        "consumers": dict, "level": str, "parts": dict, "problems": list,
    }  # fmt: skip
    return {key: body[key] for key, kind in kinds.items() if isinstance(body.get(key), kind)}, None


def size(count: int | None) -> str:
    """Return a number of bytes as people read it."""
    if count is None:
        return "-"
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f}"
