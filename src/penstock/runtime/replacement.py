"""The run that follows a run once the configuration has changed: prepared while that one streams.

What does not plan is refused, and the current run goes on. An entity that is to be made anew takes two
runs: one without it, then, when what it has left is removed, the one that is desired. Where the next run
can't be prepared beside the current one, as it reads another slot, that ends first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import structlog
from pyspark.sql import SparkSession

from penstock.config.document import Key
from penstock.config.settings import Config
from penstock.core.errors import PenstockError, StoreError
from penstock.runtime.desired_config import DesiredConfig
from penstock.runtime.guard import shared_stream
from penstock.runtime.handover import NextQuery
from penstock.runtime.reconcile import reads_alike, without
from penstock.runtime.run import Run
from penstock.runtime.runner_context import RunnerContext
from penstock.spark import planning
from penstock.spark.reasons import query_failure
from penstock.streams.claim import Claim, holder

_QUERY_SECONDS: Final = 30.0
"""How long a change may wait for the next query; then the run ends without it."""
_STREAM_SECONDS: Final = 2.0
"""How long it waits for the streams of new sinks to be made."""
_RETRY_SECONDS: Final = 1.0
_NOT_REMOVED: Final = "What a changed entity has left is not dropped yet."
_CATCH_UP_SECONDS: Final = 0.5
"""How long the earlier run is left alone: what has waited for the slot needs the cores first."""

log = structlog.get_logger("penstock")


class Successor:
    """The run that follows, registered, and its query, which waits for the slot."""

    def __init__(self, config: Config, run: Run, query: NextQuery) -> None:
        self.config = config
        self.run = run
        self.query = query
        self.retired = threading.Event()
        """Set when the run that it has followed is taken down."""

    def take_over(self, run: Run, spark: SparkSession, switch: Callable[[], object]) -> None:
        """Have the run take the slot over as soon as `run` has left it.

        `switch` is called in between: nothing more is reported of `run`, and nothing yet of this one.
        """
        began, following = time.monotonic(), self.run
        retire = threading.Thread(target=self._retire, args=(run,), name="retire", daemon=True)
        try:
            left = run.drain(leave=True)
            if not left:  # whatever hangs ends with it
                run.close()
            following.state.continue_from(run.state)
            following.state.holder = holder()
            done = {name: of.done for name, of in run.state.sources.items() if left and of.done}
            switch()
            following.begin(spark, self.query, done)
        finally:
            retire.start()
        log.info("the slot is handed over", source=self.query.source, ms=_ms(began), in_order=left)

    def _retire(self, run: Run) -> None:
        """Take the earlier run down, and have the following one do the rest of its work."""
        time.sleep(_CATCH_UP_SECONDS)
        try:
            run.close()
            self.query.pipeline.forget_others()
            self.run.follow()
        finally:
            self.retired.set()

    def close(self) -> None:
        """Give both up: they are not needed."""
        self.query.close()
        self.run.close()


class Replacement:
    """Prepares what follows `run`, in a thread, from `start` on, once `settled` is set.

    `settled`: the run before is taken down, and this one has removed what is left of it. Else it would
    remove what the next one has registered.

    `replace(run, config, successor)` is called when all is ready, and ends the run, unless it returns
    False: then it is no longer desired. Without a successor the next run begins by itself.
    """

    def __init__(
        self,
        name: str,
        run: Run,
        settled: threading.Event,
        claim: Claim | None,
        desired: DesiredConfig,
        context: RunnerContext,
        replace: Callable[[Run, Config, Successor | None], bool],
    ) -> None:
        self._name = name
        self._run = run
        self._settled = settled
        self._claim = claim
        self._desired = desired
        self._context = context
        self._replace = replace
        self._changed = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._main, name=f"handover {name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def note_change(self) -> None:
        """Note that what is desired has changed, or is to be made anew."""
        self._changed.set()

    def close(self) -> None:
        """Ask for the end: the run ends anyway."""
        self._closed.set()
        self._changed.set()

    # -- the thread

    def _main(self) -> None:
        while True:
            self._changed.wait()
            self._settled.wait()
            self._changed.clear()
            if self._closed.is_set() or self._run.stopping:
                return
            desired = self._desired.next()
            if desired is not None and self._try(desired):
                return

    def _try(self, desired: Config) -> bool:
        """Prepare what follows, and replace the run; return whether that is done."""
        began = time.monotonic()
        try:
            left = self._left(desired)
            if not left and self._desired.runs(desired):
                return False
            successor = self._prepared(desired, left)
        except PenstockError as error:
            if error.transient:
                self._closed.wait(_RETRY_SECONDS)
                self._changed.set()
            else:
                self._desired.refuse(desired, error)
            return False
        except Exception as error:
            log.exception("a changed configuration can't be prepared", source=self._name)
            self._desired.refuse(desired, query_failure(error).error())
            return False
        if self._closed.is_set() or not self._replace(self._run, desired, successor):
            if successor is not None:
                successor.close()
            self._changed.set()
            return False
        log.info("the configuration changed: the source's run is replaced", source=self._name,
                 prepared=round(time.monotonic() - began, 1),
                 without=sorted(name for _, name in left))  # fmt: skip
        return True

    def _left(self, desired: Config) -> frozenset[Key]:
        """Return what the run has to let go before `desired` can be run.

        Raises a transient `StoreError` where it has, and another source's run has not yet.
        """
        left = self._context.left(self._name, desired)
        if left and not self._must_end(left) and self._desired.runs(without(desired, left)):
            waits = self._context.remove(self._name, desired)
            left = self._context.left(self._name, desired)
            if left:
                raise waits or StoreError("not_removed", _NOT_REMOVED, transient=True)
        return left

    def _must_end(self, left: Collection[Key]) -> bool:
        """Whether the source itself is to be made anew: no run of it may go on."""
        return ("source", self._name) in left

    def _prepared(self, desired: Config, left: Collection[Key]) -> Successor | None:
        """Return what follows, without what is `left`.

        Raises `PenstockError` for what refuses the desired configuration.
        """
        good, spark = self._desired.good, self._context.spark.get()
        step = without(desired, left)
        run = Run(
            step, self._context.store_url, claim=self._claim, run_log=self._context.log,
            follows=True,
        )  # fmt: skip
        query, found = None, None
        try:
            planning.refuse(desired.sources[self._name], desired.sinks)
            goes_on = bool(step.sinks) and not self._must_end(left)
            follows = goes_on and good is not None and reads_alike(good, step, self._name)
            if spark is not None and follows:
                run.preparation.prepare_beside(desired)
                query = NextQuery(
                    spark, step, run.store.target(self._name),
                    run.store.uuids(step, self._name), run.store.streams, (), lanes=True,
                )  # fmt: skip
            with ThreadPoolExecutor(1) as beside:
                checked = beside.submit(_check_streams, run, desired)
                waits = query is not None and self._is_started(query)
                checked.result()
            if waits and query is not None:
                found = Successor(step, run, query)
        finally:
            if found is None:
                if query is not None:
                    query.close()
                run.close()
        return found

    def _is_started(self, query: NextQuery) -> bool:
        """Start a query, and return whether it waits for the slot."""
        try:
            query.start()
        except PenstockError:
            raise
        except Exception as error:
            log.info("the next query could not be started beside this one", source=self._name,
                     error=query_failure(error).cause)  # fmt: skip
            return False
        return query.wait(_QUERY_SECONDS)


def _ms(since: float) -> int:
    return round(1000 * (time.monotonic() - since))


def _check_streams(run: Run, config: Config) -> None:
    """Await the streams of new sinks, and raise `SetupError` where two sinks must not share one."""
    run.preparation.await_streams(_STREAM_SECONDS)
    if (shared := shared_stream(config)) is not None:
        raise shared.error()
