"""`penstock check`: what may be wrong before a run, and what mends it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer

from penstock.cli.common import CONFIG, AsJson, ConfigFile, StoreUrl, errors

if TYPE_CHECKING:
    from penstock.core.finding import Finding


def check(config: ConfigFile = CONFIG, store_url: StoreUrl = None, as_json: AsJson = False) -> None:
    """Inspect everything before anything starts: Java, Postgres, NATS, the store."""
    from penstock.check import config as checks

    with errors():
        report = checks.inspect(config, store=store_url)
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "findings": [finding.as_json() for finding in report.findings],
                    "errors": report.count("error"),
                    "warnings": report.count("warning"),
                }
            )
        )
    else:
        _print_findings(report.findings)
        typer.echo(f"errors: {report.count('error')}, warnings: {report.count('warning')}")
    raise typer.Exit(int(report.count("error") > 0))


def _print_findings(findings: Iterable[Finding]) -> None:
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
