"""Trials in a process of their own: the operator's code, and Spark, are never in the API's process.

The first trial starts the process, which ends after a while without trials. Its Spark stays between
trials, so that those after the first take a moment.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Final, cast

from penstock.core.errors import PenstockError

if TYPE_CHECKING:
    from penstock.config.settings import Config
    from penstock.trial.trial import TrialOutcome

IDLE_SECONDS: Final = 120.0
_SECONDS: Final = 60.0
_START_SECONDS: Final = 180.0
"""How long the first trial of a process may take: it starts Spark, maybe on a busy machine."""


class TrialError(PenstockError):
    """A trial that can't be made; `key` is that of the sink at fault, empty where none is."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__("trial", text)
        self.key = key
        self.text = text


class TrialProcess:
    """The process; any thread may ask, one trial runs at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: Any = None
        self._pipe: Connection | None = None
        self._closed = False
        self._patience = _START_SECONDS

    def __call__(self, config: Config, sink: str, messages: bytes) -> list[TrialOutcome]:
        """Return what becomes of messages in JSON at a sink; raises `TrialError`."""
        with self._lock:
            for attempt in (1, 2):
                pipe = self._started()
                try:
                    pipe.send((config, sink, messages))
                    if not pipe.poll(self._patience):
                        self._end()
                        raise TrialError(
                            "",
                            f"The trial took longer than {self._patience:.0f} s: try fewer messages.",
                        )
                    self._patience = _SECONDS
                    key, found = pipe.recv()
                    break
                except (EOFError, OSError):  # it was idle and has just ended, or it died
                    self._end()
                    if attempt == 2 or self._closed:
                        raise TrialError(
                            "", "The process of the trial died: see the log."
                        ) from None
        if key is not None:
            raise TrialError(key, found)
        return cast("list[TrialOutcome]", found)

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._closed = True
        if (process := self._process) is not None and process.is_alive():
            process.kill()
        with self._lock:
            self._end()

    def _started(self) -> Connection:
        if self._pipe is None or not self._process.is_alive():
            self._end()
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(
                target=_serve, args=(theirs,), name="penstock-trial", daemon=True
            )
            self._process.start()
            self._patience = _START_SECONDS
            theirs.close()
        return self._pipe

    def _end(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            if self._process.is_alive():
                self._process.kill()
                self._process.join()
            self._pipe = None


def _serve(pipe: Connection) -> None:
    """Answer trials until there are none for a while, or the asking process has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while pipe.poll(IDLE_SECONDS):
        try:
            pipe.send(_tried(*pipe.recv()))
        except (EOFError, OSError):
            return


def _tried(config: Config, sink: str, messages: bytes) -> tuple[str | None, Any]:
    """Return None and the outcomes, or the key that is wrong and why."""
    from penstock.expressions import ExpressionError  # noqa: PLC0415 - with Spark's modules
    from penstock.spark.plan import PlanError  # noqa: PLC0415 - as above
    from penstock.transforms.base import TransformError  # noqa: PLC0415 - as above
    from penstock.trial.messages import MessageError, read  # noqa: PLC0415 - as above
    from penstock.trial.trial import Trial  # noqa: PLC0415 - as above

    settings = config.sinks[sink]
    try:
        batch = read(messages, config.sources[settings.source], settings)
        trial = Trial(config, sink, lambda _: None, keeps_spark=True)
        try:
            return None, list(trial(batch))
        finally:
            trial.close()
    except MessageError as error:
        return "messages", str(error)
    except PlanError as error:
        return error.concerns.path, ExpressionError.__str__(error)
    except TransformError as error:
        return "transform", str(error)
    except (ExpressionError, PenstockError) as error:
        return "", str(error)
