"""Which addresses a webhook is delivered to, and which are refused."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from penstock.core.addresses import is_public
from penstock.push.addresses import resolve
from penstock.push.errors import EndpointError


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1",
        "169.254.169.254", "100.64.0.1", "192.0.2.1", "198.18.0.1", "224.0.0.1", "239.1.1.1",
        "240.0.0.1", "255.255.255.255", "::", "::1", "fe80::1", "fc00::1", "fd12::1", "fec0::1",
        "ff02::1", "2001:db8::1", "::ffff:10.0.0.1", "::ffff:127.0.0.1", "::ffff:169.254.169.254",
        "::127.0.0.1", "64:ff9b::10.0.0.1", "64:ff9b::a9fe:a9fe", "2002:a00:1::1", "2002:7f00:1::",
    ],
)  # fmt: skip
def test_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address",
    ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8", "172.32.0.1"],
)
def test_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "169.254.169.254", "::1", "::ffff:10.0.0.1", "10.0.0.1", "localhost",
        "2130706433", "0x7f000001", "127.1", "0177.0.0.1", "0",
    ],
)  # fmt: skip
def test_refused_however_it_is_written(host: str) -> None:
    with pytest.raises(EndpointError, match="allow_private: true") as caught:
        asyncio.run(resolve(host, 80, allow_private=False))
    assert caught.value.code == "private_address"


def test_allowed_where_it_is_meant() -> None:
    assert "127.0.0.1" in asyncio.run(resolve("localhost", 80, allow_private=True))


@pytest.mark.parametrize("host", ["no-such-name.invalid", "x" * 70, "a..b"])
def test_a_name_that_does_not_resolve(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo

    def offline(name: Any, *args: Any, **others: Any) -> Any:
        if name == "no-such-name.invalid":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(name, *args, **others)

    monkeypatch.setattr(socket, "getaddrinfo", offline)
    with pytest.raises(EndpointError) as caught:
        asyncio.run(resolve(host, 80, allow_private=False))
    assert caught.value.code == "unknown_host"


def test_one_private_address_among_public_ones_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, 80)) for a in ("8.8.8.8", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(EndpointError, match=r"hook.test \(10.0.0.1\)"):
        asyncio.run(resolve("hook.test", 80, allow_private=False))
