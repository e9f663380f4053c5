"""The hand-out of rounds, where a backfill's rows can't be made into messages."""

from __future__ import annotations

from typing import Any, cast

from structlog.testing import capture_logs

from penstock.core.message import Position
from penstock.postgres.chunk import ChunkBuilder
from penstock.postgres.reads import BackfillSpec, Reads
from penstock.spark.round_loop import RoundLoop

START = Position(10, -1)


def test_reads_of_which_no_messages_can_be_made_end_no_query() -> None:
    """The live messages go on; the backfill is told, and goes back or ends."""
    reads = Reads(
        BackfillSpec(1, "events", "public", "t"), 1, 0, None, (b"1\n",), cast("Any", None)
    )
    chunk = ChunkBuilder(START, 2).reads(START, reads, 1)
    failed: list[tuple[Reads, Exception]] = []
    loop = RoundLoop(
        host="127.0.0.1", max_rows=10, in_step=False, seconds=60,
        on_settled=lambda _: None, on_failed_reads=lambda *of: failed.append(of),
    )  # fmt: skip
    loop.start()
    try:
        with capture_logs() as logs:
            whole = loop._whole(chunk, 2)
    finally:
        loop.close()
    assert (whole.reads, whole.rows, whole.pieces) == (None, 0, ())
    assert (whole.start, whole.end) == (chunk.start, chunk.end)
    ((of, error),) = failed
    assert of is reads
    assert isinstance(error, AttributeError)
    assert [entry["log_level"] for entry in logs] == ["error"]
