"""What a change of the configuration means for the sources that run: pure, no I/O."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from penstock.config.document import Key
from penstock.config.settings import Config
from penstock.config.sinks import GROUP_SETTINGS, SinkSettings, StreamSinkSettings


@dataclass(frozen=True, slots=True)
class Changes:
    """The sources whose runs start, end, or are replaced; every other one is not touched."""

    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.starts or self.ends or self.changes)


def changes(old: Config, new: Config) -> Changes:
    """Return what leads from one configuration to the other.

    A source without sinks is not run. Consumers change no run, as the store serves them, but for those
    of type nats, which the run publishes for. Nor does what a stream keeps, and what its group has.
    """
    before, after = old.running_sources, new.running_sources
    return Changes(
        starts=tuple(name for name in after if name not in before),
        ends=tuple(name for name in before if name not in after),
        changes=tuple(name for name in after if name in before and not runs_alike(old, new, name)),
    )


def runs_alike(old: Config, new: Config, source: str) -> bool:
    """Return whether a source's run is the same for two configurations."""
    return _run_of(old, source) == _run_of(new, source)


def reads_alike(old: Config, new: Config, source: str) -> bool:
    """Return whether a source has the same slot and publication of the same database."""
    mine, other = old.sources.get(source), new.sources.get(source)
    if mine is None or other is None:
        return False
    return (mine.url, mine.slot, mine.publication) == (other.url, other.slot, other.publication)


def without(config: Config, left: Collection[Key]) -> Config:
    """Return a configuration without these sinks and NATS consumers; a stream's consumers go with it."""
    if not left:
        return config
    sinks = {name: sink for name, sink in config.sinks.items() if ("sink", name) not in left}
    readers = {name: of for name, of in config.consumers.items() if of.stream in sinks}
    publishers = {
        name: of
        for name, of in config.nats_consumers.items()
        if of.stream in sinks and ("consumer", name) not in left
    }
    return config.model_copy(
        update={"sinks": sinks, "consumers": readers, "nats_consumers": publishers}
    )


def _run_of(config: Config, source: str) -> tuple[object, ...]:
    """Return all that a source's run is made of."""
    sinks = {name: _of_run(sink) for name, sink in config.sinks_of(source).items()}
    consumers = {n: of for n, of in config.nats_consumers.items() if of.stream in sinks}
    return config.sources.get(source), sinks, consumers


def _of_run(sink: SinkSettings) -> SinkSettings:
    """Return a sink without what is the store's alone: a stream's retention and its group's settings."""
    if not isinstance(sink, StreamSinkSettings):
        return sink
    return sink.model_copy(update=dict.fromkeys(("retention", *GROUP_SETTINGS)))
