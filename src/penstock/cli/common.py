"""What all commands of `penstock` share: their options, and errors that end without a traceback."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock import __version__
from penstock.config import STORE_VARIABLE
from penstock.core.errors import PenstockError
from penstock.core.text import nearest

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.config.settings import Config
    from penstock.desired.with_file import Configured

CONFIG: Final = Path("penstock.yaml")
LISTEN: Final = "127.0.0.1:7380"
_WHOLE: Final = 10_000
"""Columns of what is no terminal."""

ConfigFile = Annotated[
    Path, typer.Option("--config", "-c", help="The configuration file.", show_default=True)
]
StoreUrl = Annotated[
    str | None,
    typer.Option(
        "--store",
        help=f"The store, in the place of the file's; without a file {STORE_VARIABLE} may name it.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]


@contextlib.contextmanager
def errors() -> Iterator[None]:
    """End with a message and an exit code, not a traceback, where the error has a remedy."""
    try:
        yield
    except PenstockError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(error.exit_code) from None


@contextlib.contextmanager
def starting(config: Config, *, once: bool = False) -> Iterator[None]:
    """Log the context, a process's imports, as the first step of its start.

    Spark's JVM starts at the same time: each takes seconds.
    """
    from penstock.core import log, startup
    from penstock.spark import launch

    log.configure()
    if not once:  # what has delivered nothing of what it was to deliver has not ended well
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # until the service takes signals
    with startup.step("program", version=__version__):
        launch.begin(config)
        yield
        launch.loaded()


def fail(message: str, code: int = 1) -> typer.Exit:
    """Print what is wrong and return what ends the command with this exit code, to be raised."""
    typer.echo(message, err=True)
    return typer.Exit(code)


def unknown(kind: str, name: str, known: Iterable[str], none: str = "") -> str:
    """Return that there is no sink, consumer or source of a name; `none` is why none is known."""
    names = list(known)
    expected = f"expected one of {', '.join(names)}" if names or not none else none
    return f"there is no {kind} {name!r}: {expected}{nearest(name, names)}"


def missing(found: Configured, kind: str, name: str, known: Iterable[str]) -> str:
    """Return why a configuration has no source, sink or target of a name."""
    if (reason := found.refused.get((kind, name))) is not None:
        return f"{kind} {name} can't be used here: {reason}"
    return unknown(kind, name, known, "the configuration has none")


def note_failure(found: Configured) -> None:
    """Print that the store was not asked, and that the file counts alone."""
    if found.failure is not None:
        text = f"Note: the desired state is not known, so the file counts alone: {found.failure}"
        typer.echo(text, err=True)


def json_text(value: Any) -> str:
    """Return a value as JSON, with times in ISO 8601."""
    return json.dumps(value, default=lambda v: v.isoformat() if isinstance(v, datetime) else str(v))


def table_console() -> Console:
    """Return what tables are printed to: a pipe gets whole lines, however long."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WHOLE
    return console


def print_table(
    headings: Sequence[str], rows: Iterable[Sequence[Any]], *, without: str | None = None
) -> None:
    """Print a table for people; None is an empty cell, times are local.

    `without` is the sentence that stands there instead of a table that has no rows.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row))
    if without is not None and not table.row_count:
        typer.echo(without)
        return
    table_console().print(table)


def local_time(iso: str | None) -> str:
    """Return a time that came as JSON the way tables show times: by the local clock."""
    return _cell(None if iso is None else datetime.fromisoformat(iso))


def _cell(value: Any) -> str:
    if isinstance(value, datetime):
        return value.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    return "" if value is None else str(value)


def size(count: int | None) -> str:
    """Return a number of bytes as people read it."""
    if count is None:
        return "-"
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
