"""`penstock status`: where slots and outboxes stand, and what a running pipeline says of itself."""

from __future__ import annotations

import dataclasses
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from penstock.cli_common import local_time, table_console
from penstock.config import Config, OutboxSource

if TYPE_CHECKING:
    from rich.console import Console

Status = dict[str, Any]


def collect(config: Config, listen: str) -> Status:
    """Return the slots and the outboxes' pipelines of a configuration, and what runs at `listen`.

    `running` is None where nothing answers; a slot, or an outbox's source, that cannot be read has an
    `error` in its place.
    """
    from penstock.postgres.errors import CaptureError  # noqa: PLC0415 - psycopg takes a while
    from penstock.postgres.setup import slot_status  # noqa: PLC0415

    slots: dict[str, Any] = {}
    for name, source in config.sources.items():
        try:
            slots[name] = dataclasses.asdict(slot_status(source)) | {"error": None}
        except CaptureError as error:
            slots[name] = {"slot": source.slot, "error": str(error), "code": error.code}
    running, problem = _ask(listen)
    outboxes = {name: _outbox(source) for name, source in config.outboxes.items()}
    return {
        "listen": listen, "slots": slots, "outboxes": outboxes, "running": running,
        "problem": problem,
    }  # fmt: skip


def _outbox(source: OutboxSource) -> Status:
    """Return the pipelines of an outbox's source, each with how far it is, or the error."""
    from penstock.outbox.look import pipelines  # noqa: PLC0415
    from penstock.postgres.errors import CaptureError  # noqa: PLC0415

    try:
        found = pipelines(source.url.get_secret_value(), source.relay_group)
    except CaptureError as error:
        return {"error": str(error), "code": error.code, "pipelines": []}
    return {"error": None, "pipelines": found}


def has_errors(status: Status) -> bool:
    """Tell whether a slot, a source, a sink or the store is in trouble."""
    return any(
        part.get("error") or part.get("state") in ("behind", "detached")
        for _, part in _parts(status)
    )


def show(status: Status) -> None:
    """Print a status for people."""
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

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
        _show_backfills(console, running.get("backfills", []))
    for title, part in _parts(status):
        if part.get("state") in ("behind", "detached"):
            since, waiting = str(part["since"])[:19], part["backlog"]
            told = f"{part['state']} since {since}Z, {waiting} messages wait in the store"
            console.print(Text(f"! {title}: {told}"), soft_wrap=True)
        if part.get("warning"):
            console.print(Text(f"! {title}: {part['warning']}"), soft_wrap=True)
        if part.get("error"):
            console.print(Text(f"✗ {title}: {part['error']}"), soft_wrap=True)


def _show_outboxes(console: Console, outboxes: dict[str, Status]) -> None:
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(
        "source", "pipeline", "for", "group", "state", "delivered", "waiting", "since", "seen"
    )  # fmt: skip
    for name, outbox in outboxes.items():
        for each in outbox["pipelines"]:
            since, seen = (local_time(each[k]) or "-" for k in ("pending_since", "at"))
            waiting = "-" if each["pending"] is None else str(each["pending"])
            cells = [name, each["pipeline"], each["outbox"] or each["inbox"], each["relay_group"]]
            cells += [pipeline_state(each), str(each["delivered"]), waiting, since, seen]
            table.add_row(*map(Text, cells))
        if not outbox["pipelines"]:
            table.add_row(name, Text("error" if outbox["error"] else "none"))
    console.print(table)


def pipeline_state(pipeline: Status) -> str:
    """Return how a pipeline of `tide.relay_status` is, in a word or two."""
    if not pipeline["enabled"]:
        return "disabled"
    return str(pipeline["state"] or "no relay yet")


def _show_backfills(console: Console, backfills: list[Status]) -> None:
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    if not backfills:
        return
    table = Table("backfill", "table", "sink", "rows", "of about", "state")
    for each in backfills:
        total = each["rows_total"]
        cells = [str(each["number"]), each["table"], each["sink"], f"{each['rows_done']:,}"]
        cells += ["-" if total is None else f"{total:,}", each["state"]]
        table.add_row(*map(Text, cells))
    console.print(table)


def _parts(status: Status) -> Iterator[tuple[str, Status]]:
    """Yield what may be in trouble, each under its title."""
    running = status["running"] or {}
    for name, slot in status["slots"].items():
        yield f"source {name}", slot
    for name, outbox in status["outboxes"].items():
        yield f"source {name}", outbox
        for pipeline in outbox["pipelines"]:
            yield f"pipeline {pipeline['pipeline']}", {"error": trouble(pipeline)}
    for groups in running.get("relays", {}).values():
        for group_name, group in groups.items():
            yield f"relay group {group_name}", group
            for name, of_run in group.get("pipelines", {}).items():
                yield f"pipeline {name}", {"warning": of_run.get("warning")}
    for kind in ("sources", "sinks"):
        for name, part in running.get(kind, {}).items():
            yield f"{kind[:-1]} {name}", part
    for backfill in running.get("backfills", []):
        yield f"backfill {backfill['number']}", backfill
    yield "store", running.get("store", {})


def trouble(pipeline: Status) -> str | None:
    """Return what an enabled pipeline stands at, with the remedy."""
    if not pipeline["enabled"] or not pipeline["error"]:
        return None
    return f"{pipeline['error']} {pipeline['remedy'] or ''}".strip()


def _state(sink: Status) -> str:
    """Return how a sink is, in a word."""
    state = str(sink.get("state", "attached"))
    return state if state != "attached" else "error" if sink.get("error") else "ok"


def _ask(listen: str) -> tuple[Status | None, str | None]:
    host, _, port = listen.rpartition(":")
    if not port.isdigit():
        return None, f"--listen {listen} is not host:port (as in 127.0.0.1:7380)"
    url = f"http://{host or '127.0.0.1'}:{port}/status"
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            body = json.load(answer)
    except (OSError, ValueError) as error:
        if isinstance(error, urllib.error.URLError) and isinstance(
            error.reason, ConnectionRefusedError
        ):
            return None, f"no pipeline runs at {listen}: start it with `penstock run`"
        return None, f"no answer from a pipeline at {listen}: {error}"
    if not isinstance(body, dict) or not isinstance(body.get("sources"), dict):
        return None, f"what answers at {listen} is not `penstock run`"
    kinds = {"sources": dict, "sinks": dict, "store": dict, "backfills": list, "relays": dict}
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
