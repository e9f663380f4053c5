"""The status of a database's outboxes, inboxes and pipelines, for the commands."""

from __future__ import annotations

from typing import Any

import psycopg

from penstock.core import connect as postgres
from penstock.outbox.errors import install_error, not_installed
from penstock.outbox.sql import catalog
from penstock.postgres.connect import connect_through


def connect(url: str) -> postgres.Connection:
    """Return a connection in autocommit mode; raises `CaptureError` where there is none."""
    try:
        return connect_through(url, application_name="penstock outbox")
    except psycopg.Error as error:
        raise postgres.connection_error(error, url) from None


def status(url: str) -> dict[str, Any]:
    """Return `catalog.status`; raises `CaptureError`.

    Each of its pipelines also has how many messages it has not delivered (`pending`) and since when
    (`pending_since`); both are None where that is not known.
    """
    with connect(url) as connection:
        try:
            schema = catalog.find_schema(connection)
            if not schema.installed:
                raise not_installed(schema.database, url)
            found = catalog.status(connection)
        except psycopg.Error as error:
            raise install_error(error) from None
    waiting = {of["pipeline"]: of for box in found["outboxes"] for of in box["pipelines"]}
    for pipeline in found["pipelines"]:
        of = waiting.get(pipeline["pipeline"], {})
        pipeline |= {key: of.get(key) for key in ("pending", "pending_since")}
    return found


def pipelines(url: str, group: str | None = None) -> list[dict[str, Any]]:
    """Return the pipelines of a group, or of all groups, from `status`; raises `CaptureError`."""
    return [of for of in status(url)["pipelines"] if group in (None, of["relay_group"])]
