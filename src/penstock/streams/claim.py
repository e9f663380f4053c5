"""A run's claim on a source: no other run writes it meanwhile.

A claim is the source's lock, which a session of its own holds, and a lease that beats. The lock ends
with the session, and so with the store's server: where that comes back the claim is made again. The
lease ends by the store's clock: where a machine is gone, its session is not waited for. Each change of
hands has a new epoch, and the store refuses what is written for an earlier one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid
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
LEASE_SECONDS: Final = 6.0
"""How long a lease lasts after its last beat."""
_BEAT_SECONDS: Final = 1.5
_LOOK_SECONDS: Final = 0.5
_RETRY_SECONDS: Final = 0.5
_STOP_SECONDS: Final = 2.0

_TOKEN: Final = uuid.uuid4().hex
_SQL: Final = queries.load("penstock.streams", "store.sql")

log = structlog.get_logger("penstock")


def holder() -> str:
    """Return what other runs know this process by."""
    return f"{socket.gethostname()} (process {os.getpid()})"


class Claim:
    """The claim on one source of the store at `url`; for one thread at a time.

    Args:
        url: The store's URL.
        source_id: The source.
        beats: Whether `beat` is called all the while; a claim that does not beat ends with its session.
    """

    def __init__(self, url: str, source_id: int, *, beats: bool = False) -> None:
        self.epoch: int | None = None
        """The epoch under which the source is written, once it was acquired."""
        self.others_epoch: int | None = None
        """The epoch under which another process writes it, where `acquire` has returned False."""
        self.holder: str | None = None
        """Who has the source, where `acquire` has returned False."""
        self.took_over = False
        """Whether the last holder has left without giving the source up."""
        self._url = url
        self._source_id = source_id
        self._beats = beats
        self._connection: psycopg.Connection[Any] | None = None

    def acquire(self) -> bool:
        """Claim the source over a new session; return False where another run has it.

        Raises `StoreError`.
        """
        self._end()
        try:
            self._connection = connect(self._url)
            self._connection.execute(_SQL["claim_session"])
            if self._lock(self._connection):
                return True
        except psycopg.Error as error:
            self._end()
            raise store_error(error, self._url) from None
        self._end()
        return False

    def _lock(self, connection: psycopg.Connection[Any]) -> bool:
        values: dict[str, object] = {
            "source": self._source_id,
            "seconds": LEASE_SECONDS,
            "lock": LOCK_RUN,
        }
        row = connection.execute(_SQL["try_session_lock"], [LOCK_RUN, self._source_id]).fetchone()
        lease = connection.execute(_SQL["lease"], values).fetchone()
        if row is None or not row[0]:
            self.holder = "another process" if lease is None else str(lease[1])
            self.others_epoch = None if lease is None else int(lease[4])
            if lease is not None and lease[2] and lease[0] != _TOKEN:
                with contextlib.suppress(psycopg.errors.InsufficientPrivilege):
                    connection.execute(_SQL["end_holder"], values)
            return False
        other = lease is None or lease[0] != _TOKEN
        self.took_over = lease is not None and other and not lease[3]
        self.holder = None
        values |= {"token": _TOKEN, "holder": holder(), "beats": self._beats, "changed": other}
        with connection.transaction():
            connection.execute(_SQL["take_lease"], values)
            epoch = connection.execute(_SQL["change_hands"], values).fetchone()
        self.epoch = None if epoch is None else int(epoch[0])
        return True

    def beat(self) -> bool:
        """Renew the lease; return False where another process has it. Raises `psycopg.Error`."""
        if self._connection is None:
            raise psycopg.OperationalError("the session has ended")
        values = {"source": self._source_id, "token": _TOKEN}
        return self._connection.execute(_SQL["beat"], values).fetchone() is not None

    @property
    def is_lost(self) -> bool:
        """Whether the session that had the lock has ended."""
        return self._connection is None or is_lost(self._connection)

    def close(self) -> None:
        """Give the source up."""
        if self._connection is not None and self.epoch is not None:
            # The answer is not awaited: the server may hang, and the lock ends with the session anyway.
            with contextlib.suppress(psycopg.Error):
                pgconn = self._connection.pgconn
                values = [str(self._source_id).encode(), _TOKEN.encode()]
                pgconn.send_query_params(_SQL["release_lease"].encode(), values)
                pgconn.flush()
        self._end()

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Claims:
    """The claims of one run: they beat in a thread, and are made again where their sessions end.

    `on_taken` is called with a source's name and why, once it is clear that another run has it.
    """

    def __init__(self, on_taken: Callable[[str, StoreError], object]) -> None:
        self._on_taken = on_taken
        self._claims: dict[str, Claim] = {}
        self._lost_at: dict[str, float] = {}
        self._beat_at = 0.0
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
            due = time.monotonic() >= self._beat_at
            if due:
                self._beat_at = time.monotonic() + _BEAT_SECONDS
            for source, claim in list(self._claims.items()):
                if claim.is_lost:
                    self._claim_again(source, claim)
                elif due:
                    with contextlib.suppress(
                        psycopg.Error
                    ):  # its session has ended: seen next time
                        if not claim.beat():
                            self._give_up(source, None)

    def _claim_again(self, source: str, claim: Claim) -> None:
        if source not in self._lost_at:
            self._lost_at[source] = time.monotonic()
            log.warning("the claim on the source is lost: its session in the store ended",
                        source=source)  # fmt: skip
        since, epoch = self._lost_at[source], claim.epoch
        with contextlib.suppress(StoreError):  # the store is away: that is reported by others
            if claim.acquire():
                if self._stopped.is_set():  # `close` may not have waited for this one
                    claim.close()
                    return
                del self._lost_at[source]
                if claim.epoch != epoch:  # another one had it meanwhile
                    claim.close()
                    self._give_up(source, None)
                    return
                seconds = round(time.monotonic() - since, 1)
                log.info("the source is claimed again", source=source, seconds=seconds)
                return
            if claim.holder not in (None, holder()) or time.monotonic() - since > PATIENCE:
                self._give_up(source, claim.holder)
                return
        self._stopped.wait(_RETRY_SECONDS)

    def _give_up(self, source: str, holder: str | None) -> None:
        del self._claims[source]
        self._on_taken(source, claimed_by_another(source, holder))


def claimed_by_another(source: str, holder: str | None = None) -> StoreError:
    """Return why a run can't have a source."""
    by = "" if holder is None else f": {holder}"
    return StoreError(
        "source_claimed",
        f"Another penstock run writes source {source} into this store{by}.",
        remedy="Stop it, or give this source another name.",
    )
