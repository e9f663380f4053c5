"""The settings of sources: a database's tables, or its outboxes."""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal, Self

import psycopg
from psycopg.conninfo import conninfo_to_dict
from pydantic import AfterValidator, Field, PrivateAttr, SecretStr, ValidationInfo, field_validator

from penstock.config.bastion import Bastion, BastionSettings
from penstock.config.strict import StrictModel
from penstock.core.tables import TablePattern

_SLOT: Final = re.compile(r"[a-z0-9_]{1,63}\Z")
_GROUP_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,55}\Z")


def _check_table(table: str) -> str:
    TablePattern.parse(table)
    return table


def check_postgres_url(url: str) -> None:
    """Raise `ValueError`, without the URL in it, if libpq would not understand the URL."""
    expected = "expected postgresql://user:password@host:port/database"
    if not url.strip():
        raise ValueError(f"empty: {expected}")
    try:
        parts = conninfo_to_dict(url)
    except psycopg.Error:
        raise ValueError(f"not a Postgres URL: {expected}") from None
    named = [str(parts.get(key) or "") for key in ("host", "dbname")]
    ports = str(parts.get("port") or "").split(",")
    # libpq ends the password at its first `@` or `/`; the rest would be looked up as a host name.
    if any("@" in name for name in named) or not all(p.isdigit() or not p for p in ports):
        raise ValueError(
            "the URL's parts don't fit: in a password write @ as %40, / as %2F, : as %3A and # as "
            f"%23; {expected}"
        )


def servers_of(url: str) -> list[tuple[str, int]]:
    """Return hosts and ports of a URL whose servers lie behind a bastion, in its order.

    Raises `ValueError` for a Unix socket, or no host.
    """
    parts = conninfo_to_dict(url)
    hosts = str(parts.get("hostaddr") or parts.get("host") or "").split(",")
    if not all(hosts) or any(host.startswith(("/", "@")) for host in hosts):
        raise ValueError(
            "behind a bastion the url needs the server's host, as the bastion knows it"
        )
    ports = [int(port or 5432) for port in str(parts.get("port") or "").split(",")]
    return list(zip(hosts, ports * len(hosts) if len(ports) == 1 else ports, strict=False))


def _check_url(url: SecretStr) -> SecretStr:
    check_postgres_url(url.get_secret_value())
    return url


Table = Annotated[str, AfterValidator(_check_table)]
"""A table's name, or a pattern of names."""
PostgresUrl = Annotated[SecretStr, AfterValidator(_check_url)]


class SourceUrl(str):
    """A source's URL, and the bastion behind which its server lies; see `postgres.connect`."""

    __slots__ = ("bastion",)
    bastion: Bastion | None

    @classmethod
    def of(cls, url: SecretStr, bastion: Bastion | None) -> SourceUrl:
        """Return a URL behind `bastion`; None is no bastion."""
        made = cls(url.get_secret_value())
        made.bastion = bastion
        return made


class _Database(StrictModel):
    """A database that may lie behind a bastion."""

    url: PostgresUrl
    bastion: BastionSettings | None = None
    """The SSH server that the database lies behind."""
    _reached: Bastion | None = PrivateAttr(None)

    def behind(self, bastion: Bastion | None) -> Self:
        """Return the same source, reached through a bastion as the store completes it."""
        copy = self.model_copy()
        copy._reached = bastion
        return copy

    @property
    def reached(self) -> Bastion | None:
        """The bastion that connections go through; None where they are direct."""
        return self._reached

    @property
    def address(self) -> SourceUrl:
        """The URL to connect to, with what leads there."""
        return SourceUrl.of(self.url, self._reached)

    @field_validator("bastion")
    @classmethod
    def _check_bastion(
        cls, bastion: BastionSettings | None, info: ValidationInfo
    ) -> BastionSettings | None:
        if bastion is not None and "url" in info.data:
            servers_of(info.data["url"].get_secret_value())
        return bastion


class PostgresSource(_Database):
    """A Postgres database whose changes are captured by logical replication."""

    type: Literal["postgres"]
    tables: tuple[Table, ...] = Field(("public.*",), min_length=1)
    slot: str = "penstock"
    publication: str = Field("penstock", min_length=1)

    @property
    def patterns(self) -> tuple[TablePattern, ...]:
        """The tables, parsed."""
        return tuple(TablePattern.parse(table) for table in self.tables)

    @field_validator("slot")
    @classmethod
    def _check_slot(cls, slot: str) -> str:
        if not _SLOT.match(slot):
            raise ValueError(
                f"{slot!r} is not a slot name: Postgres takes lower-case letters, digits and `_`, "
                f"at most 63 of them; {slot_name(slot)!r} would do"
            )
        return slot

    @field_validator("publication")
    @classmethod
    def _check_publication(cls, publication: str) -> str:
        if len(publication.encode()) > 63:
            raise ValueError(f"{publication!r} is longer than the 63 bytes that Postgres keeps")
        return publication


class OutboxSource(_Database):
    """A database whose outboxes are relayed; its pipelines are set there, by `tide.relay_set_outbox`.

    `relay_group` names one group of pipelines; None means all that there are.
    """

    type: Literal["outbox"]
    relay_group: str | None = None

    @field_validator("relay_group")
    @classmethod
    def _check_group(cls, name: str | None) -> str | None:
        if name is not None and not _GROUP_NAME.match(name):
            raise ValueError(
                f"{name!r} can't be a relay group: expected a letter or '_', then letters, digits, '_',"
                " '-' and '.', at most 56"
            )
        return name


def slot_name(source: str) -> str:
    """Return what Postgres takes as a slot's name, made from any text."""
    return re.sub(r"[^a-z0-9_]", "_", source.lower())[:63] or "penstock"
