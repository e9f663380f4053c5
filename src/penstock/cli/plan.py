"""`penstock plan` and `penstock diff`: what a file would change in the desired state."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.changes import (
    ConfigOption,
    File,
    Prune,
    exit_code,
    file_of,
    make_plan,
    plan_errors,
    saved_plan,
    show,
)
from penstock.cli.common import AsJson

if TYPE_CHECKING:
    from penstock.desired.plan import Plan

Out = Annotated[
    Path | None,
    typer.Option("--out", help="Save the plan here, for `penstock apply`; it may hold secrets."),
]


def plan(
    file: File = None,
    config: ConfigOption = None,
    prune: Prune = False,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Show what a file would change, and what follows from it; exit code 2 where it changes anything."""
    from penstock.cli.store import store_of

    with plan_errors():
        file = file_of(file, config)
        _refuse_saved(file)
        if out is not None:
            _refuse_other(out)
        with store_of(file) as store:
            made = make_plan(store, file, prune=prune)
            if out is not None:
                _save(made, out, {"file": str(file), "store": store.made_at()})
        show(made, as_json=as_json)
        raise typer.Exit(exit_code(made))


def diff(file: File = None, config: ConfigOption = None, as_json: AsJson = False) -> None:
    """Show where a file and the desired state differ, without consequences; exit codes as of plan."""
    from penstock.cli.store import store_of

    with plan_errors():
        file = file_of(file, config)
        _refuse_saved(file)
        with store_of(file) as store:
            made = make_plan(store, file, prune=False, checked=False)
        show(made, as_json=as_json)
        raise typer.Exit(exit_code(made))


def _refuse_saved(file: Path) -> None:
    from penstock.desired.plan import PlanFileError

    if saved_plan(file) is not None:
        raise PlanFileError(f"{file} is a saved plan.", f"Apply it: penstock apply {file}")


def _refuse_other(out: Path) -> None:
    """Refuse to write over what is no plan, such as the configuration."""
    from penstock.desired.plan import PlanFileError

    if out.is_file() and out.stat().st_size and saved_plan(out) is None:
        raise PlanFileError(f"{out} is there already, and is no saved plan.", "Name another file.")


def _save(made: Plan, out: Path, about: dict[str, Any]) -> None:
    """Write a plan for its owner's eyes alone."""
    from penstock.desired.plan import PlanFileError

    text = json.dumps({**made.as_json(), **about})
    try:
        with open(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:  # noqa: PTH123 - its mode
            os.fchmod(file.fileno(), 0o600)
            file.write(text)
    except OSError as error:
        raise PlanFileError(
            f"{out}: the plan can't be saved: {error.strerror}.", "Name another file."
        ) from None
