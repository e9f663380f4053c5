"""A file applied to the desired state, as `penstock run` does at its start."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from typing import Final

import structlog

from penstock.config.document import ConfigDocument, read_document
from penstock.desired.actions import who
from penstock.desired.consequences import refuse_impossible
from penstock.desired.entities import Snapshot
from penstock.desired.plan import Plan, plan_of
from penstock.desired.state import DesiredState, StateMoved
from penstock.desired.variables import stored_variables
from penstock.streams.store import Store

_TRIES: Final = 5

log = structlog.get_logger("penstock")


def apply_file(
    store: Store, path: str | os.PathLike[str], environ: Mapping[str, str] = os.environ
) -> Snapshot:
    """Apply a file to the desired state, and return the state; where nothing differs nothing is written.

    What the file managed and no longer names is left as it is, and named in a warning. Raises
    `ConfigError`, also for a change that can't be made beside what the store has, and `StateMoved` where
    others change the same entities again and again.
    """
    state = DesiredState(store, environ)
    for attempt in range(_TRIES):
        snapshot = state.read()
        document = document_for(snapshot, path, environ)
        plan = plan_of(document, snapshot, environ=environ)
        try:
            if plan.changes:
                refuse_impossible(store, plan, environ)
                # A run has to start, if only to read what the filters are planned with.
                snapshot = apply(state, plan, lenient=True)
        except StateMoved:
            if attempt == _TRIES - 1:
                raise
            continue
        _report(document, plan)
        break
    return snapshot


def document_for(
    snapshot: Snapshot, path: str | os.PathLike[str], environ: Mapping[str, str] = os.environ
) -> ConfigDocument:
    """Read a file that a state is compared with; raises `ConfigError`.

    A variable that `penstock export` has put in the place of a secret need not be set.
    """
    return read_document(path, {**stored_variables(snapshot, environ), **environ})


def apply(
    state: DesiredState, plan: Plan, *, verbatim: bool = False, lenient: bool = False
) -> Snapshot:
    """Write a plan's changes in one transaction, as `DesiredState.write` does.

    With `verbatim` nothing at all may have changed since, so that what follows is what the plan names.
    """
    changes = [planned.change for planned in plan.changes]
    at = plan.version if verbatim else None
    return state.write(
        changes, by=who(), door="file", expected=plan.expected, at=at, lenient=lenient
    )


def _report(document: ConfigDocument, plan: Plan) -> None:
    if plan.changes:
        log.info("the file is applied", file=document.file, **plan.counts())
    for warning in plan.warnings:
        log.warning("an entity of the desired state can't be used here", error=warning)
    if plan.kept:
        log.warning(
            "the file no longer names entities that it manages; they are left as they are",
            entities=[" ".join(planned.change.key) for planned in plan.kept],
            command=shlex.join(("penstock", "apply", "--prune", document.file)),
        )
