"""What is shown of a collection of a sync: in the store, `/status`, `/metrics`, the CLI. No I/O."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from penstock.core.health import Failure, Level, Part, iso
from penstock.syncs import deletes
from penstock.syncs.entry import Entry
from penstock.syncs.progress import CollectionFailure, CollectionProgress
from penstock.syncs.sync import SyncSettings

Shown = dict[str, Any]


def shown(entry: Entry, now: float) -> Shown:
    """Return it as JSON; times are ISO 8601."""
    progress, counts = entry.progress, entry.progress.counts
    facts, failure = progress.facts, failure_of(entry.sync, progress)
    at = entry.look_at()
    return {
        "phase": phase_of(entry),
        "initial_backfill_completed_at": iso(progress.backfilled_at),
        "health": None if failure is None else _health(failure),
        "last_run": iso(progress.polled_at),
        "last_success": iso(progress.succeeded_at),
        "next_run": None if at is None else iso(max(at, now)),
        "lag_seconds": None if progress.polled_at is None else round(now - progress.polled_at, 1),
        "records_read": counts.read,
        "inserted": counts.inserted,
        "changed": counts.changed,
        "deleted": counts.deleted,
        "unreadable": counts.unreadable,
        "skipped": counts.skipped,
        "requests": counts.requests,
        "deletes": None if facts is None else facts.deletes.value,
        "delete_notes": "" if facts is None else facts.notes,
        "backfill": _backfill(progress, now),
    }


def phase_of(entry: Entry) -> str:
    """Return what is done with a collection, in a word."""
    if not entry.sync.active:
        return "disabled"
    if entry.blocked:
        return "stopped"
    progress = entry.progress
    if progress.backfill is not None or progress.backfilled_at is None:
        return "backfill"
    return "asks" if progress.asks is not None else "polling"


def failure_of(sync: SyncSettings, progress: CollectionProgress) -> Failure | None:
    """Return what is wrong with a collection, the worst first; None where all is well."""
    found: list[CollectionFailure] = sorted(
        progress.failed.values(), key=lambda failed: failed.credential is None
    )
    if found:
        of = found[0]
        return Failure(of.code, of.cause, of.remedy or "It is tried again by itself.", of.since)
    if (asks := progress.asks) is not None:
        cause = deletes.question(asks.known, asks.missing, sync.max_deleted_share)
        agree, again = (f"penstock sync {verb} {sync.name}" for verb in ("resume", "run"))
        remedy = f"Agree: {agree}. Or sweep again: {again}"
        return Failure("mass_delete", cause, remedy, asks.at)
    if (stuck := progress.stuck) is not None:
        return Failure(stuck.code, stuck.cause, stuck.remedy, stuck.since)
    return None


def part_of(sync: str, collections: dict[str, Shown]) -> Part:
    """Return how a sync is; one alone keeps no other from going on."""
    subject = f"sync {sync}"
    for of in collections.values():
        if (health := of["health"]) is not None:
            since = datetime.fromisoformat(health["since"]).timestamp()
            failure = Failure(health["code"], health["cause"], health["remedy"], since)
            return Part.failing(subject, Level.DEGRADED, failure)
    return Part(subject)


def _health(failure: Failure) -> Shown:
    return {
        "code": failure.code, "cause": failure.cause, "remedy": failure.remedy,
        "since": iso(failure.since),
    }  # fmt: skip


def _backfill(progress: CollectionProgress, now: float) -> Shown | None:
    run = progress.backfill
    if run is None:
        return None
    share, seconds = run.share, now - run.started_at
    ends = run.started_at + seconds / share if share else None
    return {
        "started_at": iso(run.started_at), "read": run.read, "share": round(share, 3),
        "estimated_end": iso(ends),
    }  # fmt: skip
