"""The table that the decoder watches for a backfill, through all its attempts."""

from __future__ import annotations

import time
from typing import Final

from penstock.backfill.chunks.commands import Start
from penstock.backfill.source_table import table_of
from penstock.postgres.capture import Capture
from penstock.postgres.reads import BackfillSpec, SourceTable
from penstock.postgres.watermarks import Watch

_KEPT_SECONDS: Final = 900.0


class Watches:
    """Sets the decoder's `watch`.

    Between two attempts of a backfill the decoder goes on to watch the table, so that the second one
    knows which rows have to be read again. After a while without an attempt it stops.
    """

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._kept: tuple[BackfillSpec, Watch] | None = None
        self._kept_until = 0.0

    def begin(self, start: Start, source: SourceTable) -> Watch:
        """Watch the table for an attempt, with what is known from the attempt before."""
        spec, kept = start.spec, self._kept
        watch = Watch(spec.schema, spec.table, source.sort is not None)
        with self._capture.decoder() as decoder:
            # From the start on all is read anyway.
            if kept is not None and kept[0] == spec and start.cursor is not None:
                watch = kept[1]
            watch.expected = table_of(source)
            decoder.watch = watch
        self._kept = None
        return watch

    def keep(self, spec: BackfillSpec, watch: Watch) -> None:
        """Go on for a while after an attempt."""
        self._kept = spec, watch
        self._kept_until = time.monotonic() + _KEPT_SECONDS

    def expire(self) -> None:
        """Stop where no attempt has begun for long."""
        if self._kept is not None and time.monotonic() > self._kept_until:
            self.stop()

    def stop(self) -> None:
        """Watch no table."""
        self._kept = None
        with self._capture.decoder() as decoder:
            decoder.watch = None
