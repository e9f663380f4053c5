"""When rows are sent again: after a backoff where they failed, or because their ack is overdue.

No I/O; the clock is the caller's `now`, in seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from penstock.core.backoff import wait_after
from penstock.core.delivery import OnRetry
from penstock.core.errors import SinkError
from penstock.sinks.nats.rows import BACKOFF, SENT

BACKOFF_FIRST: Final = 0.1
BACKOFF_MAX: Final = 10.0
_SLOWER: Final = {"permission_denied": 4, "jetstream_not_enabled": 3}
"""Errors that only an operator mends start their backoff this many doublings later."""


def backoff(attempt: int) -> float:
    """Return the seconds to wait before try number `attempt` + 1, with jitter.

    No `Backoff`: each message has a count of tries of its own, and those of one count wait together.
    """
    return wait_after(attempt, BACKOFF_FIRST, BACKOFF_MAX, jitter=0.25)


@dataclass(slots=True)
class Bucket:
    """Rows that failed in the same way and are tried again together."""

    due: float
    error: SinkError
    rows: list[int] = field(default_factory=list)


class Retries:
    """The attempts of each row that has failed, and the rows that back off.

    `subject(row)` returns the subject that a row goes to.
    """

    def __init__(self, subject: Callable[[int], str]) -> None:
        self.attempts: dict[int, int] = {}
        """Of each row that has failed, how often."""
        self.buckets: dict[tuple[int, str], Bucket] = {}
        """The rows that back off, by attempt and code."""
        self.denied: dict[str, list[int]] = {}
        """Of each subject that is not permitted, the row that is tried, then those that wait for it."""
        self._subject = subject

    def add(self, row: int, error: SinkError, now: float, on_retry: OnRetry) -> None:
        """Let a row back off that has failed; `on_retry` is called for the first of a bucket."""
        attempt = self.attempts[row] = self.attempts.get(row, 0) + 1
        bucket = self.buckets.get((attempt, error.code))
        if bucket is None:
            # A busy stream is helped by the smaller window; waiting longer gains nothing.
            busy = error.code == "too_many_requests"
            delay = backoff(1 if busy else attempt + _SLOWER.get(error.code, 0))
            bucket = self.buckets[attempt, error.code] = Bucket(now + delay, error)
            on_retry(error, delay)
        bucket.rows.append(row)

    def pending(self, code: str) -> bool:
        """Return whether rows back off for this reason."""
        return any(bucket.error.code == code for bucket in self.buckets.values())

    def take_due(self, now: float, state: bytearray) -> Iterator[int]:
        """Yield the rows whose backoff has ended, out of those that still back off.

        Of a subject that is not permitted one row is tried for all, as the server logs every refusal.
        """
        for key, bucket in list(self.buckets.items()):
            if bucket.due > now:
                continue
            del self.buckets[key]
            for row in bucket.rows:
                if state[row] == BACKOFF and not (
                    bucket.error.code == "permission_denied" and self._waits_for_another(row)
                ):
                    yield row

    def _waits_for_another(self, row: int) -> bool:
        rows = self.denied.setdefault(self._subject(row), [row])
        if rows[0] == row:
            return False
        rows.append(row)
        return True

    def permitted(self, row: int) -> Sequence[int]:
        """Return the rows that wait for `row`, which is done: its subject is permitted."""
        rows = self.denied.get(self._subject(row))
        if not rows or rows[0] != row:
            return ()
        del self.denied[self._subject(row)]
        return rows


class Deadlines:
    """When rows were sent, and which acks are overdue."""

    def __init__(self) -> None:
        self._waves: deque[tuple[float, Sequence[int]]] = deque()
        self.resent: dict[int, float] = {}
        """Of each row that was sent again, when that was; its earlier waves count no more."""

    def sent(self, rows: Sequence[int], now: float) -> None:
        """Note that rows were sent together."""
        self._waves.append((now, rows))

    def overdue(self, now: float, timeout: float, last_ack: float, state: bytearray) -> list[int]:
        """Return the rows in flight that were sent longer than `timeout` ago; each wave once.

        A server that is slow but acks gets more patience: sending again would only slow it down.
        """
        rows: list[int] = []
        while self._waves and now - self._waves[0][0] > timeout:
            sent, wave = self._waves[0]
            if now - last_ack <= timeout and now - sent <= 6 * timeout:
                break
            self._waves.popleft()
            for row in wave:
                if state[row] == SENT and now - self.resent.get(row, sent) > timeout:
                    rows.append(row)
        return rows

    def clear(self) -> None:
        """Forget what was sent: the connection is lost."""
        self._waves.clear()
