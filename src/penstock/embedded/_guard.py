"""The guard: a small process that runs one server and never lets it outlive its owners.

Run by path, not imported, with nothing but the standard library. The owner holds the other end of
standard input and writes nothing there: end of file means that the owner is gone, however it went,
SIGKILL included. The guard then ends the server and what that left behind. A server that several
processes share has owners instead that hold a lock on a file, shared, which ends with them too; the
guard waits to hold it alone. (`PR_SET_PDEATHSIG`
alone would not do: it is Linux's, and fires when the *thread* that started the server ends. Between
guard and server it fits, and is set for the case that the guard itself is killed.)

On standard output it prints `pid <n>` once the server runs, and `exit <code>` once it ended.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_GRACE = 1.0


def main() -> int:
    """Run the server to its end; the arguments are those that `process.py` gives."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--orphan-signal", type=int, default=signal.SIGTERM)
    parser.add_argument("--patience", type=float, default=10.0)
    parser.add_argument("--user", type=int)
    parser.add_argument("--group", type=int)
    parser.add_argument("--while-locked")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()

    # Whatever is sent to the whole terminal or group is the owner's to act on.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)

    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # become the parent of what a killed server leaves behind
    try:
        server = _start(args)
    except OSError as error:
        print(f"failed {error}", flush=True)  # noqa: T201 - the protocol with the owner
        return 1

    threading.Thread(target=_await_owner, args=(server, args), daemon=True).start()
    _print(f"pid {server.pid}")
    code = server.wait()
    _signal_group(server.pid, signal.SIGKILL)
    _reap()
    _print(f"exit {code}")
    return 0


def _start(args: argparse.Namespace) -> subprocess.Popen[bytes]:
    def prepare() -> None:
        # The guard's own settings would last: an ignored signal stays ignored through exec.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        _prctl(_PR_SET_PDEATHSIG, args.orphan_signal)

    return subprocess.Popen(  # noqa: S603 - the owner's own command
        args.command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        stderr=sys.stderr,
        user=args.user,
        group=args.group,
        extra_groups=None if args.user is None else [],
        start_new_session=True,
        restore_signals=True,
        preexec_fn=prepare,  # noqa: PLW1509 - single-threaded here
    )


def _await_owner(server: subprocess.Popen[bytes], args: argparse.Namespace) -> None:
    if args.while_locked is not None:
        # Held to this process's end, so that a process that comes now waits until the server is gone.
        fcntl.flock(os.open(args.while_locked, os.O_RDWR), fcntl.LOCK_EX)
    else:
        while os.read(0, 4096):
            pass
    with contextlib.suppress(ProcessLookupError):
        os.kill(server.pid, args.orphan_signal)
    threading.Event().wait(args.patience)
    # Still here, so the server did not obey: the main thread ends the process otherwise.
    _signal_group(server.pid, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _reap() -> None:
    """Wait for the server's orphans, such as the backends of a killed Postgres; kill the obstinate.

    Spark's Python workers need this: they have process groups of their own.
    """
    deadline = time.monotonic() + _GRACE
    with contextlib.suppress(ChildProcessError):
        while True:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                if time.monotonic() > deadline:
                    for pid in _children():
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.01)


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:  # noqa: PTH123 - stays light
        return [int(pid) for pid in file.read().split()]


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _print(text: str) -> None:
    with contextlib.suppress(OSError):  # the owner may be gone
        os.write(1, f"{text}\n".encode())


if __name__ == "__main__":
    sys.exit(main())
