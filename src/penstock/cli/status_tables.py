"""What `penstock status` prints for people: a table of each kind of part, and the problems."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.text import Text

from penstock.cli.common import local_time, print_table, size, table_console

Status = dict[str, Any]


def show(status: Status) -> None:
    """Print a status for people."""
    console = table_console()
    if status["slots"]:
        _show_slots(status["slots"], (status["running"] or {}).get("sources", {}))
    if status["outboxes"]:
        _show_outboxes(status["outboxes"])
    if status["running"] is not None:
        _show_sinks(status["running"].get("sinks", {}))
        _show_consumers(status["running"].get("consumers", {}))
        _show_nats_consumers(status["running"].get("nats_consumers", {}))
        _show_backfills(status["running"].get("backfills", []))
        _show_syncs(status["running"].get("syncs", {}))
    # With a source of Postgres' that is among the problems.
    elif not any(problem["code"] == "not_running" for problem in status["problems"]):
        console.print(Text(status["problem"]), soft_wrap=True)
    for title, warning in _warnings(status):
        console.print(Text(f"! {title}: {warning}"), soft_wrap=True)
    for problem in status["problems"]:
        mark = "✗" if problem["level"] == "failed" else "!"
        since = local_time(problem["since"])
        console.print(Text(f"{mark} {problem['subject']}: {problem['cause']}"
                           f"{f' (since {since})' if since else ''}"), soft_wrap=True)  # fmt: skip
        console.print(Text(f"    {problem['remedy']}", style="dim"), soft_wrap=True)
    console.print(Text(f"{status['level']}"), soft_wrap=True)


def _show_slots(slots: dict[str, Status], running: dict[str, Status]) -> None:
    rows = []
    for name, slot in slots.items():
        live = running.get(name, {})
        state = live.get("state") or ("read" if slot.get("active") else "not read")
        if slot["error"] is not None:
            rows.append([name, slot["slot"], "error", "", "", "", ""])
            continue
        held = "" if slot["wal_status"] == "reserved" else f" ({slot['wal_status']})"
        rows.append(
            [
                name, slot["slot"], state, slot["confirmed_flush_lsn"] or "-",
                size(slot["lag_bytes"]),
                "-" if slot["lag_seconds"] is None else f"{slot['lag_seconds']:.1f}",
                size(slot["retained_bytes"]) + held,
            ]
        )  # fmt: skip
    print_table(("source", "slot", "state", "confirmed", "lag", "seconds", "WAL held"), rows)


def _show_outboxes(outboxes: dict[str, Status]) -> None:
    rows = []
    for name, outbox in outboxes.items():
        for each in outbox["pipelines"]:
            since, seen = (local_time(each[k]) or "-" for k in ("pending_since", "at"))
            waiting = "-" if each["pending"] is None else each["pending"]
            cells = [name, each["pipeline"], each["outbox"] or each["inbox"], each["relay_group"]]
            cells += [pipeline_state(each), each["delivered"], waiting, since, seen]
            rows.append([*cells, f"{each['dead_letters']:,}"])
        if not outbox["pipelines"]:
            rows.append([name, "error" if outbox["error"] else "none", *[""] * 8])
    headings = (
        "source", "pipeline", "for", "group", "state", "delivered", "waiting", "since", "seen",
        "dead letters",
    )  # fmt: skip
    print_table(headings, rows)


def pipeline_state(pipeline: Status) -> str:
    """Return how a pipeline of `tide.relay_status` is, in a word or two."""
    if pipeline["state"] == "dead":
        return f"dead since {local_time(pipeline['relay']['heartbeat_at'])}"
    return str(pipeline["state"])


def _show_sinks(sinks: dict[str, Status]) -> None:
    if sinks:
        counts = ("delivered", "duplicates", "dead_lettered", "retries")
        print_table(
            ("sink", "delivered", "duplicates", "dead letters", "retries", "state"),
            [[n, *(f"{s.get(k, 0):,}" for k in counts), _state(s)] for n, s in sinks.items()],
        )


def _show_consumers(consumers: dict[str, Status]) -> None:
    if not consumers:
        return
    numbers = ("in_flight", "waiting_for_retry", "redeliveries", "failures", "dead_letters")
    headings = (
        "consumer", "stream", "lag", "seconds", "in flight", "to retry", "redeliveries",
        "failures", "dead letters", "state",
    )  # fmt: skip
    rows = []
    for name, each in consumers.items():
        lag = [f"{each['lag_messages']:,}", f"{each['lag_seconds']:,.1f}"]
        rows.append([name, each["stream"], *lag, *(f"{each[k]:,}" for k in numbers), each["state"]])
    print_table(headings, rows)


def _show_nats_consumers(consumers: dict[str, Status]) -> None:
    if consumers:
        counts = ("lag_messages", "delivered", "duplicates", "dead_lettered", "retries")
        print_table(
            ("NATS consumer", "stream", "lag", "delivered", "duplicates", "dead letters", "retries",
             "state"),
            [
                [n, c["stream"], *(f"{c.get(k, 0):,}" for k in counts), _state(c)]
                for n, c in consumers.items()
            ],
        )  # fmt: skip


def _show_backfills(backfills: list[Status]) -> None:
    if not backfills:
        return
    rows = []
    for each in backfills:
        total = "-" if each["rows_total"] is None else f"{each['rows_total']:,}"
        done = f"{each['rows_done']:,}"
        rows.append([each["number"], each["table"], each["sink"], done, total, each["state"]])
    print_table(("backfill", "table", "sink", "rows", "of about", "state"), rows)


def _show_syncs(syncs: dict[str, Status]) -> None:
    rows = []
    for name, sync in syncs.items():
        for id_, each in sync["collections"].items():
            backfill = each["backfill"]
            phase = each["phase"]
            if backfill is not None:
                ends = local_time(backfill["estimated_end"])
                phase = f"{phase} {backfill['share']:.0%}{f', until {ends}' if ends else ''}"
            counts = ("records_read", "inserted", "changed", "deleted", "unreadable", "requests")
            lag = "-" if each["lag_seconds"] is None else f"{each['lag_seconds']:,.1f}"
            state = "ok" if each["health"] is None else each["health"]["code"]
            cells = [name, id_, phase, *(f"{each[k]:,}" for k in counts), lag]
            rows.append([*cells, local_time(each["next_run"]) or "-", state])
    if rows:
        headings = (
            "sync", "collection", "phase", "read", "inserted", "changed", "deleted", "dead letters",
            "requests", "seconds ago", "next", "state",
        )  # fmt: skip
        print_table(headings, rows)


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
