"""What goes wrong with a sync."""

from __future__ import annotations

from typing import Final

from penstock.core.errors import PenstockError

PAUSING: Final = frozenset({"unauthorized", "forbidden"})
"""Codes of errors that pause a sync until somebody has repaired the credential."""


class SyncError(PenstockError):
    """An API can't be read now, or as it is configured.

    The code is `unauthorized`, `forbidden`, `not_found`, `rate_limited`, `unavailable`, `timed_out`,
    `bad_response`, `refused` (the API does not take a request) or `connector` (the connector itself
    fails). `retry_after` is in how many seconds the API wants to be asked again, None where it says
    nothing.
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
