"""`penstock consumer`: consumers, by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.common import (
    CONFIG,
    AsJson,
    ConfigFile,
    StoreUrl,
    errors,
    fail,
    json_text,
    print_table,
)
from penstock.cli.store import store_of

if TYPE_CHECKING:
    from penstock.streams.nats_consumers import Place

consumers = typer.Typer(
    help="Pause and resume consumers; look at those of type nats, and rewind them.",
    no_args_is_help=True,
)

ConsumerName = Annotated[str, typer.Argument(help="The consumer's name.")]


@consumers.command("list")
def list_consumers(
    config: ConfigFile = CONFIG, store_url: StoreUrl = None, as_json: AsJson = False
) -> None:
    """List the consumers of type nats that the store has."""
    from penstock.streams.nats_consumers import NatsConsumers

    with errors(), store_of(config, store_url) as store:
        found = NatsConsumers(store).all()
    if as_json:
        typer.echo(json_text([of.body() for of in found]))
        return
    print_table(
        ("consumer", "stream", "state", "lag", "dropped", "why"),
        [
            (of.name, of.stream, of.state, f"{of.waiting:,}", f"{of.dropped:,}",
             None if of.why is None else of.why.text)
            for of in found
        ],
        without="There is no consumer of type nats. `penstock status` has those of the other types.",
    )  # fmt: skip


@consumers.command("pause")
def pause_consumer(
    name: ConsumerName, config: ConfigFile = CONFIG, store_url: StoreUrl = None
) -> None:
    """Deliver nothing of a consumer of any type; what its stream gets waits there.

    What workers have in flight they can still ack.
    """
    from penstock.desired.actions import note_action, who
    from penstock.streams.pauses import pause_consumer as pause

    with errors(), store_of(config, store_url) as store, store.transaction():
        pause(store, name, who())
        note_action(store, "consumer", name, "pause")
    typer.echo(f"Paused {name}. What serves it does so within seconds.")


@consumers.command("resume")
def resume_consumer(
    name: ConsumerName, config: ConfigFile = CONFIG, store_url: StoreUrl = None
) -> None:
    """Let a consumer go on where it was that is paused, or a webhook that was disabled."""
    from penstock.desired.actions import note_action
    from penstock.streams.pauses import resume_consumer as resume

    with errors(), store_of(config, store_url) as store, store.transaction():
        resume(store, name)
        note_action(store, "consumer", name, "resume")
    typer.echo(f"Resumed {name}. What serves it does so within seconds.")


@consumers.command("rewind")
def rewind_consumer(
    name: ConsumerName,
    to: Annotated[
        str,
        typer.Option(
            help="beginning, end, a position as in 0/16B3748:0, or a commit time with its offset as "
            "in 2026-01-31T12:00:00Z."
        ),
    ],
    config: ConfigFile = CONFIG,
    store_url: StoreUrl = None,
) -> None:
    """Publish from another place of the stream on, once more or without what lies between."""
    from penstock.desired.actions import note_action
    from penstock.streams.nats_consumers import NatsConsumers

    place = _place(to)
    with errors(), store_of(config, store_url) as store, store.transaction():
        NatsConsumers(store).rewind(name, place)
        note_action(store, "consumer", name, "rewind", {"to": to})
    typer.echo(f"Rewound {name} to {to}. The run does so within seconds.")


def _place(text: str) -> Place:
    from penstock.config.nats_consumers import parse_start

    if text == "beginning":
        return "all"
    if text == "end":
        return "new"
    try:
        return parse_start(text)
    except (ValueError, OverflowError):
        raise fail(
            f"--to {text}: expected beginning, end, a position as in 0/16B3748:0, or a time with its"
            " offset as in 2026-01-31T12:00:00Z"
        ) from None
