"""A pipeline's configuration as it is set now, for commands that run beside the relay."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

import psycopg

from penstock.config.settings import Config
from penstock.config.sources import OutboxSource, PostgresSource
from penstock.core.errors import PipelineError, SinkError
from penstock.outbox.errors import install_error
from penstock.outbox.pipelines import PUBLICATION, StoredPipeline, find, source_name
from penstock.outbox.sessions import connect, postgres_error
from penstock.outbox.settings import read


def pipelines(source: OutboxSource) -> dict[str, StoredPipeline]:
    """Return the pipelines of a database's outboxes by their names; raises `CaptureError`."""
    url = source.address
    try:
        connection = connect(url)
    except psycopg.Error as error:
        raise postgres_error(error, url) from None
    with contextlib.closing(connection):
        try:
            return {pipeline.pipeline: pipeline for pipeline in find(connection)}
        except psycopg.Error as error:
            raise install_error(error) from None


def configuration(
    source: OutboxSource, pipeline: StoredPipeline, environ: Mapping[str, str] = os.environ
) -> Config:
    """Return a configuration whose one sink is that of a pipeline, enabled or not.

    References are resolved in this process. Raises `SinkError` where the config can't be used.
    """
    name = source_name(pipeline.relay_group)
    try:
        sink = read(pipeline.config, environ).sink(
            source=name, outbox=pipeline.outbox, tag=pipeline.outbox_tag
        )
    except PipelineError as error:
        raise SinkError(
            error.code,
            f"Pipeline {pipeline.pipeline}: {error.message}.",
            remedy=error.remedy,
            transient=False,
        ) from None
    captured = PostgresSource(
        type="postgres", url=source.url, tables=(pipeline.table,), publication=PUBLICATION
    ).behind(source.reached)
    return Config(sources={name: captured}, sinks={pipeline.pipeline: sink})
