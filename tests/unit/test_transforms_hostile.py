"""Each hostile program alone: stopped, refused or harmless, and the runtime as good as before."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.hostile_lua import MISDEEDS, STOPPED, expects, program
from tests.streams_help import inserted, wire

from penstock.transforms.lua import LuaTransform
from penstock.transforms.lua_helper import LOWERED_AFTER, Limits


@pytest.fixture(scope="module")
def hostile() -> Iterator[LuaTransform]:
    transform = LuaTransform(program())
    yield transform
    transform.close()


@pytest.mark.parametrize("name", MISDEEDS)
def test_a_misdeed(hostile: LuaTransform, name: str) -> None:
    batch = wire([inserted(1, name="good"), inserted(2, name=name), inserted(3, name="good")])
    done = hostile(batch)
    assert done.origin.to_pylist() == [0, 2]
    (failed,) = done.failed
    assert failed.row == 1
    assert expects(name, failed.reason), failed.reason
    # Stopped by the hook, which knows the line, and not by the kernel.
    assert (MISDEEDS[name][1] == STOPPED) <= failed.reason.startswith("line ")


@pytest.mark.parametrize("stopped", [0, LOWERED_AFTER])
def test_the_kernel_stops_no_message_before_the_hook_does(stopped: int) -> None:
    """It counts in ticks of 4 ms and more, among them some that went to other processes."""
    limits = Limits(0.1)
    limits.stopped = stopped
    assert limits.hard - limits.seconds >= 0.2


def test_the_process_keeps_nothing_that_it_does_not_need(hostile: LuaTransform) -> None:
    process = Path(f"/proc/{hostile._process._process.pid}")
    limits = {
        line[:26].strip(): line[26:].split()[:2]
        for line in (process / "limits").read_text().splitlines()
    }
    for what in ("Max open files", "Max file size", "Max core file size", "Max processes"):
        assert limits[what] == ["0", "0"], what
    assert limits["Max address space"] != ["unlimited", "unlimited"]
    files = {os.readlink(file) for file in (process / "fd").iterdir()}  # noqa: PTH115 - a target that is no path
    assert [file for file in files if not file.startswith(("pipe:", "/dev/null", "/tmp/"))] == []
    assert b"PATH=" not in (process / "environ").read_bytes()
