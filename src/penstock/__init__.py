"""Penstock: Postgres changes, through Spark, into messages that workers can rely on."""

__version__ = "0.1.0"
