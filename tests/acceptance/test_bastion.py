"""`penstock run` with a source and a NATS target behind one bastion, which is killed and comes back."""

from __future__ import annotations

import json
from pathlib import Path

from penstock.embedded.handles import Database, JetStream
from penstock.embedded.nats import EmbeddedNats

from ..bastions import SshServer, public
from ..pipeline import PATIENCE, Penstock


def test_nothing_is_lost_while_the_bastion_is_away(
    database: Database, nats_server: EmbeddedNats, nats: JetStream, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE orders (id bigint PRIMARY KEY)")
    login, _, rest = database.url.rpartition("@")
    where, _, name = rest.partition("/")
    host, _, port = where.partition(":")
    nats.add_stream("FAR", "shop.>")
    with SshServer() as ssh:
        ssh.names["pg.internal", 5432] = (host, int(port))
        ssh.names["nats.internal", 4222] = ("127.0.0.1", nats_server.port or 0)
        bastion = {
            "host": "127.0.0.1", "port": ssh.port, "user": "penstock",
            "private_key": ssh.user_key.export_private_key().decode(),
            "host_key": public(ssh.host_key),
        }  # fmt: skip
        config = {
            "targets": {
                "far": {"type": "nats", "url": "nats://nats.internal:4222", "bastion": bastion}
            },
            "sources": {
                "shop": {
                    "type": "postgres", "url": f"{login}@pg.internal:5432/{name}",
                    "bastion": bastion,
                }
            },
            "sinks": {"out": {"type": "nats", "source": "shop", "target": "far"}},
            "store": database.url,
            "spark": {"master": "local[1]"},
        }  # fmt: skip
        (tmp_path / "penstock.yaml").write_text(json.dumps(config))

        def seen() -> set[int]:
            return {json.loads(m.data)["record"]["id"] for m in nats.messages("FAR")}

        with Penstock(tmp_path) as run:
            run.start().wait_ready()
            database.execute("INSERT INTO orders SELECT generate_series(1, 1000)")
            run.wait_for(lambda: len(seen()) == 1000, PATIENCE, "what came before")
            ssh.kill()
            database.execute("INSERT INTO orders SELECT generate_series(1001, 2000)")
            run.wait_for(
                lambda: "bastion_unreachable" in run.get("/status")[1],
                PATIENCE,
                "the bastion in its status",
            )
            ssh.start()
            database.execute("INSERT INTO orders SELECT generate_series(2001, 3000)")
            run.wait_for(lambda: len(seen()) == 3000, PATIENCE, "all of it")
            run.wait_for(lambda: run.get("/readyz")[0] == 200, PATIENCE, "ready again")
            assert nats.info("FAR").state.messages == 3000
            assert "PRIVATE KEY" not in run.log()
        assert {("pg.internal", 5432), ("nats.internal", 4222)} == set(ssh.asked)
