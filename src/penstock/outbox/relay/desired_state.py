"""The desired state of a relay group: its pipelines, and the configuration made of them.

A pipeline that can't run, or is disabled, stays in its group's configuration once it has a checkpoint:
its messages wait in its backlog. So its checkpoint is exact, and no WAL is kept for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from psycopg.conninfo import conninfo_to_dict, make_conninfo
from pydantic import SecretStr

from penstock.config.settings import Config, SparkSettings
from penstock.config.sinks import Sink
from penstock.config.sources import PostgresSource, SourceUrl
from penstock.core.errors import CaptureError, PipelineError
from penstock.core.health import Failure
from penstock.outbox.pipelines import DISABLED, PUBLICATION, StoredPipeline, slot_of
from penstock.outbox.settings import OutboxSinkSettings, paused_sink, read
from penstock.spark import planning

# The server drops a walsender, and so frees its slot, when its client is silent for that long.
_WALSENDER_TIMEOUT: Final = "-c wal_sender_timeout=5s"
_DISABLED: Final = Failure(
    DISABLED, "The pipeline is disabled; its messages are kept.", "select tide.relay_enable(…)"
)


@dataclass
class DesiredPipelines:
    """The desired state of a group.

    Attributes:
        group: The group's name.
        source: The name of the source in `config`.
        pipelines: All pipelines of the group.
        config: The configuration of its run: the source, and a sink for each pipeline that has one.
        paused: Sinks whose messages only wait, and why.
        left_out: Pipelines without a sink, and why: they never ran, or their messages can't be
            routed. The outbox keeps the messages.
    """

    group: str
    source: str
    pipelines: dict[str, StoredPipeline]
    config: Config
    paused: dict[str, Failure] = field(default_factory=dict)
    left_out: dict[str, Failure] = field(default_factory=dict)

    @property
    def sinks(self) -> Mapping[str, Sink]:
        """The sinks, by the names of their pipelines."""
        return self.config.sinks

    @property
    def begun(self) -> bool:
        """Whether the group has run before."""
        return any(pipeline.checkpointed for pipeline in self.pipelines.values())

    def runs_as(self, other: DesiredPipelines | None) -> bool:
        """Return whether a run of `other` is a run of this one.

        Pipelines that neither of them runs make no difference.
        """
        return other is not None and self._run == other._run

    @property
    def _run(self) -> tuple[Config, dict[str, Failure], dict[str, datetime]]:
        created = {name: self.pipelines[name].created_at for name in self.sinks}
        return self.config, self.paused, created


def capture_url(url: str) -> str:
    """Return the URL with the settings of a relay's sessions."""
    given = conninfo_to_dict(url).get("options")
    return make_conninfo(
        url, options=f"{given} {_WALSENDER_TIMEOUT}" if given else _WALSENDER_TIMEOUT
    )


class GroupPlanner:
    """Makes the desired states of groups; caches what it read of the catalog for each route.

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
        self._bastion = url.bastion if isinstance(url, SourceUrl) else None
        self.database = database
        self._store = store
        self._spark = spark
        self._name_of = name_of
        self._known: dict[str, tuple[OutboxSinkSettings, Failure | None]] = {}

    def plan(
        self, pipelines: Iterable[StoredPipeline], environ: Mapping[str, str] = os.environ
    ) -> dict[str, DesiredPipelines]:
        """Return the desired state of each group.

        References are resolved each time, so that a changed file counts.
        """
        groups: dict[str, list[StoredPipeline]] = {}
        for pipeline in pipelines:
            groups.setdefault(pipeline.relay_group, []).append(pipeline)
        return {group: self._group(group, of, environ) for group, of in groups.items()}

    def _group(
        self, group: str, pipelines: list[StoredPipeline], environ: Mapping[str, str]
    ) -> DesiredPipelines:
        name = self._name_of(group)
        source = PostgresSource(
            type="postgres", url=SecretStr(self._url),
            tables=tuple(sorted({pipeline.table for pipeline in pipelines})),
            slot=slot_of(group, self.database), publication=PUBLICATION,
        ).behind(self._bastion)  # fmt: skip
        sinks: dict[str, Sink] = {}
        paused: dict[str, Failure] = {}
        left_out: dict[str, Failure] = {}
        for pipeline in pipelines:
            sink, failure = self._sink(name, source, pipeline, environ)
            if failure is not None and (sink is None or not pipeline.checkpointed):
                left_out[pipeline.pipeline] = failure
            elif sink is not None:
                sinks[pipeline.pipeline] = sink
                if failure is not None:
                    paused[pipeline.pipeline] = failure
        config = Config(
            sources={name: source}, sinks=sinks, store=SecretStr(self._store), spark=self._spark
        )
        by_name = {pipeline.pipeline: pipeline for pipeline in pipelines}
        return DesiredPipelines(group, name, by_name, config, paused, left_out)

    def _sink(
        self,
        name: str,
        source: PostgresSource,
        pipeline: StoredPipeline,
        environ: Mapping[str, str],
    ) -> tuple[OutboxSinkSettings | None, Failure | None]:
        """Return the sink of a pipeline, None without a usable route, and why it does not run."""
        failure = refused = None
        sink: OutboxSinkSettings | None
        try:
            sink = read(pipeline.config, environ).sink(
                source=name, outbox=pipeline.outbox, tag=pipeline.outbox_tag
            )
        except PipelineError as error:
            sink = paused_sink(pipeline.config, environ, source=name, outbox=pipeline.outbox)
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
        """Return why a route does not fit the outbox's columns."""
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
