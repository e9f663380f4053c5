"""The lanes of the query of all syncs, the tasks' end: jobs come in, and reports go back.

The driver-side process of the query listens, as that of a source does (`penstock.spark.lanes`). One
connection carries both ways: definitions, jobs and grants of requests down, reports and asks up.
"""

from __future__ import annotations

import pickle
import secrets
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from typing import IO, Any, Final, cast

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from penstock.core import log as logging
from penstock.core.errors import SparkError
from penstock.spark.lanes import AGAIN, END, LENGTH, READ_SIZE, connected, frames
from penstock.syncs.jobs import decode_job
from penstock.syncs.lane import JobLane

DDL: Final = "jobs bigint"
_SCHEMA: Final = pa.schema([pa.field("jobs", pa.int64())])

OPEN: Final = b"o"
"""The first frame: the store's URL, that of the records, and how many jobs run at a time."""
CLIENT: Final = b"c"
"""A frame with what jobs are made with: a number, and a `Client`."""
JOB: Final = b"j"
"""A frame with a job, behind the number of its client."""
YIELD: Final = b"y"
"""A frame with the number of a job that is to end where it can go on."""
STOP: Final = b"s"
"""A frame with the number of a job that is to end between two pages."""
GRANT: Final = b"g"
"""A frame with the number of a request that may be made."""


@dataclass
class SyncLane(InputPartition):
    """One task of the long batch `batch`."""

    address: str = field(repr=False)
    batch: int
    number: int


def work(partition: SyncLane) -> Iterator[pa.RecordBatch]:
    """Run the jobs that a lane is given until its end; yield how many these were."""
    logging.configure()
    # One thread writes a page while another parses the next one. By default a thread keeps the
    # interpreter for 5 ms: so long each answer of Postgres would wait.
    sys.setswitchinterval(0.0005)
    hello = ["read", partition.batch, partition.number, secrets.randbits(63)]
    jobs = 0
    try:
        sock = connected(partition.address, hello)
        sending = threading.Lock()

        def send(report: list[Any]) -> None:
            data = msgspec.msgpack.encode(report)
            with sending:
                try:
                    sock.sendall(LENGTH.pack(len(data)) + data)
                except OSError:
                    return  # the driver is gone, or this lane's end has come

        lane: JobLane | None = None
        with sock, sock.makefile("rb", READ_SIZE) as made:
            try:
                for kind, data in frames(cast("IO[bytes]", made)):
                    if kind in (END, AGAIN):
                        break
                    if kind == OPEN:
                        store, records, slots = msgspec.msgpack.decode(data)
                        lane = JobLane(store, records, slots, send)
                    elif lane is not None:
                        jobs += kind == JOB
                        _take(lane, kind, data)
            finally:
                if lane is not None:
                    lane.close()
    except (OSError, EOFError, AuthenticationError) as error:
        raise SparkError(
            "syncs_gone",
            f"The process that schedules the syncs is gone ({type(error).__name__}).",
            remedy="Spark starts the query again; the log has why it ended.",
            transient=True,
        ) from None
    yield pa.RecordBatch.from_pylist([{"jobs": jobs}], schema=_SCHEMA)


def _take(lane: JobLane, kind: bytes, data: bytes) -> None:
    if kind == CLIENT:
        # The other end has proved that it has the query's key.
        lane.define(*pickle.loads(data))  # noqa: S301 - see above
    elif kind == JOB:
        client, job = msgspec.msgpack.decode(data, type=tuple[int, bytes])
        lane.give(client, decode_job(job))
    elif kind in (STOP, YIELD):
        lane.stop(msgspec.msgpack.decode(data), loses=kind == STOP)
    elif kind == GRANT:
        lane.grant(msgspec.msgpack.decode(data))
