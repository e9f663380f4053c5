"""`penstock warm`: makes what later starts are faster with."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.common import errors


def warm(
    background: Annotated[
        bool,
        typer.Option(
            "--background",
            help="At the lowest priority, and only if no other process does.",
            hidden=True,
        ),
    ] = False,
) -> None:
    """Make the cache by which Spark starts faster; for images, as the first run makes it too."""
    with errors():
        from penstock.spark import aot_training

        path = aot_training.make(background=background)
    if path is not None and not background:  # what that prints is why it has failed
        typer.echo(f"{path}: {path.stat().st_size >> 20} MiB")
