"""`penstock recover`: creates a lost slot or publication again, and reports what was missed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.common import CONFIG, ConfigFile, StoreUrl, errors, fail, missing

if TYPE_CHECKING:
    from penstock.backfill.request import BackfillRequest
    from penstock.config.settings import Config
    from penstock.desired.with_file import Configured
    from penstock.runtime.recovery import Recovery


def recover(
    source: Annotated[str, typer.Argument(help="The source, by its name.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do it without a question.")] = False,
    backfill: Annotated[
        bool,
        typer.Option("--backfill", help="Also request a backfill of every table to every sink."),
    ] = False,
    config: ConfigFile = CONFIG,
    store_url: StoreUrl = None,
) -> None:
    """Create a source's lost slot and publication again, and report what was missed."""
    from penstock.cli.store import store_of
    from penstock.desired.with_file import configured

    with errors(), store_of(config, store_url) as store:
        found = configured(config, store_url)
        _check_name(found, source)
        from penstock.runtime.recovery import Recovery

        with Recovery(found.config, source, store) as recovery:
            _recover(found.config, recovery, yes=yes, backfill=backfill)


def _check_name(found: Configured, source: str) -> None:
    config = found.config
    if source in config.outboxes:
        raise fail(
            f"source {source} is an outbox: its relay creates a lost slot again, and its"
            " messages are in the outbox's table"
        )
    if source not in config.sources:
        raise fail(missing(found, "source", source, config.sources))


def _recover(config: Config, recovery: Recovery, *, yes: bool, backfill: bool) -> None:
    from penstock.runtime.recovery import describe

    name, gap = recovery.name, recovery.gap
    if gap is None:
        typer.echo(
            f"Source {name} needs no recovery: its slot and its publication exist."
            " Nothing was changed."
        )
        return
    settings = config.sources[name]
    for line in describe(name, gap):
        typer.echo(line)
    requests, notes = recovery.requests()
    for note in notes:
        typer.echo(f"Note: {note}", err=True)
    typer.echo(
        f"This drops slot {settings.slot}, creates publication {settings.publication} where it is"
        f" missing, creates the slot again, and removes the checkpoints in {recovery.folder}."
    )
    if backfill:
        typer.echo(
            f"It requests {sum(map(len, requests.values()))} backfills, one a table and sink;"
            " it cancels those under way there."
        )
    if not yes and not typer.confirm("Continue?"):
        typer.echo("Nothing was changed.", err=True)
        raise typer.Exit(1)
    begins, numbers = recovery.run(requests if backfill else {})
    typer.echo(f"Recovered: slot {settings.slot} begins at {begins}. Start `penstock run`.")
    if numbers:
        typer.echo(f"Backfills: {', '.join(map(str, numbers))}. See them: penstock backfill list")
    _offer(config, {} if backfill else requests)


def _offer(config: Config, requests: dict[str, list[BackfillRequest]]) -> None:
    """Print the command of each backfill that was not requested, and what none of them brings."""
    if any(requests.values()):
        typer.echo("To send what was missed, the rows of each table as they are now:")
    for sink, of_sink in requests.items():
        for request in of_sink:
            table = f"{request.schema}.{request.table}"
            words = ("backfill", "start", "--sink", sink, "--table", table)
            typer.echo(f"  {config.command(*words)}")
    typer.echo(
        "A backfill sends the rows that are there now. It does not name rows that were deleted in"
        " the gap, and it sends the newest version of a row alone."
    )
