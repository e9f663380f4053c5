"""A standby's query: one that is not ready when the source changes hands is closed, and not praised."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs
from tests.waits import await_true

from penstock.config.settings import Config
from penstock.runtime.standby import Standby

CONFIG = cast("Config", SimpleNamespace(sources={"shop": object()}))


class FakeQuery:
    def __init__(self) -> None:
        self.ready, self.waited_for, self.closed = (threading.Event() for _ in range(3))

    def wait(self, seconds: float) -> bool:
        self.waited_for.set()
        return self.ready.wait(seconds)

    def close(self) -> None:
        self.closed.set()


class FakeLease:
    holder = "another (process 7)"

    def __init__(self) -> None:
        self.free = threading.Event()

    def acquire(self, _: object) -> bool:
        return self.free.is_set()


@pytest.mark.parametrize("is_ready", [True, False])
def test_what_a_standby_has_prepared_when_it_takes_the_source(
    monkeypatch: pytest.MonkeyPatch, is_ready: bool
) -> None:
    query, lease = FakeQuery(), FakeLease()
    monkeypatch.setattr(Standby, "_started", lambda *_: query)
    context: Any = SimpleNamespace(once=False)
    desired: Any = SimpleNamespace(is_wanted=lambda _: True)
    holders: list[str | None] = []
    standby = Standby(
        "shop", cast("Any", lease), desired, context, threading.Event(), holders.append
    )
    with capture_logs() as logs:
        waiting = threading.Thread(target=standby.acquire, args=(CONFIG,))
        waiting.start()
        assert query.waited_for.wait(10)
        if is_ready:
            query.ready.set()
            await_true(lambda: any("ready" in entry["event"] for entry in logs))
        lease.free.set()
        waiting.join(10)
        assert is_ready or query.closed.wait(5), "it goes on beside the run"
    assert holders == ["another (process 7)", None]
    assert cast("Any", standby.take()) is (query if is_ready else None)
    logged = [entry["event"] for entry in logs if "ready" in entry["event"]]
    assert logged == (["ready to take the source over"] if is_ready else [])
