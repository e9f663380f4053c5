"""What happens to a source's messages on their way to one sink: filter, groups, transform, route."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from penstock.config.sinks import NatsSinkSettings
from penstock.core import route_path, subject
from penstock.core.blocks import Block
from penstock.core.delivery import DeadLetter, as_captured
from penstock.core.json_members import members, text_of
from penstock.core.message import SUBJECT_FIELD
from penstock.core.route_path import PathTemplate
from penstock.core.subject import SubjectTemplate
from penstock.expressions.route import MARK
from penstock.expressions.types import Field
from penstock.spark import old_keys
from penstock.spark.routes import Route, regrouped
from penstock.spark.select import Item, Select
from penstock.spark.unfit import unfit_reason
from penstock.transforms import make
from penstock.transforms.base import MessageTransform, TransformError

DROP: Final = 0
KEEP: Final = 1
BAD: Final = -1
_KEEP: Final = pa.scalar(KEEP, pa.int32())  # made once: a conversion takes 0.1 ms
_BAD: Final = pa.scalar(BAD, pa.int32())
_NO: Final = pa.scalar(False, pa.bool_())
_YES: Final = pa.scalar(True, pa.bool_())
FILTER_FAILED: Final = "filter_failed"
TRANSFORM_FAILED: Final = "transform_failed"
ROUTE_FAILED: Final = "route_failed"
STEPS_FAILED: Final = "steps_failed"


@dataclass(frozen=True)
class SinkPlan:
    """What the executors need to know of a sink's expressions; the results are named by `number`.

    Attributes:
        number: Identifies the results of this sink among those of others.
        filter: The fields that the filter takes; None where there is no filter.
        route: The fields that the route takes, likewise.
        templates: Those of the route's rules; None where it is an expression.
        always: Whether the first rule matches always, so that Spark has no part in it.
        items: The select list of a transform in SQL.
        used: The fields of each item that is computed, by its name.
    """

    number: int
    filter: tuple[Field, ...] | None = None
    route: tuple[Field, ...] | None = None
    templates: tuple[str, ...] | None = None
    always: bool = False
    items: tuple[Item, ...] | None = None
    used: Mapping[str, tuple[Field, ...]] = field(default_factory=dict)

    @property
    def keep(self) -> str:
        """The result of the filter: `KEEP`, `DROP` or `BAD`."""
        return f"keep{self.number}"

    @property
    def to(self) -> str:
        """The result of the route: a text with `MARK`s; or the number of a rule, or `BAD`."""
        return f"to{self.number}"

    @property
    def unrouted(self) -> str:
        """The result that is true where an expression's route can't be evaluated."""
        return f"unrouted{self.number}"

    @property
    def failed(self) -> str:
        """The result that has the number of the first item that can't be computed, or null."""
        return f"failed{self.number}"


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
    """Applies a sink's steps to blocks; one thread at a time uses it."""

    def __init__(self, route: Route, plan: SinkPlan | None, source: str) -> None:
        self.route = route
        self._plan = plan
        self._source = source
        settings = route.settings
        self._is_nats = isinstance(settings, NatsSinkSettings)
        self._keeps_rows = not self._is_nats and settings.kind == "rows"
        self._regroups = bool(settings.group_by) and not (
            self._is_nats and settings.transform is None
        )
        self._select = Select(plan.items) if plan is not None and plan.items is not None else None
        self._templates: list[SubjectTemplate | PathTemplate] = [
            settings.subject_template(text)
            if isinstance(settings, NatsSinkSettings)
            else PathTemplate.parse(text)
            for text in (plan.templates if plan is not None else None) or ()
        ]

    @property
    def regroups(self) -> bool:
        """Whether the messages come in the sink's own groups."""
        return self._regroups

    @cached_property
    def _code(self) -> MessageTransform | None:
        transform = self.route.settings.transform
        return None if transform is None or transform.sql is not None else make(transform)

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
        if plan is None:
            messages = block.messages if passing is None else block.messages.filter(passing)
            return Prepared(self._grouped(messages))
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
                rows = pc.indices_nonzero(failed).to_pylist()
                dead += self._unfit(messages, rows, plan.filter, FILTER_FAILED, "the filter")
            matching = pc.equal(keep, _KEEP)
            passing = matching if passing is None else pc.and_(matching, passing)
            filtered -= (pc.sum(passing).as_py() or 0) + len(dead)
        if passing is not None and not pc.all(passing).as_py():
            messages = messages.filter(passing)
            results = None if results is None else results.filter(passing)
        if not messages.num_rows:
            return Prepared(messages, dead, filtered)
        prepared = self._changed(self._grouped(messages), messages, results, plan, dead)
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

    def _grouped(self, messages: pa.RecordBatch) -> pa.RecordBatch:
        group_by = self.route.settings.group_by
        if self._regroups and group_by and messages.num_rows:
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
            assert results is not None  # noqa: S101 - the plan has them
            messages, unread = self._select(messages, results)
            messages = self._old_keys(messages)
            why = {row: (TRANSFORM_FAILED, reason) for row, reason in unread.items()}
            why |= self._uncomputed(captured, results, plan)
        elif self._code is not None:
            transformed = self._code(messages)
            messages, origin = transformed.batch, transformed.origin
            messages = self._old_keys(messages)
            why = {row: (code, reason) for row, code, reason in transformed.failed}
        if plan.route is not None:
            routed = None if results is None or plan.always else results.take(origin)
            messages, unrouted = self._routed(messages, captured, routed, origin, plan)
            why = unrouted | why
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
        self, captured: pa.RecordBatch, results: pa.StructArray, plan: SinkPlan
    ) -> dict[int, tuple[str, str]]:
        """Return the rows of which Spark could not compute a value."""
        found: dict[int, tuple[str, str]] = {}
        if not plan.used:
            return found
        column = results.field(plan.failed)
        if column.null_count == len(column):
            return found
        names = list(plan.used)
        for row, number in enumerate(column.to_pylist()):
            if number is not None:
                name = names[number]
                reason = unfit_reason(captured, row, plan.used[name])
                found[row] = TRANSFORM_FAILED, f"{name} can't be computed: {reason}"
        return found

    def _unfit(
        self,
        messages: pa.RecordBatch,
        rows: Iterable[int],
        fields: Sequence[Field],
        code: str,
        what: str,
    ) -> list[DeadLetter]:
        return [
            as_captured(
                messages,
                row,
                code,
                f"{what} can't be evaluated: {unfit_reason(messages, row, fields)}",
            )
            for row in rows
        ]

    # Routes

    def _routed(
        self,
        messages: pa.RecordBatch,
        captured: pa.RecordBatch,
        results: pa.StructArray | None,
        origin: pa.Array,
        plan: SinkPlan,
    ) -> tuple[pa.RecordBatch, dict[int, tuple[str, str]]]:
        """Return the messages with their routes, and the captured rows that have none that is valid.

        `results` has a row for each of `messages`.
        """
        why: dict[int, tuple[str, str]] = {}
        if results is not None:
            unrouted = (
                results.field(plan.unrouted)
                if plan.templates is None
                else pc.fill_null(pc.equal(results.field(plan.to), _BAD), _NO)
            )
            for at in pc.indices_nonzero(unrouted).to_pylist():
                row = origin[at].as_py()
                reason = unfit_reason(captured, row, plan.route or ())
                why[row] = ROUTE_FAILED, f"the route can't be evaluated: {reason}"
        if plan.templates is not None:
            routes = self._by_rules(messages, None if results is None else results.field(plan.to))
        else:
            assert results is not None  # noqa: S101 - an expression has results
            routes = self._by_expression(results.field(plan.to))
            for at, reason in self._refused(routes):
                why.setdefault(origin[at].as_py(), (ROUTE_FAILED, reason))
        if self._is_nats:
            return messages.append_column(SUBJECT_FIELD, routes), why
        return old_keys.routed(_with_route(messages, routes), routes), why

    def _by_rules(self, messages: pa.RecordBatch, rules: pa.Array | None) -> pa.Array:
        """Return the routes of messages, given the number of the rule that each has matched."""
        if rules is None:  # one rule that matches always
            return self._render(self._templates[0], messages)
        routes: list[str | None] = [None] * messages.num_rows
        for number, template in enumerate(self._templates):
            rows = pc.indices_nonzero(pc.fill_null(pc.equal(rules, number), _NO))
            if not len(rows):
                continue
            if len(rows) == messages.num_rows:
                return self._render(template, messages)
            rendered = self._render(template, messages.take(rows)).to_pylist()
            for row, route in zip(rows.to_pylist(), rendered, strict=True):
                routes[row] = route
        return pa.array(routes, pa.string())

    def _render(
        self, template: SubjectTemplate | PathTemplate, messages: pa.RecordBatch
    ) -> pa.Array:
        database = None
        if "database" in template.variables and messages.num_rows:
            metadata = messages.column("metadata")[0].as_py()
            database = text_of(members("database")(metadata)["database"])
        rendered = template.render(messages, source=self._source, database=database)
        return (
            pa.array(rendered, pa.string())
            if isinstance(rendered, list)
            else rendered.cast(pa.string())
        )

    def _by_expression(self, marked: pa.Array) -> pa.Array:
        """Return routes, with what came from messages escaped; routes are few, so each once."""
        found = marked.dictionary_encode()
        escape = subject.escape if self._is_nats else route_path.escape
        texts = [_escaped(text, escape) for text in found.dictionary.to_pylist()]
        return pa.array(texts, pa.string()).take(found.indices)

    def _refused(self, routes: pa.Array) -> list[tuple[int, str]]:
        """Return the routes that no message can take, with the reason."""
        if self._is_nats:
            valid = subject.is_subject(routes.cast(pa.binary()))
            what, rules = "subject to publish to", subject.SUBJECT_RULES
        else:
            valid, what, rules = route_path.is_path(routes), "path", route_path.PATH_RULES
        rows = pc.indices_nonzero(pc.invert(pc.fill_null(valid, _YES)))
        return [
            (row, f"the route {routes[row].as_py()[:200]!r} is no {what}: {rules}")
            for row in rows.to_pylist()
        ]


def _escaped(text: str, escape: Callable[[str], str]) -> str:
    parts = text.split(MARK)
    if len(parts) == 1:
        return text
    return "".join(escape(part) if at % 2 else part for at, part in enumerate(parts))


_CLOSE: Final = pa.scalar("}", pa.string())
_ROUTE: Final = pa.scalar(',"route":', pa.string())
_NOTHING: Final = pa.scalar("", pa.string())


def _with_route(messages: pa.RecordBatch, routes: pa.Array) -> pa.RecordBatch:
    """Return messages whose metadata has their routes; a message without one stays as it is."""
    quoted = pa.array(
        [None if r is None else orjson.dumps(r).decode() for r in routes.to_pylist()], pa.string()
    )
    metadata = messages.column("metadata")
    added = pc.binary_join_element_wise(
        pc.utf8_slice_codeunits(metadata, 0, -1), _ROUTE, quoted, _CLOSE, _NOTHING
    )
    at = messages.schema.get_field_index("metadata")
    return messages.set_column(at, messages.schema.field(at), pc.coalesce(added, metadata))


# Dead letters


def _unexpected(error: BaseException) -> str:
    return (
        f"an unexpected {type(error).__name__}: {str(error)[:500]}; this is a defect of penstock, unless"
        " the sink's Python causes it"
    )
