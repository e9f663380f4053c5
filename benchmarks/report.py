"""Tables in Markdown: medians, ratios, and each bar and aim beside what was reached."""

from __future__ import annotations

import os
import platform
import re
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from importlib.metadata import version

import psutil

from benchmarks import latency, source
from benchmarks.backfill import Beside, Filled
from benchmarks.contenders import Contender
from benchmarks.drain import SHAPES, Drained
from benchmarks.latency import Delayed
from benchmarks.probe import DUPLICATE_WINDOW_S, Probe
from benchmarks.resources import LOAD_RATE, SITUATIONS, Used
from benchmarks.rig import POSTGRES_SETTINGS, Rig
from benchmarks.transforms import PLAIN, VARIANTS, Transformed
from penstock.spark.java import find_java

OURS = "penstock"
MIB = 2**20
_TRANSFORM_BARS = {
    "filter-most": (0.8, 0.9),
    "filter-half": (0.8, 0.9),
    "sql": (0.7, 0.85),
}


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, the first column to the left and the others to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def facts(rig: Rig) -> str:
    """Return what the figures hold for: the machine, the versions, the settings."""
    postgres = source.settings(rig.postgres_url)
    with Probe(rig.nats_url) as probe:
        probe.create_stream("facts")
        probe.delete_stream("facts")
        nats = probe.server_version()
    peers = any(contender.name != OURS for contender in rig.contenders)
    rows = [
        ("cores, memory", f"{os.cpu_count()}, {psutil.virtual_memory().total / 2**30:.0f} GiB"),
        (
            "python, pyspark, pyarrow",
            f"{platform.python_version()}, {version('pyspark')}, {version('pyarrow')}",
        ),
        ("java", java_version()),
        (
            "postgres",
            f"{postgres['server_version']}, fsync {postgres['fsync']}, synchronous_commit"
            f" {postgres['synchronous_commit']} (off while slots are filled), "
            + ", ".join(f"{k} {v}" for k, v in POSTGRES_SETTINGS.items()),
        ),
        (
            "nats-server",
            f"{nats}, file storage, sync interval as by default, duplicate window"
            f" {DUPLICATE_WINDOW_S} s",
        ),
        *([("peers", _peer_versions(rig.peers_python))] if peers else []),
        *((f"`{c.name}`", c.note) for c in rig.contenders),
    ]
    return f"## Machine\n\n{table(['what', 'value'], rows)}\n"


def drain(results: Sequence[Drained], rows: int, rounds: int) -> str:
    """Return the medians of the drains and our ratio to each peer."""
    if not results:
        return ""
    lines, verdicts = [], []
    for shape in dict.fromkeys(r.shape for r in results):
        of_shape = [r for r in results if r.shape == shape]
        rates = {
            name: statistics.median(r.rate for r in of_shape if r.contender == name)
            for name in _names(r.contender for r in of_shape)
        }
        for name, rate in rates.items():
            mine = [r for r in of_shape if r.contender == name]
            ours = f"{rates[OURS] / rate:.2f}" if OURS in rates else ""
            lines.append(
                [
                    f"{name}, {SHAPES[shape]} a transaction",
                    f"{rate:,.0f}",
                    f"{min(r.rate for r in mine):,.0f} - {max(r.rate for r in mine):,.0f}",
                    f"{statistics.median(r.wall_s for r in mine):.1f}",
                    f"{mine[0].body_bytes:.0f}" if mine[0].body_bytes else "",
                    ours,
                ]
            )
        if OURS in rates:
            if "mq-bridge" in rates:
                ratio = rates[OURS] / rates["mq-bridge"]
                verdicts.append(at_least(f"{shape}: times mq-bridge", ratio, 0.8, 1.2))
            debezium = [rates[name] for name in rates if name.startswith("debezium")]
            if debezium:
                ratio = rates[OURS] / max(debezium)
                verdicts.append(at_least(f"{shape}: times the better Debezium", ratio, 2.0, 2.0))
    header = ["drain", "msgs/s (median)", "range", "wall s", "body, bytes", "penstock / this"]
    return (
        f"## Drain of {rows:,} rows into JetStream, {rounds} rounds\n\n"
        f"{table(header, lines)}\n\n{verdict_table(verdicts)}"
    )


def delays(results: Sequence[Delayed], seconds: float, rounds: int) -> str:
    """Return the medians of the latencies."""
    if not results:
        return ""
    lines, verdicts = [], []
    for rate in dict.fromkeys(r.rate for r in results):
        for name in _names(r.contender for r in results):
            mine = [r for r in results if (r.contender, r.rate) == (name, rate)]
            if not mine:
                continue
            p50 = statistics.median(r.p50_ms for r in mine)
            p99 = statistics.median(r.p99_ms for r in mine)
            lines.append(
                [
                    f"{name} at {rate:,} rows/s",
                    f"{p50:.1f}",
                    f"{p99:.1f}",
                    f"{max(r.max_ms for r in mine):.0f}",
                    f"{statistics.median(r.achieved for r in mine):,.0f}",
                    f"{statistics.median(r.cpu_percent for r in mine):.0f}",
                ]
            )
            if name == OURS and rate == LOAD_RATE:
                verdicts.append(at_most("p50 at 1,000 rows/s, ms", p50, 80, 40))
                verdicts.append(at_most("p99 at 1,000 rows/s, ms", p99, 200, 120))
    header = ["latency, ms", "p50", "p99", "max", "rows/s committed", "CPU, % of a core"]
    shape = ", ".join(
        f"{rate:,} rows/s in transactions of {latency.rows_per_transaction(rate)}"
        for rate in dict.fromkeys(r.rate for r in results)
    )
    return (
        f"## Latency from COMMIT to consumer, {seconds:.0f} s, {rounds} rounds\n\n{shape}.\n\n"
        f"{table(header, lines)}\n\n{verdict_table(verdicts)}"
    )


def resources(results: Sequence[Used], drain_rows: int) -> str:
    """Return what each contender took."""
    if not results:
        return ""
    lines, verdicts = [], []
    for used in sorted(results, key=lambda r: SITUATIONS.index(r.situation)):
        lines.append(
            [
                f"{used.contender}, {used.situation}",
                f"{used.cpu_percent:.1f}",
                f"{used.memory.pss / MIB:,.0f}",
                f"{used.memory.java / MIB:,.0f}",
                f"{used.memory.processes}",
                f"{used.memory.rss / MIB:,.0f}",
            ]
        )
        if used.contender == OURS and used.situation == "idle":
            verdicts.append(at_most("idle, % of a core", used.cpu_percent, 5, 1))
        if used.contender == OURS and used.situation == "drain":
            verdicts.append(at_most("drain, peak MiB", used.memory.pss / MIB, 2048, 1024))
    header = ["resources", "CPU, % of a core", "PSS, MiB", "java alone", "processes", "RSS, MiB"]
    return (
        f"## Resources of the whole process tree\n\nload: {LOAD_RATE:,} rows/s. drain: the peak"
        f" while {drain_rows:,} rows drain, a third of them in one transaction.\n\n"
        f"{table(header, lines)}\n\n{verdict_table(verdicts)}"
    )


def transforms(results: Sequence[Transformed], rows: int, rounds: int) -> str:
    """Return the medians of the drains with filters and transforms, and the ratio to the plain one."""
    if not results:
        return ""
    variants = {v.name: v for v in VARIANTS}
    names = _names(r.variant for r in results)
    rates = {n: statistics.median(r.rate for r in results if r.variant == n) for n in names}
    lines, verdicts = [], []
    for name, rate in rates.items():
        mine = [r for r in results if r.variant == name]
        ratio = rate / rates[PLAIN] if PLAIN in rates else 0.0
        lines.append(
            [
                f"{name}: {variants[name].note}",
                f"{rate:,.0f}",
                f"{min(r.rate for r in mine):,.0f} - {max(r.rate for r in mine):,.0f}",
                f"{ratio:.2f}" if ratio else "",
                f"{100 * mine[0].kept:.0f}",
                f"{statistics.median(r.cpu_us for r in mine):.1f}",
                f"{statistics.median(r.wall_s for r in mine):.1f}",
                f"{mine[0].body_bytes:.0f}",
            ]
        )
        bars = _TRANSFORM_BARS.get(name)
        if ratio and bars:
            verdicts.append(at_least(f"{name}: times plain", ratio, *bars))
    header = ["drain", "captured rows/s (median)", "range", "/ plain", "kept, %"]
    header += ["CPU of Penstock, µs a row", "wall s", "body, bytes"]
    return (
        f"## Drain of {rows:,} rows into JetStream with filters and transforms, {rounds} rounds\n\n"
        f"{table(header, lines)}\n\n{verdict_table(verdicts)}"
    )


def backfills(results: Sequence[Filled], rounds: int) -> str:
    """Return the medians of the backfills beside COPY's."""
    if not results:
        return ""
    rows = results[0].rows
    copy_s = statistics.median(r.copy_s for r in results)
    lines = [["`COPY … TO STDOUT`", f"{rows / copy_s:,.0f}", f"{copy_s:.2f}", "", "1.00", ""]]
    verdicts = []
    for name in _names(r.sink for r in results):
        mine = [r for r in results if r.sink == name]
        command_s = statistics.median(r.command_s for r in mine)
        span_s = statistics.median(r.span_s for r in mine)
        lines.append(
            [
                f"into {name}",
                f"{rows / command_s:,.0f}",
                f"{command_s:.2f}",
                f"{rows / span_s:,.0f}",
                f"{copy_s / command_s:.3f}",
                f"{min(r.ratio for r in mine):.3f} - {max(r.ratio for r in mine):.3f}",
            ]
        )
        verdicts.append(at_least(f"into {name}: times COPY", copy_s / command_s, 0.1, 0.333))
    header = ["backfill", "rows/s from the command on", "s", "rows/s from the first message on"]
    return (
        f"## Backfill of {rows:,} rows, {rounds} rounds\n\n"
        f"{table([*header, '/ COPY', 'range'], lines)}\n\n{verdict_table(verdicts)}"
    )


def beside(results: Sequence[Beside], seconds: float) -> str:
    """Return the latency of live changes without and with a backfill."""
    if not results:
        return ""
    lines, medians = [], {}
    for which in ("idle", "busy"):
        found = [r.idle if which == "idle" else r.busy for r in results]
        p50, p99 = (statistics.median(pair[i] for pair in found) for i in (0, 1))
        medians[which] = p50, p99
        lines.append(
            ["without" if which == "idle" else "while it runs", f"{p50:.1f}", f"{p99:.1f}"]
        )
    ratio = medians["busy"][1] / medians["idle"][1]
    verdict = at_most("p99 beside a backfill: times idle", ratio, 3, 2)
    rate = statistics.median(r.rate for r in results)
    rows = statistics.median(r.rows for r in results)
    return (
        f"## Latency of live changes beside a backfill, {seconds:.0f} s, {len(results)} rounds\n\n"
        f"1,000 rows/s in transactions of 1 into JetStream; {rows:,.0f} of them while the backfill"
        f" ran, at {rate:,.0f} rows/s.\n\n{table(['latency, ms', 'p50', 'p99'], lines)}\n\n"
        f"{verdict_table([verdict])}"
    )


def failures(errors: Sequence[str]) -> str:
    """Return what went wrong, in the order in which it did."""
    return "## Failures\n\n" + "\n\n".join(errors) + "\n" if errors else ""


def strangers(percent: float) -> str:
    """Return how much the rest of the machine disturbed the run."""
    advice = "; repeat the run on a quiet machine" if percent > 10 else ""
    return f"Other processes used {percent:.0f} % of a core meanwhile{advice}.\n"


def missing(chosen: Sequence[Contender]) -> str:
    """Return a note on what a partial run leaves unsaid."""
    return (
        "" if any(c.name == OURS for c in chosen) else "Without penstock: no ratio, no verdict.\n"
    )


def _names(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def at_least(what: str, value: float, bar: float, aim: float) -> list[str]:
    """Return a verdict's row for what is better the greater it is."""
    verdict = "aim reached" if value >= aim else "bar reached" if value >= bar else "MISSED"
    return [what, f"{value:.2f}", f">= {bar:g}", f">= {aim:g}", verdict]


def at_most(what: str, value: float, bar: float, aim: float) -> list[str]:
    """Return a verdict's row for what is better the less it is."""
    verdict = "aim reached" if value <= aim else "bar reached" if value <= bar else "MISSED"
    return [what, f"{value:.1f}", f"<= {bar:g}", f"<= {aim:g}", verdict]


def verdict_table(verdicts: Sequence[Sequence[str]]) -> str:
    """Return the verdicts' table, nothing if there are none."""
    if not verdicts:
        return ""
    return table(["penstock", "reached", "bar", "aim", "verdict"], verdicts) + "\n"


def java_version() -> str:
    """Return the version of the Java that Spark uses."""
    java = find_java()
    found = None if java is None else re.search(r'JAVA_VERSION="([^"]+)"', java.release)
    return "unknown" if found is None else found[1]


def _peer_versions(python: str) -> str:
    code = (
        "from importlib.metadata import version as v;"
        "print(', '.join(f'{p} {v(p)}' for p in ('mq-bridge', 'pydbzengine')))"
    )
    output = subprocess.run(
        [python, "-c", code], check=False, capture_output=True, text=True, timeout=30
    )
    return output.stdout.strip() or "not installed"
