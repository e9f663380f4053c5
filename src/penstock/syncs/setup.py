"""The syncs of a configuration, as the scheduler and the lanes need them; it has secrets."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, field
from typing import Final

from penstock.config.providers import ProviderSettings, RateDefaults
from penstock.config.settings import Config
from penstock.syncs.connectors.make import ready_settings
from penstock.syncs.credentials import SecretKey, origin_of
from penstock.syncs.errors import SyncError
from penstock.syncs.lane import JobClient
from penstock.syncs.sync import Limit, SyncSettings

_ROUNDS: Final = 20_000
_DAY: Final = 86_400.0


@dataclass(frozen=True)
class Setup:
    """All syncs; `clients` are what their jobs are made with, by sync, `limits` by credential."""

    syncs: tuple[SyncSettings, ...] = ()
    clients: dict[str, JobClient] = field(default_factory=dict, repr=False)
    limits: dict[str, Limit] = field(default_factory=dict)


def setup_of(config: Config, key: SecretKey | SyncError, paused: frozenset[str]) -> Setup:
    """Return the syncs of a configuration; `paused` are the ids of those that are to do nothing."""
    syncs: list[SyncSettings] = []
    clients: dict[str, JobClient] = {}
    limits: dict[str, Limit] = {}
    for name, sync in config.syncs.items():
        id_ = str(config.sync_id(name))
        credential = config.credentials[sync.credential]
        settings = config.providers.get(sync.provider)
        properties = {k: v.get_secret_value() for k, v in credential.properties.items()}
        given = origin_of(properties)
        clients[id_] = JobClient(sync.credential, sync.provider, settings, properties, key, given)
        limit = None
        if (rate := sync.rate_limit) is not None:
            limit = _limit(rate.allowed_requests, rate.interval.total_seconds(),
                           rate.max_concurrent_requests)  # fmt: skip
        default = _defaults(sync.provider, settings)
        limits[sync.credential] = _least(limits.get(sync.credential), limit or default)
        described = b"" if settings is None else settings.model_dump_json().encode()
        syncs.append(
            SyncSettings(
                id_, name, sync.provider, sync.credential,
                _version(sync.credential, given.encode(), described),
                sync.collection_ids,
                frequency=sync.frequency.total_seconds(),
                sweep_interval=sync.sweep_interval.total_seconds(),
                max_age=None if sync.max_age_days is None else sync.max_age_days * _DAY,
                max_deleted_share=float(sync.max_deleted_share),
                limit=limit,
                active=sync.status == "active" and id_ not in paused,
            )
        )  # fmt: skip
    return Setup(tuple(syncs), clients, limits)


def _limit(requests: int, interval: float, concurrency: int) -> Limit:
    return Limit(int(requests), interval, int(concurrency))


def _least(one: Limit | None, other: Limit) -> Limit:
    """Return what two syncs of a credential allow together."""
    if one is None:
        return other
    slower = min(one, other, key=lambda limit: limit.requests / limit.interval)
    return Limit(slower.requests, slower.interval, min(one.concurrency, other.concurrency))


def _defaults(provider: str, settings: ProviderSettings | None) -> Limit:
    rate: RateDefaults = (settings or ready_settings(provider)).rate_limit
    return _limit(
        rate.allowed_requests, rate.interval.total_seconds(), rate.max_concurrent_requests
    )


@functools.lru_cache(maxsize=4096)
def _version(credential: str, properties: bytes, settings: bytes) -> str:
    """Return what changes with a credential; it is stored, and shows nothing of it."""
    about = properties + b"\0" + settings
    return hashlib.pbkdf2_hmac("sha256", about, credential.encode(), _ROUNDS).hex()[:16]
