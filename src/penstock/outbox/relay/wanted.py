"""What a relay shall run: the pipelines that `tide.relays` has, and the configuration made of them.

A pipeline that can't be run, or is not to run now, stays in its group's configuration once it has
begun: its messages wait in its backlog, so that its place is exact and no WAL is held for it.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import class_row
from pydantic import SecretStr

from penstock.config.settings import Config, PostgresSource, Sink, SparkSettings, slot_name
from penstock.core import queries
from penstock.core.errors import CaptureError, PipelineError
from penstock.core.health import Failure
from penstock.core.tables import qualified_name
from penstock.outbox.settings import OutboxSinkSettings, held, read
from penstock.spark import planning

PUBLICATION: Final = "tide"
# The server lets go of a slot when it has heard nothing for so long, and of a session alike.
_WALSENDER_TIMEOUT: Final = "-c wal_sender_timeout=5s"
_SQL: Final = queries.load("penstock.outbox.relay", "relay.sql")

DISABLED: Final = "disabled"


@dataclass(frozen=True)
class Pipeline:
    """A row of `tide.relays` with its place; `snapshot` and `delivered` are what it had delivered.

    `placed`: a relay has run it, so that what is committed goes to its sink or into its backlog, which
    is in `store`. `created_at` differs from that of a deleted one of its name, `outbox_tag` for each
    outbox of a name, here and elsewhere.
    """

    pipeline: str
    outbox: str
    relay_group: str
    config: dict[str, Any]
    enabled: bool
    placed: bool
    snapshot: str | None
    delivered: int
    created_at: datetime
    store: str | None = None
    outbox_tag: str = ""

    @property
    def table(self) -> str:
        """The outbox's table, as SQL takes it."""
        return qualified_name("tide", f"outbox_{self.outbox}")


@dataclass
class Wanted:
    """What a group shall run: `config` has its source, called `source`, and a sink each pipeline.

    `held` are the sinks whose messages only wait; `left_out` are pipelines that are not in the
    configuration, as they never began, or as their messages can't be routed: the outbox keeps these.
    """

    group: str
    source: str
    pipelines: dict[str, Pipeline]
    config: Config
    held: dict[str, Failure] = field(default_factory=dict)
    left_out: dict[str, Failure] = field(default_factory=dict)

    @property
    def sinks(self) -> Mapping[str, Sink]:
        """The sinks, by the names of their pipelines."""
        return self.config.sinks

    @property
    def begun(self) -> bool:
        """Whether the group has run before."""
        return any(pipeline.placed for pipeline in self.pipelines.values())

    def same(self, other: Wanted | None) -> bool:
        """Return whether `other` would run the same pipelines as this does, and in the same way.

        Pipelines that neither would run make no difference.
        """
        return other is not None and (
            self.config, self.held, self._created
        ) == (other.config, other.held, other._created)  # fmt: skip

    @property
    def _created(self) -> dict[str, datetime]:
        return {name: self.pipelines[name].created_at for name in self.sinks}


def find(connection: psycopg.Connection[Any]) -> list[Pipeline]:
    """Return the pipelines from outboxes, of all groups."""
    with connection.cursor(row_factory=class_row(Pipeline)) as cursor:
        return cursor.execute(_SQL["pipelines"]).fetchall()


def source_name(group: str, database: str | None = None) -> str:
    """Return what the store calls a group's source; `database` is named where the store is another."""
    name = group if database is None else f"{database}.{group}"
    return "tide." + re.sub(r"[^A-Za-z0-9_.-]", "_", name)


def slot_of(group: str, database: str) -> str:
    """Return the name of a group's slot: slots are the server's, so that it names the database too.

    `tide._slot` makes the same.
    """
    digest = hashlib.sha256(f"{database}\0{group}".encode()).hexdigest()[:8]
    return f"tide_{slot_name(group)[:49]}_{digest}"


def capture_url(url: str) -> str:
    """Return the URL with the settings of a relay's sessions."""
    given = conninfo_to_dict(url).get("options")
    return make_conninfo(
        url, options=f"{given} {_WALSENDER_TIMEOUT}" if given else _WALSENDER_TIMEOUT
    )


class Planner:
    """Makes `Wanted`s of pipelines; keeps what it found out about each, as that takes a while.

    Args:
        url: The outboxes' database.
        database: Its name.
        store: The store's URL.
        spark: The settings of the session.
        name_of: Gives the source's name of a group.
    """

    def __init__(
        self,
        url: str,
        database: str,
        store: str,
        spark: SparkSettings,
        name_of: Callable[[str], str],
    ) -> None:
        self._url = capture_url(url)
        self.database = database
        self._store = store
        self._spark = spark
        self._name_of = name_of
        self._known: dict[str, tuple[OutboxSinkSettings, Failure | None]] = {}

    def plan(
        self, pipelines: Iterable[Pipeline], environ: Mapping[str, str] = os.environ
    ) -> dict[str, Wanted]:
        """Return what each group shall run now.

        References are resolved each time: a file that is there now, or has another content, counts.
        """
        groups: dict[str, list[Pipeline]] = {}
        for pipeline in pipelines:
            groups.setdefault(pipeline.relay_group, []).append(pipeline)
        return {group: self._group(group, of, environ) for group, of in groups.items()}

    def _group(self, group: str, pipelines: list[Pipeline], environ: Mapping[str, str]) -> Wanted:
        name = self._name_of(group)
        source = PostgresSource(
            type="postgres", url=SecretStr(self._url),
            tables=tuple(sorted({pipeline.table for pipeline in pipelines})),
            slot=slot_of(group, self.database), publication=PUBLICATION,
        )  # fmt: skip
        sinks: dict[str, Sink] = {}
        waiting: dict[str, Failure] = {}
        left_out: dict[str, Failure] = {}
        for pipeline in pipelines:
            sink, failure = self._sink(name, source, pipeline, environ)
            if failure is not None and (sink is None or not pipeline.placed):
                left_out[pipeline.pipeline] = failure
            elif sink is not None:
                sinks[pipeline.pipeline] = sink
                if failure is not None:
                    waiting[pipeline.pipeline] = failure
        config = Config(
            sources={name: source}, sinks=sinks, store=SecretStr(self._store), spark=self._spark
        )
        by_name = {pipeline.pipeline: pipeline for pipeline in pipelines}
        return Wanted(group, name, by_name, config, waiting, left_out)

    def _sink(
        self, name: str, source: PostgresSource, pipeline: Pipeline, environ: Mapping[str, str]
    ) -> tuple[OutboxSinkSettings | None, Failure | None]:
        """Return the sink of a pipeline, and why it does not run; no sink: it has no usable route."""
        failure = refused = None
        sink: OutboxSinkSettings | None
        try:
            sink = read(pipeline.config, environ).sink(
                source=name, outbox=pipeline.outbox, tag=pipeline.outbox_tag
            )
        except PipelineError as error:
            sink = held(pipeline.config, environ, source=name, outbox=pipeline.outbox)
            failure = Failure.by(error)
        if sink is not None:
            refused = self._checked(source, pipeline.pipeline, sink)
        if refused is not None:
            sink = None
        if not pipeline.enabled:
            return sink, _DISABLED
        return sink, failure or refused

    def _checked(
        self, source: PostgresSource, name: str, sink: OutboxSinkSettings
    ) -> Failure | None:
        """Return what the outbox's columns have against a route."""
        if sink.route is None:
            return None
        known = self._known.get(name)
        if known is not None and known[0] == sink:
            return known[1]
        try:
            planning.of_source(source, {name: sink})
            failure = None
        except CaptureError as error:
            if error.transient:
                raise
            failure = Failure.by(error)
        self._known[name] = sink, failure
        return failure


_DISABLED: Final = Failure(
    DISABLED, "The pipeline is disabled; its messages are kept.", "select tide.relay_enable(…)"
)
