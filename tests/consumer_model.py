"""A plain model of a consumer: what each message's state must be, and what may be handed out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

Position = tuple[int, int]


@dataclass
class Known:
    """One message as the model has it."""

    groups: frozenset[int]
    token: str | None = None  # of its newest delivery
    deliver_count: int = 0
    out: bool = False  # with a worker, or waiting for its retry
    gone: bool = False  # acked or a dead letter
    replayed: bool = False  # a dead letter that is delivered again, out of order
    waits: bool = False  # replayed, and not yet handed out again
    old_tokens: list[str] = field(default_factory=list)


class Model:
    """Messages by position; it gets what was asked and what came of it; fails where that is wrong."""

    def __init__(self) -> None:
        self.messages: dict[Position, Known] = {}
        self.forgotten: list[str] = []  # tokens from before a rewind

    def publish(self, position: Position, groups: Iterable[int]) -> None:
        assert not self.messages or position > max(self.messages)
        self.messages[position] = Known(frozenset(groups))

    def handed_out(self, position: Position, token: str, deliver_count: int) -> None:
        message = self.messages[position]
        assert not message.gone, f"{position} is done and came back"
        assert not message.out, f"{position} is with two workers"
        if not message.replayed:
            for other, earlier in self.messages.items():
                if other < position and earlier.groups & message.groups:
                    assert earlier.gone or earlier.replayed, f"{position} overtook {other}"
        for other, held in self.messages.items():
            if other != position and held.groups & message.groups:
                assert not held.out, f"{position} and {other} of one group are out"
        assert deliver_count == message.deliver_count + 1
        if message.token is not None:
            message.old_tokens.append(message.token)
        message.token, message.out, message.deliver_count = token, True, deliver_count
        message.waits = False

    def came_back(self, position: Position, *, counted: bool = True) -> None:
        message = self.messages[position]
        message.out = False
        if not counted:
            message.deliver_count = max(message.deliver_count - 1, 0)

    def done(self, position: Position) -> None:
        message = self.messages[position]
        message.gone, message.out, message.replayed = True, False, False

    def replay(self, position: Position) -> None:
        message = self.messages[position]
        assert message.gone
        message.gone, message.replayed, message.deliver_count = False, True, 0
        message.waits = True

    def rewind(self, cursor: Position) -> None:
        for position, message in self.messages.items():
            self.forgotten += [*message.old_tokens, *([message.token] if message.token else [])]
            message.old_tokens.clear()
            # What waits before the cursor is given up, like all that is out.
            message.gone, message.out, message.replayed = position <= cursor, False, False
            message.token, message.deliver_count, message.waits = None, 0, False

    def out(self) -> list[Position]:
        return [position for position, message in self.messages.items() if message.out]

    def left(self) -> list[Position]:
        return [position for position, message in self.messages.items() if not message.gone]
