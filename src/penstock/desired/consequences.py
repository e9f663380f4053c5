"""What follows from a plan, in words, as the store shows it; the sources themselves are not asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import psycopg

from penstock.config.document import Spec
from penstock.config.durations import parse, shown
from penstock.config.models import type_of
from penstock.config.sinks import RETENTION
from penstock.config.sources import slot_name
from penstock.config.yaml_lines import Document, filled
from penstock.core.connect import address
from penstock.core.errors import Concern, ConfigError, Mistake
from penstock.core.message import DEFAULT_ACTIONS
from penstock.core.tables import TablePattern
from penstock.desired import consumers
from penstock.desired.entities import Change
from penstock.desired.facts import Facts, facts_of, messages
from penstock.desired.plan import Plan, PlannedChange
from penstock.desired.sync_consequences import of_syncs
from penstock.streams.store import Store

_AT_NEXT_ROUND: Final[tuple[str, ...]] = (
    "filter",
    "transform",
    "route",
    "tables",
    "actions",
    "subject",
)


class _Loss(str):
    """A consequence by which something is lost: what is stored or waits, or what would be captured."""

    __slots__ = ()


def with_consequences(store: Store, plan: Plan, environ: Mapping[str, str]) -> Plan:
    """Return a plan with the consequences of its changes.

    Raises `StoreError`, and `ConfigError` where a change can't be made beside what the store has.
    """
    dropped = [
        planned.change.name
        for planned in (*plan.changes, *plan.kept)
        if planned.change.kind == "sink"
    ]
    consumers.check_filters(store, [planned.change for planned in plan.changes], environ)
    return with_facts(plan, facts_of(store, dropped), environ)


def refuse_impossible(store: Store, plan: Plan, environ: Mapping[str, str]) -> None:
    """Raise `ConfigError` where a change can't be made beside what the store has, and `StoreError`."""
    with_facts(plan, facts_of(store, ()), environ)


def with_facts(plan: Plan, facts: Facts, environ: Mapping[str, str]) -> Plan:
    """Return the same for facts that are known."""
    new_sources = {
        planned.change.name
        for planned in plan.changes
        if planned.change.kind == "source" and planned.change.before is None
    }
    problems: list[Mistake] = []

    def explained(planned: PlannedChange) -> PlannedChange:
        words = tuple(_Words(planned, facts, new_sources, environ, problems.append).all())
        losses = tuple(str(word) for word in words if isinstance(word, _Loss))
        return dataclasses.replace(planned, consequences=tuple(map(str, words)), losses=losses)

    changes = tuple(map(explained, plan.changes))
    kept = tuple(map(explained, plan.kept))
    if problems:
        raise ConfigError(problems)
    return dataclasses.replace(plan, changes=changes, kept=kept)


class _Words:
    def __init__(
        self,
        planned: PlannedChange,
        facts: Facts,
        new_sources: set[str],
        environ: Mapping[str, str],
        note: Callable[[Mistake], None],
    ) -> None:
        self.change: Change = planned.change
        self.name = planned.change.name
        self.keys = {field.path.partition(".")[0].partition("[")[0] for field in planned.fields}
        self.facts = facts
        self.new_sources = new_sources
        self.environ = environ
        self.note = note

    def all(self) -> Iterator[str]:
        by_kind: dict[str, tuple[Callable[..., Iterator[str]], ...]] = {
            "source": (self.new_source, self.changed_source, self.no_source),
            "sink": (self.new_sink, self.changed_sink, self.no_sink),
            "consumer": (self.new_consumer, self.changed_consumer, self.no_consumer),
            "target": (self.nothing, self.changed_target, self.nothing),
        }
        if self.change.kind not in by_kind:
            yield from of_syncs(self.change)
            return
        new, changed, gone = by_kind[self.change.kind]
        before, after = self.change.before, self.change.after
        if before is None and after is not None:
            yield from new(after)
        elif after is None and before is not None:
            yield from gone(before)
        elif before is not None and after is not None and self.keys:
            yield from changed(before, after)

    def refuse(self, path: str, reason: str) -> None:
        self.note(Mistake(Concern(self.change.kind, self.name, path), reason))

    def nothing(self, _: Spec) -> Iterator[str]:
        yield from ()

    # Targets

    def changed_target(self, _: Spec, __: Spec) -> Iterator[str]:
        yield f"the sinks and consumers of target {self.name} connect anew, with what it has then"

    # Sources

    def slot(self, spec: Spec) -> str:
        return str(spec.get("slot", slot_name(f"penstock_{self.name}")))

    def new_source(self, spec: Spec) -> Iterator[str]:
        yield (
            f"source {self.name}: a new slot {self.slot(spec)} begins at its present end; "
            "rows that are there already come by a backfill"
        )

    def changed_source(self, before: Spec, after: Spec) -> Iterator[str]:
        old, new = self.slot(before), self.slot(after)
        where = [self.address(spec) for spec in (before, after)]
        if where[0] != where[1]:
            yield _Loss(
                f"source {self.name} reads {where[1] or 'another database'}: the slot {new} there, "
                f"where it is new, begins at its present end; {self.former_slot(old, where[0])}"
            )
        elif old != new:
            yield _Loss(
                f"source {self.name}: the slot {new}, where it is new, begins at its present end: "
                f"what was committed between the two is not sent; {self.former_slot(old, '')}"
            )
        elif self.keys - {"tables"}:
            yield f"source {self.name} is started again, with all of its sinks"
        if "tables" in self.keys:
            had, has = self.tables(before), self.tables(after)
            if lost := _uncovered(had, has):
                yield _Loss(f"changes of {', '.join(lost)} are no longer captured")
            if more := _uncovered(has, had):
                yield (
                    f"changes of {', '.join(more)} are captured from now on; "
                    "rows that are there already come by a backfill"
                )

    def former_slot(self, slot: str, where: str) -> str:
        of = f" of {where}" if where else ""
        return (
            f"once that streams, the slot {slot}{of} is dropped, with what was not sent of it; where it "
            "can't be dropped it holds WAL, and status names it"
        )

    def no_source(self, spec: Spec) -> Iterator[str]:
        then = self.facts.positions.get(self.name)
        since = f"since then ({then} UTC)" if then else "since then"
        yield _Loss(f"drops the slot {self.slot(spec)}: what was committed {since} can't be read")

    def address(self, spec: Spec) -> str:
        document = Document()
        url = str(filled(spec.get("url", ""), self.environ, (), document))
        try:
            return "" if document.problems else address(url)
        except psycopg.Error:
            return ""

    # Sinks

    def new_sink(self, spec: Spec) -> Iterator[str]:
        stream = self.facts.streams.get(self.name)
        if type_of("sink", spec) == "stream" and stream is not None:
            self.fits(spec, stream.source, stream.kind)
            had = self.facts.messages.get(self.name, messages(0))
            yield f"goes on with the stream {self.name}, which the store has with {had}"
        elif spec.get("initial_backfill") is True:
            yield f"sink {self.name} gets the rows that its tables have, then their changes"
        elif str(spec.get("source")) not in self.new_sources:
            yield f"sink {self.name} gets what is committed from now on; backfill what is there already"
        yield from self.behind(spec)

    def behind(self, spec: Spec) -> Iterator[str]:
        source = str(spec.get("source"))
        for (sink, of), waiting in self.facts.backlogs.items():
            if sink == self.name and of != source:
                self.refuse(
                    "source",
                    f"it has a backlog of {messages(waiting)} from source {of}: let it drain first, "
                    "or give the sink another name",
                )
            elif sink == self.name and self.change.before is None:
                yield f"its backlog of {messages(waiting)} is sent first"

    def changed_sink(self, before: Spec, after: Spec) -> Iterator[str]:
        was, becomes = type_of("sink", before), type_of("sink", after)
        stream = self.facts.streams.get(self.name)
        if stream is not None and becomes == "stream":
            self.fits(after, stream.source, stream.kind)
        if was == "stream" and becomes != "stream" and stream is not None:
            had = self.facts.messages.get(self.name, messages(0))
            yield f"the stream {self.name} with {had} stays in the store, and gets no more"
        if was != "stream" and becomes == "stream":
            yield from self.stranded()
        if "source" in self.keys:
            yield f"sink {self.name} gets what source {after.get('source')} commits from now on"
        yield from self.behind(after)
        changed = [key for key in _AT_NEXT_ROUND if key in self.keys]
        if changed:
            verb = "counts" if len(changed) == 1 else "count"
            yield f"{_listed(changed)} {verb} from the next round on; what was sent stays as it is"
        yield from self.fewer(before, after)
        if "retention" in self.keys:
            kept = after.get("retention", f"the default, {shown(RETENTION)}")
            text = f"the stream {self.name} drops what is older than {kept}"
            yield _Loss(text) if self.is_shorter(before, after) else text

    def fewer(self, before: Spec, after: Spec) -> Iterator[str]:
        """Yield which tables and actions a sink no longer gets."""
        if "tables" in self.keys and "tables" in after:
            had, has = self.tables(before), self.tables(after)
            if lost := _uncovered(had, has) if "tables" in before else ["other tables"]:
                yield _Loss(f"changes of {', '.join(lost)} no longer go to sink {self.name}")
        had, has = (self.listed(spec, "actions", DEFAULT_ACTIONS) for spec in (before, after))
        if lost := [f"{action}s" for action in had if action not in has]:
            yield _Loss(f"{_listed(lost)} no longer go to sink {self.name}")

    def is_shorter(self, before: Spec, after: Spec) -> bool:
        """Return whether a stream keeps its messages for less time than before, or may do so."""
        try:
            was, becomes = (parse(self.value(s, "retention", RETENTION)) for s in (before, after))
        except ValueError:  # a variable that this process lacks
            return True
        return becomes < was

    def value(self, spec: Spec, key: str, default: object) -> Any:
        """Return a key's value, with its variables filled in where this process has them."""
        document = Document()
        value = filled(spec.get(key, default), self.environ, (), document)
        return spec.get(key, default) if document.problems else value

    def listed(self, spec: Spec, key: str, default: Sequence[str]) -> list[str]:
        """Return a list of texts; a text alone is one of that."""
        found = self.value(spec, key, default)
        return [str(each) for each in (found if isinstance(found, list | tuple) else [found])]

    def tables(self, spec: Spec) -> list[str]:
        """Return the tables of a source, or of a sink that names them."""
        return self.listed(spec, "tables", ["public.*"])

    def fits(self, spec: Spec, source: str, kind: str) -> None:
        for key, old, new in (
            ("source", source, spec.get("source")),
            ("kind", kind, spec.get("kind", "changes")),
        ):
            if old != new:
                self.refuse(
                    key,
                    f"the stream {self.name} of the store has the {key} {old!r}, not {new!r}, and "
                    "keeps it: give the sink another name",
                )

    def stranded(self) -> Iterator[str]:
        for (sink, _), waiting in self.facts.backlogs.items():
            if sink == self.name:
                yield _Loss(
                    f"sink {sink} has a backlog of {messages(waiting)}, which stays in the store and is "
                    "not sent: let it drain first"
                )

    def no_sink(self, _: Spec) -> Iterator[str]:
        for (sink, _source), waiting in self.facts.backlogs.items():
            if sink == self.name:
                yield _Loss(f"sink {sink} has a backlog of {messages(waiting)}, which goes with it")
        if self.name not in self.facts.streams:
            return
        had = self.facts.messages.get(self.name, messages(0))
        readers = self.facts.readers_of(self.name)
        text = f"drops the stream {self.name} with {had}"
        if readers:
            plural = "s" if len(readers) > 1 else ""
            text += f" and its consumer{plural} {', '.join(readers)}"
        yield _Loss(text)

    # Consumers

    def new_consumer(self, spec: Spec) -> Iterator[str]:
        stream = spec.get("stream")
        if type_of("consumer", spec) == "nats":
            yield f"consumer {self.name} {_publishes(spec)}"
            return
        if stream in self.facts.streams:
            yield f"consumer {self.name} starts {_where(spec)} of the stream {stream}"

    def changed_nats_consumer(self, before: Spec, after: Spec) -> Iterator[str]:
        if type_of("consumer", before) != "nats":
            yield _Loss(
                f"consumer {self.name} becomes one of type nats: what it has not acked goes, and it "
                + _publishes(after)
            )
            yield from self.letters()
        elif "stream" in self.keys:
            yield f"consumer {self.name} is made anew and {_publishes(after)}"
        else:
            if {"deliver_policy", "start_at"} & self.keys:
                yield f"consumer {self.name} stays where it is: its start counts when one is made"
            changed = [key for key in ("filters", "subject", "url", "target") if key in self.keys]
            if changed:
                verb = "counts" if len(changed) == 1 else "count"
                yield f"{_listed(changed)} {verb} from the next round on; what was sent stays as it is"

    def changed_consumer(self, before: Spec, after: Spec) -> Iterator[str]:
        types = type_of("consumer", before), type_of("consumer", after)
        if types[1] == "nats":
            yield from self.changed_nats_consumer(before, after)
            return
        if types[0] == "nats":
            yield f"consumer {self.name} publishes to NATS no longer"
            yield from self.new_consumer(after)
            return
        if "stream" in self.keys:
            yield _Loss(
                f"consumer {self.name} is made anew and starts {_where(after)} of the stream "
                f"{after.get('stream')}; what it has not acked of {before.get('stream')} goes"
            )
            yield from self.letters()
        elif "deliver_policy" in self.keys:
            yield f"consumer {self.name} stays where it is: deliver_policy counts when one is made"
        if "filters" in self.keys and "stream" not in self.keys:
            yield f"consumer {self.name}: what its filters have passed over is not delivered later"

    def no_consumer(self, spec: Spec) -> Iterator[str]:
        if type_of("consumer", spec) == "nats":
            yield f"consumer {self.name} publishes no more; what was not yet is in its stream still"
        elif self.name in self.facts.consumers:
            yield _Loss(f"drops the consumer {self.name}: what it has not acked goes with it")
            yield from self.letters()

    def letters(self) -> Iterator[str]:
        count = self.facts.consumers.get(self.name, ("", 0))[1]
        if count:
            yield _Loss(f"its {count:,} dead letter{'' if count == 1 else 's'} go with it")


def _where(spec: Spec) -> str:
    """Return where a new consumer starts."""
    policy = str(spec.get("deliver_policy", "all"))
    named = {"all": "at the beginning", "new": "at the end", "last": "with the last message"}
    return named.get(policy, f"with the last {policy}")


def _publishes(spec: Spec) -> str:
    """Return what a new consumer of type nats does."""
    stream, start = spec.get("stream"), spec.get("start_at")
    if start is not None:
        return f"publishes what the stream {stream} holds from {start} on, then what it gets"
    if spec.get("deliver_policy") == "new":
        return f"publishes what the stream {stream} gets from now on"
    return f"publishes what the stream {stream} holds, from its beginning, then what it gets"


def _uncovered(tables: Sequence[str], by: Sequence[str]) -> list[str]:
    """Return those of some tables and patterns that none of others covers."""
    return [table for table in tables if not any(_covers(each, table) for each in by)]


def _covers(pattern: str, table: str) -> bool:
    try:
        return TablePattern.parse(pattern).covers(TablePattern.parse(table))
    except ValueError:  # a variable that this process lacks
        return pattern == table


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
