"""A run's claim on a source: while a session of its own holds the source's lock, no other run writes it.

The lock ends with the session, and so with the store's server. Where that comes back the claim is made
again; a run that finds the source claimed by another one then must end.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import psycopg
import structlog

from penstock.core import queries
from penstock.core.connect import is_lost
from penstock.core.errors import StoreError
from penstock.streams.connect import connect
from penstock.streams.errors import store_error
from penstock.streams.names import LOCK_RUN

PATIENCE: Final = 75.0
"""How long, in seconds, a server may hold the lock of a session whose client is gone."""
_LOOK_SECONDS: Final = 0.25
_RETRY_SECONDS: Final = 0.5
_STOP_SECONDS: Final = 2.0

_SQL: Final = queries.load("penstock.streams", "store.sql")

log = structlog.get_logger("penstock")


class Claim:
    """The claim on one source of the store at `url`; for one thread at a time."""

    def __init__(self, url: str, source_id: int) -> None:
        self._url = url
        self._source_id = source_id
        self._connection: psycopg.Connection[Any] | None = None

    def acquire(self) -> bool:
        """Claim the source over a new session; return False where another run has it."""
        self.close()
        try:
            self._connection = connect(self._url)
            self._connection.execute(_SQL["claim_session"])
            values = [LOCK_RUN, self._source_id]
            row = self._connection.execute(_SQL["try_session_lock"], values).fetchone()
        except psycopg.Error as error:
            self.close()
            raise store_error(error, self._url) from None
        if row is not None and row[0]:
            return True
        self.close()
        return False

    @property
    def is_lost(self) -> bool:
        """Whether the session that had the lock has ended."""
        return self._connection is None or is_lost(self._connection)

    def close(self) -> None:
        """Give the source up."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Claims:
    """The claims of one run, made again in a thread where their sessions end.

    `on_taken` is called with a source's name and why, once it is clear that another run has it.
    """

    def __init__(self, on_taken: Callable[[str, StoreError], object]) -> None:
        self._on_taken = on_taken
        self._claims: dict[str, Claim] = {}
        self._lost_at: dict[str, float] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="claims", daemon=True)

    def add(self, source: str, claim: Claim) -> None:
        """Keep a claim that was acquired."""
        self._claims[source] = claim
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """Give all up."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(_STOP_SECONDS)
        for claim in self._claims.values():
            claim.close()

    def _run(self) -> None:
        while not self._stopped.wait(_LOOK_SECONDS):
            for source, claim in list(self._claims.items()):
                if claim.is_lost:
                    self._claim_again(source, claim)

    def _claim_again(self, source: str, claim: Claim) -> None:
        if source not in self._lost_at:
            self._lost_at[source] = time.monotonic()
            log.warning("the claim on the source is lost: its session in the store ended",
                        source=source)  # fmt: skip
        since = self._lost_at[source]
        with contextlib.suppress(StoreError):  # the store is away: that is reported by others
            if claim.acquire():
                if self._stopped.is_set():  # `close` may not have waited for this one
                    claim.close()
                    return
                del self._lost_at[source]
                seconds = round(time.monotonic() - since, 1)
                log.info("the source is claimed again", source=source, seconds=seconds)
                return
            if time.monotonic() - since > PATIENCE:
                del self._claims[source]
                self._on_taken(source, claimed_by_another(source))
                return
        self._stopped.wait(_RETRY_SECONDS)


def claimed_by_another(source: str) -> StoreError:
    """Return why a run can't have a source."""
    return StoreError(
        "source_claimed",
        f"Another penstock run writes source {source} into this store.",
        remedy="Stop it, or give this source another name.",
    )
