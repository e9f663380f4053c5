"""`penstock sync airbyte`: the environment that manifests of Airbyte run in."""

from __future__ import annotations

import typer

from penstock.cli.common import errors

airbyte = typer.Typer(help="Install what providers of type airbyte need.", no_args_is_help=True)


@airbyte.command("install")
def install() -> None:
    """Make the environment that has airbyte-cdk, on this host and for this user.

    It is of its own, in the folder of Penstock's caches, and takes some 350 MB.
    """
    from penstock.syncs.airbyte import environment

    with errors():
        typer.echo(f"airbyte-cdk is installed in {environment.install()}")
