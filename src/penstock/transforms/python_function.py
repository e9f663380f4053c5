"""The operator's function in Python: how it is found, and what it raises."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import signal
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self

from penstock.core.redact import MASK, redact_url
from penstock.transforms.base import TransformError

_LONGEST_TEXT: Final = 500
_SECRET: Final = re.compile(r"PASS|SECRET|TOKEN|KEY|CRED|AUTH|DSN|URL|URI|PWD", re.I)
_URL: Final = re.compile(r"\w[\w+.-]*://\S+")
_PASSWORD: Final = re.compile(r"://[^/@\s]*?:([^@\s]+)@")
_SHORTEST_SECRET: Final = 4


class Interrupts:
    """Catches Ctrl-C while the operator's code runs, which may raise KeyboardInterrupt by itself.

    A context manager. Outside of the main thread, and where SIGINT is handled otherwise or ignored, as
    in Spark's workers, no KeyboardInterrupt comes from a signal.
    """

    def __init__(self) -> None:
        self.seen = False
        """Whether the process was interrupted."""
        self._installed = False

    def __enter__(self) -> Self:
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):
            signal.signal(signal.SIGINT, self._interrupted)
            self._installed = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _interrupted(self, *_: object) -> None:
        self.seen = True
        raise KeyboardInterrupt


def load(spec: str) -> tuple[Callable[[Any], Any], str]:
    """Return the function that `package.module:function` names, and the file of its module.

    Raises `TransformError`, with the reason, where there is none or it is of the wrong kind.
    """
    name, _, path = spec.partition(":")
    with Interrupts() as interrupts:
        try:
            return _loaded(spec, name, path)
        except TransformError:
            raise
        except BaseException as error:  # raised by the operator's own code, whatever its class
            if interrupts.seen:
                raise
            reason = described(error, None)
            raise TransformError(f"{spec}: module {name!r} cannot be imported: {reason}") from None


def _loaded(spec: str, name: str, path: str) -> tuple[Callable[[Any], Any], str]:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if missing == name or name.startswith(f"{missing}."):
            raise TransformError(
                f"{spec}: there is no module {missing!r}: install the package that has it where "
                "penstock and its executors run, or add its folder to PYTHONPATH"
            ) from None
        raise TransformError(
            f"{spec}: module {name!r} needs {missing!r}, which is not installed"
        ) from None
    found: Any = module
    for part in path.split("."):
        if not hasattr(found, part):
            known = sorted(n for n, v in vars(found).items() if callable(v) and n[0] != "_")
            hint = f"; it has {', '.join(known[:8])}" if known else ""
            raise TransformError(f"{spec}: {name!r} has no {part!r}{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise TransformError(f"{spec}: {path!r} is {kind(found)}, not a function")
    if inspect.iscoroutinefunction(found) or inspect.isgeneratorfunction(found):
        raise TransformError(
            f"{spec}: {path!r} is async or a generator: expected a function that returns messages"
        )
    return found, getattr(module, "__file__", None) or name


def described(error: BaseException, file: str | None) -> str:
    """Return an exception's type, text and line, without secrets; `file` is whose line it is.

    Where the traceback does not pass through `file`, the line is that where it was raised.
    """
    text = "".join(c if c.isprintable() or c == "\n" else "?" for c in _safe(_text(error))).strip()
    reason = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if len(reason) > _LONGEST_TEXT:
        reason = f"{reason[:_LONGEST_TEXT]}…"
    if isinstance(error, SyntaxError) and error.lineno:
        # Its own text has the line already.
        return reason
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == file] or frames[1:]
    if not own:
        return reason
    return f"{Path(own[-1].filename).name}, line {own[-1].lineno}: {reason}"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:  # of a class whose own __str__ fails
        return ""


def _safe(text: str) -> str:
    """Return `text` without passwords of URLs, and without what the environment keeps secret."""
    for name, value in os.environ.items():
        if not _SECRET.search(name) or name == "PWD":
            continue
        for secret in (value, *_PASSWORD.findall(value)):
            if len(secret) >= _SHORTEST_SECRET:
                text = text.replace(secret, MASK)
    return _URL.sub(lambda found: redact_url(found[0]), text)


def kind(value: object) -> str:
    """Return the name of a value's type, with its article."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
