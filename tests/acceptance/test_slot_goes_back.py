"""A server that crashed has of a slot what its last checkpoint had: nothing is sent again for that."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import psutil
import psycopg

from penstock.embedded.handles import JetStream
from penstock.embedded.nats import EmbeddedNats
from penstock.embedded.postgres import EmbeddedPostgres

from ..pipeline import CAPTURE, PATIENCE, Penstock, kill, runs

CONFIG = """\
sources:
  shop:
    type: postgres
    url: {url}
sinks:
  out:
    type: nats
    source: shop
    url: {nats}
    subject: "{prefix}.{{table}}"
spark:
  master: local[2]
"""


def test_a_query_that_is_started_again_goes_on_behind_what_is_delivered(
    nats: JetStream, nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    name = f"S{uuid.uuid4().hex[:8]}"
    # It forgets ids at once: what is sent again is there twice.
    nats.add_stream(name, f"{name.lower()}.>", duplicate_window=0.1)
    with EmbeddedPostgres(tmp_path / "postgres") as postgres:
        url = postgres.create_database("shop")

        def write(first: int, end: int) -> None:
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute(
                    "INSERT INTO items SELECT generate_series(%s::bigint, %s)", [first, end]
                )

        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE TABLE items (id bigint PRIMARY KEY)")
        config = CONFIG.format(url=url, nats=nats_server.url, prefix=name.lower())
        (tmp_path / "penstock.yaml").write_text(config)
        with Penstock(tmp_path) as run:
            run.start().wait_ready()

            def delivered(count: int) -> None:
                def there() -> bool:
                    return nats.info(name).state.last_seq >= count

                run.wait_for(there, PATIENCE, f"delivering {count} messages")

            write(1, 100)
            delivered(100)
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute("CHECKPOINT")
            write(101, 300)
            # Once the run has counted them, it knows where the next query goes on.
            run.wait_for(lambda: counted(run) == 300, PATIENCE, "counting 300 messages")
            postgres.kill()
            kill(captures(run))
            postgres.start()
            write(301, 301)
            run.wait_for(lambda: counted(run) == 301, PATIENCE, "counting 301 messages")
            ids = [json.loads(message.data)["record"]["id"] for message in nats.messages(name)]
            assert ids == [*range(1, 302)]
            assert run.status()["sources"]["shop"]["restarts"] > 0
    nats.delete_stream(name)


def counted(run: Penstock) -> int:
    return int(run.status()["sinks"]["out"]["delivered"])


def captures(run: Penstock) -> list[psutil.Process]:
    found = [process for process in run.tree()[1:] if runs(process, CAPTURE)]
    assert found
    return found
