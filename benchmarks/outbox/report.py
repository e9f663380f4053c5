"""What the benchmarks of the outbox found, as tables in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.drain import SHAPES, Drained
from benchmarks.latency import Delayed
from benchmarks.outbox.publish import BULK, BULK_ROWS, Bulk, Published
from benchmarks.outbox.relay import PLAIN, VARIANTS, Relayed
from benchmarks.report import at_least, at_most, table, verdict_table
from benchmarks.resources import LOAD_RATE

_BAR, _BAR_RATIO = 20_000, 0.7


def published(results: Sequence[Published], bulks: Sequence[Bulk], seconds: float) -> str:
    """Return the medians of publishing, and its ratio to an INSERT."""
    if not results:
        return ""
    lines = []
    for call, connections in dict.fromkeys((r.call, r.connections) for r in results):
        mine = [r for r in results if (r.call, r.connections) == (call, connections)]
        publish, insert = (
            statistics.median(getattr(r, name) for r in mine) for name in ("publish", "insert")
        )
        lines.append(
            [
                f"{call}; connections: {connections}",
                f"{publish:,.0f}",
                f"{insert:,.0f}",
                f"{publish / insert:.2f}",
            ]
        )
    in_bulk = []
    for way, note in BULK.items():
        rates = [b.rate for b in bulks if b.way == way]
        if rates:
            rate = statistics.median(rates)
            in_bulk.append([note, f"{rate:,.0f}", f"{1e6 / rate:.1f}"])
    header = ["a transaction each", "publishes/s", "INSERTs/s", "publish / INSERT"]
    return (
        f"## `tide.outbox_publish` beside a plain INSERT\n\nThe INSERT is into a table of the same"
        f" columns, defaults and indexes. pgbench, prepared statements, {seconds:.0f} s each.\n\n"
        f"{table(header, lines)}\n\n"
        f"{table([f'{BULK_ROWS:,} rows in one transaction', 'rows/s', 'µs a row'], in_bulk)}\n"
    )


def relayed(results: Sequence[Relayed], drained: Sequence[Drained], rows: int, rounds: int) -> str:
    """Return the medians of the relay beside those of the drain of a table."""
    if not results:
        return ""
    notes = {variant.name: variant.note for variant in VARIANTS}
    lines, verdicts = [], []
    for shape in dict.fromkeys(r.shape for r in results):
        of_drain = [d for d in drained if d.shape == shape]
        drain = statistics.median(d.rate for d in of_drain) if of_drain else 0.0
        if of_drain:
            lines.append(
                [
                    f"drain of a table, {SHAPES[shape]} a transaction",
                    f"{drain:,.0f}",
                    f"{min(d.rate for d in of_drain):,.0f} - {max(d.rate for d in of_drain):,.0f}",
                    "1.00",
                    "",
                    f"{statistics.median(d.wall_s for d in of_drain):.1f}",
                    f"{of_drain[0].body_bytes:.0f}",
                ]
            )
        for name in dict.fromkeys(r.variant for r in results):
            mine = [r for r in results if (r.shape, r.variant) == (shape, name)]
            if not mine:
                continue
            rate = statistics.median(r.rate for r in mine)
            lines.append(
                [
                    f"{name}: {notes[name]}, {SHAPES[shape]} a transaction",
                    f"{rate:,.0f}",
                    f"{min(r.rate for r in mine):,.0f} - {max(r.rate for r in mine):,.0f}",
                    f"{rate / drain:.2f}" if drain else "",
                    f"{statistics.median(r.cpu_us for r in mine):.1f}",
                    f"{statistics.median(r.wall_s for r in mine):.1f}",
                    f"{mine[0].body_bytes:.0f}",
                ]
            )
            if drain and name == PLAIN:
                bar = min(_BAR_RATIO, _BAR / drain)
                what = f"{SHAPES[shape]} a transaction: times the drain, or 20,000 msgs/s"
                verdicts.append(at_least(what, rate / drain, round(bar, 2), _BAR_RATIO))
    header = ["relay", "msgs/s (median)", "range", "/ drain", "CPU of the relay, µs a message"]
    return (
        f"## Relay of {rows:,} messages into JetStream, {rounds} rounds\n\n"
        f"{table([*header, 'wall s', 'body, bytes'], lines)}\n\n{verdict_table(verdicts)}"
    )


def delayed(results: Sequence[Delayed], seconds: float, rounds: int) -> str:
    """Return the medians of the relay's latencies."""
    if not results:
        return ""
    lines, verdicts = [], []
    for rate in dict.fromkeys(r.rate for r in results):
        mine = [r for r in results if r.rate == rate]
        p50, p99, achieved, cpu = (
            statistics.median(getattr(r, name) for r in mine)
            for name in ("p50_ms", "p99_ms", "achieved", "cpu_percent")
        )
        worst = max(r.max_ms for r in mine)
        lines.append(
            [f"{rate:,}", f"{p50:.1f}", f"{p99:.1f}", f"{worst:.0f}", f"{achieved:,.0f}",
             f"{cpu:.0f}"]
        )  # fmt: skip
        if rate == LOAD_RATE:
            verdicts.append(at_most("p50 at 1,000 publishes/s, ms", p50, 80, 40))
            verdicts.append(at_most("p99 at 1,000 publishes/s, ms", p99, 200, 120))
    header = ["publishes/s", "p50, ms", "p99, ms", "max, ms", "achieved", "CPU, % of a core"]
    return (
        f"## From COMMIT of a publish to a JetStream consumer, {seconds:.0f} s, {rounds} rounds\n\n"
        f"{table(header, lines)}\n\n{verdict_table(verdicts)}"
    )
