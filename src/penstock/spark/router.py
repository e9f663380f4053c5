"""Where the messages of a sink with a `route` go: their subjects or paths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from penstock.config.sinks import NatsSinkSettings, Sink
from penstock.core import route_path, subject, subject_token
from penstock.core.json_members import members, text_of
from penstock.core.message import SUBJECT_FIELD
from penstock.core.route_path import PathTemplate
from penstock.core.subject import SubjectTemplate
from penstock.expressions.route import MARK
from penstock.spark import old_keys
from penstock.spark.sink_plan import BAD, SinkPlan
from penstock.spark.unfit import unfit_reason

_BAD: Final = pa.scalar(BAD, pa.int32())
_NO: Final = pa.scalar(False, pa.bool_())
_YES: Final = pa.scalar(True, pa.bool_())
_CLOSE: Final = pa.scalar("}", pa.string())
_ROUTE: Final = pa.scalar(',"route":', pa.string())
_NOTHING: Final = pa.scalar("", pa.string())


class Router:
    """Gives messages their routes: by rules, or by an expression that Spark has evaluated."""

    def __init__(self, settings: Sink, plan: SinkPlan, source: str) -> None:
        self._plan = plan
        self._source = source
        self._is_nats = isinstance(settings, NatsSinkSettings)
        self._templates: list[SubjectTemplate | PathTemplate] = [
            settings.subject_template(text)
            if isinstance(settings, NatsSinkSettings)
            else PathTemplate.parse(text)
            for text in plan.templates or ()
        ]

    def __call__(
        self,
        messages: pa.RecordBatch,
        captured: pa.RecordBatch,
        origin: pa.Array,
        results: pa.StructArray | None,
    ) -> tuple[pa.RecordBatch, dict[int, str]]:
        """Return the messages with their routes, and the captured rows without a valid one, with why.

        `origin` has the row in `captured` of each message. `results` are those of `captured`.
        """
        plan, why = self._plan, dict[int, str]()
        if results is None or plan.always:
            routes = self._render(self._templates[0], messages)
        else:
            results = results.take(origin)
            to = results.field(plan.to)
            ruled = plan.templates is not None
            unrouted = (
                pc.fill_null(pc.equal(to, _BAD), _NO) if ruled else results.field(plan.unrouted)
            )
            for at in pc.indices_nonzero(unrouted).to_pylist():
                row = origin[at].as_py()
                reason = unfit_reason(captured, row, plan.route or ())
                why[row] = f"the route can't be evaluated: {reason}"
            routes = self._by_rules(messages, to) if ruled else self._by_expression(to)
            if not ruled:
                for at, reason in self._refused(routes):
                    why.setdefault(origin[at].as_py(), reason)
        if self._is_nats:
            return messages.append_column(SUBJECT_FIELD, routes), why
        return old_keys.routed(with_route(messages, routes), routes), why

    def _by_rules(self, messages: pa.RecordBatch, rules: pa.Array) -> pa.Array:
        """Return the routes of messages, given the number of the rule that each has matched."""
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
        escape = subject_token.escape if self._is_nats else route_path.escape
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
    return "".join(escape(part) if at % 2 else part for at, part in enumerate(parts))


def with_route(messages: pa.RecordBatch, routes: pa.Array) -> pa.RecordBatch:
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
