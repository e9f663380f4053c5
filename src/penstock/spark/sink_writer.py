"""A NATS sink, or consumer, as the tasks of a pipeline write to it: in a thread, and not for ever."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa

from penstock.config.sinks import NatsSinkSettings
from penstock.core.backoff import Backoff
from penstock.core.blocks import Block
from penstock.core.counting import Counts, is_counted
from penstock.core.delivery import Unfinished, Written
from penstock.core.errors import SinkError
from penstock.core.message import Position
from penstock.core.monitor import Reporter
from penstock.sinks import reports
from penstock.sinks.nats.frames import Encoder
from penstock.sinks.nats.sink import NatsSink
from penstock.sinks.nats.task import Task
from penstock.sinks.nats.together import Together
from penstock.sinks.nats.window import STEADY_RATE
from penstock.spark.consumer_steps import ConsumerSteps
from penstock.spark.steps import Steps
from penstock.spark.store_writer import BACKOFF_SECONDS

PATIENCE: Final = 1.0
"""Seconds without an ack after which a sink falls behind."""


@dataclass
class SinkDelivery:
    """What a NATS sink took of a part; `error` is why it did not take the rest."""

    delivered: int = 0
    duplicates: int = 0
    error: SinkError | None = None
    rest: list[pa.RecordBatch] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)


class SinkWriter:
    """Applies the steps of a NATS sink or consumer, and publishes."""

    def __init__(
        self,
        steps: Steps | ConsumerSteps,
        settings: NatsSinkSettings,
        source: str,
        reporter: Reporter,
    ) -> None:
        self.steps = steps
        self.name = steps.route.name
        self._reporter = reporter
        self._patience = min(PATIENCE, settings.detach_after.total_seconds())
        if steps.regroups:
            settings = settings.model_copy(update={"group_by": None})
        self.settings = settings
        self._source = source
        self._sink = NatsSink(
            settings,
            name=self.name,
            source=source,
            uuid=steps.route.uuid,
            on_retry=self._on_retry,
        )

    def connect(self) -> SinkError | None:
        """Connect, and return why that is not possible."""
        try:
            self._sink.connect(self._patience)
        except Unfinished as unfinished:
            return unfinished.error
        self.note_connected()
        return None

    def note_connected(self) -> None:
        """Report that its server answers."""
        self._reporter.send(reports.outcome(self.name, Written(), counted=False))

    def encoder(self, together: Together) -> Encoder:
        """Return what makes its frames for a connection that it shares."""
        return together.encoder(self.settings, self.name, self._source, self.steps.route.uuid)

    def prepare(self, block: Block, done: SinkDelivery) -> pa.RecordBatch:
        """Return what is to be published of a block of which nothing is counted yet."""
        prepared = self.steps(block)
        self._note(done, Written(dead=prepared.dead), False, prepared.filtered)
        return prepared.messages

    def end(self, task: Task, done: SinkDelivery, took: float) -> None:
        """Note what a task has published, and publish the rest over a connection of its own."""
        self._note(done, task.partly_written() if task.rows.left else task.written, False)
        if not task.rows.left:
            return
        rest = task.rest()
        try:
            written = self._sink.write(rest, max(self._patience - took, self._patience / 2))
        except Unfinished as unfinished:
            done.error, written = unfinished.error, unfinished.written
            done.rest.append(unfinished.rest)
        self._note(done, written, False)
        self._sink.close()

    def close(self) -> None:
        """End its connection and the operator's code."""
        self.steps.close()
        self._sink.close()

    def deliver(self, blocks: Iterator[Block], floor: Position | None) -> SinkDelivery:
        """Publish a part's blocks, and give back what the sink does not take in time.

        What lies up to `floor` is counted already.
        """
        done = SinkDelivery()
        left = self._patience
        for block in blocks:
            prepared, counted = self.steps(block), is_counted(block, floor)
            self._note(done, Written(dead=prepared.dead), counted, prepared.filtered)
            rest = prepared.messages
            if rest.num_rows and done.error is None:
                started, count = time.monotonic(), rest.num_rows
                try:
                    written, rest = self._sink.write(rest, left), rest.slice(0, 0)
                except Unfinished as unfinished:
                    done.error, rest = unfinished.error, unfinished.rest
                    written = unfinished.written
                self._note(done, written, counted)
                # Slowness adds up over the blocks of a part.
                took = time.monotonic() - started - count / STEADY_RATE
                left = min(self._patience, left - took)
            if rest.num_rows:
                done.rest.append(rest)
        return done

    def _note(self, done: SinkDelivery, written: Written, counted: bool, filtered: int = 0) -> None:
        """Note what became of messages, and count those that were not `counted` before."""
        keep_dead_letters(self._reporter, self.name, written)
        done.delivered += written.delivered
        done.duplicates += written.duplicates
        if not counted:
            of = Counts(written.delivered, written.bytes, len(written.dead), filtered)
            done.counts = done.counts.plus(of)

    def _on_retry(self, error: SinkError, seconds: float) -> None:
        self._reporter.send(reports.retry(self.name, error, seconds))


def keep_dead_letters(reporter: Reporter, sink: str, written: Written) -> None:
    """Have a sink's dead letters kept; returns when they are in the store."""
    if not written.dead:
        return
    report = reports.outcome(sink, Written(dead=written.dead), counted=False)
    backoff, failed = Backoff(*BACKOFF_SECONDS), False
    while "error" in (answer := reporter.request(report)):
        failed = True
        reporter.send({"store": answer["error"], "code": "dead_letters"})
        time.sleep(backoff.after_failure())
    if failed:
        reporter.send(reports.STORE_WORKS)
