"""A transaction that Postgres ends for another session's sake begins again, a few times."""

from __future__ import annotations

import psycopg
import pytest
from psycopg.errors import DeadlockDetected, LockNotAvailable, SerializationFailure

from penstock.core.conflicts import again_after_conflict


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    waits: list[float] = []
    monkeypatch.setattr("penstock.core.conflicts.time.sleep", waits.append)
    return waits


class Transaction:
    def __init__(self, *errors: psycopg.Error) -> None:
        self.errors = list(errors)

    def __call__(self) -> str:
        if self.errors:
            raise self.errors.pop(0)
        return "done"


def test_it_begins_again_after_a_conflict(waits: list[float]) -> None:
    assert again_after_conflict(Transaction(DeadlockDetected(), SerializationFailure())) == "done"
    assert len(waits) == 2
    assert 0 < waits[0] < waits[1]


def test_it_ends_after_some_tries_and_at_once_by_other_errors(waits: list[float]) -> None:
    always = Transaction(*[DeadlockDetected() for _ in range(9)])
    with pytest.raises(DeadlockDetected):
        again_after_conflict(always)
    assert len(always.errors) == 9 - len(waits) - 1 == 4
    with pytest.raises(LockNotAvailable):
        again_after_conflict(Transaction(LockNotAvailable()))
    assert len(waits) == 4
