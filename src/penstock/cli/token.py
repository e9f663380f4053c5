"""`penstock token`: who may use the API, by hand."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from penstock.cli.common import (
    CONFIG,
    AsJson,
    ConfigFile,
    StoreUrl,
    errors,
    fail,
    json_text,
    print_table,
)
from penstock.cli.store import store_of
from penstock.core.text import nearest

tokens = typer.Typer(help="Make, list and revoke the API's tokens.", no_args_is_help=True)


@tokens.command("create")
def create_token(
    name: Annotated[str, typer.Argument(help="What to call it: a worker, a person.")],
    role: Annotated[
        str,
        typer.Option(
            help="worker: receive and ack; viewer: read what there is; admin: everything."
        ),
    ] = "worker",
    consumer: Annotated[
        list[str] | None,
        typer.Option("--consumer", help="A consumer that it may use; repeatable. Without: all."),
    ] = None,
    config: ConfigFile = CONFIG,
    store_url: StoreUrl = None,
) -> None:
    """Make a token and print it, this once: the store keeps its hash alone."""
    from penstock.config.strict import NAME_RULE, is_name
    from penstock.desired.actions import note_action
    from penstock.streams.tokens import ROLES

    if not is_name(name):
        raise fail(f"{name!r} is not a name: expected {NAME_RULE}")
    if role not in ROLES:
        raise fail(f"--role {role}: expected worker, viewer or admin{nearest(role, ROLES)}")
    if role == "admin" and consumer:
        raise fail("an admin may use every consumer: leave --consumer out, or --role admin")
    if role == "viewer" and consumer:
        raise fail("a viewer consumes nothing: leave --consumer out, or --role viewer")
    with errors(), store_of(config, store_url) as store:
        known = [found.name for found in store.consumers()]
        with store.transaction():
            token = store.tokens.create(name, role, consumer or None)
            details = {"role": role, "consumers": consumer or None}
            note_action(store, "token", name, "create", details)
    typer.echo(token)
    allowed = "every consumer" if not consumer else f"consumer {', '.join(consumer)}"
    if role == "viewer":
        allowed = "it may read all but secrets, and consumes nothing"
    typer.echo(
        f"Token {name}: {role}, {allowed}. It is not shown again. "
        "Send it as the header `Authorization: Bearer pst_…`.",
        err=True,
    )
    for missing in (each for each in consumer or () if each not in known):
        hint = nearest(missing, known)
        typer.echo(f"Note: there is no consumer {missing!r} so far{hint}", err=True)


@tokens.command("list")
def list_tokens(
    config: ConfigFile = CONFIG, store_url: StoreUrl = None, as_json: AsJson = False
) -> None:
    """List all tokens, revoked ones too; not their secrets, which are not stored."""
    with errors(), store_of(config, store_url) as store:
        found = store.tokens.all()
    if as_json:
        typer.echo(json_text([dataclasses.asdict(token) for token in found]))
        return
    print_table(
        ("name", "role", "consumers", "created", "revoked"),
        [
            (t.name, t.role, ", ".join(t.consumers or ("all",)), t.created_at, t.revoked_at)
            for t in found
        ],
        without="There is no token. `penstock token create NAME` makes one.",
    )


@tokens.command("revoke")
def revoke_token(
    name: Annotated[str, typer.Argument(help="The token's name.")],
    config: ConfigFile = CONFIG,
    store_url: StoreUrl = None,
) -> None:
    """Make a token worthless, for ever."""
    from penstock.desired.actions import note_action

    with errors(), store_of(config, store_url) as store, store.transaction():
        if not store.tokens.revoke(name):
            live = {token.name: token.revoked_at is None for token in store.tokens.all()}
            if name in live:
                raise fail(f"token {name!r} is revoked already")
            hint = nearest(name, [token for token, is_live in live.items() if is_live])
            raise fail(f"there is no token {name!r}{hint}; `penstock token list` has them")
        note_action(store, "token", name, "revoke")
    typer.echo(f"Revoked {name}.")
