"""The consumers of type nats of a source's streams, as sinks of its pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from penstock.config.consumers import Filters
from penstock.config.sinks import NatsSinkSettings
from penstock.core.blocks import Block
from penstock.sinks.selected import names, selected
from penstock.spark.steps import Prepared
from penstock.streams import nats_consumers_filter as sql_filter


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

    @property
    def function(self) -> str | None:
        """The function of its filter in SQL."""
        return sql_filter.function_of(self.stream, self.filters.sql)

    def takes(self, schema: str, table: str, action: str) -> bool:
        """Return whether the filters name a table's messages, of one action, whatever their `sql`."""
        return names(self.filters, schema, table, action)


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
        """Return what the consumer gets of what the stream has got.

        Where its filter has a condition, the block's `results` have what that makes of each message;
        without them it is open.
        """
        dead = []
        if block.results is None:
            messages = selected(self.route.filters, block.messages)
        else:
            (verdicts,) = block.results.flatten()
            messages, wrong = sql_filter.split(block.messages, verdicts)
            dead = sql_filter.letters(block.messages, verdicts, wrong)
        filtered = block.messages.num_rows - messages.num_rows - len(dead)
        return Prepared(messages, dead, filtered)
