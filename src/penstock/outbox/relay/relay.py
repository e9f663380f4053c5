"""The relay: runs the pipelines of a database's outboxes and inboxes, one run for each group.

It reads the pipelines at each NOTIFY, and every few seconds. When a group's desired state changes, its
run ends, and the next one continues from its slot and the store's backlogs. Of several relays the one
that holds a group's lock runs the group; the others stand by, with Spark ready.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

import psycopg
import structlog
from psycopg import sql
from pyspark.sql import SparkSession

from penstock.config.settings import Config
from penstock.config.sources import OutboxSource, PostgresSource
from penstock.core import queries
from penstock.core.errors import CaptureError, SetupError
from penstock.core.health import Failure, Part, worker_part
from penstock.outbox.errors import not_installed
from penstock.outbox.pipelines import (
    InboxPipeline,
    StoredPipeline,
    find,
    find_inboxes,
    slot_of,
    source_name,
)
from penstock.outbox.relay.desired_state import DesiredPipelines, GroupPlanner
from penstock.outbox.relay.group import Group
from penstock.outbox.relay.lease import GroupLease, Leases
from penstock.outbox.relay.shared import SharedStreams
from penstock.outbox.relay.sweep import Sweeper
from penstock.outbox.sessions import connect, postgres_error
from penstock.outbox.sql.catalog import version_of
from penstock.outbox.sql.install import version_fault
from penstock.postgres.admin import open_catalog
from penstock.postgres.setup import server_fault
from penstock.runtime.state import RunState
from penstock.streams.bastions import reachable
from penstock.streams.store import Store

_SQL: Final = queries.load("penstock.outbox.relay", "relay.sql")
_POLL_SECONDS: Final = 5.0
_LISTEN_SECONDS: Final = 0.5
# Each change replaces a group's run, so several changes in a row are read as one.
_QUIET_SECONDS: Final = (0.5, 2.0)
_RETRY_SECONDS: Final = 1.0

log = structlog.get_logger("penstock")


class Relay:
    """Relays the outboxes of one database, from `start` until `stop`.

    Args:
        name: Its name in the configuration.
        source: The outboxes' database, and the group that runs here, if not all do.
        config: The store, if that is another database, and Spark's settings.
    """

    def __init__(self, name: str, source: OutboxSource, config: Config) -> None:
        self.name = name
        self._source = source
        self._url = source.address
        self._only = source.relay_group
        own_store = config.store is not None and config.store != source.url
        self._store = (config.store or source.url).get_secret_value()
        self._own_store = own_store
        self._config = config
        self._spark: SparkSession | None = None
        self._planner: GroupPlanner | None = None
        self._groups: dict[str, Group] = {}
        self._shared = SharedStreams()
        self._sweeper = Sweeper()
        self._leases = Leases(self._url, self._current_leases)
        self._stopping = threading.Event()
        self._refreshed = False
        self._failure: Failure | None = None
        self._idle_logged = False
        self._thread = threading.Thread(target=self._watch, name=f"relay {name}", daemon=True)

    # -- status

    @property
    def ready(self) -> bool:
        """Whether each group delivers, has nothing to run, or stands by."""
        return self._refreshed and all(group.status.ready for group in self._groups.values())

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self._thread.is_alive()

    def parts(self) -> list[Part]:
        """Return its health, and that of its groups; their runs have states of their own."""
        subject, now = f"relay {self.name}", time.time()
        own = worker_part(subject, self._failure, now, starting=not self._refreshed)
        return [own] + [part for g in list(self._groups.values()) for part in g.status.parts(now)]

    def states(self) -> list[RunState]:
        """Return the states of the groups' runs."""
        return [
            state for g in list(self._groups.values()) if (state := g.status.run_state) is not None
        ]

    def as_json(self) -> dict[str, Any]:
        """Return its part of `/status`: each group's state."""
        return self._shared.with_warnings(
            {n: group.status.as_json() for n, group in list(self._groups.items())}
        )

    # -- the process

    def prepare(self) -> None:
        """Check that the database can be relayed from; raises `SetupError` and `StoreError`."""
        if self._source.bastion is not None:
            with Store.open(self._store) as store:
                self._url = reachable(self._source, self.name, store).address
            self._leases = Leases(self._url, self._current_leases)
        source = PostgresSource(type="postgres", url=self._source.url, tables=("tide.*",))
        with open_catalog(source.behind(self._url.bastion)) as catalog:
            (row,) = catalog.connection.execute(_SQL["access"]).fetchall()
            installed, database, role, allowed = row
            if not installed:
                raise not_installed(database, self._url)
            if not allowed:
                raise SetupError(
                    "no_privilege",
                    f"Role {role} may not read tide.relays in database {database}.",
                    remedy="As the role that installed the schema: select tide.relay_grant("
                    f"{sql.Literal(role).as_string(catalog.connection)}); or relay as that one.",
                )
            wrong = version_fault(version_of(catalog.connection))
            if wrong is not None:
                message, remedy = wrong
                raise SetupError(
                    "wrong_version",
                    f"The schema tide of database {database}: {message}.", remedy=f"Do: {remedy}.",
                )  # fmt: skip
            # Inboxes alone need no capture.
            fault = server_fault(catalog)
            if fault and (find(catalog.connection) or not find_inboxes(catalog.connection)):
                raise fault
            self._planner = GroupPlanner(
                self._url, database, self._store, self._config.spark,
                lambda group: source_name(group, database if self._own_store else None),
            )  # fmt: skip

    def start(self, spark: SparkSession) -> None:
        """Start the threads; `prepare` has been called."""
        self._spark = spark
        self._thread.start()
        self._leases.start()

    def stop(self) -> None:
        """Begin an orderly end, from any thread."""
        self._stopping.set()
        for group in list(self._groups.values()):
            group.stop()

    def join(self) -> None:
        """Wait for the end."""
        if self._thread.ident is not None:
            self._thread.join()
        for group in self._groups.values():
            group.join()
        self._leases.stop()

    def _current_leases(self) -> list[GroupLease]:
        return [of for g in list(self._groups.values()) if (of := g.lease()) is not None]

    # -- the watching thread

    def _watch(self) -> None:
        while not self._stopping.is_set():
            try:
                with contextlib.closing(connect(self._url)) as connection:
                    connection.execute(_SQL["listen"])
                    for _ in self._wakeups(connection):
                        self._refresh(connection)
                        self._sweeper.sweep(connection)
                        if self._failure is not None:
                            self._failure = None
                            log.info("the relay reads its pipelines again", relay=self.name)
            except psycopg.Error as error:
                known = postgres_error(error, self._url)
                self._fail(known, "the outboxes' database does not answer")
                self._stopping.wait(_RETRY_SECONDS)
            except CaptureError as error:  # such as a route that can't be checked now
                self._fail(error, "the relay could not read its pipelines")
                self._stopping.wait(_POLL_SECONDS)
            except Exception as error:
                cause = f"Unexpected: {type(error).__name__}."
                self._keep(Failure("internal", cause, "See the relay's log."))
                log.exception("the relay could not read its pipelines", relay=self.name)
                self._stopping.wait(_POLL_SECONDS)

    def _fail(self, error: CaptureError, event: str) -> None:
        """Report why the relay could not read its pipelines; log it once."""
        if self._failure is None:
            log.warning(event, relay=self.name, code=error.code, error=str(error))
        self._keep(Failure.by(error))

    def _keep(self, failure: Failure) -> None:
        self._failure = failure.lasting(self._failure, time.time())

    def _wakeups(self, connection: psycopg.Connection[Any]) -> Iterator[None]:
        """Yield at once, soon after a notification, and every few seconds."""
        quiet, most = _QUIET_SECONDS
        due, latest = time.monotonic(), math.inf
        while not self._stopping.is_set():
            left = due - time.monotonic()
            if left <= 0:
                yield
                pause = _QUIET_SECONDS[0] if self._sweeper.busy else _POLL_SECONDS
                due, latest = time.monotonic() + pause, math.inf
                continue
            if list(connection.notifies(timeout=min(left, _LISTEN_SECONDS), stop_after=1)):
                now = time.monotonic()
                latest = min(latest, now + most)
                due = min(now + quiet, latest)

    def _refresh(self, connection: psycopg.Connection[Any]) -> None:
        assert self._planner is not None  # noqa: S101 - `prepare` comes first
        assert self._spark is not None  # noqa: S101 - as above
        slots = [row[0] for row in connection.execute(_SQL["idle_slots"])]
        found = find(connection)
        self._drop_slots(connection, slots, found)
        mine = [p for p in found if self._only in (None, p.relay_group)]
        planned = self._planner.plan(mine)
        self._shared.check(planned.values())
        inboxes: dict[str, list[InboxPipeline]] = {}
        for into in find_inboxes(connection):
            if self._only in (None, into.relay_group):
                inboxes.setdefault(into.relay_group, []).append(into)
        for name in (planned.keys() | inboxes.keys()) - self._groups.keys():
            group = Group(name, self._url, self._planner.database, self._store, self._spark)
            self._groups[name] = group
            group.start()
        for name, group in self._groups.items():
            group.set_desired(planned.get(name), inboxes.get(name, ()))
        self._refreshed = True
        self._log_idle(planned, any(p.enabled for of in inboxes.values() for p in of))

    def _drop_slots(
        self, connection: psycopg.Connection[Any], idle: list[str], pipelines: list[StoredPipeline]
    ) -> None:
        """Drop the slots of groups without pipelines: they would keep the server's WAL for ever.

        A relay of inboxes alone may lack the right; then the slots stay.
        """
        assert self._planner is not None  # noqa: S101 - as above
        in_use = {slot_of(p.relay_group, self._planner.database) for p in pipelines}
        for slot in set(idle) - in_use:
            refused = psycopg.errors.ObjectInUse, psycopg.errors.InsufficientPrivilege
            with contextlib.suppress(*refused):
                connection.execute(_SQL["drop_slot"], [slot])
                log.info("slot dropped: its group has no pipelines any more", slot=slot)

    def _log_idle(self, planned: dict[str, DesiredPipelines], filling: bool) -> None:
        idle = not filling and not any(
            p.enabled for desired in planned.values() for p in desired.pipelines.values()
        )
        if idle and not self._idle_logged:
            which = "" if self._only is None else f" in group {self._only}"
            log.warning(
                f"no pipeline is enabled{which}: waiting for one", relay=self.name,
                remedy="select tide.relay_enable('…'); select * from tide.relay_list() lists them",
            )  # fmt: skip
        self._idle_logged = idle
