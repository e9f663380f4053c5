"""The supervisor of the embedded store goes on, whatever an attempt to start it again raises."""

from __future__ import annotations

import threading

from penstock.core.errors import EmbeddedError
from penstock.embedded.supervisor import Supervisor


class Server:
    """A server that has ended, and that starts again once `errors` are raised."""

    name = "the server"

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.back = threading.Event()

    def runs(self) -> bool:
        return self.back.is_set()

    def ending(self) -> str:
        return "killed by a test"

    def restart(self) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.back.set()


def test_a_server_is_started_again_whatever_goes_wrong() -> None:
    outages: list[str | None] = []
    wrong = [EmbeddedError("no port"), OSError("too many open files"), RuntimeError("a defect")]
    server = Server(*wrong)
    supervisor = Supervisor(server, outages.append)
    supervisor.start()
    assert server.back.wait(30)
    supervisor.stop()
    assert outages[-1] is None
    assert not server.errors


def test_a_listener_that_fails_does_not_keep_it_away() -> None:
    server, reported = Server(), list[str | None]()

    def listen(outage: str | None) -> None:
        reported.append(outage)
        if len(reported) == 1:
            raise RuntimeError("a defect")

    supervisor = Supervisor(server, listen)
    supervisor.start()
    assert server.back.wait(30)
    supervisor.stop()
