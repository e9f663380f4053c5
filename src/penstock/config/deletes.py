"""Whether those who read rows get hard deletes: what may be said of it."""

from __future__ import annotations

from collections.abc import Collection

OF_CHANGES = (
    "only kind rows leaves deletes out: kind changes sends what `actions` names, to a consumer what "
    "the actions of its filters name; remove `deletes`, or set `kind: rows`"
)


def check_deletes(deletes: bool, kind: str | None, actions: Collection[str]) -> bool:
    """Return `deletes`, the setting of a sink; raises `ValueError` where it means nothing."""
    if deletes and kind == "changes":
        raise ValueError(OF_CHANGES)
    if deletes and actions and "delete" not in actions:
        raise ValueError("the sink takes no deletes: add `delete` to `actions`")
    return deletes
