"""No secret of a login leaves the relay: each kind of login, right and wrong, and all that is shown."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.core.tls import verifying_context
from penstock.embedded.handles import Database, JetStream
from penstock.embedded.nats import EmbeddedNats

from ..cli import SECRET
from ..integration.nats_servers import make_certificates, make_operator, make_seed
from ..pipeline import PATIENCE, Penstock
from ..relay_help import status

RIGHT, WRONG = "pa55-w0rd-Xy", "wr0ng-Xy-1234567890"
CODES = {"authorization_violation", "credentials_unusable", "tls_failed", "invalid_config"}


@dataclass
class Logins:
    """Servers with logins, the pipelines that use them, and what must not be seen."""

    folder: Path
    servers: Path
    stack: ExitStack
    right: dict[str, dict[str, Any]] = field(default_factory=dict)
    wrong: dict[str, dict[str, Any]] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    secrets: set[str] = field(default_factory=lambda: {RIGHT, WRONG, SECRET})

    def server(self, name: str, config: str, **admin: Any) -> str:
        """Start one with two streams; return its URL."""
        server = self.stack.enter_context(EmbeddedNats(self.servers / name, config))
        streams = self.stack.enter_context(JetStream(server.url, **admin))
        streams.add_stream("S", "s.>")
        streams.add_stream("N", "n.>")
        return server.url

    def file(self, name: str, text: str) -> str:
        (self.folder / name).write_text(text)
        return str(self.folder / name)

    def env(self, name: str, value: str) -> str:
        self.environment[name] = value
        return f"${{env:{name}}}"


@pytest.fixture
def logins(server_dir: Path, tmp_path: Path) -> Iterator[Logins]:
    servers = server_dir / "secrets"
    servers.mkdir()
    with ExitStack() as stack:
        made = Logins(tmp_path, servers, stack)
        by_user(made)
        by_token(made)
        by_credentials(made)
        by_tls(made)
        yield made


def by_user(made: Logins) -> None:
    seed, public = make_seed()
    other, _ = make_seed()
    made.secrets |= {seed, other}
    users = f'{{ user: relay, password: "{RIGHT}" }}, {{ nkey: {public} }}'
    url = made.server(
        "users", f"authorization {{ users: [ {users} ] }}", user="relay", password=RIGHT
    )
    made.right["url"] = {"url": made.env("URL", url.replace("://", f"://relay:{RIGHT}@"))}
    # In one stream the messages of two pipelines of an outbox would be each other's copies.
    own = {"subject": "n.nkey", "stream": "N"}
    made.right["nkey"] = {"url": url, "nkey_seed": made.env("SEED", seed), **own}
    made.wrong["no-url"] = {"url": url.replace("://", f"://relay:{WRONG}@")}
    made.wrong["no-nkey"] = {"url": url, "nkey_seed": other}
    made.wrong["no-seed"] = {"url": url, "nkey_seed": made.env("WRONG", WRONG)}


def by_token(made: Logins) -> None:
    url = made.server("token", f'authorization {{ token: "{RIGHT}" }}', token=RIGHT)
    made.right["token"] = {"url": url, "token": f"${{file:{made.file('token', RIGHT)}}}"}
    made.wrong["no-token"] = {"url": url, "token": WRONG}


def by_credentials(made: Logins) -> None:
    config, credentials = make_operator()
    _, others = make_operator()
    for text in (credentials, others):
        made.secrets |= {text.splitlines()[1], text.splitlines()[5]}
    right = made.file("creds", credentials)
    url = made.server("jwt", config, user_credentials=right)
    made.right["jwt"] = {"url": url, "credentials_file": right}
    made.wrong["no-jwt"] = {"url": url, "credentials_file": made.file("no-creds", others)}


def by_tls(made: Logins) -> None:
    ca, cert, key = make_certificates(made.folder / "tls")
    made.secrets |= set(key.read_text().splitlines()[1:-1])
    trusted = verifying_context(ca)
    trusted.load_cert_chain(cert, key)
    url = made.server(
        "tls",
        f'tls {{ cert_file: "{cert}", key_file: "{key}", ca_file: "{ca}", verify: true }}\n'
        f'authorization {{ user: relay, password: "{RIGHT}" }}',
        tls=trusted, tls_hostname="127.0.0.1", user="relay", password=RIGHT,
    )  # fmt: skip
    own = {"url": url, "tls_ca_cert": str(ca), "tls_cert": str(cert), "tls_key": str(key)}
    made.right["tls"] = {**own, "username": "relay", "password": RIGHT}
    made.wrong["no-tls"] = {**own, "username": "relay", "password": WRONG}
    # The content of a file in the place of its path.
    made.wrong["no-key"] = {**made.right["tls"], "tls_key": f"${{file:{key}}}"}


def test_no_secret_is_shown(app: Database, logins: Logins, tmp_path: Path) -> None:
    app.execute("select tide.outbox_create('orders')")
    pipelines = {**logins.right, **logins.wrong}
    for name, login in pipelines.items():
        config = {"sink_type": "nats", "subject": f"s.{name}", "stream": "S", **login}
        values = [name, json.dumps(config)]
        app.execute("select tide.relay_set_outbox(%s, 'orders', 'g', %s)", values)
        app.execute("select tide.relay_enable(%s)", [name])
    url = app.url.replace("postgres@", f"postgres:{SECRET}@")
    environment = {**logins.environment, "PENSTOCK_RELAY_URL": url}

    def settled() -> bool:
        found = {name: status(app, name) for name in pipelines}
        return all(found[name]["delivered"] == 1 for name in logins.right) and all(
            found[name]["state"] == "error" for name in logins.wrong
        )

    with Penstock(tmp_path, command="relay", environment=environment) as process:
        process.start().wait_ready()
        app.execute("select tide.outbox_publish('orders', '1')")
        process.wait_for(settled, PATIENCE, "settled")
        shown = {
            "/status": process.get("/status")[1],
            "/metrics": process.get("/metrics")[1],
            "the arguments": arguments(process),
        }
        running = {name: status(app, name) for name in pipelines}
        assert process.stop() == 0
    shown["the log"] = process.log()
    shown["relay_list"] = str(app.execute("select * from tide.relay_list()"))
    shown["outbox_status"] = str(app.execute("select tide.outbox_status('orders')"))
    for name, of_pipeline in running.items():
        shown[f"relay_status of {name}"] = json.dumps(of_pipeline)
        shown[f"relay_status of {name}, stopped"] = json.dumps(status(app, name))
        assert of_pipeline["code"] in (CODES if name in logins.wrong else {None}), of_pipeline
    leaks = {
        what for what, text in shown.items() if any(secret in text for secret in logins.secrets)
    }
    assert leaks == set()
    assert all(name in shown[what] for name in logins.wrong for what in ("the log", "/status"))
    assert "SparkSubmit" in shown["the arguments"]


def arguments(process: Penstock) -> str:
    """Return the arguments of each process that the relay is."""
    found = ""
    for each in process.tree():
        with contextlib.suppress(psutil.Error):  # ended meanwhile
            found += f"{each.cmdline()}\n"
    return found
