"""Postgres changes as a streaming DataFrame, filtered with Spark SQL, into NATS JetStream.

    DATABASE_URL=postgresql://… NATS_URL=nats://… python examples/changes_to_jetstream.py [--once]

The database needs `wal_level = logical`; the JetStream stream must capture `shop.>`:
`nats stream add SHOP --subjects "shop.>" --storage file --dupe-window 2m --defaults`.
"""

from __future__ import annotations

import os
import sys

from pyspark.sql import functions as F  # noqa: N812

from penstock.spark import JetStream, PostgresChanges
from penstock.spark.session import create

spark = create("local[*]", app="changes-to-jetstream")
spark.dataSource.register(PostgresChanges)
spark.dataSource.register(JetStream)

changes = (
    spark.readStream.format("postgres-changes")
    .options(
        url=os.environ["DATABASE_URL"],
        tables="public.orders, public.customers",
        slot="penstock_example",
    )
    .load()
)

# `record` is JSON text: from_json, get_json_object and VARIANT all work on it.
paid = changes.where(
    (F.col("metadata.table_name") != "orders") | (F.get_json_object("record", "$.status") == "paid")
)

writer = (
    paid.writeStream.format("jetstream")
    .options(url=os.environ.get("NATS_URL", "nats://localhost:4222"))
    .options(subject="shop.{table}.{action}")
    .option("checkpointLocation", ".penstock/example")
)
if "--once" in sys.argv:
    writer = writer.trigger(availableNow=True)  # deliver what is there, and end
writer.start().awaitTermination()
