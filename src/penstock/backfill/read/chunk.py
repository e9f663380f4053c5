"""The messages of a backfill's chunk, to be delivered as any others are."""

from __future__ import annotations

from dataclasses import replace

from penstock.backfill.read.encode import messages_of
from penstock.postgres.chunk import Chunk, Piece


def with_messages(chunk: Chunk, splits: int) -> Chunk:
    """Return a chunk of reads with their messages, in one of so many splits each.

    It need not stand alone: its splits keep the order of each group.
    """
    assert chunk.reads is not None  # noqa: S101 - the caller has looked
    messages, hashes = messages_of(chunk.reads)
    each = [split % splits for split in hashes]
    pieces = (Piece(frozenset(each), messages, each),) if each else ()
    return replace(chunk, rows=messages.num_rows, content=pieces, barrier=False)
