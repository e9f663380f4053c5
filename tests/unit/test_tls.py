"""Whom a client trusts by TLS."""

from __future__ import annotations

import ssl
from typing import Any

import pytest

from penstock.config.nats import NatsSinkConfig
from penstock.core.tls import client_context
from penstock.sinks.nats.login import tls_context


def test_a_ca_that_openssl_makes_is_trusted_on_each_python(monkeypatch: pytest.MonkeyPatch) -> None:
    default = ssl.create_default_context

    def strict(**given: Any) -> ssl.SSLContext:
        """As Python 3.13 makes one."""
        context = default(**given)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", strict)
    for context in (client_context(None, None), tls_context(NatsSinkConfig(url="nats://n"))):
        assert not context.verify_flags & ssl.VERIFY_X509_STRICT
        assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
