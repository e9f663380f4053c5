"""The servers that the tests run against: started once a run, a fresh database for each test.

A test that stops or kills a server makes one of its own (`EmbeddedPostgres`, `EmbeddedNats`), as
these are shared by the whole run.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest
import structlog
from hypothesis import HealthCheck, settings
from psycopg import sql
from xdist.remote import Producer

from penstock.embedded.handles import Database, JetStream
from penstock.embedded.nats import EmbeddedNats
from penstock.embedded.postgres import EmbeddedPostgres

from .browser import chromium_browser, report_missing, window
from .schedule import Cpu, LongestFirst, Seconds, longest_first
from .spark_classes import share, start_writing

# How long an example takes says how busy the machine is, no more.
settings.register_profile("penstock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("penstock")


_SHM: Final = Path("/dev/shm")
_ROOM: Final = 8 << 30


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-seconds", action="store_true", help="keep how long each file took in seconds.txt"
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LongestFirst | None:
    return LongestFirst(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if is_worker(config):
        longest_first(items)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    report_missing(terminalreporter)


def is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


__all__ = ["chromium_browser", "window"]
_configure = structlog.configure


def _configure_uncached(**settings: Any) -> None:
    """A logger that is cached, as a command's are, shows `capture_logs` nothing from then on."""
    _configure(**{**settings, "cache_logger_on_first_use": False})


pytest.MonkeyPatch().setattr(structlog, "configure", _configure_uncached)


def pytest_configure(config: pytest.Config) -> None:
    """Let JVMs map Spark's classes from one cache, which a parallel run makes if it is missing."""
    if is_worker(config) or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Cpu())
    if is_worker(config):
        return  # a worker of pytest-xdist has its controller's environment
    if config.getoption("numprocesses", None) or config.getoption("write_seconds"):
        config.pluginmanager.register(Seconds(config))
    missing = share()
    units = [str(part).rstrip("/").endswith("unit") for part in config.args]
    if missing and config.getoption("numprocesses", None) and not all(units):
        config.add_cleanup(start_writing())


@pytest.fixture(scope="session")
def server_dir() -> Iterator[Path]:
    # Not pytest's own folder: it takes away other users' access to that at every start, and
    # under root Postgres runs as another user.
    with tempfile.TemporaryDirectory(
        prefix="penstock-test-", dir=_memory(), ignore_cleanup_errors=True
    ) as path:
        yield Path(path)


def _memory() -> Path | None:
    """Return a folder in memory, where there is room: a database costs a tenth of the CPU there."""
    with contextlib.suppress(OSError):
        if _SHM.is_dir() and shutil.disk_usage(_SHM).free >= _ROOM:
            return _SHM
    return None


class SharedPostgres(EmbeddedPostgres):
    """A server that no test stops, and so needs nothing to outlive a crash.

    A database is made and dropped for almost every test: without fsync, and with the template's
    files copied past the WAL, that takes half of the CPU and an eighth of the time. So does a template
    that has the schema already, beside making that.
    """

    def __init__(self, data_dir: Path) -> None:
        super().__init__(data_dir, {"fsync": "off", "full_page_writes": "off"})
        self._templates: set[str] = set()

    def create_database(self, name: str, template: str = "template1") -> str:
        with psycopg.connect(self.url, autocommit=True) as connection:
            create = sql.SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY file_copy")
            connection.execute(create.format(sql.Identifier(name), sql.Identifier(template)))
        return self.database_url(name)

    def template(self, name: str, fill: Callable[[str], None]) -> str:
        """Return the name of a database that `fill` was called for once, with its URL."""
        if name not in self._templates:
            fill(self.create_database(name))
            self._templates.add(name)
        return name


@pytest.fixture(scope="session")
def postgres(server_dir: Path) -> Iterator[SharedPostgres]:
    with SharedPostgres(server_dir / "postgres") as server:
        yield server


@pytest.fixture(scope="session")
def nats_server(server_dir: Path) -> Iterator[EmbeddedNats]:
    with EmbeddedNats(server_dir / "nats") as server:
        yield server


@pytest.fixture
def template() -> str | None:
    """The database that the test's own is a copy of, None for an empty one."""
    return None


@pytest.fixture
def database(postgres: EmbeddedPostgres, template: str | None) -> Iterator[Database]:
    name = f"test_{uuid.uuid4().hex[:12]}"
    if template is None:  # a test may have a server of its own
        url = postgres.create_database(name)
    else:
        assert isinstance(postgres, SharedPostgres)
        url = postgres.create_database(name, template)
    database = Database(name, url)
    yield database
    database.drop(postgres.url)


@pytest.fixture
def nats(nats_server: EmbeddedNats) -> Iterator[JetStream]:
    with JetStream(nats_server.url) as handle:
        yield handle
