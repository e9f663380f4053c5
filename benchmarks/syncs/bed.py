"""The servers of these benchmarks: Postgres, the fake API, and a `penstock run` that syncs it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import structlog

from benchmarks.configuration.bed import Bed
from benchmarks.contenders import ContenderError, Running
from benchmarks.rig import POSTGRES_SETTINGS
from benchmarks.syncs import api
from penstock.embedded.postgres import EmbeddedPostgres
from penstock.streams.store import Store

PROVIDER, CONSUMER = "bench", "workers"
COLLECTION = f"{PROVIDER}:{api.PATH}"
SLOWEST = 2_000
"""Records a second below which a side is given up."""
START_S = 300.0
"""How long a start may take, and what does not grow with the records."""
_POLL_S = 0.25


def patience(records: int) -> float:
    """Return how long the work on so many records may take, in seconds."""
    return START_S + records / SLOWEST


@dataclass(slots=True)
class Syncing:
    """A run that syncs the API, and its database."""

    bed: Bed
    api: api.FakeApi
    running: Running

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Return the rows of a query; none where its table is not there yet."""
        with psycopg.connect(self.bed.url, autocommit=True) as connection:
            try:
                return connection.execute(query.encode()).fetchall()
            except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
                return []

    def count(self) -> int:
        """Return how many records there are."""
        found = self.rows("SELECT count(*) FROM penstock.records")
        return int(found[0][0]) if found else 0

    def collection(self, sync: str) -> dict[str, Any]:
        """Return what the run shows of a sync."""
        _, status = self.bed.ask(self.running, "/status")
        of = (status or {}).get("syncs", {}).get(sync, {}).get("collections", {})
        found: dict[str, Any] = of.get(COLLECTION, {})
        return found

    def events(self) -> int:
        """Return how many messages the stream of events has."""
        total = 0
        for (name,) in self.rows(
            "SELECT s.id FROM penstock.segments s JOIN penstock.streams t ON t.id = s.stream_id"
            " WHERE t.name = 'events'"
        ):
            found = self.rows(f"SELECT count(*) FROM penstock.segment_{name}")
            total += int(found[0][0]) if found else 0
        return total

    def post(self, path: str) -> None:
        """Ask for an action; raises `ContenderError` where it is refused."""
        code, answer = self.bed.ask(self.running, path, {}, "POST")
        if code != 200:
            raise ContenderError(f"POST {path}: {code}: {answer}")

    def wait(self, what: str, there: Callable[[], bool], seconds: float) -> None:
        """Wait until something is so; raises `ContenderError` where it is not in time."""
        deadline = time.monotonic() + seconds
        while not there():
            self.running.check()
            if time.monotonic() > deadline:
                raise ContenderError(
                    f"not {what} in {seconds:.0f} s; the run ends with:\n{self.running.tail()}"
                )
            time.sleep(_POLL_S)


@contextmanager
def servers(records: int) -> Iterator[tuple[EmbeddedPostgres, api.FakeApi, Path]]:
    """Start Postgres and the API in a temporary folder; ends them and removes it."""
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)  # under root Postgres runs as another user
        with (
            EmbeddedPostgres(folder / "postgres", settings=POSTGRES_SETTINGS) as postgres,
            api.FakeApi.serve(records) as served,
        ):
            work = folder / "work"
            work.mkdir()
            yield postgres, served, work


@contextmanager
def syncing(
    postgres: EmbeddedPostgres,
    served: api.FakeApi,
    work: Path,
    *,
    syncs: int = 1,
    frequency: str = "1h",
    page: int,
) -> Iterator[Syncing]:
    """Run so many syncs of the API's list into a database of their own; ends the run."""
    folder = work / f"syncs-{syncs}-{frequency}"
    folder.mkdir()
    url = postgres.create_database(f"bench_{syncs}_{frequency}")
    with Store.open(url) as store:
        token = store.tokens.create("bench", "admin")
    of = Bed(postgres, "", url, folder, token)
    file = of.file(document(served.url, syncs, frequency, page))
    with of.serve("run", "run", "-c", str(file)) as running:
        yield Syncing(of, served, running)


def document(url: str, syncs: int, frequency: str, page: int) -> dict[str, Any]:
    """Return a configuration: so many syncs of one collection with one credential."""
    rate = {"allowed_requests": 100_000, "interval": "1s", "max_concurrent_requests": 16}
    collection = {
        "path": api.PATH,
        "data_selector": "data",
        "params": {"limit": page, "since": "{cursor}"},
        "paginator": {
            "type": "cursor", "cursor_path": "cursors.next", "cursor_param": "cursor",
        },
        "created_path": "created",
        "incremental": {"cursor_path": "changed", "format": "unix_ms", "overlap": "1s"},
        "deletes": {"type": "none"},
    }  # fmt: skip
    provider = {
        "type": "rest", "base_url": url, "allow_private": True, "rate_limit": rate,
        "collections": {api.PATH: collection},
    }  # fmt: skip
    sync = {
        "provider": PROVIDER, "collections": [api.PATH], "credential": "bench",
        "frequency": frequency,
    }  # fmt: skip
    return {
        "providers": {PROVIDER: provider},
        "credentials": {"bench": {"provider": PROVIDER}},
        "syncs": {f"s{n}": sync for n in range(syncs)},
        "consumers": {CONSUMER: {"stream": "events"}},
    }
