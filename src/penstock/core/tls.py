"""How a client speaks TLS, by the PEM texts of its configuration."""

from __future__ import annotations

import ssl
import tempfile

from pydantic import SecretStr


def client_context(ca: str | None, identity: SecretStr | None) -> ssl.SSLContext:
    """Return the context of a client; raises `ssl.SSLError` for texts that can't be used.

    Args:
        ca: The CAs that it trusts; None: those of the system.
        identity: Its certificate, and the key of that without a passphrase; None: it shows none.
    """
    context = ssl.create_default_context(cadata=ca)
    if identity is not None:
        # OpenSSL takes a key from a file alone; this one only its owner can read.
        with tempfile.NamedTemporaryFile("w", encoding="ascii") as file:
            file.write(identity.get_secret_value())
            file.flush()
            context.load_cert_chain(file.name, password="")
    return context
