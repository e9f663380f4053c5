"""What the executors need to know of the expressions of a sink."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from penstock.expressions.types import Field
from penstock.spark.select import Item

DROP: Final = 0
KEEP: Final = 1
BAD: Final = -1


@dataclass(frozen=True)
class SinkPlan:
    """A sink's expressions, and by `number` the names of their results.

    Attributes:
        number: Identifies the results of this sink among those of others.
        filter: The fields that the filter takes; None where there is no filter.
        route: The fields that the route takes, likewise.
        templates: Those of the route's rules; None where it is an expression.
        always: Whether the first rule matches always, so that Spark has no part in it.
        items: The select list of a transform in SQL.
        used: The fields of each item that is computed, by its name.
    """

    number: int
    filter: tuple[Field, ...] | None = None
    route: tuple[Field, ...] | None = None
    templates: tuple[str, ...] | None = None
    always: bool = False
    items: tuple[Item, ...] | None = None
    used: Mapping[str, tuple[Field, ...]] = field(default_factory=dict)

    @property
    def keep(self) -> str:
        """The result of the filter: `KEEP`, `DROP` or `BAD`."""
        return f"keep{self.number}"

    @property
    def to(self) -> str:
        """The result of the route: a text with `MARK`s; or the number of a rule, or `BAD`."""
        return f"to{self.number}"

    @property
    def unrouted(self) -> str:
        """The result that is true where an expression's route can't be evaluated."""
        return f"unrouted{self.number}"

    @property
    def failed(self) -> str:
        """The result that has the number of the first item that can't be computed, or null."""
        return f"failed{self.number}"
