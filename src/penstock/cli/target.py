"""`penstock target …`: the bastions of targets and sources, their keys and whether they are trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.common import CONFIG, ConfigFile, StoreUrl, errors, fail, missing

if TYPE_CHECKING:
    from penstock.desired.with_file import Configured

targets = typer.Typer(
    no_args_is_help=True, help="Targets, and the bastions that servers lie behind."
)

Name = Annotated[str, typer.Argument(help="The target, or the source that lies behind a bastion.")]


@targets.command("show")
def show(name: Name, config: ConfigFile = CONFIG, store_url: StoreUrl = None) -> None:
    """Show what a target is, and the public key to let into its bastion."""
    from penstock.bastion import fingerprint, public_line
    from penstock.cli.store import store_of
    from penstock.desired.with_file import configured
    from penstock.streams.bastions import completed

    with errors():
        found = configured(config, store_url)
        typer.echo(_described(found, name))
        bastions = found.config.bastions()
        if name not in bastions:
            typer.echo("bastion: none, it is reached directly")
            return
        with store_of(config, store_url) as store:
            bastion = completed(store, {name: bastions[name]})[name]
        typer.echo(f"bastion: {bastion}")
        typer.echo(f"public key, for the user's authorized_keys there:\n  {public_line(bastion)}")
        if bastion.host_key is None:
            command = found.config.command("target", "trust", name)
            typer.echo(f"host key: none is pinned, it is not trusted yet. Run: {command}")
        else:
            of = "the configuration" if bastions[name].host_key else "penstock target trust"
            typer.echo(f"host key, pinned by {of}: {fingerprint(bastion.host_key)}")
            typer.echo(f"  {bastion.host_key}")


@targets.command("trust")
def trust(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Pin it without a question.")] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Also where another key is pinned already.")
    ] = False,
    config: ConfigFile = CONFIG,
    store_url: StoreUrl = None,
) -> None:
    """Connect to a bastion, show the fingerprint of its host key, and pin the key."""
    from penstock.bastion import fingerprint, host_key
    from penstock.bastion.connection import changed_host_key
    from penstock.cli.store import store_of
    from penstock.desired.actions import note_action
    from penstock.desired.with_file import configured
    from penstock.streams.bastions import completed, pin

    with errors():
        found = configured(config, store_url)
        _described(found, name)
        bastions = found.config.bastions()
        if name not in bastions:
            raise fail(f"{name} has no bastion, so there is no host key to trust")
        with store_of(config, store_url) as store:
            bastion = completed(store, {name: bastions[name]})[name]
            shown = host_key(bastion)
            typer.echo(f"bastion {bastion} shows {fingerprint(shown)}")
            typer.echo(f"  {shown}")
            if shown == bastion.host_key:
                typer.echo("That key is pinned already.")
                return
            if bastion.host_key is not None and (bastions[name].host_key or not replace):
                raise changed_host_key(bastion, fingerprint(shown))
            if not yes and not typer.confirm("Is this the bastion's own key, and to be trusted?"):
                typer.echo("Nothing was changed.", err=True)
                raise typer.Exit(1)
            kind = "target" if name in found.config.targets else "source"
            details = {"fingerprint": fingerprint(shown)}
            with store.transaction():
                pin(store, name, shown)
                note_action(store, kind, name, "trust host key", details)
        typer.echo("Pinned.")


def _described(found: Configured, name: str) -> str:
    """Return what a target or a source is; ends the command where there is none of that name."""
    from penstock.config.targets import NatsTarget
    from penstock.core.connect import address
    from penstock.core.redact import redact_url

    config = found.config
    if (target := config.targets.get(name)) is not None:
        if isinstance(target, NatsTarget):
            return f"target {name}: NATS at {target.safe_url}"
        return f"target {name}: HTTP at {redact_url(target.url.get_secret_value())}"
    source = config.sources.get(name) or config.outboxes.get(name)
    if source is not None:
        return f"source {name}: Postgres at {address(source.url.get_secret_value())}"
    kind = "source" if ("source", name) in found.refused else "target"
    databases = {**config.sources, **config.outboxes}
    known = [*config.targets, *(n for n, s in databases.items() if s.bastion is not None)]
    raise fail(missing(found, kind, name, known), 2)
