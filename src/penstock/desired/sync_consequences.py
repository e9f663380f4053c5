"""What follows from changes of syncs, their credentials and providers, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from penstock.config.syncs import collection_ids
from penstock.desired.entities import Change

_KEPT: Final = "their records stay until they are purged"


def of_syncs(change: Change) -> Iterator[str]:
    """Yield what follows from the change of a sync, a credential or a provider."""
    name, before, after = change.name, change.before, change.after
    is_changed = before is not None and after is not None and before != after
    if change.kind == "provider" and is_changed:
        yield f"the syncs of provider {name} read with it from their next request on"
    if change.kind == "credential" and is_changed:
        yield f"the syncs of credential {name} use it from their next request on; nothing is read again"
    if change.kind != "sync":
        return
    old, new = set(collection_ids(before)), set(collection_ids(after))
    if added := sorted(new - old):
        yield f"sync {name}: {', '.join(added)}: read from the beginning"
    if removed := sorted(old - new):
        yield f"sync {name}: {', '.join(removed)}: read no more; {_KEPT}"
