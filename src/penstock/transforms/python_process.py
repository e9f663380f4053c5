"""A Python transform in a process of its own, for trials: one that never ends is killed, and named.

A pipeline calls the function in its worker, where nothing else waits for it. An API's process serves
other requests meanwhile: neither the function nor the import of its module may block it, or end it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import subprocess
import sys
import weakref
from multiprocessing.connection import Connection, Pipe
from typing import Any, Final

import pyarrow as pa

from penstock.transforms.base import CODE, FailedMessage, Transformed, TransformError

MESSAGE_SECONDS: Final = 10.0
"""How long a trial waits for one batch, which is one message."""
LOAD_SECONDS: Final = 30.0
"""How long it waits for the process and the import of the module."""
_GRACE_SECONDS: Final = 5.0
_COMMAND: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from penstock.transforms.python_process import main; main()"
)
_BROKEN: Final = (EOFError, OSError)


class _EndedError(Exception):
    """The process has ended, or was killed; the text names why."""


class PythonProcess:
    """Calls the operator's function as `PythonTransform` does, in a process that can be killed.

    Args:
        spec: The function as `package.module:function`.
        message_seconds: How long one batch may take.
        load_seconds: How long the import may take.

    Raises:
        TransformError: The module can't be imported, or not in time, or has no such function.
    """

    def __init__(
        self,
        spec: str,
        *,
        message_seconds: float = MESSAGE_SECONDS,
        load_seconds: float = LOAD_SECONDS,
    ) -> None:
        self._spec = spec
        self._limits = message_seconds, load_seconds
        self._start()

    def __call__(self, batch: pa.RecordBatch) -> Transformed:
        """Return what the messages of `batch` become; all fail where the process ends meanwhile."""
        if not self._finish.alive:
            self._start()
        try:
            return self._ask(batch, self._limits[0])  # type: ignore[no-any-return]  # it came by a pipe
        except _EndedError as error:
            reason = f"{self._spec} {error}"
            failed = [FailedMessage(row, CODE, reason) for row in range(batch.num_rows)]
            return Transformed(batch.slice(0, 0), pa.array([], pa.int64()), [], failed)

    def close(self) -> None:
        """End the process."""
        self._finish()

    def _start(self) -> None:
        message_seconds, load_seconds = self._limits
        self._pipe, theirs = Pipe()
        with theirs:
            process = subprocess.Popen(  # noqa: S603 - this interpreter, and our own module
                [
                    sys.executable, "-c", _COMMAND, json.dumps(sys.path), str(theirs.fileno()),
                    str(message_seconds + _GRACE_SECONDS), str(load_seconds + _GRACE_SECONDS),
                ],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _has_file(sys.stderr) else subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is this process's, which then ends that one
            )  # fmt: skip
        self._process = process
        self._finish = weakref.finalize(self, _end, process, self._pipe)
        try:
            problem = self._ask(self._spec, load_seconds)
        except _EndedError as error:
            raise TransformError(f"{self._spec}: the import of its module {error}") from None
        if problem is not None:
            self._finish()
            raise TransformError(problem)

    def _ask(self, question: Any, seconds: float) -> Any:
        try:
            self._pipe.send(question)
            if self._pipe.poll(seconds):
                return self._pipe.recv()
        except _BROKEN:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE_SECONDS)
            code = self._process.returncode
            self._finish()
            raise _EndedError(f"ended its process, with the exit code {code}") from None
        self._finish()
        raise _EndedError(
            f"did not end within {seconds:g} s, and was killed: a pipeline would wait for it for ever"
        )


def _end(process: subprocess.Popen[bytes], pipe: Connection[Any, Any]) -> None:
    process.kill()
    process.wait()
    pipe.close()


def _has_file(stream: Any) -> bool:
    try:
        return bool(stream.fileno() >= 0)
    except (AttributeError, OSError, ValueError):
        return False


def main() -> None:
    """Serve the process that has started this one: the function's name, then batches."""
    from penstock.transforms.python import PythonTransform  # noqa: PLC0415 - not in the other process

    pipe: Connection[Any, Any] = Connection(int(sys.argv[2]))
    message_seconds, load_seconds = map(float, sys.argv[3:5])
    transform, limit = None, load_seconds
    answer: Transformed | str | None
    with open(os.devnull, "w", encoding="utf-8") as nothing, contextlib.suppress(*_BROKEN):  # noqa: PTH123 - no path
        while True:
            question = pipe.recv()
            # It ends by itself: the process that would kill it may have been killed.
            faulthandler.dump_traceback_later(limit, exit=True, file=nothing)
            if transform is None:
                try:
                    transform, answer = PythonTransform(question), None
                except TransformError as error:
                    answer = str(error)
                limit = message_seconds
            else:
                answer = transform(question)
            faulthandler.cancel_dump_traceback_later()
            pipe.send(answer)
