"""What `plan`, `apply` and `diff` share: how a plan is made, printed and saved, and their exit codes."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
import typer.core

from penstock.cli.common import CONFIG, fail
from penstock.core.errors import PenstockError

if TYPE_CHECKING:
    from penstock.desired.plan import Plan, PlannedChange
    from penstock.streams.store import Store

NOTHING: Final = 0
CHANGES: Final = 2
_ERROR: Final = 1
_STYLES: Final = {
    "create": "green", "update": "yellow", "delete": "red", "take over": "cyan",
    "warning": "yellow", "value": "dim", "change": "", "summary": "bold", "plain": "",
}  # fmt: skip

Prune = Annotated[
    bool, typer.Option("--prune", help="Delete what the file managed and no longer names.")
]
File = Annotated[
    Path | None,
    typer.Argument(help="The configuration file, in the place of --config.", show_default=False),
]

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="The configuration file.", show_default=str(CONFIG)),
]


class PlanCommand(typer.core.TyperCommand):
    """A command whose exit code 2 means changes: a wrong option is an error like others, 1."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, and give a usage error the exit code of errors."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if getattr(error, "exit_code", None) == CHANGES:  # typer keeps its class to itself
                vars(error)["exit_code"] = _ERROR
            raise


def file_of(file: Path | None, config: Path | None) -> Path:
    """Return the one file that is named, by itself or as `--config`; else `CONFIG`."""
    if file is not None and config not in (None, file):
        raise fail(f"{file} and --config {config} are two files: name one")
    return file or config or CONFIG


@contextlib.contextmanager
def plan_errors() -> Iterator[None]:
    """End with a message and exit code 1 where an error has a remedy."""
    try:
        yield
    except PenstockError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(_ERROR) from None


def make_plan(store: Store, file: Path, *, prune: bool, checked: bool = True) -> Plan:
    """Return the plan of a file for a store; `checked` with consequences, against the sources.

    Raises `PenstockError`.
    """
    from dataclasses import replace

    from penstock.desired.from_file import document_for
    from penstock.desired.plan import plan_of
    from penstock.desired.state import DesiredState

    snapshot = DesiredState(store).read()
    document = document_for(snapshot, file)
    made = plan_of(document, snapshot, prune=prune)
    if not checked or made.is_empty:
        return made
    from penstock.desired.consequences import with_consequences

    made = with_consequences(store, made, os.environ)
    if not any(_has_expressions(planned) for planned in made.changes):
        return made  # what plans them comes with Spark, whose import takes a second
    from penstock.check.changes import inspect_plan

    found = inspect_plan(made, snapshot, os.environ, store)
    warnings = [f"{finding.subject}: {finding.message}" for finding in found]
    return replace(made, warnings=(*made.warnings, *warnings))


def saved_plan(file: Path) -> dict[str, Any] | None:
    """Return a saved plan's JSON, None where the file is no saved plan."""
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) and "penstock_plan" in value else None


def _has_expressions(planned: PlannedChange) -> bool:
    after = planned.change.after if planned.change.kind == "sink" else None
    return any((after or {}).get(key) is not None for key in ("filter", "transform", "route"))


def show(plan: Plan, *, as_json: bool) -> None:
    """Print a plan for people or for machines, its secrets masked."""
    if as_json:
        typer.echo(json.dumps(plan.shown()))
        return
    from rich.console import Console
    from rich.text import Text

    from penstock.desired.plan_text import lines

    text = [
        Text.assemble(*((part.text, _STYLES[part.style]) for part in line))
        for line in lines(plan.shown())
    ]
    # At once: rich takes 1 ms for each call.
    Console(soft_wrap=True, highlight=False).print(Text("\n").join(text))


def exit_code(plan: Plan) -> int:
    """Return the exit code of a plan: 0 where no entity is to be changed, 2 where one is."""
    return NOTHING if plan.changes_nothing else CHANGES
