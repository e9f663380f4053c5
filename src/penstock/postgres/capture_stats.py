"""What a capture counts and how it is."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.core.errors import CaptureError
from penstock.postgres.transaction import postgres_now


@dataclass
class CaptureStats:
    """Counted since the capture started, for status and metrics."""

    captured: int = 0
    confirmed: int = 0
    truncates_skipped: int = 0
    reconnects: int = 0
    received_lsn: int = 0
    confirmed_lsn: int = 0
    confirmed_time: int = 0
    """When the newest transaction that is confirmed was committed, as `Begin.timestamp`."""
    deliveries: int = 0
    """Transactions with messages that are confirmed."""
    delivery_us: int = 0
    """The sum of the times from the commit of each of these until it was confirmed, in µs."""
    unread_bytes: int = 0
    state: str = "connecting"
    error: CaptureError | None = field(default=None, repr=False)

    def count_deliveries(self, count: int, times: int) -> None:
        """Count transactions that are confirmed now; `times` sums up when each was committed."""
        self.deliveries += count
        # The server's clock may be ahead of this machine's.
        self.delivery_us += max(count * postgres_now() - times, 0)
