"""What Spark starts where it starts Python: it has the fork server run the module, and stands for it.

A script of its own, which `fork_server` names with `-I -S`: it imports nothing that takes time. Its
arguments are the server's address, the Python that runs what the server can't, and what that is given.
"""

import contextlib
import marshal
import os
import select
import signal
import socket
import struct
import sys

_LOOK_SECONDS = 1.0
"""How often it looks whether others have ended, on a system that does not report it."""


def main() -> int:
    """Return the exit code of the module, once it has ended."""
    address, python, *arguments = sys.argv[1:]
    parent = os.getppid()
    connection = socket.socket(socket.AF_UNIX)
    pid = _ask(connection, address, arguments) if arguments[:1] == ["-m"] else None
    if pid is None:
        os.execv(python, [python, *arguments])  # noqa: S606 - what Spark meant to start
    _let_go()
    signal.signal(signal.SIGTERM, lambda *_: _terminate(pid))
    connection.settimeout(_LOOK_SECONDS)
    ends = _ends(connection, parent, pid)
    while True:
        if ends is not None:
            ends.poll()
        try:
            code = connection.recv(4)
        except TimeoutError:
            # That the JVM is gone ends the module: it sees this process go.
            if ends is not None or os.getppid() != parent or not _lives(pid):
                return 1
            continue
        return struct.unpack("=i", code)[0] if code else 1


def _ends(connection: socket.socket, *pids: int) -> "select.poll | None":
    """Return what waits for an answer, or the end of one of these processes; None: the system can't."""
    try:
        files = [os.pidfd_open(pid) for pid in pids]
    except (AttributeError, OSError):  # it is no Linux, or one of them has ended
        return None
    poller = select.poll()
    for file in (connection.fileno(), *files):
        poller.register(file, select.POLLIN)
    return poller


def _ask(connection: socket.socket, address: str, arguments: list[str]) -> int | None:
    """Return the process id of what the server runs, None where there is no server."""
    request = marshal.dumps((arguments[1:], os.getcwd(), dict(os.environb)))  # noqa: PTH109 - without pathlib it starts sooner
    try:
        connection.connect(address)
        socket.send_fds(connection, [struct.pack("=I", len(request))], [0, 1, 2])
        connection.sendall(request)
        answer = connection.recv(4)
    except OSError:
        return None
    return struct.unpack("=i", answer)[0] if answer else None


def _let_go() -> None:
    """Leave the standard files to the module: they end with it."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)


def _terminate(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    os._exit(main() & 0xFF)
