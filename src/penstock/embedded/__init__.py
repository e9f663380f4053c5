"""Postgres and NATS for development and tests, from PyPI wheels."""
