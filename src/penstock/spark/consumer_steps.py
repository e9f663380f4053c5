"""The consumers of type nats of a source's streams, as sinks of its pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from penstock.config.consumers import Filters
from penstock.config.sinks import NatsSinkSettings
from penstock.core.blocks import Block
from penstock.sinks.selected import selected
from penstock.spark.steps import Prepared


@dataclass(frozen=True)
class ConsumerRoute:
    """A consumer: the sink `settings` publish for it what the filters let through of its stream.

    `uuid` is the consumer's.
    """

    starts: ClassVar[bool] = False
    """A backfill is its stream's, never its own."""

    name: str
    stream: str
    settings: NatsSinkSettings
    filters: Filters
    uuid: str | None = None


class ConsumerSteps:
    """Filters what goes to the stream: its own filter, transform and groups come before."""

    regroups = False

    def __init__(self, route: ConsumerRoute) -> None:
        self.route = route

    def start(self) -> None:
        """Do nothing: there is no code to load."""

    def close(self) -> None:
        """Do nothing."""

    def __call__(self, block: Block) -> Prepared:
        """Return what the consumer gets of what the stream has got."""
        messages = selected(self.route.filters, block.messages)
        return Prepared(messages, [], block.messages.num_rows - messages.num_rows)
