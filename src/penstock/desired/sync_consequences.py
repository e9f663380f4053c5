"""What follows from changes of syncs, their credentials and providers, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from penstock.config.document import Spec
from penstock.config.syncs import collection_id
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
    old, new = _collections(before), _collections(after)
    if added := sorted(new - old):
        yield f"sync {name}: {', '.join(added)}: read from the beginning"
    if removed := sorted(old - new):
        yield f"sync {name}: {', '.join(removed)}: read no more; {_KEPT}"


def _collections(spec: Spec | None) -> set[str]:
    """Return the ids of a sync's collections."""
    named = None if spec is None else spec.get("collections")
    names = named if isinstance(named, list | tuple) else ()
    return {collection_id(str(spec.get("provider")), str(name)) for name in names if spec}
