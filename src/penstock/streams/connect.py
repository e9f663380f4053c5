"""How Penstock connects to the store, and the settings that each of its sessions there has."""

from __future__ import annotations

import select
from collections.abc import Mapping
from typing import Any, Final

import psycopg

from penstock.core import queries

CONNECT: Final[Mapping[str, Any]] = {
    "application_name": "penstock",
    "connect_timeout": 10,
    "client_encoding": "utf8",
    "keepalives_idle": 20,
    "keepalives_interval": 5,
    "keepalives_count": 4,
    "tcp_user_timeout": 30_000,  # milliseconds; a dead network shows itself
}
"""What every connection to the store is opened with; `SESSION` is to be run there first."""

SESSION: Final = queries.load("penstock.streams", "store.sql")["session"]


def connect(url: str) -> psycopg.Connection[Any]:
    """Return a connection in autocommit mode; raises what psycopg does."""
    connection = psycopg.connect(url, autocommit=True, **CONNECT)
    try:
        connection.execute(SESSION)
    except BaseException:
        connection.close()
        raise
    return connection


def is_lost(connection: psycopg.BaseConnection[Any]) -> bool:
    """Return whether the server has ended an idle connection, without asking it anything."""
    if connection.closed:
        return True
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    try:
        while poll.poll(0):  # a notice, a notification, or a last message before the end
            connection.pgconn.consume_input()
    except psycopg.Error:
        return True
    return False
