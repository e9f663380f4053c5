"""Reads the rows of a range: what COPY prints of them.

Budget: 0.6 µs a row of 8 columns, of which Python has it for 0.2.
"""

from __future__ import annotations

import select
from typing import NamedTuple

import psycopg
from psycopg import pq, sql

from penstock.backfill.chunks import sizing
from penstock.backfill.session import Connection
from penstock.core.errors import BackfillError


class Printed(NamedTuple):
    """So many rows, as COPY prints them in CSV."""

    text: bytes
    rows: int


def read_rows(connection: Connection, statement: sql.Composed) -> Printed:
    """Return what a COPY to the client gives.

    Raises `psycopg.Error`, and a transient `BackfillError` where the rows are larger than expected from
    the first of them, before memory is full. A backfill's first rows always go through.
    """
    pgconn = connection.pgconn
    pgconn.send_query(statement.as_bytes(connection))
    readable = select.poll()
    readable.register(pgconn.socket, select.POLLIN)
    while pgconn.flush():
        readable.poll(1.0)
    result = None
    while result is None:
        while pgconn.is_busy():
            readable.poll()
            pgconn.consume_input()
        result = pgconn.get_result()
    if result.status != pq.ExecStatus.COPY_OUT:
        _discard(pgconn)
        raise psycopg.errors.error_from_result(result)
    rows: list[memoryview] = []
    size, get = 0, pgconn.get_copy_data
    while True:
        length, data = get(1)
        if length > 0:
            rows.append(data)
            size += length
            if size > sizing.TOO_HEAVY and len(rows) > sizing.FEWEST:
                raise BackfillError(
                    "range_too_heavy",
                    f"{len(rows)} rows have {size >> 20} MiB, more than expected.",
                    remedy="They are read again in smaller chunks.",
                    transient=True,
                )
        elif length == 0:
            # The blocking form would hold the GIL.
            readable.poll()
            pgconn.consume_input()
        else:
            break
    result = pgconn.get_result()
    _discard(pgconn)
    if result is not None and result.status == pq.ExecStatus.FATAL_ERROR:
        raise psycopg.errors.error_from_result(result)
    return Printed(b"".join(rows), len(rows))


def _discard(pgconn: pq.abc.PGconn) -> None:
    while pgconn.get_result() is not None:
        pass
