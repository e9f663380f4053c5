"""Reads one range of a chunk, in a task: the rows of a snapshot as batches of `WIRE_SCHEMA`."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from penstock.postgres.backfill.spec import Reads


def read_range(reads: Reads, index: int) -> Iterator[pa.RecordBatch]:
    """Yield the messages of `reads.ranges[index]`, in batches of some thousand rows.

    Deterministic while the snapshot lives: a task that is run again gives the same messages, with the
    same keys. An empty range gives no batch. Connects by itself; the process needs the hash seed of
    the capture's.

    Raises:
        BackfillError: The rows could not be read; `transient` where the chunk can be read again from
            the cursor before it (a lost snapshot, say).
    """
    raise NotImplementedError
