"""A writer that commits at a steady rate, in a process of its own: it waits for nobody's GIL.

`python -m benchmarks.writer URL TABLE FIRST_ID ROWS_PER_SECOND SECONDS ROWS_PER_TRANSACTION FILE`
writes, for each transaction, three 64-bit integers to FILE: the first id, the last id and the
monotonic time in ns just after COMMIT had returned.
"""

from __future__ import annotations

import sys
import time
from array import array
from pathlib import Path

import psycopg
from psycopg import sql

from benchmarks.source import ROWS


def write(
    url: str, table: str, first_id: int, rate: int, seconds: float, per_transaction: int
) -> array[int]:
    """Commit on schedule; what is late is made up for at once, so the rate holds on average."""
    committed: array[int] = array("q")
    insert = sql.SQL(ROWS).format(table=sql.Identifier("public", table))
    with psycopg.connect(url, autocommit=True, prepare_threshold=0) as connection:
        start = time.monotonic_ns()
        for number in range(int(rate * seconds / per_transaction)):
            due = start + number * per_transaction * 10**9 // rate
            early = due - time.monotonic_ns()
            if early > 0:
                time.sleep(early / 1e9)
            first = first_id + number * per_transaction
            last = first + per_transaction - 1
            connection.execute(insert, (first, last))
            committed.extend((first, last, time.monotonic_ns()))
    return committed


def main() -> None:
    """Write as the arguments say."""
    url, table, first_id, rate, seconds, per_transaction, file = sys.argv[1:]
    committed = write(url, table, int(first_id), int(rate), float(seconds), int(per_transaction))
    Path(file).write_bytes(committed.tobytes())


if __name__ == "__main__":
    main()
