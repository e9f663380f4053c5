"""Which model each entity of the configuration has: by its kind, and by the `type` that it names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel

from penstock.config.consumers import PullConsumer, WebhookConsumer
from penstock.config.nats_consumers import NatsConsumer
from penstock.config.providers import PROVIDERS, READY
from penstock.config.reserved import KINDS
from penstock.config.sinks import NatsSinkSettings, StreamSinkSettings
from penstock.config.sources import PostgresSource
from penstock.config.syncs import Credential, Sync
from penstock.config.targets import HttpTarget, NatsTarget
from penstock.core.record_forms import SYNCS

SINKS: Final[dict[str, type[NatsSinkSettings | StreamSinkSettings]]] = {
    "nats": NatsSinkSettings,
    "stream": StreamSinkSettings,
}
CONSUMERS: Final[dict[str, type[PullConsumer | WebhookConsumer | NatsConsumer]]] = {
    "pull": PullConsumer,
    "webhook": WebhookConsumer,
    "nats": NatsConsumer,
}
TARGETS: Final[dict[str, type[NatsTarget | HttpTarget]]] = {
    "nats": NatsTarget,
    "http": HttpTarget,
}
ENTITIES: Final[dict[str, Mapping[str, type[BaseModel]]]] = {
    "source": {"postgres": PostgresSource},
    "sink": SINKS,
    "consumer": CONSUMERS,
    "target": TARGETS,
    "provider": PROVIDERS,
    "credential": {"": Credential},
    "sync": {"": Sync},
}
"""The models of each kind of entity by type; a kind without types has one of them, of no name.

Sources of type outbox are no entities: they stay in the file.
"""
SECTIONS: Final = {kind: f"{kind}s" for kind in ENTITIES}
"""Under which key of the file the entities of a kind stand, in the order in which they stand there."""
REFERENCES: Final[dict[str, Mapping[str, str]]] = {
    "sink": {"source": "source", "target": "target"},
    "consumer": {"stream": "sink", "target": "target"},
    "credential": {"provider": "provider"},
    "sync": {"provider": "provider", "credential": "credential"},
}
"""The keys by which each kind of entity refers to others, with the kind of these."""
BUILT_IN: Final = frozenset(
    {
        ("source", SYNCS),
        *(("sink", name) for name in KINDS),
        *(("provider", name) for name in READY),
    }
)
"""What others refer to and is there without being configured, by kind and name."""
DEFAULT_TYPES: Final = {"consumer": "pull"}


def type_of(kind: str, spec: Any) -> str:
    """Return the type that an entity names or has by default, or nothing."""
    if not isinstance(spec, Mapping) or "" in ENTITIES.get(kind, {}):
        return ""
    value = spec.get("type", DEFAULT_TYPES.get(kind))
    return value if isinstance(value, str) else ""


def model_of(kind: str, spec: Any) -> type[BaseModel] | None:
    """Return the model of an entity, None where its type is no type of the kind."""
    return ENTITIES.get(kind, {}).get(type_of(kind, spec))
