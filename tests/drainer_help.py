"""The drainer of a single sink, for tests."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from penstock.core.delivery import Sink
from penstock.core.message import Position
from penstock.core.monitor import Report
from penstock.sinks.backlog.drainers import Drainers
from penstock.sinks.backlog.sink import SinkBacklog


class SingleDrainer:
    """`Drainers` that have one sink; `make` makes it."""

    def __init__(
        self,
        url: str,
        of: SinkBacklog,
        make: Callable[[], Sink],
        detach_after: timedelta,
        on_report: Callable[[Report], object],
    ) -> None:
        self._of = of
        self.drainers = Drainers(url, on_report)
        self.drainers.add(of, make, detach_after)
        self.start, self.stop = self.drainers.start, self.drainers.stop

    def done(self, position: Position) -> None:
        """Note up to where all parts have ended."""
        self.drainers.done(self._of.source_id, position)

    def wake(self) -> None:
        """Have it read whether the sink is behind."""
        self.drainers.wake(self._of.name)

    def is_attached(self) -> bool:
        """Whether the sink has no backlog; False where that was not read since `wake`."""
        return self.drainers.is_attached(self._of.name)
