"""A replication connection: start a slot's stream, take its messages, confirm positions.

"Streaming Replication Protocol" in the PostgreSQL manual. psycopg carries the bytes. Nothing here
blocks but `start` and `wait`, so one thread can answer keepalives whatever else is slow.
"""

from __future__ import annotations

import select
import time
from struct import Struct
from typing import Final, NamedTuple

import psycopg
from psycopg import pq

from penstock.message import format_lsn
from penstock.postgres.errors import CaptureError

# Values must not depend on how the server or the role is configured.
_SETTINGS: Final = (
    "SET timezone = 'UTC'",
    "SET datestyle = 'ISO'",
    "SET intervalstyle = 'iso_8601'",
    "SET extra_float_digits = 3",
    "SET bytea_output = 'hex'",
    "SET client_encoding = 'UTF8'",
    "SET search_path = ''",
    "SET statement_timeout = 0",
    "SET idle_session_timeout = 0",
)

_KEEPALIVE: Final = Struct(">cQqB").unpack_from
_STATUS: Final = Struct(">cQQQqB").pack
_EPOCH: Final = 946_684_800_000_000  # 2000-01-01 in microseconds of Unix time


class Keepalive(NamedTuple):
    """The server has sent all WAL up to `wal_end` that concerns this stream."""

    wal_end: int
    reply_requested: bool


class ReplicationStream:
    """One `START_REPLICATION` of a logical slot.

    Args:
        url: A libpq connection string or URI.
        slot: The slot's name; the plugin must be pgoutput.
        publication: The publication's name.
        start: The LSN from which on changes are wanted; the slot's own position where that is later.

    Raises:
        CaptureError: With a code that tells what to do; `transient` where a retry may help.
    """

    def __init__(self, url: str, slot: str, publication: str, start: int = 0) -> None:
        self.slot = slot
        self.publication = publication
        try:
            self._connection = psycopg.connect(
                url, autocommit=True, replication="database", connect_timeout=10,
                application_name=f"penstock:{slot}",
                keepalives_idle=20, keepalives_interval=5, keepalives_count=4,
            )  # fmt: skip
        except psycopg.OperationalError as error:
            raise capture_error(error, slot, publication) from None
        try:
            self._pgconn = self._connection.pgconn
            for setting in _SETTINGS:
                self._execute(setting.encode())
            identity = self._execute(b"IDENTIFY_SYSTEM")
            self.system_identifier = (identity.get_value(0, 0) or b"").decode()
            self.database = (identity.get_value(0, 3) or b"").decode()
            timeout = self._execute(
                b"SELECT setting::int FROM pg_catalog.pg_settings WHERE name = 'wal_sender_timeout'"
            )
            self.timeout = int(timeout.get_value(0, 0) or b"0") / 1000
            # Replication commands have a grammar of their own, without parameters or E'' strings;
            # the publication's name goes through two quotings: an identifier inside a literal.
            name = _quoted(publication).replace("'", "''")
            command = (
                f"START_REPLICATION SLOT {_quoted(slot)} LOGICAL {format_lsn(start)}"
                f" (proto_version '1', publication_names '{name}')"
            )
            self._execute(command.encode(), pq.ExecStatus.COPY_BOTH)
        except BaseException:
            self._connection.close()
            raise

    def _execute(self, command: bytes, *also: pq.ExecStatus) -> pq.abc.PGresult:
        result = self._pgconn.exec_(command)
        if result.status not in (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK, *also):
            raise capture_error(
                psycopg.errors.error_from_result(result), self.slot, self.publication
            )
        return result

    def read(self) -> bytes | Keepalive | None:
        """Return the next XLogData payload or keepalive, or None if there is none yet.

        Raises:
            CaptureError: The server ended the stream, or the connection is lost.
        """
        size, data = self._pgconn.get_copy_data(1)
        if size > 0:
            if data[0] == 0x77:  # w: XLogData, behind a header of 25 bytes
                return bytes(data[25:])
            if data[0] == 0x6B:  # k
                _, wal_end, _, reply = _KEEPALIVE(data)
                return Keepalive(wal_end, bool(reply))
            raise CaptureError("protocol", f"Unknown replication message {bytes(data[:1])!r}.")
        if size == 0:
            return None
        self._fail()
        return None

    def wait(self, seconds: float) -> None:
        """Return when the server has sent something, or after `seconds`."""
        # The blocking form of get_copy_data holds the GIL: the process would stop while WAL is quiet.
        if select.select([self._pgconn.socket], [], [], seconds)[0]:
            try:
                self._pgconn.consume_input()
            except psycopg.OperationalError as error:
                raise capture_error(error, self.slot, self.publication) from None

    def confirm(self, lsn: int, *, request_reply: bool = False) -> None:
        """Tell the server that all up to `lsn` is durable elsewhere (a standby status update)."""
        now = int(time.time() * 1_000_000) - _EPOCH
        try:
            self._pgconn.put_copy_data(_STATUS(b"r", lsn, lsn, lsn, now, request_reply))
            self._pgconn.flush()
        except psycopg.OperationalError as error:
            raise capture_error(error, self.slot, self.publication) from None

    def close(self) -> None:
        """Close the connection; what was not confirmed will be sent again."""
        self._connection.close()

    def _fail(self) -> None:
        result = self._pgconn.get_result()
        if result is not None and result.status == pq.ExecStatus.FATAL_ERROR:
            raise capture_error(
                psycopg.errors.error_from_result(result), self.slot, self.publication
            )
        raise CaptureError(
            "connection_lost", "Postgres ended the replication stream.", transient=True
        )


def _quoted(identifier: str) -> str:
    return '"' + identifier.replace('"', '""') + '"'


def capture_error(error: psycopg.Error, slot: str, publication: str) -> CaptureError:
    """Return what a server's error means for a capture, and what to do about it."""
    state = error.sqlstate or ""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    quoted = slot.replace("'", "''")
    if state == "42704" and "publication" in text:
        return CaptureError(
            "publication_missing",
            f"Publication {publication} does not exist ({text}).",
            remedy=f'Create it: CREATE PUBLICATION "{publication}" FOR TABLES IN SCHEMA public'
            " WITH (publish_via_partition_root = true); if changes were written before it existed,"
            f" the slot must be made anew: SELECT pg_drop_replication_slot('{quoted}').",
        )
    if state == "42704":
        return CaptureError(
            "slot_missing",
            f"Replication slot {slot} does not exist ({text}).",
            remedy="It was dropped, and what it had not delivered is gone with it. Start penstock"
            " again to make a new one, and backfill what is missing.",
        )
    if state == "55006":
        return CaptureError(
            "slot_in_use",
            f"Replication slot {slot} is in use by another process ({text}).",
            remedy="Stop the other reader, or give this source a slot of its own; active_pid in"
            " pg_replication_slots names its process.",
            transient=True,
        )
    if state == "55000" and "slot" in text:
        return CaptureError(
            "slot_invalidated",
            f"Replication slot {slot} can no longer be read ({text}).",
            remedy="The server dropped WAL that the slot still needed (max_slot_wal_keep_size,"
            f" idle_replication_slot_timeout). Drop it: SELECT pg_drop_replication_slot('{quoted}'),"
            " start again, and backfill what is missing.",
        )
    if state.startswith("28"):
        return CaptureError("authentication_failed", f"Postgres refused the login ({text}).")
    if state == "42501":
        return CaptureError(
            "no_privilege",
            f"The role may not replicate ({text}).",
            remedy="ALTER ROLE <role> REPLICATION.",
        )
    if state == "3D000":
        return CaptureError("database_missing", f"The database does not exist ({text}).")
    lost = not state or state[:2] in ("08", "57", "53", "58")
    return CaptureError(
        "connection_lost" if lost else "postgres",
        f"The replication connection to Postgres failed ({text}).",
        transient=lost,
    )
