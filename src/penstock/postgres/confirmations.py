"""What a capture confirms to its server, and when. No lock of its own."""

from __future__ import annotations

import time
from typing import Final

_STATUS_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 1.0
_CONFIRM_SECONDS: Final = 0.2


class Confirmations:
    """The status messages of one capture: the newest LSN sent, and when the next one is due.

    With `polls` each asks the server how far its WAL is, and they are more frequent.
    """

    def __init__(self) -> None:
        self.sent_lsn = -1
        self.polls = False
        self._urgent = False
        self._sent_at = 0.0
        self._interval = _STATUS_SECONDS

    def connected(self, timeout: float) -> None:
        """Begin on a new connection, whose server waits `timeout` seconds for a status, 0: for ever."""
        self._sent_at = 0.0
        self._interval = min(_STATUS_SECONDS, timeout / 3) if timeout else _STATUS_SECONDS

    def hasten(self) -> None:
        """Have the next one sent at once."""
        self._urgent = True

    def take_urgent(self) -> bool:
        """Return whether the next one is to be sent at once, and forget it."""
        urgent, self._urgent = self._urgent, False
        return urgent

    def due(self, flush_lsn: int) -> float:
        """Return when the next one is due (monotonic clock), `flush_lsn` being durable."""
        interval = min(self._interval, _POLL_SECONDS) if self.polls else self._interval
        if flush_lsn != self.sent_lsn:
            interval = min(_CONFIRM_SECONDS, interval)
        return self._sent_at + interval

    def sent(self, flush_lsn: int) -> None:
        """Note that an LSN is sent now."""
        self._sent_at, self.sent_lsn = time.monotonic(), flush_lsn
