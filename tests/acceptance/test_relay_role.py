"""A relay that is logged in as a role of its own, with no more rights than `tide.relay_grant` gives."""

from __future__ import annotations

import json
from pathlib import Path

from penstock.embedded.handles import Database, JetStream
from penstock.embedded.nats import EmbeddedNats
from penstock.outbox.sql.install import install

from ..pipeline import Penstock, penstock

ROLE = "only_relays"


def test_a_granted_role_relays(
    database: Database, nats_server: EmbeddedNats, nats: JetStream, tmp_path: Path
) -> None:
    with database.connect(autocommit=True) as connection:
        install(connection)
    stream = database.name.upper()
    config = {"sink_type": "nats", "url": nats_server.url, "subject": f"{database.name}.{{op}}"}
    nats.add_stream(stream, [f"{database.name}.>"])
    database.execute("select tide.outbox_create('before')")
    database.execute(f"create role {ROLE} login replication password 'pw'")
    database.execute(f'grant create on database "{database.name}" to {ROLE}')
    head, _, rest = database.url.partition("://")
    url = f"{head}://{ROLE}:pw@{rest.rpartition('@')[2]}"
    try:
        refused = penstock("relay", "--url", url, cwd=tmp_path)
        assert refused.returncode == 1
        assert f"Role {ROLE} may not read tide.relays" in refused.stderr
        assert f"select tide.relay_grant('{ROLE}')" in refused.stderr

        database.execute("select tide.relay_grant(%s)", [ROLE])
        database.execute("select tide.outbox_create('after')")
        with Penstock(tmp_path, "--url", url, command="relay") as relay:
            relay.start().wait_ready()
            for number, box in enumerate(("before", "after")):
                database.execute(
                    "select tide.relay_set_outbox(%s, %s, %s, %s), tide.relay_enable(%s)",
                    [box, box, "g", json.dumps({**config, "start": "beginning"}), box],
                )
                database.execute("select tide.outbox_publish(%s, to_jsonb(%s::int))", [box, number])
            relay.wait_for(lambda: nats.info(stream).state.messages == 2, 150, "both there")
            assert penstock("outbox", "status", "--url", url, cwd=tmp_path).returncode == 0
            assert relay.stop() == 0
    finally:
        database.execute(f"drop owned by {ROLE} cascade; drop role {ROLE}")
