"""`penstock relay`: the pipelines of a database's outboxes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli.common import LISTEN, errors, starting
from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    from penstock.config.settings import Config

URL_VARIABLE: Final = "PENSTOCK_RELAY_URL"


def relay(
    url: Annotated[str, typer.Option(help="The application's database.", envvar=URL_VARIABLE)],
    group: Annotated[
        list[str] | None,
        typer.Option("--group", help="Run this group of pipelines alone; may be given again."),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(help="Store backlogs in this Postgres, not in the application's."),
    ] = None,
    bastion: Annotated[
        str | None,
        typer.Option(help="The SSH server that the database lies behind, as user@host:port."),
    ] = None,
    bastion_key: Annotated[
        Path | None, typer.Option(help="The file of the private key that logs in there.")
    ] = None,
    bastion_host_key: Annotated[
        str | None, typer.Option(help="The SSH server's public key, as in `ssh-ed25519 AAAA…`.")
    ] = None,
    listen: Annotated[
        str, typer.Option(help="Serve /healthz, /readyz, /status and /metrics here.")
    ] = LISTEN,
) -> None:
    """Relay the outboxes of a database in the foreground, until SIGTERM or Ctrl-C."""
    from penstock.core import memory

    memory.give_back()
    with errors():
        far = None if bastion is None else _bastion(bastion, bastion_key, bastion_host_key)
        if far is not None and store is None:
            raise ConfigError(["--store: missing: backlogs are not kept behind a --bastion"])
        config = configuration(url, group, store, far)
        with starting(config):
            from penstock.cli import service

        raise typer.Exit(service.run(config, once=False, listen=listen))


def _bastion(where: str, key: Path | None, host_key: str | None) -> dict[str, Any]:
    """Return a bastion's settings; raises `ConfigError` where one is missing."""
    user, at, server = where.rpartition("@")
    host, _, port = server.rpartition(":") if server[-1:].isdigit() else (server, "", "")
    if not at or not user or (host and not port.isdigit()):
        raise ConfigError([f"--bastion {where}: expected user@host:port"])
    if key is None or host_key is None:
        missing = "--bastion-key" if key is None else "--bastion-host-key"
        raise ConfigError([f"{missing}: missing: --bastion needs both keys"])
    found = {"user": user, "host": (host or server).strip("[]"), "private_key_file": key}
    return {**found, "host_key": host_key, **({"port": int(port)} if host and port else {})}


def configuration(
    url: str,
    groups: list[str] | None,
    store: str | None,
    bastion: Mapping[str, Any] | None = None,
) -> Config:
    """Return the configuration that a relay's options stand for; raises `ConfigError`."""
    from pydantic import ValidationError

    from penstock.config.explain import message_of
    from penstock.config.settings import Config
    from penstock.config.sources import OutboxSource

    names: list[str | None] = [*dict.fromkeys(groups)] if groups else [None]
    try:
        outboxes = {
            name or "outbox": OutboxSource.model_validate(
                {"type": "outbox", "url": url, "relay_group": name, "bastion": bastion}
            )
            for name in names
        }
        return Config(sources={}, sinks={}, outboxes=outboxes, store=store)
    except ValidationError as error:
        faults = [f"--{_option(e['loc'])}: {message_of(e)}" for e in error.errors()]
        raise ConfigError(faults) from None


def _option(loc: tuple[int | str, ...]) -> int | str:
    return "group" if loc[0] == "relay_group" else loc[0]
