"""A writer that commits at a steady rate, in a process of its own: it waits for nobody's GIL.

`python -m benchmarks.writer URL ROWS FIRST_ID ROWS_PER_SECOND SECONDS ROWS_PER_TRANSACTION FILE`
runs the statement ROWS for the rows from its first to its second parameter. For each transaction it
writes three 64-bit integers to FILE: the first id, the last id and the monotonic time in ns just after
COMMIT had returned.
"""

from __future__ import annotations

import sys
import time
from array import array
from pathlib import Path

import psycopg


def write(
    url: str, rows: bytes, first_id: int, rate: int, seconds: float, per_transaction: int
) -> array[int]:
    """Commit on schedule; what is late is made up for at once, so the rate holds on average."""
    committed: array[int] = array("q")
    with psycopg.connect(url, autocommit=True, prepare_threshold=0) as connection:
        start = time.monotonic_ns()
        for number in range(int(rate * seconds / per_transaction)):
            due = start + number * per_transaction * 10**9 // rate
            early = due - time.monotonic_ns()
            if early > 0:
                time.sleep(early / 1e9)
            first = first_id + number * per_transaction
            last = first + per_transaction - 1
            connection.execute(rows, (first, last))
            committed.extend((first, last, time.monotonic_ns()))
    return committed


def main() -> None:
    """Write as the arguments say."""
    url, rows, first_id, rate, seconds, per_transaction, file = sys.argv[1:]
    committed = write(
        url, rows.encode(), int(first_id), int(rate), float(seconds), int(per_transaction)
    )
    Path(file).write_bytes(committed.tobytes())


if __name__ == "__main__":
    main()
