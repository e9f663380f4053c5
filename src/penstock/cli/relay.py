"""`penstock relay`: the pipelines of a database's outboxes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

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
    listen: Annotated[
        str, typer.Option(help="Serve /healthz, /readyz, /status and /metrics here.")
    ] = LISTEN,
) -> None:
    """Relay the outboxes of a database in the foreground, until SIGTERM or Ctrl-C."""
    with errors():
        config = configuration(url, group, store)
        with starting(config):
            from penstock.cli import service

        raise typer.Exit(service.run(config, once=False, listen=listen))


def configuration(url: str, groups: list[str] | None, store: str | None) -> Config:
    """Return the configuration that a relay's options stand for; raises `ConfigError`."""
    from pydantic import ValidationError

    from penstock.config.explain import message_of
    from penstock.config.settings import Config
    from penstock.config.sources import OutboxSource

    names: list[str | None] = [*dict.fromkeys(groups)] if groups else [None]
    try:
        outboxes = {
            name or "outbox": OutboxSource(type="outbox", url=url, relay_group=name)
            for name in names
        }
        return Config(sources={}, sinks={}, outboxes=outboxes, store=store)
    except ValidationError as error:
        faults = [f"--{_option(e['loc'])}: {message_of(e)}" for e in error.errors()]
        raise ConfigError(faults) from None


def _option(loc: tuple[int | str, ...]) -> int | str:
    return "group" if loc[0] == "relay_group" else loc[0]
