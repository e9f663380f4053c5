"""The servers of these benchmarks, and the commands of Penstock that run over them."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import structlog
import yaml
from psycopg import sql

from benchmarks.contenders import PENSTOCK, ContenderError, Running
from benchmarks.probe import Probe
from benchmarks.rig import POSTGRES_SETTINGS
from penstock.embedded.nats import EmbeddedNats
from penstock.embedded.postgres import EmbeddedPostgres
from penstock.embedded.process import free_port
from penstock.streams.store import Store

STREAM = "bench"
START_TIMEOUT_S = 300
_TABLES = """
DO $do$
BEGIN
    FOR i IN 0..{last} LOOP
        EXECUTE format('CREATE TABLE public.t%s (id bigint PRIMARY KEY, note text NOT NULL)', i);
    END LOOP;
END $do$;
CREATE FUNCTION public.add_rows(first bigint, last bigint) RETURNS void LANGUAGE plpgsql AS $do$
BEGIN
    FOR i IN first..last LOOP
        EXECUTE format('INSERT INTO public.t%s VALUES ($1, $2)', i % {count})
        USING i, repeat('a note of the order ', 6);
    END LOOP;
END $do$;
"""
ADD_ROWS = "SELECT public.add_rows(%s, %s)"
"""Writes the rows from its first to its second parameter, each to the next table."""


@dataclass(frozen=True, slots=True)
class Command:
    """What a command has taken, its imports included."""

    wall_s: float
    cpu_s: float


@dataclass(slots=True)
class Bed:
    """A database with so many tables, which is its own store, and a JetStream stream."""

    postgres: EmbeddedPostgres
    nats_url: str
    url: str
    folder: Path
    token: str

    def file(self, document: Mapping[str, Any], name: str = "penstock.yaml") -> Path:
        """Write a configuration."""
        path = self.folder / name
        path.write_text(yaml.safe_dump({"store": self.url, **document}, sort_keys=False))
        return path

    def command(self, *arguments: str, codes: tuple[int, ...] = (0,)) -> Command:
        """Run a command of Penstock's as a user does; raises `ContenderError` where it fails."""
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        done = subprocess.run(
            [*PENSTOCK, *arguments],
            cwd=self.folder,
            check=False,
            capture_output=True,
            text=True,
            timeout=600,
        )
        wall = time.monotonic() - began
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode not in codes:
            said = (done.stderr or done.stdout).strip()[-1000:]
            raise ContenderError(f"penstock {arguments[0]}: code {done.returncode}: {said}")
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return Command(wall, cpu)

    @contextmanager
    def serve(self, name: str, *arguments: str) -> Iterator[Running]:
        """Start a command that serves HTTP; ends it, however the block is left."""
        folder = self.folder / name
        folder.mkdir()
        listen = f"127.0.0.1:{free_port()}"
        log = folder / "output.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*PENSTOCK, *arguments, "--listen", listen],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=dict(os.environ),
            )
        running = Running(name, process, log, url=f"http://{listen}")
        try:
            yield running
        finally:
            running.stop()

    def ask(
        self,
        running: Running,
        path: str,
        body: Mapping[str, Any] | None = None,
        method: str = "GET",
    ) -> tuple[int, Any]:
        """Return status and JSON of an answer; status 0 where there is none."""
        request = urllib.request.Request(
            running.url + path,
            None if body is None else json.dumps(body).encode(),
            {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"null")
        except OSError:
            return 0, None

    def wait(self, running: Running, what: str, there: Callable[[], bool]) -> None:
        """Wait until something is so; raises `ContenderError` where it is not in time."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not there():
            running.check()
            if time.monotonic() > deadline:
                raise ContenderError(f"{running.name}: not {what}; it ends with:\n{running.tail()}")
            time.sleep(0.1)

    def wait_ready(self, running: Running, state: str = "ready") -> None:
        """Wait until `/readyz` answers 200 with this state."""

        def ready() -> bool:
            code, answer = self.ask(running, "/readyz")
            return code == 200 and answer.get("status") == state

        self.wait(running, state, ready)

    def wait_logged(self, running: Running, text: bytes) -> None:
        """Wait until a text is in the log."""
        self.wait(running, f"logging {text.decode()}", lambda: text in running.log.read_bytes())

    def add_rows(self, first: int, last: int) -> None:
        """Commit rows."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(ADD_ROWS, [first, last])


@contextmanager
def bed(tables: int) -> Iterator[Bed]:
    """Start the servers in a temporary folder; ends them and removes it."""
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)  # under root Postgres runs as another user
        with (
            EmbeddedPostgres(folder / "postgres", settings=POSTGRES_SETTINGS) as postgres,
            EmbeddedNats(folder / "nats") as nats,
        ):
            url = postgres.create_database("bench")
            with psycopg.connect(url, autocommit=True) as connection:
                count = {"last": sql.Literal(tables - 1), "count": sql.Literal(tables)}
                connection.execute(sql.SQL(_TABLES).format(**count))
            with Probe(nats.url) as probe:
                probe.create_stream(STREAM)
            with Store.open(url) as store:
                token = store.tokens.create("bench", "admin")
            work = folder / "work"
            work.mkdir()
            yield Bed(postgres, nats.url, url, work, token)


def document(of: Bed, *, nats: int, streams: int = 0, consumers: int = 0) -> dict[str, Any]:
    """Return a configuration: a source with so many sinks, a table for each, and consumers."""
    sinks: dict[str, Any] = {
        f"s{n}": {
            "type": "nats", "source": "shop", "url": of.nats_url, "tables": [f"public.t{n}"],
            "subject": f"{STREAM}.live.{{table}}",
        }
        for n in range(nats)
    }  # fmt: skip
    for n in range(nats, nats + streams):
        sinks[f"s{n}"] = {"type": "stream", "source": "shop", "tables": [f"public.t{n}"]}
    readers = {
        f"c{n}": {"stream": f"s{nats + n % streams}", "max_ack_pending": 100}
        for n in range(consumers)
    }
    source = {"type": "postgres", "url": of.url, "tables": ["public.*"]}
    made = {"sources": {"shop": source}, "sinks": sinks}
    return {**made, "consumers": readers} if readers else made
