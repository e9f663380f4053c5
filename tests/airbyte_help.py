"""A manifest of Airbyte with its API, and a connector that reads it."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import psutil
import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.config.providers import AirbyteProvider
from penstock.syncs.airbyte import environment, process
from penstock.syncs.connectors.airbyte import AirbyteConnector
from penstock.syncs.connectors.contract import Kind, Page
from penstock.syncs.connectors.make import connector_of, session_of
from penstock.syncs.local_budget import LocalBudget
from penstock.syncs.tokens import TokenKeeper

from .loopback_api import Answer, Asked

MANIFEST = Path(__file__).with_name("airbyte.yaml")
TOKEN = "hush-hush-token"


class Api:
    """An API of contacts, two to a page, and of their notes."""

    def __init__(self) -> None:
        self.contacts: list[dict[str, Any]] = [
            {"id": i, "name": f"n{i}", "updated_at": f"2026-05-01T10:00:0{i // 3}Z"}
            for i in range(6)
        ]
        self.notes: dict[str, list[dict[str, Any]]] = {}
        self.failures: list[Answer] = []

    def __call__(self, asked: Asked) -> Answer:
        assert asked.headers["authorization"] == f"Bearer {TOKEN}"
        if self.failures:
            return self.failures.pop(0)
        if asked.path == "/lists":
            return Answer({"items": [{"id": 7, "name": "vip"}]})
        since = asked.query.get("since", "")
        if asked.path.startswith("/contacts/"):
            of = self.notes.get(asked.path.split("/")[2], [])
            return Answer({"items": [each for each in of if each["updated_at"] >= since]})
        found = [each for each in self.contacts if str(each.get("updated_at")) >= since]
        page = int(asked.query.get("page", 0))
        more = str(page + 2) if page + 2 < len(found) else None
        return Answer({"items": found[page : page + 2], "meta": {"next": more}})


class OAuth:
    """Hands out tokens, and takes each refresh token once; `api` answers who has the newest token.

    Attributes:
        issued: How many tokens there are; the newest is `access-N`.
        seconds: How long they last.
        is_rotating: Whether each request for a token replaces the refresh token.
        is_down: Whether there are no tokens for now.
    """

    def __init__(self, api: Api) -> None:
        self._api = api
        self.issued = 0
        self.seconds = 3600
        self.is_rotating = True
        self.is_down = False
        self.refresh = "refresh-0"

    def __call__(self, asked: Asked) -> Answer:
        if asked.path == "/token" and self.is_down:
            return Answer({}, 503)
        if asked.path == "/token":
            if dict(parse_qsl(asked.body.decode()))["refresh_token"] != self.refresh:
                return Answer({"error": "invalid_grant"}, 400)
            self.issued += 1
            found = {"access_token": f"access-{self.issued}", "expires_in": self.seconds}
            if self.is_rotating:
                found["refresh_token"] = self.refresh = f"refresh-{self.issued}"
            return Answer(found)
        if asked.headers["authorization"] != f"Bearer access-{self.issued}":
            return Answer({"message": "the token has ended"}, 401)
        return self._api(replace(asked, headers={"authorization": f"Bearer {TOKEN}"}))


def oauth_manifest(updater: str = "refresh_token_updater: {}, ") -> str:
    """Return the manifest with a login by OAuth, whose refresh token an updater replaces."""
    one = "api_token: \"{{ config['token'] }}\""
    of = "{{{{ config['credentials']['{}'] }}}}".format
    login = (
        f"{updater}token_refresh_endpoint: \"{{{{ config['api_url'] }}}}/token\", "
        f'client_id: "{of("client_id")}", client_secret: "{of("client_secret")}", '
        f'refresh_token: "{of("refresh_token")}"'
    )
    text = MANIFEST.read_text().replace("type: BearerAuthenticator", "type: OAuthAuthenticator")
    assert one in text
    return text.replace(one, login)


def oauth_config(url: str) -> dict[str, Any]:
    """Return what that manifest asks for."""
    login = {"client_id": "me", "client_secret": "hush-hush", "refresh_token": "{secret}"}
    return {"api_url": url, "token": "none", "credentials": login}


class Read:
    """A connector with its session, whose waits are noted and not waited."""

    def __init__(
        self, url: str, *, secret: str = TOKEN, keeper: TokenKeeper | None = None, **more: Any
    ) -> None:
        self.waits: list[float] = []
        spec = {
            "type": "airbyte",
            "manifest": {"file": str(MANIFEST)},
            "config": {"api_url": url, "token": "{secret}"},
            "allow_private": True,
            **more,
        }
        self.settings = AirbyteProvider.model_validate(spec)
        found = connector_of("crm", self.settings, {"secret": secret})
        assert isinstance(found, AirbyteConnector)
        self.connector = found
        self.budget = LocalBudget(1000)
        self.session = session_of(found.access, self.budget, keeper, sleep=self.waits.append)

    def pages(
        self, name: str, kind: Kind = Kind.BACKFILL, cursor: Any = None, resume: Any = None
    ) -> Generator[Page, None, None]:
        collection = self.connector.collections(self.session)[name]
        for slice_ in self.connector.plan(collection, cursor, kind, self.session):
            object.__setattr__(slice_, "resume", resume)
            yield from self.connector.read(collection, slice_, self.session)

    def ids(
        self, name: str, kind: Kind = Kind.BACKFILL, cursor: Any = None
    ) -> tuple[list[str], Any]:
        pages = list(self.pages(name, kind, cursor))
        assert pages[-1].is_last
        assert not any(page.is_last for page in pages[:-1])
        return [record.upstream_id for page in pages for record in page.records], pages[-1].cursor


@pytest.fixture(scope="module", autouse=True)
def airbyte_cdk() -> Iterator[None]:
    """Have the environment, which is made from the lock once for all runs of this checkout.

    A file of tests that imports this has it.
    """
    home = Path(sys.prefix) / "airbyte"
    home.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch, (home / "lock").open("w") as lock:
        patch.setenv("XDG_CACHE_HOME", str(home))
        patch.delenv(environment.VARIABLE, raising=False)
        patch.setenv("PENSTOCK_SECRET_KEY", "x" * 40)
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = CliRunner().invoke(app, ["sync", "airbyte", "install"])
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert found.exit_code == 0, found.output
        assert str(environment.place()) in found.output.replace("\n", "")
        yield
        process.PROCESSES.close()


def workers() -> list[int]:
    """Return the processes of airbyte-cdk that this one has."""
    return [
        each.pid
        for each in psutil.Process(os.getpid()).children()
        if each.status() != psutil.STATUS_ZOMBIE and "worker.py" in " ".join(each.cmdline())
    ]
