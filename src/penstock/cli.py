"""The `penstock` command. Imports of the product's parts wait until a command needs them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from penstock import __version__

app = typer.Typer(
    help="Postgres changes, through Spark, into NATS JetStream.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigFile = Annotated[
    Path, typer.Option("--config", "-c", help="The configuration file.", show_default=True)
]
Listen = Annotated[str, typer.Option(help="Where `penstock run` serves HTTP, as host:port.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]

_CONFIG: Final = Path("penstock.yaml")
_LISTEN: Final = "127.0.0.1:7380"
# Errors that say what to do themselves, by the module that has them, with the exit code.
_KNOWN: Final = (
    ("penstock.config", "ConfigError", 2),
    ("penstock.postgres.errors", "CaptureError", 1),
    ("penstock.sinks.base", "SinkError", 1),
    ("penstock.api.server", "ListenError", 1),
    ("penstock.embedded.process", "EmbeddedError", 1),
)


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """End with a message and an exit code, not a traceback, where the error says what to do."""
    try:
        yield
    except Exception as error:
        for module, name, code in _KNOWN:
            # A class whose module nobody imported cannot have been raised.
            kind = getattr(sys.modules.get(module), name, None)
            if kind is not None and isinstance(error, kind):
                typer.echo(str(error), err=True)
                raise typer.Exit(code) from None
        raise


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Postgres changes, through Spark, into NATS JetStream."""


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="The file to write.")] = _CONFIG,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Write a commented configuration to start from."""
    from importlib.resources import files  # noqa: PLC0415

    text = files("penstock").joinpath("template.yaml").read_text(encoding="utf-8")
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        message = f"{path} is there already: choose another name, or overwrite with --force"
        typer.echo(message, err=True)
        raise typer.Exit(1) from None
    except OSError as error:
        typer.echo(f"{path} cannot be written: {error.strerror}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"Wrote {path}. Edit it, then: penstock check -c {path}")


@app.command()
def check(config: ConfigFile = _CONFIG, as_json: AsJson = False) -> None:
    """Inspect everything before anything starts: Java, Postgres, NATS."""
    from penstock import check as checks  # noqa: PLC0415

    with _errors():
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
    from rich.console import Console  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    # Statements are there to be pasted, so lines are not folded to the terminal's width.
    console = Console(soft_wrap=True, highlight=False)
    marks = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "error": ("✗", "bold red")}
    for finding in findings:
        mark, style = marks[finding.level]
        console.print(Text.assemble((mark, style), f" {finding.subject}: {finding.message}"))
        for line in finding.fix.splitlines():
            console.print(Text(f"    {line}", style="dim"))


@app.command()
def status(config: ConfigFile = _CONFIG, listen: Listen = _LISTEN, as_json: AsJson = False) -> None:
    """Show each source's slot and lag, and what a running pipeline delivered."""
    from penstock import status as statuses  # noqa: PLC0415
    from penstock.config import load  # noqa: PLC0415

    with _errors():
        report = statuses.collect(load(config), listen)
    if as_json:
        typer.echo(json.dumps(report))
    else:
        statuses.show(report)
    raise typer.Exit(int(statuses.has_errors(report)))


@app.command()
def run(
    config: ConfigFile = _CONFIG,
    once: Annotated[bool, typer.Option("--once", help="Deliver what is there, then end.")] = False,
    listen: Annotated[
        str, typer.Option(help="Serve /healthz, /readyz, /status and /metrics here.")
    ] = _LISTEN,
) -> None:
    """Capture and deliver in the foreground, until SIGTERM or Ctrl-C."""
    from penstock.config import load  # noqa: PLC0415

    with _errors():
        loaded = load(config)  # before Spark is imported: a typing error should show at once
        from penstock import run as runs  # noqa: PLC0415

        raise typer.Exit(runs.run(loaded, once=once, listen=listen))


@app.command()
def demo(
    duration: Annotated[float, typer.Option(min=1, help="Seconds to write for.")] = 30,
    rate: Annotated[int, typer.Option(min=1, help="Rows written a second.")] = 500,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON; the last line is the summary.")
    ] = False,
) -> None:
    """Run a small shop through an embedded Postgres, the real pipeline and NATS."""
    from penstock import demo as demos  # noqa: PLC0415

    with _errors():
        raise typer.Exit(demos.run(duration, rate, as_json))


if __name__ == "__main__":
    app()
