"""`penstock run` with a source and a NATS target behind one bastion, which is killed and comes back."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import asyncssh
import pytest

from penstock.embedded.handles import Database, JetStream
from penstock.embedded.nats import EmbeddedNats
from penstock.embedded.postgres import EmbeddedPostgres

from ..bastions import SshServer, public
from ..cli import run
from ..pipeline import PATIENCE, Penstock, penstock
from ..relay_help import bodies, publish_at_once, set_outbox

ROWS = 100_000
"""A backfill of so many lasts for more than a second."""


class Far:
    """A run whose source and NATS target lie behind one bastion."""

    def __init__(
        self,
        folder: Path,
        ssh: SshServer,
        database: Database,
        server: EmbeddedNats,
        nats: JetStream,
    ) -> None:
        self.nats = nats
        self.folder = folder
        database.execute("CREATE TABLE orders (id bigint PRIMARY KEY)")
        login, _, rest = database.url.rpartition("@")
        where, _, name = rest.partition("/")
        host, _, port = where.partition(":")
        nats.add_stream("FAR", "shop.>")
        ssh.names["pg.internal", 5432] = (host, int(port))
        ssh.names["nats.internal", 4222] = ("127.0.0.1", server.port or 0)
        self.bastion = {
            "host": "127.0.0.1", "port": ssh.port, "user": "penstock",
            "private_key": ssh.user_key.export_private_key().decode(),
        }  # fmt: skip
        self.config = {
            "targets": {
                "far": {"type": "nats", "url": "nats://nats.internal:4222", "bastion": self.bastion}
            },
            "sources": {
                "shop": {
                    "type": "postgres", "url": f"{login}@pg.internal:5432/{name}",
                    "bastion": self.bastion,
                }
            },
            "sinks": {"out": {"type": "nats", "source": "shop", "target": "far"}},
            "store": database.url,
            "spark": {"master": "local[1]"},
        }  # fmt: skip

    def write(self) -> None:
        (self.folder / "penstock.yaml").write_text(json.dumps(self.config))

    def trust(self, *options: str) -> None:
        for owner in ("shop", "far"):
            run(self.folder, f"target trust {owner} --yes", *options)

    def messages(self) -> int:
        return self.nats.info("FAR").state.messages

    def seen(self) -> set[int]:
        return {json.loads(m.data)["record"]["id"] for m in self.nats.messages("FAR")}


@pytest.fixture
def ssh() -> Iterator[SshServer]:
    with SshServer() as server:
        yield server


@pytest.fixture
def far(
    database: Database, nats_server: EmbeddedNats, nats: JetStream, tmp_path: Path, ssh: SshServer
) -> Iterator[Far]:
    yield Far(tmp_path, ssh, database, nats_server, nats)
    nats.delete_stream("FAR")


def insert(database: Database, first: int, last: int) -> None:
    database.execute("INSERT INTO orders SELECT generate_series(%s::int, %s)", [first, last])


def test_nothing_is_lost_while_the_bastion_is_away(
    far: Far, database: Database, ssh: SshServer
) -> None:
    """One story, because each start of Spark takes seconds: it is killed while changes stream, comes
    back with another host key, and is killed in the middle of a backfill."""
    insert(database, 1, ROWS)
    far.write()
    far.trust()

    def reports(code: str) -> None:
        process.wait_for(
            lambda: code in process.get("/status")[1], PATIENCE, f"{code} in its status"
        )

    def arrived(count: int, what: str) -> None:
        process.wait_for(lambda: far.messages() == count, PATIENCE, what)

    def ready_again() -> None:
        process.wait_for(lambda: process.get("/readyz")[0] == 200, PATIENCE, "ready again")

    with Penstock(far.folder) as process:
        process.start().wait_ready()
        insert(database, ROWS + 1, ROWS + 1000)
        arrived(1000, "what came before")
        ssh.kill()
        insert(database, ROWS + 1001, ROWS + 2000)
        reports("bastion_unreachable")
        ssh.start()
        insert(database, ROWS + 2001, ROWS + 3000)
        arrived(3000, "all of it")
        ready_again()

        # Another host key is refused, then pinned, and the same process goes on.
        ssh.kill()
        ssh.host_key = asyncssh.generate_private_key("ssh-ed25519")
        ssh.start()
        insert(database, ROWS + 3001, ROWS + 4000)
        reports("bastion_host_key")
        assert "penstock target trust shop --replace" in process.get("/status")[1]
        assert far.messages() == 3000
        far.trust("--replace")
        arrived(4000, "what waited")
        ready_again()
        assert far.seen() == set(range(ROWS + 1, ROWS + 4001))

        run(far.folder, "backfill start --sink out")
        process.wait_for(
            lambda: far.messages() > 4000 + ROWS / 20, PATIENCE, "the backfill's first rows"
        )
        ssh.kill()
        assert far.messages() < 4000 + ROWS, "it was over before the bastion was killed"
        reports("bastion_unreachable")
        ssh.start()

        def state() -> str:
            (backfill,) = json.loads(run(far.folder, "backfill list --json"))
            found: str = backfill["state"]
            return found

        process.wait_for(lambda: state() == "done", PATIENCE, "the end of it")
        assert far.seen() == set(range(1, ROWS + 4001))
        ready_again()
        assert "PRIVATE KEY" not in process.log()
    assert {("pg.internal", 5432), ("nats.internal", 4222)} == set(ssh.asked)


def behind(app: Database, ssh: SshServer) -> str:
    """Return the URL of a database by a name that the bastion alone resolves."""
    login, _, rest = app.url.rpartition("@")
    where, _, name = rest.partition("/")
    host, _, port = where.partition(":")
    ssh.names["outbox.internal", 5432] = (host, int(port))
    return f"{login}@outbox.internal:5432/{name}"


@pytest.mark.parametrize("door", ["file", "options"])
def test_an_outbox_behind_a_bastion(
    app: Database,
    streams: JetStream,
    postgres: EmbeddedPostgres,
    tmp_path: Path,
    ssh: SshServer,
    door: str,
) -> None:
    """The bastion is killed in the middle; nothing is lost, and nothing goes past it."""
    name = f"store_{uuid.uuid4().hex[:8]}"
    store = Database(name, postgres.create_database(name))
    streams.add_stream("FAR", "far")
    app.execute("select tide.outbox_create('notifications')")
    set_outbox(app, "far", "FAR")
    app.execute("select tide.relay_enable('far')")
    url, key = behind(app, ssh), tmp_path / "key"
    key.write_bytes(ssh.user_key.export_private_key())
    options: list[str] = []
    if door == "file":
        bastion = {
            "host": "127.0.0.1", "port": ssh.port, "user": "penstock", "private_key_file": str(key)
        }  # fmt: skip
        source = {"type": "outbox", "url": url, "bastion": bastion}
        config = {"sources": {"box": source}, "store": store.url}
        (tmp_path / "penstock.yaml").write_text(json.dumps(config))
        run(tmp_path, "target trust box --yes")
    else:
        options += [
            "--url",
            url,
            "--store",
            store.url,
            "--bastion",
            f"penstock@127.0.0.1:{ssh.port}",
        ]
        options += ["--bastion-key", str(key), "--bastion-host-key", public(ssh.host_key)]

    def seen() -> list[int]:
        return sorted(bodies(streams, "FAR"))

    environment = {"NATS_URL": streams.url}
    command = "run" if door == "file" else "relay"
    with Penstock(tmp_path, *options, command=command, environment=environment) as process:
        process.start().wait_ready()
        publish_at_once(app, 1, 500)
        process.wait_for(lambda: len(seen()) == 500, PATIENCE, "what came before")
        ssh.kill()
        publish_at_once(app, 501, 1000)
        process.wait_for(
            lambda: "bastion_unreachable" in process.get("/status")[1], PATIENCE, "the bastion"
        )
        ssh.start()
        publish_at_once(app, 1001, 1500)
        process.wait_for(lambda: len(seen()) >= 1500, PATIENCE, "all of it")
        assert seen() == list(range(1, 1501))
        process.wait_for(lambda: process.get("/readyz")[0] == 200, PATIENCE, "ready again")
        assert "PRIVATE KEY" not in process.log()
        if door == "file":
            asked = ("status", "--json", "--listen", process.listen)
            process.wait_for(
                lambda: penstock(*asked, cwd=tmp_path).returncode == 0, PATIENCE, "all well"
            )
            status = json.loads(run(tmp_path, *asked))
            (pipeline,) = status["outboxes"]["box"]["pipelines"]
            assert (pipeline["pipeline"], pipeline["state"]) == ("far", "running")
            found = json.loads(run(tmp_path, "check", "--json", **environment))["findings"]
            assert any(of["subject"] == "source box: schema tide" for of in found)
    assert set(ssh.asked) == {("outbox.internal", 5432)}
    store.drop(postgres.url)
