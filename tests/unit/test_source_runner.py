"""What the runners of a process do with a source that can't be reached; without Spark and servers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, Self

import pytest
from tests.waits import Later

from penstock.config.settings import Config
from penstock.core.errors import CaptureError, StoreError
from penstock.core.health import Level
from penstock.runtime import runners as runners_module
from penstock.runtime import source_runner, start_delay
from penstock.runtime.runners import Runners
from penstock.runtime.state import RunState

PATIENCE = 30
NO_SPARK: Any = SimpleNamespace()
DOWN = CaptureError("connection_lost", "The server is down.", transient=True)


class World:
    """Which servers are down, and what was tried."""

    def __init__(self) -> None:
        self.down: set[str] = set()
        self.tries: list[str] = []
        self.streaming: set[str] = set()
        self.changed = threading.Condition()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, PATIENCE)

    def note(self, change: Callable[[], object]) -> None:
        with self.changed:
            change()
            self.changed.notify_all()


class FakeLease:
    """A lease that is there at once."""

    claim = None
    holder = None

    def __init__(self, *_: object) -> None: ...

    def acquire(self, _source: object) -> bool:
        return True

    def close(self) -> None: ...


class FakeRun:
    """A run that streams until it is stopped, or can't begin while its server is down."""

    world: World
    failure = None
    lost_claim = False
    has_gap = False
    preparation = SimpleNamespace(waits_for_slot=False)

    def __init__(self, config: Config, *_: object, **_options: object) -> None:
        (self.name,) = config.sources
        self.state = RunState([self.name], {})
        self._stopping = threading.Event()
        self.ready = False

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def prepare(self, *, quietly: bool) -> None:
        world = self.world
        world.note(lambda: world.tries.append(self.name))
        if self.name in world.down:
            raise DOWN

    def begin(self, *_: object) -> None:
        self.ready = True

    def work(self) -> None: ...

    def attend(self, on_ready: Callable[[], object]) -> None:
        on_ready()
        self.world.note(lambda: self.world.streaming.add(self.name))
        self._stopping.wait()

    def drain(self) -> bool:
        return True

    def stop(self) -> None:
        self._stopping.set()

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = FakeRun.world = World()
    monkeypatch.setattr(source_runner, "Lease", FakeLease)
    monkeypatch.setattr(source_runner, "Run", FakeRun)
    monkeypatch.setattr(start_delay, "_BACKOFF_SECONDS", (0.01, 0.02))
    yield world
    world.down.clear()


@pytest.fixture
def ended() -> Iterator[list[Runners]]:
    made: list[Runners] = []
    yield made
    for runners in made:
        runners.stop()
        runners.close()


def runners_of(ended: list[Runners], *names: str) -> Runners:
    sources = {n: {"type": "postgres", "url": f"postgresql://app@{n}/db"} for n in names}
    sinks = {n: {"type": "stream", "source": n} for n in names}
    ended.append(Runners(Config.model_validate({"sources": sources, "sinks": sinks}), "store"))
    return ended[-1]


def failed(runners: Runners) -> list[tuple[str, str | None]]:
    return [
        (part.subject, part.problems[0].cause)
        for part in runners.parts()
        if part.level is Level.FAILED
    ]


def test_a_source_that_is_down_is_tried_again_while_others_go_on(
    world: World, ended: list[Runners]
) -> None:
    world.down.add("stock")
    runners = runners_of(ended, "shop", "stock")
    runners.prepare()
    ready = threading.Event()
    main = Later(lambda: runners.run(NO_SPARK, ready.set))
    world.wait_for(lambda: "shop" in world.streaming)
    world.wait_for(lambda: world.tries.count("stock") > 3)
    assert ready.wait(PATIENCE)
    assert failed(runners) == [("source stock", "The server is down.")]
    assert runners.goes_on
    world.down.clear()
    world.wait_for(lambda: "stock" in world.streaming)
    assert failed(runners) == []
    assert world.tries.count("shop") == 1
    runners.stop()
    main.result(PATIENCE)
    assert runners.healthy


@pytest.mark.parametrize("names", [("shop",), ("shop", "stock")])
def test_a_process_none_of_whose_sources_can_be_reached_ends(
    world: World, ended: list[Runners], names: tuple[str, ...]
) -> None:
    """Its supervisor starts it again, and sees that something is wrong."""
    world.down.update(names)
    with pytest.raises(CaptureError) as caught:
        runners_of(ended, *names).prepare()
    assert caught.value is DOWN


class FakeFeed:
    """A feed with one change, which notes how long it is waited for."""

    unusable: Mapping[tuple[str, str], str] = {}

    def __init__(self, config: Config) -> None:
        self._changes = [config]
        self.waits: list[float] = []
        self.stop: Callable[[], None]

    def wait(self, seconds: float) -> Config | None:
        self.waits.append(seconds)
        if self._changes:
            return self._changes.pop()
        self.stop()
        return None

    def wake(self) -> None: ...

    def refused(self, *_: object) -> None: ...

    def accepted(self, *_: object) -> None: ...


def test_a_change_that_can_not_be_taken_in_is_tried_again_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = Config.model_validate({"sources": {}, "sinks": {}})
    feed = FakeFeed(config)
    runners = Runners(config, "store", feed=feed)
    feed.stop = runners._stopping.set
    tries = []

    def register(config: Config) -> None:
        tries.append(config)
        if len(tries) == 1:
            raise StoreError("store_unavailable", "The store is away.")

    monkeypatch.setattr(runners, "_register", register)
    monkeypatch.setattr(runners_module, "_TICK_SECONDS", 0.01)
    runners._follow()
    assert tries == [config, config]
    assert feed.waits == [runners_module._FOLLOW_SECONDS, 0.01]
