"""`python -m benchmarks`: run Penstock beside its peers and print medians, ratios and verdicts."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from pathlib import Path

from benchmarks import contenders, drain, latency, report, resources, rig, usage
from benchmarks.contenders import Contender

PYTHON_VARIABLE = "PENSTOCK_BENCH_PYTHON"
PEERS_PYTHON = contenders.HERE.parent / ".venv-bench" / "bin" / "python"
RATES = (100, 1000, 10_000)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "what", nargs="?", default="all", choices=["drain", "latency", "resources", "all"]
    )
    parser.add_argument("--rounds", type=int, default=3, help="default %(default)s")
    parser.add_argument("--rows", type=int, default=300_000, help="of the drain")
    parser.add_argument("--shapes", default="large,single", help="of the drain's transactions")
    parser.add_argument("--seconds", type=float, default=15, help="at each rate of the latency")
    parser.add_argument("--rates", default=",".join(map(str, RATES)), help="rows a second")
    parser.add_argument(
        "--quick", action="store_true", help="one short round: does it work at all?"
    )
    parser.add_argument(
        "--only", default="", help="contenders: " + ", ".join(c.name for c in contenders.ALL)
    )
    parser.add_argument("--output", type=Path, help="also write the tables to this file")
    parser.add_argument(
        "--peers-python",
        default=os.environ.get(PYTHON_VARIABLE, str(PEERS_PYTHON)),
        help=f"the interpreter that has the peers (default: ${PYTHON_VARIABLE}, or .venv-bench)",
    )
    return parser.parse_args()


def chosen(names: str) -> list[Contender]:
    """Return the contenders that `--only` names, or all."""
    known = {contender.name: contender for contender in contenders.ALL}
    wanted = [name.strip() for name in names.split(",") if name.strip()] or list(known)
    for name in wanted:
        if name not in known:
            raise SystemExit(f"--only {name}: unknown contender; choose from {', '.join(known)}")
    return [known[name] for name in wanted]


def main() -> int:
    """Run what was asked for; the exit code is 1 if a contender failed."""
    options = arguments()
    contestants = chosen(options.only)
    if not shutil.which(options.peers_python):
        raise SystemExit(
            f"no interpreter {options.peers_python!r}; `make bench` makes one with the peers,"
            f" or set {PYTHON_VARIABLE}"
        )
    try:
        rates = tuple(int(rate) for rate in options.rates.split(","))
    except ValueError:
        raise SystemExit(
            f"--rates {options.rates}: not numbers; write them as 100,1000,10000"
        ) from None
    shapes = tuple(options.shapes.split(","))
    for shape in shapes:
        if shape not in drain.SHAPES:
            raise SystemExit(f"--shapes {shape}: unknown; choose from {', '.join(drain.SHAPES)}")
    rows, rounds, seconds = options.rows, options.rounds, options.seconds
    idle_s, long_rows = 30.0, 3_000_000
    if options.quick:
        rows, rounds, seconds, idle_s, long_rows = min(rows, 100_000), 1, 5.0, 5.0, 300_000
    # SIGTERM must run the `with` blocks that end the servers and contenders.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parts = []
    with rig.servers(options.peers_python, contestants) as servers:
        parts.append(report.facts(servers))
        strangers = usage.Strangers()
        if options.what in ("drain", "all"):
            drained = drain.measure(servers, rows, rounds, shapes)
            parts.append(report.drain(drained, rows, rounds))
        if options.what in ("latency", "all"):
            delayed = latency.measure(servers, rates, seconds, rounds)
            parts.append(report.delays(delayed, seconds, rounds))
        if options.what in ("resources", "all"):
            used = resources.measure(servers, idle_s, seconds, long_rows)
            parts.append(report.resources(used, long_rows))
        parts.append(report.strangers(strangers.percent()))
        parts.append(report.failures(servers.failures))
    parts.append(report.missing(contestants))
    text = "# Benchmarks\n\n" + "\n".join(part for part in parts if part)
    print(text)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text)
    return 1 if servers.failures else 0


if __name__ == "__main__":
    sys.exit(main())
