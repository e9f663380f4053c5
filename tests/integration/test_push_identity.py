"""Webhooks at endpoints that demand a client's certificate: their target has it, with its key."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.push_help import MemoryConsumer, receiver

from penstock.config.consumers import WebhookConsumer, WebhookSettings, settings_of
from penstock.config.targets import HttpTarget, joined_webhook
from penstock.core.errors import TargetError
from penstock.push.errors import EndpointError
from penstock.push.http import Endpoint
from penstock.push.reach import reach
from penstock.push.webhook import Webhook

from .nats_servers import make_certificates

LONG = 30.0


class Files(NamedTuple):
    ca: Path
    cert: Path
    key: Path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(*make_certificates(tmp_path_factory.mktemp("server")))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(*make_certificates(tmp_path_factory.mktemp("client"), "clients"))


def demanding(server: Files, client: Files) -> ssl.SSLContext:
    """Return the context of a server that takes clients with a certificate of that CA alone."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server.cert, server.key)
    context.load_verify_locations(client.ca)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def target_of(port: int, server: Files, client: Files | None) -> HttpTarget:
    mine = {} if client is None else {"tls_cert": client.cert, "tls_key": client.key}
    url = f"https://localhost:{port}"
    return HttpTarget.model_validate({"type": "http", "url": url, "tls_ca_cert": server.ca, **mine})


def test_a_webhook_shows_the_certificate_of_its_target(server: Files, client: Files) -> None:
    async def test() -> None:
        async with receiver(tls=demanding(server, client)) as to:
            written = {"type": "webhook", "stream": "s", "target": "crm", "allow_private": True}
            joined = joined_webhook(
                WebhookConsumer.model_validate(written), "crm", target_of(to.port, server, client)
            )
            # As the store has it, for processes that lack the files; and as the API shows it.
            stored = settings_of("webhook", joined.stored())
            assert isinstance(stored, WebhookSettings)
            assert "PRIVATE KEY" in str(joined.stored())
            assert "PRIVATE KEY" not in f"{joined!r} {stored!r} {stored.shown()}"
            consumer = MemoryConsumer("hook", stored)
            webhook = Webhook(consumer.whole, stored)
            running = asyncio.create_task(webhook.run())
            await consumer.publish(range(3))
            await consumer.all_acked(LONG)
            assert sorted(to.delivered()) == [0, 1, 2]
            webhook.stop()
            await running
            target = target_of(to.port, server, client)
            address = (await asyncio.to_thread(reach, target, None, "test")).address
            assert address == f"https://localhost:{to.port}"

    asyncio.run(test())


@pytest.mark.parametrize("other", [True, False])
def test_who_shows_none_or_another_is_refused(server: Files, client: Files, *, other: bool) -> None:
    async def test() -> None:
        async with receiver(tls=demanding(server, client)) as to:
            target = target_of(to.port, server, server if other else None)
            endpoint = Endpoint(
                target.url.get_secret_value(), {}, allow_private=True, ca=target.ca(),
                identity=target.identity(),
            )  # fmt: skip
            with pytest.raises(EndpointError):
                await endpoint.post(b"{}", b"", LONG)
            endpoint.close()
            assert to.requests == []

    asyncio.run(test())


def test_files_that_do_not_go_together(server: Files, client: Files, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tls_key is missing: tls_cert and tls_key go together"):
        HttpTarget.model_validate({"type": "http", "url": "https://x", "tls_cert": client.cert})
    mixed = Files(client.ca, client.cert, server.key)

    async def test() -> None:
        async with receiver(tls=demanding(server, client)) as to:
            with pytest.raises(TargetError, match="TLS failed") as caught:
                await asyncio.to_thread(reach, target_of(to.port, server, mixed), None, "test")
            assert "PRIVATE KEY" not in str(caught.value)
            lost = target_of(to.port, server, client._replace(key=tmp_path / "none.key"))
            with pytest.raises(ValueError, match=r"tls_key .*none\.key cannot be read"):
                lost.identity()

    asyncio.run(test())
