"""Keys of SSH: made, read, and as people compare them."""

from __future__ import annotations

import asyncssh

from penstock.config.bastion import Bastion
from penstock.core.errors import BastionError


def new_private_key() -> str:
    """Return a new Ed25519 key as OpenSSH's text."""
    return asyncssh.generate_private_key("ssh-ed25519").export_private_key().decode()


def private_key(bastion: Bastion) -> asyncssh.SSHKey:
    """Return the key that logs in to a bastion; raises `BastionError`."""
    owner = bastion.owner
    if bastion.private_key is None:
        raise BastionError(
            "bastion_key_missing",
            f"There is no private key for bastion {bastion} of {owner}.",
            remedy=f"Run `penstock target show {owner}`, which makes one, and start Penstock again; or"
            " set private_key.",
        )
    try:
        return asyncssh.import_private_key(bastion.private_key)
    except asyncssh.KeyImportError as error:
        why = "it has a passphrase" if "assphrase" in str(error) else "it can't be read"
        raise BastionError(
            "bastion_key_unusable",
            f"The private key for bastion {bastion} of {owner} is of no use: {why}.",
            remedy="Set private_key to a PEM or OpenSSH key without a passphrase; or leave it out, and"
            f" Penstock makes one: `penstock target show {owner}`.",
        ) from None


def public_line(bastion: Bastion) -> str:
    """Return the line for authorized_keys that lets a bastion's key in; raises `BastionError`."""
    text: str = private_key(bastion).export_public_key().decode()
    return f"{' '.join(text.split()[:2])} penstock-{bastion.owner}"


def fingerprint(key: str) -> str:
    """Return a public key's fingerprint, `SHA256:…`, as ssh shows it; raises `ValueError`."""
    found: str = asyncssh.import_public_key(key).get_fingerprint()
    return found
