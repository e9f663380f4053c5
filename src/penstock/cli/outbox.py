"""`penstock outbox`: the schema `tide` in an application's database, installed and checked."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from penstock.cli.common import AsJson, errors, fail, json_text, local_time, print_table
from penstock.core.errors import ConfigError

outboxes = typer.Typer(
    help="Set up the transactional outbox in a database, and look at what it holds.",
    no_args_is_help=True,
)

Url = Annotated[
    str, typer.Option("--url", help="The application's database: a libpq URL.", show_default=False)
]


@outboxes.command()
def install(
    url: Annotated[
        str | None,
        typer.Option("--url", help="The application's database: a libpq URL.", show_default=False),
    ] = None,
    print_: Annotated[
        bool, typer.Option("--print", help="Print the SQL for a migration tool; needs no --url.")
    ] = False,
    after: Annotated[
        int, typer.Option("--from", help="With --print: the version that is there; 0 is none.")
    ] = 0,
) -> None:
    """Make the schema `tide`, or bring it up to date; nothing happens if it is."""
    with errors():
        from penstock.outbox.sql import install as installation
        from penstock.outbox.status import connect

        if print_:
            typer.echo(installation.script(after), nl=False)
            return
        if url is None:
            raise fail("No database is named: give --url postgresql://…, or --print for the SQL.")
        with connect(_checked(url)) as connection:
            done = installation.install(connection)
        for warning in done.warnings:
            typer.echo(f"Warning: {warning}", err=True)
        if not done.changed:
            typer.echo(f"The schema tide is up to date (version {installation.VERSION}).")
        elif done.before is None:
            typer.echo(f"Created the schema tide, version {installation.VERSION}.")
        else:
            typer.echo(
                f"Brought the schema tide from version {done.before} to {installation.VERSION}."
            )


@outboxes.command()
def status(url: Url, as_json: AsJson = False) -> None:
    """Show what the outboxes and inboxes hold, and how far the pipelines are."""
    with errors():
        from penstock.cli.status import failure_text
        from penstock.outbox.status import status as outbox_status

        found = outbox_status(_checked(url))
    if as_json:
        typer.echo(json_text(found))
    else:
        _show(found)
    raise typer.Exit(int(any(map(failure_text, found["pipelines"]))))


def _checked(url: str) -> str:
    from penstock.config.sources import check_postgres_url

    try:
        check_postgres_url(url)
    except ValueError as error:
        raise ConfigError([f"--url: {error}"]) from None
    return url


def _show(found: dict[str, Any]) -> None:
    from penstock.cli.status import failure_text
    from penstock.cli.status_tables import dead_letters, pipeline_state

    print_table(
        ("outbox", "enabled", "retention", "messages", "oldest", "publishers", "held by"),
        [
            (
                box["name"],
                _yes(box["enabled"]),
                f"{box['retention_hours']} h",
                f"{'' if box['rows_exact'] else 'about '}{box['rows']:,}",
                local_time(box["oldest"]),
                ", ".join(box["publishers"]),
                "; ".join(f"{held['pipeline']}: {held['reason']}" for held in box["held_by"]),
            )
            for box in found["outboxes"]
        ],
    )
    if found["inboxes"]:
        print_table(
            ("inbox", "pending", "processed", "dead letters", "oldest pending"),
            [
                (
                    box["name"],
                    box["pending"],
                    box["processed"],
                    box["failed"],
                    local_time(box["oldest_pending"]),
                )
                for box in found["inboxes"]
            ],
        )
    print_table(
        ("pipeline", "for", "group", "state", "delivered", "dead letters"),
        [
            (
                pipeline["pipeline"],
                pipeline["outbox"] or pipeline["inbox"],
                pipeline["relay_group"],
                pipeline_state(pipeline),
                f"{pipeline['delivered']:,}",
                f"{pipeline['dead_letters']:,}",
            )
            for pipeline in found["pipelines"]
        ],
    )
    if found["relays"]:
        print_table(
            ("group", "relay", "state", "since", "last heartbeat"),
            [
                (
                    relay["relay_group"],
                    f"process {relay['pid']} on {relay['host']}",
                    relay_state(relay),
                    local_time(relay["since"]),
                    f"{relay['heartbeat_age']} s ago",
                )
                for relay in found["relays"]
            ],
        )
    for pipeline in found["pipelines"]:
        if counted := dead_letters(pipeline):
            typer.echo(f"! pipeline {pipeline['pipeline']}: {counted}")
        if text := failure_text(pipeline):
            typer.echo(f"✗ pipeline {pipeline['pipeline']}: {text}")


def relay_state(relay: dict[str, Any]) -> str:
    """Return how a relay's process is, of a standby also whether it is warm."""
    if relay["state"] == "standby":
        return "standby, warm" if relay["warm"] else "standby, cold"
    return str(relay["state"])


def _yes(value: bool) -> str:
    return "yes" if value else "no"
