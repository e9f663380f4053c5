"""What the commands ask of a database's outboxes; errors are `CaptureError`s that say what to do."""

from __future__ import annotations

from typing import Any

import psycopg

from penstock.outbox import catalog
from penstock.outbox.errors import install_error, not_installed
from penstock.postgres.admin import connection_error


def connect(url: str) -> psycopg.Connection[Any]:
    """Return a connection in autocommit mode; raises `CaptureError` where there is none."""
    try:
        return psycopg.connect(
            url, autocommit=True, connect_timeout=10, application_name="penstock outbox"
        )
    except psycopg.Error as error:
        raise connection_error(error, url) from None


def status(url: str) -> dict[str, Any]:
    """Return `outboxes`, `inboxes` and `pipelines`, see `catalog.status`; raises `CaptureError`."""
    with connect(url) as connection:
        try:
            schema = catalog.find_schema(connection)
            if not schema.installed:
                raise not_installed(schema.database, url)
            return catalog.status(connection)
        except psycopg.Error as error:
            raise install_error(error) from None


def pipelines(url: str, group: str | None = None) -> list[dict[str, Any]]:
    """Return the pipelines of a group, or of all; raises `CaptureError`.

    Each is as `tide.relay_status` tells it, with how many messages wait for it (`pending`) and since
    when (`pending_since`), both None where that is not known.
    """
    found = status(url)
    waiting = {of["pipeline"]: of for box in found["outboxes"] for of in box["pipelines"]}
    return [
        pipeline
        | {
            key: waiting.get(pipeline["pipeline"], {}).get(key)
            for key in ("pending", "pending_since")
        }
        for pipeline in found["pipelines"]
        if group in (None, pipeline["relay_group"])
    ]
