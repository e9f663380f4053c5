"""The demo's configuration: what the pipeline starts with, and what is added while it runs."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from penstock.demo.fake_stripe import FakeStripeServer

PipelineCommand = Callable[[Path, str], list[str]]
"""Takes the configuration file and the address to listen on, gives the command to run."""

CONFIG: Final = """\
sources:
  shop:
    type: postgres
    url: {postgres}
    tables: ["public.*"]
    slot: penstock_demo
    publication: penstock_demo
sinks:
  jetstream:
    type: nats
    source: shop
    url: {nats}
    subject: "shop.{{schema}}.{{table}}.{{action}}"
  {stream}:
    type: stream
    source: shop
store: {store}
spark:
  master: local[*]
  checkpoint: {folder}/checkpoints
"""
_API_EVENTS: Final = """\
sinks:
  api_events:
    type: nats
    source: syncs
    url: {nats}
    subject: "shop.api.{{collection_id}}.{{event_type}}"
"""


def sync_of(api: FakeStripeServer, nats: str) -> str:
    """Return what makes a sync of the fake API, and a sink of its events."""
    return _API_EVENTS.format(nats=nats) + api.settings


def penstock_command(config: Path, listen: str) -> list[str]:
    """Return the command of the real pipeline."""
    return [sys.executable, "-m", "penstock", "run", "-c", str(config), "--listen", listen]
