"""A cluster of three nats-servers on loopback, whose leaders can be asked for and killed."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from penstock.embedded.handles import JetStream
from penstock.embedded.nats import EmbeddedNats
from penstock.embedded.process import free_port

from .pipeline import PATIENCE

SIZE = 3
CONFIG = """\
server_name: {name}
http: "127.0.0.1:{http}"
cluster {{
  name: proof
  listen: "127.0.0.1:{port}"
  routes: [{routes}]
}}
"""


class Cluster:
    """Three servers, `n0` to `n2`, with JetStream; a context manager."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.servers: dict[str, EmbeddedNats] = {}
        self._http: dict[str, int] = {}
        ports = [free_port() for _ in range(SIZE)]
        routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports)
        for number, port in enumerate(ports):
            name = f"n{number}"
            self._http[name] = free_port()
            config = CONFIG.format(name=name, http=self._http[name], port=port, routes=routes)
            self.servers[name] = EmbeddedNats(folder / name, config)

    @property
    def url(self) -> str:
        """All servers, as a sink's `url` takes them."""
        return ",".join(server.url for server in self.servers.values())

    def meta_leader(self) -> str | None:
        """The server that leads the cluster, by one that runs; None while there is none."""
        for name, server in self.servers.items():
            if server.pid is not None:
                with contextlib.suppress(OSError):
                    address = f"http://127.0.0.1:{self._http[name]}/jsz"
                    with urllib.request.urlopen(address, timeout=5) as answer:
                        found: dict[str, Any] = json.load(answer)
                    return found.get("meta_cluster", {}).get("leader") or None
        return None

    def leader(self, streams: JetStream, stream: str) -> str:
        """The server that leads a stream, as soon as there is one."""
        found: list[str] = []

        def known() -> bool:
            cluster = streams.info(stream).cluster
            leader = None if cluster is None else cluster.leader
            found[:] = [leader] if leader else []
            return bool(found)

        await_(known, f"a leader of {stream}")
        return found[0]

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
            await_(lambda: self.meta_leader() is not None, "a leader of the cluster")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


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
