"""`python -m tests.chaos --duration 600 [--source outbox] [--seed N]`: the fault test at length."""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from penstock.embedded.handles import Database
from penstock.embedded.nats import EmbeddedNats
from penstock.embedded.postgres import EmbeddedPostgres

from .faults import OUTBOX_FAULTS, TABLE_FAULTS
from .open_transaction import keep_open
from .outage import Outage, own_servers
from .session import Outcome, Session
from .workloads import WORKLOADS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--duration", type=float, default=600, help="seconds of faults")
    parser.add_argument("--source", choices=list(WORKLOADS), default="tables")
    parser.add_argument("--seed", type=int, help="repeats the faults of an earlier run")
    parser.add_argument("--rate", type=float, default=300, help="messages a second")
    parser.add_argument("--keys", type=int, default=200)
    parser.add_argument("--report", type=Path, help="write the outcome here, as JSON")
    parser.add_argument(
        "--fault",
        action="append",
        choices=list(TABLE_FAULTS | OUTBOX_FAULTS),
        help="only this one, once; repeatable",
    )
    parser.add_argument(
        "--outage", type=float, metavar="SECONDS",
        help="instead: one NATS server of two is gone for so long, a stream is written too",
    )  # fmt: skip
    parser.add_argument(
        "--open", type=float, metavar="SECONDS", dest="open_",
        help="instead: a publisher's transaction is open for so long",
    )  # fmt: skip
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.randrange(1 << 31)
    workload = WORKLOADS[arguments.source](seed)
    if unknown := set(arguments.fault or ()) - workload.faults.keys():
        parser.error(f"not with --source {arguments.source}: {', '.join(unknown)}")
    console = Console(highlight=False, soft_wrap=True)
    started = time.monotonic()

    def report(text: str) -> None:
        console.print(f"{time.monotonic() - started:6.1f} s  {text}", markup=False)

    # An orderly end takes the servers and the folder with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if arguments.outage is not None:
        return outage(arguments.outage, arguments.rate, console, report)
    if arguments.open_ is not None:
        return open_transaction(arguments.open_, console, report)
    session = Session(
        duration=arguments.duration, seed=seed, faults=arguments.fault, keys=arguments.keys,
        rate=arguments.rate, workload=workload, report=report,
    )  # fmt: skip
    outcome = session.run()
    show(outcome, console)
    if arguments.report is not None:
        arguments.report.write_text(json.dumps(outcome.as_dict(), indent=2) + "\n")
    return 0 if outcome.passed else 1


def outage(seconds: float, rate: float, console: Console, report: Callable[[str], None]) -> int:
    with tempfile.TemporaryDirectory(prefix="penstock-outage-", ignore_cleanup_errors=True) as path:
        folder = Path(path)
        folder.chmod(0o755)  # under root Postgres runs as another user
        with EmbeddedPostgres(folder / "postgres") as postgres, own_servers(folder) as servers:
            shop, store = (Database(n, postgres.create_database(n)) for n in ("shop", "store"))
            run = folder / "run"
            run.mkdir()
            try:
                found = Outage(
                    run, shop, store, *servers, seconds=seconds, rate=rate, report=report
                ).run()
            except AssertionError as error:
                console.print(f"FAILED: {error}", markup=False)
                return 1
            finally:
                shop.close()
                store.close()
    for line in found.lines():
        console.print(line, markup=False)
    console.print("PASSED: the same messages in all three, in order, none doubled")
    return 0


def open_transaction(seconds: float, console: Console, report: Callable[[str], None]) -> int:
    with tempfile.TemporaryDirectory(prefix="penstock-open-", ignore_cleanup_errors=True) as path:
        folder = Path(path)
        folder.chmod(0o755)  # under root Postgres runs as another user
        with EmbeddedPostgres(folder / "postgres") as postgres, EmbeddedNats(folder / "n") as nats:
            app = Database("app", postgres.create_database("app"))
            run = folder / "run"
            run.mkdir()
            try:
                found = keep_open(run, app, nats, seconds=seconds, report=report)
            except AssertionError as error:
                console.print(f"FAILED: {error}", markup=False)
                return 1
            finally:
                app.close()
    console.print(found.line(), markup=False)
    console.print("PASSED: nothing skipped, nothing stalled, nothing swept too early")
    return 0


def show(outcome: Outcome, console: Console) -> None:
    verdict = outcome.verdict
    table = Table("fault", "times", "recovered in, median", "max")
    for name in sorted(outcome.faults):
        times = outcome.recoveries.get(name, [])
        cells = [f"{median(times):.1f} s", f"{max(times):.1f} s"] if times else ["-", "-"]
        table.add_row(name, str(outcome.faults[name]), *cells)
    console.print(table)
    counts = ", ".join(f"{value} {name}" for name, value in outcome.writers.items())
    console.print(f"writers: {verdict.keys} keys; {counts}")
    console.print(f"reports of readiness and status: {outcome.reports} judged")
    if outcome.syncs:
        console.print(f"syncs: {outcome.syncs}")
    console.print(f"pipeline: {outcome.starts} starts, exit codes {outcome.exits}", markup=False)
    for example in verdict.examples:
        console.print(f"✗ {example}", markup=False)
    if not outcome.passed and outcome.log_tail:
        console.print("the pipeline's log ends with:\n" + outcome.log_tail, markup=False)
    kinds = (
        "lost", "duplicate", "out of order", "unexpected", "rolled back",
        "reported better than it was", "reported worse than it was",
    )  # fmt: skip
    found = [f"{verdict.violations.get(kind, 0)} {kind}" for kind in kinds]
    found += [f"{n} {k}" for k, n in verdict.violations.items() if k not in kinds]
    console.print(
        f"{'PASSED' if outcome.passed else 'FAILED'}: {verdict.committed} committed,"
        f" {verdict.delivered} delivered, {', '.join(found)};"
        f" {sum(outcome.faults.values())} faults in {outcome.seconds:.0f} s, seed {outcome.seed}"
    )


if __name__ == "__main__":
    sys.exit(main())
