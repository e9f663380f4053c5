"""`penstock export`: the desired state as a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.common import CONFIG, ConfigFile, StoreUrl, errors


def export(
    config: ConfigFile = CONFIG,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the file here.")] = None,
    store_url: StoreUrl = None,
) -> None:
    """Write the desired state as a configuration file; secrets are variables in it."""
    from penstock.cli.store import store_of
    from penstock.config import STORE_VARIABLE
    from penstock.config.file import has_content, load_store
    from penstock.config.reader import Reader
    from penstock.core.errors import ConfigError
    from penstock.desired.export import exported
    from penstock.desired.state import DesiredState

    with errors():
        with store_of(config, store_url) as store:
            snapshot = DesiredState(store).read()
        settings: Any = {}
        if not has_content(config):
            if load_store(config, given=store_url, embedded=True).store is not None:
                settings = {"store": f"${{{STORE_VARIABLE}}}"}
        else:
            settings = Reader.of_file(config, os.environ).document.written
        text = exported(snapshot, settings if isinstance(settings, dict) else {})
        if out is None:
            typer.echo(text, nl=False)
            return
        try:
            out.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError([f"{out}: can't be written: {error.strerror}"]) from None
