"""A cluster of three nats-servers on loopback, whose leaders can be asked for and killed."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Self, TypeVar

from penstock.embedded.handles import JetStream
from penstock.embedded.nats import EmbeddedNats
from penstock.embedded.process import free_port

from .pipeline import PATIENCE

T = TypeVar("T")
SIZE = 3
CONFIG = """\
server_name: {name}
{advertised}
http: "127.0.0.1:{http}"
cluster {{
  name: proof
  listen: "127.0.0.1:{port}"
  routes: [{routes}]
}}
"""


class Cluster:
    """Three servers, `n0` to `n2`, with JetStream; a context manager.

    `advertise` is what each announces as its address, with `{name}` for its name; the default is
    where it listens.
    """

    def __init__(self, folder: Path, *, advertise: str = "") -> None:
        folder.mkdir(exist_ok=True)
        self.servers: dict[str, EmbeddedNats] = {}
        self._http: dict[str, int] = {}
        ports = [free_port() for _ in range(SIZE)]
        routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports)
        for number, port in enumerate(ports):
            name = f"n{number}"
            self._http[name] = free_port()
            advertised = f'client_advertise: "{advertise.format(name=name)}"' if advertise else ""
            config = CONFIG.format(
                name=name, advertised=advertised, http=self._http[name], port=port, routes=routes
            )
            self.servers[name] = EmbeddedNats(folder / name, config)

    @property
    def url(self) -> str:
        """All servers, as a sink's `url` takes them."""
        return ",".join(server.url for server in self.servers.values())

    def meta_leader(self) -> str:
        """The server that leads the cluster, as soon as there is one."""
        return answered(self._meta_leader, "a leader of the cluster")

    def _meta_leader(self) -> str:
        name = next(name for name, server in self.servers.items() if server.pid is not None)
        address = f"http://127.0.0.1:{self._http[name]}/jsz"
        with urllib.request.urlopen(address, timeout=5) as answer:
            leader = json.load(answer).get("meta_cluster", {}).get("leader")
        assert leader
        return str(leader)

    def leader(self, streams: JetStream, stream: str) -> str:
        """The server that leads a stream, as soon as there is one."""

        def ask() -> str:
            cluster = streams.info(stream).cluster
            assert cluster is not None
            assert cluster.leader
            return cluster.leader

        return answered(ask, f"a leader of {stream}")

    def kill(self, name: str) -> None:
        self.servers[name].kill()

    def revive(self, name: str, streams: JetStream, *of: str) -> None:
        """Start a server again, and wait until it has all that these streams have."""
        self.servers[name].start()

        def current() -> bool:
            for stream in of:
                cluster = streams.info(stream).cluster
                if cluster is None or not cluster.leader:
                    return False
                peers = {peer.name: peer.current for peer in cluster.replicas or ()}
                if name != cluster.leader and not peers.get(name):
                    return False
            return True

        await_(current, f"{name} to catch up")

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            for server in self.servers.values():
                stack.enter_context(server)
            self.meta_leader()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def answered(ask: Callable[[], T], what: str) -> T:
    """Return what a cluster answers, as soon as it does: not while it chooses a leader."""
    found: list[T] = []

    def known() -> bool:
        found[:] = [ask()]
        return True

    await_(known, what)
    return found[0]


def await_(condition: Callable[[], bool], what: str, seconds: float = PATIENCE) -> float:
    """Wait for what has no event, errors of a cluster without a leader passed by; how long it took."""
    started = time.monotonic()
    pause = threading.Event()
    while True:
        with contextlib.suppress(Exception):
            if condition():
                return time.monotonic() - started
        took = time.monotonic() - started
        assert took < seconds, f"waited {took:.0f} s for {what}"
        pause.wait(0.05)
