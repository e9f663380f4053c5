"""The demo's configuration, but for its sync: `fake_stripe.SETTINGS`."""

from typing import Final

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
  api_events:
    type: nats
    source: syncs
    url: {nats}
    subject: "shop.api.{{collection_id}}.{{event_type}}"
store: {store}
spark:
  master: local[*]
  checkpoint: {folder}/checkpoints
"""
