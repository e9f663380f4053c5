"""Plans a backfill's chunks in a thread beside the capture: snapshots, ranges, watermarks."""

from __future__ import annotations

from collections.abc import Callable

from penstock.postgres.backfill.events import Event
from penstock.postgres.backfill.spec import BackfillSpec, Cursor
from penstock.postgres.capture import Capture


class Backfiller:
    """Runs backfills, one at a time, through `capture`, in a thread of its own.

    A chunk comes out of `Capture.take` as the only one of its batch, with `Chunk.reads`; the batch
    has one task for each of `reads.ranges`, which calls `read_range`. When the batch is confirmed,
    the chunk counts as delivered.

    Args:
        capture: The source's capture; it gives the URL, the publication and the number of splits.
        on_event: Called from the backfiller's thread with each event, in order; must not block for
            long and must not raise.
    """

    def __init__(self, capture: Capture, on_event: Callable[[Event], None]) -> None:
        self._capture = capture
        self._on_event = on_event

    def start(self, spec: BackfillSpec, cursor: Cursor = None) -> int:
        """Begin a backfill behind `cursor`, in the place of the one under way, if there is one.

        Returns the attempt's number, which all its events and chunks carry. Does not wait: what is
        wrong with the table comes as `Failed`. A paused backfiller starts to run.
        """
        raise NotImplementedError

    def pause(self) -> None:
        """Plan no more chunks; those that are planned are delivered, and told."""

    def resume(self) -> None:
        """Go on after `pause`."""

    def cancel(self) -> None:
        """Give up what is under way, without an event; its tasks will find no snapshot."""

    def close(self) -> None:
        """Cancel, and end the thread."""
