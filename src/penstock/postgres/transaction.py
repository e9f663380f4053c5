"""What the messages of one transaction share: its position, its time, its id."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final

_EPOCH: Final = datetime(2000, 1, 1, tzinfo=UTC)
_EPOCH_US: Final = 946_684_800_000_000  # in Unix time


def postgres_now() -> int:
    """Return the time as Postgres writes it: microseconds since 2000-01-01 UTC."""
    return time.time_ns() // 1000 - _EPOCH_US


class Transaction:
    """What the messages of one transaction share."""

    __slots__ = ("lsn", "microseconds", "tag", "xid")

    def __init__(self, lsn: int, microseconds: int, xid: int, tag: bytes) -> None:
        self.lsn = lsn
        self.microseconds = microseconds
        """When it was committed, since 2000-01-01 UTC."""
        self.xid = xid
        self.tag = tag

    @property
    def key(self) -> bytes:
        """The start of its messages' idempotency keys."""
        return b"%b-%d-" % (self.tag, self.lsn)

    @property
    def text(self) -> bytes:
        """What its messages' metadata share, up to the start of the idempotency key."""
        seconds, fraction = divmod(self.microseconds, 1_000_000)
        return (
            b'"commit_timestamp":"%b.%06dZ","commit_lsn":%d,"transaction_id":%d,'
            b'"idempotency_key":"%b'
            % (second_text(seconds), fraction, self.lsn, self.xid, self.key)
        )


@lru_cache(maxsize=4)
def second_text(since_epoch: int) -> bytes:
    """Return a second since 2000-01-01 UTC in ISO 8601's form, without a zone."""
    # Formatting a time costs as much as a row's values do; transactions share their seconds.
    at = (_EPOCH + timedelta(seconds=since_epoch)).replace(tzinfo=None)
    return at.isoformat(timespec="seconds").encode()
