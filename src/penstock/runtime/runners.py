"""The sources of a process: each has its runner, and all follow the desired state."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Final

import structlog
from pyspark.sql import SparkSession

from penstock.config.document import Key
from penstock.config.settings import Config
from penstock.core.errors import PenstockError, StoreError
from penstock.core.health import Failure, Level, Part, run_part
from penstock.core.record_forms import SYNCS
from penstock.desired import consumers, streams
from penstock.runtime.following import Following
from penstock.runtime.jvm import jvm_failure
from penstock.runtime.reconcile import changes
from penstock.runtime.refusals import Refusals
from penstock.runtime.removing import Remover, Sources
from penstock.runtime.run_log import RunLog
from penstock.runtime.runner_context import RunnerContext, SparkSoon
from penstock.runtime.source_runner import SourceRunner
from penstock.runtime.state import RunState
from penstock.runtime.sync_runner import SyncRunner
from penstock.streams.store import Store

_TICK_SECONDS: Final = 0.5
_FOLLOW_SECONDS: Final = 5.0  # where nothing is left to do
_CORRECT: Final = "Correct it, or set what it names where penstock run runs."

log = structlog.get_logger("penstock")


class Runners:
    """Runs the sources of `config`, and follows `feed`.

    Args:
        config: What to run first.
        store_url: The store's URL.
        once: End when what is there is delivered; nothing is followed then.
        feed: Where changes come from; None: there are none.
        of_file: The sources of the process's own file: where only such are left, and none can go on,
            it ends. Where another one has failed it stays, as its API is how that is corrected.
    """

    def __init__(
        self,
        config: Config,
        store_url: str,
        *,
        once: bool = False,
        feed: Following | None = None,
        of_file: Collection[str] = (),
    ) -> None:
        self._config = config
        self._feed = None if once else feed
        self._of_file = frozenset(of_file)
        self._jvm_ended = False
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._lock = threading.RLock()
        self._spark = SparkSoon()
        self._refusals = Refusals(self._feed)
        self._remover: Remover | None = None
        if feed is not None:
            self._remover = Remover(store_url, config, self._sources)
        self._context = RunnerContext(
            store_url, once, self._spark, RunLog(), self._wake.set, self._refusals.refuse,
            self._refusals.accept, self._remove, self._left,
        )  # fmt: skip
        self._runners = {name: self._runner(name) for name in config.running_sources}
        self.syncs = SyncRunner(store_url, self._spark, self._has_records)
        self._ending: list[SourceRunner] = []
        self._thread = threading.Thread(target=self._follow, name="desired state", daemon=True)

    def _runner(self, name: str) -> SourceRunner:
        return SourceRunner(name, self._config.only(name), self._context)

    # -- what others see

    @property
    def all(self) -> list[SourceRunner]:
        """The runners of all sources that are wanted."""
        with self._lock:
            return list(self._runners.values())

    def states(self) -> list[RunState]:
        """Return the state of each source's newest run."""
        return [runner.state for runner in self.all]

    def parts(self) -> list[Part]:
        """Return what is wrong beside the states of the runs."""
        runners = self.all
        found = [part for runner in runners for part in runner.parts()] + self.syncs.parts()
        if self._feed is not None:
            # Consumers are another part's: the store knows of these.
            found += [
                Part.failing(f"{kind} {name}", Level.DEGRADED, Failure("refused", reason, _CORRECT))
                for (kind, name), reason in self._feed.unusable.items()
                if kind != "consumer"
            ]
        if self._remover is not None:
            found += self._remover.parts()
        if self._is_over(runners):
            found += [run_part(r.failure) for r in runners if r.failure is not None]
        return found

    @property
    def names(self) -> list[str]:
        """The names of the sources that are wanted."""
        return [runner.name for runner in self.all]

    @property
    def healthy(self) -> bool:
        """Whether neither a source nor Spark has failed for good."""
        return not self._jvm_ended and all(runner.failure is None for runner in self.all)

    @property
    def standing_by(self) -> bool:
        """Whether all sources are run by others."""
        runners = self.all
        return bool(runners) and all(runner.standing_by is not None for runner in runners)

    def store_outage(self, error: str | None) -> None:
        """Take in why the embedded store is away, or with None that it is back."""
        for runner in self.all:
            runner.store_outage(error)

    # -- the process's main thread

    def prepare(self) -> None:
        """Start the runners; return when Spark is needed, or nothing is left to do.

        Raises the `PenstockError` that keeps the only source from starting, or the first one of all.
        """
        if self._remover is not None and self._feed is not None:
            self._remover.start()
        for runner in self.all:
            runner.start()
        while not self._stopping.is_set():
            runners = self.all
            undecided = [r for r in runners if not r.settled]
            going = any(r.prepared or r.standing_by is not None for r in runners)
            if all(r.waits_for_slot for r in undecided) and (going or not undecided):
                break
            self._wait()
        failed = [runner for runner in self.all if runner.error is not None]
        over = all(runner.failure is not None or runner.delayed for runner in self.all)
        if failed and self._may_end(self.all) and over:
            first = failed[0].error
            assert first is not None  # noqa: S101 - as selected
            for runner in failed[1:]:
                self._log_failed(runner)
            raise first
        for runner in failed:
            self._log_failed(runner)

    @property
    def goes_on(self) -> bool:
        """Whether there is anything to run, or may be."""
        runners = self.all
        if self._stopping.is_set():
            return False
        return any(runner.alive for runner in runners) or not self._may_end(runners)

    def run(self, spark: SparkSession, on_ready: Callable[[], None]) -> None:
        """Run until all has ended, or `stop`; `on_ready`: each source runs or stands by."""
        self._spark.set(spark)
        if self._feed is not None:
            self._thread.start()
        if not self._context.once:
            self.syncs.set_desired(self._config)
        ready, logged = False, {r.name for r in self.all if r.failure is not None}
        while not self._stopping.is_set():
            runners = self.all
            for runner in runners:
                if runner.failure and runner.error is not None and runner.name not in logged:
                    self._log_failed(runner)
                    logged.add(runner.name)
                elif runner.failure is None:
                    logged.discard(runner.name)
            if not ready and self._is_ready(runners):
                ready = True
                on_ready()
            if self._is_over(runners):
                break
            if (failure := jvm_failure()) is not None and not self._stopping.wait(0.5):
                self._jvm_ended = True
                self._context.log.failed(failure)
                break
            self._wait()
        stopped = self._stopping.is_set()
        if stopped and any(runner.ready for runner in self.all):
            log.info("stopping: finishing the batch under way")
        self.stop()
        self.close()

    def close(self) -> None:
        """Wait for the end of all runners; `stop` comes first."""
        if not self._spark.is_set:
            self._spark.set(None)
        if self._thread.ident is not None:
            self._thread.join()
        self.stop()  # the one that the thread has started last, too
        self.syncs.join()
        for runner in [*self.all, *self._ending]:
            runner.join()
        if self._remover is not None:
            self._remover.join()

    def stop(self) -> None:
        """Ask for an orderly end, from any thread."""
        self._stopping.set()
        self.syncs.stop()
        if self._remover is not None:
            self._remover.stop()
        with self._lock:
            runners = [*self._runners.values(), *self._ending]
        for runner in runners:
            runner.stop()
        self._wake.set()
        if self._feed is not None:
            self._feed.wake()

    def _wait(self) -> None:
        self._wake.wait(_TICK_SECONDS)
        self._wake.clear()

    def _is_over(self, runners: list[SourceRunner]) -> bool:
        """Whether no source goes on, or can before a repair."""
        if not self._may_end(runners):
            return False
        if not any(runner.alive for runner in runners):
            return True
        failed = [runner for runner in runners if runner.failure is not None]
        return bool(failed) and all(runner.stuck for runner in runners)

    def _may_end(self, runners: list[SourceRunner]) -> bool:
        """Whether the process may end by itself where no source can go on."""
        if self._feed is None:
            return True
        return bool(runners) and all(runner.name in self._of_file for runner in runners)

    @staticmethod
    def _is_ready(runners: list[SourceRunner]) -> bool:
        going = [runner for runner in runners if runner.failure is None and not runner.delayed]
        if not going:
            return not runners
        return all(runner.ready or runner.standing_by is not None for runner in going)

    def _log_failed(self, runner: SourceRunner) -> None:
        if runner.failure is not None:
            self._context.log.failed(runner.failure, runner.name)

    # -- following; in a thread

    def _follow(self) -> None:
        assert self._feed is not None  # noqa: S101 - it is started with one
        pending: Config | None = None
        while not self._stopping.is_set():
            try:
                waits = self._ending or pending is not None or self._refusals.waiting
                tick = _TICK_SECONDS if waits else _FOLLOW_SECONDS
                pending = self._feed.wait(tick) or pending
                if pending is not None:
                    self._take(pending)
                    pending = None
                self._refusals.pass_on()
                self._start_due()
            except PenstockError as error:
                log.warning("the desired state could not be followed; trying again",
                            code=error.code, error=str(error))  # fmt: skip
                self._stopping.wait(_TICK_SECONDS)
            except Exception:
                log.exception("the desired state could not be followed; trying again")
                self._stopping.wait(_TICK_SECONDS)

    def _take(self, config: Config) -> None:
        """Start, end and change what a new configuration concerns."""
        found = changes(self._config, config)
        self._register(config)
        with self._lock:
            self._config = config
            for name in found.ends:
                if (runner := self._runners.pop(name, None)) is not None:
                    runner.set_desired(None)
                    self._ending.append(runner)
            for name in found.changes:
                runner = self._runners.get(name)
                if runner is not None and runner.failure is not None:
                    self._ending.append(self._runners.pop(name))  # a failed one starts anew
            for name, runner in self._runners.items():
                runner.set_desired(config.only(name))
            self.syncs.set_desired(config)
        if found:
            log.info("the desired state changed", starts=list(found.starts), ends=list(found.ends),
                     changes=list(found.changes))  # fmt: skip

    def _register(self, config: Config) -> None:
        """Register changed streams and consumers whose variables only this process may have.

        Those that are not there yet are registered by the run that makes the stream.
        """
        old = self._config
        sinks = {n: s for n, s in config.streams.items() if old.streams.get(n) not in (None, s)}
        changed = {n: c for n, c in config.consumers.items() if old.consumers.get(n) != c}
        if sinks or changed:
            with Store(self._context.store_url) as store:
                streams.register(store, sinks)
                consumers.register(store, changed)

    def _start_due(self) -> None:
        """Start the sources that are wanted and have no runner, once an earlier one has ended."""
        with self._lock:
            self._ending = [runner for runner in self._ending if runner.alive]
            busy = {runner.name for runner in self._ending}
            for name in self._config.running_sources:
                if name not in self._runners and name not in busy and not self._stopping.is_set():
                    self._runners[name] = self._runner(name)
                    self._runners[name].start()

    # -- what runners call, in their threads

    def _remove(self, source: str, config: Config) -> StoreError | None:
        return None if self._remover is None else self._remover.before_run(source, config)

    def _has_records(self) -> bool:
        """Whether this process has the source that the syncs are, and its table is there."""
        runner = self._runners.get(SYNCS)
        return runner is not None and runner.prepared and runner.holds_lease

    def _sources(self) -> Sources:
        with self._lock:
            return Sources(self._config, list(self._runners.values()), list(self._ending))

    def _left(self, source: str, config: Config) -> frozenset[Key]:
        return frozenset() if self._remover is None else self._remover.left(source, config)
