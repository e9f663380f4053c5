"""Follows backfills: bars on a terminal, elsewhere a line for each change."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

import typer
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.backfill.pace import Pace
from penstock.backfill.request import Backfill

_POLL_SECONDS: Final = 0.5
_LINE_SECONDS: Final = 5.0


def follow(find: Callable[[], Sequence[Backfill]]) -> Sequence[Backfill]:
    """Show the backfills that `find` returns until all of them have ended, and return them."""
    return _on_terminal(find) if sys.stdout.isatty() else _as_lines(find)


def line(found: Backfill, pace: Pace) -> str:
    """Return how far a backfill is, in a line."""
    parts = [f"{found.id} {found.table} to {found.sink}: {found.state}", _rows(found)]
    if found.state == "running":
        parts.append(f"{pace.rate:,.0f} rows/s")
        if (left := pace.left(found.rows_done, found.rows_total)) is not None:
            parts.append(f"{duration(left)} left")
    if found.error:
        parts.append(found.error)
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """Return a time as people read it: `1:02:03`, or `2:03` below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _rows(found: Backfill) -> str:
    of = (
        ""
        if found.rows_total is None
        else f" of {'' if _done(found) else 'about '}{found.rows_total:,}"
    )
    return f"{found.rows_done:,}{of} rows"


def _done(found: Backfill) -> bool:
    return found.state == "done"


def _as_lines(find: Callable[[], Sequence[Backfill]]) -> Sequence[Backfill]:
    paces: dict[int, Pace] = {}
    shown: dict[int, tuple[object, ...]] = {}
    shown_at: dict[int, float] = {}
    while True:
        found, now = find(), time.monotonic()
        for each in found:
            pace = paces.setdefault(each.id, Pace())
            pace.add(now, each.rows_done)
            news = (each.state, each.error)
            old = shown.get(each.id)
            moved = old is not None and each.rows_done != old[2]
            due = now - shown_at.get(each.id, 0.0) >= _LINE_SECONDS
            if old is None or news != old[:2] or (moved and due):
                typer.echo(line(each, pace))
                shown[each.id], shown_at[each.id] = (*news, each.rows_done), now
        if not any(each.is_open for each in found):
            return found
        time.sleep(_POLL_SECONDS)


def _on_terminal(find: Callable[[], Sequence[Backfill]]) -> Sequence[Backfill]:
    paces: dict[int, Pace] = {}
    with Live(console=Console(highlight=False), auto_refresh=False) as live:
        while True:
            found, now = find(), time.monotonic()
            for each in found:
                paces.setdefault(each.id, Pace()).add(now, each.rows_done)
            live.update(_bars(found, paces), refresh=True)
            if not any(each.is_open for each in found):
                return found
            time.sleep(_POLL_SECONDS)


def _bars(found: Sequence[Backfill], paces: dict[int, Pace]) -> Table:
    table = Table.grid(padding=(0, 2))
    for each in found:
        pace = paces[each.id]
        total = each.rows_total or 0
        running = each.state == "running"
        left = pace.left(each.rows_done, each.rows_total) if running else None
        table.add_row(
            Text(f"{each.id} {each.table} to {each.sink}"),
            ProgressBar(
                total or 1, (total or 1) if _done(each) else min(each.rows_done, total), width=24
            ),
            Text(_rows(each)),
            Text(f"{pace.rate:,.0f} rows/s" if running else each.state),
            Text(f"{duration(left)} left" if left is not None else each.error or ""),
        )
    return table
