"""The process that Spark's Python processes of a local session are forked from.

Spark starts a Python for each kind of worker, and one for each source. Each would import pyspark,
pyarrow and Penstock for itself, a second of CPU and 60 MiB. Here one process has imported all of it, and
a program that stands where Spark looks for Python (`fork_client`) has it run the module: in a fork, with
the arguments, the environment, the folder and the standard files that Spark gave. A command is forked
to be that process as soon as it has loaded its own parts, before it has threads and connections.

A fork ends when its client does. The server ends with the process that started it; where it is gone,
the client becomes the Python that Spark meant to start.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import marshal
import os
import runpy
import select
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
import warnings
from pathlib import Path
from typing import Final, NoReturn

_SHELL: Final = "/bin/sh"
NAME: Final = "penstock-forks"
"""The server's, for those who list processes."""
_LONGEST_ADDRESS: Final = 100  # bytes; the least that systems allow is 104, with its end
_REQUEST_SECONDS: Final = 5.0

NEEDED: Final = (
    "dateutil.relativedelta",  # pyarrow looks for it
    "pyarrow.flight",
    "pyspark.daemon",
    "pyspark.worker",
    "pyspark.sql.streaming.python_streaming_source_runner",
    "pyspark.sql.worker.lookup_data_sources",
    "pyspark.sql.worker.create_data_source",
    "pyspark.sql.worker.plan_data_source_read",
    "penstock.spark.capture_process",
    "penstock.spark.source",
    "penstock.spark.sync_source",
    "penstock.spark.writer",
)
"""What they import. None of it starts a thread of Python's, which a fork would lose."""

# module, its arguments; the folder; the environment
Request = tuple[list[str], str, dict[bytes, bytes]]


class Forks:
    """The program for Spark to start as Python, and the server behind it.

    `fork` or `spawn` starts the server; what asks before that waits. Both need `folder`, which the
    server deletes when this process ends.
    """

    def __init__(self, program: Path, folder: Path, listener: socket.socket) -> None:
        self.program = str(program)
        self.pid: int | None = None
        """The server's, once it was started."""
        self._folder = folder
        self._listener = listener
        # End of file in it ends the server, however this process went.
        self._lives, self._held = os.pipe()
        self._process: subprocess.Popen[bytes] | None = None  # one that is freed early warns
        self._ended = False

    def spawn(self) -> None:
        """Start the server as a program, which loads what it needs."""
        number = self._listener.fileno()
        self._process = subprocess.Popen(  # noqa: S603 - this Python
            [sys.executable, "-m", "penstock.spark.fork_server", str(number), self._folder],
            stdin=self._lives, stdout=subprocess.DEVNULL, pass_fds=[number],
            preexec_fn=_ignore_interrupt,  # noqa: PLW1509 - as for Spark's JVM
        )  # fmt: skip
        self._started(self._process.pid)

    def fork(self) -> None:
        """Start the server as a fork of this process, which has loaded most of what it needs.

        Where a fork is not safe, on other systems than Linux and beside threads, it is spawned.
        """
        if sys.platform != "linux" or threading.active_count() > 1:
            self.spawn()
            return
        _load()
        pid = os.fork()
        if pid == 0:
            _become_server(self._listener, self._folder, self._lives)
        self._started(pid)

    def _started(self, pid: int) -> None:
        self.pid = pid
        os.close(self._lives)
        self._listener.close()

    @property
    def ended(self) -> bool:
        """Whether the server has gone, or was never started."""
        if self.pid is not None and not self._ended:
            with contextlib.suppress(ChildProcessError):
                self._ended = os.waitpid(self.pid, os.WNOHANG)[0] != 0
        return self.pid is None or self._ended


def prepare(folder: Path) -> Forks | None:
    """Return what is to be started in a folder.

    None where the system can't do it: it has no shell, or allows no Unix sockets or no programs in
    `folder`.
    """
    address, program = str(folder / "forks"), folder / "python"
    if (
        not hasattr(socket, "send_fds")
        or not Path(_SHELL).exists()
        or len(os.fsencode(address)) > _LONGEST_ADDRESS
    ):
        return None
    client = Path(__file__).with_name("fork_client.py")
    command = shlex.join([sys.executable, "-I", "-S", str(client), address, sys.executable])
    program.write_text(f'#!{_SHELL}\nexec {command} "$@"\n')
    program.chmod(0o700)
    if not os.access(program, os.X_OK):  # such as on a file system that is mounted with `noexec`
        return None
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(address)
    except OSError:  # such as on a file system that has no sockets
        listener.close()
        return None
    listener.listen(64)
    return Forks(program, folder, listener)


def _ignore_interrupt() -> None:
    # Ctrl-C is for the run to act on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _load() -> None:
    """Import what any of Spark's Python processes needs."""
    for name in NEEDED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what a fork's collections walked, it would copy


class _Server:
    """Forks for each client, and sends it the exit code."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._clients: dict[int, socket.socket] = {}  # by the process id of the fork
        self._woken, self._wakes = socket.socketpair()
        for end in (self._woken, self._wakes):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)

    def serve(self) -> tuple[Request, socket.socket] | None:
        """Return in each fork, with what it is to run and its client; None when standard input ends."""
        poller = select.poll()
        for file in (0, self._listener, self._woken):
            poller.register(file, select.POLLIN)
        while True:
            ready = {number for number, _ in poller.poll()}
            if 0 in ready:
                return None
            if self._woken.fileno() in ready:
                self._woken.recv(4096)
                self._reap()
            if self._listener.fileno() in ready:
                client, _ = self._listener.accept()
                files: list[int] = []
                try:
                    request = _read(client, files)
                    pid = os.fork()
                except (OSError, EOFError, ValueError, TypeError, struct.error):
                    client.close()  # it becomes Python itself
                    pid = -1
                if pid == 0:
                    self._leave(client, files)
                for number in files:
                    os.close(number)
                if pid == 0:
                    return request, client
                if pid > 0:
                    self._clients[pid] = client
                    with contextlib.suppress(OSError):  # one that is gone takes its fork with it
                        client.sendall(struct.pack("=i", pid))

    def _leave(self, client: socket.socket, files: list[int]) -> None:
        """In a fork: have its own standard files, and nothing of the server's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, file in enumerate(files):
            os.dup2(file, number)
        for own in (self._listener, self._woken, self._wakes, *self._clients.values()):
            own.close()
        client.settimeout(None)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                client = self._clients.pop(ended[0])
                code = os.waitstatus_to_exitcode(ended[1])
                with client, contextlib.suppress(OSError):
                    client.sendall(struct.pack("=i", 128 - code if code < 0 else code))


def _read(client: socket.socket, files: list[int]) -> Request:
    """Return what a client asks for, and add its standard files to `files`."""
    client.settimeout(_REQUEST_SECONDS)
    head, sent, *_ = socket.recv_fds(client, 4, 3)
    files += sent
    (size,) = struct.unpack("=I", head)
    received = bytearray()
    while len(received) < size:
        if not (piece := client.recv(min(size - len(received), 1 << 20))):
            raise EOFError
        received += piece
    module, folder, environment = marshal.loads(received)  # noqa: S302 - in this user's folder
    if len(files) != 3 or not module:
        raise ValueError
    return module, folder, environment


def _end_with(client: socket.socket) -> None:
    """Have the system end this process when its client is gone."""
    import fcntl  # noqa: PLC0415 - Windows has none, and imports this module

    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(client, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(client, fcntl.F_SETFL, fcntl.fcntl(client, fcntl.F_GETFL) | os.O_ASYNC)
    poller = select.poll()
    poller.register(client, 0)
    if poller.poll(0):  # it went before that
        sys.exit(1)


def _name_process(name: str) -> None:
    """Distinguish it from others that have its command line."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name[:15])


def _run(request: Request) -> None:
    """Run the module as `python -m` does."""
    (module, *arguments), folder, environment = request
    os.chdir(folder)
    os.environb.clear()
    os.environb.update(environment)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in paths if path and path not in sys.path]
    sys.argv = [module, *arguments]
    _name_process((arguments[0] if arguments else module).rpartition(".")[2])
    sys.modules.pop(module, None)  # it runs as the main module, which is another one
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _become_server(listener: socket.socket, folder: Path, lives: int) -> NoReturn:
    """Be the server, and each of its forks, in a fork of a command, of which they keep nothing."""
    code = 1
    try:
        atexit._clear()
        _ignore_interrupt()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if not sys.flags.safe_path:
            sys.path[0] = os.getcwd()  # noqa: PTH109 - as of a module that is run
        os.dup2(lives, 0)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 1)
        # Not closed, as objects that have them will do that. The JVM lives as long as its standard
        # input is open somewhere.
        kept = (0, 1, 2, null, listener.fileno())
        for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
            if number not in kept:
                with contextlib.suppress(OSError):  # the list's own
                    os.dup2(null, number, inheritable=os.get_inheritable(number))
        _serve(listener, folder)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        # As multiprocessing ends its forks: Python's own end would go through the command's code.
        threading._shutdown()  # type: ignore[attr-defined]  # not in the types
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _serve(listener: socket.socket, folder: Path) -> None:
    """Serve until standard input ends, and end then; in each fork, run what is asked for."""
    _name_process(NAME)
    # None of the libraries' threads holds a lock here.
    warnings.filterwarnings("ignore", ".*multi-threaded.*", DeprecationWarning)
    forked = _Server(listener).serve()
    if forked is None:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)  # Python would free what it has loaded piece by piece
    request, client = forked
    _end_with(client)
    _run(request)


if __name__ == "__main__":
    _load()
    _serve(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]))
