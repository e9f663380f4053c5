"""`penstock sink`: sinks to NATS, by hand."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.common import CONFIG, ConfigFile, StoreUrl, errors
from penstock.cli.store import store_of

sinks = typer.Typer(
    help="Pause and resume sinks to NATS; `penstock status` shows them.", no_args_is_help=True
)

SinkName = Annotated[str, typer.Argument(help="The sink's name.")]


@sinks.command("pause")
def pause(name: SinkName, config: ConfigFile = CONFIG, store_url: StoreUrl = None) -> None:
    """Deliver nothing to a sink; its messages wait in the store, in order."""
    from penstock.desired.actions import note_action, who
    from penstock.streams.pauses import pause_sink

    with errors(), store_of(config, store_url) as store, store.transaction():
        pause_sink(store, name, who())
        note_action(store, "sink", name, "pause")
    typer.echo(f"Paused {name}. The run does so within seconds.")


@sinks.command("resume")
def resume(name: SinkName, config: ConfigFile = CONFIG, store_url: StoreUrl = None) -> None:
    """Deliver what waits for a sink, and go on."""
    from penstock.desired.actions import note_action
    from penstock.streams.pauses import resume_sink

    with errors(), store_of(config, store_url) as store, store.transaction():
        resume_sink(store, name)
        note_action(store, "sink", name, "resume")
    typer.echo(f"Resumed {name}. The run does so within seconds.")
