"""Through a bastion: a real SSH server in this process, with Postgres, NATS and HTTP behind it."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import ssl
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

import asyncssh
import pytest
from tests.bastions import SshServer, public
from tests.nats_cluster import Cluster, answered
from tests.waits import await_true
from typer.testing import CliRunner, Result

from penstock.bastion import tunnel
from penstock.bastion.connection import Client, connect
from penstock.bastion.keys import fingerprint
from penstock.bastion.tunnel import tunnel_to
from penstock.cli.main import app
from penstock.config.bastion import Bastion
from penstock.config.nats import NatsSinkConfig
from penstock.config.sources import PostgresSource
from penstock.core.errors import BastionError, CaptureError, SinkError
from penstock.embedded.handles import Database, JetStream
from penstock.embedded.nats import EmbeddedNats
from penstock.embedded.process import free_port
from penstock.postgres.admin import open_catalog
from penstock.postgres.connect import connect_source
from penstock.postgres.replication import identify
from penstock.push.errors import EndpointError
from penstock.push.http import Endpoint
from penstock.sinks.nats.client import connect_first

from .nats_servers import Writer, batch, make_certificates

T = TypeVar("T")
HOST = "nats.internal"
SSL_REQUEST = (8).to_bytes(4) + (80_877_103).to_bytes(4)


def invoke(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def ssh() -> Iterator[SshServer]:
    with SshServer() as server:
        yield server


def nats_behind(ssh: SshServer, server: EmbeddedNats, **settings: object) -> NatsSinkConfig:
    """A sink to a server by a name that the bastion alone resolves."""
    ssh.names[HOST, 4222] = ("127.0.0.1", server.port or 0)
    config = NatsSinkConfig.model_validate({"url": f"nats://{HOST}:4222", **settings})
    return config.behind(ssh.bastion())


def test_a_bastion_killed_in_the_middle_loses_nothing(
    ssh: SshServer, nats_server: EmbeddedNats, nats: JetStream
) -> None:
    nats.add_stream("FAR", "far.>")
    config = nats_behind(ssh, nats_server, subject="far.{table}", ack_timeout=2)
    writer = Writer(config)
    rows = batch(range(60_000))
    writer.start(rows)
    await_true(lambda: nats.info("FAR").state.messages > 500)
    ssh.kill()
    assert writer.running, "it was over before the bastion was killed"
    writer.until_retry("bastion_unreachable")
    ssh.start()
    assert writer.result(60).delivered == 60_000
    assert nats.info("FAR").state.messages == 60_000
    assert set(ssh.asked) == {(HOST, 4222)}
    nats.delete_stream("FAR")


def test_what_is_refused_names_which_of_the_two_it_is(ssh: SshServer) -> None:
    good = ssh.bastion()
    cases = {
        "bastion_host_key": replace(good, host_key=None),
        "bastion_refused_login": ssh.bastion(private_key=_other_key()),
        "bastion_key_missing": replace(good, private_key=None),
        "bastion_key_unusable": replace(good, private_key="-----BEGIN NOTHING-----"),
        "bastion_unreachable": replace(good, port=free_port()),
    }
    for code, bastion in cases.items():
        config = NatsSinkConfig(url=f"nats://{HOST}:4222").behind(bastion)
        with pytest.raises(SinkError) as caught:
            connect_first(config, "test")
        assert caught.value.code == code
        assert caught.value.transient == (code == "bastion_unreachable")
        assert "PRIVATE KEY" not in str(caught.value)
        assert "BEGIN" not in repr(bastion)
    assert ssh.asked == [], "none came as far as the server behind it"
    closed = free_port()
    for host, code in (("127.0.0.1", "unreachable"), ("forbidden", "bastion_forbids")):
        with pytest.raises(BastionError) as error:
            tunnel_to(good).open(host, closed)
        assert (error.value.code, f"{host}:{closed}" in str(error.value)) == (code, True)


def _other_key() -> str:
    return asyncssh.generate_private_key("ssh-ed25519").export_private_key().decode()


def test_an_unknown_and_a_changed_host_key_name_the_fingerprint(ssh: SshServer) -> None:
    shown = fingerprint(public(ssh.host_key))
    other = public(asyncssh.generate_private_key("ssh-ed25519"))
    rsa = public(asyncssh.generate_private_key("ssh-rsa"))
    for host_key, texts in (
        (None, [shown, "penstock target trust far"]),
        (other, ["HAS CHANGED", shown, fingerprint(other)]),
        (rsa, ["HAS CHANGED", shown, fingerprint(rsa)]),  # a type that it does not have
    ):
        with pytest.raises(BastionError) as caught:
            tunnel_to(replace(ssh.bastion(), host_key=host_key)).open(HOST, 1)
        assert caught.value.code == "bastion_host_key"
        assert [text for text in texts if text not in str(caught.value)] == []
    assert ssh.logins == 0


def test_tls_verifies_the_far_servers_name(
    ssh: SshServer, server_dir: Path, tmp_path: Path
) -> None:
    ca, cert, key = make_certificates(tmp_path)
    config = f'tls {{ cert_file: "{cert}", key_file: "{key}" }}'
    with EmbeddedNats(server_dir / "far-tls", config) as server:
        for host in ("localhost", "elsewhere"):
            ssh.names[host, 4222] = ("127.0.0.1", server.port or 0)
        sink = NatsSinkConfig(url="tls://localhost:4222", tls_ca_cert=ca).behind(ssh.bastion())
        connect_first(sink, "test").close()
        # Its certificate is for 127.0.0.1 too: what the tunnel ends at must not count.
        wrong = sink.model_copy(update={"url": "tls://elsewhere:4222"})
        with pytest.raises(SinkError, match="elsewhere") as caught:
            connect_first(wrong, "test")
        assert caught.value.code == "tls_failed"


class _Announcer:
    """A server that answers logins, and announces `urls`."""

    def __init__(self, urls: list[str]) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        info = {"server_id": "a", "headers": True, "max_payload": 1 << 20, "connect_urls": urls}
        self._info = b"INFO " + json.dumps(info).encode() + b"\r\n"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            connection.sendall(self._info)
            connection.recv(65_536)
            connection.sendall(b"PONG\r\n")

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def test_announced_addresses_go_through_it_too(ssh: SshServer, nats_server: EmbeddedNats) -> None:
    seed = _Announcer(["10.9.8.7:4300", "second.internal:4222"])
    ssh.names |= {
        ("seed.internal", 4222): ("127.0.0.1", seed.port),
        ("10.9.8.7", 4300): ("127.0.0.1", free_port()),
        ("second.internal", 4222): ("127.0.0.1", nats_server.port or 0),
    }
    config = NatsSinkConfig(url="nats://seed.internal").behind(ssh.bastion())
    connect_first(config, "test").close()
    seed.close()
    ssh.asked.clear()
    connection = connect_first(config, "test", timeout=lambda: 2.0)
    connection.close()
    assert str(connection.server) == "nats://second.internal:4222"
    assert ssh.asked == [
        ("seed.internal", 4222), ("10.9.8.7", 4300), ("second.internal", 4222),
    ]  # fmt: skip


def test_a_cluster_behind_it_loses_its_only_seed_in_the_middle(
    ssh: SshServer, server_dir: Path
) -> None:
    """The sink's `url` has the server that leads the stream; the others it knows by their INFO alone."""
    with ExitStack() as stack:
        cluster = stack.enter_context(
            Cluster(server_dir / "behind", advertise="{name}.internal:4222")
        )
        addresses = {name: (f"{name}.internal", 4222) for name in cluster.servers}
        for name, server in cluster.servers.items():
            ssh.names[addresses[name]] = ("127.0.0.1", server.port or 0)

        def asks(name: str) -> JetStream:
            return stack.enter_context(JetStream(cluster.servers[name].url, error_cb=ignore_error))

        makes = asks("n0")
        answered(partial(makes.add_stream, "FAR", "far.>", num_replicas=3), "the stream")
        seed = cluster.leader(makes, "FAR")
        streams = asks(next(name for name in cluster.servers if name != seed))
        url = f"nats://{seed}.internal:4222"
        config = NatsSinkConfig(url=url, subject="far.{table}", ack_timeout=2)
        writer = Writer(config.behind(ssh.bastion()))
        writer.start(batch(range(20_000)))
        await_true(lambda: streams.info("FAR").state.messages > 500)
        assert set(ssh.asked) == {addresses[seed]}
        cluster.kill(seed)
        assert writer.running, "it was over before the seed was killed"
        assert writer.result().delivered == 20_000
        found = [json.loads(m.data)["record"]["id"] for m in streams.messages("FAR")]
        assert sorted(found) == list(range(20_000))
        # Names alone, and one of another server: no address where one of them listens.
        assert {addresses[seed]} < set(ssh.asked) <= set(addresses.values())


async def ignore_error(_: Exception) -> None:
    """Stand in for nats-py's logging of every try to connect to a server that we killed."""


def test_each_seed_is_tried_through_it(ssh: SshServer, nats_server: EmbeddedNats) -> None:
    ssh.names |= {
        ("one.internal", 4222): ("127.0.0.1", free_port()),
        ("two.internal", 4333): ("127.0.0.1", nats_server.port or 0),
    }
    seeds = [("one.internal", 4222), ("two.internal", 4333)]
    config = NatsSinkConfig(url="nats://one.internal,nats://two.internal:4333").behind(
        ssh.bastion()
    )
    connection = connect_first(config, "test", timeout=lambda: 2.0)
    connection.close()
    assert str(connection.server) == "nats://two.internal:4333"
    assert ssh.asked == seeds
    del ssh.names["two.internal", 4333]
    with pytest.raises(SinkError) as caught:
        connect_first(config, "test", timeout=lambda: 2.0)
    assert caught.value.transient
    assert all(f"{host}:{port}" in str(caught.value) for host, port in seeds)


def test_a_bastion_that_is_away_is_asked_less_and_less(
    ssh: SshServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks within the pause has the last try's answer."""
    tries = []

    async def counted(to: Bastion) -> tuple[asyncssh.SSHClientConnection, Client]:
        tries.append(time.monotonic())
        return await connect(to)

    monkeypatch.setattr(tunnel, "connect", counted)
    way = tunnel_to(ssh.bastion())
    ssh.kill()

    def asked() -> int:
        with pytest.raises(BastionError) as caught:
            way.open("pg.internal", 5432)
        assert caught.value.code == "bastion_unreachable"
        return len(tries)

    await_true(lambda: asked() == 4)
    waited = [after - before for before, after in itertools.pairwise(tries)]
    # 0.25, 0.5 and 1 s, each shorter by a quarter at most.
    assert waited[0] >= 0.18
    assert waited[1] >= 0.37
    assert waited[2] >= 0.74
    ssh.start()
    ssh.names["pg.internal", 5432] = ("127.0.0.1", ssh.port)
    await_true(lambda: _opens(way))


def _opens(way: tunnel.Tunnel) -> bool:
    with suppress(BastionError):
        way.open("pg.internal", 5432).close()
        return True
    return False


def source_behind(bastion: Bastion, database: Database, port: int = 5432) -> PostgresSource:
    parts = database.url.rpartition("@")
    url = f"{parts[0]}@pg.internal:{port}/{parts[2].partition('/')[2]}"
    return PostgresSource.model_validate({"type": "postgres", "url": url}).behind(bastion)


def test_a_source_keeps_its_servers_name(ssh: SshServer, database: Database) -> None:
    host, port = database.url.rpartition("@")[2].partition("/")[0].split(":")
    ssh.names["pg.internal", 5432] = (host, int(port))
    source = source_behind(ssh.bastion(), database)
    with connect_source(source.address, "test") as connection:
        # What sslmode=verify-full compares with the certificate is the host's name.
        assert (connection.info.host, connection.info.hostaddr) == ("pg.internal", "127.0.0.1")
        assert connection.execute("SELECT 1").fetchone() == (1,)
        connection.cancel_safe(timeout=5)
    assert identify(source.address, "s").tag
    with open_catalog(source) as catalog:
        assert catalog.server.database == database.name
    ssh.names["pg.internal", 5433] = ("127.0.0.1", free_port())
    closed = source_behind(ssh.bastion(), database, 5433)
    with pytest.raises(CaptureError) as caught:
        connect_source(closed.address, "test")
    assert (caught.value.code, "pg.internal:5433" in str(caught.value)) == ("unreachable", True)
    ssh.kill()
    with pytest.raises(CaptureError) as caught, open_catalog(source):
        pass
    assert (caught.value.code, caught.value.transient) == ("bastion_unreachable", True)
    assert "127.0.0.1" in str(caught.value)


@contextmanager
def tls_before(database: Database, certificate: Path, key: Path) -> Iterator[int]:
    """Put TLS in front of a Postgres server that has none, as sslmode asks for it; give its port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    host, _, port = database.url.rpartition("@")[2].partition("/")[0].partition(":")
    loop = asyncio.new_event_loop()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):  # a client that refuses the certificate
            assert await reader.readexactly(8) == SSL_REQUEST
            writer.write(b"S")
            await writer.start_tls(context)
            far, to = await asyncio.open_connection(host, int(port))
            await asyncio.gather(pump(reader, to), pump(far, writer))

    async def end() -> None:
        server.close()
        open_ = asyncio.all_tasks() - {asyncio.current_task()}
        for task in open_:
            task.cancel()
        await asyncio.gather(*open_, return_exceptions=True)

    def wait(work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, loop).result(20)

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = wait(asyncio.start_server(serve, "127.0.0.1", 0))
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        wait(end())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.close()


def test_verify_full_compares_the_far_servers_name(
    ssh: SshServer, database: Database, tmp_path: Path
) -> None:
    ca, cert, key = make_certificates(tmp_path)
    login, _, rest = database.url.rpartition("@")

    def source(host: str) -> PostgresSource:
        url = f"{login}@{host}:5432/{rest.partition('/')[2]}?sslmode=verify-full&sslrootcert={ca}"
        return PostgresSource.model_validate({"type": "postgres", "url": url}).behind(ssh.bastion())

    with tls_before(database, cert, key) as port:
        for host in ("localhost", "elsewhere"):
            ssh.names[host, 5432] = ("127.0.0.1", port)
        with connect_source(source("localhost").address, "test") as connection:
            assert connection.pgconn.ssl_in_use
            assert connection.execute("SELECT 1").fetchone() == (1,)
        assert identify(source("localhost").address, "s").tag
        # The certificate is for 127.0.0.1 too: what the tunnel ends at must not count.
        with pytest.raises(CaptureError, match="elsewhere") as caught:
            connect_source(source("elsewhere").address, "test")
        assert caught.value.code == "tls_failed"


class _Http(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(204 if self.headers["host"] in ("hook.internal", "localhost") else 400)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_webhook_behind_it_may_be_private(ssh: SshServer, loop: str) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Http)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    ssh.names["hook.internal", 80] = ("127.0.0.1", server.server_port)
    given = [ssh.bastion(), replace(ssh.bastion(), host_key=None)]

    async def post() -> int:
        async def bastion() -> Bastion:
            return given.pop(0)

        endpoint = Endpoint("http://hook.internal/x", {}, allow_private=False, bastion=bastion)
        answer = await endpoint.post(b"{}", b"", 10)
        endpoint.close()
        with pytest.raises(EndpointError, match="not known") as caught:
            await endpoint.post(b"{}", b"", 10)
        assert caught.value.code == "bastion_host_key"
        return answer.status

    if loop == "uvloop":
        uvloop = pytest.importorskip("uvloop")
        assert uvloop.run(post()) == 204
    else:
        assert asyncio.run(post()) == 204
    server.shutdown()
    server.server_close()


def test_https_behind_it_is_verified_for_the_far_servers_name(
    ssh: SshServer, tmp_path: Path
) -> None:
    ca, cert, key = make_certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Http)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for host in ("localhost", "elsewhere"):
        ssh.names[host, 443] = ("127.0.0.1", server.server_port)

    async def bastion() -> Bastion:
        return ssh.bastion()

    async def post(host: str) -> int:
        endpoint = Endpoint(
            f"https://{host}/x", {}, allow_private=False, ca=ca.read_text(), bastion=bastion
        )
        try:
            return (await endpoint.post(b"{}", b"", 10)).status
        finally:
            endpoint.close()

    assert asyncio.run(post("localhost")) == 204
    # The certificate is for 127.0.0.1 too: what the tunnel ends at must not count.
    with pytest.raises(EndpointError, match="elsewhere: TLS failed: Hostname mismatch") as caught:
        asyncio.run(post("elsewhere"))
    assert caught.value.code == "tls"
    server.shutdown()
    server.server_close()


def test_show_and_trust(
    ssh: SshServer, nats_server: EmbeddedNats, database: Database, tmp_path: Path
) -> None:
    ssh.names[HOST, 4222] = ("127.0.0.1", nats_server.port or 0)
    file = tmp_path / "penstock.yaml"
    file.write_text(
        f"""\
targets:
  far:
    type: nats
    url: nats://{HOST}:4222
    bastion: {{host: 127.0.0.1, port: {ssh.port}, user: penstock}}
sources: {{shop: {{type: postgres, url: "{database.url}"}}}}
sinks: {{out: {{type: stream, source: shop}}}}
store: "{database.url}"
"""
    )
    shown = invoke("target", "show", "far", "-c", file)
    assert "it is not trusted yet. Run: penstock target trust far" in shown.output
    (line,) = [line for line in shown.output.splitlines() if "ssh-ed25519" in line]
    ssh.kill()
    ssh.user_key = asyncssh.import_public_key(line.strip())  # as an administrator would
    ssh.start()
    assert _error_of_target(file).startswith("The host key of bastion")
    trusted = invoke("target", "trust", "far", "--yes", "-c", file)
    assert fingerprint(public(ssh.host_key)) in trusted.output
    assert "already" in invoke("target", "trust", "far", "-c", file).output
    assert _error_of_target(file) == ""
    # Another machine in its place, or a new key.
    ssh.kill()
    ssh.host_key = asyncssh.generate_private_key("ssh-ed25519")
    ssh.start()
    refused = invoke("target", "trust", "far", "--yes", "-c", file)
    assert (refused.exit_code, "HAS CHANGED" in refused.output) == (1, True)
    assert "HAS CHANGED" in _error_of_target(file)
    assert invoke("target", "trust", "far", "--yes", "--replace", "-c", file).exit_code == 0
    assert _error_of_target(file) == ""


def _error_of_target(file: Path) -> str:
    """What `penstock check` has against the target `far`."""
    found = json.loads(invoke("check", "--json", "-c", file).stdout)["findings"]
    (of_target,) = [each for each in found if each["subject"] == "target far"]
    return "" if of_target["level"] == "ok" else str(of_target["message"])
