"""A replication connection: start a slot's stream, take its messages, confirm positions.

"Streaming Replication Protocol" in the PostgreSQL manual. psycopg carries the bytes. Nothing here
blocks but the constructor and `wait`, so one thread can answer keepalives whatever else is slow.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from struct import Struct
from typing import Any, Final, NamedTuple

import psycopg
from psycopg import pq

from penstock.core.connect import reason_of
from penstock.core.errors import CaptureError
from penstock.core.message import format_lsn, parse_lsn, source_tag
from penstock.core.queries import load
from penstock.postgres.connect import (
    capture_error,
    connect_source,
    publication_missing,
    slot_invalidated,
    slot_missing,
)
from penstock.postgres.transaction import postgres_now

_SQL: Final = load("penstock.postgres", "catalog.sql")
_KEEPALIVE: Final = Struct(">cQqB").unpack_from
_STATUS: Final = Struct(">cQQQqB").pack


class Keepalive(NamedTuple):
    """The server has sent all WAL up to `wal_end` that concerns this stream."""

    wal_end: int
    reply_requested: bool


class Known(NamedTuple):
    """What a capture knows of its server when it connects again."""

    system_identifier: str
    flush_lsn: int
    read_lsn: int


class Identity(NamedTuple):
    """A source's tag (`penstock.core.message.source_tag`), and where its WAL ends.

    A standby's end is None: just started, it may not have replayed all that it had before.
    """

    tag: str
    wal_end: int | None


def identify(url: str, slot: str) -> Identity:
    """Return what identifies a source's LSNs; raises `CaptureError`."""
    connection = connect_source(url, f"penstock:{slot}", replication="database")
    with contextlib.closing(connection):
        identity = connection.pgconn.exec_(b"IDENTIFY_SYSTEM")
        if identity.status != pq.ExecStatus.TUPLES_OK:
            found = psycopg.errors.error_from_result(identity)
            raise CaptureError(
                "no_identity",
                f"The server does not report which cluster it is: {found}.",
                remedy="Give the role the attribute REPLICATION.",
            )
        system, database = identity.get_value(0, 0) or b"", identity.get_value(0, 3) or b""
        try:
            (end,) = psycopg.ClientCursor[tuple[str | None]](connection).execute(_SQL["wal_end"])
        except psycopg.Error as error:
            raise capture_error(error, "replication connection") from None
    tag = source_tag(system.decode(), database.decode(), slot)
    return Identity(tag, None if end[0] is None else parse_lsn(end[0]))


def open_replication(url: str, slot: str, publication: str) -> psycopg.Connection[Any]:
    """Return a connection for a `ReplicationStream` that begins later; raises `CaptureError`.

    What the stream asks for at its start is asked for here once, so that the server's process has it.
    """
    connection = connect_source(url, f"penstock:{slot}", replication="database")
    try:
        names = {"slot": slot, "publication": publication}
        psycopg.ClientCursor[tuple[Any, ...]](connection).execute(_SQL["stream"], names)
    except psycopg.Error as error:
        connection.close()
        raise capture_error(error, "replication connection") from None
    return connection


class ReplicationStream:
    """One `START_REPLICATION` of a logical slot.

    Args:
        url: A libpq connection string or URI.
        slot: The slot's name; the plugin must be pgoutput.
        publication: The publication's name.
        known: Where an earlier stream ended, None for the first one, which starts where the slot is.
        connection: What `open_replication` has returned; by default it makes its own.

    Raises:
        CaptureError: Its code names the cause; `transient` where a retry may help.
    """

    def __init__(
        self,
        url: str,
        slot: str,
        publication: str,
        known: Known | None = None,
        connection: psycopg.Connection[Any] | None = None,
    ) -> None:
        self.slot = slot
        self.publication = publication
        self._streams = False
        self._unpublished = False
        if connection is None:
            connection = connect_source(url, f"penstock:{slot}", replication="database")
        self._connection = connection
        try:
            self._pgconn = self._connection.pgconn
            self._prepare(known)
            self._connection.add_notice_handler(self._notice)
            self._start(0 if known is None else known.flush_lsn)
        except psycopg.Error as error:
            self._connection.close()
            raise self._error(error) from None
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self, known: Known | None) -> None:
        """Fix the session's settings, and see that the stream goes on where it should."""
        slot, publication = self.slot, self.publication
        identity = self._execute(b"IDENTIFY_SYSTEM")
        self.system_identifier = (identity.get_value(0, 0) or b"").decode()
        self.database = (identity.get_value(0, 3) or b"").decode()
        # A replication connection has the simple protocol alone: the client fills parameters in.
        cursor = psycopg.ClientCursor[tuple[Any, ...]](self._connection)
        cursor.execute(_SQL["settings"])
        names = {"slot": slot, "publication": publication}
        (row,) = cursor.execute(_SQL["stream"], names)
        plugin, slot_type, database, lost, confirmed, published, written, timeout = row
        self.timeout = timeout / 1000
        """Seconds after which the server gives up on a silent client; 0 if it never does."""
        if known is not None and self.system_identifier != known.system_identifier:
            raise CaptureError(
                "other_server",
                "The server behind the source's url is another cluster now (system identifier"
                f" {self.system_identifier}, before {known.system_identifier}).",
                remedy="Its positions mean nothing here. Point the url back; or delete the query's"
                " checkpoint folder, start again, and backfill what is missing.",
                is_gap=True,
            )
        if slot_type is None:
            raise slot_missing(slot)
        if slot_type != "logical" or plugin != "pgoutput" or database != self.database:
            raise CaptureError(
                "slot_unusable",
                f"Replication slot {slot} is {slot_type}, with plugin {plugin}, for database"
                f" {database}; it must be logical, with pgoutput, for {self.database}.",
                remedy="Give this source a slot of its own (`slot`).",
            )
        if lost:
            raise slot_invalidated(slot, confirmed)
        if not published:
            raise publication_missing(slot, publication)
        self.confirmed_lsn = parse_lsn(confirmed)
        """What the server knew to be confirmed before this stream."""
        if known is not None:
            _check_positions(slot, known, self.confirmed_lsn, parse_lsn(written))
        self.utf8 = self._pgconn.parameter_status(b"server_encoding") != b"SQL_ASCII"
        """Whether text is UTF-8 for certain; a SQL_ASCII database takes any bytes."""
        if not self.utf8:
            # It would end the stream at bytes that are none, as often as these are asked for.
            self._execute(b"SET client_encoding TO 'SQL_ASCII'")

    def _start(self, lsn: int) -> None:
        # Replication commands have a grammar of their own, without parameters or E'' strings; the
        # publication's name goes through two quotings: an identifier inside a literal.
        name = _quoted(self.publication).replace("'", "''")
        command = (
            f"START_REPLICATION SLOT {_quoted(self.slot)} LOGICAL {format_lsn(lsn)}"
            f" (proto_version '1', publication_names '{name}', messages 'true')"
        )
        self._execute(command.encode(), pq.ExecStatus.COPY_BOTH)
        self._streams = True

    def _execute(self, command: bytes, *also: pq.ExecStatus) -> pq.abc.PGresult:
        result = self._pgconn.exec_(command)
        if result.status not in (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK, *also):
            raise self._error(psycopg.errors.error_from_result(result))
        return result

    def _notice(self, notice: psycopg.errors.Diagnostic) -> None:
        # Since Postgres 18 a publication that is gone is but a warning, and its changes are left out.
        if notice.sqlstate == "55000" and notice.source_function == "LoadPublications":
            self._unpublished = True

    def read(self) -> bytes | Keepalive | None:
        """Return the next XLogData payload or keepalive, or None if there is none yet.

        Raises:
            CaptureError: The server ended the stream, or the connection is lost.
        """
        try:
            size, data = self._pgconn.get_copy_data(1)
        except psycopg.Error as error:
            raise self._error(error) from None
        if self._unpublished:
            raise publication_missing(self.slot, self.publication)
        if size > 0:
            if data[0] == 0x77:  # w: XLogData, behind a header of 25 bytes
                return data[25:].tobytes()
            if data[0] == 0x6B and len(data) == 18:  # k
                _, wal_end, _, reply = _KEEPALIVE(data)
                return Keepalive(wal_end, bool(reply))
            raise CaptureError("protocol", f"Unknown replication message {bytes(data[:1])!r}.")
        if size == 0:
            return None
        result = self._pgconn.get_result()
        if result is not None and result.status == pq.ExecStatus.FATAL_ERROR:
            raise self._error(psycopg.errors.error_from_result(result))
        raise CaptureError(
            "connection_lost", "Postgres ended the replication stream.", transient=True
        )

    def receive(self) -> None:
        """Take what has arrived off the socket, for `read`; does not wait."""
        try:
            self._pgconn.consume_input()
        except psycopg.Error as error:
            raise self._error(error) from None

    def wait(self, seconds: float, wake: int) -> None:
        """Return when the server has sent something or `wake` can be read, or after `seconds`."""
        # The blocking form of get_copy_data holds the GIL: the process would stop while WAL is quiet.
        ready, _, _ = select.select([self._pgconn.socket, wake], [], [], seconds)
        if wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 1024)
        if ready and ready != [wake]:
            self.receive()

    def confirm(self, lsn: int, *, request_reply: bool = False) -> None:
        """Report to the server that all up to `lsn` is durable elsewhere (a standby status update)."""
        self._status(lsn, lsn, request_reply)

    def acknowledge(self, lsn: int) -> None:
        """Report to the server that all up to `lsn` has arrived, and no durable position.

        A server that shuts down waits until its client has all, and would wait for as long as a
        sink is down; it takes this where an update names no durable position. The slot stays.
        """
        self._status(lsn, 0, False)

    def _status(self, written: int, flushed: int, request_reply: bool) -> None:
        now = postgres_now()
        try:
            self._pgconn.put_copy_data(_STATUS(b"r", written, flushed, flushed, now, request_reply))
            self._pgconn.flush()
        except psycopg.Error as error:
            raise self._error(error) from None

    def end(self, seconds: float) -> None:
        """End the stream in order, by a CopyDone, so that the server takes in the last confirmation.

        A connection that is closed with unread data is reset, and the server may lose what it was sent.
        Returns when the server has ended its side, or after `seconds`; what it sends is dropped.
        """
        deadline = time.monotonic() + seconds
        with contextlib.suppress(psycopg.Error):
            self._pgconn.put_copy_end()
            self._pgconn.flush()
            while (size := self._pgconn.get_copy_data(1)[0]) >= 0:
                if size == 0:
                    left = deadline - time.monotonic()
                    if left <= 0 or not select.select([self._pgconn.socket], [], [], left)[0]:
                        return
                    self._pgconn.consume_input()

    def close(self) -> None:
        """Close the connection; what was not confirmed will be sent again."""
        self._connection.close()

    def _error(self, error: psycopg.Error) -> CaptureError:
        state = error.sqlstate
        if state == "42704":
            # A stream that has its slot looks up nothing else by name than its publication.
            if self._streams:
                return publication_missing(self.slot, self.publication)
            return slot_missing(self.slot)
        if state == "55006":
            return CaptureError(
                "slot_in_use",
                f"Replication slot {self.slot} is in use by another process ({reason_of(error)}).",
                remedy="Stop the other reader, or give this source a slot of its own; active_pid in"
                " pg_replication_slots names its process.",
                transient=True,
            )
        return capture_error(error, "replication connection")


def _check_positions(slot: str, known: Known, confirmed: int, written: int) -> None:
    if confirmed > known.flush_lsn:
        raise CaptureError(
            "position_behind_slot",
            f"Replication slot {slot} was confirmed up to {format_lsn(confirmed)} by something"
            f" else; this capture had confirmed {format_lsn(known.flush_lsn)}, and what lies between"
            " can't be read.",
            remedy="Give each reader a slot of its own, and backfill what is missing.",
            is_gap=True,
        )
    if written < max(known.read_lsn, known.flush_lsn):
        raise CaptureError(
            "position_ahead_of_server",
            f"The server's WAL ends at {format_lsn(written)}, but changes up to"
            f" {format_lsn(max(known.read_lsn, known.flush_lsn))} were read: it was restored from"
            " a backup, or lost what it had written.",
            remedy="Delete the query's checkpoint folder and start again, so that it goes on from"
            " the slot, and backfill.",
            is_gap=True,
        )


def _quoted(identifier: str) -> str:
    return '"' + identifier.replace('"', '""') + '"'
