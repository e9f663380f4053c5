"""The `penstock` command. Imports of the product's parts wait until a command needs them."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from penstock import __version__
from penstock.cli import apply as cli_apply
from penstock.cli import backfill as cli_backfill
from penstock.cli import check as cli_check
from penstock.cli import consumer as cli_consumer
from penstock.cli import dead_letters as cli_dead_letters
from penstock.cli import export as cli_export
from penstock.cli import init as cli_init
from penstock.cli import outbox as cli_outbox
from penstock.cli import plan as cli_plan
from penstock.cli import recover as cli_recover
from penstock.cli import relay as cli_relay
from penstock.cli import sink as cli_sink
from penstock.cli import status as cli_status
from penstock.cli import sync as cli_sync
from penstock.cli import target as cli_target
from penstock.cli import token as cli_token
from penstock.cli import try_ as cli_try
from penstock.cli import warm as cli_warm
from penstock.cli.changes import PlanCommand
from penstock.cli.common import CONFIG, LISTEN, ConfigFile, StoreUrl, errors, fail, starting

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(cli_token.tokens, name="token")
app.add_typer(cli_dead_letters.dead_letters, name="dead-letters")
app.add_typer(cli_consumer.consumers, name="consumer")
app.add_typer(cli_sink.sinks, name="sink")
app.add_typer(cli_backfill.backfills, name="backfill")
app.add_typer(cli_outbox.outboxes, name="outbox")
app.add_typer(cli_target.targets, name="target")
app.add_typer(cli_sync.syncs, name="sync")
app.command("try")(cli_try.try_sink)
app.command()(cli_relay.relay)
app.command()(cli_recover.recover)
app.command()(cli_init.init)
app.command()(cli_check.check)
app.command(cls=PlanCommand)(cli_plan.plan)
app.command(cls=PlanCommand)(cli_apply.apply)
app.command(cls=PlanCommand)(cli_plan.diff)
app.command()(cli_export.export)
app.command()(cli_status.status)
app.command()(cli_warm.warm)


def _version(given: bool) -> None:
    if given:
        typer.echo(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Postgres changes, through Spark, into streams that workers read and into NATS JetStream."""


@app.command()
def run(
    config: ConfigFile = CONFIG,
    once: Annotated[bool, typer.Option("--once", help="Deliver what is there, then end.")] = False,
    listen: Annotated[
        str, typer.Option(help="Serve the API, /healthz, /readyz, /status and /metrics here.")
    ] = LISTEN,
) -> None:
    """Capture, deliver and serve the API in the foreground, until SIGTERM or Ctrl-C.

    Without a file, or with an empty one, it runs what the API and `penstock apply` have configured.
    """
    from penstock.core import memory

    memory.give_back()
    from penstock.config.file import load_or_empty

    with errors():
        # Before Spark is imported: a typing error should show at once.
        loaded = load_or_empty(config)
        with starting(loaded, once=once):
            from penstock.cli import service

        raise typer.Exit(service.run(loaded, once=once, listen=listen))


@app.command()
def api(
    config: ConfigFile = CONFIG,
    listen: Annotated[str, typer.Option(help="Serve the API here.")] = LISTEN,
    store_url: StoreUrl = None,
) -> None:
    """Serve the API alone, over the same store; needs the file's `store` and nothing else of it."""
    from penstock.api.serve import serve
    from penstock.cli.api_tools import ApiTools
    from penstock.cli.store import opened_both

    with errors(), opened_both(config, store_url) as (url, records_url):
        raise typer.Exit(serve(url, listen, ApiTools(), records_url))


@app.command()
def push(config: ConfigFile = CONFIG, store_url: StoreUrl = None) -> None:
    """Deliver to webhooks alone, over the same store; needs the file's `store` alone too."""
    from penstock.cli.store import opened
    from penstock.push.serve import serve

    with errors(), opened(config, store_url) as url:
        raise typer.Exit(serve(url))


@app.command()
def demo(
    duration: Annotated[
        float | None, typer.Option(min=1, help="Seconds to write for.", show_default="30")
    ] = None,
    rate: Annotated[
        int | None,
        typer.Option(min=1, help="Rows written a second.", show_default="500, with --console 50"),
    ] = None,
    console: Annotated[
        bool, typer.Option("--console", help="Write until Ctrl-C, to look at it in the console.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON; the last line is the summary.")
    ] = False,
) -> None:
    """Run a small shop through an embedded Postgres, the real pipeline and NATS; see its console."""
    from penstock import demo as demos
    from penstock.spark.jvm import make_cache

    if console and duration is not None:
        raise fail("--console writes until Ctrl-C: leave --duration out", 2)
    seconds = math.inf if console else duration or 30.0
    with errors():
        code = demos.run(seconds, rate or (50 if console else 500), as_json)
        make_cache()  # the pipeline itself leaves nothing that runs
        raise typer.Exit(code)
