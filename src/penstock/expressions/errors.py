"""The error of an expression that is refused."""

from __future__ import annotations


class ExpressionError(ValueError):
    """An expression that is refused.

    Attributes:
        position: Where in the text the fault is, in characters from 1.
        reason: What is wrong and what to do; `str()` puts the position before it.
    """

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(f"position {position}: {reason}")
        self.position = position
        self.reason = reason
