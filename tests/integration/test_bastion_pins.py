"""Host keys that `penstock target trust` pins while a process runs: a real SSH server, a real store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import asyncssh
import pytest
from tests.bastions import SshServer, public

from penstock.bastion.tunnel import Tunnel
from penstock.config.bastion import Bastion
from penstock.core.errors import BastionError
from penstock.embedded.handles import Database
from penstock.embedded.nats import EmbeddedNats
from penstock.streams.bastions import completed, pin
from penstock.streams.store import Store


@pytest.fixture
def ssh(nats_server: EmbeddedNats) -> Iterator[SshServer]:
    with SshServer() as server:
        server.names["far.internal", 1] = ("127.0.0.1", nats_server.port or 0)
        yield server


def kept(store: Store, ssh: SshServer) -> Bastion:
    """Return the bastion as a process that starts now has it: its host key is the store's."""
    return completed(store, {"far": ssh.bastion(host_key=None)})["far"]


def code(tunnel: Tunnel) -> str:
    """Return why a connection can't be made now, nothing where it can."""
    tunnel._resume_at = 0.0  # of the backoff
    try:
        tunnel.open("far.internal", 1).close()
    except BastionError as error:
        return error.code if error.transient else f"for ever: {error.code}"
    return ""


def test_a_key_that_is_pinned_later_counts_at_the_next_connect(
    ssh: SshServer, database: Database
) -> None:
    with Store.open(database.url) as store:
        tunnel = Tunnel(kept(store, ssh))
        assert code(tunnel) == "bastion_host_key"
        pin(store, "far", public(ssh.host_key))
        assert code(tunnel) == ""
        ssh.kill()
        ssh.host_key = asyncssh.generate_private_key("ssh-ed25519")
        ssh.start()
        assert code(tunnel) in ("bastion_unreachable", "bastion_host_key")  # it notices the loss
        assert code(tunnel) == "bastion_host_key"
        pin(store, "far", public(ssh.host_key))
        assert code(tunnel) == ""


def test_a_key_that_is_pinned_no_more_is_refused(ssh: SshServer, database: Database) -> None:
    other = public(asyncssh.generate_private_key("ssh-ed25519"))
    with Store.open(database.url) as store:
        pin(store, "far", public(ssh.host_key))
        tunnel = Tunnel(kept(store, ssh))
        pin(store, "far", other)
        assert code(tunnel) == "bastion_host_key"


def test_a_store_that_is_away_changes_nothing(ssh: SshServer) -> None:
    away = replace(ssh.bastion(), pinned_in="postgresql://x@127.0.0.1:1/x")
    assert code(Tunnel(away)) == ""


def test_a_key_of_the_configuration_is_no_question_to_the_store(
    ssh: SshServer, database: Database
) -> None:
    with Store.open(database.url) as store:
        pin(store, "far", public(asyncssh.generate_private_key("ssh-ed25519")))
        assert completed(store, {"far": ssh.bastion()})["far"].pinned_in is None
        assert code(Tunnel(completed(store, {"far": ssh.bastion()})["far"])) == ""
