"""Penstock in memory, for the tests of those who use it: no server, no Spark, no waiting.

`InMemoryPenstock` takes a configuration. Changes made to its tables become messages, pass through each
sink's transform, and are received from streams, over HTTP as well. Encoders, transforms, consumers and
the HTTP API are Penstock's own; only Postgres, NATS, Spark and the network are left out. See
docs/how-to/testing.md.
"""

from penstock.postgres.pgoutput import UNCHANGED
from penstock.testing.client import Transport
from penstock.testing.clock import Clock
from penstock.testing.consumer import InMemoryConsumer
from penstock.testing.consumers import InMemoryConsumers
from penstock.testing.penstock import InMemoryPenstock
from penstock.testing.sink import InMemorySink, Sent, UnsupportedError
from penstock.testing.source import InMemorySource, InMemoryTable
from penstock.testing.stream import InMemoryStream, StreamRow
from penstock.testing.sync import ApiAnswer, ApiRequest, InMemorySync

__all__ = [
    "UNCHANGED",
    "ApiAnswer",
    "ApiRequest",
    "Clock",
    "InMemoryConsumer",
    "InMemoryConsumers",
    "InMemoryPenstock",
    "InMemorySink",
    "InMemorySource",
    "InMemoryStream",
    "InMemorySync",
    "InMemoryTable",
    "Sent",
    "StreamRow",
    "Transport",
    "UnsupportedError",
]
