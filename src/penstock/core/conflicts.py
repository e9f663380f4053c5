"""Transactions that Postgres ends for another one: nothing of them was done, and they begin again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

from psycopg.errors import DeadlockDetected, SerializationFailure

from penstock.core.backoff import Backoff

_TRIES: Final = 5
_FIRST_SECONDS: Final = 0.1
_MOST_SECONDS: Final = 2.0
_Result = TypeVar("_Result")


def again_after_conflict(transaction: Callable[[], _Result]) -> _Result:
    """Return what a call returns that is one transaction.

    It is made again, a few times, after a deadlock or a serialization failure. Raises as the last does.
    """
    backoff = Backoff(_FIRST_SECONDS, _MOST_SECONDS, jitter=0.5)
    for _ in range(_TRIES - 1):
        try:
            return transaction()
        except (DeadlockDetected, SerializationFailure):
            time.sleep(backoff.after_failure())
    return transaction()
