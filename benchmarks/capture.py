"""`python -m benchmarks.capture`: the CPU time that the capture takes for a row, without a server.

A slot's messages go through the decoder, in memory: parsed, made wire rows, hashed, sealed into
Arrow batches. Reading the socket is left out.
"""

from __future__ import annotations

import argparse
import statistics
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.message import Position
from penstock.postgres.decoder import Decoder
from penstock.postgres.table import Shape
from penstock.postgres.types import Types

INT8, TEXT, NUMERIC, TIMESTAMPTZ = 20, 25, 1700, 1184
PER_TRANSACTION = 1000
SPLITS = 2


@dataclass(frozen=True, slots=True)
class Case:
    """A table's key, and what its messages are grouped by."""

    name: str
    key: tuple[str, ...]
    group_by: list[str] | None = None


CASES = (
    Case("key of one column", ("id",)),
    Case("key of two columns", ("id", "region")),
    Case("group_by of one column", ("id",), ["customer"]),
)
COLUMNS = {
    "id": INT8, "region": TEXT, "customer": INT8, "status": TEXT, "amount": NUMERIC,
    "note": TEXT, "created_at": TIMESTAMPTZ,
}  # fmt: skip


def _relation(key: Sequence[str]) -> bytes:
    columns = b"".join(
        struct.pack(">B", name in key) + name.encode() + b"\0" + struct.pack(">Ii", oid, -1)
        for name, oid in COLUMNS.items()
    )
    head = b"R" + struct.pack(">I", 1) + b"public\0orders\0"
    return head + b"f" + struct.pack(">H", len(COLUMNS)) + columns


def _insert(number: int) -> bytes:
    row = (
        b"%d" % number, b"eu-%d" % (number % 9), b"%d" % (number % 1000), b"pending", b"199.90",
        b"as discussed, to be left at the door", b"2024-10-28 21:37:01.12747+00",
    )  # fmt: skip
    values = b"".join(b"t" + struct.pack(">I", len(value)) + value for value in row)
    return b"I" + struct.pack(">I", 1) + b"N" + struct.pack(">H", len(row)) + values


def _messages(rows: int) -> list[bytes]:
    found: list[bytes] = []
    for first in range(0, rows, PER_TRANSACTION):
        lsn = first + 1
        found.append(b"B" + struct.pack(">QqI", lsn, 0, 7))
        found += map(_insert, range(first, first + PER_TRANSACTION))
        found.append(b"C" + struct.pack(">BQQq", 0, lsn, lsn + 1, 0))
    return found


def nanoseconds(case: Case, messages: Sequence[bytes], rows: int) -> float:
    """Return what one row takes of a core."""
    decoder = Decoder(
        Position(0, -1), splits=SPLITS, includes=lambda *_: True, truncates=False,
        grouping=lambda *_: (case.group_by, None), emit=lambda _: None,
    )  # fmt: skip
    decoder.connected("shop", "0123456789abcdef")
    relation = decoder.handle(_relation(case.key))
    assert relation is not None
    decoder.learn(relation, Shape(case.key), Types().converter)
    began = time.thread_time_ns()
    for message in messages:
        decoder.handle(message)
    decoder.seal()
    return (time.thread_time_ns() - began) / rows


def main() -> None:
    """Print the median of the rounds for each case."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.capture", description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000, help="default %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default %(default)s")
    options = parser.parse_args()
    rows = max(options.rows // PER_TRANSACTION, 1) * PER_TRANSACTION
    messages = _messages(rows)
    taken: dict[str, list[float]] = {case.name: [] for case in CASES}
    for _ in range(options.rounds):
        for case in CASES:
            taken[case.name].append(nanoseconds(case, messages, rows))
    print("| inserts of 7 columns | ns a row, median | fastest |\n|---|---|---|")
    for name, found in taken.items():
        print(f"| {name} | {statistics.median(found):,.0f} | {min(found):,.0f} |")


if __name__ == "__main__":
    main()
