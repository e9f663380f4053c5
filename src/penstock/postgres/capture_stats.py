"""What a capture counts and how it is."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.core.errors import CaptureError


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
    unread_bytes: int = 0
    state: str = "connecting"
    error: CaptureError | None = field(default=None, repr=False)
