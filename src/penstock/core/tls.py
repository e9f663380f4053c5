"""How a client speaks TLS: what it trusts, and the certificate that it shows."""

from __future__ import annotations

import ssl
import tempfile
from pathlib import Path

from pydantic import SecretStr


def verifying_context(
    cafile: str | Path | None = None, cadata: str | None = None
) -> ssl.SSLContext:
    """Return a context that verifies the server, by the system's CAs where none is given.

    Python 3.13 would refuse a CA without a key usage, which is what `openssl req -x509` makes: here
    each Python trusts the same.
    """
    context = ssl.create_default_context(cafile=cafile, cadata=cadata)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def client_context(ca: str | None, identity: SecretStr | None) -> ssl.SSLContext:
    """Return the context of a client by PEM texts; raises `ssl.SSLError` for those that can't be used.

    Args:
        ca: The CAs that it trusts; None: those of the system.
        identity: Its certificate, and the key of that without a passphrase; None: it shows none.
    """
    context = verifying_context(cadata=ca)
    if identity is not None:
        # OpenSSL takes a key from a file alone; this one only its owner can read.
        with tempfile.NamedTemporaryFile("w", encoding="ascii") as file:
            file.write(identity.get_secret_value())
            file.flush()
            context.load_cert_chain(file.name, password="")
    return context
