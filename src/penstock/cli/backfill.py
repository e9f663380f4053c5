"""`penstock backfill`: asks for the rows of a table in a sink, lists, watches and stops that."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.common import (
    CONFIG,
    AsJson,
    ConfigFile,
    StoreUrl,
    errors,
    fail,
    json_text,
    missing,
    print_table,
)

if TYPE_CHECKING:
    from penstock.backfill.request import Backfill, BackfillRequest, Backfills, Command
    from penstock.config.sinks import Sink
    from penstock.config.sources import PostgresSource

backfills = typer.Typer(
    help="Read the rows of a table into a sink, beside its live changes.", no_args_is_help=True
)

SinkName = Annotated[str | None, typer.Option("--sink", help="Only those of this sink.")]
Numbers = Annotated[
    list[int] | None,
    typer.Argument(help="Their numbers, from the list.", show_default=False),
]


@contextlib.contextmanager
def _store(config: Path, url: str | None) -> Iterator[Backfills]:
    from penstock.backfill.request import Backfills
    from penstock.cli.store import store_of

    with store_of(config, url) as store:
        yield Backfills(store)


@backfills.command("start")
def start_backfill(
    sink: Annotated[str, typer.Option("--sink", help="The sink that gets the rows.")],
    table: Annotated[
        str | None, typer.Option(help="One table of the sink, as schema.table. Without: each.")
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(help="Only rows that fit, as in \"created_at >= '2024-01-01'\"."),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option("--from", help="Begin at this value of the sink's `sort_by`, in UTC."),
    ] = None,
    config: ConfigFile = CONFIG,
    store_url: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Ask for a backfill. `penstock run` reads the rows; live changes do not wait for them."""
    from pydantic import SecretStr

    from penstock.backfill.request import Backfills
    from penstock.cli.store import opened_both
    from penstock.config import reserved
    from penstock.desired.actions import note_action
    from penstock.desired.with_file import configured
    from penstock.streams.store import Store

    with errors():
        found = configured(config, store_url)
        if found.failure is not None:
            raise found.failure
        of = found.config
        settings = of.sinks.get(sink)
        if settings is None:
            raise fail(missing(found, "sink", sink, of.sinks))
        source = of.sources[settings.source]
        with opened_both(config, store_url) as (url, records), Store.open(url) as opened:
            if not reserved.is_known(source):
                source = reserved.source(SecretStr(records))  # the embedded store runs only now
            requests = _requests(source, sink, settings, table, where, start)
            store = Backfills(opened)
            with opened.transaction():
                made = store.find(ids=store.create(requests))
                for each in made:
                    note_action(opened, "backfill", str(each.id), "start", each.asked)
    if as_json:
        typer.echo(json_text([dataclasses.asdict(each) for each in made]))
    for each in made:
        rows = f"about {each.rows_total:,} rows" if each.rows_total is not None else "its rows"
        typer.echo(f"Started {each}: {rows}.", err=as_json)
    _note_idle_sources(made)


def _requests(
    source: PostgresSource,
    name: str,
    sink: Sink,
    table: str | None,
    where: str | None,
    start: str | None,
) -> list[BackfillRequest]:
    from penstock.backfill import tables
    from penstock.backfill.request import BackfillRequest

    selection = tables.Selection(source, name, sink, table, where, start)
    reads, warnings, _ = tables.select(selection)
    for warning in warnings:
        typer.echo(f"Note: {warning}", err=True)
    return [
        BackfillRequest(
            sink.source, name, read.schema, read.table, where, read.sort_by, read.start,
            rows_total=read.rows,
        )
        for read in reads
    ]  # fmt: skip


@backfills.command("list")
def list_backfills(
    sink: SinkName = None,
    config: ConfigFile = CONFIG,
    store_url: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """List all backfills, those that have ended too."""
    with errors(), _store(config, store_url) as store:
        found = store.find(sink=sink)
    if as_json:
        typer.echo(json_text([dataclasses.asdict(each) for each in found]))
        return
    print_table(
        ("number", "table", "sink", "state", "rows", "of about", "since", "error"),
        [
            (
                x.id, x.table, x.sink, x.state, f"{x.rows_done:,}",
                None if x.rows_total is None else f"{x.rows_total:,}",
                x.ended_at or x.started_at or x.created_at, x.error,
            )
            for x in found
        ],
    )  # fmt: skip
    _note_idle_sources(found)


@backfills.command("pause")
def pause_backfill(
    numbers: Numbers = None, config: ConfigFile = CONFIG, store_url: StoreUrl = None
) -> None:
    """Stop after the rows that are under way; `resume` goes on behind them."""
    _command(numbers, "pause", "Paused", config, store_url)


@backfills.command("resume")
def resume_backfill(
    numbers: Numbers = None, config: ConfigFile = CONFIG, store_url: StoreUrl = None
) -> None:
    """Go on with what was paused, or has failed, where it was."""
    _command(numbers, "resume", "Resumed", config, store_url)


@backfills.command("cancel")
def cancel_backfill(
    numbers: Numbers = None, config: ConfigFile = CONFIG, store_url: StoreUrl = None
) -> None:
    """End a backfill for good. What was delivered stays delivered."""
    _command(numbers, "cancel", "Cancelled", config, store_url)


@backfills.command("watch")
def watch_backfills(
    numbers: Numbers = None,
    sink: SinkName = None,
    config: ConfigFile = CONFIG,
    store_url: StoreUrl = None,
) -> None:
    """Follow backfills until all have ended; ends with exit code 1 if one of them failed."""
    from penstock.cli import backfill_watch as watch

    with errors(), _store(config, store_url) as store:
        found = store.find(ids=numbers, sink=sink)
        _check_numbers(numbers, found)
        if not numbers:
            found = [each for each in found if each.is_open]
        if not found:
            typer.echo("No backfill is under way: `penstock backfill start` makes one.")
            return
        _note_idle_sources(found)
        ids = [each.id for each in found]
        with contextlib.suppress(KeyboardInterrupt):
            ended = watch.follow(lambda: store.find(ids=ids))
            raise typer.Exit(int(any(each.state == "failed" for each in ended)))


def _command(
    numbers: list[int] | None, command: Command, past: str, config: Path, store_url: str | None
) -> None:
    from penstock.backfill.request import Backfills
    from penstock.cli.store import store_of
    from penstock.desired.actions import note_action

    with errors(), store_of(config, store_url) as store:
        backfills = Backfills(store)
        for number in numbers or [_the_only_one(backfills, command)]:
            with store.transaction():
                changed = backfills.command(number, command)
                note_action(store, "backfill", str(number), command)
            typer.echo(f"{past} {changed}.")


def _the_only_one(store: Backfills, command: Command) -> int:
    fitting = {
        "pause": ("waiting", "running"),
        "resume": ("paused", "failed"),
        "cancel": ("waiting", "running", "paused"),
    }[command]
    found = [each for each in store.find() if each.state in fitting]
    if len(found) == 1:
        return found[0].id
    if not found:
        raise fail(f"there is no backfill to {command}; `penstock backfill list` lists them all")
    numbers = ", ".join(f"{each.id} ({each.table} to {each.sink})" for each in found)
    raise fail(f"which one? {command} takes the numbers of: {numbers}")


def _check_numbers(numbers: list[int] | None, found: list[Backfill]) -> None:
    missing = set(numbers or ()) - {each.id for each in found}
    if missing:
        raise fail(f"there is no backfill {min(missing)}; `penstock backfill list` lists them")


def _note_idle_sources(found: list[Backfill]) -> None:
    idle = sorted({x.source for x in found if x.state in ("waiting", "running") and not x.is_run})
    if idle:
        sources = ", ".join(idle)
        typer.echo(
            f"Note: no pipeline runs for source {sources} now: start it with `penstock run`.",
            err=True,
        )
