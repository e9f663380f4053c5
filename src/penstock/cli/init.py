"""`penstock init`: a commented configuration to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.common import CONFIG, fail


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
