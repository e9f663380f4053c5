"""Changes of messages on their way to a sink, by the operator's Lua or Python.

`make` returns what a worker applies to batches; `inspect` raises what is wrong with it beforehand. What
goes in and out is in `penstock.transforms.base`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.config.transforms import TransformSettings
    from penstock.transforms.base import MessageTransform

    Maker = Callable[[TransformSettings], MessageTransform]

# Imports wait: the Lua helper is a small process, and loads nothing but its own module.


def make(settings: TransformSettings) -> MessageTransform:
    """Return the transform of a sink whose `transform` is `lua` or `python`.

    It belongs to one thread at a time, and is closed by its `close`. Raises `TransformError` where
    `inspect` would, and `ValueError` for one in SQL, which Spark evaluates.
    """
    if settings.lua is not None:
        from penstock.transforms.lua import LuaTransform  # noqa: PLC0415 - as above

        return LuaTransform(
            settings.lua.code,
            name=settings.lua.file,
            time_limit=settings.time_limit_ms / 1_000,
            memory_limit=settings.memory_limit_mib << 20,
        )
    if settings.python is not None:
        from penstock.transforms.python import PythonTransform  # noqa: PLC0415 - as above

        return PythonTransform(settings.python)
    raise ValueError("a transform in SQL is the plan's: only lua and python are made here")


def isolated(settings: TransformSettings) -> MessageTransform:
    """Return what `make` does, with Python in a process of its own, where a call has a time limit.

    For processes that serve others, too: Lua is in one always.
    """
    if settings.python is None:
        return make(settings)
    from penstock.transforms.python_process import PythonProcess  # noqa: PLC0415 - as above

    return PythonProcess(settings.python)


def inspect(settings: TransformSettings, made_by: Maker | None = None) -> None:
    """Compile the Lua program, or import the Python function; do nothing for SQL.

    `made_by` is `make`, or `isolated`. Raises `TransformError` with what is wrong: a syntax error with
    its line, a program without `transform`, a module or function that is not there.
    """
    if settings.sql is None:
        (made_by or make)(settings).close()
