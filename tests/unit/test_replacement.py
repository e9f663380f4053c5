"""What follows a run is prepared once that run has removed what the one before has left."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.config.document import Key
from penstock.config.settings import Config
from penstock.runtime import replacement as replacement_module
from penstock.runtime.desired_config import DesiredConfig
from penstock.runtime.reconcile import without
from penstock.runtime.replacement import Replacement

SECONDS = 30


def test_nothing_is_prepared_before_the_run_before_is_taken_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: queue.SimpleQueue[object] = queue.SimpleQueue()
    monkeypatch.setattr(Replacement, "_try", lambda _, desired: tried.put(desired))
    settled = threading.Event()
    replacement = Replacement(
        "shop",
        cast("Any", SimpleNamespace(stopping=False)),
        settled,
        None,
        cast("Any", SimpleNamespace(next=lambda: "newest", runs=lambda _: False)),
        cast("Any", None),
        lambda *_: True,
    )
    replacement.start()
    try:
        replacement.note_change()
        with pytest.raises(queue.Empty):
            tried.get(timeout=0.3)
        settled.set()
        assert tried.get(timeout=SECONDS) == "newest"
    finally:
        settled.set()
        replacement.close()


class Rig:
    """A replacement of a run of `good`, and what it prepares: without what is left of entities."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, good: Config) -> None:
        self.left: frozenset[Key] = frozenset()
        self.removes = True
        self.tried: queue.SimpleQueue[tuple[set[str], set[str]]] = queue.SimpleQueue()
        self.desired = DesiredConfig("shop", good, cast("Any", None))
        self.desired.take(good)
        self._made = Replacement(
            "shop", cast("Any", SimpleNamespace(stopping=False)), threading.Event(), None,
            self.desired, cast("Any", SimpleNamespace(left=self._left, remove=self._remove)),
            lambda *_: True,
        )  # fmt: skip
        monkeypatch.setattr(Replacement, "_prepared", self._prepared)
        monkeypatch.setattr(replacement_module, "_RETRY_SECONDS", 0.01)

    def _left(self, _source: str, config: Config) -> frozenset[Key]:
        return self.left & {("sink", name) for name in config.sinks}

    def _remove(self, _source: str, _config: Config) -> None:
        self.left = frozenset() if self.removes else self.left

    def _prepared(self, desired: Config, left: frozenset[Key]) -> None:
        self.tried.put((set(desired.sinks), {name for _, name in left}))

    def attempt(self) -> bool:
        """Try once; return whether the run was replaced."""
        desired = self.desired.next()
        assert desired is not None
        return self._made._try(desired)


def config_of(*sinks: str) -> Config:
    source = {"type": "postgres", "url": "postgresql://app@db/shop"}
    streams = {name: {"type": "stream", "source": "shop"} for name in sinks}
    return Config.model_validate({"sources": {"shop": source}, "sinks": streams})


def test_what_is_made_anew_is_let_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on without it, and only then it is removed, and prepared as it is desired."""
    good = config_of("one", "two")
    rig = Rig(monkeypatch, good)
    assert not rig.attempt()  # nothing has changed
    assert rig.tried.empty()
    rig.left = frozenset({("sink", "one")})
    assert rig.attempt()
    assert rig.tried.get_nowait() == ({"one", "two"}, {"one"})
    assert rig.left  # the run has it
    rig.desired.take(without(good, rig.left))
    rig.removes = False
    assert not rig.attempt()  # another source's run has it, say
    assert rig.tried.empty()
    rig.removes = True
    assert rig.attempt()
    assert rig.tried.get_nowait() == ({"one", "two"}, set())


def test_a_source_that_is_made_anew_has_no_run_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, config_of("one"))
    rig._left = lambda *_: frozenset({("source", "shop")})  # type: ignore[method-assign]
    rig._made._context = cast("Any", SimpleNamespace(left=rig._left, remove=None))
    assert rig.attempt()  # nothing is removed while it runs
    assert rig.tried.get_nowait() == ({"one"}, {"shop"})
