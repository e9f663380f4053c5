"""What happens to a source's messages on their way to one sink: filter, groups, transform, route."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from penstock.config.sinks import NatsSinkSettings
from penstock.config.transforms import TransformSettings
from penstock.core.blocks import Block
from penstock.core.delivery import DeadLetter, as_captured
from penstock.core.record_forms import SYNCS, formed, passing_rows
from penstock.spark import old_keys
from penstock.spark.router import Router
from penstock.spark.routes import Route, regrouped
from penstock.spark.select import Select
from penstock.spark.sink_plan import BAD, KEEP, SinkPlan
from penstock.spark.unfit import unfit_reason
from penstock.transforms import make
from penstock.transforms.base import MessageTransform, TransformError

_KEEP: Final = pa.scalar(KEEP, pa.int32())  # made once: a conversion takes 0.1 ms
_BAD: Final = pa.scalar(BAD, pa.int32())
FILTER_FAILED: Final = "filter_failed"
TRANSFORM_FAILED: Final = "transform_failed"
ROUTE_FAILED: Final = "route_failed"
STEPS_FAILED: Final = "steps_failed"


@dataclass
class Prepared:
    """What a sink gets of a block, and what it never will.

    `filtered` messages are those of its tables and actions of which its filter or its transform left
    nothing.
    """

    messages: pa.RecordBatch
    dead: list[DeadLetter] = field(default_factory=list)
    filtered: int = 0


class Steps:
    """Applies a sink's steps to blocks; one thread at a time uses it. `made_by` makes its transform."""

    def __init__(
        self,
        route: Route,
        plan: SinkPlan | None,
        source: str,
        made_by: Callable[[TransformSettings], MessageTransform] | None = None,
    ) -> None:
        self.route = route
        self._made_by = made_by
        self._plan = plan
        settings = route.settings
        is_nats = isinstance(settings, NatsSinkSettings)
        self._keeps_rows = not is_nats and settings.kind == "rows"
        self.regroups: Final = bool(settings.group_by) and not (
            is_nats and settings.transform is None
        )
        """Whether the messages come in the sink's own groups."""
        self._forms = source == SYNCS
        self._select = Select(plan.items) if plan is not None and plan.items is not None else None
        self._router = None
        if plan is not None and plan.route is not None:
            self._router = Router(settings, plan, source)

    @cached_property
    def _code(self) -> MessageTransform | None:
        transform = self.route.settings.transform
        if transform is None or transform.sql is not None:
            return None
        return (self._made_by or make)(transform)

    def start(self) -> None:
        """Load the operator's code now rather than at the first message; raises `TransformError`."""
        _ = self._code

    def close(self) -> None:
        """End the operator's code."""
        if self.__dict__.get("_code") is not None:
            self.__dict__["_code"].close()

    def __call__(self, block: Block) -> Prepared:
        """Return what the sink gets of a block.

        A message that fails in an unforeseen way is a dead letter like others: an
        error would have Spark try the same again and again. Raises `TransformError` where the
        operator's code cannot be loaded, and what the machine lacks, memory or a process.
        """
        try:
            return self._with_deletes(self._prepared(block), block.messages)
        except (TransformError, OSError, MemoryError, SystemExit, KeyboardInterrupt, GeneratorExit):
            raise  # another message would fare no better, or the process is ending
        except BaseException as error:  # a panic of a native extension is no Exception
            count = block.messages.num_rows
            if count == 1:
                dead = as_captured(block.messages, 0, STEPS_FAILED, _unexpected(error))
                return Prepared(block.messages.slice(0, 0), [dead])
            if not count:
                raise
        return self._halved(block, count // 2)

    def _halved(self, block: Block, middle: int) -> Prepared:
        """Do one half after the other, until only those fail that can't be helped."""
        halves = [
            self(
                Block(
                    block.part,
                    block.messages.slice(first, length),
                    None if block.results is None else block.results.slice(first, length),
                )
            )
            for first, length in ((0, middle), (middle, block.messages.num_rows - middle))
        ]
        sent = [half.messages for half in halves if half.messages.num_rows]
        messages = pa.concat_batches(sent) if sent else halves[0].messages
        dead = [dead for half in halves for dead in half.dead]
        return Prepared(messages, dead, sum(half.filtered for half in halves))

    def _prepared(self, block: Block) -> Prepared:
        plan, passing = self._plan, self.route.mask(block.messages)
        if self._forms and block.messages.num_rows:
            rows = passing_rows(block.messages, self.route.settings.kind)
            passing = rows if passing is None else pc.and_(passing, rows)
        if plan is None:
            messages = block.messages
            if passing is not None and not pc.all(passing).as_py():
                messages = messages.filter(passing)
            return Prepared(self._grouped(self._formed(messages)))
        dead: list[DeadLetter] = []
        messages, results = block.messages, block.results
        filtered = 0
        if plan.filter is not None:
            assert results is not None  # noqa: S101 - the plan has them
            filtered = messages.num_rows if passing is None else pc.sum(passing).as_py() or 0
            keep = results.field(plan.keep)
            failed = pc.equal(keep, _BAD)
            if passing is not None:
                failed = pc.and_(failed, passing)
            if pc.any(failed).as_py():
                for row in pc.indices_nonzero(failed).to_pylist():
                    reason = unfit_reason(messages, row, plan.filter)
                    reason = f"the filter can't be evaluated: {reason}"
                    dead.append(as_captured(messages, row, FILTER_FAILED, reason))
            matching = pc.equal(keep, _KEEP)
            passing = matching if passing is None else pc.and_(matching, passing)
            filtered -= (pc.sum(passing).as_py() or 0) + len(dead)
        if passing is not None and not pc.all(passing).as_py():
            messages = messages.filter(passing)
            results = None if results is None else results.filter(passing)
        if not messages.num_rows:
            return Prepared(messages, dead, filtered)
        made = self._grouped(self._formed(messages))
        prepared = self._changed(made, messages, results, plan, dead)
        prepared.filtered += filtered
        return prepared

    def _with_deletes(self, prepared: Prepared, captured: pa.RecordBatch) -> Prepared:
        """Add the deletes of keys that were left by updates of which nothing is sent."""
        old = captured.column("old_key")
        if self._plan is None or not self._keeps_rows or old.null_count == len(old):
            return prepared
        left = old_keys.unsent(captured, prepared.messages)
        if (passing := self.route.mask(left)) is not None:
            left = left.filter(passing)
        if not left.num_rows:
            return prepared
        left = self._old_keys(self._grouped(left))
        messages = old_keys.with_deletes(prepared.messages, left)
        return Prepared(messages, prepared.dead, prepared.filtered)

    def _old_keys(self, messages: pa.RecordBatch) -> pa.RecordBatch:
        """Return messages with that of their old keys which the transform lets through."""
        if self._select is not None:
            return old_keys.transformed(messages, self._select.passed, self._select.new_names)
        if self._code is not None:
            return old_keys.transformed(messages, lambda _: "{}", lambda _: [])
        return messages

    def _formed(self, messages: pa.RecordBatch) -> pa.RecordBatch:
        """Return rows of the records table as records or events, all others as they are."""
        return formed(messages, self.route.settings.kind) if self._forms else messages

    def _grouped(self, messages: pa.RecordBatch) -> pa.RecordBatch:
        group_by = self.route.settings.group_by
        if self.regroups and group_by and messages.num_rows:
            return regrouped(messages, group_by)
        return messages

    def _changed(
        self,
        messages: pa.RecordBatch,
        captured: pa.RecordBatch,
        results: pa.StructArray | None,
        plan: SinkPlan,
        dead: list[DeadLetter],
    ) -> Prepared:
        """Transform and route messages that are to be sent; `captured` is what they were."""
        origin = pa.array(range(messages.num_rows), pa.int64())
        why: dict[int, tuple[str, str]] = {}
        if self._select is not None:
            messages, unread = self._select(messages, results)
            messages = self._old_keys(messages)
            why = {row: (TRANSFORM_FAILED, reason) for row, reason in unread.items()}
            why |= self._uncomputed(captured, results, plan)
        elif self._code is not None:
            transformed = self._code(messages)
            messages, origin = transformed.batch, transformed.origin
            messages = self._old_keys(messages)
            why = {row: (code, reason) for row, code, reason in transformed.failed}
        if self._router is not None:
            messages, unrouted = self._router(messages, captured, origin, results)
            why = {row: (ROUTE_FAILED, reason) for row, reason in unrouted.items()} | why
        if why:
            gone = pa.array(list(why), pa.int64())
            messages = messages.filter(pc.invert(pc.is_in(origin, value_set=gone)))
            dead += [as_captured(captured, row, *reason) for row, reason in sorted(why.items())]
            origin = origin.filter(pc.invert(pc.is_in(origin, value_set=gone)))
        left_out = 0
        if self._code is not None:
            left_out = captured.num_rows - pc.count_distinct(origin).as_py() - len(why)
        return Prepared(messages, dead, left_out)

    def _uncomputed(
        self, captured: pa.RecordBatch, results: pa.StructArray | None, plan: SinkPlan
    ) -> dict[int, tuple[str, str]]:
        """Return the rows of which Spark could not compute a value."""
        if not plan.used:
            return {}
        assert results is not None  # noqa: S101 - the plan has them
        column = results.field(plan.failed)
        if column.null_count == len(column):
            return {}
        found: dict[int, tuple[str, str]] = {}
        names = list(plan.used)
        for row in pc.indices_nonzero(pc.is_valid(column)).to_pylist():
            name = names[column[row].as_py()]
            reason = unfit_reason(captured, row, plan.used[name])
            found[row] = TRANSFORM_FAILED, f"{name} can't be computed: {reason}"
        return found


def _unexpected(error: BaseException) -> str:
    return (
        f"an unexpected {type(error).__name__}: {str(error)[:500]}; this is a defect of penstock, unless"
        " the sink's Python causes it"
    )
