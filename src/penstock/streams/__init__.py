"""Streams in Postgres: durable logs, and the consumers that read them."""
