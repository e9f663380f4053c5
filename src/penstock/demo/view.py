"""What the demo shows: progress, a live table (lines where there is no terminal), a summary."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from penstock.demo.ledger import Latency, Result, TableCount

_COLUMNS = ("committed", "delivered", "rows/s", "p50", "p99", "lag")
_LINE_EVERY = 2.0
_RATE_OVER = 3.0  # seconds that a rate is taken over


class View:
    """Prints to `console`; the live table needs a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()
        self._live: Live | None = None
        self._next_line = 0.0
        self._history: deque[tuple[float, dict[str, int]]] = deque()

    def step(self, text: str) -> None:
        """Show what the demo does now, with the seconds since its start."""
        seconds = time.monotonic() - self._started
        self._console.print(
            f"[dim]{seconds:5.1f} s[/]  {escape(text)}", highlight=False, soft_wrap=True
        )

    def fail(self, text: str) -> None:
        """Show why the demo cannot go on."""
        self.close()
        self._console.print(Text(text, style="red"), soft_wrap=True)

    def update(
        self,
        tables: Sequence[TableCount],
        events: TableCount,
        stream: Sequence[TableCount],
        workers: Sequence[int],
        records: TableCount,
        note: str,
    ) -> None:
        """Show where tables and API stand in JetStream, and what the workers have had of streams."""
        now = time.monotonic()
        counts = [*tables, events]
        rates = self._rates(now, counts)
        if self._console.is_terminal:
            table = _live_table(counts, rates)
            shown = Group(
                table,
                Text(_workers_line(stream, workers)),
                Text(_api_line("records", records)),
                Text(f"{now - self._started:5.1f} s  {note}", style="dim"),
            )
            if self._live is None:
                self._live = Live(shown, console=self._console, auto_refresh=False)
                self._live.start()
            self._live.update(shown, refresh=True)
        elif now >= self._next_line:
            self._next_line = now + _LINE_EVERY
            self.step(_line(tables, sum(rates[count.table] for count in tables), note))
            self.step(_workers_line(stream, workers))
            self.step(_api_line("events", events))
            self.step(_api_line("records", records))

    def _rates(self, now: float, counts: Sequence[TableCount]) -> dict[str, float]:
        self._history.append((now, {count.table: count.delivered for count in counts}))
        while now - self._history[0][0] > _RATE_OVER and len(self._history) > 2:
            self._history.popleft()
        then, before = self._history[0]
        return {
            count.table: (count.delivered - before.get(count.table, 0)) / (now - then)
            if now > then
            else 0.0
            for count in counts
        }

    def close(self) -> None:
        """Leave the live table as it stands."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def summary(self, results: Mapping[str, Result]) -> None:
        """Compare what was committed with what arrived, by the way it took."""
        self.close()
        table = Table(title="What was committed, and what arrived", title_justify="left")
        table.add_column("")
        for way in results:
            table.add_column(way, justify="right")

        def row(name: str, show: Callable[[Result], str | Text]) -> None:
            table.add_row(name, *map(show, results.values()))

        row("changes committed", lambda r: f"{r.committed:,}")
        row("delivered", lambda r: f"{r.delivered:,}")
        row("lost", lambda r: _verdict(r.lost))
        row("out of order", lambda r: _verdict(r.out_of_order))
        row("received, never committed", lambda r: _verdict(r.unexpected))
        row("duplicates", lambda r: f"{r.duplicates:,}")
        row("changes per second", lambda r: f"{r.rows_per_second:,.0f}")
        row("latency p50, to consumer", lambda r: _ms(r.latency.p50))
        row("latency p99", lambda r: _ms(r.latency.p99))
        self._console.print(table)
        for way, result in results.items():
            for example in result.examples:
                self._console.print(Text(f"  {way}: {example}", style="red"), soft_wrap=True)


def _live_table(counts: Sequence[TableCount], rates: dict[str, float]) -> Table:
    table = Table(title="Postgres and an API → Spark → JetStream", title_justify="left")
    table.add_column("", min_width=10)
    # Wide enough that the table doesn't jump, narrow enough for 80 columns.
    for name, width in zip(_COLUMNS, (9, 9, 6, 8, 8, 6), strict=True):
        table.add_column(name, justify="right", min_width=width)
    for count in counts:
        table.add_row(
            count.table,
            f"{count.committed:,}",
            f"{count.delivered:,}",
            f"{rates[count.table]:,.0f}",
            _ms(count.latency.p50),
            _ms(count.latency.p99),
            f"{count.lag:,}",
        )
    table.add_section()
    table.add_row(
        "all",
        f"{sum(count.committed for count in counts):,}",
        f"{sum(count.delivered for count in counts):,}",
        f"{sum(rates.values()):,.0f}",
        "",
        "",
        f"{sum(count.lag for count in counts):,}",
        style="bold",
    )
    return table


def _workers_line(stream: Sequence[TableCount], workers: Sequence[int]) -> str:
    worst = max((c.latency.p50 for c in stream if c.latency.p50 is not None), default=None)
    each = ", ".join(f"worker {n} took {count:,}" for n, count in enumerate(workers, 1))
    return f"stream: {each}, lag {sum(c.lag for c in stream):,}, p50 {_ms(worst)}"


def _api_line(kind: str, count: TableCount) -> str:
    # A record's version that a newer one has replaced never comes by itself.
    delivered = "delivered or replaced" if kind == "records" else "delivered"
    return (
        f"API {kind}: {count.committed:,} versions, {count.delivered:,} {delivered}, "
        f"lag {count.lag:,}, p50 {_ms(count.latency.p50)}"
    )


def _line(tables: Sequence[TableCount], rate: float, note: str) -> str:
    committed = sum(count.committed for count in tables)
    delivered = sum(count.delivered for count in tables)
    worst = Latency(
        max((c.latency.p50 for c in tables if c.latency.p50 is not None), default=None),
        max((c.latency.p99 for c in tables if c.latency.p99 is not None), default=None),
    )
    return (
        f"{note}: committed {committed}, delivered {delivered}, lag {committed - delivered}, "
        f"{rate:.0f} rows/s, p50 {_ms(worst.p50)}, p99 {_ms(worst.p99)}"
    )


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f} ms"


def _verdict(count: int) -> Text:
    return Text(f"{count:,}", style="bold red" if count else "bold green")
