"""What a message of an outbox looks like: which headers it has, which body, which group it is of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Format = Literal["plain", "envelope", "cloudevents", "debezium"]


@dataclass(frozen=True, slots=True)
class OutboxForm:
    """How messages are made of the rows of the outbox `name`.

    `group_by` says what messages keep their order by: None the whole outbox, `none` nothing,
    `payload.<field>` and `header.<name>` a value.
    """

    name: str
    format: Format = "plain"
    group_by: str | None = None
