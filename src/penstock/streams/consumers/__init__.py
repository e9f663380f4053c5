"""Consumers of a stream: their state, their decisions, their loop."""
