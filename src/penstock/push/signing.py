"""Standard Webhooks: which message a request carries, when it was sent, and by whom."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import blake2b

from standardwebhooks.webhooks import Webhook

from penstock.core.message import Position


class Signer:
    """Signs with every one of `secrets` (`whsec_…`), so that a receiver may know either."""

    def __init__(self, secrets: Sequence[str]) -> None:
        self._keys = [Webhook(secret) for secret in secrets]

    def headers(self, message_id: str, body: bytes, at: datetime | None = None) -> bytes:
        """Return the header lines of a request sent `at`, by default now."""
        at = at or datetime.now(UTC)
        lines = f"webhook-id: {message_id}\r\nwebhook-timestamp: {int(at.timestamp())}\r\n"
        if self._keys:
            text = body.decode()
            signatures = " ".join(key.sign(message_id, at, text) for key in self._keys)
            lines += f"webhook-signature: {signatures}\r\n"
        return lines.encode("ascii")


def request_id(consumer: int, positions: Sequence[Position]) -> str:
    """Return the id of a request with the messages at `positions`: the same for the same ones."""
    first = positions[0]
    name = f"msg_{consumer}_{first.lsn}_{first.idx}"
    if len(positions) == 1:
        return name
    places = ";".join(f"{position.lsn},{position.idx}" for position in positions)
    return f"{name}_{blake2b(places.encode(), digest_size=8).hexdigest()}"
