"""A copy of a list in Postgres: the first one, and one of the same again; ours, and the peers'.

Each side's clock runs from its first request to its last commit: what a start takes is apart.
"""

from __future__ import annotations

import json
import select
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.contenders import HERE, ContenderError
from benchmarks.rig import say
from benchmarks.syncs import api
from benchmarks.syncs.bed import COLLECTION, Syncing, patience, servers, syncing
from penstock.embedded.postgres import EmbeddedPostgres
from penstock.syncs.airbyte import environment
from penstock.syncs.errors import SyncError

OURS = "penstock"
AIRBYTE = "airbyte-cdk"
AIRBYTE_NOTE = "a declarative manifest, into JSON lines: it writes no table"
SYNC = "s0"
_COUNTED_S = 1.0
_TUNED = {
    "NORMALIZE__WORKERS": "2",
    "LOAD__WORKERS": "4",
    "DATA_WRITER__BUFFER_MAX_ITEMS": "20000",
    "DATA_WRITER__FILE_MAX_ITEMS": "50000",
}


@dataclass(frozen=True, slots=True)
class Peer:
    """dlt in one configuration."""

    name: str
    note: str
    write_disposition: str = "append"
    loader_file_format: str | None = None
    max_table_nesting: int | None = None
    times: int = 1
    environment: dict[str, str] = field(default_factory=dict)


PEERS = (
    Peer("dlt", "append, else defaults: it keeps no one row an object"),
    Peer(
        "dlt-tuned", "append, files of CSV, no child tables, two workers that normalize",
        "append", "csv", 0, 1, _TUNED,
    ),
    Peer(
        "dlt-merge", "merge: one row an object, as ours; else as dlt-tuned",
        "merge", "csv", 0, 2, _TUNED,
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Copied:
    """One copy; rates in records a second."""

    side: str
    records: int
    first_s: float
    again_s: float | None
    requests: int
    streams_s: float | None = None
    """Until the first copy was in the streams too."""
    messages: int | None = None
    """How many messages the second copy made."""

    @property
    def rate(self) -> float:
        """The pace of the first copy."""
        return self.records / self.first_s

    @property
    def again_rate(self) -> float | None:
        """The pace of the second."""
        return None if self.again_s is None else self.records / self.again_s

    def __str__(self) -> str:
        again = "" if self.again_rate is None else f", again {self.again_rate:,.0f}/s"
        return f"{self.side}: {self.rate:,.0f} records/s{again}"


def measure(
    records: int, page: int, peers_python: str, peers: Sequence[Peer], failures: list[str]
) -> list[Copied]:
    """Copy the list by each side, one after the other, into the same server."""
    found = []
    with servers(records) as (postgres, served, work):
        try:
            with syncing(postgres, served, work, page=page) as of:
                found.append(_ours(of, records))
                say(f"copy: {found[-1]}")
        except ContenderError as error:
            failures.append(f"copy, {OURS}: {error}")
        others: list[tuple[str, Callable[[], Copied]]] = [
            (each.name, partial(_by_dlt, each, postgres, served, work, records, page, peers_python))
            for each in peers
        ]
        others.append((AIRBYTE, partial(_by_airbyte, served, work, records, page)))
        for name, copied in others:
            try:
                found.append(copied())
                say(f"copy: {found[-1]}")
            except ContenderError as error:
                failures.append(f"copy, {name}: {error}")
    return found


def _ours(of: Syncing, records: int) -> Copied:
    of.bed.wait_ready(of.running)
    limit = patience(records)
    of.wait("polling", lambda: of.collection(SYNC).get("phase") == "polling", limit)
    asked = of.api.asked()
    if (there := of.count()) != records:
        raise ContenderError(f"{there:,} of {records:,} records are in the table")
    ((written,),) = of.rows(
        "SELECT extract(epoch FROM max(pg_xact_commit_timestamp(xmin)))::float8"
        " FROM penstock.records"
    )
    _await_events(of, records, limit)
    ((streamed,),) = of.rows(
        "SELECT extract(epoch FROM max(pg_xact_commit_timestamp(m.xmin)))::float8"
        f" FROM penstock.segment_{_last_segment(of)} m"
    )
    seconds = _again(of, records, limit)
    # A change behind it shows that all of it has passed.
    before = of.events()
    of.api.change(1)
    of.post(f"/v1/syncs/{SYNC}/run")
    of.wait("getting the change", lambda: of.collection(SYNC).get("changed", 0) >= 1, limit)
    _await_events(of, before + 1, limit)
    messages = of.events() - records - 1
    return Copied(
        OURS, records, written - asked.first, seconds, asked.requests,
        streamed - asked.first, messages,
    )  # fmt: skip


def _again(of: Syncing, records: int, limit: float) -> float:
    """Read all again; return how long that has taken, from its first request on."""
    of.api.reset()
    read = of.collection(SYNC)["records_read"]
    of.post(f"/v1/syncs/{SYNC}/backfill")

    def done() -> bool:
        shown = of.collection(SYNC)
        return bool(shown["records_read"] >= read + records and shown["phase"] == "polling")

    of.wait("reading all again", done, limit)
    asked = of.api.asked()
    # The last page is in the table once what is stored of the sync says so.
    ((ended,),) = of.rows(
        "SELECT extract(epoch FROM max(pg_xact_commit_timestamp(xmin)))::float8"
        f" FROM penstock.sync_collections WHERE collection_id = '{COLLECTION}'"
    )
    return max(float(ended), asked.last) - asked.first


def _last_segment(of: Syncing) -> int:
    ((segment,),) = of.rows(
        "SELECT max(s.id) FROM penstock.segments s JOIN penstock.streams t ON t.id = s.stream_id"
        " WHERE t.name = 'events'"
    )
    return int(segment)


def _await_events(of: Syncing, wanted: int, limit: float) -> None:
    deadline = time.monotonic() + limit
    while (there := of.events()) < wanted:
        of.running.check()
        if time.monotonic() > deadline:
            raise ContenderError(f"{there:,} of {wanted:,} events are in the stream")
        time.sleep(_COUNTED_S)


def _by_dlt(
    peer: Peer,
    postgres: EmbeddedPostgres,
    served: api.FakeApi,
    work: Path,
    records: int,
    page: int,
    python: str,
) -> Copied:
    folder = work / peer.name
    folder.mkdir()
    url = postgres.create_database(peer.name.replace("-", "_"))
    # The embedded server trusts loopback; dlt wants a password.
    database = url.replace("@", ":unused@", 1)
    spec = {
        "folder": str(folder), "database": database, "dataset": "bench", "api": served.url,
        "path": api.PATH, "page": page, "times": peer.times,
        "write_disposition": peer.write_disposition,
        "loader_file_format": peer.loader_file_format,
        "nesting": peer.max_table_nesting,
        "environment": {
            "RUNTIME__DLTHUB_TELEMETRY": "false",
            "DLT_DATA_DIR": str(folder / "data"),
            **peer.environment,
        },
    }  # fmt: skip
    copied = _timed(peer.name, [python, "peer_dlt.py"], spec, served, records, peer.times)
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(f"SELECT count(*) FROM bench.{api.PATH}".encode()).fetchone()
    if row is None or row[0] != records:
        raise ContenderError(f"{row} of {records:,} records are in its table")
    return copied


def _by_airbyte(served: api.FakeApi, work: Path, records: int, page: int) -> Copied:
    folder = work / AIRBYTE
    folder.mkdir()
    output = folder / "messages.jsonl"
    spec = {
        "folder": str(folder), "output": str(output), "api": served.url, "path": api.PATH,
        "page": page,
    }  # fmt: skip
    try:
        environment.install()
        python = str(environment.interpreter())
    except SyncError as error:
        raise ContenderError(str(error)) from None
    copied = _timed(AIRBYTE, [python, "peer_airbyte.py"], spec, served, records, 1)
    with output.open("rb") as lines:
        there = sum(b'"type":"RECORD"' in line for line in lines)
    output.unlink()
    if there != records:
        raise ContenderError(f"{there:,} of {records:,} records are in its file")
    return copied


def _timed(
    name: str,
    command: Sequence[str],
    spec: dict[str, Any],
    served: api.FakeApi,
    records: int,
    times: int,
) -> Copied:
    """Have a peer copy the list so many times: its interpreter and program get the spec's file."""
    folder = Path(spec["folder"])
    file = folder / "spec.json"
    file.write_text(json.dumps(spec))
    log = folder / "output.log"
    limit = patience(records)
    ends: list[float] = []
    begins: list[float] = []
    requests = 0
    python, program = command
    with log.open("wb") as errors:
        try:
            process = subprocess.Popen(
                [python, str(HERE / "syncs" / program), str(file)],
                cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip
        except OSError as error:
            raise ContenderError(f"{python}: {error}; `make bench` installs dlt") from None
        try:
            for _ in range(times):
                assert process.stdin is not None
                served.reset()
                process.stdin.write(b"\n")
                process.stdin.flush()
                line = _line(process, limit)
                if not line:
                    said = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
                    raise ContenderError(f"it ends, or takes over {limit:.0f} s:\n{said}")
                ends.append(float(line))
                asked = served.asked()
                begins.append(asked.first)
                requests = requests or asked.requests
        finally:
            process.kill()
            process.wait()
    seconds = [end - begin for end, begin in zip(ends, begins, strict=True)]
    return Copied(name, records, seconds[0], seconds[1] if times > 1 else None, requests)


def _line(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    """Return the next line of a process, nothing where none comes in time."""
    assert process.stdout is not None
    there, _, _ = select.select([process.stdout], [], [], seconds)
    return process.stdout.readline() if there else b""
