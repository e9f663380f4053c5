"""What the desired state is made of: entities, their changes, and the lines of the audit log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, NamedTuple
from uuid import UUID

from penstock.config.document import Key, Spec
from penstock.config.secret_values import masked

Door = Literal["file", "api", "console"]
"""How a change came: by a file, the management API or the console."""
AuditDoor = Literal["file", "api", "console", "command"]
"""The same of all that the audit log has: what commands do is no change of the state."""
Action = Literal["create", "update", "delete"]


class Entity(NamedTuple):
    """A source, sink, consumer or target as the desired state has it.

    `spec` has its variables unresolved and its secrets in it: `shown` is what may be seen of it.
    `version` is the state's when it was last changed.
    """

    kind: str
    name: str
    id: UUID
    spec: Spec
    version: int
    managed_by: Door
    changed_at: datetime

    @property
    def key(self) -> Key:
        """Kind and name."""
        return self.kind, self.name

    @property
    def shown(self) -> dict[str, Any]:
        """The spec with its secrets masked."""
        return masked(self.kind, self.spec)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The whole desired state at a version, 0 before the first change."""

    version: int
    entities: Mapping[Key, Entity]

    def of_kind(self, kind: str) -> dict[str, Entity]:
        """Return the entities of a kind by name."""
        return {e.name: e for e in self.entities.values() if e.kind == kind}

    @property
    def specs(self) -> dict[Key, Spec]:
        """The specs of all entities."""
        return {key: entity.spec for key, entity in self.entities.items()}


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one entity: without `before` it is made, without `after` deleted.

    Where both are alike the entity is taken over: only `managed_by` changes.
    """

    kind: str
    name: str
    before: Spec | None
    after: Spec | None

    @property
    def key(self) -> Key:
        """Kind and name."""
        return self.kind, self.name

    @property
    def action(self) -> Action:
        """What the change does."""
        if self.after is None:
            return "delete"
        return "create" if self.before is None else "update"


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """A line of the audit log; the specs are masked. `version` is the state's after the change.

    What is no change of the state, such as a rewind, has no version, and in `after` how it was done.
    """

    id: int
    at: datetime
    who: str
    door: AuditDoor
    version: int | None
    kind: str
    name: str
    action: str
    before: Spec | None
    after: Spec | None
