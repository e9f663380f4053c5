"""The settings of a bastion: the SSH server that a target or a source lies behind."""

from __future__ import annotations

import base64
import binascii
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from penstock.config.strict import StrictModel, Whole

_HOST: Final = re.compile(r"[^\s/@]+\Z")
_PEM: Final = "-----BEGIN "


@dataclass(frozen=True, slots=True)
class Bastion:
    """A bastion as a process connects to it; pickles, and shows no key.

    `owner` is the target or the source behind it, by which `penstock target` knows it. Without a
    `private_key` it can't be logged in to, without a `host_key` it is not trusted. `pinned_in` is the
    URL of the store where `penstock target trust` pins that, None where the configuration has the key.
    """

    owner: str
    host: str
    port: int
    user: str
    private_key: str | None = field(default=None, repr=False)
    host_key: str | None = None
    pinned_in: str | None = field(default=None, repr=False)

    def to_json(self) -> str:
        """Return it as JSON, the key included; `Bastion(**…)` reads it."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.user}@{host}:{self.port}"


class BastionSettings(StrictModel):
    """A bastion as the file has it."""

    host: str
    port: Whole = Field(22, ge=1, le=65_535)
    user: str = Field(min_length=1)
    private_key: SecretStr | None = None
    """A private key, PEM or OpenSSH, without a passphrase; Penstock makes one if there is none."""
    private_key_file: Path | None = None
    """The path of a file that holds it."""
    host_key: str | None = None
    """The server's public key, as in known_hosts: `ssh-ed25519 AAAA…`."""

    @field_validator("host")
    @classmethod
    def _check_host(cls, host: str) -> str:
        if not _HOST.match(host):
            raise ValueError(f"{host!r} is not a host: expected a name or an address alone")
        return host

    @field_validator("private_key")
    @classmethod
    def _check_private_key(cls, key: SecretStr | None) -> SecretStr | None:
        if key is not None and not key.get_secret_value().lstrip().startswith(_PEM):
            raise ValueError(
                f"not a private key: expected its text, which begins with {_PEM}… "
                "(the path of a file goes to private_key_file)"
            )
        return key

    @field_validator("host_key")
    @classmethod
    def _check_host_key(cls, key: str | None) -> str | None:
        return None if key is None else public_key(key)

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        if self.private_key is not None and self.private_key_file is not None:
            raise ValueError("private_key and private_key_file: use one of them")
        return self

    def of(self, owner: str) -> Bastion:
        """Return the bastion of a target or a source; raises `ValueError` for an unreadable key file."""
        key = None if self.private_key is None else self.private_key.get_secret_value()
        if self.private_key_file is not None:
            try:
                key = self.private_key_file.expanduser().read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                why = error.strerror if isinstance(error, OSError) else "it is not text"
                raise ValueError(
                    f"private_key_file {self.private_key_file} cannot be read: {why}"
                ) from None
        return Bastion(owner, self.host, self.port, self.user, key, self.host_key)


def public_key(text: str) -> str:
    """Return a public key in OpenSSH's form without its comment; raises `ValueError`."""
    parts = text.split()
    try:
        data = base64.b64decode(parts[1], validate=True)
        kind = data[4 : 4 + int.from_bytes(data[:4], "big")].decode("ascii")
    except (IndexError, binascii.Error, UnicodeDecodeError):
        kind = ""
    if not kind or kind != parts[0]:
        raise ValueError(
            "not a public key: expected its type and its base64, as in `ssh-ed25519 AAAA…` "
            "(the line of known_hosts without the host's name)"
        )
    return " ".join(parts[:2])
