"""The settings of a connection: the caller's before the URL's, the URL's before the shared ones."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from penstock.core.connect import address, connect, connection_error
from penstock.outbox import sessions

URL = "postgresql://anna:s3cr3t@db.test:5433/shop"


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What psycopg is given by the last connection; it connects to no server."""
    settings: dict[str, Any] = {}

    class Connection:
        def execute(self, *_: object, **__: object) -> None:
            pass

    def connecting(url: str, **options: Any) -> Connection:
        settings.clear()
        settings.update(options, url=url)
        return Connection()

    monkeypatch.setattr(psycopg, "connect", connecting)
    return settings


SHARED = {
    "connect_timeout": 10, "keepalives_idle": 20, "keepalives_interval": 5,
    "keepalives_count": 4, "tcp_user_timeout": 30_000,
}  # fmt: skip


def test_every_session_has_the_shared_settings(given: dict[str, Any]) -> None:
    connect(URL, application_name="penstock")
    assert given == SHARED | {
        "url": URL, "autocommit": True, "client_encoding": "utf8", "application_name": "penstock"
    }  # fmt: skip


def test_a_url_keeps_its_own_settings(given: dict[str, Any]) -> None:
    connect(f"{URL}?connect_timeout=60&keepalives_idle=7")
    assert not given.keys() & {"connect_timeout", "keepalives_idle"}
    assert given["keepalives_count"] == 4


def test_a_caller_s_settings_win_over_the_url_s(given: dict[str, Any]) -> None:
    connect(f"{URL}?connect_timeout=60", connect_timeout=3)
    assert given["connect_timeout"] == 3


def test_a_relay_notices_a_dead_network_within_seconds(given: dict[str, Any]) -> None:
    sessions.connect(f"{URL}?keepalives_idle=600&connect_timeout=60")
    idle = given["keepalives_idle"] + given["keepalives_interval"] * given["keepalives_count"]
    assert idle <= 5
    assert given["connect_timeout"] == 5
    assert given["tcp_user_timeout"] == 5_000


def test_an_address_has_no_login() -> None:
    assert address(URL) == "db.test:5433/shop"
    assert address("host=/run/postgresql user=anna") == "/run/postgresql:5432/anna"
    assert address("dbname=shop") == "local socket:5432/shop"


@pytest.mark.parametrize(
    ("text", "code", "transient"),
    [
        ('FATAL:  database "shop" does not exist', "database_missing", False),
        ("FATAL:  the database system is starting up", "server_not_ready", True),
        ("FATAL:  sorry, too many clients already", "server_not_ready", True),
        ('FATAL:  password authentication failed for user "anna"', "authentication_failed", False),
        ("Connection refused\n\tIs the server running on that host?", "connection_refused", True),
        ("server does not support SSL, but SSL was required", "tls_failed", False),
        ("timeout expired with password s3cr3t", "authentication_failed", False),
        ("No route to host", "unreachable", True),
    ],
)
def test_a_failed_connection_s_error(text: str, code: str, transient: bool) -> None:
    output = f'connection to server at "db.test" (10.0.0.1), port 5433 failed: {text}'
    error = connection_error(psycopg.OperationalError(output), URL)
    assert (error.code, error.transient) == (code, transient)
    assert "db.test:5433/shop" in error.message
    assert error.remedy
    assert "s3cr3t" not in str(error)


@pytest.mark.parametrize("url", ["postgresql//u:s3cr3t@db/d", "host=db pass word=s3cr3t"])
def test_a_malformed_url_is_not_shown(url: str) -> None:
    with pytest.raises(psycopg.Error) as caught:
        connect(url)
    error = connection_error(caught.value, url)
    assert error.code == "url_invalid"
    assert "s3cr3t" not in str(error)
