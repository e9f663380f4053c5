"""`penstock apply`: changes the desired state as a file, or a saved plan, has it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.changes import (
    ConfigOption,
    Prune,
    file_of,
    make_plan,
    plan_errors,
    saved_plan,
    show,
)
from penstock.cli.common import CONFIG, AsJson

if TYPE_CHECKING:
    from penstock.desired.plan import Plan
    from penstock.streams.store import Store

FileOrPlan = Annotated[
    Path | None,
    typer.Argument(
        help="The configuration file, in the place of --config, or a saved plan.",
        show_default=False,
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Apply without asking.")]


def apply(
    file: FileOrPlan = None,
    config: ConfigOption = None,
    prune: Prune = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Change the desired state in one transaction, to what a file has; or as a saved plan says."""
    from penstock.cli.store import store_of
    from penstock.desired.plan import PlanFileError

    with plan_errors():
        file = file_of(file, config)
        saved = saved_plan(file)
        if saved is not None and prune:
            raise PlanFileError("--prune can't be added to a saved plan.", "Plan with it anew.")
        with store_of(file if saved is None else Path(str(saved.get("file", CONFIG)))) as store:
            plan = make_plan(store, file, prune=prune) if saved is None else _read(saved, store)
            if not plan.changes:
                show(plan, as_json=as_json)
                return
            if saved is None and not yes:
                _ask(plan, as_json=as_json)
            elif not as_json:
                show(plan, as_json=False)
            _apply(store, plan, as_json=as_json, verbatim=saved is not None)


def _read(saved: dict[str, Any], store: Store) -> Plan:
    from penstock.desired.plan import Plan, PlanFileError

    plan = Plan.from_json(saved)
    if saved.get("store") != store.made_at():
        raise PlanFileError("The plan was made for another store.", "Plan anew for this one.")
    return plan


def _ask(plan: Plan, *, as_json: bool) -> None:
    from penstock.desired.plan import PlanFileError

    if as_json or not sys.stdin.isatty():
        raise PlanFileError("Nobody can be asked here.", "Add --yes, or apply a saved plan.")
    show(plan, as_json=False)
    if not typer.confirm("Apply it?"):
        raise typer.Exit(1)


def _apply(store: Store, plan: Plan, *, as_json: bool, verbatim: bool) -> None:
    from penstock.desired.from_file import apply as apply_plan
    from penstock.desired.state import DesiredState

    version = apply_plan(DesiredState(store), plan, verbatim=verbatim).version
    if as_json:
        typer.echo(json.dumps({**plan.shown(), "applied": version}))
    else:
        typer.echo(f"Applied: the desired state has version {version}.")
