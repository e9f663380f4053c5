"""A network namespace that stands in for another machine, whose cable a test may pull."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

HOST, OTHER = "10.213.7.1", "10.213.7.2"


class Machine:
    """The namespace; from there this machine is `HOST`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.prefix = ("ip", "netns", "exec", name)
        """What a command that shall run there begins with."""

    def plug(self, state: str) -> None:
        """Pull the cable (`down`), so that no packet passes, or put it back (`up`)."""
        _ip("link", "set", f"{self._name}h", state)


@contextlib.contextmanager
def machine() -> Iterator[Machine | None]:
    """Make the namespace; None where that is not allowed."""
    name = f"pn{os.getpid() % 1_000_000}"
    if shutil.which("ip") is None or not _may("netns", "add", name):
        yield None
        return
    try:
        _ip("link", "add", f"{name}h", "type", "veth", "peer", "name", f"{name}n", "netns", name)
        _ip("addr", "add", f"{HOST}/30", "dev", f"{name}h")
        _ip("link", "set", f"{name}h", "up")
        _ip("-n", name, "addr", "add", f"{OTHER}/30", "dev", f"{name}n")
        _ip("-n", name, "link", "set", f"{name}n", "up")
        _ip("-n", name, "link", "set", "lo", "up")
        yield Machine(name)
    finally:
        _may("link", "del", f"{name}h")
        _ip("netns", "del", name)


def _may(*arguments: str) -> bool:
    done = subprocess.run(["ip", *arguments], capture_output=True, check=False)
    return done.returncode == 0


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
