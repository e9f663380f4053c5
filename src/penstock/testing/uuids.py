"""The UUIDs of what a Penstock in memory has: the same in every run of a test."""

from __future__ import annotations

import uuid
from typing import Final, Literal

_NAMESPACE: Final = uuid.uuid5(uuid.NAMESPACE_URL, "https://penstock.test")


def uuid_of(kind: Literal["sink", "consumer"], name: str) -> str:
    """Return the UUID of a sink or a consumer; a stream has that of its sink."""
    return str(uuid.uuid5(_NAMESPACE, f"{kind}/{name}"))
