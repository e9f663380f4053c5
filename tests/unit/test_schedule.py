"""The order of the test files: the longest first, and a short one ahead of time."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests import schedule
from tests.schedule import LongestFirst, known, longest_first

ROOT = Path(__file__).parents[2]


def test_all_files_that_are_known_are_there() -> None:
    assert [file for file in known() if not (ROOT / file).exists()] == []


class Node:
    """A worker, and the tests that it was sent."""

    shutting_down = False
    gateway = SimpleNamespace(id="gw")

    def __init__(self) -> None:
        self.sent: list[int] = []

    def send_runtest_some(self, tests: list[int]) -> None:
        self.sent += tests

    def shutdown(self) -> None:
        self.shutting_down = True


def test_a_worker_gets_the_longest_file_and_a_short_one_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = {"a.py": 100.0, "b.py": 60.0, "c.py": 50.0}
    monkeypatch.setattr(schedule, "known", lambda: seconds)
    names = ["d.py::1", "c.py::1", "b.py::1", "b.py::2", "a.py::1", "e.py::1"]
    items: list[Any] = [SimpleNamespace(nodeid=name) for name in names]
    longest_first(items)
    tests = [item.nodeid for item in items]
    assert tests == ["a.py::1", "b.py::1", "b.py::2", "c.py::1", "d.py::1", "e.py::1"]

    option = SimpleNamespace(loadscopereorder=False)
    scheduler = LongestFirst(SimpleNamespace(option=option, getvalue=lambda _: ["popen"] * 2))
    first, second = nodes = [Node(), Node()]
    for node in nodes:
        scheduler.add_node(node)
        scheduler.add_node_collection(node, tests)
    scheduler.schedule()

    def sent(node: Node) -> list[str]:
        return [tests[index] for index in node.sent]

    assert sent(first) == ["a.py::1", "e.py::1"]
    assert sent(second) == ["b.py::1", "b.py::2"]
    scheduler.mark_test_complete(second, tests.index("b.py::1"))
    assert sent(second) == ["b.py::1", "b.py::2", "d.py::1"]
    scheduler.mark_test_complete(first, tests.index("a.py::1"))
    assert sent(first) == ["a.py::1", "e.py::1", "c.py::1"]
