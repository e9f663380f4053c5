"""What goes wrong with a sync."""

from __future__ import annotations

from typing import Any, Final

from penstock.core.errors import PenstockError

PAUSING: Final = frozenset({"unauthorized", "forbidden"})
"""Codes of errors that pause a sync until somebody has repaired the credential."""


class SyncError(PenstockError):
    """An API can't be read now, or as it is configured.

    The code is `unauthorized`, `forbidden`, `not_found`, `rate_limited`, `unavailable`, `timed_out`,
    `bad_response`, `refused` (the API does not take a request), `private_address`, `credential` (a
    property is missing, or its tokens can't be kept) or `connector` (the connector itself fails).
    `retry_after` is in how many seconds the API wants to be asked again, None where it names no time.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        remedy: str = "",
        transient: bool = False,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(code, message, remedy=remedy, transient=transient)
        self.retry_after = retry_after

    def _state(self) -> dict[str, Any]:
        return super()._state() | {"retry_after": self.retry_after}
