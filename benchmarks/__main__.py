"""`python -m benchmarks`: run Penstock beside its peers and print medians, ratios and verdicts."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import signal
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import (
    backfill,
    contenders,
    drain,
    latency,
    report,
    resources,
    rig,
    transforms,
    usage,
)
from benchmarks.configuration import benchmark as configuration
from benchmarks.console import bed as console_bed
from benchmarks.console import benchmark as console
from benchmarks.outbox import benchmark as outbox
from benchmarks.outbox import relay
from benchmarks.streams import benchmark as streams
from benchmarks.streams import crew, matrix, sizes
from benchmarks.streams.run import Run
from benchmarks.syncs import benchmark as syncs

PYTHON_VARIABLE = "PENSTOCK_BENCH_PYTHON"
PEERS_PYTHON = contenders.HERE.parent / ".venv-bench" / "bin" / "python"
RATES = (100, 1000, 10_000)
LATENCY_S, CONSUME_S = 15.0, 5.0
BESIDE_PEERS = ("drain", "latency", "resources")
RIGGED = (*BESIDE_PEERS, "transforms", "backfill", "outbox")
UNRIGGED = ("consume", "configuration", "syncs", "console")
PARTS = {
    "consume": streams.PARTS, "outbox": outbox.PARTS, "configuration": configuration.PARTS,
    "syncs": syncs.PARTS,
}  # fmt: skip
VARIANTS = {variant.name: variant for variant in transforms.VARIANTS}
SINKS = {contender.name: contender for contender in backfill.SINKS}
RELAYS = {variant.name: variant for variant in relay.VARIANTS}


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of what runs through a slot into JetStream, and of what."""

    rows: int
    rounds: int
    seconds: float
    idle_s: float = 30.0
    long_rows: int = 3_000_000
    backfill_rows: int = 1_000_000
    shapes: tuple[str, ...] = ()
    rates: tuple[int, ...] = ()
    variants: tuple[transforms.Variant, ...] = transforms.VARIANTS
    sinks: tuple[contenders.Contender, ...] = backfill.SINKS
    relays: tuple[relay.Variant, ...] = relay.VARIANTS
    outbox_parts: tuple[str, ...] = outbox.PARTS


def _joined(values: Iterable[int]) -> str:
    return ",".join(map(str, values))


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, epilog=f"{syncs.BOUND}."
    )
    parser.add_argument("what", nargs="?", default="all", choices=[*RIGGED, *UNRIGGED, "all"])
    parser.add_argument("--rounds", type=int, default=3, help="default %(default)s")
    parser.add_argument("--rows", type=int, default=300_000, help="of drain, transforms and outbox")
    parser.add_argument("--backfill-rows", type=int, default=1_000_000, help="default %(default)s")
    parser.add_argument(
        "--records", type=int, default=syncs.RECORDS, help="of syncs; default %(default)s"
    )
    parser.add_argument(
        "--syncs", type=int, default=syncs.SYNCS, help="of syncs' part many; default %(default)s"
    )
    parser.add_argument(
        "--shapes", default="large,single", help="of transactions, of drain and outbox"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help="at each rate of a latency, and beside a backfill (15), of each case of consume (5), of"
        " syncs' changes (60)",
    )
    parser.add_argument("--rates", default=_joined(RATES), help="rows a second, of latency")
    parser.add_argument(
        "--parts",
        help="; ".join(f"of {what}: {', '.join(parts)}" for what, parts in PARTS.items()),
    )
    parser.add_argument("--batches", default=_joined(matrix.BATCHES), help="of consume's matrix")
    parser.add_argument("--workers", default=_joined(matrix.WORKERS), help="of consume's matrix")
    parser.add_argument("--messages", type=int, default=1_000_000, help="of consume's backlog")
    of_console = console_bed.Scale()
    parser.add_argument(
        "--console-messages", type=int, default=of_console.messages,
        help="of console's large stream; default %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--sinks", type=int, default=of_console.sinks, help="of console; default %(default)s"
    )
    parser.add_argument(
        "--consumers", type=int, default=of_console.consumers,
        help="of console; default %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--held-seconds", type=float, default=300, help="that consume holds a snapshot for"
    )
    parser.add_argument(
        "--large", action="store_true", help=f"consume from {sizes.LARGE:,} messages too"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one short round: does it work at all?"
    )
    parser.add_argument(
        "--only",
        default="",
        help=f"contenders: {', '.join(c.name for c in contenders.ALL)};"
        f" of consume: {', '.join(crew.SIDES)}; of transforms: {', '.join(VARIANTS)};"
        f" of backfill: {', '.join(SINKS)}; of outbox: {', '.join(RELAYS)}",
    )
    parser.add_argument("--output", type=Path, help="also write the tables to this file")
    parser.add_argument(
        "--peers-python",
        default=os.environ.get(PYTHON_VARIABLE, str(PEERS_PYTHON)),
        help=f"the interpreter that has the peers (default: ${PYTHON_VARIABLE}, or .venv-bench)",
    )
    return parser.parse_args()


def named(option: str, text: str, known: Iterable[str]) -> list[str]:
    """Return the names of a list separated by commas, or end with what is wrong."""
    choices = list(known)
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in choices:
            raise SystemExit(f"{option} {name}: unknown; choose from {', '.join(choices)}")
    return names


def numbers(option: str, text: str) -> tuple[int, ...]:
    """Return the numbers of a list separated by commas, or end with what is wrong."""
    try:
        found = tuple(int(number) for number in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise SystemExit(f"{option} {text}: not numbers; write them as 1,10,100")
    return found


def main() -> int:
    """Run what was asked for; the exit code is 1 if a contender failed."""
    options = arguments()
    known = {contender.name: contender for contender in contenders.ALL}
    choices = {
        "consume": [*crew.SIDES],
        "transforms": [*VARIANTS],
        "backfill": [*SINKS],
        "outbox": [*RELAYS],
        "configuration": [],
        "syncs": [],
        "console": [],
        "all": [*known, *crew.SIDES],
    }.get(options.what, [*known])
    wanted = named("--only", options.only, choices)
    alone = options.what not in (*BESIDE_PEERS, "consume", "all")
    contestants = [known[name] for name in wanted if name in known] or list(known.values())
    if alone:
        contestants = [known[report.OURS]]
    sides = [name for name in wanted if name in crew.SIDES] or list(crew.SIDES)
    if not alone and not shutil.which(options.peers_python):
        raise SystemExit(
            f"no interpreter {options.peers_python!r}; `make bench` makes one with the peers,"
            f" or set {PYTHON_VARIABLE}"
        )
    known_parts = PARTS.get(options.what, streams.PARTS)
    parts_wanted = named("--parts", options.parts or ",".join(known_parts), known_parts)

    def parts_of(what: str) -> tuple[str, ...]:
        return tuple(parts_wanted) if known_parts == PARTS[what] else PARTS[what]

    plan = streams.Plan(
        parts_of("consume"),
        numbers("--batches", options.batches),
        numbers("--workers", options.workers),
        options.held_seconds,
        (*sizes.SIZES, sizes.LARGE) if options.large else sizes.SIZES,
    )
    run = Run(
        options.peers_python,
        sides,
        options.rounds,
        options.seconds or CONSUME_S,
        options.messages,
        max(options.messages // 10, 1),
    )
    scale = Scale(
        options.rows,
        options.rounds,
        options.seconds or LATENCY_S,
        backfill_rows=options.backfill_rows,
        shapes=tuple(named("--shapes", options.shapes, drain.SHAPES)),
        rates=numbers("--rates", options.rates),
        variants=tuple(VARIANTS[n] for n in wanted if n in VARIANTS) or transforms.VARIANTS,
        sinks=tuple(SINKS[n] for n in wanted if n in SINKS) or backfill.SINKS,
        relays=tuple(RELAYS[n] for n in wanted if n in RELAYS) or relay.VARIANTS,
        outbox_parts=parts_of("outbox"),
    )
    of_syncs = syncs.Scale(
        options.records, options.syncs, change_s=options.seconds or syncs.CHANGE_S
    )
    of_console = console_bed.Scale(
        options.sinks, options.consumers, options.console_messages, max(10 * options.rounds, 1)
    )
    if options.quick:
        of_console = console_bed.Scale(
            min(options.sinks, 10), min(options.consumers, 200),
            min(options.console_messages, 100_000), 5,
        )  # fmt: skip
        scale = dataclasses.replace(
            scale, rows=min(options.rows, 100_000), rounds=1, seconds=5.0, idle_s=5.0,
            long_rows=300_000, backfill_rows=min(options.backfill_rows, 200_000),
        )  # fmt: skip
        run = dataclasses.replace(run, rounds=1, seconds=2.0, messages=100_000, groups=10_000)
        plan = dataclasses.replace(plan, held_s=10.0, sizes=(10_000, 100_000))
        of_syncs = syncs.Scale(
            min(options.records, 50_000), min(options.syncs, 50), change_s=15.0, idle_s=60.0
        )
    # SIGTERM must run the `with` blocks that end the servers and contenders.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parts, failures = [], run.failures
    strangers = usage.Strangers()
    if options.what in (*RIGGED, "all"):
        with rig.servers(options.peers_python, contestants) as servers:
            parts.append(report.facts(servers))
            parts += rigged(options.what, servers, scale)
            failures += servers.failures
        parts.append(report.missing(contestants))
    if options.what in ("consume", "all"):
        parts += streams.measure(run, plan)
    if options.what in ("configuration", "all"):
        parts += configuration.measure(run, parts_of("configuration"), scale.seconds, scale.idle_s)
    if options.what in ("syncs", "all"):
        parts += syncs.measure(run, parts_of("syncs"), of_syncs)
    if options.what in ("console", "all"):
        parts += console.measure(run, of_console, scale.idle_s)
    parts.append(report.strangers(strangers.percent()))
    parts.append(report.failures(failures))
    text = "# Benchmarks\n\n" + "\n".join(part for part in parts if part)
    print(text)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text)
    return 1 if failures else 0


def rigged(what: str, servers: rig.Rig, scale: Scale) -> Iterator[str]:
    """Yield the tables of what runs through a slot into JetStream, each as soon as it is done."""
    rounds = scale.rounds
    if what in ("drain", "all"):
        drained = drain.measure(servers, scale.rows, rounds, scale.shapes)
        yield report.drain(drained, scale.rows, rounds)
    if what in ("latency", "all"):
        delayed = latency.measure(servers, scale.rates, scale.seconds, rounds)
        yield report.delays(delayed, scale.seconds, rounds)
    if what in ("resources", "all"):
        used = resources.measure(servers, scale.idle_s, scale.seconds, scale.long_rows)
        yield report.resources(used, scale.long_rows)
    if what in ("transforms", "all"):
        changed = transforms.measure(servers, scale.rows, rounds, scale.variants)
        yield report.transforms(changed, scale.rows, rounds)
    if what in ("backfill", "all"):
        table = backfill.fill(servers, scale.backfill_rows)
        yield report.backfills(backfill.measure(servers, table, rounds, scale.sinks), rounds)
        live = backfill.measure_live(servers, table, scale.seconds, rounds)
        yield report.beside(live, scale.seconds)
    if what in ("outbox", "all"):
        yield from outbox.measure(
            servers, scale.outbox_parts, scale.rows, rounds, scale.seconds, scale.shapes,
            scale.relays,
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
