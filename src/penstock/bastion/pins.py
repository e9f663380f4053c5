"""The host key that is pinned now: `penstock target trust` may have pinned another since the start."""

from __future__ import annotations

import contextlib
from typing import Final

import psycopg

from penstock.config.bastion import Bastion
from penstock.core import queries
from penstock.core.connect import connect

_SQL: Final = queries.load("penstock.bastion", "pins.sql")
_SECONDS: Final = 3


def pinned(bastion: Bastion) -> str | None:
    """Return the host key to expect of a bastion; where the store does not answer, the known one."""
    if bastion.pinned_in is None:
        return bastion.host_key
    with contextlib.suppress(psycopg.Error):
        url, name = bastion.pinned_in, "penstock bastion"
        with connect(url, application_name=name, connect_timeout=_SECONDS) as connection:
            row = connection.execute(_SQL["pinned"], [bastion.owner]).fetchone()
            return None if row is None else str(row[0]) if row[0] is not None else None
    return bastion.host_key
