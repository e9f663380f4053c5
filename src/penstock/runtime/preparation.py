"""What a run needs before it streams: slots, publications, its part in the store, new streams."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Final

import structlog

from penstock.config.settings import Config
from penstock.config.sources import PostgresSource
from penstock.core.errors import CaptureError
from penstock.core.record_forms import SYNCS
from penstock.core.startup import step
from penstock.postgres import setup
from penstock.runtime.guard import Guard
from penstock.runtime.store_session import StoreSession
from penstock.runtime.stream_maker import StreamMaker
from penstock.spark import planning
from penstock.streams.claim import Claim
from penstock.syncs.records import schema as records

# After a kill the server may hold the slot for the last run's connection: `wal_sender_timeout`, 60 s
# by default, if the machine went with it.
_SLOT_PATIENCE: Final = 75.0
_LEAVING_SECONDS: Final = 5.0  # in which a query of this process leaves the slot

log = structlog.get_logger("penstock")


class Preparation:
    """Prepares a run of `config`, until `stopping` is set. It raises `CaptureError` and `StoreError`.

    `claim` is the one on its one source, if its owner keeps it. A run that `follows` another one of this
    process waits for its slot without a word.
    """

    def __init__(
        self,
        config: Config,
        store: StoreSession,
        guard: Guard,
        stopping: threading.Event,
        claim: Claim | None,
        *,
        follows: bool,
    ) -> None:
        self._config = config
        self._store = store
        self._guard = guard
        self._stopping = stopping
        self._claim = claim
        self._follows = follows
        self._streams = StreamMaker(stopping)
        self.waits_for_slot = False
        """Whether another reader has a slot."""

    def prepare(self, *, quietly: bool) -> None:
        """Make and claim what the sources need; returns early where the end is asked for.

        With `quietly` it is logged as no step of the start, and new streams are not awaited.
        """
        for name in self._config.running_sources:
            with contextlib.nullcontext() if quietly else step("source", source=name):
                self._make_records(name)
                self._ensure(name, self._config.sources[name])
                self.check_plan()
                self._register(name)
        if not quietly:  # at a change the other sinks go on
            self._streams.wait()
        if not self._stopping.is_set():
            self._store.register_consumers()

    def check_plan(self) -> None:
        """Raise `SetupError` where the tables, as they are now, refuse the configuration."""
        for name in self._config.running_sources:
            planning.refuse(self._config.sources[name], self._config.sinks_of(name))

    def prepare_beside(self, desired: Config) -> None:
        """Do the same while another run of this process reads the slots.

        What the filters of `desired`, of which this run has all or a part, refuse is raised as well.
        """
        for name in self._config.running_sources:
            self._guard.refuse_gap(name)
            self._make_records(name)
            setup.ensure(self._config.sources[name], is_read=True)
            self._register(name)
        self._store.refuse_filters(desired)
        self._store.register_consumers(beside=True)

    def await_streams(self, seconds: float) -> None:
        """Wait so long for the streams of new sinks to be made."""
        self._streams.wait(seconds)

    def _register(self, name: str) -> None:
        self._store.register(name, self._stopping)
        for sink, settings in self._config.sinks_of(name).items():
            self._streams.add(sink, settings)
        for consumer, publishes in self._config.nats_consumers_of(name).items():
            self._streams.add(consumer, publishes)

    def _make_records(self, name: str) -> None:
        """Make the table that the reserved source reads, and whose rows the syncs write."""
        if name == SYNCS:
            records.prepare(self._config.sources[name].url.get_secret_value())

    def _ensure(self, name: str, source: PostgresSource) -> None:
        """Make what a source lacks; wait for a slot that a killed run's connection still holds."""
        began = time.monotonic()
        while not self._stopping.is_set():
            try:
                self._guard.refuse_gap(name)  # the slot may go while the run waits for it
                setup.ensure(source)
                break
            except CaptureError as found:
                error = found.recovered_by(self._config.recover_command(name))
                waited = time.monotonic() - began
                if error.code != "slot_in_use" or waited > _SLOT_PATIENCE:
                    raise error from None
            if self._follows and waited < _LEAVING_SECONDS:
                self._stopping.wait(0.02)
            else:
                self._note_wait(name, source, error)
                self._stopping.wait(1.0)
        self.waits_for_slot = False

    def _note_wait(self, name: str, source: PostgresSource, error: CaptureError) -> None:
        if self._claim is not None and self._claim.took_over:
            # The lost holder of the source has left its session at the slot behind. The role may not end
            # it: then the slot is waited for.
            with contextlib.suppress(CaptureError):
                if setup.end_reader(source):
                    log.warning("the lost run's session at the slot is ended", source=name)
        if not self.waits_for_slot:
            self.waits_for_slot = True
            log.warning("waiting for the slot", source=name, code=error.code, error=str(error))
