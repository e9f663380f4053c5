"""Conditions in Postgres' own SQL, over messages that a stream of the store has."""
