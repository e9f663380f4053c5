"""Runs one source for as long as its configuration wants it: stands by, runs, hands over to itself.

A runner holds the source's lease over all of its runs. A changed configuration is prepared beside the
current run (`Replacement`); what does not plan is refused, and the run goes on. What does takes the slot
over between two rounds, and only then is the earlier run taken down.
"""

from __future__ import annotations

import threading
import time

import structlog

from penstock.config.settings import Config
from penstock.core.errors import CaptureError, PenstockError, StoreError
from penstock.core.health import Failure, Level, Part
from penstock.runtime.desired_config import DesiredConfig
from penstock.runtime.guard import SHARED_STREAM, without_shared
from penstock.runtime.lease import Lease
from penstock.runtime.nats_consumers import state_of
from penstock.runtime.replacement import Replacement, Successor
from penstock.runtime.run import Run
from penstock.runtime.runner_context import RunnerContext
from penstock.runtime.standby import Standby
from penstock.runtime.start_delay import StartDelay
from penstock.spark.reasons import query_failure
from penstock.streams.claim import holder

log = structlog.get_logger("penstock")


class SourceRunner:
    """Runs the source `name` of `config`, which has no other, in a thread."""

    def __init__(self, name: str, config: Config, context: RunnerContext) -> None:
        self.name = name
        self._context = context
        self._changing = threading.RLock()
        self._desired = DesiredConfig(name, config, context)
        self._run: Run | None = None
        self._replacement: Replacement | None = None
        self._successor: Successor | None = None
        self._retired = threading.Event()  # whether the run before the current one is taken down
        self._retired.set()
        self._stopping = threading.Event()
        self._delay = StartDelay(name, self._stopping, context.noticed)
        self._lease = Lease(context.store_url, name, self._lost)
        self._standby = Standby(
            name, self._lease, self._desired, context, self._stopping, self._note_holder
        )
        self.state = state_of(config, [name])
        """The state of the newest run."""
        self.error: PenstockError | None = None
        """What it could not be prepared for, as it was raised."""
        self.failure: Failure | None = None
        """Why it has ended for good."""
        self.prepared = False
        self._thread = threading.Thread(target=self._main, name=f"source {name}", daemon=True)

    # -- what others see of it

    @property
    def standing_by(self) -> str | None:
        """Who runs the source while this one stands by."""
        return self.state.standing_by

    @property
    def delayed(self) -> bool:
        """Whether it could not begin, and tries again."""
        return self._delay.failure is not None and self._thread.is_alive()

    @property
    def settled(self) -> bool:
        """Whether it is prepared, stands by, tries again or has ended."""
        begun = self.prepared or self.standing_by is not None
        return begun or self.delayed or not self._thread.is_alive()

    @property
    def waits_for_slot(self) -> bool:
        """Whether another reader has its slot."""
        return self._run is not None and self._run.preparation.waits_for_slot

    @property
    def alive(self) -> bool:
        """Whether it may still run something."""
        return self._thread.is_alive()

    @property
    def ready(self) -> bool:
        """Whether it streams."""
        return self._run is not None and self._run.ready

    @property
    def stuck(self) -> bool:
        """Whether it can't go on before a repair."""
        return self.failure is not None or (self._run is not None and self._run.has_gap)

    @property
    def running(self) -> Config | None:
        """The configuration of the current run, None while the one before is taken down."""
        return self._desired.good if self._run is not None and self._retired.is_set() else None

    @property
    def refuses(self) -> bool:
        """Whether it has refused the newest configuration."""
        return self._desired.refusal is not None

    @property
    def holds_lease(self) -> bool:
        """Whether the source is this process's."""
        return self._lease.claim is not None

    def parts(self) -> list[Part]:
        """Return what is wrong with it beside the state of its run."""
        subject = f"source {self.name}"
        if (failure := self.failure or self._delay.failure) is not None:
            return [Part.failing(subject, Level.FAILED, failure)]
        if (refusal := self._desired.refusal) is not None:
            return [Part.failing(subject, Level.DEGRADED, refusal)]
        return []

    def store_outage(self, error: str | None) -> None:
        """Take in why the embedded store is away, or with None that it is back."""
        if (run := self._run) is not None:
            run.store_outage(error)

    # -- what is asked of it

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Ask for an orderly end, from any thread."""
        with self._changing:
            self._stopping.set()
            if self._run is not None:
                self._run.stop()

    def join(self) -> None:
        """Wait for the end."""
        if self._thread.ident is not None:
            self._thread.join()

    def set_desired(self, config: Config | None) -> None:
        """Run another configuration of the source; None: it is wanted no longer."""
        with self._changing:
            self._desired.newest = config
            if config is None:
                self.stop()
            elif self._run is not None and self._desired.runs(config):
                if self._desired.refusal is not None:
                    self._desired.accept()
            elif self._replacement is not None:
                self._replacement.note_change()

    def renew(self) -> None:
        """Have the run let go of something that it uses, which is to be removed, and made again."""
        if (replacement := self._replacement) is not None:
            replacement.note_change()

    # -- its thread

    def _main(self) -> None:
        try:
            while not self._stopping.is_set() and self.failure is None:
                if (desired := self._desired.next()) is None:
                    break
                self._turn(desired)
                if self._context.once:
                    break
        except PenstockError as error:
            self.error, self.failure = error, Failure.by(error).lasting(None, time.time())
        except Exception as error:
            log.exception("a source's runner ended", source=self.name)
            self.failure = query_failure(error).lasting(None, time.time())
        finally:
            self._standby.discard()
            self._lease.close()
            self._context.noticed()

    def _turn(self, config: Config) -> None:
        """Run until the end, a change or a failure; raises `PenstockError` where it can't begin."""
        good = self._desired.good
        try:
            if not self._standby.acquire(config):
                return
            config = self._desired.next() or config  # its consumers may be newer
            if (left := self._context.remove(self.name, config)) is not None:
                self.error = left
                self._delay.wait(left)
                return
            run = self._run_of(config)
            try:
                if self._begin(run, config):
                    self._stream(run)
            finally:
                run = self._end(run)
        except (CaptureError, StoreError) as error:
            if error.transient and not self._context.once:
                self.error = error
                self._delay.wait(error)
            elif good is None or good is config or self._stopping.is_set():
                raise
            else:
                self._desired.refuse(config, error)
            return
        if run.lost_claim:
            log.warning("another penstock run has taken the source over", source=self.name)
            self._lease.close()
            idle = state_of(config, [self.name])
            idle.continue_from(run.state)
            self.state = idle
        elif run.failure is not None and self._desired.good not in (None, config):
            self._desired.refuse(config, run.failure.error())
        elif run.failure is not None and not self._run_a_part(config, run.failure):
            self.failure = run.failure.lasting(None, time.time())

    def _run_a_part(self, config: Config, failure: Failure) -> bool:
        """Have the next turn leave out the consumers that keep a source from starting, and no more."""
        if self._context.once or failure.code != SHARED_STREAM:
            return False
        if (part := without_shared(config)) is not None:
            self._desired.refuse(config, failure.error(), part)
        return part is not None

    def _run_of(self, config: Config) -> Run:
        follows = self._desired.good is not None
        run = Run(
            config, self._context.store_url, once=self._context.once, claim=self._lease.claim,
            run_log=self._context.log, follows=follows,
        )  # fmt: skip
        if follows:
            run.state.continue_from(self.state)
        run.state.holder = holder()
        self.state = run.state
        return run

    def _begin(self, run: Run, config: Config) -> bool:
        """Prepare the first run of a turn; return False where it is to end."""
        with self._changing:
            if self._stopping.is_set():
                return False
            self._run = run
        self._context.noticed()
        run.prepare(quietly=self._desired.good is not None)
        if run.failure is not None:
            return False
        self.prepared, self.error = True, None
        self._delay.end()
        self._desired.take(config)
        self._context.noticed()
        spark = self._context.spark.get()
        if spark is None or run.stopping:
            return False
        query = self._standby.take()
        if query is not None and not query.fits(config, run.store):
            query.close()
            query = None
        run.begin(spark, query)
        if query is not None:
            query.pipeline.forget_others()
        run.work()
        return True

    def _stream(self, run: Run) -> None:
        """Run until the end, each time with what has followed."""
        while True:
            self._watch(run)
            run.attend(self._note_ready)
            with self._changing:
                successor, self._successor = self._successor, None
                ends = self._stopping.is_set() or run.lost_claim or run.failure is not None
            if successor is None:
                return
            if ends:
                successor.close()
                return
            self._hand_over(run, successor)
            run = successor.run

    def _watch(self, run: Run) -> None:
        """Have what follows be prepared when the configuration changes."""
        if self._context.once:
            return
        with self._changing:
            self._replacement = Replacement(
                self.name, run, self._retired, self._lease.claim, self._desired, self._context,
                self._replace,
            )  # fmt: skip
            self._replacement.start()
            self.set_desired(self._desired.newest)  # it may have come meanwhile

    def _replace(self, run: Run, config: Config, successor: Successor | None) -> bool:
        """End the run, which `successor` follows; return False where what runs is desired again.

        What has changed once more is prepared next: a change is not put off for as long as others come.
        """
        with self._changing:
            wanted = self._desired.next()
            again = wanted is not config and self._desired.runs(wanted)
            if self._run is not run or run.stopping or wanted is None or again:
                return False
            if successor is None and not self._desired.is_wanted(config):
                return False
            self._successor = successor
            run.stop()
            return True

    def _hand_over(self, run: Run, successor: Successor) -> None:
        def switch() -> None:
            with self._changing:
                self._run, self.state = successor.run, successor.run.state
                self._desired.take(successor.config)
                if run.lost_claim:
                    self._run.lose_claim()
                elif self._stopping.is_set():
                    self._run.stop()

        spark = self._context.spark.get()
        assert spark is not None  # noqa: S101 - the run streams
        self._retired = successor.retired
        successor.take_over(run, spark, switch)
        self._context.noticed()

    def _end(self, first: Run) -> Run:
        """End the current run, and return it; it is the first one where none has become that."""
        with self._changing:
            run = self._run or first
            replacement, self._replacement = self._replacement, None
            successor, self._successor = self._successor, None
        if replacement is not None:
            replacement.close()
        if successor is not None:
            successor.close()
        try:
            run.drain()
            self._retired.wait()
            run.close()
        finally:
            with self._changing:
                self._run = None
        return run

    def _note_ready(self) -> None:
        if self._desired.refusal is None:
            self._context.accepted(self.name)
        self._context.noticed()

    def _note_holder(self, holder: str | None) -> None:
        self.state.standing_by = holder
        self._context.noticed()

    def _lost(self) -> None:
        with self._changing:
            if self._run is not None:
                self._run.lose_claim()
