"""How long a look at the status is kept, and what is returned while the next one is under way."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from penstock.api import status
from penstock.api.status import Status

EMPTY: dict[str, Any] = {"sources": {}, "sinks": {}, "nats_consumers": {}, "consumers": {}}


class Clock:
    """The module `time`, with a time of the test's own."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


class Looks:
    """Looks that end when `go` is set; each has its number."""

    def __init__(self) -> None:
        self.count = 0
        self.go = asyncio.Event()

    async def look(self) -> dict[str, Any]:
        self.count += 1
        number = self.count
        await self.go.wait()
        return {**EMPTY, "number": number}


def test_a_slow_look_holds_up_no_request_that_has_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    for name, value in (("time", clock), ("_SHORTEST", 10), ("_PATIENCE", 0.01)):
        monkeypatch.setattr(status, name, value)

    async def work() -> None:
        looks = Looks()
        found = Status(looks.look, always=False)
        first = [asyncio.create_task(found.read()) for _ in range(3)]
        await asyncio.sleep(0)
        looks.go.set()
        assert [(await each)["number"] for each in first] == [1, 1, 1]
        clock.now += 9
        assert (await found.read())["number"] == 1
        clock.now += 2
        looks.go.clear()
        async with asyncio.timeout(10):
            assert (await found.read())["number"] == 1  # the second look is under way
        clock.now += 10
        old = asyncio.create_task(found.read())  # the first one is too old by now: it waits
        for _ in range(10):  # turns of the loop: its patience would be over by the clock
            await asyncio.sleep(0)
        assert not old.done()
        looks.go.set()
        assert (await old)["number"] == looks.count == 2
        await found.close()

    asyncio.run(work())


def test_requests_wait_for_a_slow_look_together_not_each_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    long = ("_SHORTEST", 2000), ("_GRACE", 2000), ("_PATIENCE", 1000)
    for name, value in (("time", clock), *long):
        monkeypatch.setattr(status, name, value)

    async def work() -> None:
        looks = Looks()
        looks.go.set()
        found = Status(looks.look, always=False)
        await found.read()
        clock.now += 2001
        looks.go.clear()
        first = asyncio.create_task(found.read())
        await asyncio.sleep(0)
        clock.now += 1001
        async with asyncio.timeout(30):
            assert (await found.read())["number"] == 1  # the patience began with the look
        assert not first.done()
        looks.go.set()
        assert (await first)["number"] == looks.count == 2
        await found.close()

    asyncio.run(work())


def test_it_is_written_once_for_each_look(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(status, "time", clock)

    async def work() -> None:
        looks = Looks()
        looks.go.set()
        found = Status(looks.look, always=False)
        first = await found.written()
        assert orjson.loads(first) == {**EMPTY, "number": 1}
        assert await found.written() is first
        clock.now += 16
        assert orjson.loads(await found.written())["number"] == looks.count == 2

    asyncio.run(work())


def test_a_first_look_is_not_kept_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(status, "time", clock)
    looks: list[float] = []

    async def look() -> dict[str, Any]:
        looks.append(clock.now)
        clock.now += 5
        return EMPTY

    async def work() -> None:
        found = Status(look, always=False)
        for later in (0, 11, 290, 15):
            clock.now += later
            await found.read()
        # The first one is kept for 15 s from its beginning, the second for sixty times what it took.
        assert looks == [100, 116, 426]

    asyncio.run(work())


def test_a_look_that_fails_is_made_again() -> None:
    async def look() -> dict[str, Any]:
        if failing:
            raise ValueError(failing.pop())
        return EMPTY

    failing = ["not now"]

    async def work() -> None:
        found = Status(look, always=False)
        with pytest.raises(ValueError, match="not now"):
            await found.read()
        assert await found.read() == EMPTY

    asyncio.run(work())


def test_the_end_cancels_a_look() -> None:
    async def work() -> None:
        looks = Looks()
        found = Status(looks.look, always=False)
        waiting = asyncio.create_task(found.read())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await found.close()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert looks.count == 1

    asyncio.run(work())
