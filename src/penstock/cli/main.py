"""The `penstock` command. Imports of the product's parts wait until a command needs them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock import __version__
from penstock.cli import backfill as cli_backfill
from penstock.cli import dead_letters as cli_dead_letters
from penstock.cli import outbox as cli_outbox
from penstock.cli import recover as cli_recover
from penstock.cli import relay as cli_relay
from penstock.cli import store as cli_store
from penstock.cli import try_ as cli_try
from penstock.cli.common import CONFIG, LISTEN, AsJson, ConfigFile, errors, fail, starting

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(cli_store.tokens, name="token")
app.add_typer(cli_dead_letters.dead_letters, name="dead-letters")
app.add_typer(cli_backfill.backfills, name="backfill")
app.add_typer(cli_outbox.outboxes, name="outbox")
app.command("try")(cli_try.try_sink)
app.command()(cli_relay.relay)
app.command()(cli_recover.recover)

Listen = Annotated[str, typer.Option(help="Where `penstock run` serves HTTP, as host:port.")]


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
def init(
    path: Annotated[Path, typer.Argument(help="The file to write.")] = CONFIG,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Write a commented configuration to start from."""
    from importlib.resources import files

    text = files("penstock.config").joinpath("template.yaml").read_text(encoding="utf-8")
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise fail(f"{path} exists: choose another name, or overwrite it with --force") from None
    except OSError as error:
        raise fail(f"{path} cannot be written: {error.strerror}") from None
    typer.echo(f"Wrote {path}. Edit it, then: penstock check -c {path}")


@app.command()
def check(config: ConfigFile = CONFIG, as_json: AsJson = False) -> None:
    """Inspect everything before anything starts: Java, Postgres, NATS, the store."""
    from penstock.check import config as checks

    with errors():
        report = checks.inspect(config)
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "findings": [dataclasses.asdict(finding) for finding in report.findings],
                    "errors": report.count("error"),
                    "warnings": report.count("warning"),
                }
            )
        )
    else:
        _print_findings(report.findings)
        typer.echo(f"errors: {report.count('error')}, warnings: {report.count('warning')}")
    raise typer.Exit(int(report.count("error") > 0))


def _print_findings(findings: list[Any]) -> None:
    from rich.console import Console
    from rich.text import Text

    # Statements are there to be pasted, so lines are not folded to the terminal's width.
    console = Console(soft_wrap=True, highlight=False)
    marks = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "error": ("✗", "bold red")}
    for finding in findings:
        mark, style = marks[finding.level]
        console.print(Text.assemble((mark, style), f" {finding.subject}: {finding.message}"))
        for line in finding.fix.splitlines():
            console.print(Text(f"    {line}", style="dim"))


@app.command()
def status(config: ConfigFile = CONFIG, listen: Listen = LISTEN, as_json: AsJson = False) -> None:
    """Show each source's slot and lag, and what a running pipeline delivered."""
    from penstock.cli import status as statuses
    from penstock.cli import status_tables
    from penstock.config.file import load

    with errors():
        report = statuses.collect(load(config), listen)
    if as_json:
        typer.echo(json.dumps(report))
    else:
        status_tables.show(report)
    raise typer.Exit(int(not statuses.is_ready(report)))


@app.command()
def run(
    config: ConfigFile = CONFIG,
    once: Annotated[bool, typer.Option("--once", help="Deliver what is there, then end.")] = False,
    listen: Annotated[
        str, typer.Option(help="Serve the API, /healthz, /readyz, /status and /metrics here.")
    ] = LISTEN,
) -> None:
    """Capture, deliver and serve the API in the foreground, until SIGTERM or Ctrl-C."""
    from penstock.config.file import load

    with errors():
        loaded = load(config)  # before Spark is imported: a typing error should show at once
        with starting():
            from penstock.cli import service

        raise typer.Exit(service.run(loaded, once=once, listen=listen))


@app.command()
def api(
    config: ConfigFile = CONFIG,
    listen: Annotated[str, typer.Option(help="Serve the API here.")] = LISTEN,
) -> None:
    """Serve the API alone, over the same store; needs the file's `store` and nothing else of it."""
    from penstock.api.serve import serve

    with errors(), cli_store.opened(config) as url:
        raise typer.Exit(serve(url, listen))


@app.command()
def push(config: ConfigFile = CONFIG) -> None:
    """Deliver to webhooks alone, over the same store; needs the file's `store` alone too."""
    from penstock.push.serve import serve

    with errors(), cli_store.opened(config) as url:
        raise typer.Exit(serve(url))


@app.command()
def demo(
    duration: Annotated[float, typer.Option(min=1, help="Seconds to write for.")] = 30,
    rate: Annotated[int, typer.Option(min=1, help="Rows written a second.")] = 500,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON; the last line is the summary.")
    ] = False,
) -> None:
    """Run a small shop through an embedded Postgres, the real pipeline and NATS."""
    from penstock import demo as demos

    with errors():
        raise typer.Exit(demos.run(duration, rate, as_json))


if __name__ == "__main__":
    app()
