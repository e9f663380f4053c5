"""What keeps a webhook from being delivered."""

from __future__ import annotations


class EndpointError(Exception):
    """A request got no answer: why, and from where. No path, query or secret stands in it.

    `code` is a stable word for logs and tests: `private_address`, `unknown_host`,
    `connection_refused`, `timeout`, ….
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
