from __future__ import annotations

import os

import pytest
from tests.waits import await_true

from penstock.spark.stderr import Filter, Forwarder


def output(text: str) -> list[str]:
    chosen = Filter()
    lines = (chosen.take(line + "\n") for line in text.splitlines())
    return [line for line in lines if line is not None]


def test_log_lines_pass_and_the_banner_does_not() -> None:
    text = 'WARNING: Using incubator modules: x\n{"event": "a"}\n2026 spark ERROR Some: thing'
    assert output(text) == ['{"event": "a"}', "2026 spark ERROR Some: thing"]


def test_of_a_python_trace_the_last_line_stays() -> None:
    trace = (
        'Traceback (most recent call last):\n  File "x.py", line 1, in f\n    g()\n{}: why\nafter'
    )
    assert output(trace.format("ValueError")) == ["ValueError: why", "after"]
    assert output(trace.format("BrokenPipeError")) == ["after"]


def test_of_a_java_trace_the_first_line_stays_unless_a_query_ends() -> None:
    assert output("java.lang.Error: x\n\tat a.b(C.java:1)\n\t... 3 more\nnext") == [
        "java.lang.Error: x",
        "next",
    ]
    assert output('Exception in thread "stream execution thread for shop": y\n\tat a.b(C)') == []


def test_what_a_process_writes_before_it_has_started_is_held_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    forwarder = Forwarder()
    forwarder.follow()
    os.write(forwarder.file, b"Invalid initial heap size: -Xmslots\nTraceback (most rec")
    os.write(forwarder.file, b"ent call last):\n  File x\nValueError: why\n")
    await_true(lambda: len(forwarder.last()) >= 2, what="both lines of the error are read")
    assert caplog.messages == []
    forwarder.started()
    os.write(forwarder.file, b"later\n")
    forwarder.close()
    output = ["Invalid initial heap size: -Xmslots", "ValueError: why", "later"]
    assert forwarder.last(seconds=30) == output
    assert caplog.messages == output
