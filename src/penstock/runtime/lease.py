"""The lease of one source, which its runner keeps over all of its runs."""

from __future__ import annotations

from collections.abc import Callable

from penstock.config.sources import PostgresSource
from penstock.core.errors import StoreError
from penstock.postgres.admin import open_catalog
from penstock.postgres.replication import identify
from penstock.postgres.setup import server_fault
from penstock.streams.claim import Claim, Claims
from penstock.streams.store import Store


class Lease:
    """The lease of the source `name` in the store at `url`; `on_lost` is called where another has it."""

    def __init__(self, url: str, name: str, on_lost: Callable[[], object]) -> None:
        self._url = url
        self._name = name
        self._on_lost = on_lost
        self._claims: Claims | None = None
        self.claim: Claim | None = None
        """The claim while it is held."""
        self.holder: str | None = None
        """Who has the source, where `acquire` has returned False."""
        self._is_lost = False
        self.next_epoch: int | None = None
        """The epoch that a standby has once it takes the source over."""

    def acquire(self, source: PostgresSource) -> bool:
        """Return whether the source is this process's now; raises `StoreError` and `CaptureError`."""
        if self.claim is not None:
            if not self._is_lost:
                return True
            self.close()
        with Store(self._url) as store:
            known = store.source(self._name)
            if known is None:
                with open_catalog(source) as catalog:
                    if fault := server_fault(catalog):
                        raise fault
                tag = identify(source.address, source.slot).tag
                known = store.make_source(self._name, tag)
        claim = Claim(self._url, known.id, beats=True)
        if not claim.acquire():
            self.holder = claim.holder
            self.next_epoch = None if claim.others_epoch is None else claim.others_epoch + 1
            return False
        self.claim, self.holder = claim, None
        self._claims = Claims(self._lost)
        self._claims.add(self._name, claim)
        return True

    def close(self) -> None:
        """Give the source up."""
        claims, self._claims, self.claim = self._claims, None, None
        self._is_lost = False
        if claims is not None:
            claims.close()

    def _lost(self, _source: str, _error: StoreError) -> None:
        self._is_lost = True
        self._on_lost()
